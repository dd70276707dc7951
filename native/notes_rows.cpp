#include "notes_rows.h"

#include "ggml-cpu.h"
#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

// From llama.cpp's sources, inlined.
#define XXH_INLINE_ALL
#ifdef __AVX512F__
#define XXH_VECTOR XXH_AVX2 // as fast, and GCC 12 has warnings for its own intrinsics of AVX-512
#endif
#include "xxhash.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

// True if every element is finite and stays so in the type `into`. The range of a quantized type depends on the elements of
// the block: there, as for f16, 65520 is the bound. Integer maxima instead of isfinite: these loops are vectorised.
static bool fits(ggml_type type, const void * row, int n, ggml_type into) {
    if (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) {
        const uint16_t * x = (const uint16_t *) row;
        uint16_t top = 0;
        for (int i = 0; i < n; ++i) {
            top = std::max<uint16_t>(top, x[i] & 0x7fff);
        }
        return top < (type == GGML_TYPE_F16 ? 0x7c00 : into == GGML_TYPE_F32 || into == type ? 0x7f80 : 0x4780);
    }
    const uint32_t * x = (const uint32_t *) row;
    uint32_t top = 0;
    for (int i = 0; i < n; ++i) {
        top = std::max<uint32_t>(top, x[i] & 0x7fffffff);
    }
    // the smallest value that rounds to infinity: 2^128 - 2^119 in bf16, 65520 in f16
    return top < (into == GGML_TYPE_F32 ? 0x7f800000u : into == GGML_TYPE_BF16 ? 0x7f7f8000u : 0x477ff000u);
}

static bool can(ggml_type type) {
    return type == GGML_TYPE_F32 || (ggml_get_type_traits(type)->to_float && ggml_get_type_traits_cpu(type)->from_float);
}

// ggml's own is compiled for the baseline instruction set.
static void dequantize(const block_q8_0 * __restrict x, float * __restrict y, int n) {
    for (int i = 0; i < n/QK8_0; ++i) {
        const float d = ggml_fp16_to_fp32(x[i].d);
        for (int j = 0; j < QK8_0; ++j) {
            y[i*QK8_0 + j] = d*x[i].qs[j];
        }
    }
}

// Convert `n` elements. One of the types is f32, or both are the same.
static void convert(ggml_type from, const void * src, ggml_type to, void * dst, int n) {
    if (from == to) {
        memcpy(dst, src, ggml_row_size(from, n));
    } else if (from == GGML_TYPE_F16) {
        ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src, (float *) dst, n);
    } else if (to == GGML_TYPE_F16) {
        ggml_cpu_fp32_to_fp16((const float *) src, (ggml_fp16_t *) dst, n);
    } else if (from == GGML_TYPE_Q8_0) {
        dequantize((const block_q8_0 *) src, (float *) dst, n);
    } else if (to == GGML_TYPE_F32) {
        ggml_get_type_traits(from)->to_float(src, (float *) dst, n);
    } else {
        ggml_get_type_traits_cpu(to)->from_float((const float *) src, dst, n);
    }
}

// Multiply every `size` elements with the orthonormal Walsh-Hadamard matrix, which is its own inverse.
static void mix(float * x, int n, int size) {
    const float scale = 1.0f/sqrtf(size);
    for (int first = 0; first < n; first += size) {
        for (int half = 1; half < size; half *= 2) {
            for (int i = first; i < first + size; i += 2*half) {
                for (int j = i; j < i + half; ++j) {
                    const float a = x[j];
                    const float b = x[j + half];
                    x[j]        = a + b;
                    x[j + half] = a - b;
                }
            }
        }
    }
    for (int i = 0; i < n; ++i) {
        x[i] *= scale;
    }
}

