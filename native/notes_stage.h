// notes_stage.h: rows on their way to and from memory that is not the host's (a GPU, another machine), through buffers that take turns.
#pragma once

#include "ggml-backend.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

// Lines of a tensor, `width` bytes each, the first one at `offset`, consecutive ones `pitch` bytes apart. In a buffer
// they follow each other.
struct notes_lines {
    ggml_tensor * t;
    size_t  offset;
    size_t  width;
    int64_t n;
    size_t  pitch;

    size_t bytes() const { return n*width; }
    bool   gapless() const { return n <= 1 || width == pitch; }
};

// The buffers of one thread, two for each kind of memory: while the backend takes what is in one, the other is filled.
// They are of memory that the device itself can read, where it offers that (pinned), and what can be is copied without
// waiting for it, where the backend can (CUDA, Vulkan, RPC). Everything has arrived when the stage is gone.
class notes_stage {
public:
    // Copies without waiting go through `backends`, which must be those that compute; `turn` is for all threads' stages.
    notes_stage(const std::vector<ggml_backend_t> & backends, std::mutex & turn);
    ~notes_stage();

    // Whether these are worked on in a buffer, and whether lines with gaps between them are one call.
    static bool elsewhere(const ggml_tensor * t);
    static bool by_lines (const ggml_tensor * t);

    // A buffer for so many bytes of this tensor; the one before it may still be on its way.
    char * buffer(const ggml_tensor * t, size_t size);

    void fetch(const notes_lines & lines, char * data);
    void store(const notes_lines & lines, const char * data);

    static constexpr int64_t SIZE = 4 << 20; // what is best staged at once; more gets memory of its own

    // For tests: treat the host's memory like that of a device. NOTES_STAGING_LATE copies as late as a device might.
    static std::atomic<int32_t> forced; // enum notes_staging
    static std::atomic<int64_t> calls;  // of backends, by all stages

private:
    struct slot;
    struct lane;
    lane & lane_of(const ggml_tensor * t);
    void   wait(slot & slot);

    const std::vector<ggml_backend_t> & backends;
    std::mutex & turn;
    std::map<ggml_backend_buffer_type_t, std::unique_ptr<lane>> lanes;
};
