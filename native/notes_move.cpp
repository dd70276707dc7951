// Moves rows into and out of a cache: splits them into parts and pieces, which threads read, hash, rotate and store.
#include "notes_kv.h"

#include "notes_file.h"
#include "notes_graph.h"
#include "notes_rope.h"
#include "notes_rows.h"
#include "notes_stage.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

// Bytes that a thread reads, hashes, rotates and stores as one piece, which fits into the processor's caches. A file in the
// page cache is read a quarter faster so than by 256 KB (docs/LOG.md).
static constexpr int64_t PIECE = 1 << 20;
static constexpr int32_t LINE  = 32; // f16 of a column in a cache line

// Device memory is copied in few calls: gaps of up to this many bytes are copied along.
static constexpr int64_t BETWEEN = 64 << 10;

// Run tasks on threads, started in order; `work` gets the numbers of the task and of the thread. Rethrows the first exception.
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
        // continue with the threads that have started
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

    // True if one call copies lines with gaps.
    bool by_lines() const { return notes_stage::by_lines(t); }

    // Bytes that are copied along for a gap of cells. Columns that cannot be copied by lines are copied whole anyway.
    int64_t between(int64_t n) const { return columns ? n*item()*(by_lines() ? n_embd : 1) : n*pitch(); }
};

// Some cells of a tensor, accessed in place in host memory, else through a staging buffer with one backend call each way: a
// backend that cannot copy lines with gaps (RPC) copies the gaps, too, which are therefore read before they are written.
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

    // True if a store of all these cells writes nothing else.
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

// Split the rows of all parts, as numbered in the source (the first `skipped` are not placed), into pieces, in the order in
// which threads start them. Pieces of as many parts as there are threads alternate: a file is read nearly sequentially, and
// a piece seldom waits for the hash of the one before it.
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
            } else if ((!part.columns || rows.by_lines()) && place.runs.size() == 1) { // else gaps are copied along
                const int64_t size = std::max(part.size, ggml_row_size(rows.t->type, part.n_embd)); // in the source and in the cache
                step = std::max<int64_t>(LINE, (notes_stage::SIZE/size - LINE)/LINE*LINE);
            }
            if (part.columns) { // pieces start at a cache line
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

// Move rows [first, last) of a part, the first of which is at `data`.
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
            std::vector<char> over(part.n_embd*sizeof(float)); // each row overwrites the previous one
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

// Move the state of a recurrent layer, row `state` of its tensors.
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

// Move all layers; `places` has one entry per cache. Returns false if a value was not finite; the rest has been moved.
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
    const int32_t n_threads = std::min<int64_t>(ctx.n_threads_batch(), 1 + (bytes >> 22)); // no more than are worth starting
    const auto work = pieces(every, places, skipped, n_threads);

    std::vector<ggml_backend_t> backends;
    for (const auto & backend : ctx.backends) {
        backends.push_back(backend.get());
    }
    std::mutex turn;
    std::deque<notes_stage> stages; // one per thread; destroyed, with all copies complete, before this returns
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