// memcpy that bypasses the processor's caches: memory that will be overwritten need not be read first, which is a third of
// the traffic of a copy and most of its latency where lines have gaps. Stores are as wide as possible: a whole line at once
// makes a splice a tenth faster than four stores. Call `settle` when all is written.
static void stream(void * dst, const void * src, size_t size) {
#if defined(__x86_64__) || defined(_M_X64)
    if ((uintptr_t) dst % 64 == 0 && size % 64 == 0) {
#if defined(__AVX512F__)
        using wide = __m512i;
        const auto load  = [](const void * from) { return _mm512_loadu_si512(from); };
        const auto store = [](wide * to, wide x) { _mm512_stream_si512(to, x); };
#elif defined(__AVX__)
        using wide = __m256i;
        const auto load  = [](const void * from) { return _mm256_loadu_si256((const wide *) from); };
        const auto store = [](wide * to, wide x) { _mm256_stream_si256(to, x); };
#else
        using wide = __m128i;
        const auto load  = [](const void * from) { return _mm_loadu_si128((const wide *) from); };
        const auto store = [](wide * to, wide x) { _mm_stream_si128(to, x); };
#endif
        for (size_t i = 0; i < size; i += sizeof(wide)) {
            store((wide *) ((char *) dst + i), load((const char *) src + i));
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

#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
// Rows in an f16 cache, the usual case: converted, rotated and converted back in registers. The loops below, for all other
// types, pass over a row of f32 five times, which costs as much as the memory traffic.
struct row_f16 {
    const uint16_t * x;

    __m256 load(int j) const { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (x + j))); }
};

struct row_q8_0 {
    const block_q8_0 * x;

    __m256 load(int j) const { // j is a multiple of 8
        const auto & block = x[j/QK8_0];
        const __m128i q = _mm_loadl_epi64((const __m128i *) (block.qs + j%QK8_0));
        return _mm256_mul_ps(_mm256_set1_ps(_cvtsh_ss(block.d)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)));
    }
};

static bool into_f16(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_embd) {
    if (dst.type != GGML_TYPE_F16 || src.hadamard || dst.hadamard || (!turn.identity && turn.rotation.n_rot % 16)) {
        return false;
    }
    const bool eights = n_embd % 8 == 0 && (turn.identity || (turn.rotation.head_size % 8 == 0 && turn.rotation.offset % 8 == 0));
    return src.type == GGML_TYPE_F16 ? !turn.identity : src.type == GGML_TYPE_Q8_0 && eights;
}

template<typename row_type>
static void convert_f16(const row_type & x, uint16_t * y, int n) {
    for (int j = 0; j < n; j += 8) {
        _mm_storeu_si128((__m128i *) (y + j), _mm256_cvtps_ph(x.load(j), _MM_FROUND_TO_NEAREST_INT));
    }
}

static void convert_f16(const row_f16 & x, uint16_t * y, int n) {
    memcpy(y, x.x, n*sizeof(uint16_t));
}

