// Implementation of the C interface: every call goes through `guarded`, which converts exceptions to a status and a message.
#include "notes_ext.h"

#include "notes_call.h"
#include "notes_file.h"
#include "notes_guard.h"
#include "notes_kv.h"
#include "notes_stage.h"
#include "notes_watch.h"

#include <algorithm>
#include <cstdio>

static thread_local char last_error[512]; // no allocation: it must also report that memory ran out

int32_t fail(notes_status status, const char * why) noexcept {
    snprintf(last_error, sizeof(last_error), "%s", why);
    return status;
}

int32_t null_argument() {
    return fail(NOTES_E_ARGUMENT, "a required pointer is null");
}

int32_t notes_abi_version(void) {
    return NOTES_ABI_VERSION;
}

const char * notes_upstream(void) {
    return NOTES_UPSTREAM;
}

const char * notes_patches(void) {
    return NOTES_PATCHES;
}

const char * notes_error(void) {
    return last_error;
}

void notes_guard(const char * before, const char * after) {
    notes_guard_set(before, after);
}

bool notes_supports(llama_context * ctx, notes_op op) {
    if (!ctx) {
        null_argument();
        return false;
    }
    return guarded([&] {
        if (op < NOTES_SPLICE || op > NOTES_CARRY) {
            throw notes_failure(NOTES_E_ARGUMENT, "there is no operation " + std::to_string(op));
        }
        const std::string why = notes_kv::refusal(*ctx, op);
        if (!why.empty()) {
            throw notes_failure(NOTES_E_UNSUPPORTED, why);
        }
        return NOTES_OK;
    }) == NOTES_OK;
}

bool notes_can_keep(const llama_model * model, int32_t type_k, int32_t type_v) {
    if (!model) {
        null_argument();
        return false;
    }
    return guarded([&] {
        for (const int32_t type : { type_k, type_v }) {
            if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size((ggml_type) type) == 0) {
                throw notes_failure(NOTES_E_ARGUMENT, "there is no type " + std::to_string(type));
            }
        }
        const std::string why = notes_types_refusal(*model, (ggml_type) type_k, (ggml_type) type_v);
        if (!why.empty()) {
            throw notes_failure(NOTES_E_UNSUPPORTED, why);
        }
        return NOTES_OK;
    }) == NOTES_OK;
}

bool notes_can_move(llama_context * ctx, llama_pos base, llama_pos p0, int32_t n) {
    if (!ctx) {
        null_argument();
        return false;
    }
    return guarded([&] {
        notes_kv(*ctx, p0 == base ? NOTES_RESTORE : NOTES_SPLICE).check_move(base, p0, n);
        return NOTES_OK;
    }) == NOTES_OK;
}

int32_t notes_layers(llama_context * ctx, notes_layer * out, int32_t n) {
    if (!ctx || (!out && n > 0)) {
        return null_argument();
    }
    return guarded([&] {
        const auto layers = notes_kv(*ctx, NOTES_READ).layers();
        std::copy_n(layers.begin(), std::min<size_t>(std::max(n, 0), layers.size()), out);
        return (int32_t) layers.size();
    });
}

int32_t notes_frequencies(llama_context * ctx, int32_t i, double * out, int32_t n) {
    if (!ctx || (!out && n > 0)) {
        return null_argument();
    }
    return guarded([&] {
        const auto freq = notes_kv(*ctx, NOTES_READ).frequencies(i);
        std::copy_n(freq.begin(), std::min<size_t>(std::max(n, 0), freq.size()), out);
        return (int32_t) freq.size();
    });
}

int32_t notes_splice(llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n,
        const llama_pos * positions, const notes_rows * rows, int32_t n_layers, llama_pos base) {
    if (!ctx || !tokens || !rows) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv(*ctx, p0 == base ? NOTES_RESTORE : NOTES_SPLICE).splice(seq, p0, tokens, n, positions, { rows, nullptr }, n_layers, base);
        return NOTES_OK;
    });
}

