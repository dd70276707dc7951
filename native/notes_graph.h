// notes_graph.h: what the graph of an architecture does with K before it goes into the cache (llama.cpp's src/models).
//
// Hyper-parameters do not tell: many a graph decides for itself which layers rotate, with which base, and what follows.
#pragma once

#include "notes_ext.h"

#include <cstdint>
#include <string>

struct ggml_tensor;
struct llama_context;
struct llama_hparams;

// The arguments of ggml_rope for the K of one layer, and what else its graph says.
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

// Of layer `il` in a cache of this kind, whose hyper-parameters for an indexer are not the model's.
notes_graph notes_graph_of(const llama_context & ctx, const llama_hparams & hparams, notes_layer_kind kind, int32_t il);

// Whether a quantized cache of this kind holds rows mixed by a Hadamard matrix when the cache is prepared for it.
bool notes_graph_mixes_k(const llama_context & ctx, notes_layer_kind kind);

// Whether the indexer's keys are kept: some graphs do without where the context does not suit them.
bool notes_graph_uses_indexer(const llama_context & ctx);

// What llama.cpp computes wrongly with a batch of `n_seqs` sequences, empty if nothing is known, or if it was built with the
// patch group `fixes`.
std::string notes_graph_bug(const llama_context & ctx, int32_t n_seqs);

// Why no rows of this context can be read or put back, empty if they can.
std::string notes_graph_refusal(const llama_context & ctx);

// Why no rows of this architecture can be moved, empty if they can.
std::string notes_graph_move_refusal(const llama_context & ctx);

// Why the state of its recurrent layers cannot be carried through rows, empty if it can.
std::string notes_graph_carry_refusal(const llama_context & ctx);

// Why `n` rows computed at `base` cannot be moved to `p0`, empty if they can.
std::string notes_graph_move_refusal(const llama_context & ctx, llama_pos base, llama_pos p0, int32_t n);
