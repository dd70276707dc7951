// Capabilities of a context; splice and read.
#include "notes_kv.h"

#include "notes_cells.h"
#include "notes_file.h"
#include "notes_graph.h"
#include "notes_rope.h"
#include "notes_rows.h"

#include "llama-adapter.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-recurrent.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <utility>

std::atomic<int64_t> notes_kv::stored_bytes { 0 };

//
// capabilities of a context
//

std::string notes_kv::adapters(const llama_context & ctx) {
    std::string res;
    for (const auto & [lora, scale] : *ctx.loras) {
        char text[64];
        snprintf(text, sizeof(text), "%sa LoRA adapter at scale %g", res.empty() ? "" : " and ", scale);
        res += text;
    }
    for (uint32_t il = 0; il < ctx.get_model().hparams.n_layer(); ++il) {
        if (ctx.cvec->tensor_for(il)) {
            return res + (res.empty() ? "" : " and ") + "a control vector";
        }
    }
    return res;
}

const notes_row_loops & notes_loops() {
    static const auto & loops = [] () -> const notes_row_loops & {
        ggml_backend_reg_t cpu = ggml_backend_reg_by_name("CPU");
        const void * found = cpu ? ggml_backend_reg_get_proc_address(cpu, "notes_row_loops") : nullptr;
        if (!found) {
            throw notes_failure(NOTES_E_UNSUPPORTED, "the CPU backend that ggml has loaded is not that of notes");
        }
        return *(const notes_row_loops *) found;
    }();
    return loops;
}

std::string notes_kv::refusal(llama_context & ctx, notes_op op) {
    // Rows depend on the weights with which they were computed, and the identity of weights is a file's digest.
    if (const std::string added = adapters(ctx); !added.empty()) {
        return "this context computes with " + added + ", and rows are known by the model's file alone. Take it off the "
            "context, or merge a LoRA into the model (llama-export-lora)";
    }
    if (const std::string bug = notes_graph_bug(ctx, 1); !bug.empty()) {
        return bug;
    }
    const notes_memory memory(ctx);

    if (!ctx.get_memory() || op != NOTES_APPEND) {
        if (!memory.unknown.empty()) {
            return memory.unknown;
        }
    }
    if (op == NOTES_APPEND) {
        return "";
    }

    if (ctx.get_cparams().n_seq_max >= LLAMA_MAX_SEQ) {
        return "the context uses every sequence id there is (n_seq_max = " + std::to_string(LLAMA_MAX_SEQ) + ")";
    }
    for (const auto & cache : memory.caches) {
        if (cache.kv->other) {
            return "this context shares the cache of another one";
        }
        for (const auto & layer : cache.kv->layers) {
            for (const ggml_tensor * t : { layer.k, layer.v }) {
                if (t && !notes_loops().can(t->type)) {
                    return std::string("rows of type ") + ggml_type_name(t->type) + " cannot be converted";
                }
            }
        }
    }
    if (memory.recurrent && memory.recurrent->n_rs_seq > 0) {
        return "this context keeps several recurrent states a sequence";
    }

    if (memory.recurrent && op == NOTES_REWRITE) {
        return "this model has recurrent layers, and their state at an earlier position is gone";
    }
    if (memory.recurrent && op == NOTES_SPLICE) {
        return "this model has recurrent layers, and their state cannot be moved";
    }
    if (!memory.recurrent && op == NOTES_CARRY) {
        return "this model has no recurrent layers: its rows are spliced";
    }
    const std::string why = notes_graph_refusal(ctx);
    if (!why.empty()) {
        return why;
    }
    return op == NOTES_CARRY ? carry_refusal(ctx, memory) : op == NOTES_SPLICE ? notes_graph_move_refusal(ctx) : "";
}

#ifndef NOTES_WITH_RECURRENT
std::string notes_kv::carry_refusal(const llama_context &, const notes_memory &) {
    return "this library was built without the patch group 'recurrent', which carries the state of recurrent layers through a splice";
}
#endif

