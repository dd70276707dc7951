// notes_ext.h: the cache operations of notes, a C interface to the patched llama.cpp.
//
// A context holds sequences of K/V rows, one row per token and layer. These calls place rows that were computed elsewhere
// (splice), recompute rows in place (rewrite), decode tokens at the end (append) and export rows (read). They work on
// tokens, positions, rows and byte ranges of files; skills and prompts are the caller's.
//
// Every call that can fail returns a notes_status; notes_error() then has the reason in one sentence. After a failure the
// sequence is as it was before the call, except that a sequence which cannot be rolled back (recurrent state, layers that
// keep only a sliding window) is empty if a decode failed half way, and so is another sequence whose recurrent state
// llama.cpp was about to move then. No call aborts, and none throws across the interface.
// Like all of llama.cpp, a context may be used by one thread at a time.
#pragma once

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NOTES_ABI_VERSION 10

enum notes_status {
    NOTES_OK            =  0,
    NOTES_E_ARGUMENT    = -1, // a null pointer, a number out of range, rows that do not have the model's shape
    NOTES_E_UNSUPPORTED = -2, // this model or context cannot do it: see notes_supports
    NOTES_E_ROOM        = -3, // not enough free cells in the K/V cache
    NOTES_E_POSITION    = -4, // positions are occupied that must be vacant (splice), or vacant that must have rows (rewrite, read)
    NOTES_E_NOT_FINITE  = -5, // the rows hold NaN or infinity, or would in the type of the cache
    NOTES_E_DECODE      = -6, // llama.cpp failed: a decode, or an allocation
    NOTES_E_ABORTED     = -7, // the computation was stopped: see notes_watch
    NOTES_E_DAMAGED     = -8, // a file of rows ends too early, or its checksum is wrong
    NOTES_E_READ        = -9, // the system cannot read the file
};

enum notes_op {
    NOTES_SPLICE  = 0, // place rows at another position than that at which they were computed
    NOTES_REWRITE = 1,
    NOTES_APPEND  = 2,
    NOTES_READ    = 3,
    NOTES_RESTORE = 4, // place rows at their own position; with recurrent layers: at the start of an empty sequence
    NOTES_CARRY   = 5, // place rows anywhere, and propagate the state of recurrent layers through them (notes_carry.h)
};

enum notes_output {
    NOTES_OUTPUT_NONE = 0,
    NOTES_OUTPUT_LAST = 1, // logits of the last token (of a sequence)
    NOTES_OUTPUT_ALL  = 2, // logits of every token
};

// Version of this interface, and of the llama-cpp-python whose llama.cpp the library was built from.
LLAMA_API int32_t      notes_abi_version(void);
LLAMA_API const char * notes_upstream(void);

// Groups of patches (native/patches) in this build, separated by commas. `hooks` is always one of them.
LLAMA_API const char * notes_patches(void);

// Message of the last failed call of this thread; valid until its next call.
LLAMA_API const char * notes_error(void);

// True if a context of the model can have a cache of these types of K and V (enum ggml_type), judged by the sizes of its
// heads; if not, the reason is in notes_error(). llama.cpp ends the process for some such contexts, and computes nonsense in
// others.
LLAMA_API bool notes_can_keep(const struct llama_model * model, int32_t type_k, int32_t type_v);

// True if the context supports the operation; if not, the reason is in notes_error().
LLAMA_API bool notes_supports(struct llama_context * ctx, enum notes_op op);

// Install handlers: where llama.cpp would end this process with a signal, print `before`, the reason as far as known, and
// `after` on stderr, in one line, and exit with status 1. Signals that have a handler already keep it. NULL: remove them.
LLAMA_API void notes_guard(const char * before, const char * after);

// Content of a layer of the memory.
enum notes_layer_kind {
    NOTES_ATTENTION = 0,
    NOTES_INDEXER   = 1, // keys that select the rows which a sparse attention attends to (DSA, MSA)
    NOTES_RECURRENT = 2, // one state instead of rows: `k` is the convolution's, `v` the recurrence's
};

