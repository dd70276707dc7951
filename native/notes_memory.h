// notes_memory.h: what the memory of a context is made of: attention caches, and the state of recurrent layers.
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

    // Look into the memory of a context. `unknown` then says why it was not understood, and is empty if it was.
    explicit notes_memory(const llama_context & ctx);

    std::string              unknown;
    std::vector<cache>       caches; // the first is the one that keeps every row
    llama_memory_recurrent * recurrent = nullptr;

    // Set if the indexer keeps more than its keys: pools of them, which must be told when keys change.
    llama_memory_hybrid_idx * pools = nullptr;
};

// Why no cache of these types can keep the rows of a model, in llama.cpp's words, empty if one can.
std::string notes_types_refusal(const llama_model & model, ggml_type type_k, ggml_type type_v);
