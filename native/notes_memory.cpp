#include "notes_memory.h"

#include "llama-context.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <typeinfo>

// Match the exact class, since a derived class may keep more than its base.
template<typename T>
static T * exactly(llama_memory_i & memory) {
    return typeid(memory) == typeid(T) ? static_cast<T *>(&memory) : nullptr;
}

notes_memory::notes_memory(const llama_context & ctx) {
    if (!ctx.get_memory()) {
        unknown = "this model keeps no K/V cache (an encoder or a diffusion model)";
        return;
    }
    auto & memory = *ctx.get_memory();

    const auto iswa = [&](const llama_kv_cache_iswa & kv) {
        caches.push_back({ kv.get_base(), NOTES_ATTENTION, false });
        caches.push_back({ kv.get_swa (), NOTES_ATTENTION, true  });
    };
    const auto dsa = [&](const llama_kv_cache_dsa & kv) {
        caches.push_back({ kv.get_mla(), NOTES_ATTENTION, false });
        caches.push_back({ kv.get_lid(), NOTES_INDEXER,   false });
    };

    if (auto * kv = exactly<llama_kv_cache>(memory)) {
        caches.push_back({ kv, NOTES_ATTENTION, false });
    } else if (auto * kv = exactly<llama_kv_cache_iswa>(memory)) {
        iswa(*kv);
    } else if (auto * kv = exactly<llama_kv_cache_dsa>(memory)) {
        dsa(*kv);
    } else if (auto * kv = exactly<llama_kv_cache_dsa_iswa>(memory)) {
        dsa(*kv->get_dsa());
        caches.push_back({ kv->get_swa(), NOTES_ATTENTION, true });
    } else if (auto * kv = exactly<llama_kv_cache_msa>(memory)) {
        caches.push_back({ kv->get_base(), NOTES_ATTENTION, false });
        caches.push_back({ kv->get_idx (), NOTES_INDEXER,   false });
    } else if (auto * mem = exactly<llama_memory_hybrid>(memory)) {
        caches.push_back({ mem->get_mem_attn(), NOTES_ATTENTION, false });
        recurrent = mem->get_mem_recr();
    } else if (auto * mem = exactly<llama_memory_hybrid_iswa>(memory)) {
        iswa(*mem->get_mem_attn());
        for (auto & cache : caches) {
            cache.mixes = false; // build_inp_mem_hybrid_iswa does not mix
        }
        recurrent = mem->get_mem_recr();
    } else if (auto * mem = exactly<llama_memory_hybrid_idx>(memory)) {
        caches.push_back({ mem->get_mem_attn(), NOTES_ATTENTION, false });
        if (auto * idx = mem->get_mem_idx()) {
            caches.push_back({ idx, NOTES_INDEXER, false });
        }
        recurrent = mem->get_mem_recr();
        pools     = mem;
    } else if (auto * mem = exactly<llama_memory_recurrent>(memory)) {
        recurrent = mem;
    } else {
        unknown = "this model compresses its keys over stretches of positions, which cannot be taken apart"; // DeepSeek V4
    }
}

// Graphs view each head's part of a row, which must be whole blocks. llama.cpp checks that with flash attention only.
std::string notes_types_refusal(const llama_model & model, ggml_type type_k, ggml_type type_v) {
    const auto & hparams = model.hparams;
    const auto refused = [](const char * part, ggml_type type, const char * name, uint32_t size) -> std::string {
        if (size % ggml_blck_size(type) == 0) {
            return "";
        }
        return std::string(part) + " cache type " + ggml_type_name(type) + " with block size " + std::to_string(ggml_blck_size(type)) +
            " does not divide " + name + "=" + std::to_string(size);
    };
    std::string why = refused("K", type_k, "indexer_head_size", hparams.indexer_head_size); // 0 without one
    for (uint32_t il = 0; why.empty() && il < hparams.n_layer(); ++il) {
        if (hparams.n_head_kv(il) > 0 && !hparams.is_recr(il)) {
            why = refused("K", type_k, "n_embd_head_k", hparams.n_embd_head_k(il));
            why = why.empty() ? refused("V", type_v, "n_embd_head_v", hparams.n_embd_head_v(il)) : why;
        }
    }
    return why;
}
