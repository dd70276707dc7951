// notes_kv.h: splice, rewrite, append and read on the attention cache of one context.
#pragma once

#include "notes_ext.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

class llama_kv_cache;

// What went wrong; notes_ext.cpp turns it into a status and a message.
struct notes_failure : std::runtime_error {
    notes_failure(notes_status status, const std::string & what) : std::runtime_error(what), status(status) {}
    notes_status status;
};

// A friend of llama_kv_cache: the one place that touches its cells and tensors.
struct notes_kv {
    // Throws notes_failure if the context cannot do `op`.
    notes_kv(llama_context & ctx, notes_op op);

    // Why the context cannot do `op`, empty if it can.
    static std::string refusal(llama_context & ctx, notes_op op);

    std::vector<notes_layer> layers() const;
    std::vector<double>      frequencies(int32_t i) const;

    void splice (llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n, const notes_rows * rows, int32_t n_layers, llama_pos base);
    void read   (llama_seq_id seq, llama_pos p0, int32_t n, notes_rows * rows, int32_t n_layers, llama_pos base) const;
    void rewrite(llama_seq_id seq, const llama_pos * positions, const llama_token * tokens, int32_t n, notes_output output);

    // Needs no attention cache: any memory can append.
    static void append(llama_context & ctx, const llama_seq_id * seqs, const int32_t * n_tokens, int32_t n_seqs, const llama_token * tokens, notes_output output);

private:
    llama_context  & ctx;
    llama_kv_cache & kv;

    void settle() const;
    size_t row_bytes() const;
    void check_rows(const notes_rows * rows, int32_t n_layers) const;
    void check_seq(llama_seq_id seq) const;

    struct run { uint32_t cell; int32_t row; int32_t n; };
    static std::vector<run> runs(const std::vector<uint32_t> & cells);

    void for_each_layer(size_t bytes, const std::function<void(int32_t)> & work) const;

    enum direction { INTO_CACHE, OUT_OF_CACHE };
    bool move_layer(direction way, int32_t i, uint32_t stream, const std::vector<run> & runs, const notes_rows & rows, double distance) const;
};
