// notes_watch.h: aborts computations of a context while a file descriptor is readable (a signal, a request to stop).
#pragma once

#include "llama.h"

// Returns false on systems that cannot poll.
bool notes_watch_set(llama_context * ctx, int fd);
