// notes_rows.h: the inner loops over K and V rows: turn, convert, transpose, and look for NaN on the way.
#pragma once

#include "notes_rope.h"

#include "ggml.h"

#include <cstddef>

// A row of `n` elements of `type` (f16 or f32), consecutive rows `stride` bytes apart.
struct notes_row_block {
    ggml_type type;
    char *    data;
    size_t    stride;
};

// Copy `n_rows` rows of `n_embd` elements, turned, converting between f16 and f32. Returns false if an element is
// NaN or infinite or would be so in `dst`; no such element is written, the rows before it are. Blocks must not overlap.
bool notes_rows_turn(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd);

// The same without a turn.
bool notes_rows_copy(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd);

// The same, transposed: element j of row i of `src` becomes element i of row j of `dst`, which has n_cols rows.
bool notes_rows_transpose(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols);