notes_kv::notes_kv(llama_context & ctx, notes_op op) : ctx(ctx), memory(ctx) {
    const std::string why = refusal(ctx, op);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }

    for (size_t c = 0; c < memory.caches.size(); ++c) {
        const auto & cache = memory.caches[c];
        if (cache.kind == NOTES_INDEXER && !notes_graph_uses_indexer(ctx)) {
            continue; // it is never written
        }
        for (size_t i = 0; i < cache.kv->layers.size(); ++i) {
            all.push_back({ cache.kind, (int32_t) cache.kv->layers[i].il, c, i });
        }
    }
    if (memory.recurrent) {
        for (size_t il = 0; il < memory.recurrent->r_l.size(); ++il) {
            if (memory.recurrent->r_l[il]) {
                all.push_back({ NOTES_RECURRENT, (int32_t) il, 0, 0 });
            }
        }
    }
    std::stable_sort(all.begin(), all.end(), [](const layer & a, const layer & b) { return std::tie(a.il, a.kind) < std::tie(b.il, b.kind); });
}

notes_rotation notes_kv::rotation(const layer & layer) const {
    return notes_layer_rotation(ctx, memory.caches[layer.cache].kv->hparams, layer.kind, layer.il);
}

notes_layer notes_kv::shape(const layer & layer) const {
    notes_layer res = {};
    res.layer = layer.il;
    res.kind  = layer.kind;
    res.rope  = LLAMA_ROPE_TYPE_NONE;

    if (layer.kind == NOTES_RECURRENT) {
        const auto & state = *memory.recurrent;
        const auto * p = state.p_l[layer.il];
        res.n_embd_k = state.r_l[layer.il]->ne[0] + (p ? p->ne[0] : 0);
        res.n_embd_v = state.s_l[layer.il]->ne[0];
        res.type_k   = state.r_l[layer.il]->type;
        res.type_v   = state.s_l[layer.il]->type;
        return res;
    }

    const auto & kv = *memory.caches[layer.cache].kv;
    const auto & at = kv.layers[layer.i];
    res.n_embd_k = at.k->ne[0];
    res.type_k   = at.k->type;
    if (at.v && layer.kind == NOTES_ATTENTION) {
        res.n_embd_v = kv.hparams.n_embd_v_gqa(layer.il); // the tensor may be wider: without flash attention all layers have one width
        res.type_v   = at.v->type;
    }
    return res;
}

std::vector<notes_layer> notes_kv::layers() const {
    std::vector<notes_layer> res;
    for (const auto & layer : all) {
        res.push_back(shape(layer));
        if (layer.kind != NOTES_RECURRENT) {
            const auto rot = rotation(layer);
            res.back().rope       = rot.type;
            res.back().n_rot      = rot.n_rot;
            res.back().freq_base  = rot.freq_base;
            res.back().freq_scale = rot.freq_scale;
            res.back().magnitude  = rot.magnitude;
        }
    }
    return res;
}

std::vector<double> notes_kv::frequencies(int32_t i) const {
    if (i < 0 || i >= (int32_t) all.size()) {
        throw notes_failure(NOTES_E_ARGUMENT, "there is no layer " + std::to_string(i));
    }
    return all[i].kind == NOTES_RECURRENT ? std::vector<double>() : rotation(all[i]).freq;
}

//
// splice and read
//

// Apply shifts and stream copies of stock calls, which llama.cpp defers to the next decode; rows are valid only after them.
void notes_kv::settle() const {
    ctx.sched_reserve();
    ctx.memory_update(false);
    ctx.synchronize();
    for (const auto & cache : memory.caches) {
        if (cache.kv->get_has_shift()) {
            throw notes_failure(NOTES_E_DECODE, "llama.cpp could not apply a pending shift of positions");
        }
    }
}

ggml_type notes_source::type(int32_t layer, bool v) const {
    return (ggml_type) (file ? file->tensor(layer, v).type : v ? rows[layer].type_v : rows[layer].type_k);
}

