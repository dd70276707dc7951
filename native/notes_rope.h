// notes_rope.h: effective rotation (RoPE) of a layer's K, and tables to rotate rows by a distance.
#pragma once

#include "notes_ext.h"

#include <cstdint>
#include <vector>

struct llama_hparams;

// The rotation that the forward pass applies to the K of one layer. A head has `head_size` elements, of which `n_rot` from
// `offset` on are rotated in pairs, pair i by freq[i] radians per position.
struct notes_rotation {
    llama_rope_type type = LLAMA_ROPE_TYPE_NONE; // NONE: this layer's K carries no position
    int n_head    = 0;
    int head_size = 0;
    int offset    = 0;
    int n_rot     = 0;
    float freq_base  = 0.0f;
    float freq_scale = 1.0f;
    float magnitude  = 1.0f; // already applied to the rows: a further rotation must not apply it again
    std::vector<double> freq;
};

// The rotation of layer `il` in a cache of this kind; `hparams` are the cache's, which for an indexer differ from the model's.
notes_rotation notes_layer_rotation(const llama_context & ctx, const llama_hparams & hparams, notes_layer_kind kind, int32_t il);

// A rotation by `distance` positions, arranged so that a head becomes out[j] = x[j]*cos[j] + x[partner(j)]*sin[j].
struct notes_turn {
    notes_turn() = default; // none
    notes_turn(const notes_rotation & rotation, double distance);

    bool identity = true; // no rotation: rows are copied bit for bit

    notes_rotation rotation;
    std::vector<float> cos; // [n_rot], by element
    std::vector<float> sin; // [n_rot], by element, with the sign of the partner's term
};
