#include "notes_graph.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-model.h"

#include <algorithm>
#include <set>

// Architectures whose graphs have been reviewed and whose moved rows and logits have been compared with a decode at the target
// position (make zoo, docs/architectures.md). Moving rows of an unreviewed one could make a silently wrong cache. Special
// cases of a graph are in notes_graph_of.
static const std::set<llm_arch> KNOWN = {
    LLM_ARCH_AFMOE, LLM_ARCH_APERTUS, LLM_ARCH_ARCEE, LLM_ARCH_ARCTIC, LLM_ARCH_BAICHUAN, LLM_ARCH_BAILINGMOE,
    LLM_ARCH_BAILINGMOE2, LLM_ARCH_BITNET, LLM_ARCH_BLOOM, LLM_ARCH_CHATGLM, LLM_ARCH_CODESHELL, LLM_ARCH_COGVLM,
    LLM_ARCH_COHERE2, LLM_ARCH_COHERE2MOE, LLM_ARCH_COMMAND_R, LLM_ARCH_DBRX, LLM_ARCH_DECI, LLM_ARCH_DEEPSEEK,
    LLM_ARCH_DEEPSEEK2, LLM_ARCH_DEEPSEEK32, LLM_ARCH_DOTS1, LLM_ARCH_DOTS3NOTE, LLM_ARCH_ERNIE4_5,
    LLM_ARCH_ERNIE4_5_MOE, LLM_ARCH_EXAONE, LLM_ARCH_EXAONE4, LLM_ARCH_EXAONE_MOE, LLM_ARCH_FALCON, LLM_ARCH_GEMMA,
    LLM_ARCH_GEMMA2, LLM_ARCH_GEMMA3, LLM_ARCH_GEMMA3N, LLM_ARCH_GEMMA4, LLM_ARCH_GLM4, LLM_ARCH_GLM4_MOE,
    LLM_ARCH_GLM_DSA, LLM_ARCH_GPTNEOX, LLM_ARCH_GRANITE, LLM_ARCH_GRANITE_MOE, LLM_ARCH_GRANITE_SWA,
    LLM_ARCH_GRANITE_SWITCH, LLM_ARCH_GROK, LLM_ARCH_GROVEMOE, LLM_ARCH_HRM_TEXT, LLM_ARCH_HY_V3, LLM_ARCH_HY_V4,
    LLM_ARCH_INTERNLM2, LLM_ARCH_JAIS, LLM_ARCH_JAIS2, LLM_ARCH_LAGUNA, LLM_ARCH_LLAMA, LLM_ARCH_LLAMA4,
    LLM_ARCH_MAPLE, LLM_ARCH_MELLUM, LLM_ARCH_MIMO2, LLM_ARCH_MINICPM, LLM_ARCH_MINICPM3, LLM_ARCH_MINIMAX_M2,
    LLM_ARCH_MINIMAX_M3, LLM_ARCH_MISTRAL3, LLM_ARCH_MISTRAL4, LLM_ARCH_MUSE_GLIMMER, LLM_ARCH_NANBEIGE,
    LLM_ARCH_NEMOTRON, LLM_ARCH_OLMO, LLM_ARCH_OLMO2, LLM_ARCH_OLMOE, LLM_ARCH_OPENAI_MOE, LLM_ARCH_OPENELM,
    LLM_ARCH_ORION, LLM_ARCH_PADDLEOCR, LLM_ARCH_PANGU_EMBED, LLM_ARCH_PHI2, LLM_ARCH_PHI3, LLM_ARCH_PHIMOE,
    LLM_ARCH_PLAMO, LLM_ARCH_PLAMO3, LLM_ARCH_POCKETTTS, LLM_ARCH_QWEN, LLM_ARCH_QWEN2, LLM_ARCH_QWEN2MOE,
    LLM_ARCH_QWEN2VL, LLM_ARCH_QWEN3, LLM_ARCH_QWEN3MOE, LLM_ARCH_QWEN3TTS, LLM_ARCH_QWEN3VL, LLM_ARCH_QWEN3VLMOE,
    LLM_ARCH_REFACT, LLM_ARCH_SEED_OSS, LLM_ARCH_SMALLTHINKER, LLM_ARCH_SMOLLM3, LLM_ARCH_SPARK2_5, LLM_ARCH_STABLELM,
    LLM_ARCH_STARCODER2, LLM_ARCH_STEP35, LLM_ARCH_TALKIE, LLM_ARCH_XVERSE,
};

