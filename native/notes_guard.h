// notes_guard.h: one line and the status 1 where llama.cpp would end the process with a signal.
#pragma once

// From now on, a crash (an assertion of ggml, an exception that nobody catches, a bad access) prints `before`, what is
// known of it, and `after` on stderr, in one line, and exits with status 1. Null: no longer. A signal that somebody else
// handles already keeps its handler. Files that break llama.cpp do it in worker threads and in the middle of an
// allocation, so nothing can be saved by going on.
void notes_guard_set(const char * before, const char * after);
