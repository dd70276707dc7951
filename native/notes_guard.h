// notes_guard.h: signal handlers that turn a crash of llama.cpp into one line on stderr and exit status 1.
#pragma once

// Install handlers, or remove them (null). A crash (an assertion of ggml, an uncaught exception, a bad access) prints
// `before`, its reason as far as known, and `after` on stderr, in one line, and exits with status 1. A signal that has a
// handler already keeps it. Files that crash llama.cpp do so in worker threads and in the middle of an allocation, so that
// the process cannot continue.
void notes_guard_set(const char * before, const char * after);
