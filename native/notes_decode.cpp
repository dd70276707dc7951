// Operations that decode, and that truncate or fork sequences: rewrite, append, show, truncate, share.
#include "notes_kv.h"

#include "notes_cells.h"
#include "notes_graph.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <climits>
#include <set>
#include <utility>

// During a rewrite the old rows are parked under this sequence id: cells have a bit for it, but no batch can use it.
static constexpr llama_seq_id PARKED = LLAMA_MAX_SEQ - 1;

// To have the states of a batch in adjacent cells, llama.cpp gives the cell of a sequence outside of the batch to one in it.
// The metadata changes at once, the data moves while the graph runs: if that fails, the outside sequence would continue from
// another's state. It is emptied.
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

    // the old rows, in every cache: one cell per position, or none before the first row
    std::vector<std::vector<uint32_t>> old;
    std::vector<bool> crowded; // caches that lack free cells
    const auto cells_of = [&](size_t c) -> llama_kv_cells & {
        auto & kv = *memory.caches[c].kv;
        return kv.v_cells[kv.get_stream(seq)];
    };
    for (size_t c = 0; c < memory.caches.size(); ++c) {
        const auto & kv    = *memory.caches[c].kv;
        const auto & cells = cells_of(c);

        // A token is recomputed from its whole window, but a small cache drops rows that later tokens do not attend to.
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
        uint32_t free = cells.size() - cells.get_used();
        crowded.push_back(free < (uint32_t) n);
        if (crowded[c] && !whole_window(c)) { // free rows outside of every window, where no other sequence shares them
            const auto unseen = cells_between(cells, seq, 0, sees_from(kv, positions[0]));
            free += std::count_if(unseen.begin(), unseen.end(), [&](uint32_t cell) { return cells.seq_count(cell) == 1; });
        }
        if (free < (uint32_t) n) {
            throw notes_failure(NOTES_E_ROOM, "a rewrite of " + std::to_string(n) + " tokens needs as many free cells in the K/V cache, there are " + std::to_string(free));
        }
    }
    for (size_t c = 0; c < memory.caches.size(); ++c) { // only once every cache has enough free cells: dropped rows cannot be restored
        if (crowded[c]) {
            memory.caches[c].kv->seq_rm(seq, 0, sees_from(*memory.caches[c].kv, positions[0]));
        }
    }

    // Park the old rows: no longer part of the sequence, but not free until the new ones are computed. Meanwhile no cell may
    // be reused for being outside of a window: parked cells, and rows that the next token attends to, would seem to be.
    std::vector<bool> keeps;
    for (const auto & cache : memory.caches) {
        keeps.push_back(cache.kv->keep_masked);
    }
    bool parked = false; // all of them: new rows may use the cells of old ones
    const auto finish = [&](bool done) {
        for (size_t c = 0; c < memory.caches.size(); ++c) {
            memory.caches[c].kv->keep_masked = keeps[c];
        }
        for (size_t c = 0; c < memory.caches.size(); ++c) {
            auto & cells = cells_of(c);
            for (uint32_t cell = 0; !done && parked && cell < cells.size(); ++cell) { // not by position: the set of positions may lack a cell
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
        } catch (...) { // no memory to restore the old rows' metadata
            ctx.get_memory()->seq_rm(seq, -1, -1);
            finish(true);
        }
        throw;
    }
    finish(true);
}

// Throws if a sequence cannot have `n` positions from `p0` on. llama.cpp aborts beyond the end of a position table.
static void check_fits(const llama_context & ctx, int64_t p0, int64_t n) {
    if (p0 + n > ctx.n_ctx_seq()) {
        throw notes_failure(NOTES_E_ROOM, "positions " + between(p0, n) + " do not fit a context of " + std::to_string(ctx.n_ctx_seq()));
    }
    const int64_t last = p0 + n - 1;
    const ggml_tensor * learned = ctx.get_model().pos_embd;
    if (learned && last >= learned->ne[1]) {
        throw notes_failure(NOTES_E_ROOM, "this model learned " + std::to_string(learned->ne[1]) + " positions, there is no position " + std::to_string(last));
    }
}

static void check_appends(llama_context & ctx) {
    const std::string why = notes_kv::refusal(ctx, NOTES_APPEND);
    if (!why.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, why);
    }
}

void notes_kv::check_window(const notes_memory & memory, llama_seq_id seq, llama_pos pos) {
    if (lacks_window(memory, seq, pos)) {
        throw notes_failure(NOTES_E_POSITION, "the sliding-window layers no longer hold what position " + std::to_string(pos) +
                " of sequence " + std::to_string(seq) + " looks at (swa_full keeps all rows)");
    }
}