// The same with attention and recurrent layers: docs/recurrent.md has the review of their state's dependencies.
static const std::set<llm_arch> HYBRID = {
    LLM_ARCH_BAILINGMOE3, LLM_ARCH_FALCON_H1, LLM_ARCH_GLM5_NEXT, LLM_ARCH_GRANITE_HYBRID, LLM_ARCH_JAMBA,
    LLM_ARCH_KIMI_K3, LLM_ARCH_KIMI_LINEAR, LLM_ARCH_LFM2, LLM_ARCH_LFM2MOE, LLM_ARCH_MINIMAX_01, LLM_ARCH_NEMOTRON_H,
    LLM_ARCH_NEMOTRON_H_MOE, LLM_ARCH_PLAMO2, LLM_ARCH_QWEN35, LLM_ARCH_QWEN35MOE, LLM_ARCH_QWEN3NEXT,
    LLM_ARCH_QWEN4EXP,
};

// With recurrent layers only.
static const std::set<llm_arch> RECURRENT = {
    LLM_ARCH_ARWKV7, LLM_ARCH_MAMBA, LLM_ARCH_MAMBA2, LLM_ARCH_RWKV6, LLM_ARCH_RWKV6QWEN2, LLM_ARCH_RWKV7,
};

// Layers that rotate K. Granite has it in its hyper-parameters, all others in their graphs.
static bool rotates(const llama_model & model, int32_t il) {
    const auto & hparams = model.hparams;
    const int32_t step = hparams.n_no_rope_layer_step;
    switch (model.arch) {
        case LLM_ARCH_AFMOE:
        case LLM_ARCH_LLAMA4:
            return step > 0 && (il + 1) % step != 0;
        case LLM_ARCH_SMOLLM3:
            return (il + 1) % step != 0;
        case LLM_ARCH_SMALLTHINKER:
            return step == (int32_t) hparams.n_layer() || il % step != 0;
        case LLM_ARCH_COHERE2:
        case LLM_ARCH_EXAONE_MOE:
        case LLM_ARCH_MAPLE:
        case LLM_ARCH_MUSE_GLIMMER:
            return hparams.is_swa(il);
        case LLM_ARCH_COHERE2MOE:
            return hparams.is_swa(il) || il < (int32_t) hparams.n_layer_dense_lead;
        case LLM_ARCH_EXAONE4:
            return hparams.is_swa(il) || hparams.swa_type == LLAMA_SWA_TYPE_NONE;
        case LLM_ARCH_BAICHUAN:
            return model.type == LLM_TYPE_7B; // the others have ALiBi
        default:
            return hparams.has_rope(il);
    }
}

