// notes_ext.h: the cache operations of notes, a C interface to the patched llama.cpp.
//
// A context holds sequences of K/V rows. These calls place rows that were computed elsewhere (splice), recompute rows
// in place (rewrite), add tokens at the end (append) and hand rows out (read). They know nothing of files, skills or
// prompts: tokens, positions and rows only.
//
// Every call that can fail returns a notes_status; notes_error() then says in one sentence what and why. After a
// failure the sequence is as it was before the call (rewrite, splice, read: always; append: where rows can be removed,
// that is, unless the model has recurrent state). Nothing here aborts or throws across the interface.
// Like all of llama.cpp, a context may be used by one thread at a time.
#pragma once

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NOTES_ABI_VERSION 1

enum notes_status {
    NOTES_OK            =  0,
    NOTES_E_ARGUMENT    = -1, // a null pointer, a number out of range, rows that do not have the model's shape
    NOTES_E_UNSUPPORTED = -2, // this model or context cannot do it: see notes_supports
    NOTES_E_ROOM        = -3, // not enough free cells in the K/V cache
    NOTES_E_POSITION    = -4, // rows are where there must be none (splice), or missing where they must be (rewrite, read)
    NOTES_E_NOT_FINITE  = -5, // the rows hold NaN or infinity, or would where they go
    NOTES_E_DECODE      = -6, // llama.cpp failed: a decode, or memory that could not be had
    NOTES_E_ABORTED     = -7, // the abort callback of the context stopped the computation
};

enum notes_op {
    NOTES_SPLICE  = 0,
    NOTES_REWRITE = 1,
    NOTES_APPEND  = 2,
    NOTES_READ    = 3,
};

enum notes_output {
    NOTES_OUTPUT_NONE = 0,
    NOTES_OUTPUT_LAST = 1, // logits of the last token of each sequence
    NOTES_OUTPUT_ALL  = 2, // logits of every token
};

// Which interface this library has, and the llama-cpp-python version whose llama.cpp it was built from.
LLAMA_API int32_t      notes_abi_version(void);
LLAMA_API const char * notes_upstream(void);

// The message of the last call of this thread that failed; valid until its next call.
LLAMA_API const char * notes_error(void);

// Whether the context can do the operation; if not, the reason is in notes_error().
LLAMA_API bool notes_supports(struct llama_context * ctx, enum notes_op op);

// One layer of the K/V cache: what its rows look like and how its K is rotated.
struct notes_layer {
    int32_t layer;      // index in the model
    int32_t n_embd_k;   // elements of a K row
    int32_t n_embd_v;   // elements of a V row
    int32_t type_k;     // ggml_type of the cache
    int32_t type_v;
    int32_t rope;       // enum llama_rope_type, -1 if this layer's K is not rotated
    int32_t n_rot;      // rotated elements a head
    float   freq_base;  // as this layer uses them; the frequencies hold all that decides the rotation
    float   freq_scale;
    float   magnitude;  // factor that the forward pass multiplies the rotated elements with (YaRN, LongRoPE)
};

// Layers of the cache, in order, of a context that supports NOTES_READ. Writes at most `n` of them and returns how many
// there are, negative: a notes_status.
LLAMA_API int32_t notes_layers(struct llama_context * ctx, struct notes_layer * out, int32_t n);

// Angular frequency of each rotary pair of the i-th cache layer, radians a position, with scaling, ramps and factors in
// effect. Writes at most `n` and returns the number of pairs, negative: a notes_status.
LLAMA_API int32_t notes_frequencies(struct llama_context * ctx, int32_t i, double * out, int32_t n);

// Rows of one cache layer, n_rows x n_embd_k and n_rows x n_embd_v elements of `type` (f16 or f32), a row a token.
struct notes_rows {
    int32_t type;
    void *  k;
    void *  v;
};

// Place `n` rows of every cache layer at positions [p0, p0+n) of `seq`, which must be vacant. K is given rotated to
// positions base, base+1, ... and is turned by p0 - base, in float, rounding once; V is copied. `rows` has one entry
// a cache layer, in the order of notes_layers; `tokens` are the tokens of the rows.
LLAMA_API int32_t notes_splice(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens,
        int32_t n, const struct notes_rows * rows, int32_t n_layers, llama_pos base);

// Read rows [p0, p0+n) of `seq` into `rows`, K turned so that the first row is rotated to position `base`.
LLAMA_API int32_t notes_read(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, int32_t n,
        struct notes_rows * rows, int32_t n_layers, llama_pos base);

// Decode `n` tokens at positions that already hold rows of `seq` (strictly ascending, gaps allowed) and put the new
// rows in their place. Each new row sees the rows before it, new where they are new. Needs n free cells meanwhile.
// More tokens than n_batch are decoded in several batches. Logits, as for append: llama_get_logits_ith(ctx, -k).
LLAMA_API int32_t notes_rewrite(struct llama_context * ctx, llama_seq_id seq, const llama_pos * positions,
        const llama_token * tokens, int32_t n, enum notes_output output);

// Decode tokens after the last row of each of `n_seqs` sequences: the first n_tokens[0] of `tokens` go to seqs[0], and
// so on. Earlier rows are not touched. More tokens than n_batch are decoded in several batches, the last token of
// every sequence in the last one. Logits, in the order of the tokens asked for: llama_get_logits_ith(ctx, -k).
LLAMA_API int32_t notes_append(struct llama_context * ctx, const llama_seq_id * seqs, const int32_t * n_tokens,
        int32_t n_seqs, const llama_token * tokens, enum notes_output output);

#ifdef __cplusplus
}
#endif
