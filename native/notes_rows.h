// notes_rows.h: inner loops over K and V rows: rotate, convert, mix, transpose, and check for NaN.
#pragma once

#include "notes_rope.h"

#include "ggml.h"

#include <cstddef>
#include <cstdint>

// Rows of elements of `type`, consecutive rows `stride` bytes apart. A quantized cache keeps a row mixed: every `hadamard`
// elements multiplied with an orthonormal Walsh-Hadamard matrix, which spreads outliers. 0: not mixed.
struct notes_row_block {
    ggml_type type;
    char *    data;
    size_t    stride;
    int       hadamard = 0;
};

// Function table of the loops. notes_rows.cpp is compiled into each CPU backend, for its instruction set: where a build has
// several backends, the one that ggml loads provides the loops.
struct notes_row_loops {
    // True if rows can be converted from and to this type.
    bool (*can)(ggml_type type);

    // Copy `n_rows` rows of `n_embd` elements, rotated, in float, rounding once; bit for bit without rotation and conversion.
    // Returns false if an element is NaN or infinite, or would be in `dst`; no such element is written, but the rows before
    // it are. Blocks must not overlap.
    bool (*move)(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd);

    // Copy transposed, without rotation: element j of row i of `src` becomes element i of row j of `dst`, which has n_cols
    // rows. Neither is mixed, `dst` is not quantized.
    bool (*transpose)(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols);

    // XXH3_128bits_update: `state` is an XXH3_state_t.
    void (*hash)(void * state, const char * data, size_t size);

    // out = s a + b, square matrices of n rows, which do not overlap.
    void (*product)(const float * s, const float * a, const float * b, float * out, int64_t n);
};

// Loops of the loaded CPU backend. Throws notes_failure if it has none.
const notes_row_loops & notes_loops();
