#include "notes_kv.h"

#include "notes_capture.h"
#include "notes_file.h"
#include "notes_graph.h"
#include "notes_rope.h"
#include "notes_rows.h"
#include "notes_stage.h"

#include "llama-adapter.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-recurrent.h"
#include "llama-memory.h"
#include "llama-model.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

// During a rewrite the old rows wait under this sequence id: cells keep a bit for it, no batch can name it.
static constexpr llama_seq_id PARKED = LLAMA_MAX_SEQ - 1;

// What a thread reads, hashes, turns and stores at once: it stays in the processor's caches meanwhile. Of a file in the
// page cache so much at once comes a quarter faster than 256 KB (docs/LOG.md).
static constexpr int64_t PIECE = 1 << 20;
static constexpr int32_t LINE  = 32; // f16 of a column in a cache line

// Memory elsewhere (a GPU, another machine) is copied in few calls: so much between what is wanted is rather copied along.
static constexpr int64_t BETWEEN = 64 << 10;

std::atomic<int64_t> notes_kv::stored_bytes { 0 };

static std::string between(llama_pos p0, int64_t n) {
    return "[" + std::to_string(p0) + ", " + std::to_string(p0 + n) + ")";
}

//
// what a context can do
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
    // Rows belong to the weights that they were computed with, and what we know of those is the digest of a file.
    if (const std::string added = adapters(ctx); !added.empty()) {
        return "this context computes with " + added + ", and rows are known by the model's file alone. Take it off the "
            "context, or merge a LoRA into the model (llama-export-lora)";
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
    for (size_t il = 0; op == NOTES_CARRY && il < memory.recurrent->s_l.size(); ++il) {
        const ggml_tensor * s = memory.recurrent->s_l[il];
        if (s && s->ne[0] > 0 && (s->type != GGML_TYPE_F32 || !ggml_backend_buffer_is_host(s->buffer))) {
            return "the state of layer " + std::to_string(il) + " is not kept in f32 in this machine's memory, where alone carrying it has been measured";
        }
    }
    const std::string why = notes_graph_refusal(ctx);
    if (!why.empty() || (op != NOTES_SPLICE && op != NOTES_CARRY)) {
        return why;
    }
    return op == NOTES_CARRY ? notes_graph_carry_refusal(ctx) : notes_graph_move_refusal(ctx);
}