// One layer of the memory: shape and types of its rows, and the rotation of its K.
struct notes_layer {
    int32_t layer;      // index in the model
    int32_t kind;       // enum notes_layer_kind; a model layer may have several kinds
    int32_t n_embd_k;   // elements of a K row
    int32_t n_embd_v;   // elements of a V row; 0 where V is part of K (MLA) or not kept
    int32_t type_k;     // ggml_type of the cache
    int32_t type_v;
    int32_t rope;       // enum llama_rope_type, -1 if this layer's K is not rotated
    int32_t n_rot;      // rotated elements per head
    float   freq_base;  // as this layer uses them; notes_frequencies has all that decides the rotation
    float   freq_scale;
    float   magnitude;  // factor that the forward pass multiplies the rotated elements with (YaRN, LongRoPE)
};

// True if `n` rows computed at position `base` can be placed at `p0`; if not, the reason is in notes_error(). p0 == base is
// a restore. Some models attend by chunks of positions that rows cannot leave.
LLAMA_API bool notes_can_move(struct llama_context * ctx, llama_pos base, llama_pos p0, int32_t n);

// Layers of the memory, in order, of a context that supports NOTES_READ. Writes at most `n` of them and returns how many
// there are, negative: a notes_status.
LLAMA_API int32_t notes_layers(struct llama_context * ctx, struct notes_layer * out, int32_t n);

// Angular frequency of each rotary pair of the i-th cache layer, in radians per position, with scaling, ramps and factors
// applied. Writes at most `n` and returns the number of pairs, negative: a notes_status.
LLAMA_API int32_t notes_frequencies(struct llama_context * ctx, int32_t i, double * out, int32_t n);

// Rows of one layer, one per token: n_rows x n_embd_k elements of `type_k` and n_rows x n_embd_v of `type_v`, f16 or f32; a
// splice accepts q8_0, too (whole blocks, not mixed). Of a recurrent layer one row of f32: the state after the last token.
// `v` is ignored where n_embd_v is 0.
struct notes_rows {
    int32_t type_k;
    int32_t type_v;
    void *  k;
    void *  v;
};

// Positions of rows that share positions, as those of an image: `n` triples of time, row and column, ascending. NULL for
// text: base, base+1, ... on every axis. Only models with M-RoPE have such rows.

// Place `n` rows of every layer at positions [p0, p0+n) of `seq`, which must be vacant. K comes rotated to positions base,
// base+1, ... (or to `positions`, which begin at base) and is rotated by p0 - base, in float, rounding once; V is copied.
// `rows` has one entry per layer, in the order of notes_layers; `tokens` are the tokens of the rows. p0 == base is a
// restore. Sliding-window layers that keep only the window get only the rows in it.
LLAMA_API int32_t notes_splice(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens,
        int32_t n, const llama_pos * positions, const struct notes_rows * rows, int32_t n_layers, llama_pos base);

// A tensor of `type` in a file: `size` bytes from `offset` on (rows, then padding), and their XXH3-128, the more significant
// half first. Size 0: no tensor.
struct notes_tensor {
    int32_t  type;
    int64_t  offset;
    int64_t  size;
    uint64_t sum[2];
};

// Rows of one layer, as notes_rows, in a file.
struct notes_stored {
    int32_t layer; // index in the model, for messages
    struct notes_tensor k;
    struct notes_tensor v;
};

// notes_splice of rows [first, first + n) of a file with `n_rows` rows per layer (a state: one), in one pass: every byte of
// the tensors is read once, hashed, rotated and stored, and the rows become part of the sequence only if all checksums are
// right. Refused where sliding-window layers keep only the window: rows that leave it would be lost before the check.
LLAMA_API int32_t notes_splice_file(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens,
        int32_t n, int32_t fd, const struct notes_stored * layers, int32_t n_layers, int32_t n_rows, int32_t first,
        llama_pos base);

// Counters of this process: bytes that splices have read from files and written to caches, and backend calls that have
// copied rows to and from device memory. NULL: not wanted.
LLAMA_API void notes_traffic(int64_t * from_files, int64_t * into_caches, int64_t * copies);

