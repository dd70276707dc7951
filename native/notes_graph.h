// notes_graph.h: the rotation that each architecture's graph applies to K before caching it, and known limits per graph.
//
// Hyper-parameters are not enough: many graphs (llama.cpp's src/models) decide in code which layers rotate, and how.
#pragma once

#include "notes_ext.h"

#include <cstdint>
#include <string>

struct ggml_tensor;
struct llama_context;
struct llama_hparams;

// Arguments of ggml_rope for the K of one layer, as its graph passes them.
struct notes_graph {
    llama_rope_type type; // NONE: not rotated
    int   n_rot;
    int   offset;         // of the rotated elements in a head
    float freq_base;
    float freq_scale;
    float ext_factor;
    float attn_factor;
    const ggml_tensor * factors; // of the frequencies, or null
};

// Rotation of layer `il` in a cache of this kind. `hparams` are the cache's, which for an indexer differ from the model's.
notes_graph notes_graph_of(const llama_context & ctx, const llama_hparams & hparams, notes_layer_kind kind, int32_t il);

// True if a quantized cache of this kind holds rows mixed by a Hadamard matrix, provided that the cache is set up for it.
bool notes_graph_mixes_k(const llama_context & ctx, notes_layer_kind kind);

// True if the indexer's keys are cached: some graphs do without an indexer in some contexts.
bool notes_graph_uses_indexer(const llama_context & ctx);

// Known bug of llama.cpp with a batch of `n_seqs` sequences, empty without one, or in a build with the patch group `fixes`.
std::string notes_graph_bug(const llama_context & ctx, int32_t n_seqs);

// Why rows of this context can be neither read nor restored, empty if they can.
std::string notes_graph_refusal(const llama_context & ctx);

// Why no rows of this architecture can be moved, empty if they can.
std::string notes_graph_move_refusal(const llama_context & ctx);

// Why the state of its recurrent layers cannot be carried through rows, empty if it can.
std::string notes_graph_carry_refusal(const llama_context & ctx);

// Why `n` rows computed at `base` cannot be moved to `p0`, empty if they can.
std::string notes_graph_move_refusal(const llama_context & ctx, llama_pos base, llama_pos p0, int32_t n);
