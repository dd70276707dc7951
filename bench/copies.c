// copies.c: what the parts of a checked copy from a file to memory cost by themselves, by the bytes that are read at once.
//
//     gcc -O3 -march=native -pthread -I build/native/llama.cpp/vendor/hash/xxhash bench/copies.c -o /tmp/copies
//     /tmp/copies FILE [THREADS]
//
// FILE should be in the page cache. Milliseconds, the least of 9 rounds in which all take turns. Linux 5.14 with AVX.
#define _GNU_SOURCE
#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_AVX2
#include "xxhash.h"

#include <fcntl.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MEMCPY, READ, READ_HASH, READ_HASH_STORE, MEMORY_HASH_STORE, IN_PLACE_HASH, PREFETCHED, WAYS };
static const char * NAMES[WAYS] = { "memcpy", "pread", "pread, hash", "pread, hash, store", "memory, hash, store",
                                    "pread into place, hash", "the next prefetched by a mapping" };
static const size_t PIECES[] = { 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20 };
enum { N_PIECES = sizeof(PIECES)/sizeof(PIECES[0]), ROUNDS = 9 };

static int    fd, way, n_threads;
static size_t size, piece;
static char * from, * to, * mapped;
static volatile XXH64_hash_t sink;

// Past the caches, as notes_rows.cpp does it; what comes `next` is fetched meanwhile. A prefetch never faults.
static void stream(char * dst, const char * src, size_t n, const char * next) {
    for (size_t i = 0; i < n; i += 64) {
        if (next) {
            _mm_prefetch(next + i, _MM_HINT_T1);
        }
        for (size_t j = i; j < i + 64; j += 32) {
            _mm256_stream_si256((__m256i *) (dst + j), _mm256_loadu_si256((const __m256i *) (src + j)));
        }
    }
    _mm_sfence();
}

static void * work(void * number) {
    const size_t first = size/n_threads*(size_t) number, last = size/n_threads*((size_t) number + 1);
    char * buffer = aligned_alloc(4096, piece);
    XXH3_state_t * hash = XXH3_createState();
    XXH3_128bits_reset(hash);
    if (way == PREFETCHED) {
        madvise(mapped + first, last - first, MADV_POPULATE_READ);
    }
    for (size_t at = first; at < last; at += piece) {
        const size_t n = last - at < piece ? last - at : piece;
        if (way == MEMCPY) {
            memcpy(to + at, from + at, n);
            continue;
        }
        char * into = way == IN_PLACE_HASH ? to + at : buffer;
        if (way == MEMORY_HASH_STORE) {
            memcpy(into, from + at, n);
        } else if (pread(fd, into, n, at) != (ssize_t) n) {
            abort();
        }
        if (way != READ) {
            XXH3_128bits_update(hash, into, n);
        }
        if (way == READ_HASH_STORE || way == MEMORY_HASH_STORE || way == PREFETCHED) {
            stream(to + at, into, n, way == PREFETCHED && at + piece < last ? mapped + at + piece : NULL);
        }
    }
    sink = XXH3_128bits_digest(hash).low64;
    XXH3_freeState(hash);
    free(buffer);
    return NULL;
}

static double took(void) {
    struct timespec a, b;
    pthread_t threads[64];
    clock_gettime(CLOCK_MONOTONIC, &a);
    mapped = way == PREFETCHED ? mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0) : NULL;
    for (size_t i = 0; i < (size_t) n_threads; ++i) {
        pthread_create(&threads[i], NULL, work, (void *) i);
    }
    for (int i = 0; i < n_threads; ++i) {
        pthread_join(threads[i], NULL);
    }
    if (mapped) {
        munmap(mapped, size);
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    return (b.tv_sec - a.tv_sec)*1e3 + (b.tv_nsec - a.tv_nsec)*1e-6;
}

static char * memory(void) {
    char * res = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(res, size, MADV_HUGEPAGE);
    return memset(res, 1, size);
}

int main(int argc, char ** argv) {
    struct stat about;
    n_threads = argc > 2 ? atoi(argv[2]) : 2;
    if (argc < 2 || n_threads < 1 || n_threads > 64 || (fd = open(argv[1], O_RDONLY)) < 0 || fstat(fd, &about)) {
        fprintf(stderr, "usage: copies FILE [THREADS]\n");
        return 2;
    }
    size = about.st_size/(n_threads*(4 << 20))*(n_threads*(4 << 20));
    from = memory();
    to   = memory();
    double least[WAYS][N_PIECES];
    for (int round = 0; round < ROUNDS; ++round) {
        for (way = 0; way < WAYS; ++way) {
            for (int p = 0; p < N_PIECES; ++p) {
                piece = PIECES[p];
                const double ms = took();
                least[way][p] = round && least[way][p] < ms ? least[way][p] : ms;
            }
        }
    }
    printf("%zu MB, %d threads%12s", size >> 20, n_threads, "");
    for (int p = 0; p < N_PIECES; ++p) {
        printf(" %5zu KB", PIECES[p] >> 10);
    }
    for (way = 0; way < WAYS; ++way) {
        printf("\n%-32s", NAMES[way]);
        for (int p = 0; p < N_PIECES; ++p) {
            printf(" %8.1f", least[way][p]);
        }
    }
    printf("\n");
    return 0;
}