notes_kv::notes_kv(llama_context & ctx, notes_op op) : ctx(ctx), memory(ctx) {
    const std::string why = refusal(ctx, op);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }

    for (size_t c = 0; c < memory.caches.size(); ++c) {
        const auto & cache = memory.caches[c];
        if (cache.kind == NOTES_INDEXER && !notes_graph_uses_indexer(ctx)) {
            continue; // nobody writes it
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
        res.n_embd_v = kv.hparams.n_embd_v_gqa(layer.il); // the tensor may be wider: without flash attention all are alike
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
// rows in and out
//

static void check_seq(const llama_context & ctx, llama_seq_id seq) {
    if (seq < 0 || (uint32_t) seq >= ctx.n_seq_max()) {
        throw notes_failure(NOTES_E_ARGUMENT, "sequence " + std::to_string(seq) + " does not exist; the context has " + std::to_string(ctx.n_seq_max()));
    }
}

// Shifts and stream copies that stock calls have asked for wait for the next decode; rows are right only after them.
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

// `quantized`: they may be.
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

// Positions count in 32 bits, and so does the one after the last.
static void check_range(llama_pos p0, int64_t n) {
    if (n <= 0 || p0 < 0 || p0 + n > INT32_MAX) {
        throw notes_failure(NOTES_E_ARGUMENT, "there are no positions " + between(p0, n));
    }
}

static void check_tokens(const llama_context & ctx, const llama_token * tokens, int64_t n) {
    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    for (int64_t i = 0; i < n; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            throw notes_failure(NOTES_E_ARGUMENT, "token " + std::to_string(tokens[i]) + " is outside the vocabulary of " + std::to_string(n_vocab));
        }
    }
}

// Whether a cache keeps all rows. That of sliding-window layers may drop what leaves the window; its size does not tell.
bool notes_kv::whole_window(size_t cache) const {
    return !memory.caches[cache].window || memory.caches[cache].kv->keep_masked;
}

// The first position that a token at `pos` looks at in the layers of this cache.
llama_pos notes_kv::sees_from(const llama_kv_cache & kv, llama_pos pos) {
    const int64_t size = kv.n_swa;
    switch (kv.swa_type) {
        case LLAMA_SWA_TYPE_NONE:    return 0;
        case LLAMA_SWA_TYPE_CHUNKED: return pos/size*size;
        default:                     return std::max<int64_t>(0, pos - size + 1);
    }
}

// Whether this cache has every row of the sequence at positions [p0, p1). The first one has all that there are.
bool notes_kv::keeps(const notes_memory & memory, size_t cache, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto & all  = memory.caches[0].kv->get_cells(seq).seq_pos_get(seq);
    const auto & here = memory.caches[cache].kv->get_cells(seq).seq_pos_get(seq);
    return std::equal(all.lower_bound({ p0, 0 }), all.lower_bound({ p1, 0 }), here.lower_bound({ p0, 0 }), here.lower_bound({ p1, 0 }),
            [](const auto & a, const auto & b) { return a.first == b.first; });
}

// Whether the sliding-window layers no longer have something before `pos` that a token there looks at.
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

// Cells that find_slot would give if the sequence had dropped its rows below `first`.
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

// Tasks are begun in their order; `work` gets the number of a task and that of its thread. The first exception is thrown.
static void in_parallel(int32_t n_tasks, int32_t n_threads, const std::function<void(int32_t, int32_t)> & work) {
    std::atomic<int32_t> next { 0 };
    std::exception_ptr   error;
    std::mutex           mutex;
    const auto loop = [&](int32_t t) { // an exception must not leave a thread
        try {
            for (int32_t i; (i = next++) < n_tasks; ) {
                work(i, t);
            }
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            error = error ? error : std::current_exception();
            next  = n_tasks;
        }
    };

    std::vector<std::thread> others;
    try {
        for (int32_t t = 1; t < std::min(n_tasks, n_threads); ++t) {
            others.emplace_back(loop, t);
        }
    } catch (...) {
        // the threads that there are do the work
    }
    loop(0);
    for (auto & thread : others) {
        thread.join();
    }
    if (error) {
        std::rethrow_exception(error);
    }
}

// The rows of one tensor, [n_embd, kv_size]: a view of one stream.
struct tensor_rows {
    ggml_tensor * t;
    int  n_embd;
    int  hadamard;
    bool columns; // V without flash attention: element j of cell c is at j*kv_size + c

    bool   host()   const { return !notes_stage::elsewhere(t); }
    size_t item()   const { return ggml_type_size(t->type); }
    size_t pitch()  const { return columns ? t->ne[1]*item() : ggml_row_size(t->type, t->ne[0]); }
    size_t offset(uint32_t cell) const { return columns ? cell*item() : cell*pitch(); }
    size_t width(int64_t n) const { return columns ? n*item() : ggml_row_size(t->type, n_embd); }
    int64_t lines(int64_t n) const { return columns ? n_embd : n; }

    // Whether its memory is copied line by line in one call.
    bool by_lines() const { return notes_stage::by_lines(t); }

    // Bytes that are copied along for cells between others. Of columns that cannot be copied line by line it is all, anyway.
    int64_t between(int64_t n) const { return columns ? n*item()*(by_lines() ? n_embd : 1) : n*pitch(); }
};

// Some cells of a tensor, and where they are worked on: where they lie if that is host memory, else in a buffer. That is
// one call of the backend each way, whatever it has calls for: where it cannot copy lines that lie apart, as that of
// another machine, what is between them is copied, too, and so read before it is written.
class notes_span {
public:
    notes_span(const tensor_rows & rows, uint32_t cell, int64_t n, notes_stage & stage) : rows(rows), cell(cell), stage(stage) {
        if (rows.host()) {
            pitch = rows.pitch();
            data  = (char *) rows.t->data + rows.offset(cell);
            return;
        }
        here = { rows.t, rows.offset(cell), rows.width(n), rows.lines(n), rows.pitch() };
        if (!here.gapless() && !rows.by_lines()) { // as one line
            here = { rows.t, here.offset, (here.n - 1)*here.pitch + here.width, 1, here.pitch };
            whole = true;
        }
        pitch = whole ? rows.pitch() : here.width;
        data  = stage.buffer(rows.t, here.bytes());
    }

    // Whether a store of all these cells writes nothing else.
    bool exact() const { return !whole; }

    notes_row_block block(uint32_t at) const {
        return { rows.t->type, data + (rows.columns ? (at - cell)*rows.item() : (at - cell)*pitch), pitch, rows.hadamard };
    }

    void fetch() {
        if (here.t) {
            stage.fetch(here, data);
        }
    }

    void store() const {
        if (here.t) {
            stage.store(here, data);
        }
    }

private:
    const tensor_rows & rows;
    const uint32_t cell;
    notes_stage &  stage;
    notes_lines here = {}; // no tensor: nothing is staged
    bool   whole = false;
    size_t pitch = 0;
    char * data  = nullptr;
};

std::vector<notes_kv::part> notes_kv::parts(const notes_source & source, int32_t n) const {
    std::vector<part> res;
    for (int32_t i = 0; i < (int32_t) all.size(); ++i) {
        const auto what = shape(all[i]);
        const int32_t n_rows = all[i].kind == NOTES_RECURRENT ? 1 : source.file ? source.file->n_rows : n;
        int  mix_k   = 0; // the sizes of build_input_k_rot and build_input_v_rot
        int  mix_v   = 0;
        bool columns = false;
        if (all[i].kind != NOTES_RECURRENT) {
            const auto & cache = memory.caches[all[i].cache];
            const auto & kv    = *cache.kv;
            if (kv.attn_rot_k && cache.mixes && notes_graph_mixes_k(ctx, all[i].kind)) {
                for (mix_k = 64; kv.n_embd_head_k_all % (2*mix_k) == 0; ) {
                    mix_k *= 2;
                }
            }
            mix_v   = kv.attn_rot_v && cache.mixes ? 64 : 0;
            columns = kv.v_trans;
        }
        if (what.n_embd_k > 0) {
            const auto type = source.type(i, false);
            res.push_back({ i, false, what.n_embd_k, mix_k, false, type, ggml_row_size(type, what.n_embd_k), n_rows });
        }
        if (what.n_embd_v > 0) {
            const auto type = source.type(i, true);
            res.push_back({ i, true, what.n_embd_v, mix_v, columns, type, ggml_row_size(type, what.n_embd_v), n_rows });
        }
    }
    return res;
}

// The rows of all parts, as the source counts them (the first `skipped` go nowhere), in pieces, and these in the order in which
// threads begin them. Of as many parts as there are threads they come by turns: a file is read nearly in its order, and a
// piece seldom has to wait until the one before it has been hashed.
std::vector<notes_kv::piece> notes_kv::pieces(const std::vector<part> & parts, const std::vector<place> & places, int32_t skipped, int32_t n_threads) const {
    std::vector<std::vector<piece>> of(parts.size());
    size_t longest = 0;
    for (size_t p = 0; p < parts.size(); ++p) {
        const auto & part = parts[p];
        int32_t step = part.n_rows;
        int32_t lead = 0;
        if (all[part.layer].kind != NOTES_RECURRENT) {
            const auto & place = places[all[part.layer].cache];
            const tensor_rows rows { stream(part, place), part.n_embd, 0, part.columns };
            if (rows.host()) {
                step = std::max<int64_t>(LINE, PIECE/part.size/LINE*LINE);
            } else if ((!part.columns || rows.by_lines()) && place.runs.size() == 1) { // else what lies between is copied along
                const int64_t size = std::max(part.size, ggml_row_size(rows.t->type, part.n_embd)); // here and there
                step = std::max<int64_t>(LINE, (notes_stage::SIZE/size - LINE)/LINE*LINE);
            }
            if (part.columns) { // pieces begin where a cache line does
                const auto & run = place.runs.front();
                const int64_t cell = (int64_t) run.cell - run.row - skipped; // of the source's row 0
                lead = (LINE - cell % LINE) % LINE;
            }
        }
        for (int32_t first = 0; first < part.n_rows; first = of[p].back().last) {
            of[p].push_back({ &part, first, (int32_t) std::min<int64_t>(part.n_rows, (int64_t) first + step + (first ? 0 : lead)) });
        }
        longest = std::max(longest, of[p].size());
    }
    std::vector<piece> res;
    for (size_t p0 = 0; p0 < parts.size(); p0 += n_threads) {
        for (size_t i = 0; i < longest; ++i) {
            for (size_t p = p0; p < std::min(parts.size(), p0 + n_threads); ++p) {
                if (i < of[p].size()) {
                    res.push_back(of[p][i]);
                }
            }
        }
    }
    return res;
}

ggml_tensor * notes_kv::stream(const part & part, const place & place) const {
    const auto & layer = all[part.layer];
    const auto & at    = memory.caches[layer.cache].kv->layers[layer.i];
    return (part.v ? at.v_stream : at.k_stream)[place.stream];
}

// Rows [first, last) of a part, of which the first one is at `data`.
bool notes_kv::move_rows(direction way, const part & part, const place & place, char * data, int32_t first, int32_t last, const notes_turn & turn, notes_stage & stage) const {
    const tensor_rows cache { stream(part, place), part.n_embd, part.hadamard, part.columns };

    std::vector<run> wanted;
    auto r = std::upper_bound(place.runs.begin(), place.runs.end(), first, [](int32_t row, const run & r) { return row < r.row + r.n; });
    for (; r != place.runs.end() && r->row < last; ++r) {
        const int32_t row = std::max(first, r->row);
        wanted.push_back({ r->cell + (row - r->row), row, std::min(last, r->row + r->n) - row });
    }
    if (!cache.host() && way != NOWHERE) {
        std::sort(wanted.begin(), wanted.end(), [](const run & a, const run & b) { return a.cell < b.cell; });
    }

    for (size_t i0 = 0, i1; i0 < wanted.size(); i0 = i1) {
        uint32_t end  = wanted[i0].cell + wanted[i0].n;
        bool     gaps = false;
        for (i1 = i0 + 1; !cache.host() && way != NOWHERE && i1 < wanted.size(); ++i1) { // runs that are copied together
            const int64_t gap = (int64_t) wanted[i1].cell - end;
            if (cache.between(gap) > BETWEEN) {
                break;
            }
            gaps = gaps || gap > 0;
            end  = wanted[i1].cell + wanted[i1].n;
        }
        if (way == NOWHERE) {
            std::vector<char> over(part.n_embd*sizeof(float)); // every row over the one before
            const notes_row_block mine { part.type, data + (wanted[i0].row - first)*part.size, part.size };
            if (!notes_loops().move(turn, mine, { cache.t->type, over.data(), 0, part.hadamard }, wanted[i0].n, part.n_embd)) {
                return false;
            }
            continue;
        }

        notes_span span(cache, wanted[i0].cell, end - wanted[i0].cell, stage);
        if (way == OUT_OF_CACHE || gaps || !span.exact()) {
            span.fetch();
        }
        for (size_t i = i0; i < i1; ++i) {
            const int32_t n = wanted[i].n;
            const notes_row_block mine { part.type, data + (wanted[i].row - first)*part.size, part.size };
            const notes_row_block there = span.block(wanted[i].cell);
            const auto & from = way == INTO_CACHE ? mine : there;
            const auto & to   = way == INTO_CACHE ? there : mine;
            const bool finite = !cache.columns     ? notes_loops().move(turn, from, to, n, part.n_embd)
                              : way == INTO_CACHE  ? notes_loops().transpose(from, to, n, part.n_embd)
                              :                      notes_loops().transpose(from, to, part.n_embd, n);
            if (!finite) {
                return false;
            }
            if (way == INTO_CACHE) {
                stored_bytes += cache.lines(n)*cache.width(n);
            }
        }
        if (way == INTO_CACHE) {
            span.store();
        }
    }
    return true;
}

// The state of a recurrent layer is in row `state` of its tensors.
bool notes_kv::move_state(direction way, const part & part, int64_t state, char * data) const {
    const auto & mem = *memory.recurrent;
    const auto   il  = all[part.layer].il;
    for (ggml_tensor * t : { part.v ? mem.s_l[il] : mem.r_l[il], part.v ? nullptr : mem.p_l[il] }) {
        if (!t || t->ne[0] == 0) {
            continue;
        }
        const size_t size = ggml_row_size(GGML_TYPE_F32, t->ne[0]);
        const notes_row_block block { GGML_TYPE_F32, data, size };
        std::vector<char> copy(size);
        if (way == OUT_OF_CACHE) {
            ggml_backend_tensor_get(t, data, state*size, size);
        }
        if (!notes_loops().move({}, block, { GGML_TYPE_F32, copy.data(), size }, 1, t->ne[0])) {
            return false;
        }
        if (way == INTO_CACHE) {
            ggml_backend_tensor_set(t, data, state*size, size);
            stored_bytes += size;
        }
        data += size;
    }
    return true;
}

// All layers; `places` has one entry a cache. False if something was not finite: the rest was moved, or found to be damaged.
bool notes_kv::move(direction way, const std::vector<place> & places, int64_t state, const notes_source & source, int32_t n, double distance) const {
    auto * file = source.file;
    const int32_t skipped = file ? file->first : 0;

    std::vector<notes_turn> turns;
    for (const auto & layer : all) {
        turns.push_back(layer.kind == NOTES_RECURRENT ? notes_turn() : notes_turn(rotation(layer), distance));
    }
    const notes_turn none;

    const auto every = parts(source, n);
    int64_t bytes = 0;
    for (const auto & part : every) {
        bytes += n*(int64_t) part.size;
    }
    const int32_t n_threads = std::min<int64_t>(ctx.n_threads_batch(), 1 + (bytes >> 22)); // no more than pay for being started
    const auto work = pieces(every, places, skipped, n_threads);

    std::vector<ggml_backend_t> backends;
    for (const auto & backend : ctx.backends) {
        backends.push_back(backend.get());
    }
    std::mutex turn;
    std::deque<notes_stage> stages; // of each thread; gone, with all that was on its way there, before this returns
    for (int32_t i = 0; i < n_threads; ++i) {
        stages.emplace_back(backends, turn);
    }

    std::vector<std::vector<char>> buffers(n_threads);
    std::atomic<bool> finite { true };
    const auto move_piece = [&](const piece & piece, std::vector<char> & buffer, notes_stage & stage) {
        const auto & part  = *piece.of;
        const auto & layer = all[part.layer];
        const int64_t at   = piece.first*(int64_t) part.size;
        char * data;
        if (file) {
            if (ctx.abort_callback && ctx.abort_callback(ctx.abort_callback_data)) { // a disk may take seconds
                throw notes_failure(NOTES_E_ABORTED, "the splice was stopped");
            }
            const int64_t end  = piece.last < part.n_rows ? piece.last*(int64_t) part.size : file->tensor(part.layer, part.v).size; // with padding
            const int64_t size = end - at;
            buffer.resize(std::max<size_t>(buffer.size(), size));
            data = buffer.data();
            if (!file->read(part.layer, part.v, at, size, data)) {
                return;
            }
        } else {
            data = (char *) (part.v ? source.rows[part.layer].v : source.rows[part.layer].k) + at;
        }
        const bool ok = layer.kind == NOTES_RECURRENT ? move_state(way, part, state, data)
            : move_rows(way, part, places[layer.cache], data, piece.first - skipped, piece.last - skipped, part.v ? none : turns[part.layer], stage);
        if (!ok) {
            finite = false;
        }
    };
    in_parallel(work.size(), n_threads, [&](int32_t i, int32_t t) {
        try {
            move_piece(work[i], buffers[t], stages[t]);
        } catch (...) {
            if (file) {
                file->stop();
            }
            throw;
        }
    });
    return finite;
}

// Cells that have a position and no sequence: memory ran out between the two.
static void sweep(llama_kv_cells & cells) {
    for (uint32_t cell = 0; cell < cells.size(); ++cell) {
        if (!cells.is_empty(cell) && cells.seq_count(cell) == 0) {
            cells.rm(cell);
        }
    }
}

// Cells of a sequence at positions [p0, p1), in order of position, then of row and column.
static std::vector<uint32_t> cells_between(const llama_kv_cells & cells, llama_seq_id seq, llama_pos p0, int64_t p1) {
    std::vector<uint32_t> res;
    const auto & all = cells.seq_pos_get(seq);
    for (auto it = all.lower_bound({ p0, 0 }); it != all.end() && it->first < p1; ++it) {
        res.push_back(it->second);
    }
    const auto order = [&](uint32_t cell) {
        const auto & ext = cells.ext_get(cell);
        return std::make_tuple(cells.pos_get(cell), ext.y, ext.x);
    };
    std::stable_sort(res.begin(), res.end(), [&](uint32_t a, uint32_t b) { return order(a) < order(b); });
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

// The ubatch that a decode of rows [first, n) would have had: it says where the cells are (as in state_read_meta).
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
        if (!whole_window(c) && !keeps(memory, c, seq, p1)) { // what it keeps has no holes: truncate relies on that
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

    // Where only the window is kept, what leaves it makes room. It does not come back: see before whether all will go well.
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
    if ((drops || carried) && !move(NOWHERE, nowhere, 0, source, n, moved)) { // a state is written over, and does not come back, either
        throw notes_failure(NOTES_E_NOT_FINITE, "the rows hold NaN or infinity");
    }

    struct landing { llama_ubatch ubatch; llama_kv_cache::slot_info slot; };
    std::vector<landing> landings;
    std::vector<place>   places;
    bool gone = false; // what the sequence had before is not whole any more
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
            if (!mem.find_slot(ubatch(seq, tokens, carried ? 0 : n - 1, n, at))) { // a cell of its own, whoever shared it
                throw notes_failure(NOTES_E_ROOM, "no room for the state of another sequence");
            }
            state = mem.head;
            mem.cells[state].src = state; // as in state_read_meta: what is there counts
        }

        // Free cells first, the books after: if the rows turn out bad, or other than those that were written to their file, no
        // sequence has ever seen them. What has been written by then is finite: a free cell is still multiplied with zero
        // weights, and may hold no NaN.
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
            // Sound has positions on the fourth axis, too, which text and images have not; the cells do not tell.
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

// Whether some rotated pairs do not change when text moves: those of the fourth axis of M-RoPE.
bool notes_kv::has_still_pairs() const {
    return std::any_of(all.begin(), all.end(), [&](const layer & layer) {
        if (layer.kind == NOTES_RECURRENT) {
            return false;
        }
        const auto freq = rotation(layer).freq;
        return std::find(freq.begin(), freq.end(), 0.0) != freq.end();
    });
}

//
// decoding
//

// To have the states of a batch side by side, llama.cpp gives the cell of a sequence that is not in it to one that is. The
// books say so at once, the data moves as the graph runs: if that fails, such a sequence would go on from another's state. It is emptied.
static void decode(llama_context & ctx, const notes_memory & parts, const llama_batch_ext & batch) {
    std::vector<int32_t> tails;
    for (uint32_t seq = 0; parts.recurrent && seq < ctx.n_seq_max(); ++seq) {
        tails.push_back(parts.recurrent->cells[seq].tail);
    }
    const auto empty_moved = [&] {
        for (size_t seq = 0; seq < tails.size(); ++seq) {
            if (parts.recurrent->cells[seq].tail != tails[seq]) {
                ctx.get_memory()->seq_rm(seq, -1, -1);
            }
        }
    };
    int status = 0;
    try {
        status = ctx.decode(batch);
    } catch (...) {
        empty_moved();
        throw;
    }
    if (status != 0) {
        empty_moved();
    }
    switch (status) {
        case 0: return;
        case 1: throw notes_failure(NOTES_E_ROOM, "no " + std::to_string(batch.tokens.size()) + " free cells in the K/V cache");
        case 2: throw notes_failure(NOTES_E_ABORTED, "the computation was stopped");
        default: throw notes_failure(NOTES_E_DECODE, "llama_decode failed with status " + std::to_string(status));
    }
}

static void add(llama_batch_ext & batch, llama_seq_id seq, llama_pos pos, llama_token token, bool output) {
    llama_batch_ext::token t;
    t.id     = token;
    t.output = output;
    t.pos.fill(pos); // text: the same on every axis
    t.seq_ids.insert(seq);
    batch.tokens.push_back(std::move(t));
}

void notes_kv::rewrite(llama_seq_id seq, const llama_pos * positions, const llama_token * tokens, int32_t n, notes_output output) {
    check_seq(ctx, seq);

    const int32_t n_batch = ctx.n_batch();
    if (n <= 0 || (output == NOTES_OUTPUT_ALL && n > n_batch)) {
        throw notes_failure(NOTES_E_ARGUMENT, "cannot rewrite " + std::to_string(n) + " tokens (logits of all of them: at most " + std::to_string(n_batch) + ")");
    }
    check_tokens(ctx, tokens, n);
    check_range(positions[0], 1);
    check_range(positions[n - 1], 1);
    for (int32_t i = 1; i < n; ++i) {
        if (positions[i] <= positions[i - 1]) {
            throw notes_failure(NOTES_E_ARGUMENT, "positions must ascend: " + std::to_string(positions[i]) + " comes after " + std::to_string(positions[i - 1]));
        }
    }

    // the rows as they are, in every cache: one cell a position, or none before others
    std::vector<std::vector<uint32_t>> old;
    const auto cells_of = [&](size_t c) -> llama_kv_cells & {
        auto & kv = *memory.caches[c].kv;
        return kv.v_cells[kv.get_stream(seq)];
    };
    for (size_t c = 0; c < memory.caches.size(); ++c) {
        const auto & kv    = *memory.caches[c].kv;
        const auto & cells = cells_of(c);

        // A token is recomputed from all that its window shows. A small cache has dropped what later tokens do not see.
        if (!whole_window(c) && !keeps(memory, c, seq, sees_from(kv, positions[0]))) {
            throw notes_failure(NOTES_E_POSITION, "position " + std::to_string(positions[0]) + " lies deeper than the sliding window: its layers keep the rows from position " +
                    std::to_string(cells.seq_pos_min(seq)) + " on only (swa_full keeps them all)");
        }

        old.emplace_back();
        for (int32_t i = 0; i < n; ++i) {
            const auto here = cells_between(cells, seq, positions[i], (int64_t) positions[i] + 1);
            const bool before = positions[i] < cells.seq_pos_max(seq);
            if (here.size() > 1 || (here.empty() && !before)) { // several: an image, or rows of two origins
                throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(seq) + (here.empty() ? " has no row" : " has several rows") + " at position " + std::to_string(positions[i]));
            }
            old[c].insert(old[c].end(), here.begin(), here.end());
        }
        if (!whole_window(c) && cells.size() - cells.get_used() < (uint32_t) n) { // what no token looks at any more makes room
            memory.caches[c].kv->seq_rm(seq, 0, sees_from(kv, positions[0]));
        }
        if (cells.size() - cells.get_used() < (uint32_t) n) {
            throw notes_failure(NOTES_E_ROOM, "a rewrite of " + std::to_string(n) + " tokens needs as many free cells in the K/V cache, there are " +
                    std::to_string(cells.size() - cells.get_used()));
        }
    }

    // Out of the sequence's sight, but not free: the old rows survive until the new ones are there. Meanwhile no cell is free
    // for lying outside of a window: the parked ones and what the next token to be rewritten looks at would seem to.
    std::vector<bool> keeps;
    for (const auto & cache : memory.caches) {
        keeps.push_back(cache.kv->keep_masked);
    }
    bool parked = false; // all of them: new rows can be where the old ones were
    const auto finish = [&](bool done) {
        for (size_t c = 0; c < memory.caches.size(); ++c) {
            memory.caches[c].kv->keep_masked = keeps[c];
        }
        for (size_t c = 0; c < memory.caches.size(); ++c) {
            auto & cells = cells_of(c);
            for (uint32_t cell = 0; !done && parked && cell < cells.size(); ++cell) { // not by position: a set may lack what a cell has
                if (cells.seq_has(cell, seq) && std::binary_search(positions, positions + n, cells.pos_get(cell))) {
                    cells.seq_rm(cell, seq);
                }
            }
            for (const uint32_t cell : old[c]) {
                if (!done && !cells.seq_has(cell, seq)) {
                    cells.seq_add(cell, seq);
                }
                if (cells.seq_has(cell, PARKED)) {
                    cells.seq_rm(cell, PARKED);
                }
            }
            if (!done) {
                sweep(cells);
            }
        }
    };

    try {
        for (size_t c = 0; c < memory.caches.size(); ++c) {
            memory.caches[c].kv->keep_masked = true;
            for (const uint32_t cell : old[c]) {
                cells_of(c).seq_add(cell, PARKED);
                cells_of(c).seq_rm (cell, seq);
            }
        }
        parked = true;
        for (int32_t i0 = 0; i0 < n; i0 += n_batch) {
            llama_batch_ext batch(&ctx);
            batch.pos_any = true;
            for (int32_t i = i0; i < std::min(n, i0 + n_batch); ++i) {
                add(batch, seq, positions[i], tokens[i], output == NOTES_OUTPUT_ALL || (output == NOTES_OUTPUT_LAST && i == n - 1));
            }
            decode(ctx, memory, batch);
        }
    } catch (...) {
        try {
            finish(false);
        } catch (...) { // no memory for the books of the rows as they were
            ctx.get_memory()->seq_rm(seq, -1, -1);
            finish(true);
        }
        throw;
    }
    finish(true);
}

// Where positions are looked up in a table, llama.cpp aborts beyond its end.
static void check_last(const llama_context & ctx, int64_t last) {
    const ggml_tensor * learned = ctx.get_model().pos_embd;
    if (learned && last >= learned->ne[1]) {
        throw notes_failure(NOTES_E_ROOM, "this model learned " + std::to_string(learned->ne[1]) + " positions, there is no position " + std::to_string(last));
    }
}

// The position after the last row. That of an image is as far on as the image is high or wide.
static llama_pos next_position(llama_context & ctx, const notes_memory & memory, llama_seq_id seq) {
    llama_pos last = ctx.get_memory()->seq_pos_max(seq);
    for (const auto & cache : memory.caches) {
        last = std::max(last, cache.kv->seq_pos_max(seq)); // with a sliding window the memory tells of its layers alone
    }
    llama_pos res = last + 1;
    if (last >= 0 && ctx.get_model().hparams.n_pos_per_embd() > 1) {
        for (const auto & cache : memory.caches) {
            const auto & cells = cache.kv->get_cells(seq);
            for (const uint32_t cell : cells_between(cells, seq, last, (int64_t) last + 1)) {
                const auto & ext = cells.ext_get(cell);
                res = std::max({ res, ext.x + 1, ext.y + 1 });
            }
        }
    }
    return res;
}

void notes_kv::append(llama_context & ctx, const llama_seq_id * seqs, const int32_t * n_tokens, const int32_t * outputs, int32_t n_seqs, const llama_token * tokens) {
    const std::string why = refusal(ctx, NOTES_APPEND);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
    auto & memory = *ctx.get_memory();
    const notes_memory parts(ctx);

    struct item { llama_seq_id seq; llama_pos pos; llama_token token; bool last; bool output; };
    std::vector<item> items;
    std::vector<std::pair<llama_seq_id, llama_pos>> starts;
    std::set<llama_seq_id> seen;
    bool all = false; // logits of every token of a sequence are wanted

    for (int32_t s = 0; s < n_seqs; ++s) {
        if (seqs[s] < 0 || (uint32_t) seqs[s] >= ctx.n_seq_max() || !seen.insert(seqs[s]).second || n_tokens[s] <= 0) {
            throw notes_failure(NOTES_E_ARGUMENT, "cannot append " + std::to_string(n_tokens[s]) + " tokens to sequence " + std::to_string(seqs[s]));
        }
        const llama_pos p0 = next_position(ctx, parts, seqs[s]);
        if ((int64_t) p0 + n_tokens[s] > ctx.n_ctx_seq()) {
            throw notes_failure(NOTES_E_ROOM, "positions " + between(p0, n_tokens[s]) + " do not fit a context of " + std::to_string(ctx.n_ctx_seq()));
        }
        check_last(ctx, (int64_t) p0 + n_tokens[s] - 1);
        if (lacks_window(parts, seqs[s], p0)) {
            throw notes_failure(NOTES_E_POSITION, "the sliding-window layers no longer hold what position " + std::to_string(p0) +
                    " of sequence " + std::to_string(seqs[s]) + " looks at (swa_full keeps all rows)");
        }
        check_tokens(ctx, tokens, n_tokens[s]);
        starts.push_back({ seqs[s], p0 });
        all |= outputs[s] == NOTES_OUTPUT_ALL;
        for (int32_t i = 0; i < n_tokens[s]; ++i, ++tokens) {
            const bool last = i == n_tokens[s] - 1;
            items.push_back({ seqs[s], p0 + i, *tokens, last, outputs[s] == NOTES_OUTPUT_ALL || (outputs[s] == NOTES_OUTPUT_LAST && last) });
        }
    }

    const size_t n_batch = ctx.n_batch();
    if (items.empty() || (all && items.size() > n_batch) || (size_t) n_seqs > n_batch) {
        throw notes_failure(NOTES_E_ARGUMENT, "cannot append " + std::to_string(items.size()) + " tokens (logits of all of them: at most " + std::to_string(n_batch) + ")");
    }
    if (items.size() > n_batch) {
        // the last token of every sequence goes into the last batch, so that its logits are there together
        std::stable_partition(items.begin(), items.end(), [](const item & it) { return !it.last; });
    }

    try {
        const size_t n_tail = items.size() > n_batch ? n_seqs : items.size();
        for (size_t i0 = 0; i0 < items.size(); ) {
            const size_t body = items.size() - n_tail;
            const size_t i1   = i0 < body ? std::min(body, i0 + n_batch) : items.size();

            llama_batch_ext batch(&ctx);
            for (size_t i = i0; i < i1; ++i) {
                add(batch, items[i].seq, items[i].pos, items[i].token, items[i].output);
            }
            decode(ctx, parts, batch);
            i0 = i1;
        }
    } catch (...) {
        for (const auto & [seq, p0] : starts) {
            go_back(ctx, parts, seq, p0);
        }
        throw;
    }
}

// Without the rows from p0 on; empty where that is not possible: recurrent state cannot go back, and a small window has dropped what it
// looked at before.
void notes_kv::go_back(llama_context & ctx, const notes_memory & parts, llama_seq_id seq, llama_pos p0) {
    auto & memory = *ctx.get_memory();
    if (!memory.seq_rm(seq, p0, -1) || lacks_window(parts, seq, p0)) {
        memory.seq_rm(seq, -1, -1);
    }
    for (const auto & cache : parts.caches) {
        sweep(cache.kv->v_cells[cache.kv->get_stream(seq)]);
    }
}

void notes_kv::show(llama_context & ctx, llama_seq_id seq, const float * rows, int32_t n, int32_t width, const llama_pos * positions, bool whole) {
    const std::string why = refusal(ctx, NOTES_APPEND);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
    check_seq(ctx, seq);
    const int32_t n_ubatch = ctx.n_ubatch();
    if (n <= 0 || (whole && n > n_ubatch)) {
        throw notes_failure(NOTES_E_ARGUMENT, "cannot show " + std::to_string(n) + " rows (that see each other: at most " + std::to_string(n_ubatch) + ")");
    }
    const int32_t n_pos = ctx.get_model().hparams.n_pos_per_embd();
    const notes_memory parts(ctx);
    llama_pos before = 0; // rows of an image share positions: those after the last one that there is are new
    for (const auto & cache : parts.caches) {
        before = std::max(before, cache.kv->seq_pos_max(seq) + 1);
    }
    before = std::max(before, ctx.get_memory()->seq_pos_max(seq) + 1);
    if (*std::min_element(positions, positions + n) < before) {
        throw notes_failure(NOTES_E_POSITION, "an image goes after the last row of sequence " + std::to_string(seq) + ", from position " + std::to_string(before) + " on");
    }
    check_last(ctx, *std::max_element(positions, positions + n));
    if (lacks_window(parts, seq, positions[0])) {
        throw notes_failure(NOTES_E_POSITION, "the sliding-window layers no longer hold what position " + std::to_string(positions[0]) +
                " of sequence " + std::to_string(seq) + " looks at (swa_full keeps all rows)");
    }

    const bool causal = ctx.get_causal_attn();
    try {
        ctx.set_causal_attn(causal && !whole);
        for (int32_t i0 = 0; i0 < n; i0 += n_ubatch) {
            llama_batch_ext batch(&ctx);
            if ((size_t) width != batch.n_embd_inp) {
                throw notes_failure(NOTES_E_ARGUMENT, "rows of " + std::to_string(width) + " numbers given, the model takes " + std::to_string(batch.n_embd_inp));
            }
            const int32_t i1 = std::min(n, i0 + n_ubatch);
            batch.n_embd = width;
            batch.embd.assign(rows + (int64_t) i0*width, rows + (int64_t) i1*width);
            for (int32_t i = i0; i < i1; ++i) {
                llama_batch_ext::token t;
                t.has_embd = true;
                t.embd_off = (size_t) (i - i0)*width;
                for (int32_t axis = 0; axis < n_pos; ++axis) {
                    t.pos[axis] = axis < 3 ? positions[(int64_t) axis*n + i] : 0; // the fourth is of sound
                }
                t.seq_ids.insert(seq);
                batch.tokens.push_back(std::move(t));
            }
            decode(ctx, parts, batch);
        }
    } catch (...) {
        ctx.set_causal_attn(causal);
        go_back(ctx, parts, seq, before);
        throw;
    }
    ctx.set_causal_attn(causal);
}

void notes_kv::truncate(llama_context & ctx, llama_seq_id seq, llama_pos p0) {
    const std::string why = refusal(ctx, NOTES_APPEND);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
    check_seq(ctx, seq);
    if (p0 < 0) {
        throw notes_failure(NOTES_E_ARGUMENT, "there is no position " + std::to_string(p0));
    }
    const notes_memory parts(ctx);
    const bool after = std::any_of(parts.caches.begin(), parts.caches.end(), [&](const auto & cache) { return cache.kv->seq_pos_max(seq) >= p0; });
    if (after && lacks_window(parts, seq, p0)) {
        throw notes_failure(NOTES_E_POSITION, "the sliding-window layers no longer hold what position " + std::to_string(p0) + " looks at (swa_full keeps all rows)");
    }
    if (!ctx.get_memory()->seq_rm(seq, p0, -1)) {
        throw notes_failure(NOTES_E_UNSUPPORTED, "this model's memory cannot go back to position " + std::to_string(p0) + " (recurrent state)");
    }
}

void notes_kv::share(llama_context & ctx, llama_seq_id from, llama_seq_id to, int32_t n) {
    const std::string why = refusal(ctx, NOTES_APPEND);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
    check_seq(ctx, from);
    check_seq(ctx, to);
    const notes_memory parts(ctx);
    for (const auto & cache : parts.caches) {
        if (cache.kv->get_stream(from) != cache.kv->get_stream(to)) {
            throw notes_failure(NOTES_E_UNSUPPORTED, "sequences with K/V caches of their own cannot share cells (kv_unified puts them in one)");
        }
        if (cache.kv->seq_pos_max(to) >= 0) {
            throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(to) + " already holds rows");
        }
    }
    auto & memory = *ctx.get_memory();
    if (memory.seq_pos_max(to) >= 0) {
        throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(to) + " already holds a state");
    }
    const llama_pos length = next_position(ctx, parts, from);
    if (n < 0 || n > length || (parts.recurrent && n != length)) {
        throw notes_failure(NOTES_E_POSITION, "cannot share " + std::to_string(n) + " of the " + std::to_string(length) + " positions of sequence " +
                std::to_string(from) + (parts.recurrent ? ": recurrent state belongs to the last one" : ""));
    }
    if (n > 0) {
        memory.seq_cp(from, to, 0, parts.recurrent ? -1 : n);
    }
}

int32_t notes_kv::used(const llama_context & ctx) {
    const notes_memory parts(ctx);
    int32_t res = 0;
    for (size_t c = 0; c < std::min<size_t>(parts.caches.size(), 1); ++c) {
        for (const auto & cells : parts.caches[c].kv->v_cells) {
            res += cells.get_used();
        }
    }
    return res;
}

std::vector<uint32_t> notes_kv::cells(const llama_context & ctx, llama_seq_id seq) {
    check_seq(ctx, seq);
    const notes_memory parts(ctx);
    if (parts.caches.empty()) {
        return {};
    }
    const auto & kv = *parts.caches[0].kv;
    const auto found = cells_between(kv.get_cells(seq), seq, 0, LLONG_MAX);
    const uint32_t first = kv.get_stream(seq)*kv.get_size(); // the cells of a stream are its own
    std::vector<uint32_t> res;
    for (const uint32_t cell : found) {
        res.push_back(first + cell);
    }
    return res;
}