// Position of the last row, -1 without rows. Rows of an image share it.
static llama_pos last_position(llama_context & ctx, const notes_memory & memory, llama_seq_id seq) {
    llama_pos res = ctx.get_memory()->seq_pos_max(seq);
    for (const auto & cache : memory.caches) {
        res = std::max(res, cache.kv->seq_pos_max(seq)); // with a sliding window the memory answers for those layers only
    }
    return res;
}

// Position after the last row. After an image it advances by the image's height or width.
static int64_t next_position(llama_context & ctx, const notes_memory & memory, llama_seq_id seq) {
    const llama_pos last = last_position(ctx, memory, seq);
    int64_t res = (int64_t) last + 1;
    if (last >= 0 && ctx.get_model().hparams.n_pos_per_embd() > 1) {
        for (const auto & cache : memory.caches) {
            const auto & cells = cache.kv->get_cells(seq);
            for (const uint32_t cell : cells_between(cells, seq, last, (int64_t) last + 1)) {
                const auto & ext = cells.ext_get(cell);
                res = std::max({ res, (int64_t) ext.x + 1, (int64_t) ext.y + 1 });
            }
        }
    }
    return res;
}

void notes_kv::append(llama_context & ctx, const llama_seq_id * seqs, const int32_t * n_tokens, const int32_t * outputs, int32_t n_seqs, const llama_token * tokens) {
    check_appends(ctx);
    if (const std::string bug = notes_graph_bug(ctx, n_seqs); !bug.empty()) {
        throw notes_failure(NOTES_E_UNSUPPORTED, bug);
    }
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
        const int64_t next = next_position(ctx, parts, seqs[s]);
        check_fits(ctx, next, n_tokens[s]);
        const llama_pos p0 = next;
        check_window(parts, seqs[s], p0);
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
        // the last token of every sequence goes into the last batch, so that all logits are available together
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

// Remove the rows from p0 on, or all rows where that is not possible: recurrent state cannot be rolled back, and a small
// window has dropped the rows that it covered before.
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
    check_appends(ctx);
    check_seq(ctx, seq);
    const int32_t n_ubatch = ctx.n_ubatch();
    if (n <= 0 || (whole && n > n_ubatch)) {
        throw notes_failure(NOTES_E_ARGUMENT, "cannot show " + std::to_string(n) + " rows (that see each other: at most " + std::to_string(n_ubatch) + ")");
    }
    const int32_t n_pos = ctx.get_model().hparams.n_pos_per_embd();
    const notes_memory parts(ctx);
    const int64_t before = (int64_t) last_position(ctx, parts, seq) + 1; // rows from there on are new
    const llama_pos first = *std::min_element(positions, positions + n);
    if (first < before) {
        throw notes_failure(NOTES_E_POSITION, "an image goes after the last row of sequence " + std::to_string(seq) + ", from position " + std::to_string(before) + " on");
    }
    const llama_pos last = *std::max_element(positions, positions + (int64_t) n*(n_pos > 1 ? 3 : 1)); // later tokens follow the largest position of any axis
    check_fits(ctx, first, (int64_t) last - first + 1);
    check_window(parts, seq, positions[0]);

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
    check_appends(ctx);
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
    check_appends(ctx);
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
    // An unknown memory may keep states, too, and data that is not per position.
    const bool whole = parts.recurrent || !parts.unknown.empty();
    if (!parts.unknown.empty() && !ctx.get_cparams().kv_unified) {
        throw notes_failure(NOTES_E_UNSUPPORTED, "sequences with K/V caches of their own cannot share cells (kv_unified puts them in one)");
    }
    auto & memory = *ctx.get_memory();
    if (memory.seq_pos_max(to) >= 0) {
        throw notes_failure(NOTES_E_POSITION, "sequence " + std::to_string(to) + " already holds a state");
    }
    const int64_t length = next_position(ctx, parts, from);
    if (n < 0 || n > length || (whole && n != length)) {
        throw notes_failure(NOTES_E_POSITION, "cannot share " + std::to_string(n) + " of the " + std::to_string(length) + " positions of sequence " +
                std::to_string(from) + (parts.recurrent ? ": recurrent state belongs to the last one" : whole ? ": " + parts.unknown : ""));
    }
    if (n > 0) {
        memory.seq_cp(from, to, 0, whole ? -1 : n);
        // Shared cells are not reused, and a small window's cache may have no others: `to` does not need rows that its last
        // token does not attend to, and `from` keeps them until cells are scarce.
        for (const auto & cache : parts.caches) {
            if (cache.window && !cache.kv->keep_masked) {
                cache.kv->seq_rm(to, 0, sees_from(*cache.kv, n - 1));
            }
        }
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
    const uint32_t first = kv.get_stream(seq)*kv.get_size(); // each stream has its own cells
    std::vector<uint32_t> res;
    for (const uint32_t cell : found) {
        res.push_back(first + cell);
    }
    return res;
}
