#include "notes_kv.h"

#include "notes_rope.h"
#include "notes_rows.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-memory.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>
#include <typeinfo>
#include <utility>

// During a rewrite the old rows wait under this sequence id: cells keep a bit for it, no batch can name it.
static constexpr llama_seq_id PARKED = LLAMA_MAX_SEQ - 1;

static bool is_plain(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_F32;
}

static std::string between(llama_pos p0, int32_t n) {
    return "[" + std::to_string(p0) + ", " + std::to_string((int64_t) p0 + n) + ")";
}

//
// what a context can do
//

std::string notes_kv::refusal(llama_context & ctx, notes_op op) {
    const auto * memory = ctx.get_memory();
    if (!memory) {
        return "this model keeps no K/V cache (an encoder or a diffusion model)";
    }
    if (op == NOTES_APPEND) {
        return "";
    }

    // The exact class: its relatives (sliding window, hybrid, sparse attention) keep rows in several places.
    if (typeid(*memory) != typeid(llama_kv_cache)) {
        return "this model's memory is not an ordinary attention cache (sliding window, recurrent layers or sparse attention)";
    }

    const auto & kv      = static_cast<const llama_kv_cache &>(*memory);
    const auto & hparams = ctx.get_model().hparams;

    if (kv.other) {
        return "this context shares the cache of another one";
    }
    if (kv.n_swa > 0 || kv.swa_type != LLAMA_SWA_TYPE_NONE) {
        return "sliding-window attention is not supported yet";
    }
    if (hparams.is_mla()) {
        return "multi-head latent attention (MLA) is not supported yet";
    }
    if (ctx.get_cparams().n_seq_max >= LLAMA_MAX_SEQ) {
        return "the context uses every sequence id there is (n_seq_max = " + std::to_string(LLAMA_MAX_SEQ) + ")";
    }

    if (op == NOTES_REWRITE) {
        return ""; // decodes like any batch, whatever the cache's types and rotation
    }

    for (const auto & layer : kv.layers) {
        for (const ggml_tensor * t : { layer.k, layer.v }) {
            if (!t || !is_plain(t->type)) {
                return std::string("a K/V cache of type ") + (t ? ggml_type_name(t->type) : "none") + " is not supported yet; use f16 or f32";
            }
        }
        if (kv.v_trans && layer.v->ne[0] != (int64_t) hparams.n_embd_v_gqa(layer.il)) {
            return "V rows of several sizes need flash attention";
        }
    }

    return notes_rotation_refusal(ctx);
}

static llama_kv_cache & cache_of(llama_context & ctx, notes_op op) {
    const std::string why = notes_kv::refusal(ctx, op);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
    return static_cast<llama_kv_cache &>(*ctx.get_memory());
}

notes_kv::notes_kv(llama_context & ctx, notes_op op) : ctx(ctx), kv(cache_of(ctx, op)) {}

std::vector<notes_layer> notes_kv::layers() const {
    std::vector<notes_layer> res;
    for (const auto & layer : kv.layers) {
        const notes_rotation rotation = notes_layer_rotation(ctx, layer.il);
        res.push_back({
            /*.layer      =*/ (int32_t) layer.il,
            /*.n_embd_k   =*/ (int32_t) layer.k->ne[0],
            /*.n_embd_v   =*/ (int32_t) layer.v->ne[0],
            /*.type_k     =*/ layer.k->type,
            /*.type_v     =*/ layer.v->type,
            /*.rope       =*/ rotation.type,
            /*.n_rot      =*/ rotation.n_rot,
            /*.freq_base  =*/ rotation.freq_base,
            /*.freq_scale =*/ rotation.freq_scale,
            /*.magnitude  =*/ rotation.magnitude,
        });
    }
    return res;
}

std::vector<double> notes_kv::frequencies(int32_t i) const {
    if (i < 0 || i >= (int32_t) kv.layers.size()) {
        throw notes_failure(NOTES_E_ARGUMENT, "there is no cache layer " + std::to_string(i));
    }
    return notes_layer_rotation(ctx, kv.layers[i].il).freq;
}

//
// rows in and out
//

