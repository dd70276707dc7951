// notes_ext.h: the cache operations of notes, a C interface to the patched llama.cpp.
//
// A context holds sequences of K/V rows. These calls place rows that were computed elsewhere (splice), recompute rows
// in place (rewrite), add tokens at the end (append) and hand rows out (read). They know nothing of skills or prompts:
// tokens, positions and rows only, and where rows lie in a file.
//
// Every call that can fail returns a notes_status; notes_error() then says in one sentence what and why. After a
// failure the sequence is as it was before the call; one that cannot go back (recurrent state, layers that keep only
// a sliding window) is empty if a decode failed half way, and so is another one whose recurrent state llama.cpp was about to move then.
// Nothing here aborts or throws across the interface.
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
    NOTES_E_POSITION    = -4, // rows are where there must be none (splice), or missing where they must be (rewrite, read)
    NOTES_E_NOT_FINITE  = -5, // the rows hold NaN or infinity, or would where they go
    NOTES_E_DECODE      = -6, // llama.cpp failed: a decode, or memory that could not be had
    NOTES_E_ABORTED     = -7, // the computation was stopped: see notes_watch
    NOTES_E_DAMAGED     = -8, // a file that rows are read from ends too early, or holds other bytes than were written
    NOTES_E_READ        = -9, // the system could not read it
};

enum notes_op {
    NOTES_SPLICE  = 0, // place rows at another position than the one they were computed at
    NOTES_REWRITE = 1,
    NOTES_APPEND  = 2,
    NOTES_READ    = 3,
    NOTES_RESTORE = 4, // place rows where they were computed; with recurrent layers: at the start of an empty sequence
    NOTES_CARRY   = 5, // place rows anywhere, and carry the state of recurrent layers through them (notes_carry.h)
};

enum notes_output {
    NOTES_OUTPUT_NONE = 0,
    NOTES_OUTPUT_LAST = 1, // logits of the last token (of a sequence)
    NOTES_OUTPUT_ALL  = 2, // logits of every token
};

// Which interface this library has, and the llama-cpp-python version whose llama.cpp it was built from.
LLAMA_API int32_t      notes_abi_version(void);
LLAMA_API const char * notes_upstream(void);

// The groups of patches (native/patches) that it was built with, with commas between them. `hooks` is one of them.
LLAMA_API const char * notes_patches(void);

// The message of the last call of this thread that failed; valid until its next call.
LLAMA_API const char * notes_error(void);

// Whether a context whose cache has these types of K and V (enum ggml_type) can be made of a model, as far as its heads' sizes
// tell; if not, the reason is in notes_error(). Some contexts that cannot be end the process, others compute nonsense.
LLAMA_API bool notes_can_keep(const struct llama_model * model, int32_t type_k, int32_t type_v);

// Whether the context can do the operation; if not, the reason is in notes_error().
LLAMA_API bool notes_supports(struct llama_context * ctx, enum notes_op op);

// From now on, where llama.cpp would end this process with a signal, print `before`, what is known, and `after` on stderr,
// in one line, and exit with status 1. Signals that somebody handles already are left alone. NULL: no longer.
LLAMA_API void notes_guard(const char * before, const char * after);

// What a layer keeps.
enum notes_layer_kind {
    NOTES_ATTENTION = 0,
    NOTES_INDEXER   = 1, // keys that choose which rows a sparse attention looks at (DSA, MSA)
    NOTES_RECURRENT = 2, // not rows but one state: `k` is the convolution's, `v` the recurrence's
};

// One layer of the memory: what its rows look like and how its K is rotated.
struct notes_layer {
    int32_t layer;      // index in the model
    int32_t kind;       // enum notes_layer_kind; a model layer may have one of each
    int32_t n_embd_k;   // elements of a K row
    int32_t n_embd_v;   // elements of a V row; 0 where V is part of K (MLA) or not kept
    int32_t type_k;     // ggml_type of the cache
    int32_t type_v;
    int32_t rope;       // enum llama_rope_type, -1 if this layer's K is not rotated
    int32_t n_rot;      // rotated elements a head
    float   freq_base;  // as this layer uses them; the frequencies hold all that decides the rotation
    float   freq_scale;
    float   magnitude;  // factor that the forward pass multiplies the rotated elements with (YaRN, LongRoPE)
};

