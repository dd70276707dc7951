// notes_cells.h: checks of positions and tokens, and lookup of a sequence's cells, for splices and decodes.
#pragma once

#include "notes_kv.h"

#include "llama-context.h"
#include "llama-kv-cells.h"
#include "llama-model.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

inline std::string between(llama_pos p0, int64_t n) {
    return "[" + std::to_string(p0) + ", " + std::to_string(p0 + n) + ")";
}

inline void check_seq(const llama_context & ctx, llama_seq_id seq) {
    if (seq < 0 || (uint32_t) seq >= ctx.n_seq_max()) {
        throw notes_failure(NOTES_E_ARGUMENT, "sequence " + std::to_string(seq) + " does not exist; the context has " + std::to_string(ctx.n_seq_max()));
    }
}

// Positions have 32 bits, also the position after the last.
inline void check_range(llama_pos p0, int64_t n) {
    if (n <= 0 || p0 < 0 || p0 + n > INT32_MAX) {
        throw notes_failure(NOTES_E_ARGUMENT, "there are no positions " + between(p0, n));
    }
}

inline void check_tokens(const llama_context & ctx, const llama_token * tokens, int64_t n) {
    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    for (int64_t i = 0; i < n; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            throw notes_failure(NOTES_E_ARGUMENT, "token " + std::to_string(tokens[i]) + " is outside the vocabulary of " + std::to_string(n_vocab));
        }
    }
}

// Free cells that have a position but no sequence, because an allocation failed in between.
inline void sweep(llama_kv_cells & cells) {
    for (uint32_t cell = 0; cell < cells.size(); ++cell) {
        if (!cells.is_empty(cell) && cells.seq_count(cell) == 0) {
            cells.rm(cell);
        }
    }
}

// Cells of a sequence at positions [p0, p1), in order of position, then of row and column.
inline std::vector<uint32_t> cells_between(const llama_kv_cells & cells, llama_seq_id seq, llama_pos p0, int64_t p1) {
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
