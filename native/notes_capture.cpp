#include "notes_capture.h"

#include "notes_kv.h"
#include "notes_memory.h"
#include "notes_rows.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

static std::string named(int32_t il) {
    return "layer " + std::to_string(il);
}

// Return the tensor under a view.
static const ggml_tensor * source(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// Return the tensor under views that are nodes of the graph, and under the rows of a state's cell.
static const ggml_tensor * origin(const ggml_tensor * t) {
    while (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_GET_ROWS) {
        t = t->src[0];
    }
    return source(t);
}

// Return the node that computes the content of a view.
static const ggml_tensor * computed(const ggml_tensor * t) {
    while (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW) {
        t = t->src[0];
    }
    return t;
}

// Index of the initial state among the sources of a known operation.
static int state_source(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_SSM_SCAN:          return 0;
        case GGML_OP_GATED_LINEAR_ATTN: return 4;
        case GGML_OP_GATED_DELTA_NET:   return 5;
        case GGML_OP_RWKV_WKV6:         return 5;
        case GGML_OP_RWKV_WKV7:         return 6;
        // S <- S d + X, as separate operations (lightning attention)
        case GGML_OP_ADD:               return node->src[0]->op == GGML_OP_MUL ? 0 : -1;
        default:                        return -1;
    }
}

notes_capture::notes_capture(llama_context & ctx, llama_seq_id seq) : memory(*notes_memory(ctx).recurrent), seq(seq) {
    if (seq < 0 || (uint32_t) seq >= ctx.n_seq_max()) {
        throw notes_failure(NOTES_E_ARGUMENT, "sequence " + std::to_string(seq) + " does not exist; the context has " + std::to_string(ctx.n_seq_max()));
    }
    ctx.synchronize();
    next = memory.seq_pos_max(seq) + 1;
    const int64_t at = row(memory, seq);
    for (size_t il = 0; il < memory.s_l.size(); ++il) {
        ggml_tensor * s = memory.s_l[il];
        if (!s || s->ne[0] == 0) {
            continue; // a convolution alone: a longer range of tokens replaces all of its state
        }
        layers.push_back({});
        layers.back().il = il;
        layers.back().before.resize(s->ne[0]);
        if (at >= 0) {
            ggml_backend_tensor_get(s, layers.back().before.data(), at*s->nb[1], s->nb[1]);
        }
    }
}

int64_t notes_capture::row(const llama_memory_recurrent & memory, llama_seq_id seq) {
    const int32_t tail = memory.cells[seq].tail;
    return tail < 0 ? -1 : memory.cells[tail].src; // < 0: zeroed when it is next used
}

void notes_capture::margins(const llama_context & ctx, int32_t & before, int32_t & after) {
    const auto & hparams = ctx.get_model().hparams;
    before = after = 0;
    if (hparams.wkv_head_size != 0) { // token shift: the input is mixed with that of the preceding token
        before = 1;
        after  = hparams.token_shift_count > 1 ? 2 : 0; // the feed-forward has a shift, too, and depends on the state
        return;
    }
    before = std::max({ (int32_t) hparams.ssm_d_conv - 1, (int32_t) hparams.n_shortconv_l_cache - 1, 0 });
    if (hparams.n_embd_head_kda != 0 && hparams.ssm_d_conv == 0) {
        before = 3;
    }
    if (hparams.ple_conv_state() > 0) { // embeddings of n-grams, which pass another convolution first
        before += hparams.ple_conv_kernel*hparams.ple_ngram_size - 1;
    }
}

ggml_tensor * notes_capture::root(const layer & layer) const {
    return memory.s_l[layer.il];
}

notes_capture::layer * notes_capture::layer_of(const ggml_tensor * state) {
    for (auto & layer : layers) {
        if (root(layer) == state) {
            return &layer;
        }
    }
    return nullptr;
}

// The identity: n ones, or identity matrices of `head` rows.
void notes_capture::begin(layer & layer, int32_t form, int64_t n, int64_t run, int64_t head) {
    if (layer.a) {
        if (layer.form != form || layer.run != run || layer.head != head) {
            throw notes_failure(NOTES_E_UNSUPPORTED, named(layer.il) + " is computed in several ways");
        }
        return;
    }
    if (n*run != (int64_t) layer.before.size() || (form == NOTES_FORM_MATRIX && n % (head*head) != 0)) {
        throw notes_failure(NOTES_E_UNSUPPORTED, "the transition of " + named(layer.il) + " does not fit its state");
    }
    ggml_init_params params = { ggml_tensor_overhead(), nullptr, true };
    ggml_context_ptr ctx(ggml_init(params));
    ggml_tensor * a = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_buffer_get_type(root(layer)->buffer)));
    if (!buffer) {
        throw notes_failure(NOTES_E_DECODE, "no memory for the transition of " + named(layer.il));
    }
    std::vector<float> one(n, form == NOTES_FORM_DIAGONAL ? 1.0f : 0.0f);
    for (int64_t i = 0; form == NOTES_FORM_MATRIX && i < n; ++i) {
        one[i] = i/head % head == i % head;
    }
    ggml_backend_tensor_set(a, one.data(), 0, n*sizeof(float));
    ggml_set_name(a, "notes_transition");
    layer.form = form;
    layer.run  = run;
    layer.head = head;
    layer.a    = a;
    buffers.emplace_back(std::move(ctx), std::move(buffer));
}