// `quantized`: quantized rows are allowed.
void notes_kv::check_rows(const notes_source & source, int32_t n_layers, int32_t n, bool quantized) const {
    if (n_layers != (int32_t) all.size()) {
        throw notes_failure(NOTES_E_ARGUMENT, "rows of " + std::to_string(n_layers) + " layers given, the memory has " + std::to_string(all.size()));
    }
    const auto * file = source.file;
    if (file && (file->first < 0 || n > (int64_t) file->n_rows - file->first)) {
        throw notes_failure(NOTES_E_ARGUMENT, "there are no " + std::to_string(n) + " rows from row " + std::to_string(file->first) + " on in a file of " + std::to_string(file->n_rows));
    }
    for (int32_t i = 0; i < n_layers; ++i) {
        const auto layer = shape(all[i]);
        const bool state = layer.kind == NOTES_RECURRENT;
        bool known = true;
        for (const bool v : { false, true }) {
            const int64_t n_embd = v ? layer.n_embd_v : layer.n_embd_k;
            if (n_embd == 0) {
                continue;
            }
            const auto type = source.type(i, v);
            known = known && (type == GGML_TYPE_F32 || (type == GGML_TYPE_F16 && !state) ||
                (type == GGML_TYPE_Q8_0 && !state && quantized && n_embd % ggml_blck_size(type) == 0));
            if (known && file) {
                const auto & tensor = file->tensor(i, v);
                known = tensor.offset >= 0 && tensor.size >= (state ? 1 : file->n_rows)*(int64_t) ggml_row_size(type, n_embd);
            } else if (!file) {
                known = known && (v ? source.rows[i].v : source.rows[i].k);
            }
        }
        if (!known) {
            throw notes_failure(NOTES_E_ARGUMENT, "rows of layer " + std::to_string(layer.layer) + " are missing or neither f16 nor f32" +
                    (quantized ? " nor whole blocks of q8_0" : "") + " (a state: f32)");
        }
    }
}

// True if a cache keeps all rows. That of sliding-window layers may drop rows that leave the window, whatever its size.
bool notes_kv::whole_window(size_t cache) const {
    return !memory.caches[cache].window || memory.caches[cache].kv->keep_masked;
}

// First position that a token at `pos` attends to in the layers of this cache.
llama_pos notes_kv::sees_from(const llama_kv_cache & kv, llama_pos pos) {
    const int64_t size = kv.n_swa;
    switch (kv.swa_type) {
        case LLAMA_SWA_TYPE_NONE:    return 0;
        case LLAMA_SWA_TYPE_CHUNKED: return pos/size*size;
        default:                     return std::max<int64_t>(0, pos - size + 1);
    }
}

// True if this cache has every row of the sequence at positions [p0, p1). The first cache keeps all rows.
bool notes_kv::keeps(const notes_memory & memory, size_t cache, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto & all  = memory.caches[0].kv->get_cells(seq).seq_pos_get(seq);
    const auto & here = memory.caches[cache].kv->get_cells(seq).seq_pos_get(seq);
    return std::equal(all.lower_bound({ p0, 0 }), all.lower_bound({ p1, 0 }), here.lower_bound({ p0, 0 }), here.lower_bound({ p1, 0 }),
            [](const auto & a, const auto & b) { return a.first == b.first; });
}

// True if the sliding-window layers have dropped a row that a token at `pos` attends to.
bool notes_kv::lacks_window(const notes_memory & memory, llama_seq_id seq, llama_pos pos) {
    for (size_t c = 0; c < memory.caches.size(); ++c) {
        const auto & cache = memory.caches[c];
        if (cache.window && !cache.kv->keep_masked && !keeps(memory, c, seq, sees_from(*cache.kv, pos), pos)) {
            return true;
        }
    }
    return false;
}

void notes_kv::check_move(llama_pos base, llama_pos p0, int32_t n) const {
    check_range(base, n);
    check_range(p0, n);
    const std::string why = p0 == base ? "" : notes_graph_move_refusal(ctx, base, p0, n);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
}

// Number of cells that find_slot could return if the sequence had dropped its rows below `first`.
int64_t notes_kv::room(size_t cache, llama_seq_id seq, int64_t first) const {
    const auto & kv    = *memory.caches[cache].kv;
    const auto & cells = kv.get_cells(seq);
    int64_t res = 0;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        bool free = cells.is_empty(i);
        if (!free && cells.seq_count(i) == 1) {
            const auto owner = cells.seq_get(i);
            free = (owner == seq && cells.pos_get(i) < first) ||
                (!kv.keep_masked && llama_hparams::is_masked_swa(kv.n_swa, kv.swa_type, cells.pos_get(i), cells.seq_pos_max(owner) + 1));
        }
        res += free;
    }
    return res;
}

