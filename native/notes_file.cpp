#include "notes_file.h"

#include "notes_kv.h"
#include "notes_rows.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#ifdef _WIN32
#include <io.h>
#define NOMINMAX
#include <windows.h>
#else
#include <unistd.h>
#endif

std::atomic<int64_t> notes_file_bytes { 0 };

struct notes_file::progress {
    XXH3_state_t         hash;
    std::atomic<int64_t> hashed { 0 }; // number of leading bytes
};

notes_file::notes_file(int fd, const notes_stored * layers, int32_t n_layers, int32_t n_rows, int32_t first)
    : layers(layers), n_rows(n_rows), first(first), fd(fd), tensors(new progress[2*n_layers]) {
    for (int32_t i = 0; i < 2*n_layers; ++i) {
        XXH3_128bits_reset(&tensors[i].hash);
    }
}

notes_file::~notes_file() = default;

// Returns the number of bytes read, 0 at the end of the file, negative on failure (`errno`).
static int64_t read_at(int fd, char * to, int64_t size, int64_t at) {
#ifdef _WIN32
    OVERLAPPED place = {};
    place.Offset     = (DWORD) at;
    place.OffsetHigh = (DWORD) (at >> 32);
    DWORD n = 0;
    if (!ReadFile((HANDLE) _get_osfhandle(fd), to, (DWORD) size, &n, &place) && GetLastError() != ERROR_HANDLE_EOF) {
        errno = EIO;
        return -1;
    }
    return n;
#else
    return pread(fd, to, size, at);
#endif
}

static std::string rows_of(const notes_stored & layer, bool v) {
    return std::string(v ? "V" : "K") + " of layer " + std::to_string(layer.layer);
}

bool notes_file::read(int32_t layer, bool v, int64_t at, int64_t size, char * to) {
    const auto & what = tensor(layer, v);
    for (int64_t done = 0; done < size; ) {
        const int64_t n = read_at(fd, to + done, size - done, what.offset + at + done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            throw notes_failure(NOTES_E_READ, strerror(errno));
        }
        if (n == 0) {
            throw notes_failure(NOTES_E_DAMAGED, "it ends within " + rows_of(layers[layer], v) + ": it was cut off while it was read");
        }
        done += n;
        notes_file_bytes += n;
    }

    auto & mine = tensors[2*layer + v];
    while (mine.hashed.load(std::memory_order_acquire) != at) { // rarely waits: the piece before was started long ago
        if (stopped) {
            return false;
        }
        std::this_thread::yield();
    }
    notes_loops().hash(&mine.hash, to, size);
    mine.hashed.store(at + size, std::memory_order_release);

    if (at + size == what.size) {
        const auto sum = XXH3_128bits_digest(&mine.hash);
        if (sum.high64 != what.sum[0] || sum.low64 != what.sum[1]) {
            throw notes_failure(NOTES_E_DAMAGED, "the checksum of " + rows_of(layers[layer], v) + " is wrong");
        }
    }
    return true;
}