void notes_kv::check_seq(llama_seq_id seq) const {
    if (seq < 0 || (uint32_t) seq >= ctx.n_seq_max()) {
        throw notes_failure(NOTES_E_ARGUMENT, "sequence " + std::to_string(seq) + " does not exist; the context has " + std::to_string(ctx.n_seq_max()));
    }
}

// Shifts and stream copies that stock calls have asked for wait for the next decode; rows are right only after them.
void notes_kv::settle() const {
    ctx.sched_reserve();
    ctx.memory_update(false);
    ctx.synchronize();
    if (kv.get_has_shift()) {
        throw notes_failure(NOTES_E_DECODE, "llama.cpp could not apply a pending shift of positions");
    }
}

void notes_kv::check_rows(const notes_rows * rows, int32_t n_layers) const {
    if (n_layers != (int32_t) kv.layers.size()) {
        throw notes_failure(NOTES_E_ARGUMENT, "rows of " + std::to_string(n_layers) + " layers given, the cache has " + std::to_string(kv.layers.size()));
    }
    for (int32_t i = 0; i < n_layers; ++i) {
        if (!rows[i].k || !rows[i].v || !is_plain((ggml_type) rows[i].type)) {
            throw notes_failure(NOTES_E_ARGUMENT, "rows of layer " + std::to_string(i) + " are missing or neither f16 nor f32");
        }
    }
}

// Neighbouring cells together: {5,6,7,2} is rows 0..2 at cells 5..7 and row 3 at cell 2.
std::vector<notes_kv::run> notes_kv::runs(const std::vector<uint32_t> & cells) {
    std::vector<run> res;
    for (size_t i = 0; i < cells.size(); ++i) {
        if (!res.empty() && res.back().cell + res.back().n == cells[i]) {
            res.back().n++;
        } else {
            res.push_back({ cells[i], (int32_t) i, 1 });
        }
    }
    return res;
}

// Layers are independent of each other. Threads only where there is enough to move to pay for starting them.
void notes_kv::for_each_layer(size_t bytes, const std::function<void(int32_t)> & work) const {
    const int32_t n_layers  = kv.layers.size();
    const int32_t n_threads = std::min<int64_t>({ n_layers, ctx.n_threads_batch(), 1 + (int64_t) (bytes >> 22) });

    std::atomic<int32_t> next { 0 };
    std::exception_ptr   error;
    std::mutex           mutex;
    const auto loop = [&] { // an exception must not leave a thread
        try {
            for (int32_t i; (i = next++) < n_layers; ) {
                work(i);
            }
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            error = std::current_exception();
            next  = n_layers;
        }
    };

    std::vector<std::thread> others;
    try {
        for (int32_t t = 1; t < n_threads; ++t) {
            others.emplace_back(loop);
        }
    } catch (...) {
        // the threads that there are do the work
    }
    loop();
    for (auto & thread : others) {
        thread.join();
    }
    if (error) {
        std::rethrow_exception(error);
    }
}

// The rows of one tensor, [n_embd, kv_size]: a view of one stream. `host` memory is worked on where it lies, other
// memory through a staging buffer and the backend's own copy.
struct tensor_rows {
    ggml_tensor * t;
    bool columns; // V without flash attention: element j of cell c stands at j*kv_size + c

    bool   host()   const { return ggml_backend_buffer_is_host(t->view_src ? t->view_src->buffer : t->buffer); }
    int    n_embd() const { return t->ne[0]; }
    size_t item()   const { return ggml_type_size(t->type); }
    size_t pitch()  const { return columns ? t->ne[1]*item() : ggml_row_size(t->type, t->ne[0]); }
    size_t offset(uint32_t cell) const { return columns ? cell*item() : cell*pitch(); }

    using convert = std::function<bool(const notes_row_block & from, const notes_row_block & to)>;

    bool write(uint32_t cell, int n, const notes_row_block & rows, const convert & f) const {
        if (host()) {
            return f(rows, { t->type, (char *) t->data + offset(cell), pitch() });
        }
        std::vector<char> staging((size_t) n*n_embd()*item());
        const size_t width = columns ? n*item() : pitch();
        const bool ok = f(rows, { t->type, staging.data(), width });
        if (ok) {
            ggml_backend_tensor_set_2d(t, staging.data(), offset(cell), width, columns ? n_embd() : n, pitch(), width);
        }
        return ok;
    }

