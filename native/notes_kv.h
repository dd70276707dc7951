// notes_kv.h: splice, rewrite, append and read on the memory of a context.
#pragma once

#include "notes_ext.h"
#include "notes_memory.h"

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

class notes_file;
class notes_stage;
struct notes_capture;
struct ggml_tensor;
struct llama_ubatch;
struct notes_rotation;
struct notes_transition;
struct notes_turn;

// Error of an operation; notes_ext.cpp converts it to a status and a message.
struct notes_failure : std::runtime_error {
    notes_failure(notes_status status, const std::string & what) : std::runtime_error(what), status(status) {}
    notes_status status;
};

// Rows of all layers to splice: in memory, or in a file that the splice reads.
struct notes_source {
    const notes_rows * rows;
    notes_file *       file;

    ggml_type type(int32_t layer, bool v) const;
};

// A friend of llama_kv_cache: the one place that touches its cells and tensors.
struct notes_kv {
    // Throws notes_failure if the context cannot do `op`.
    notes_kv(llama_context & ctx, notes_op op);

    // Why the context cannot do `op`, empty if it can.
    static std::string refusal(llama_context & ctx, notes_op op);

    // Adapters that this context adds to the model's weights, empty without any.
    static std::string adapters(const llama_context & ctx);

    std::vector<notes_layer> layers() const;
    std::vector<double>      frequencies(int32_t i) const;

    // Throws notes_failure if `n` rows computed at `base` cannot be placed at `p0`.
    void check_move(llama_pos base, llama_pos p0, int32_t n) const;

    // `carried`: the states in the rows of recurrent layers were computed from the sequence's own state, which they replace.
    void splice (llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n, const llama_pos * positions, const notes_source & source, int32_t n_layers, llama_pos base, bool carried = false);
    void read   (llama_seq_id seq, llama_pos p0, int32_t n, llama_pos * positions, notes_rows * rows, int32_t n_layers, llama_pos base) const;
    void rewrite(llama_seq_id seq, const llama_pos * positions, const llama_token * tokens, int32_t n, notes_output output);

    // notes_carry.cpp, with the patch group `recurrent`: the capture of a context, null without one.
    static std::shared_ptr<notes_capture> & capture(llama_context & ctx);
    // Model layer of each layer of the memory; of attention: -1.
    std::vector<int32_t> states() const;
    void carry(llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n, const notes_rows * rows, const notes_transition * transitions, int32_t n_layers, llama_pos base);

    // Any kind of memory can append and truncate, if not at every position.
    static void append  (llama_context & ctx, const llama_seq_id * seqs, const int32_t * n_tokens, const int32_t * outputs, int32_t n_seqs, const llama_token * tokens);
    static void show    (llama_context & ctx, llama_seq_id seq, const float * rows, int32_t n, int32_t width, const llama_pos * positions, bool whole);
    static void truncate(llama_context & ctx, llama_seq_id seq, llama_pos p0);
    static void share   (llama_context & ctx, llama_seq_id from, llama_seq_id to, int32_t n);

    static std::atomic<int64_t> stored_bytes; // written to caches by splices of this process

    static int32_t used(const llama_context & ctx);
    // Cells of a sequence in the first cache, in order of position; each stream has cell numbers of its own.
    static std::vector<uint32_t> cells(const llama_context & ctx, llama_seq_id seq);

private:
    // Why the state of this memory's recurrent layers cannot be carried, empty if it can.
    static std::string carry_refusal(const llama_context & ctx, const notes_memory & memory);

    llama_context & ctx;
    notes_memory    memory;

    // A layer of the memory: the i-th of a cache, or the state of a recurrent one.
    struct layer {
        notes_layer_kind kind;
        int32_t          il;
        size_t           cache;
        size_t           i;
    };
    std::vector<layer> all;

    notes_rotation rotation(const layer & layer) const;
    notes_layer    shape(const layer & layer) const; // without the rotation

    void settle() const;
    void check_rows(const notes_source & source, int32_t n_layers, int32_t n, bool quantized) const;
    void check_positions(const llama_pos * positions, int32_t n, llama_pos base) const;
    bool whole_window(size_t cache) const;
    bool has_still_pairs() const;
    static llama_pos sees_from(const llama_kv_cache & kv, llama_pos pos);
    static bool keeps(const notes_memory & memory, size_t cache, llama_seq_id seq, llama_pos p0, llama_pos p1 = INT32_MAX);
    static bool lacks_window(const notes_memory & memory, llama_seq_id seq, llama_pos pos);
    static void check_window(const notes_memory & memory, llama_seq_id seq, llama_pos pos);
    static void go_back(llama_context & ctx, const notes_memory & memory, llama_seq_id seq, llama_pos p0);
    int64_t room(size_t cache, llama_seq_id seq, int64_t first) const;

    // Runs of adjacent cells: {5,6,7,2} is rows 0..2 at cells 5..7 and row 3 at cell 2.
    struct run { uint32_t cell; int32_t row; int32_t n; };
    struct place {
        uint32_t         stream;
        std::vector<run> runs;
    };
    static std::vector<run> runs(const std::vector<uint32_t> & cells, int32_t first_row = 0);

    llama_ubatch ubatch(const llama_seq_id & seq, const llama_token * tokens, int32_t first, int32_t n, const std::function<llama_pos(int32_t, uint32_t)> & at) const;

    // The K or the V of one layer.
    struct part {
        int32_t   layer; // index in `all`
        bool      v;
        int32_t   n_embd;
        int       hadamard; // mixing in the cache, 0: none
        bool      columns;
        ggml_type type;     // in the source
        size_t    size;     // bytes of a row in the source
        int32_t   n_rows;   // in the source
    };
    // Rows of a part that a thread moves as one task.
    struct piece {
        const part * of;
        int32_t first;
        int32_t last;
    };
    std::vector<part>  parts (const notes_source & source, int32_t n) const;
    std::vector<piece> pieces(const std::vector<part> & parts, const std::vector<place> & places, int32_t skipped, int32_t n_threads) const;

    ggml_tensor * stream(const part & part, const place & place) const;

    enum direction { INTO_CACHE, OUT_OF_CACHE, NOWHERE }; // NOWHERE: check without writing
    bool move      (direction way, const std::vector<place> & places, int64_t state, const notes_source & source, int32_t n, double distance) const;
    bool move_rows (direction way, const part & part, const place & place, char * data, int32_t first, int32_t last, const notes_turn & turn, notes_stage & stage) const;
    bool move_state(direction way, const part & part, int64_t state, char * data) const;
};
