// notes_carry.h: the part of the C interface that a library has only with the patch group `recurrent` (notes_patches).
//
// Rows are placed anywhere as by notes_splice, and the state of recurrent layers continues through them.
#pragma once

#include "notes_ext.h"

#ifdef __cplusplus
extern "C" {
#endif

// notes_can_move for notes_carry.
LLAMA_API bool notes_can_carry(struct llama_context * ctx, llama_pos base, llama_pos p0, int32_t n);

// What a stretch of tokens does to the state of one recurrent layer: it becomes A times itself, plus `b`.
enum notes_form {
    NOTES_FORM_NONE     = 0, // nothing: no recurrent layer, or a convolution alone, which forgets
    NOTES_FORM_DIAGONAL = 1, // a number for each element, `run` neighbours have the same one
    NOTES_FORM_MATRIX   = 2, // a matrix of `head` rows and columns for each head's matrix, to its right
};
struct notes_transition {
    int32_t form;
    int32_t n_a;  // numbers in `a`
    int32_t run;
    int32_t head;
    float * a;
    float * b;    // as many as the state has
};

// How many tokens at the beginning and at the end of a stretch must be decoded where it is placed: their inputs depend on
// what precedes it by more than the residual stream (a convolution, a token shift).
LLAMA_API int32_t notes_margins(struct llama_context * ctx, int32_t * before, int32_t * after);

// From now on, capture what the tokens that are decoded in `seq`, alone in their batches, do to the state of recurrent
// layers; one capture a context. It costs a few nodes a layer in every graph, and no graph is used again meanwhile.
LLAMA_API int32_t notes_capture_begin(struct llama_context * ctx, llama_seq_id seq);

// What was captured so far, `out` one a layer, in the order of notes_layers. Where a layer's `a` or `b` is NULL its shape
// is told alone. Refused where something of it could not be captured: a graph that is not known, several sequences at
// once, another sequence of positions.
LLAMA_API int32_t notes_captured(struct llama_context * ctx, struct notes_transition * out, int32_t n_layers);

// No longer; never fails.
LLAMA_API void notes_capture_end(struct llama_context * ctx);

// notes_splice of rows whose tokens carry the state of recurrent layers on, as `transitions` (one a layer) say: of a
// recurrent layer `rows` has its convolution as it is after them, and no `v`. The sequence must end right before p0, or be
// empty. Its state is its own afterwards, whoever shared it.
LLAMA_API int32_t notes_carry(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens,
        int32_t n, const struct notes_rows * rows, const struct notes_transition * transitions, int32_t n_layers,
        llama_pos base);

#ifdef __cplusplus
}
#endif
