// notes_stage.h: copies rows to and from device memory (a GPU, an RPC server) through alternating staging buffers.
#pragma once

#include "ggml-backend.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

// Lines of a tensor, `width` bytes each, the first one at `offset`, consecutive ones `pitch` bytes apart; contiguous in a
// buffer.
struct notes_lines {
    ggml_tensor * t;
    size_t  offset;
    size_t  width;
    int64_t n;
    size_t  pitch;

    size_t bytes() const { return n*width; }
    bool   gapless() const { return n <= 1 || width == pitch; }
};

// Staging buffers of one thread, two per kind of memory: while the backend copies one, the other is filled. They are pinned
// memory where the device offers it, and copies are asynchronous where the backend can (CUDA, Vulkan, RPC). The destructor
// waits for all copies.
class notes_stage {
public:
    // Asynchronous copies go through `backends`, which must be those that compute; all threads' stages share the mutex `turn`.
    notes_stage(const std::vector<ggml_backend_t> & backends, std::mutex & turn);
    ~notes_stage();

    // True if the tensor needs a staging buffer; true if lines with gaps are copied in one call.
    static bool elsewhere(const ggml_tensor * t);
    static bool by_lines (const ggml_tensor * t);

    // Return a buffer of `size` bytes for this tensor; the previous one may still be copied.
    char * buffer(const ggml_tensor * t, size_t size);

    void fetch(const notes_lines & lines, char * data);
    void store(const notes_lines & lines, const char * data);

    static constexpr int64_t SIZE = 4 << 20; // bytes of a buffer; larger requests get memory of their own

    // For tests: treat host memory like device memory. NOTES_STAGING_LATE copies as late as a device might.
    static std::atomic<int32_t> forced; // enum notes_staging
    static std::atomic<int64_t> calls;  // backend calls of all stages

private:
    struct slot;
    struct lane;
    lane & lane_of(const ggml_tensor * t);
    void   wait(slot & slot);

    const std::vector<ggml_backend_t> & backends;
    std::mutex & turn;
    std::map<ggml_backend_buffer_type_t, std::unique_ptr<lane>> lanes;
};
