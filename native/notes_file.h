// notes_file.h: rows in a file, read a piece at a time by several threads, every byte hashed once and in order.
#pragma once

#include "notes_ext.h"

#include <atomic>
#include <cstdint>
#include <memory>

class notes_file {
public:
    // As notes_splice_file is given them. The descriptor stays the caller's.
    notes_file(int fd, const notes_stored * layers, int32_t n_layers, int32_t n_rows, int32_t first);
    ~notes_file();

    const notes_stored * const layers;
    const int32_t n_rows; // of every tensor but a state, which is one row
    const int32_t first;  // the rows before it are read and checked, too, but go nowhere

    const notes_tensor & tensor(int32_t layer, bool v) const { return v ? layers[layer].v : layers[layer].k; }

    // Read bytes [at, at + size) of a tensor. Its pieces must be begun in order, by whatever threads: each waits until all
    // before it have been hashed. After the last one the checksum is compared. Throws notes_failure, NOTES_E_DAMAGED or
    // NOTES_E_READ; returns false if it waited and was stopped.
    bool read(int32_t layer, bool v, int64_t at, int64_t size, char * to);

    // A thread that cannot go on must say so: others would wait for it.
    void stop() { stopped = true; }

private:
    struct progress; // of one tensor
    const int fd;
    const std::unique_ptr<progress[]> tensors; // the K and V of each layer
    std::atomic<bool> stopped { false };
};

// Bytes that all splices of this process have read from files.
extern std::atomic<int64_t> notes_file_bytes;