// Rotate the head whose rotated elements start at `first`.
template<typename row_type>
static void turn_head_f16(const notes_turn & turn, const row_type & x, int first, uint16_t * y) {
    const float * c = turn.cos.data();
    const float * s = turn.sin.data();

    const auto load  = [&](int j) { return x.load(first + j); };
    const auto store = [&](int j, __m256 a, __m256 partner) {
        const __m256 sum = _mm256_fmadd_ps(a, _mm256_loadu_ps(c + j), _mm256_mul_ps(partner, _mm256_loadu_ps(s + j)));
        _mm_storeu_si128((__m128i *) (y + first + j), _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
    };
    if (turn.rotation.type == LLAMA_ROPE_TYPE_NORM) {
        for (int j = 0; j < turn.rotation.n_rot; j += 8) {
            const __m256 a = load(j);
            store(j, a, _mm256_permute_ps(a, 0xb1)); // swap neighbours
        }
    } else {
        const int half = turn.rotation.n_rot/2;
        for (int j = 0; j < half; j += 8) {
            const __m256 a = load(j);
            const __m256 b = load(j + half);
            store(j,        a, b);
            store(j + half, b, a);
        }
    }
}

template<typename row_type, typename item>
static bool move_into_f16(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    const auto & rotation = turn.rotation;
    const size_t size = n_embd*sizeof(uint16_t);
    std::vector<uint16_t> row(n_embd);
    for (int i = 0; i < n_rows; ++i) {
        const row_type x { (const item *) (src.data + i*src.stride) };
        if (turn.identity || rotation.n_rot < rotation.head_size) {
            convert_f16(x, row.data(), n_embd); // for elements that are not rotated
        }
        for (int h = 0; h < (turn.identity ? 0 : rotation.n_head); ++h) {
            turn_head_f16(turn, x, h*rotation.head_size + rotation.offset, row.data());
        }
        if (!fits(GGML_TYPE_F16, row.data(), n_embd, GGML_TYPE_F16)) {
            return false;
        }
        stream(dst.data + i*dst.stride, row.data(), size);
    }
    settle();
    return true;
}

static bool move_f16(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    return src.type == GGML_TYPE_F16 ? move_into_f16<row_f16,  uint16_t>  (turn, src, dst, n_rows, n_embd)
                                     : move_into_f16<row_q8_0, block_q8_0>(turn, src, dst, n_rows, n_embd);
}
#else
static bool into_f16(const notes_turn &, const notes_row_block &, const notes_row_block &, int) {
    return false;
}

static bool move_f16(const notes_turn &, const notes_row_block &, const notes_row_block &, int, int) {
    return false;
}
#endif

static bool copy(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    const size_t size = ggml_row_size(src.type, n_embd);
    for (int i = 0; i < n_rows; ++i) {
        const char * row = src.data + i*src.stride;
        if (!fits(src.type, row, n_embd, dst.type)) {
            return false;
        }
        stream(dst.data + i*dst.stride, row, size);
    }
    settle();
    return true;
}

static bool move(const notes_turn & turn, const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    if (turn.identity && src.type == dst.type && src.hadamard == dst.hadamard && !ggml_is_quantized(src.type)) {
        return copy(src, dst, n_rows, n_embd);
    }
    if (into_f16(turn, src, dst, n_embd)) {
        return move_f16(turn, src, dst, n_rows, n_embd);
    }

    const auto & rotation = turn.rotation;

    std::vector<float> x(n_embd);
    std::vector<float> y(n_embd);

    for (int i = 0; i < n_rows; ++i) {
        convert(src.type, src.data + i*src.stride, GGML_TYPE_F32, x.data(), n_embd);
        if (src.hadamard) {
            mix(x.data(), n_embd, src.hadamard);
        }
        if (!turn.identity) {
            if (rotation.n_rot < rotation.head_size) {
                y = x; // for elements that are not rotated
            }
            for (int h = 0; h < rotation.n_head; ++h) {
                const int first = h*rotation.head_size + rotation.offset;
                turn_head(turn, x.data() + first, y.data() + first);
            }
            std::swap(x, y);
        }
        if (dst.hadamard) {
            mix(x.data(), n_embd, dst.hadamard);
        }
        if (!fits(GGML_TYPE_F32, x.data(), n_embd, dst.type)) { // NaN and infinity survive all of the above
            return false;
        }
        convert(GGML_TYPE_F32, x.data(), dst.type, y.data(), n_embd);
        stream(dst.data + i*dst.stride, y.data(), ggml_row_size(dst.type, n_embd));
    }

    settle();
    return true;
}

static constexpr int TILE = 32; // 64 bytes of f16: writes are whole cache lines

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

// Process bands of rows that end at a cache line of `dst`, a tile at a time; each band is checked before it is written.
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
                    memcpy(a + r*TILE, from, TILE*sizeof(T)); // of constant size: no call, twice the speed
                } else if (src.type == dst.type || src.type == GGML_TYPE_F32 || dst.type == GGML_TYPE_F32) {
                    convert(src.type, from, dst.type, a + r*TILE, m);
                } else {
                    float x[TILE];
                    convert(src.type, from, GGML_TYPE_F32, x, m);
                    convert(GGML_TYPE_F32, x, dst.type, a + r*TILE, m);
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

static bool transpose_plain(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols) {
    return dst.type == GGML_TYPE_F32 ? transpose<float>(src, dst, n_rows, n_cols) : transpose<uint16_t>(src, dst, n_rows, n_cols);
}

static bool transpose_rows(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols) {
    if (!ggml_is_quantized(src.type)) {
        return transpose_plain(src, dst, n_rows, n_cols);
    }
    // Blocks run across the direction of writing: the same bands, converted to the type of `dst` first.
    const size_t item = ggml_type_size(dst.type);
    std::vector<char> band(TILE*n_cols*item);
    const notes_row_block plain { dst.type, band.data(), n_cols*item };
    for (int i = 0, n = 0; i < n_rows; i += n) {
        char * cols = dst.data + i*item;
        n = std::min<int>(n_rows - i, TILE - (uintptr_t) cols/item % TILE);
        const notes_row_block some { src.type, src.data + i*src.stride, src.stride };
        if (!move({}, some, plain, n, n_cols) || !transpose_plain(plain, { dst.type, cols, dst.stride }, n, n_cols)) {
            return false;
        }
    }
    return true;
}

static void hash(void * state, const char * data, size_t size) {
    XXH3_128bits_update((XXH3_state_t *) state, data, size);
}

static void product(const float * s, const float * a, const float * b, float * out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        float * row = out + i*n;
        memcpy(row, b + i*n, n*sizeof(float));
        for (int64_t k = 0; k < n; ++k) {
            const float factor = s[i*n + k];
            const float * from = a + k*n;
            for (int64_t j = 0; j < n; ++j) {
                row[j] += factor*from[j];
            }
        }
    }
}

// The backend returns this table by name (patches/hooks/hooks.patch).
extern "C" {
notes_row_loops notes_row_loops_here = { can, move, transpose_rows, hash, product };
}