std::vector<notes_kv::run> notes_kv::runs(const std::vector<uint32_t> & cells, int32_t first_row) {
    std::vector<run> res;
    for (size_t i = 0; i < cells.size(); ++i) {
        if (!res.empty() && res.back().cell + res.back().n == cells[i]) {
            res.back().n++;
        } else {
            res.push_back({ cells[i], first_row + (int32_t) i, 1 });
        }
    }
    return res;
}

void notes_kv::check_positions(const llama_pos * positions, int32_t n, llama_pos base) const {
    if (ctx.get_model().hparams.n_pos_per_embd() == 1) {
        throw notes_failure(NOTES_E_ARGUMENT, "this model's positions have one axis only");
    }
    for (int32_t i = 0; i < n; ++i) {
        const llama_pos * here = positions + 3*i;
        const bool after = i == 0 ? here[0] == base : !std::lexicographical_compare(here, here + 3, here - 3, here);
        if (!after || *std::min_element(here, here + 3) < base) {
            throw notes_failure(NOTES_E_ARGUMENT, "positions must begin at base and ascend");
        }
    }
}

// The ubatch of a decode of rows [first, n), to have find_slot assign cells (as in state_read_meta).
llama_ubatch notes_kv::ubatch(const llama_seq_id & seq, const llama_token * tokens, int32_t first, int32_t n, const std::function<llama_pos(int32_t, uint32_t)> & at) const {
    const uint32_t n_pos = ctx.get_model().hparams.n_pos_per_embd();
    llama_batch_allocr balloc(n_pos);
    llama_ubatch res = balloc.ubatch_reserve(n - first, 1);
    res.seq_id_unq[0] = seq;
    for (int32_t i = first; i < n; ++i) {
        const int32_t j = i - first;
        res.token   [j] = tokens[i];
        res.n_seq_id[j] = 1;
        res.seq_id  [j] = const_cast<llama_seq_id *>(&seq);
        for (uint32_t axis = 0; axis < n_pos; ++axis) {
            res.pos[axis*(n - first) + j] = axis < 3 ? at(i, axis) : 0;
        }
    }
    return res;
}