    bool read(uint32_t cell, int n, const notes_row_block & rows, const convert & f) const {
        if (host()) {
            return f({ t->type, (char *) t->data + offset(cell), pitch() }, rows);
        }
        std::vector<char> staging((size_t) n*n_embd()*item());
        const size_t width = columns ? n*item() : pitch();
        ggml_backend_tensor_get_2d(t, staging.data(), offset(cell), width, columns ? n_embd() : n, pitch(), width);
        return f({ t->type, staging.data(), width }, rows);
    }
};

bool notes_kv::move_layer(direction way, int32_t i, uint32_t stream, const std::vector<run> & runs, const notes_rows & rows, double distance) const {
    const auto & layer = kv.layers[i];
    const tensor_rows k { layer.k_stream[stream], false };
    const tensor_rows v { layer.v_stream[stream], kv.v_trans };
    const ggml_type type = (ggml_type) rows.type;
    const size_t k_row = ggml_row_size(type, k.n_embd());
    const size_t v_row = ggml_row_size(type, v.n_embd());
    const notes_turn turn(notes_layer_rotation(ctx, layer.il), distance);

    for (const auto & r : runs) {
        const notes_row_block rows_k { type, (char *) rows.k + r.row*k_row, k_row };
        const notes_row_block rows_v { type, (char *) rows.v + r.row*v_row, v_row };

        const auto move_k = [&](const auto & from, const auto & to) { return notes_rows_turn(turn, from, to, r.n, k.n_embd()); };
        const auto move_v = [&](const auto & from, const auto & to) {
            if (!v.columns) {
                return notes_rows_copy(from, to, r.n, v.n_embd());
            }
            return way == INTO_CACHE ? notes_rows_transpose(from, to, r.n, v.n_embd()) : notes_rows_transpose(from, to, v.n_embd(), r.n);
        };

        const bool ok = way == INTO_CACHE
            ? k.write(r.cell, r.n, rows_k, move_k) && v.write(r.cell, r.n, rows_v, move_v)
            : k.read (r.cell, r.n, rows_k, move_k) && v.read (r.cell, r.n, rows_v, move_v);
        if (!ok) {
            return false;
        }
    }
    return true;
}

// Cells of a sequence at positions [p0, p0+n), in order of position.
static std::vector<uint32_t> cells_between(const llama_kv_cells & cells, llama_seq_id seq, llama_pos p0, int32_t n) {
    std::vector<uint32_t> res;
    const auto & all = cells.seq_pos_get(seq);
    for (auto it = all.lower_bound({ p0, 0 }); it != all.end() && (int64_t) it->first < (int64_t) p0 + n; ++it) {
        res.push_back(it->second);
    }
    return res;
}

size_t notes_kv::row_bytes() const {
    size_t res = 0;
    for (const auto & layer : kv.layers) {
        res += ggml_row_size(layer.k->type, layer.k->ne[0]) + ggml_row_size(layer.v->type, layer.v->ne[0]);
    }
    return res;
}

