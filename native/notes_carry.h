// notes_carry.h: splices that propagate the state of recurrent layers; C interface of the patch group `recurrent`.
//
// Rows are placed anywhere, as by notes_splice, and the state before them is mapped to the state after them.
#pragma once

#include "notes_ext.h"

#ifdef __cplusplus
extern "C" {
#endif

// As notes_can_move, for notes_carry.
LLAMA_API bool notes_can_carry(struct llama_context * ctx, llama_pos base, llama_pos p0, int32_t n);

// State transition of one recurrent layer over a range of tokens: the state becomes A times itself, plus `b`.
enum notes_form {
    NOTES_FORM_NONE     = 0, // no transition: no recurrent layer, or only a convolution, which forgets
    NOTES_FORM_DIAGONAL = 1, // a factor per element, the same for `run` neighbours
    NOTES_FORM_MATRIX   = 2, // a matrix of `head` rows and columns, by which each head's matrix is multiplied on the right
};
struct notes_transition {
    int32_t form;
    int32_t n_a;  // numbers in `a`
    int32_t run;
    int32_t head;
    float * a;
    float * b;    // as many numbers as the state has
};

// Number of tokens at the beginning and at the end of a range that must be decoded in place: their inputs depend on preceding
// tokens by more than the residual stream (a convolution, a token shift).
LLAMA_API int32_t notes_margins(struct llama_context * ctx, int32_t * before, int32_t * after);

// Start capturing the state transition of tokens decoded in `seq`, without other sequences in their batches; one capture per
// context. It costs a few nodes per layer in every graph, and graphs are not reused meanwhile.
LLAMA_API int32_t notes_capture_begin(struct llama_context * ctx, llama_seq_id seq);

// Write the transition captured so far, one entry of `out` per layer, in the order of notes_layers; only its shape where a
// layer's `a` or `b` is NULL. Refused if a part could not be captured: an unknown graph, several sequences in a batch,
// positions that are not consecutive.
LLAMA_API int32_t notes_captured(struct llama_context * ctx, struct notes_transition * out, int32_t n_layers);

// End capturing; never fails.
LLAMA_API void notes_capture_end(struct llama_context * ctx);

// notes_splice that also applies `transitions`, one per layer, to the state of recurrent layers; of these `rows` has the state
// of the convolution after the tokens, and no `v`. The sequence must end right before p0, or be empty. A shared state is
// copied first.
LLAMA_API int32_t notes_carry(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens,
        int32_t n, const struct notes_rows * rows, const struct notes_transition * transitions, int32_t n_layers,
        llama_pos base);

#ifdef __cplusplus
}
#endif