int32_t notes_splice_file(llama_context * ctx, llama_seq_id seq, llama_pos p0, const llama_token * tokens, int32_t n,
        int32_t fd, const notes_stored * layers, int32_t n_layers, int32_t n_rows, int32_t first, llama_pos base) {
    if (!ctx || !tokens || !layers) {
        return null_argument();
    }
    return guarded([&] {
        notes_file file(fd, layers, std::max(n_layers, 0), n_rows, first);
        notes_kv(*ctx, p0 == base ? NOTES_RESTORE : NOTES_SPLICE).splice(seq, p0, tokens, n, nullptr, { nullptr, &file }, n_layers, base);
        return NOTES_OK;
    });
}

void notes_traffic(int64_t * from_files, int64_t * into_caches, int64_t * copies) {
    if (from_files) {
        *from_files = notes_file_bytes;
    }
    if (into_caches) {
        *into_caches = notes_kv::stored_bytes;
    }
    if (copies) {
        *copies = notes_stage::calls;
    }
}

void notes_force_staging(int32_t flags) {
    notes_stage::forced = flags;
}

int32_t notes_read(llama_context * ctx, llama_seq_id seq, llama_pos p0, int32_t n, llama_pos * positions, notes_rows * rows, int32_t n_layers, llama_pos base) {
    if (!ctx || !rows) {
        return null_argument();
    }
    return guarded([&] {
        if (p0 != base) {
            notes_kv(*ctx, NOTES_SPLICE); // moving rows requires a known rotation
        }
        notes_kv(*ctx, NOTES_READ).read(seq, p0, n, positions, rows, n_layers, base);
        return NOTES_OK;
    });
}

int32_t notes_rewrite(llama_context * ctx, llama_seq_id seq, const llama_pos * positions, const llama_token * tokens, int32_t n, notes_output output) {
    if (!ctx || !positions || !tokens) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv(*ctx, NOTES_REWRITE).rewrite(seq, positions, tokens, n, output);
        return NOTES_OK;
    });
}

int32_t notes_append(llama_context * ctx, const llama_seq_id * seqs, const int32_t * n_tokens, const int32_t * outputs, int32_t n_seqs, const llama_token * tokens) {
    if (!ctx || !seqs || !n_tokens || !outputs || !tokens) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv::append(*ctx, seqs, n_tokens, outputs, n_seqs, tokens);
        return NOTES_OK;
    });
}

int32_t notes_show(llama_context * ctx, llama_seq_id seq, const float * rows, int32_t n, int32_t width, const llama_pos * positions, bool whole) {
    if (!ctx || !rows || !positions) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv::show(*ctx, seq, rows, n, width, positions, whole);
        return NOTES_OK;
    });
}

int32_t notes_truncate(llama_context * ctx, llama_seq_id seq, llama_pos p0) {
    if (!ctx) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv::truncate(*ctx, seq, p0);
        return NOTES_OK;
    });
}

int32_t notes_share(llama_context * ctx, llama_seq_id from, llama_seq_id to, int32_t n) {
    if (!ctx) {
        return null_argument();
    }
    return guarded([&] {
        notes_kv::share(*ctx, from, to, n);
        return NOTES_OK;
    });
}

int32_t notes_used(llama_context * ctx) {
    if (!ctx) {
        return null_argument();
    }
    return guarded([&] {
        return notes_kv::used(*ctx);
    });
}

int32_t notes_cells(llama_context * ctx, llama_seq_id seq, int32_t * out, int32_t n) {
    if (!ctx || (!out && n > 0)) {
        return null_argument();
    }
    return guarded([&] {
        const auto cells = notes_kv::cells(*ctx, seq);
        std::copy_n(cells.begin(), std::min<size_t>(std::max(n, 0), cells.size()), out);
        return (int32_t) cells.size();
    });
}

int32_t notes_watch(llama_context * ctx, int32_t fd) {
    if (!ctx) {
        return null_argument();
    }
    return notes_watch_set(ctx, fd) ? NOTES_OK : fail(NOTES_E_UNSUPPORTED, "computations cannot be stopped on this system");
}
