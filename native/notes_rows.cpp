#include "notes_rows.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#endif

// Whether every element is finite and stays so when it is stored as `into`: a finite f32 can be infinite as f16.
// Integer maxima instead of isfinite: the compiler vectorises these loops.
static bool fits(ggml_type type, const void * row, int n, ggml_type into) {
    if (type == GGML_TYPE_F16) {
        const uint16_t * x = (const uint16_t *) row;
        uint16_t top = 0;
        for (int i = 0; i < n; ++i) {
            top = std::max<uint16_t>(top, x[i] & 0x7fff);
        }
        return top < 0x7c00;
    }
    const uint32_t * x = (const uint32_t *) row;
    uint32_t top = 0;
    for (int i = 0; i < n; ++i) {
        top = std::max<uint32_t>(top, x[i] & 0x7fffffff);
    }
    return top < (into == GGML_TYPE_F16 ? 0x477ff000u : 0x7f800000u); // 65520 is the first that rounds to infinity
}

// `n` elements in the other type, or as they are.
static void convert(ggml_type from, const void * src, ggml_type to, void * dst, int n) {
    if (from == to) {
        memcpy(dst, src, ggml_row_size(from, n));
    } else if (to == GGML_TYPE_F32) {
        ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src, (float *) dst, n);
    } else {
        ggml_cpu_fp32_to_fp16((const float *) src, (ggml_fp16_t *) dst, n);
    }
}

// memcpy that passes the processor's caches by: memory that is going to be overwritten need not be read first, which is
// a third of the traffic of a copy and most of the waiting where lines lie apart. Call `settle` when all is written.
static void stream(void * dst, const void * src, size_t size) {
#if defined(__x86_64__) || defined(_M_X64)
    if ((uintptr_t) dst % 64 == 0 && size % 64 == 0) {
        for (size_t i = 0; i < size; i += sizeof(__m128i)) {
            _mm_stream_si128((__m128i *) ((char *) dst + i), _mm_loadu_si128((const __m128i *) ((const char *) src + i)));
        }
        return;
    }
#endif
    memcpy(dst, src, size);
}

static void settle() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_sfence();
#endif
}

// Without __restrict these loops are not vectorised.
static void turn_head(const notes_turn & turn, const float * __restrict x, float * __restrict y) {
    const int n_rot = turn.rotation.n_rot;
    const int half  = n_rot/2;

    const float * c = turn.cos.data();
    const float * s = turn.sin.data();

    if (turn.rotation.type == LLAMA_ROPE_TYPE_NORM) {
        for (int j = 0; j < n_rot; j += 2) {
            y[j]     = x[j]    *c[j]     + x[j + 1]*s[j];
            y[j + 1] = x[j + 1]*c[j + 1] + x[j]    *s[j + 1];
        }
    } else {
        for (int j = 0; j < half; ++j) {
            y[j]        = x[j]       *c[j]        + x[j + half]*s[j];
            y[j + half] = x[j + half]*c[j + half] + x[j]       *s[j + half];
        }
    }
}

bool notes_rows_turn(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    if (turn.identity) {
        return notes_rows_copy(src, dst, n_rows, n_embd);
    }

    const auto & rotation = turn.rotation;

    std::vector<float> x(n_embd);
    std::vector<float> y(n_embd);

    for (int i = 0; i < n_rows; ++i) {
        convert(src.type, src.data + i*src.stride, GGML_TYPE_F32, x.data(), n_embd);
        if (rotation.n_rot < rotation.head_size) {
            y = x; // what is not rotated
        }
        for (int h = 0; h < rotation.n_head; ++h) {
            const int first = h*rotation.head_size;
            turn_head(turn, x.data() + first, y.data() + first);
        }
        if (!fits(GGML_TYPE_F32, y.data(), n_embd, dst.type)) { // NaN and infinity come through a turn, and it can overflow
            return false;
        }
        convert(GGML_TYPE_F32, y.data(), dst.type, x.data(), n_embd);
        stream(dst.data + i*dst.stride, x.data(), ggml_row_size(dst.type, n_embd));
    }

    settle();
    return true;
}

bool notes_rows_copy(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    std::vector<float> buffer(n_embd);

    for (int i = 0; i < n_rows; ++i) {
        const char * row = src.data + i*src.stride;
        if (!fits(src.type, row, n_embd, dst.type)) {
            return false;
        }
        if (src.type != dst.type) {
            convert(src.type, row, dst.type, buffer.data(), n_embd);
            row = (const char *) buffer.data();
        }
        stream(dst.data + i*dst.stride, row, ggml_row_size(dst.type, n_embd));
    }

    settle();
    return true;
}

static constexpr int TILE = 32; // 64 bytes of f16: what is written is whole cache lines

// Transpose TILE x TILE elements of `a`, with the help of `b`; returns which of the two holds the result. A perfect
// shuffle rotates the bits of every index by one, so five of them swap the row's five bits with the column's: loops
// that, unlike one over rows and columns, are vectorised.
template<typename T>
static const T * transpose_tile(T * a, T * b) {
    constexpr int half = TILE*TILE/2;
    for (int size = 1; size < TILE; size *= 2) {
        const T * __restrict from = a;
        T * __restrict to = b;
        for (int i = 0; i < half; ++i) {
            to[2*i]     = from[i];
            to[2*i + 1] = from[i + half];
        }
        std::swap(a, b);
    }
    return a;
}

// Bands of rows that end where a cache line of `dst` does, a tile at a time; each band is looked through before it is
// written.
template<typename T>
static bool transpose(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols) {
    alignas(64) T a[TILE*TILE] = {};
    alignas(64) T b[TILE*TILE] = {};

    for (int i = 0, n = 0; i < n_rows; i += n) {
        const char * rows = src.data + i*src.stride;
        char       * cols = dst.data + i*sizeof(T);
        n = std::min<int>(n_rows - i, TILE - (uintptr_t) cols/sizeof(T) % TILE);

        for (int r = 0; r < n; ++r) {
            if (!fits(src.type, rows + r*src.stride, n_cols, dst.type)) {
                return false;
            }
        }
        for (int j = 0; j < n_cols; j += TILE) {
            const int m = std::min(n_cols - j, TILE);
            for (int r = 0; r < n; ++r) {
                const char * from = rows + r*src.stride + j*ggml_type_size(src.type);
                if (src.type == dst.type && m == TILE) {
                    memcpy(a + r*TILE, from, TILE*sizeof(T)); // of a size known here: no call, twice the speed
                } else {
                    convert(src.type, from, dst.type, a + r*TILE, m);
                }
            }
            const T * t = transpose_tile(a, b);
            for (int c = 0; c < m; ++c) {
                stream(cols + (j + c)*dst.stride, t + c*TILE, n*sizeof(T));
            }
        }
    }

    settle();
    return true;
}

bool notes_rows_transpose(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols) {
    return dst.type == GGML_TYPE_F16 ? transpose<ggml_fp16_t>(src, dst, n_rows, n_cols) : transpose<float>(src, dst, n_rows, n_cols);
}