void notes_kv::splice(llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n, const llama_pos * positions, const notes_source & source, int32_t n_layers, llama_pos base, bool carried) {
    check_seq(ctx, seq);
    check_rows(source, n_layers, n, true);

    check_range(p0, n);
    check_range(base, n);
    check_tokens(ctx, tokens, n);

    const int64_t moved = (int64_t) p0 - base;
    const auto at = [&](int32_t i, uint32_t axis) -> int64_t { return positions ? positions[3*i + axis] + moved : (int64_t) p0 + i; };
    if (positions) {
        check_positions(positions, n, base);
        check_range(p0, *std::max_element(positions, positions + 3*(int64_t) n) + moved - p0 + 1);
    }
    const int64_t p1 = at(n - 1, 0) + 1;
    if (p1 > ctx.n_ctx_seq()) {
        throw notes_failure(NOTES_E_ARGUMENT, "positions " + between(p0, p1 - p0) + " do not fit a context of " + std::to_string(ctx.n_ctx_seq()));
    }
    for (size_t c = 0; c < memory.caches.size(); ++c) {
        if (!cells_between(memory.caches[c].kv->get_cells(seq), seq, p0, p1).empty()) {
            throw notes_failure(NOTES_E_POSITION, "positions " + between(p0, p1 - p0) + " of sequence " + std::to_string(seq) + " already hold rows");
        }
        if (!whole_window(c) && !keeps(memory, c, seq, p1)) { // the rows of a cache have no holes: truncate relies on that
            throw notes_failure(NOTES_E_POSITION, "positions " + between(p0, p1 - p0) + " lie deeper than the sliding window (swa_full keeps all rows)");
        }
    }
    const llama_pos last = memory.recurrent ? memory.recurrent->seq_pos_max(seq) : -1;
    if (carried && last != p0 - 1 && (last >= 0 || ctx.get_memory()->seq_pos_max(seq) >= 0)) {
        throw notes_failure(NOTES_E_POSITION, "the state of sequence " + std::to_string(seq) + " belongs to position " + std::to_string(last) +
                ", and cannot go on at " + std::to_string(p0));
    }
    if (memory.recurrent && !carried && (p0 != 0 || ctx.get_memory()->seq_pos_max(seq) >= 0)) {
        throw notes_failure(NOTES_E_POSITION, "the state of recurrent layers can only be restored at the start of an empty sequence");
    }
    check_move(base, p0, p1 - p0);

    settle();

    // Where only the window is kept, rows that leave it are lost: check first that the splice will succeed.
    bool drops = false;
    for (size_t c = 0; c < memory.caches.size(); ++c) {
        const auto & kv = *memory.caches[c].kv;
        drops |= !whole_window(c);
        if (!whole_window(c) && room(c, seq, p1 - kv.n_swa) < std::min<int64_t>(n, kv.n_swa)) {
            throw notes_failure(NOTES_E_ROOM, "no " + std::to_string(n) + " free cells in the K/V cache of the sliding window");
        }
    }
    const std::vector<place> nowhere(memory.caches.size(), { 0, { { 0, 0, n } } });
    if (drops && source.file) {
        throw notes_failure(NOTES_E_ARGUMENT, "rows that leave a sliding window do not come back: read the file into memory before");
    }
    if ((drops || carried) && !move(NOWHERE, nowhere, 0, source, n, moved)) { // an overwritten state cannot be restored, either
        throw notes_failure(NOTES_E_NOT_FINITE, "the rows hold NaN or infinity");
    }

    struct landing { llama_ubatch ubatch; llama_kv_cache::slot_info slot; };
    std::vector<landing> landings;
    std::vector<place>   places;
    bool gone = false; // the earlier rows of the sequence are incomplete
    std::function<void()> undo = [] {};
    try {
        for (size_t c = 0; c < memory.caches.size(); ++c) {
            auto & kv = *memory.caches[c].kv;

            int32_t first = 0;
            if (!whole_window(c) && p1 > kv.n_swa) {
                gone = true;
                kv.seq_rm(seq, 0, p1 - kv.n_swa);
                while (at(first, 0) < p1 - (int64_t) kv.n_swa) {
                    first++;
                }
            }

            landing to { ubatch(seq, tokens, first, n, at), {} };
            to.slot = kv.find_slot(to.ubatch, false);
            if (to.slot.empty()) {
                throw notes_failure(NOTES_E_ROOM, "no " + std::to_string(n - first) + " free cells in the K/V cache");
            }
            if (memory.caches[c].kind == NOTES_INDEXER && to.slot.idxs != landings.front().slot.idxs) {
                throw notes_failure(NOTES_E_ROOM, "the indexer's keys are not in the cells of the rows");
            }
            places.push_back({ (uint32_t) to.slot.strm[0], runs(to.slot.idxs[0], first) });
            landings.push_back(std::move(to));
        }

        int64_t state = 0;
        if (memory.recurrent) {
            auto & mem = *memory.recurrent;
            if (carried) {
                undo = [&mem, cells = mem.cells, used = mem.used, head = mem.head]() mutable {
                    mem.cells.swap(cells);
                    mem.used  = used;
                    mem.head  = head;
                };
            } else {
                undo = [&mem, seq] { mem.seq_rm(seq, -1, -1); };
                mem.seq_rm(seq, -1, -1);
            }
            if (!mem.find_slot(ubatch(seq, tokens, carried ? 0 : n - 1, n, at))) { // a cell of its own, even if it was shared
                throw notes_failure(NOTES_E_ROOM, "no room for the state of another sequence");
            }
            state = mem.head;
            mem.cells[state].src = state; // as in state_read_meta: the data in the cell is valid
        }

        // Write to free cells first and update the metadata afterwards: rows that turn out to be bad, or that differ from the
        // file's checksum, have then never been part of a sequence. Only finite values are written: a free cell is still
        // multiplied with zero weights, so that it must not hold NaN.
        gone |= carried;
        if (!move(INTO_CACHE, places, state, source, n, moved)) {
            throw notes_failure(NOTES_E_NOT_FINITE, "the rows hold NaN or infinity");
        }

        for (size_t c = 0; c < landings.size(); ++c) {
            memory.caches[c].kv->apply_ubatch(landings[c].slot, landings[c].ubatch);
        }
    } catch (...) {
        undo();
        if (gone) {
            ctx.get_memory()->seq_rm(seq, -1, -1);
        } else {
            for (const auto & cache : memory.caches) {
                cache.kv->seq_rm(seq, p0, p1);
            }
        }
        for (const auto & cache : memory.caches) {
            sweep(cache.kv->v_cells[cache.kv->get_stream(seq)]);
        }
        throw;
    }
    if (memory.pools) {
        memory.pools->mem_idx_stale_set(seq, 0);
    }
}