// Add nodes that update A for the recurrence of `node`; return the last one.
ggml_tensor * notes_capture::transition(ggml_context * ctx0, layer & layer, ggml_tensor * node) {
    const int64_t n = layer.before.size();
    const auto zeros = [&](ggml_tensor * like) { // of that shape, contiguous
        return ggml_fill(ctx0, ggml_is_contiguous(like) ? like : ggml_cont(ctx0, like), 0.0f);
    };
    const auto state = [&](const ggml_tensor * like) {
        return ggml_reshape_4d(ctx0, layer.a, like->ne[0], like->ne[1], like->ne[2], like->ne[3]);
    };
    const auto tail = [&](ggml_tensor * t) { // the state after the last token in an operation's output
        return ggml_view_1d(ctx0, t, n, ggml_nbytes(t) - n*sizeof(float));
    };
    ggml_tensor ** src = node->src;
    ggml_tensor *  res = nullptr;

    switch (node->op) {
        case GGML_OP_SSM_SCAN: {
            // exp(A dt_1) exp(A dt_2) ... = exp(A (dt_1 + dt_2 + ...)), which needs no second scan
            const int64_t d_state = src[0]->ne[0];
            const int64_t dim     = src[0]->ne[1];
            const int64_t n_head  = src[0]->ne[2];
            const int64_t per     = src[3]->ne[0];
            if (ggml_get_op_params_i32(node, 0) != 1 || (per != 1 && dim != 1)) {
                throw notes_failure(NOTES_E_UNSUPPORTED, named(layer.il) + " scans in a way that has not been measured");
            }
            begin(layer, NOTES_FORM_DIAGONAL, per*n_head, per == 1 ? d_state*dim : 1, 0);
            ggml_tensor * dt = ggml_softplus(ctx0, src[2]); // {n_head, n_tokens}
            dt  = ggml_sum_rows(ctx0, ggml_cont(ctx0, ggml_transpose(ctx0, ggml_reshape_2d(ctx0, dt, n_head, ggml_nelements(dt)/n_head))));
            res = ggml_exp(ctx0, ggml_mul(ctx0, src[3], dt)); // {per, n_head}
            res = ggml_mul(ctx0, ggml_reshape_2d(ctx0, layer.a, per, n_head), res);
        } break;
        case GGML_OP_GATED_DELTA_NET: {
            if (ggml_get_op_params_i32(node, 0) != 1 || src[5]->ne[3] != 1) {
                throw notes_failure(NOTES_E_UNSUPPORTED, named(layer.il) + " keeps several states");
            }
            begin(layer, NOTES_FORM_MATRIX, n, 1, src[5]->ne[0]);
            res = tail(ggml_gated_delta_net(ctx0, src[0], src[1], zeros(src[2]), src[3], src[4], state(src[5]), 1));
        } break;
        case GGML_OP_RWKV_WKV6: {
            const int64_t head = src[0]->ne[0];
            begin(layer, NOTES_FORM_DIAGONAL, n, 1, head);
            res = tail(ggml_rwkv_wkv6(ctx0, src[0], zeros(src[1]), src[2], src[3], src[4], state(src[5])));
        } break;
        case GGML_OP_GATED_LINEAR_ATTN: {
            const int64_t head = src[0]->ne[0];
            begin(layer, NOTES_FORM_DIAGONAL, n, 1, head);
            res = tail(ggml_gated_linear_attn(ctx0, src[0], zeros(src[1]), src[2], src[3], state(src[4]), ggml_get_op_params_f32(node, 0)));
        } break;
        case GGML_OP_RWKV_WKV7: {
            const int64_t head = src[0]->ne[0];
            begin(layer, NOTES_FORM_MATRIX, n, 1, head);
            res = tail(ggml_rwkv_wkv7(ctx0, src[0], src[1], src[2], zeros(src[3]), src[4], src[5], state(src[6])));
        } break;
        case GGML_OP_ADD: {
            ggml_tensor * mul    = src[0];
            ggml_tensor * factor = mul->src[1];
            int64_t run = 1; // elements that share a factor
            int     dim = 0;
            for (; dim < GGML_MAX_DIMS && factor->ne[dim] == 1; ++dim) {
                run *= mul->ne[dim];
            }
            for (; dim < GGML_MAX_DIMS; ++dim) {
                if (factor->ne[dim] != mul->ne[dim]) {
                    throw notes_failure(NOTES_E_UNSUPPORTED, named(layer.il) + " decays in a way that has not been measured");
                }
            }
            begin(layer, NOTES_FORM_DIAGONAL, ggml_nelements(factor), run, 0);
            res = ggml_mul(ctx0, layer.a, ggml_reshape_1d(ctx0, ggml_is_contiguous(factor) ? factor : ggml_cont(ctx0, factor), ggml_nelements(factor)));
        } break;
        default:
            throw notes_failure(NOTES_E_UNSUPPORTED, named(layer.il) + " is computed by " + ggml_op_name(node->op));
    }
    return ggml_cpy(ctx0, ggml_reshape_1d(ctx0, res, ggml_nelements(res)), layer.a);
}

