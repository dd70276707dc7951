// notes_watch.h: stop a computation when a descriptor can be read from: a signal has come, or somebody has asked for it.
#pragma once

#include "llama.h"

// False where the system cannot ask.
bool notes_watch_set(llama_context * ctx, int fd);
