// notes_memory.h: finds the parts of a context's memory: attention caches, indexer caches, recurrent state.
#pragma once

#include "notes_ext.h"

#include "ggml.h"

#include <string>
#include <vector>

class llama_kv_cache;
class llama_memory_hybrid_idx;
class llama_memory_recurrent;

struct notes_memory {
    struct cache {
        llama_kv_cache * kv;
        notes_layer_kind kind;
        bool             window;       // of the sliding-window layers
        bool             mixes = true; // the graphs of this memory mix rows with a Hadamard matrix where the cache asks for it
    };

    // Inspect the memory of a context. `unknown` is the reason if its class is not supported, else empty.
    explicit notes_memory(const llama_context & ctx);

    std::string              unknown;
    std::vector<cache>       caches; // the first one keeps every row
    llama_memory_recurrent * recurrent = nullptr;

    // Set if the indexer also keeps pools of keys, which must be notified when keys change.
    llama_memory_hybrid_idx * pools = nullptr;
};

// Why a cache cannot keep the rows of a model in these types, in llama.cpp's words, empty if it can.
std::string notes_types_refusal(const llama_model & model, ggml_type type_k, ggml_type type_v);