// True if `node` depends on the state of a layer, which no node before `first` reads.
bool notes_capture::depends(const order & order, const layer & layer, const ggml_tensor * node, int first) const {
    std::set<const ggml_tensor *> seen;
    std::vector<const ggml_tensor *> open { node };
    while (!open.empty()) {
        const ggml_tensor * t = open.back();
        open.pop_back();
        if (source(t) == root(layer)) {
            return true;
        }
        const auto at = order.find(t);
        if (at == order.end() || at->second < first || !seen.insert(t).second) {
            continue;
        }
        for (int s = 0; s < GGML_MAX_SRC; ++s) {
            if (t->src[s]) {
                open.push_back(t->src[s]);
            }
        }
    }
    return false;
}

void notes_capture::extend(llm_graph_result & res, const llama_ubatch & ubatch) {
    bool ours = false;
    for (uint32_t s = 0; s < ubatch.n_seqs_unq; ++s) {
        ours |= ubatch.seq_id_unq[s] == seq;
    }
    if (!ours || !broken.empty()) {
        return;
    }
    try {
        if (ubatch.n_seqs_unq != 1 || ubatch.n_seqs != 1) {
            throw notes_failure(NOTES_E_UNSUPPORTED, "several sequences were decoded at once");
        }
        if (ubatch.pos[0] != next) {
            throw notes_failure(NOTES_E_POSITION, "position " + std::to_string(ubatch.pos[0]) + " was decoded, not " + std::to_string(next));
        }
        ggml_cgraph  & graph = *res.get_gf();
        ggml_context * ctx0  = res.get_ctx();

        constexpr int MOST = 16; // new nodes per layer
        const int room = MOST*(int) layers.size();
        if (graph.size - graph.n_nodes - graph.n_leafs < room || ggml_get_mem_size(ctx0) - ggml_used_mem(ctx0) < room*(ggml_tensor_overhead() + 64)) {
            throw notes_failure(NOTES_E_UNSUPPORTED, "there is no room in the graph of this model for what computes it");
        }

        // Every state must be written once, by a known operation that starts from it.
        struct found { layer * of; ggml_tensor * node; int after; };
        std::vector<found> all;
        const int n_nodes = graph.n_nodes;
        order places;
        std::map<const layer *, int> first_use;
        for (int i = 0; i < n_nodes; ++i) {
            ggml_tensor * node = graph.nodes[i];
            places[node] = i;
            for (int s = 0; s < GGML_MAX_SRC && node->src[s]; ++s) {
                if (const layer * of = layer_of(node->src[s])) {
                    first_use.emplace(of, i);
                }
            }
            if (node->op != GGML_OP_CPY || ggml_nelements(node) == 0) {
                continue;
            }
            layer * of = layer_of(source(node->src[1]));
            if (!of || node->src[0]->op == GGML_OP_GET_ROWS) { // those of other sequences, moved
                continue;
            }
            auto *    op    = const_cast<ggml_tensor *>(computed(node->src[0]));
            const int state = state_source(op);
            const ggml_tensor * first = state < 0 ? nullptr : op->op == GGML_OP_ADD ? op->src[0]->src[0] : op->src[state];
            if (!first || origin(first) != root(*of)) {
                throw notes_failure(NOTES_E_UNSUPPORTED, "the state of " + named(of->il) + " comes from " + ggml_op_name(op->op) + ", which is not known");
            }
            for (const auto & other : all) {
                if (other.of == of) {
                    throw notes_failure(NOTES_E_UNSUPPORTED, "the state of " + named(of->il) + " is written more than once");
                }
            }
            for (int s = 0; s < GGML_MAX_SRC; ++s) {
                const ggml_tensor * input = op->op == GGML_OP_ADD && s == 0 ? op->src[0]->src[1] : op->src[s];
                if (input && (s != state || op->op == GGML_OP_ADD) && depends(places, *of, input, first_use[of])) {
                    throw notes_failure(NOTES_E_UNSUPPORTED, "the inputs of " + named(of->il) + " depend on its state");
                }
            }
            all.push_back({ of, op, i });
        }
        if (all.size() != layers.size()) {
            throw notes_failure(NOTES_E_UNSUPPORTED, "the states of " + std::to_string(layers.size() - all.size()) + " of " + std::to_string(layers.size()) + " layers are not written by the graph");
        }

        // Computed next to its layer, since at the end of the graph the inputs of all layers would have to be kept.
        const std::vector<ggml_tensor *> before(graph.nodes, graph.nodes + n_nodes);
        std::vector<int> ends { n_nodes };
        for (const auto & each : all) {
            ggml_build_forward_expand(&graph, transition(ctx0, *each.of, each.node));
            ends.push_back(graph.n_nodes);
        }
        const std::vector<ggml_tensor *> added(graph.nodes + n_nodes, graph.nodes + graph.n_nodes);
        int to = 0;
        size_t next_found = 0;
        for (int i = 0; i < n_nodes; ++i) {
            graph.nodes[to++] = before[i];
            for (; next_found < all.size() && all[next_found].after == i; ++next_found) {
                for (int k = ends[next_found]; k < ends[next_found + 1]; ++k) {
                    graph.nodes[to++] = added[k - n_nodes];
                }
            }
        }
        next     += ubatch.n_tokens;
        n_tokens += ubatch.n_tokens;
    } catch (const std::exception & e) {
        broken = e.what();
    }
}

