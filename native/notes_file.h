// notes_file.h: reads K/V rows from a file in pieces, by several threads, and hashes every byte once and in order.
#pragma once

#include "notes_ext.h"

#include <atomic>
#include <cstdint>
#include <memory>

class notes_file {
public:
    // Arguments as of notes_splice_file. The caller closes the descriptor.
    notes_file(int fd, const notes_stored * layers, int32_t n_layers, int32_t n_rows, int32_t first);
    ~notes_file();

    const notes_stored * const layers;
    const int32_t n_rows; // of every tensor but a state, which has one row
    const int32_t first;  // rows before it are read and checked, but not placed

    const notes_tensor & tensor(int32_t layer, bool v) const { return v ? layers[layer].v : layers[layer].k; }

    // Read bytes [at, at + size) of a tensor. Pieces must be started in order, by any threads: each waits until all before it
    // have been hashed. After the last one the checksum is compared. Throws notes_failure, NOTES_E_DAMAGED or NOTES_E_READ;
    // returns false if it was stopped while it waited.
    bool read(int32_t layer, bool v, int64_t at, int64_t size, char * to);

    // Must be called by a thread that gives up, since others may wait for it.
    void stop() { stopped = true; }

private:
    struct progress; // of one tensor
    const int fd;
    const std::unique_ptr<progress[]> tensors; // the K and V of each layer
    std::atomic<bool> stopped { false };
};

// Bytes read from files by all splices of this process.
extern std::atomic<int64_t> notes_file_bytes;
