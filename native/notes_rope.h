// notes_rope.h: how a layer's K is rotated in effect, and turning rows by a distance.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

// The rotation that the forward pass applies to the K of one layer. A head is `head_size` elements, of which the first
// `n_rot` are rotated in pairs; pair i turns by freq[i] radians a position.
struct notes_rotation {
    llama_rope_type type = LLAMA_ROPE_TYPE_NONE; // NONE: this layer's K carries no position
    int n_head    = 0;
    int head_size = 0;
    int n_rot     = 0;
    float freq_base  = 0.0f;
    float freq_scale = 1.0f;
    float magnitude  = 1.0f; // already in the rows: a turn must not apply it again
    std::vector<double> freq;
};

// Why the K of this architecture cannot be turned, empty if it can.
std::string notes_rotation_refusal(const llama_context & ctx);

notes_rotation notes_layer_rotation(const llama_context & ctx, int32_t il);

// A turn by `distance` positions, laid out so that a head becomes out[j] = x[j]*cos[j] + x[partner(j)]*sin[j].
struct notes_turn {
    notes_turn(const notes_rotation & rotation, double distance);

    bool identity; // nothing moves: rows can be copied bit for bit

    notes_rotation rotation;
    std::vector<float> cos; // [n_rot], by element
    std::vector<float> sin; // [n_rot], by element, with the sign of the partner's term
};