void notes_capture::read(llama_context & ctx, const std::vector<int32_t> & wanted, notes_transition * out) const {
    if (!broken.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, "what the tokens do to the state cannot be captured: " + broken);
    }
    if (n_tokens == 0 || memory.seq_pos_max(seq) + 1 != next) {
        throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(seq) + " ends at position " + std::to_string(memory.seq_pos_max(seq)) +
                ", and what was captured at " + std::to_string(next - 1));
    }
    ctx.synchronize();
    const int64_t at = row(memory, seq);
    for (size_t i = 0; i < wanted.size(); ++i) {
        const auto found = std::find_if(layers.begin(), layers.end(), [&](const layer & layer) { return layer.il == wanted[i]; });
        notes_transition & to = out[i];
        if (found == layers.end() || !found->a) {
            to.form = NOTES_FORM_NONE;
            to.n_a = to.run = to.head = 0;
            continue;
        }
        // WKV6 and GLA have one factor per row of a head's matrix: keep only these.
        const int64_t n    = ggml_nelements(found->a);
        const int64_t each = found->form == NOTES_FORM_DIAGONAL && found->head ? found->head : 1;
        to.form = found->form;
        to.n_a  = n/each;
        to.run  = found->run*each;
        to.head = found->form == NOTES_FORM_MATRIX ? found->head : 0;
        if (!to.a || !to.b) {
            continue;
        }
        std::vector<float> a(n);
        ggml_backend_tensor_get(found->a, a.data(), 0, n*sizeof(float));
        for (int64_t k = 0; k < n; ++k) {
            if (!std::isfinite(a[k])) {
                throw notes_failure(NOTES_E_NOT_FINITE, "the transition of " + named(found->il) + " is not finite");
            }
            if (a[k] != a[k - k % each]) {
                throw notes_failure(NOTES_E_UNSUPPORTED, named(found->il) + " decays in a way that has not been measured");
            }
            to.a[k/each] = a[k];
        }
        const int64_t size = found->before.size();
        std::vector<float> end(size), moved(size);
        if (at < 0) {
            throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(seq) + " has no state");
        }
        ggml_backend_tensor_get(root(*found), end.data(), at*size*sizeof(float), size*sizeof(float));
        std::fill_n(to.b, size, 0.0f);
        apply(to, found->before.data(), moved.data(), size);
        for (int64_t k = 0; k < size; ++k) {
            to.b[k] = end[k] - moved[k];
        }
    }
}

void notes_capture::apply(const notes_transition & transition, const float * in, float * out, int64_t n) {
    if (transition.form == NOTES_FORM_DIAGONAL) {
        for (int64_t i = 0; i < n; ++i) {
            out[i] = (float) ((double) transition.a[i/transition.run]*in[i] + transition.b[i]);
        }
        return;
    }
    const int64_t head = transition.head;
    for (int64_t first = 0; first < n; first += head*head) { // rows are values: S A
        notes_loops().product(in + first, transition.a + first, transition.b + first, out + first, head);
    }
}