notes_graph notes_graph_of(const llama_context & ctx, const llama_hparams & hparams, notes_layer_kind kind, int32_t il) {
    const auto & model   = ctx.get_model();
    const auto & cparams = ctx.get_cparams();

    notes_graph res = {};
    res.type = LLAMA_ROPE_TYPE_NONE;
    if (model.hparams.rope_type == LLAMA_ROPE_TYPE_NONE || !rotates(model, il)) {
        return res;
    }

    res.type        = model.hparams.rope_type;
    res.n_rot       = model.hparams.n_rot(); // most graphs use the first layer's for all
    res.freq_base   = model.get_rope_freq_base (cparams, il);
    res.freq_scale  = model.get_rope_freq_scale(cparams, il);
    res.ext_factor  = cparams.yarn_ext_factor;
    res.attn_factor = cparams.yarn_attn_factor;
    res.factors     = model.get_rope_factors(cparams, il);

    const bool window = model.hparams.is_swa(il);

    // With low-rank K (MLA) the rotated elements are at the end: of the row from which K and V are computed, or of a head.
    if (kind == NOTES_ATTENTION && (model.hparams.is_mla() || model.hparams.n_lora_kv > 0)) {
        res.offset = hparams.n_embd_head_k(il) - res.n_rot;
    }

    switch (model.arch) {
        // base and scale of the context on every layer, also where sliding windows have values of their own
        case LLM_ARCH_COHERE2:
        case LLM_ARCH_COHERE2MOE:
        case LLM_ARCH_EXAONE4:
        case LLM_ARCH_EXAONE_MOE:
        case LLM_ARCH_GRANITE_SWA:
        case LLM_ARCH_LFM2:
        case LLM_ARCH_LFM2MOE:
            res.freq_base  = cparams.rope_freq_base;
            res.freq_scale = cparams.rope_freq_scale;
            break;
        case LLM_ARCH_DOTS3NOTE:
            res.freq_scale = cparams.rope_freq_scale;
            break;
        // no scaling in the layers of the sliding window
        case LLM_ARCH_MELLUM:
        case LLM_ARCH_OLMO2:
            res.freq_base = cparams.rope_freq_base;
            if (window) {
                res.freq_scale  = 1.0f;
                res.ext_factor  = 0.0f;
                res.attn_factor = 1.0f;
            }
            break;
        case LLM_ARCH_LAGUNA:
            if (window) {
                res.n_rot       = model.hparams.n_rot(il);
                res.ext_factor  = 0.0f;
                res.attn_factor = 1.0f;
            }
            break;
        case LLM_ARCH_GEMMA4:
        case LLM_ARCH_MAPLE:
        case LLM_ARCH_SPARK2_5:
            res.n_rot = model.hparams.n_rot(il);
            break;
        // constants, which override the file and the user
        case LLM_ARCH_COGVLM:
            res.freq_base   = 10000.0f;
            res.freq_scale  = 1.0f;
            res.ext_factor  = 0.0f;
            res.attn_factor = 1.0f;
            res.factors     = nullptr;
            break;
        // factors that are in the file but not used by the graph
        case LLM_ARCH_FALCON_H1:
        case LLM_ARCH_PANGU_EMBED:
            res.factors = nullptr;
            break;
        case LLM_ARCH_STEP35:
            res.n_rot = model.hparams.n_rot(il);
            if (window) {
                res.factors = nullptr;
            }
            break;
        default:
            break;
    }

    if (kind == NOTES_INDEXER) {
        switch (model.arch) {
            case LLM_ARCH_GLM_DSA:
                res.type = LLAMA_ROPE_TYPE_NORM;
                break;
            case LLM_ARCH_HY_V4:
                res.offset = hparams.n_embd_head_k(il) - res.n_rot;
                break;
            case LLM_ARCH_MINIMAX_M3:
                break;
            case LLM_ARCH_GLM5_NEXT:
            case LLM_ARCH_QWEN4EXP:
                res.type = LLAMA_ROPE_TYPE_NONE; // pooled first, and rotated when they are used
                break;
            default:
                res.type = LLAMA_ROPE_TYPE_NEOX; // DeepSeek V3.2, dots3note
        }
    }

    return res;
}

bool notes_graph_mixes_k(const llama_context & ctx, notes_layer_kind kind) {
    const auto & model = ctx.get_model();
    if (kind == NOTES_ATTENTION) {
        return !model.hparams.is_mla(); // llm_graph_input_attn_k
    }
    return model.arch != LLM_ARCH_HY_V4 && model.arch != LLM_ARCH_MINIMAX_M3;
}

bool notes_graph_uses_indexer(const llama_context & ctx) {
    const auto & cparams = ctx.get_cparams();
    return ctx.get_model().arch != LLM_ARCH_MINIMAX_M3 || (cparams.flash_attn && (cparams.n_seq_max == 1 || !cparams.kv_unified));
}

#ifdef NOTES_WITH_FIXES
std::string notes_graph_bug(const llama_context &, int32_t) {
    return "";
}
#else
std::string notes_graph_bug(const llama_context & ctx, int32_t n_seqs) {
    switch (ctx.get_model().arch) {
        case LLM_ARCH_COGVLM:
            return "llama.cpp gives the logits of other tokens with CogVLM, and this library was built without the patch group 'fixes', which mends that";
        case LLM_ARCH_ARWKV7:
        case LLM_ARCH_PLAMO2:
        case LLM_ARCH_RWKV6QWEN2:
            return n_seqs < 2 ? "" : "llama.cpp computes wrong states for several sequences in one batch of this architecture, and this library "
                "was built without the patch group 'fixes', which mends that. Decode one sequence after the other";
        default:
            return "";
    }
}
#endif

std::string notes_graph_refusal(const llama_context & ctx) {
    if (!ctx.get_cparams().causal_attn) {
        return "this model's attention looks ahead, so rows depend on what follows them";
    }
    switch (ctx.get_model().arch) {
        case LLM_ARCH_DFLASH:
        case LLM_ARCH_EAGLE3:
        case LLM_ARCH_GEMMA4_ASSISTANT:
            return "a draft model's rows belong to the model that it drafts for";
        case LLM_ARCH_LLAMA_EMBED:
            return "this model keeps no K/V cache (an encoder or a diffusion model)"; // it has one, but never writes it
        default:
            return "";
    }
}

