// notes_capture.h: what a stretch of tokens does to the state of recurrent layers, captured while they are decoded.
#pragma once

#include "notes_carry.h"

#include "ggml-cpp.h"

#include <string>
#include <unordered_map>
#include <vector>

class llama_memory_recurrent;
class llm_graph_result;
struct ggml_context;
struct ggml_tensor;
struct llama_ubatch;

// The state of a recurrent layer after some tokens is affine in the state before them, the layer's inputs given:
//
//     S_out = A S_in + B
//
// A is the recurrence once more, on the same inputs but with nothing to remember, beginning with the identity. It is
// computed in the graph, after the layer's own recurrence, and kept from one micro-batch to the next. B is the rest.
struct notes_capture {
    // From now on, for the tokens that are decoded in this sequence. Throws notes_failure where that cannot be.
    notes_capture(llama_context & ctx, llama_seq_id seq);

    // Add to a graph what computes A. What cannot be captured is remembered; the graph then stays as it is.
    void extend(llm_graph_result & res, const llama_ubatch & ubatch);

    // A of each layer of `layers` (as notes_layers counts them), and where `b` is given, B, for the tokens since the
    // beginning. Throws notes_failure where something of it could not be captured.
    void read(llama_context & ctx, const std::vector<int32_t> & layers, notes_transition * out) const;

    // Tokens at the beginning and at the end of a stretch whose inputs depend on what precedes the stretch even if all
    // its layers' inputs are given: they must be decoded where it is put.
    static void margins(const llama_context & ctx, int32_t & before, int32_t & after);

    // The row of the recurrent tensors that holds the state of a sequence, -1 where that is zero.
    static int64_t row(const llama_memory_recurrent & memory, llama_seq_id seq);

    // S_out of one layer, n_embd_v floats, from S_in.
    static void apply(const notes_transition & transition, const float * in, float * out, int64_t n);

private:
    llama_memory_recurrent & memory;
    const llama_seq_id       seq;

    llama_pos   next; // the position of the next token
    int64_t     n_tokens = 0;
    std::string broken;   // why it cannot be captured, empty if it can

    struct layer {
        int32_t            il;
        std::vector<float> before;                   // S_in
        int32_t            form   = NOTES_FORM_NONE; // known from the first graph on
        int64_t            head   = 0;               // rows and columns of a matrix
        int64_t            run    = 1;               // of a diagonal: neighbours that have one factor
        ggml_tensor *      a      = nullptr;         // as many elements as the state, or fewer: one of each run
    };
    std::vector<layer> layers;

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> buffers;

    ggml_tensor * root(const layer & layer) const;
    layer *       layer_of(const ggml_tensor * state);
    void          begin(layer & layer, int32_t form, int64_t n, int64_t run, int64_t head);

    ggml_tensor * transition(ggml_context * ctx0, layer & layer, ggml_tensor * node);

    using order = std::unordered_map<const ggml_tensor *, int>; // where in the graph a node is
    bool depends(const order & order, const layer & layer, const ggml_tensor * node, int first) const;
};
