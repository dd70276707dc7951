// notes_rows.h: the inner loops over K and V rows: rotate, convert, mix, transpose, and look for NaN on the way.
#pragma once

#include "notes_rope.h"

#include "ggml.h"

#include <cstddef>
#include <cstdint>

// Rows of `n` elements of `type`, consecutive rows `stride` bytes apart. A quantized cache keeps a row mixed: every
// `hadamard` elements multiplied with an orthonormal Walsh-Hadamard matrix, which spreads outliers. 0: not mixed.
struct notes_row_block {
    ggml_type type;
    char *    data;
    size_t    stride;
    int       hadamard = 0;
};

// The loops. notes_rows.cpp is a part of each CPU backend, compiled for the processors that the backend is for: where a
// build has several, ggml chooses one of them when it loads it, and with it these.
struct notes_row_loops {
    // Whether rows can be converted from and to this type.
    bool (*can)(ggml_type type);

    // Copy `n_rows` rows of `n_embd` elements, rotated, in float, rounding once. Bit for bit where nothing is to be done.
    // Returns false if an element is NaN or infinite or would be so in `dst`; no such element is written, the rows before
    // it are. Blocks must not overlap.
    bool (*move)(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd);

    // The same without a rotation, transposed: element j of row i of `src` becomes element i of row j of `dst`, which has
    // n_cols rows. Neither is mixed, `dst` is not quantized.
    bool (*transpose)(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols);

    // XXH3_128bits_update: `state` is an XXH3_state_t.
    void (*hash)(void * state, const char * data, size_t size);

    // out = s a + b, square matrices of n rows, which do not overlap.
    void (*product)(const float * s, const float * a, const float * b, float * out, int64_t n);
};

// Those of the CPU backend that is loaded. Throws notes_failure if it has none.
const notes_row_loops & notes_loops();
