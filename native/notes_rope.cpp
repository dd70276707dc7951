#include "notes_rope.h"

#include "llama-context.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <set>

// Architectures whose layers all rotate K exactly as their hyper-parameters say: their rows and logits have been
// measured against decoding at the target position (make zoo, docs/architectures.md). One that is not here may decide
// in its graph which layers rotate, or weight K after the rotation: turning its rows on trust could make a silently
// wrong cache.
static const std::set<llm_arch> MEASURED = {
    LLM_ARCH_ARCEE, LLM_ARCH_ARCTIC, LLM_ARCH_BAILINGMOE, LLM_ARCH_BAILINGMOE2, LLM_ARCH_CHATGLM,
    LLM_ARCH_CODESHELL, LLM_ARCH_COMMAND_R, LLM_ARCH_DBRX, LLM_ARCH_DECI, LLM_ARCH_DEEPSEEK,
    LLM_ARCH_DOTS1, LLM_ARCH_ERNIE4_5, LLM_ARCH_ERNIE4_5_MOE, LLM_ARCH_EXAONE, LLM_ARCH_FALCON,
    LLM_ARCH_GEMMA, LLM_ARCH_GPTNEOX, LLM_ARCH_GRANITE, LLM_ARCH_GRANITE_MOE, LLM_ARCH_GROK,
    LLM_ARCH_GROVEMOE, LLM_ARCH_HY_V3, LLM_ARCH_INTERNLM2, LLM_ARCH_JAIS2, LLM_ARCH_LLAMA,
    LLM_ARCH_MINICPM, LLM_ARCH_MINIMAX_M2, LLM_ARCH_MISTRAL3, LLM_ARCH_NANBEIGE,
    LLM_ARCH_NEMOTRON, LLM_ARCH_OLMO, LLM_ARCH_OLMOE, LLM_ARCH_OPENELM, LLM_ARCH_ORION,
    LLM_ARCH_PHI2, LLM_ARCH_PHI3, LLM_ARCH_PHIMOE, LLM_ARCH_PLAMO, LLM_ARCH_QWEN,
    LLM_ARCH_QWEN2, LLM_ARCH_QWEN2MOE, LLM_ARCH_QWEN3, LLM_ARCH_QWEN3MOE, LLM_ARCH_SEED_OSS,
    LLM_ARCH_SMOLLM3, LLM_ARCH_STABLELM, LLM_ARCH_STARCODER2, LLM_ARCH_TALKIE, LLM_ARCH_XVERSE,
};

std::string notes_rotation_refusal(const llama_context & ctx) {
    const auto & model = ctx.get_model();

    if (model.hparams.n_pos_per_embd() != 1) {
        return "positions with several axes (M-RoPE) are not supported yet";
    }
    if (model.hparams.rope_type != LLAMA_ROPE_TYPE_NORM && model.hparams.rope_type != LLAMA_ROPE_TYPE_NEOX) {
        return "this model's keys have no rotary positions that could be turned";
    }
#ifndef NOTES_ZOO
    if (MEASURED.count(model.arch) == 0) {
        return "how architecture '" + model.arch_name() + "' rotates its keys has not been verified";
    }
#endif
    return "";
}

// Some graphs leave layers unrotated that the hyper-parameters know nothing of.
static bool graph_rotates(const llama_model & model, int32_t il) {
    switch (model.arch) {
        case LLM_ARCH_SMOLLM3: return (il + 1) % model.hparams.n_no_rope_layer_step != 0; // models/smollm3.cpp
        default:               return true;
    }
}

notes_rotation notes_layer_rotation(const llama_context & ctx, int32_t il) {
    const auto & model   = ctx.get_model();
    const auto & hparams = model.hparams;
    const auto & cparams = ctx.get_cparams();

    notes_rotation res;
    res.n_head    = hparams.n_head_kv(il);
    res.head_size = hparams.n_embd_head_k(il);

    if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE || !hparams.has_rope(il) || !graph_rotates(model, il)) {
        return res;
    }

    res.type       = hparams.rope_type;
    res.n_rot      = hparams.n_rot(il);
    res.freq_base  = model.get_rope_freq_base(cparams, il);
    res.freq_scale = model.get_rope_freq_scale(cparams, il);

    const bool  yarn = cparams.yarn_ext_factor != 0.0f;
    const int   n    = res.n_rot / 2;

    // the factor of rope_yarn (ggml-cpu/ops.cpp): the forward pass has put it into K once
    res.magnitude = cparams.yarn_attn_factor * (yarn ? 1.0f + 0.1f*logf(1.0f/res.freq_scale) : 1.0f);

    std::vector<float> factors(n, 1.0f);
    if (const ggml_tensor * t = model.get_rope_factors(cparams, il)) {
        ggml_backend_tensor_get(t, factors.data(), 0, std::min<size_t>(n*sizeof(float), ggml_nbytes(t)));
    }

    float corr[2] = { 0.0f, 0.0f };
    if (yarn) {
        ggml_rope_yarn_corr_dims(res.n_rot, cparams.n_ctx_orig_yarn, res.freq_base, cparams.yarn_beta_fast, cparams.yarn_beta_slow, corr);
    }

    // The kernels step theta by a float ratio; starting from the same float keeps our angles theirs far along the text.
    const float step = powf(res.freq_base, -2.0f/res.n_rot);

    res.freq.resize(n);
    for (int i = 0; i < n; ++i) {
        const double extrapolated = std::pow((double) step, i) / factors[i];
        const double interpolated = extrapolated * res.freq_scale;

        double mix = 0.0; // share of the extrapolated frequency, ramping down over the pairs (rope_yarn_ramp)
        if (yarn) {
            const float y = (i - corr[0]) / std::max(0.001f, corr[1] - corr[0]);
            mix = (1.0f - std::min(1.0f, std::max(0.0f, y))) * cparams.yarn_ext_factor;
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
        // NORM pairs neighbours (2i, 2i+1), NEOX pairs halves (i, i + n_rot/2)
        const int a = rotation.type == LLAMA_ROPE_TYPE_NORM ? 2*i     : i;
        const int b = rotation.type == LLAMA_ROPE_TYPE_NORM ? 2*i + 1 : i + n_rot/2;
        cos[a] = cos[b] = (float) std::cos(angle);
        sin[b] = (float) std::sin(angle);
        sin[a] = -sin[b];
    }
}