std::string notes_graph_move_refusal(const llama_context & ctx) {
    const auto & model = ctx.get_model();

    switch (model.arch) {
        // W*R(p)*q times W*R(p')*k is not a function of p - p'
        case LLM_ARCH_HUNYUAN_DENSE:
        case LLM_ARCH_HUNYUAN_MOE:
        case LLM_ARCH_HUNYUAN_VL:
        case LLM_ARCH_MAINCODER:
            return "this model weights its queries and keys after their rotation, so attention depends on absolute positions";
        default:
            break;
    }
    if (model.pos_embd) {
        return "this model learned a vector for every absolute position, so its rows belong where they were computed";
    }
#ifndef NOTES_ZOO
    if (KNOWN.count(model.arch) + HYBRID.count(model.arch) == 0) {
        return "how architecture '" + model.arch_name() + "' rotates its keys has not been verified";
    }
#endif
    return "";
}

std::string notes_graph_carry_refusal(const llama_context & ctx) {
    const auto & model = ctx.get_model();
#ifndef NOTES_ZOO
    if (HYBRID.count(model.arch) + RECURRENT.count(model.arch) == 0) {
        return "what the state of architecture '" + model.arch_name() + "' follows from has not been verified";
    }
#endif
    return RECURRENT.count(model.arch) ? "" : notes_graph_move_refusal(ctx);
}

std::string notes_graph_move_refusal(const llama_context & ctx, llama_pos base, llama_pos p0, int32_t n) {
    const auto & model   = ctx.get_model();
    const auto & hparams = model.hparams;

    const auto [low, high] = std::minmax(base, p0);
    const llama_pos last = high + n - 1;

    // With chunked attention a token attends to its own chunk of positions only.
    if (const int32_t size = hparams.n_swa; hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED && high % size != low % size &&
            (low/size != (low + n - 1)/size || high/size != last/size)) {
        return "rows cannot be moved across a boundary of this model's attention chunks of " + std::to_string(size) + " positions";
    }
    // Queries are scaled by their position, in steps, which changes the rows of higher layers.
    if (const int32_t size = hparams.n_attn_temp_floor_scale; hparams.f_attn_temp_scale != 0.0f && size > 0) {
        const llama_pos offset = hparams.f_attn_temp_offset;
        if ((low + offset)/size != (last + offset)/size) {
            return "rows cannot be moved from one stretch of " + std::to_string(size) + " positions to another: this model scales its attention by them";
        }
    }
    // Above a maximum number of blocks of positions, a token attends to those with the best scores.
    if (const int32_t size = hparams.indexer_block_size; model.arch == LLM_ARCH_MINIMAX_M3 && notes_graph_uses_indexer(ctx) &&
            size > 0 && (high - low) % size != 0 && last >= (int64_t) size*hparams.indexer_top_k) {
        return "from position " + std::to_string((int64_t) size*hparams.indexer_top_k) + " on, rows can be moved by multiples of " + std::to_string(size) + " positions only, this model's attention blocks";
    }
    // Where last tokens that do not fill a pool are never attended to, the starts of pools matter from the first token on.
    if (const int32_t size = hparams.indexer_kpool; model.arch == LLM_ARCH_GLM5_NEXT && !hparams.indexer_kpool_select_tail &&
            size > 0 && (high - low) % size != 0) {
        return "rows can be moved by multiples of " + std::to_string(size) + " positions only, over which this model pools what it looks at";
    }
    // Above a maximum, keys of an indexer that are pooled over ranges of positions select the rows to attend to.
    if (model.arch == LLM_ARCH_GLM5_NEXT || model.arch == LLM_ARCH_QWEN4EXP) {
        for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
            const int32_t size = model.arch == LLM_ARCH_GLM5_NEXT ? hparams.indexer_kpool : hparams.dsv4_compress_ratios[il];
            if (size > 0 && (high - low) % size != 0 && last >= (int64_t) hparams.indexer_top_k) {
                return "from position " + std::to_string(hparams.indexer_top_k) + " on, rows can be moved by multiples of " + std::to_string(size) + " positions only, over which this model pools its indexer's keys";
            }
        }
    }
    return "";
}
