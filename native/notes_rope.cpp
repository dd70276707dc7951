#include "notes_rope.h"

#include "notes_graph.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <array>
#include <cmath>

// True if a pair rotates when a text or an image moves along the time axis: with M-RoPE time, row and column all grow by the
// distance, but the fourth axis stays 0 (ggml_mrope_cache_init in ggml-cpu/ops.cpp; llm_graph_input_pos).
static bool follows_time(llama_rope_type type, const std::array<int, 4> & sections, int pair) {
    const int sector = pair % std::max(1, sections[0] + sections[1] + sections[2] + sections[3]);
    switch (type) {
        case LLAMA_ROPE_TYPE_MROPE:  return sector < sections[0] + sections[1] + sections[2];
        case LLAMA_ROPE_TYPE_IMROPE: return sector < 3*sections[sector % 3];
        default:                     return true;
    }
}

notes_rotation notes_layer_rotation(const llama_context & ctx, const llama_hparams & hparams, notes_layer_kind kind, int32_t il) {
    const auto & cparams = ctx.get_cparams();
    const auto   graph   = notes_graph_of(ctx, hparams, kind, il);

    notes_rotation res;
    res.n_head    = hparams.n_head_kv(il);
    res.head_size = hparams.n_embd_head_k(il);

    if (graph.type == LLAMA_ROPE_TYPE_NONE) {
        return res;
    }

    res.type       = graph.type;
    res.n_rot      = graph.n_rot;
    res.offset     = graph.offset;
    res.freq_base  = graph.freq_base;
    res.freq_scale = graph.freq_scale;

    const bool yarn = graph.ext_factor != 0.0f;
    const int  n    = res.n_rot / 2;

    // the factor of rope_yarn (ggml-cpu/ops.cpp), which the forward pass has applied to K once
    res.magnitude = graph.attn_factor * (yarn ? 1.0f + 0.1f*logf(1.0f/res.freq_scale) : 1.0f);

    std::vector<float> factors(n, 1.0f);
    if (graph.factors) {
        ggml_backend_tensor_get(graph.factors, factors.data(), 0, std::min<size_t>(n*sizeof(float), ggml_nbytes(graph.factors)));
    }

    float corr[2] = { 0.0f, 0.0f };
    if (yarn) {
        ggml_rope_yarn_corr_dims(res.n_rot, cparams.n_ctx_orig_yarn, res.freq_base, cparams.yarn_beta_fast, cparams.yarn_beta_slow, corr);
    }

    // The kernels step theta by a float ratio; starting from the same float keeps our angles equal at large positions.
    const float step = powf(res.freq_base, -2.0f/res.n_rot);

    res.freq.resize(n);
    for (int i = 0; i < n; ++i) {
        if (!follows_time(res.type, hparams.rope_sections, i)) {
            continue; // stays 0
        }
        const double extrapolated = std::pow((double) step, i) / factors[i];
        const double interpolated = extrapolated * res.freq_scale;

        double mix = 0.0; // share of the extrapolated frequency, ramping down over the pairs (rope_yarn_ramp)
        if (yarn) {
            const float y = (i - corr[0]) / std::max(0.001f, corr[1] - corr[0]);
            mix = (1.0f - std::min(1.0f, std::max(0.0f, y))) * graph.ext_factor;
        }
        res.freq[i] = interpolated*(1.0 - mix) + extrapolated*mix;
    }

    return res;
}

notes_turn::notes_turn(const notes_rotation & rotation, double distance)
    : identity(distance == 0.0 || rotation.type == LLAMA_ROPE_TYPE_NONE), rotation(rotation) {
    if (identity) {
        return;
    }

    const int n_rot = rotation.n_rot;
    cos.resize(n_rot);
    sin.resize(n_rot);

    for (int i = 0; i < n_rot/2; ++i) {
        const double angle = distance*rotation.freq[i];
        // NORM pairs neighbours (2i, 2i+1), all others pair halves (i, i + n_rot/2)
        const int a = rotation.type == LLAMA_ROPE_TYPE_NORM ? 2*i     : i;
        const int b = rotation.type == LLAMA_ROPE_TYPE_NORM ? 2*i + 1 : i + n_rot/2;
        cos[a] = cos[b] = (float) std::cos(angle);
        sin[b] = (float) std::sin(angle);
        sin[a] = -sin[b];
    }
}
