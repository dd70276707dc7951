#include "notes_rows.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

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

static const float * load(ggml_type type, const void * row, float * buffer, int n) {
    if (type == GGML_TYPE_F32) {
        return (const float *) row;
    }
    ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) row, buffer, n);
    return buffer;
}

static void store(ggml_type type, void * row, const float * x, int n) {
    if (type == GGML_TYPE_F32) {
        memcpy(row, x, n*sizeof(float));
    } else {
        ggml_cpu_fp32_to_fp16(x, (ggml_fp16_t *) row, n);
    }
}

static void turn_head(const notes_turn & turn, const float * x, float * y) {
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

    std::vector<float> in(n_embd);
    std::vector<float> out(n_embd);

    for (int i = 0; i < n_rows; ++i) {
        const float * x = load(src.type, src.data + i*src.stride, in.data(), n_embd);
        if (rotation.n_rot < rotation.head_size) {
            memcpy(out.data(), x, n_embd*sizeof(float)); // what is not rotated
        }
        for (int h = 0; h < rotation.n_head; ++h) {
            const int first = h*rotation.head_size + rotation.offset;
            turn_head(turn, x + first, out.data() + first);
        }
        if (!fits(GGML_TYPE_F32, out.data(), n_embd, dst.type)) { // NaN and infinity come through a turn, and it can overflow
            return false;
        }
        store(dst.type, dst.data + i*dst.stride, out.data(), n_embd);
    }

    return true;
}

bool notes_rows_copy(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    std::vector<float> buffer(src.type == dst.type ? 0 : n_embd);

    for (int i = 0; i < n_rows; ++i) {
        const char * row = src.data + i*src.stride;
        if (!fits(src.type, row, n_embd, dst.type)) {
            return false;
        }
        if (src.type == dst.type) {
            memcpy(dst.data + i*dst.stride, row, ggml_row_size(src.type, n_embd));
        } else {
            store(dst.type, dst.data + i*dst.stride, load(src.type, row, buffer.data(), n_embd), n_embd);
        }
    }

    return true;
}

// Square tiles, so that neither side strides through more memory than the first cache holds.
template<typename S, typename D, typename F>
static void transpose(const S * src, size_t src_stride, D * dst, size_t dst_stride, int n_rows, int n_cols, F convert) {
    constexpr int TILE = 32;
    for (int i0 = 0; i0 < n_rows; i0 += TILE) {
        for (int j0 = 0; j0 < n_cols; j0 += TILE) {
            for (int j = j0; j < std::min(n_cols, j0 + TILE); ++j) {
                for (int i = i0; i < std::min(n_rows, i0 + TILE); ++i) {
                    dst[j*dst_stride + i] = convert(src[i*src_stride + j]);
                }
            }
        }
    }
}

static void transpose_any(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_cols) {
    const size_t s = src.stride / ggml_type_size(src.type);
    const size_t d = dst.stride / ggml_type_size(dst.type);
    const auto same = [](auto x) { return x; };

    if (src.type == GGML_TYPE_F16 && dst.type == GGML_TYPE_F16) {
        transpose((const uint16_t *) src.data, s, (uint16_t *) dst.data, d, n_rows, n_cols, same);
    } else if (src.type == GGML_TYPE_F32 && dst.type == GGML_TYPE_F32) {
        transpose((const float *) src.data, s, (float *) dst.data, d, n_rows, n_cols, same);
    } else if (src.type == GGML_TYPE_F16) {
        transpose((const ggml_fp16_t *) src.data, s, (float *) dst.data, d, n_rows, n_cols, ggml_fp16_to_fp32);
    } else {
        transpose((const float *) src.data, s, (ggml_fp16_t *) dst.data, d, n_rows, n_cols, ggml_fp32_to_fp16);
    }
}

bool notes_rows_to_columns(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    for (int i = 0; i < n_rows; ++i) {
        if (!fits(src.type, src.data + i*src.stride, n_embd, dst.type)) {
            return false;
        }
    }
    transpose_any(src, dst, n_rows, n_embd);
    return true;
}

bool notes_columns_to_rows(const notes_row_block & src, const notes_row_block & dst, int n_rows, int n_embd) {
    return notes_rows_to_columns(src, dst, n_embd, n_rows);
}
