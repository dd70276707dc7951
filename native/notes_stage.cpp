#include "notes_stage.h"

#include "notes_ext.h"

#include "ggml-backend-impl.h"

#include <utility>

std::atomic<int32_t> notes_stage::forced { 0 };
std::atomic<int64_t> notes_stage::calls  { 0 };

static ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

bool notes_stage::elsewhere(const ggml_tensor * t) {
    return forced || !ggml_backend_buffer_is_host(buffer_of(t));
}

bool notes_stage::by_lines(const ggml_tensor * t) {
    if (forced) {
        return forced & NOTES_STAGING_LINES;
    }
    const auto & calls = buffer_of(t)->iface;
    return calls.get_tensor_2d && calls.set_tensor_2d;
}

// Pinned memory is slow to allocate: buffers of a splice are kept for the next one. They are never freed: at the end of the
// process their backend may be gone already.
struct pinned_pool {
    std::mutex mutex;
    std::multimap<ggml_backend_buffer_type_t, ggml_backend_buffer_t> idle;
};

static pinned_pool & pool() {
    static auto * const one = new pinned_pool;
    return *one;
}

static ggml_backend_buffer_t take(ggml_backend_buffer_type_t type) {
    {
        const std::lock_guard<std::mutex> lock(pool().mutex);
        const auto found = pool().idle.find(type);
        if (found != pool().idle.end()) {
            ggml_backend_buffer_t res = found->second;
            pool().idle.erase(found);
            return res;
        }
    }
    return ggml_backend_buft_alloc_buffer(type, notes_stage::SIZE); // null: continue without pinned memory
}

static void put_back(ggml_backend_buffer_type_t type, ggml_backend_buffer_t buffer) {
    const std::lock_guard<std::mutex> lock(pool().mutex);
    pool().idle.emplace(type, buffer);
}

struct notes_stage::slot {
    ggml_backend_buffer_t   pinned = nullptr;
    std::unique_ptr<char[]> plain; // without pinned memory, or for larger requests
    size_t                  plain_size = 0;
    ggml_backend_event_t    event = nullptr;
    bool                    busy  = false; // until the event, its content is being copied
    std::vector<std::pair<notes_lines, const char *>> late; // for tests: not copied yet
};

struct notes_stage::lane {
    ggml_backend_t             backend = nullptr; // that copies asynchronously
    ggml_backend_buffer_type_t pinned  = nullptr;
    slot slots[2];
    int  last = 0;
};

notes_stage::notes_stage(const std::vector<ggml_backend_t> & backends, std::mutex & turn) : backends(backends), turn(turn) {}

notes_stage::~notes_stage() {
    for (auto & [type, lane] : lanes) {
        for (auto & slot : lane->slots) {
            wait(slot);
            if (slot.event) {
                ggml_backend_event_free(slot.event);
            }
            if (slot.pinned) {
                put_back(lane->pinned, slot.pinned);
            }
        }
    }
}

// Only the device's own buffer type is copied to asynchronously, as where llama.cpp loads weights; tensors on several devices
// (meta) are not. Support of events is tested by creating one: reading the device's properties would query its free memory,
// which is a request per call to an RPC server.
notes_stage::lane & notes_stage::lane_of(const ggml_tensor * t) {
    const auto type = ggml_backend_buffer_get_type(buffer_of(t));
    auto & res = lanes[type];
    if (!res) {
        res = std::make_unique<lane>();
        const auto device = ggml_backend_buft_get_device(type);
        if (device && type == ggml_backend_dev_buffer_type(device) && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_META) {
            res->pinned = ggml_backend_dev_host_buffer_type(device);
            for (const auto backend : backends) {
                if (ggml_backend_get_device(backend) == device && backend->iface.set_tensor_async) {
                    res->backend = backend;
                }
            }
        }
    }
    return *res;
}

void notes_stage::wait(slot & slot) {
    if (slot.busy) {
        const std::lock_guard<std::mutex> lock(turn); // Vulkan gives the backend's command buffer back
        ggml_backend_event_synchronize(slot.event);
        slot.busy = false;
    }
    for (const auto & [lines, data] : slot.late) {
        ggml_backend_tensor_set_2d(lines.t, data, lines.offset, lines.width, lines.n, lines.pitch, lines.width);
    }
    slot.late.clear();
}

char * notes_stage::buffer(const ggml_tensor * t, size_t size) {
    auto & lane = lane_of(t);
    lane.last = 1 - lane.last;
    auto & slot = lane.slots[lane.last];
    wait(slot);
    if (size <= (size_t) SIZE && lane.pinned && !slot.pinned) {
        slot.pinned = take(lane.pinned);
    }
    if (size <= (size_t) SIZE && slot.pinned) {
        return (char *) ggml_backend_buffer_get_base(slot.pinned);
    }
    if (size > slot.plain_size) {
        slot.plain.reset(new char[size]); // not zeroed
        slot.plain_size = size;
    }
    return slot.plain.get();
}

// Pending copies may overlap the requested lines.
void notes_stage::fetch(const notes_lines & lines, char * data) {
    for (auto & slot : lane_of(lines.t).slots) {
        wait(slot);
    }
    calls++;
    if (lines.gapless()) {
        ggml_backend_tensor_get(lines.t, data, lines.offset, lines.bytes());
    } else {
        ggml_backend_tensor_get_2d(lines.t, data, lines.offset, lines.width, lines.n, lines.pitch, lines.width);
    }
}

void notes_stage::store(const notes_lines & lines, const char * data) {
    auto & lane = lane_of(lines.t);
    auto & slot = lane.slots[lane.last];
    calls++;
    if (forced & NOTES_STAGING_LATE) {
        slot.late.emplace_back(lines, data);
        return;
    }
    const bool apart = !lines.gapless();
    if (lane.backend && !slot.event) {
        slot.event = ggml_backend_event_new(ggml_backend_get_device(lane.backend));
    }
    if (!lane.backend || !slot.event || (apart && !lane.backend->iface.set_tensor_2d_async)) {
        if (apart) {
            ggml_backend_tensor_set_2d(lines.t, data, lines.offset, lines.width, lines.n, lines.pitch, lines.width);
        } else {
            ggml_backend_tensor_set(lines.t, data, lines.offset, lines.bytes());
        }
        return;
    }
    const std::lock_guard<std::mutex> lock(turn); // backends are for one thread at a time
    if (apart) {
        ggml_backend_tensor_set_2d_async(lane.backend, lines.t, data, lines.offset, lines.width, lines.n, lines.pitch, lines.width);
    } else {
        ggml_backend_tensor_set_async(lane.backend, lines.t, data, lines.offset, lines.bytes());
    }
    ggml_backend_event_record(slot.event, lane.backend);
    slot.busy = true;
}