void notes_kv::splice(llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n, const notes_rows * rows, int32_t n_layers, llama_pos base) {
    check_seq(seq);
    check_rows(rows, n_layers);

    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    if (n <= 0 || p0 < 0 || base < 0 || (int64_t) p0 + n > ctx.n_ctx_seq()) {
        throw notes_failure(NOTES_E_ARGUMENT, "positions " + between(p0, n) + " do not fit a context of " + std::to_string(ctx.n_ctx_seq()));
    }
    if (std::any_of(tokens, tokens + n, [&](llama_token t) { return t < 0 || t >= n_vocab; })) {
        throw notes_failure(NOTES_E_ARGUMENT, "a token is outside the vocabulary of " + std::to_string(n_vocab));
    }
    if (!cells_between(kv.get_cells(seq), seq, p0, n).empty()) {
        throw notes_failure(NOTES_E_POSITION, "positions " + between(p0, n) + " of sequence " + std::to_string(seq) + " already hold rows");
    }

    // the ubatch that a decode of these tokens would have had: it says where the cells stand (as in state_read_meta)
    llama_batch_allocr balloc(ctx.get_model().hparams.n_pos_per_embd());
    llama_ubatch ubatch = balloc.ubatch_reserve(n, 1);
    ubatch.seq_id_unq[0] = seq;
    for (int32_t i = 0; i < n; ++i) {
        ubatch.token[i]    = tokens[i];
        ubatch.pos[i]      = p0 + i;
        ubatch.n_seq_id[i] = 1;
        ubatch.seq_id[i]   = &seq;
    }

    const auto slot = kv.find_slot(ubatch, false);
    if (slot.empty()) {
        throw notes_failure(NOTES_E_ROOM, "no " + std::to_string(n) + " free cells in the K/V cache");
    }

    settle();

    // Free cells first, the books after: if the rows turn out bad, no sequence has ever seen them. What has been
    // written by then is finite: a free cell is still multiplied with zero weights, and may hold no NaN.
    const auto     where  = runs(slot.idxs[0]);
    const uint32_t stream = slot.strm[0];
    std::atomic<bool> finite { true };

    for_each_layer(n*row_bytes(), [&](int32_t i) {
        if (!move_layer(INTO_CACHE, i, stream, where, rows[i], (double) p0 - base)) {
            finite = false;
        }
    });

    if (!finite) {
        throw notes_failure(NOTES_E_NOT_FINITE, "the rows hold NaN or infinity");
    }

    kv.apply_ubatch(slot, ubatch);
}

void notes_kv::read(llama_seq_id seq, llama_pos p0, int32_t n, notes_rows * rows, int32_t n_layers, llama_pos base) const {
    check_seq(seq);
    check_rows(rows, n_layers);

    if (n <= 0 || p0 < 0 || base < 0) {
        throw notes_failure(NOTES_E_ARGUMENT, "there are no positions " + between(p0, n));
    }
    const auto cells = cells_between(kv.get_cells(seq), seq, p0, n);
    bool whole = (int32_t) cells.size() == n;
    for (int32_t i = 0; whole && i < n; ++i) { // seq_cp and seq_add can put two rows at one position
        whole = kv.get_cells(seq).pos_get(cells[i]) == p0 + i;
    }
    if (!whole) {
        throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(seq) + " has " + std::to_string(cells.size()) + " of the " +
                std::to_string(n) + " rows at positions " + between(p0, n));
    }

    settle();

    const auto     where  = runs(cells);
    const uint32_t stream = kv.get_stream(seq);

    std::atomic<bool> finite { true };

    for_each_layer(n*row_bytes(), [&](int32_t i) {
        if (!move_layer(OUT_OF_CACHE, i, stream, where, rows[i], (double) base - p0)) {
            finite = false;
        }
    });
    if (!finite) {
        throw notes_failure(NOTES_E_NOT_FINITE, "the rows at positions " + between(p0, n) + " hold NaN or infinity, or do not fit the type asked for");
    }
}

//
// decoding
//

