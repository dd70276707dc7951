#include "notes_watch.h"

#include <chrono>
#include <cstdint>

#ifdef _WIN32

bool notes_watch_set(llama_context *, int) {
    return false;
}

#else

#include <poll.h>

// Called after every node of a graph, a hundred times in a millisecond for a small model: check the clock first.
static bool readable(void * data) {
    static constexpr std::chrono::milliseconds apart(5);
    static thread_local std::chrono::steady_clock::time_point asked;

    const auto now = std::chrono::steady_clock::now();
    if (now - asked < apart) {
        return false;
    }
    asked = now;
    pollfd waiting { (int) (intptr_t) data, POLLIN, 0 };
    return poll(&waiting, 1, 0) > 0 && (waiting.revents & POLLIN);
}

bool notes_watch_set(llama_context * ctx, int fd) {
    llama_set_abort_callback(ctx, fd < 0 ? nullptr : readable, (void *) (intptr_t) fd);
    return true;
}

#endif