void notes_kv::read(llama_seq_id seq, llama_pos p0, int32_t n, llama_pos * positions, notes_rows * rows, int32_t n_layers, llama_pos base) const {
    check_seq(ctx, seq);
    check_rows({ rows, nullptr }, n_layers, n, false);

    check_range(p0, n);
    check_range(base, n);
    if (memory.recurrent && (p0 != 0 || n != ctx.get_memory()->seq_pos_max(seq) + 1)) {
        throw notes_failure(NOTES_E_POSITION, "with recurrent layers only the whole sequence can be read, from position 0 to its end");
    }

    settle();

    std::vector<place> places;
    for (const auto & cache : memory.caches) {
        const auto & cells = cache.kv->get_cells(seq);
        auto found = cells_between(cells, seq, p0, positions ? LLONG_MAX : (int64_t) p0 + n);
        if (positions && found.size() > (size_t) n) {
            found.resize(n);
        }
        bool whole = (int32_t) found.size() == n && cells.pos_get(found[0]) == p0;
        for (int32_t i = 0; whole && !positions && i < n; ++i) { // seq_cp and seq_add can put two rows at one position
            whole = cells.pos_get(found[i]) == p0 + i;
        }
        if (!whole) {
            throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(seq) + " has " + std::to_string(found.size()) + " of the " +
                    std::to_string(n) + " rows at positions " + between(p0, n));
        }
        const bool axes = ctx.get_model().hparams.n_pos_per_embd() > 1;
        for (int32_t i = 0; (positions || axes) && i < n; ++i) {
            const auto & ext = cells.ext_get(found[i]);
            const llama_pos pos = cells.pos_get(found[i]);
            const llama_pos here[3] = { pos, axes ? ext.y : pos, axes ? ext.x : pos };
            for (int axis = 0; positions && axis < 3; ++axis) {
                positions[3*i + axis] = here[axis] - p0 + base;
            }
            // Audio also has positions on the fourth axis, unlike text and images; cells do not record them.
            const bool alone = (i == 0 || cells.pos_get(found[i - 1]) != pos) && (i + 1 == n || cells.pos_get(found[i + 1]) != pos);
            if (axes && ext.tok == LLAMA_TOKEN_NULL && alone && ext.x == pos && ext.y == pos && has_still_pairs()) {
                throw notes_failure(NOTES_E_UNSUPPORTED, "the row at position " + std::to_string(pos) + " may be one of sound, whose rotation is another one");
            }
        }
        places.push_back({ cache.kv->get_stream(seq), runs(found) });
    }

    int64_t state = 0;
    if (memory.recurrent) {
        const auto & mem  = *memory.recurrent;
        const auto   tail = mem.cells[seq].tail;
        state = mem.cells[tail].src >= 0 ? mem.cells[tail].src : tail;
    }

    if (!move(OUT_OF_CACHE, places, state, { rows, nullptr }, n, (double) base - p0)) {
        throw notes_failure(NOTES_E_NOT_FINITE, "the rows at positions " + between(p0, n) + " hold NaN or infinity, or do not fit the type asked for");
    }
}

// True if some rotated pairs are unchanged when text moves: those of the fourth axis of M-RoPE.
bool notes_kv::has_still_pairs() const {
    return std::any_of(all.begin(), all.end(), [&](const layer & layer) {
        if (layer.kind == NOTES_RECURRENT) {
            return false;
        }
        const auto freq = rotation(layer).freq;
        return std::find(freq.begin(), freq.end(), 0.0) != freq.end();
    });
}
