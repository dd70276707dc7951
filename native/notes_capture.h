// notes_capture.h: captures the state transition of recurrent layers over a range of tokens while these are decoded.
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

// With the layer's inputs fixed, the state of a recurrent layer after some tokens is affine in the state before them:
//
//     S_out = A S_in + B
//
// A is the same recurrence without its additive term, starting from the identity. It is computed in the graph, after the
// layer's own recurrence, and kept from one micro-batch to the next. B is the difference.
struct notes_capture {
    // Start capturing tokens decoded in this sequence. Throws notes_failure if that is not supported.
    notes_capture(llama_context & ctx, llama_seq_id seq);

    // Add nodes that compute A to a graph. If that is not possible, the graph is unchanged, and `read` throws the reason.
    void extend(llm_graph_result & res, const llama_ubatch & ubatch);

    // Write A of each layer of `layers` (indices as in notes_layers), and B where `b` is given, for all tokens so far. Throws
    // notes_failure if a part could not be captured.
    void read(llama_context & ctx, const std::vector<int32_t> & layers, notes_transition * out) const;

    // Tokens at the beginning and at the end of a range whose recurrence depends on preceding tokens by more than the
    // residual stream: they must be decoded in place.
    static void margins(const llama_context & ctx, int32_t & before, int32_t & after);

    // Row of the state of a sequence in the recurrent tensors, -1 if the state is zero.
    static int64_t row(const llama_memory_recurrent & memory, llama_seq_id seq);

    // Compute S_out of one layer, n_embd_v floats, from S_in.
    static void apply(const notes_transition & transition, const float * in, float * out, int64_t n);

private:
    llama_memory_recurrent & memory;
    const llama_seq_id       seq;

    llama_pos   next; // the position of the next token
    int64_t     n_tokens = 0;
    std::string broken;   // why capturing failed, empty if it did not

    struct layer {
        int32_t            il;
        std::vector<float> before;                   // S_in
        int32_t            form   = NOTES_FORM_NONE; // known from the first graph on
        int64_t            head   = 0;               // rows and columns of a matrix
        int64_t            run    = 1;               // of a diagonal: number of neighbours that share a factor
        ggml_tensor *      a      = nullptr;         // size of the state, or one element per run
    };
    std::vector<layer> layers;

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> buffers;

    ggml_tensor * root(const layer & layer) const;
    layer *       layer_of(const ggml_tensor * state);
    void          begin(layer & layer, int32_t form, int64_t n, int64_t run, int64_t head);

    ggml_tensor * transition(ggml_context * ctx0, layer & layer, ggml_tensor * node);

    using order = std::unordered_map<const ggml_tensor *, int>; // index of a node in the graph
    bool depends(const order & order, const layer & layer, const ggml_tensor * node, int first) const;
};