// For tests without a device: treat host memory like device memory.
enum notes_staging {
    NOTES_STAGING_OFF   = 0,
    NOTES_STAGING_ON    = 1, // a device that copies one contiguous range per call (RPC, Metal)
    NOTES_STAGING_LINES = 2, // a device that copies lines with gaps between them in one call (CUDA, Vulkan)
    NOTES_STAGING_LATE  = 4, // asynchronous copies happen as late as possible
};
LLAMA_API void notes_force_staging(int32_t flags);

// Read rows [p0, p0+n) of `seq` into `rows`, K rotated so that the first row is at position `base`. If `positions` is given,
// read the first `n` rows from p0 on instead, and write their positions, relative to `base`. With recurrent layers only the
// whole sequence can be read, p0 = 0.
LLAMA_API int32_t notes_read(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, int32_t n,
        llama_pos * positions, struct notes_rows * rows, int32_t n_layers, llama_pos base);

// Decode `n` tokens at positions that hold rows of `seq`, or are vacant before them (strictly ascending, gaps allowed), and
// replace the rows there. Each token attends to the rows before it, new ones included. Needs n free cells meanwhile. More
// tokens than n_batch are decoded in several batches. Logits, as for append: llama_get_logits_ith(ctx, -k).
LLAMA_API int32_t notes_rewrite(struct llama_context * ctx, llama_seq_id seq, const llama_pos * positions,
        const llama_token * tokens, int32_t n, enum notes_output output);

// Decode tokens after the last row of each of `n_seqs` sequences: the first n_tokens[0] of `tokens` go to seqs[0], and so
// on; outputs[i] (enum notes_output) selects the logits of seqs[i]. Earlier rows are unchanged. More tokens than n_batch are
// decoded in several batches, the last token of every sequence in the last one. Logits, in the order of the selected
// tokens: llama_get_logits_ith(ctx, -k).
LLAMA_API int32_t notes_append(struct llama_context * ctx, const llama_seq_id * seqs, const int32_t * n_tokens,
        const int32_t * outputs, int32_t n_seqs, const llama_token * tokens);

// Decode the embeddings of an image after the last row of `seq`: `n` vectors of `width` floats, input embeddings of the model,
// with time, row and column in `positions[0..n)`, `[n..2n)` and `[2n..3n)`, of which a model with one axis uses the first.
// Positions must be after the last row and within the context. `whole`: the embeddings attend to each other, so that all of
// them must fit into one micro-batch.
LLAMA_API int32_t notes_show(struct llama_context * ctx, llama_seq_id seq, const float * rows, int32_t n, int32_t width,
        const llama_pos * positions, bool whole);

// Remove the rows of `seq` from position `p0` on. Refused where the next token would attend to rows that have left a sliding
// window, and where recurrent state cannot be rolled back.
LLAMA_API int32_t notes_truncate(struct llama_context * ctx, llama_seq_id seq, llama_pos p0);

// Share the first `n` rows of `from` with the empty sequence `to`, in the same cells: nothing is copied until one of the two
// is rewritten. With recurrent layers, or an unknown memory, `n` must be all rows. Refused without a unified cache.
LLAMA_API int32_t notes_share(struct llama_context * ctx, llama_seq_id from, llama_seq_id to, int32_t n);

// Number of occupied cells in the cache that keeps all rows; shared cells count once. 0 without such a cache.
LLAMA_API int32_t notes_used(struct llama_context * ctx);

// Cell of each row of `seq` in that cache, in order of position; two sequences share a row if its cell is the same. Writes at
// most `n` and returns the number of rows, negative: a notes_status.
LLAMA_API int32_t notes_cells(struct llama_context * ctx, llama_seq_id seq, int32_t * out, int32_t n);

// While the descriptor `fd` is readable, every computation of the context stops with NOTES_E_ABORTED at the next node of its
// graph (a matrix product, an attention), and so does a splice from a file. -1: stop watching. NOTES_E_UNSUPPORTED on
// systems that cannot poll (Windows). Some backends check only between graphs (CUDA).
LLAMA_API int32_t notes_watch(struct llama_context * ctx, int32_t fd);

#ifdef __cplusplus
}
#endif
