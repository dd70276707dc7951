// Splices that propagate the state of recurrent layers: notes_kv::carry, and the C interface of the patch group `recurrent`.
#include "notes_carry.h"

#include "notes_call.h"
#include "notes_capture.h"
#include "notes_cells.h"
#include "notes_graph.h"
#include "notes_kv.h"

#include "llama-context.h"
#include "llama-memory-recurrent.h"

std::string notes_kv::carry_refusal(const llama_context & ctx, const notes_memory & memory) {
    for (size_t il = 0; il < memory.recurrent->s_l.size(); ++il) {
        const ggml_tensor * s = memory.recurrent->s_l[il];
        if (s && s->ne[0] > 0 && (s->type != GGML_TYPE_F32 || !ggml_backend_buffer_is_host(s->buffer))) {
            return "the state of layer " + std::to_string(il) + " is not kept in f32 in this machine's memory, where alone carrying it has been measured";
        }
    }
    return notes_graph_carry_refusal(ctx);
}

std::shared_ptr<notes_capture> & notes_kv::capture(llama_context & ctx) {
    return ctx.capture;
}

std::vector<int32_t> notes_kv::states() const {
    std::vector<int32_t> res;
    for (const auto & layer : all) {
        res.push_back(layer.kind == NOTES_RECURRENT ? layer.il : -1);
    }
    return res;
}

void notes_kv::carry(llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n, const notes_rows * rows, const notes_transition * transitions, int32_t n_layers, llama_pos base) {
    check_seq(ctx, seq);
    if (n_layers != (int32_t) all.size()) {
        throw notes_failure(NOTES_E_ARGUMENT, "rows of " + std::to_string(n_layers) + " layers given, the memory has " + std::to_string(all.size()));
    }
    const auto & mem = *memory.recurrent;
    if (capture(ctx)) {
        throw notes_failure(NOTES_E_ARGUMENT, "this context captures what tokens do to a state, and these are not decoded");
    }
    settle();
    const int64_t at = notes_capture::row(mem, seq);

    std::vector<notes_rows>         given(rows, rows + n_layers);
    std::vector<std::vector<float>> states(n_layers);
    for (int32_t i = 0; i < n_layers; ++i) {
        const auto what = shape(all[i]);
        const int64_t size = what.kind == NOTES_RECURRENT ? what.n_embd_v : 0;
        const auto & t = transitions[i];
        const int64_t head = t.head;
        const bool fits = t.form == NOTES_FORM_NONE ? size == 0 : size > 0 && t.a && t.b && (
            t.form == NOTES_FORM_DIAGONAL ? t.n_a > 0 && t.run > 0 && (int64_t) t.n_a*t.run == size :
            t.form == NOTES_FORM_MATRIX && t.n_a == size && head > 0 && size % (head*head) == 0);
        if (!fits) {
            throw notes_failure(NOTES_E_ARGUMENT, "the transition of layer " + std::to_string(what.layer) + " does not fit its state");
        }
        if (size == 0) {
            continue;
        }
        std::vector<float> before(size);
        if (at >= 0) {
            ggml_backend_tensor_get(mem.s_l[what.layer], before.data(), at*size*sizeof(float), size*sizeof(float));
        }
        states[i].resize(size);
        notes_capture::apply(t, before.data(), states[i].data(), size);
        given[i].v = states[i].data();
    }
    splice(seq, p0, tokens, n, nullptr, { given.data(), nullptr }, n_layers, base, true);
}

//
// the C interface
//

bool notes_can_carry(llama_context * ctx, llama_pos base, llama_pos p0, int32_t n) {
    if (!ctx) {
        null_argument();
        return false;
    }
    return guarded([&] {
        notes_kv(*ctx, NOTES_CARRY).check_move(base, p0, n);
        return NOTES_OK;
    }) == NOTES_OK;
}

int32_t notes_margins(llama_context * ctx, int32_t * before, int32_t * after) {
    if (!ctx || !before || !after) {
        return null_argument();
    }
    return guarded([&] {
        notes_capture::margins(*ctx, *before, *after);
        return NOTES_OK;
    });
}

int32_t notes_capture_begin(llama_context * ctx, llama_seq_id seq) {
    if (!ctx) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv(*ctx, NOTES_CARRY);
        notes_kv::capture(*ctx) = std::make_shared<notes_capture>(*ctx, seq);
        return NOTES_OK;
    });
}

int32_t notes_captured(llama_context * ctx, notes_transition * out, int32_t n_layers) {
    if (!ctx || !out) {
        return null_argument();
    }
    return guarded([&] {
        const auto & capture = notes_kv::capture(*ctx);
        const auto   layers  = notes_kv(*ctx, NOTES_CARRY).states();
        if (!capture || n_layers != (int32_t) layers.size()) {
            throw notes_failure(NOTES_E_ARGUMENT, !capture ? "nothing is captured" : "there are " + std::to_string(layers.size()) + " layers");
        }
        capture->read(*ctx, layers, out);
        return NOTES_OK;
    });
}

void notes_capture_end(llama_context * ctx) {
    if (ctx) {
        notes_kv::capture(*ctx).reset();
    }
}

int32_t notes_carry(llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n,
        const notes_rows * rows, const notes_transition * transitions, int32_t n_layers, llama_pos base) {
    if (!ctx || !tokens || !rows || !transitions) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv(*ctx, NOTES_CARRY).carry(seq, p0, tokens, n, rows, transitions, n_layers, base);
        return NOTES_OK;
    });
}