// Whether `n` rows that were computed at position `base` can be placed at `p0`; if not, the reason is in notes_error().
// With p0 == base this asks for a restore. Some models attend by chunks of positions that rows cannot leave.
LLAMA_API bool notes_can_move(struct llama_context * ctx, llama_pos base, llama_pos p0, int32_t n);

// Layers of the memory, in order, of a context that supports NOTES_READ. Writes at most `n` of them and returns how many
// there are, negative: a notes_status.
LLAMA_API int32_t notes_layers(struct llama_context * ctx, struct notes_layer * out, int32_t n);

// Angular frequency of each rotary pair of the i-th cache layer, radians a position, with scaling, ramps and factors in
// effect. Writes at most `n` and returns the number of pairs, negative: a notes_status.
LLAMA_API int32_t notes_frequencies(struct llama_context * ctx, int32_t i, double * out, int32_t n);

// Rows of one layer, n_rows x n_embd_k elements of `type_k` and n_rows x n_embd_v of `type_v`, a row a token: f16 or f32,
// and to be spliced q8_0, too (whole blocks of it, not mixed). Of a recurrent layer one row of f32: the state after the last
// token. `v` is not looked at where n_embd_v is 0.
struct notes_rows {
    int32_t type_k;
    int32_t type_v;
    void *  k;
    void *  v;
};

// Positions of rows that are not one a position, as those of an image: `n` triples of time, row and column, ascending.
// NULL for text: base, base+1, ... on every axis. Only models with M-RoPE have such rows.

// Place `n` rows of every layer at positions [p0, p0+n) of `seq`, which must be vacant. K is given rotated to positions
// base, base+1, ... (or to `positions`, which begin at base) and is rotated by p0 - base, in float, rounding once; V is
// copied. `rows` has one entry a layer, in the order of notes_layers; `tokens` are the tokens of the rows. With
// p0 == base this is a restore. Where the sliding-window layers keep only the window, they get only the rows in it.
LLAMA_API int32_t notes_splice(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens,
        int32_t n, const llama_pos * positions, const struct notes_rows * rows, int32_t n_layers, llama_pos base);

// A tensor of `type` in a file: `size` bytes from `offset` on, of which those after the rows are padding, and their XXH3-128,
// the more significant half first. No bytes: there is no tensor.
struct notes_tensor {
    int32_t  type;
    int64_t  offset;
    int64_t  size;
    uint64_t sum[2];
};

// Rows of one layer, as notes_rows, that are still in a file.
struct notes_stored {
    int32_t layer; // index in the model, for messages
    struct notes_tensor k;
    struct notes_tensor v;
};

// notes_splice of rows [first, first + n) of a file with `n_rows` rows a layer (a state: one), in one pass: every byte of
// the tensors is read once, hashed, turned and stored, and rows count as placed only when all checksums were right. Not
// where sliding-window layers keep only the window: what leaves it would be gone before that.
LLAMA_API int32_t notes_splice_file(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens,
        int32_t n, int32_t fd, const struct notes_stored * layers, int32_t n_layers, int32_t n_rows, int32_t first,
        llama_pos base);

// Bytes that the splices of this process have read from files, and written into caches, and how many calls of backends
// have copied rows to and from memory that is not the host's. NULL: not wanted.
LLAMA_API void notes_traffic(int64_t * from_files, int64_t * into_caches, int64_t * copies);

// For tests: rows go to and from the host's memory as they do to a device's, so that this can be tried without one.
enum notes_staging {
    NOTES_STAGING_OFF   = 0,
    NOTES_STAGING_ON    = 1, // a device that copies one stretch of memory a call (another machine, Metal)
    NOTES_STAGING_LINES = 2, // and one that copies lines with gaps between them (CUDA, Vulkan)
    NOTES_STAGING_LATE  = 4, // that copies what it was given as late as it may, and not at once
};
LLAMA_API void notes_force_staging(int32_t flags);