static void decode(llama_context & ctx, const llama_batch_ext & batch) {
    const int status = ctx.decode(batch);
    switch (status) {
        case 0: return;
        case 1: throw notes_failure(NOTES_E_ROOM, "no " + std::to_string(batch.tokens.size()) + " free cells in the K/V cache");
        case 2: throw notes_failure(NOTES_E_ABORTED, "stopped by the abort callback");
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
    check_seq(seq);

    auto & cells = kv.v_cells[kv.get_stream(seq)];

    // the rows as they are, one cell a position
    std::vector<uint32_t> old;
    const auto & all = cells.seq_pos_get(seq);
    for (int32_t i = 0; i < n; ++i) {
        if (i > 0 && positions[i] <= positions[i - 1]) {
            throw notes_failure(NOTES_E_ARGUMENT, "positions must ascend: " + std::to_string(positions[i]) + " stands after " + std::to_string(positions[i - 1]));
        }
        const auto it = all.lower_bound({ positions[i], 0 });
        if (positions[i] < 0 || it == all.end() || it->first != positions[i]) {
            throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(seq) + " has no row at position " + std::to_string(positions[i]));
        }
        if (std::next(it) != all.end() && std::next(it)->first == positions[i]) { // an image, or rows of two origins
            throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(seq) + " has several rows at position " + std::to_string(positions[i]));
        }
        old.push_back(it->second);
    }
    const int32_t n_batch = ctx.n_batch();
    if (n <= 0 || (output == NOTES_OUTPUT_ALL && n > n_batch)) {
        throw notes_failure(NOTES_E_ARGUMENT, "cannot rewrite " + std::to_string(n) + " tokens (logits of all of them: at most " + std::to_string(n_batch) + ")");
    }
    if (cells.size() - cells.get_used() < (uint32_t) n) {
        throw notes_failure(NOTES_E_ROOM, "a rewrite of " + std::to_string(n) + " tokens needs as many free cells in the K/V cache, there are " +
                std::to_string(cells.size() - cells.get_used()));
    }

    // Out of the sequence's sight, but not free: the old rows survive until the new ones stand.
    for (const uint32_t cell : old) {
        cells.seq_add(cell, PARKED);
        cells.seq_rm (cell, seq);
    }
    try {
        for (int32_t i0 = 0; i0 < n; i0 += n_batch) {
            llama_batch_ext batch(&ctx);
            batch.pos_any = true;
            for (int32_t i = i0; i < std::min(n, i0 + n_batch); ++i) {
                add(batch, seq, positions[i], tokens[i], output == NOTES_OUTPUT_ALL || (output == NOTES_OUTPUT_LAST && i == n - 1));
            }
            decode(ctx, batch);
        }
    } catch (...) {
        for (int32_t i = 0; i < n; ++i) {
            for (const uint32_t cell : cells_between(cells, seq, positions[i], 1)) {
                cells.seq_rm(cell, seq);
            }
        }
        for (const uint32_t cell : old) {
            cells.seq_add(cell, seq);
            cells.seq_rm (cell, PARKED);
        }
        throw;
    }
    for (const uint32_t cell : old) {
        cells.seq_rm(cell, PARKED);
    }
}

void notes_kv::append(llama_context & ctx, const llama_seq_id * seqs, const int32_t * n_tokens, int32_t n_seqs, const llama_token * tokens, notes_output output) {
    const std::string why = refusal(ctx, NOTES_APPEND);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
    auto & memory = *ctx.get_memory();

    struct item { llama_seq_id seq; llama_pos pos; llama_token token; bool last; };
    std::vector<item> items;
    std::vector<std::pair<llama_seq_id, llama_pos>> starts;
    std::set<llama_seq_id> seen;

    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    for (int32_t s = 0; s < n_seqs; ++s) {
        if (seqs[s] < 0 || (uint32_t) seqs[s] >= ctx.n_seq_max() || !seen.insert(seqs[s]).second || n_tokens[s] <= 0) {
            throw notes_failure(NOTES_E_ARGUMENT, "cannot append " + std::to_string(n_tokens[s]) + " tokens to sequence " + std::to_string(seqs[s]));
        }
        const llama_pos p0 = memory.seq_pos_max(seqs[s]) + 1;
        if ((int64_t) p0 + n_tokens[s] > ctx.n_ctx_seq()) {
            throw notes_failure(NOTES_E_ROOM, "positions " + between(p0, n_tokens[s]) + " do not fit a context of " + std::to_string(ctx.n_ctx_seq()));
        }
        starts.push_back({ seqs[s], p0 });
        for (int32_t i = 0; i < n_tokens[s]; ++i, ++tokens) {
            if (*tokens < 0 || *tokens >= n_vocab) {
                throw notes_failure(NOTES_E_ARGUMENT, "token " + std::to_string(*tokens) + " is outside the vocabulary of " + std::to_string(n_vocab));
            }
            items.push_back({ seqs[s], p0 + i, *tokens, i == n_tokens[s] - 1 });
        }
    }

    const size_t n_batch = ctx.n_batch();
    if (items.empty() || (output == NOTES_OUTPUT_ALL && items.size() > n_batch) || (size_t) n_seqs > n_batch) {
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
                add(batch, items[i].seq, items[i].pos, items[i].token, output == NOTES_OUTPUT_ALL || (output == NOTES_OUTPUT_LAST && items[i].last));
            }
            decode(ctx, batch);
            i0 = i1;
        }
    } catch (...) {
        for (const auto & [seq, p0] : starts) {
            memory.seq_rm(seq, p0, -1); // recurrent state cannot go back; it says so by returning false
        }
        throw;
    }
}