// Read rows [p0, p0+n) of `seq` into `rows`, K rotated so that the first row is at position `base`. If
// `positions` is given, read the first `n` rows from p0 on instead, and tell their positions, relative to `base`.
// With recurrent layers only the whole sequence can be read, p0 = 0.
LLAMA_API int32_t notes_read(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, int32_t n,
        llama_pos * positions, struct notes_rows * rows, int32_t n_layers, llama_pos base);

// Decode `n` tokens at positions that hold rows of `seq`, or are vacant before them (strictly ascending, gaps
// allowed), and put the new rows in their place. Each new row sees the rows before it, new where they are new. Needs n free cells meanwhile.
// More tokens than n_batch are decoded in several batches. Logits, as for append: llama_get_logits_ith(ctx, -k).
LLAMA_API int32_t notes_rewrite(struct llama_context * ctx, llama_seq_id seq, const llama_pos * positions,
        const llama_token * tokens, int32_t n, enum notes_output output);

// Decode tokens after the last row of each of `n_seqs` sequences: the first n_tokens[0] of `tokens` go to seqs[0], and
// so on; outputs[i] (enum notes_output) tells which logits are wanted of seqs[i]. Earlier rows are not touched. More
// tokens than n_batch are decoded in several batches, the last token of every sequence in the last one. Logits, in the
// order of the tokens asked for: llama_get_logits_ith(ctx, -k).
LLAMA_API int32_t notes_append(struct llama_context * ctx, const llama_seq_id * seqs, const int32_t * n_tokens,
        const int32_t * outputs, int32_t n_seqs, const llama_token * tokens);

// Decode the rows of an image after the last row of `seq`: `n` vectors of `width` numbers, as the model's input has them, each at
// a time, a row and a column, `positions[0..n)`, `[n..2n)` and `[2n..3n)`, of which a model with one axis takes the first. Never
// before what is there, nor beyond the context. `whole`: they see each other, so that all of them must fit into one micro-batch.
LLAMA_API int32_t notes_show(struct llama_context * ctx, llama_seq_id seq, const float * rows, int32_t n, int32_t width,
        const llama_pos * positions, bool whole);

// Drop the rows of `seq` from position `p0` on. Refused where the next token would look at rows of a sliding window that
// are gone, and where recurrent state cannot go back.
LLAMA_API int32_t notes_truncate(struct llama_context * ctx, llama_seq_id seq, llama_pos p0);

// Let the empty sequence `to` have the first `n` rows of `from`, in the same cells: nothing is copied until one of the two
// is rewritten. With recurrent layers, or a memory that is not known, `n` must be all of them. Sequences with caches of their own (not unified) are refused.
LLAMA_API int32_t notes_share(struct llama_context * ctx, llama_seq_id from, llama_seq_id to, int32_t n);

// Cells that hold a row of some sequence, in the cache that keeps all rows; shared ones count once. 0 where there is none.
LLAMA_API int32_t notes_used(struct llama_context * ctx);

// Which cell of that cache holds each row of `seq`, in order of position: two sequences share a row if its cell is the
// same. Writes at most `n` and returns how many rows there are, negative: a notes_status.
LLAMA_API int32_t notes_cells(struct llama_context * ctx, llama_seq_id seq, int32_t * out, int32_t n);

// While the descriptor `fd` has something to read, every computation of the context stops with NOTES_E_ABORTED, at the
// next node of its graph (a matrix product, an attention), and so does a splice from a file. -1: nothing stops it.
// NOTES_E_UNSUPPORTED where the system cannot ask (Windows). Some backends look between graphs alone (CUDA).
LLAMA_API int32_t notes_watch(struct llama_context * ctx, int32_t fd);

#ifdef __cplusplus
}
#endif
