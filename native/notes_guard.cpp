#include "notes_guard.h"

#include "ggml.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>

#ifdef _WIN32
#include <io.h>
#include <process.h>
#else
#include <unistd.h>
#endif

// Data of the handler, prepared because it may neither allocate nor lock.
static char before_text[1024];
static char after_text [512];
static char reason_text[256];

// Start of the RPC backend's message for a lost server (patches/fixes/rpc-lost-server.patch).
static const char ELSEWHERE[] = "the RPC server ";

static const struct { int number; const char * name; } SIGNALS[] = {
    { SIGABRT, "it aborted" },
    { SIGSEGV, "a bad memory access" },
    { SIGFPE,  "a division by zero" },
    { SIGILL,  "an illegal instruction" },
#ifdef SIGBUS
    { SIGBUS,  "a file that became shorter while it was in use, or a bad memory access" },
#endif
};

// Make text printable on one line: names in untrusted files may contain terminal escapes.
static void copy(char * to, size_t size, const char * from) {
    size_t n = 0;
    for (; from && *from && n + 1 < size; ++from) {
        const unsigned char c = *from;
        if (c >= 0x80 && c < 0xa0 && n > 0 && (unsigned char) to[n - 1] == 0xc2) {
            to[n - 1] = '?'; // U+0080 to U+009F
        } else {
            to[n++] = c < 0x20 || c == 0x7f ? '?' : (char) c;
        }
    }
    if (from && *from) { // truncated, perhaps within a character
        while (n > 0 && (to[n - 1] & 0xc0) == 0x80) {
            n--;
        }
        n -= n > 0 && (to[n - 1] & 0x80);
    }
    to[n] = 0;
}

static void print(const char * text) {
#ifdef _WIN32
    (void) !_write(2, text, (unsigned) strlen(text));
#else
    (void) !write(2, text, strlen(text));
#endif
}

static std::atomic<bool> on = false;

static void on_signal(int number) {
    if (!on) { // called by a handler that was installed over ours, after ours was removed
        std::signal(number, SIG_DFL);
        raise(number);
        return;
    }
    static std::atomic_flag printed = ATOMIC_FLAG_INIT;
    if (printed.test_and_set()) { // another thread is exiting already
#ifdef _WIN32
        return;
#else
        for (;;) {
            pause();
        }
#endif
    }
    const char * reason = reason_text;
    for (const auto & signal : SIGNALS) {
        if (!*reason && signal.number == number) {
            reason = signal.name;
        }
    }
    if (strncmp(reason, ELSEWHERE, sizeof(ELSEWHERE) - 1) == 0) { // not a fault of the model
        print("notes: ");
        print(reason);
        print(". What is on disk is whole\n");
        _exit(1);
    }
    print(before_text);
    print(" (");
    print(reason);
    print(")");
    print(after_text);
    print("\n");
    _exit(1);
}

static void on_abort(const char * message) { // ggml's assertions; abort() follows
    // "/path/of/the/build/src/llama-x.cpp:12: text": the path must not be shown
    const char * text = message;
    for (const char * c = message; *c && *c != ' '; ++c) {
        if (*c == '/' || *c == '\\') {
            text = c + 1;
        }
    }
    if (const char * elsewhere = strstr(text, ELSEWHERE)) {
        text = elsewhere; // without the place in the source
    }
    copy(reason_text, sizeof(reason_text), text);
}

static void on_terminate() {
    try {
        if (std::current_exception()) {
            std::rethrow_exception(std::current_exception());
        }
    } catch (const std::exception & e) {
        copy(reason_text, sizeof(reason_text), e.what());
    } catch (...) {
    }
    std::abort();
}

static std::terminate_handler terminate_was;
static ggml_abort_callback_t  abort_was;
#ifdef _WIN32
static void (*was[sizeof(SIGNALS)/sizeof(*SIGNALS)])(int);
#else
static bool        ours[sizeof(SIGNALS)/sizeof(*SIGNALS)];
static stack_t     stack_was;
alignas(16) static char stack[1 << 16]; // the handler also runs where the stack has overflown
#endif

static void install() {
    terminate_was = std::set_terminate(on_terminate);
    abort_was     = ggml_set_abort_callback(on_abort);
#ifndef _WIN32
    stack_t mine = {};
    mine.ss_sp   = stack;
    mine.ss_size = sizeof(stack);
    sigaltstack(nullptr, &stack_was);
    if (stack_was.ss_flags & SS_DISABLE) {
        sigaltstack(&mine, nullptr);
    }
#endif
    size_t i = 0;
    for (const auto & signal : SIGNALS) {
#ifdef _WIN32
        was[i] = std::signal(signal.number, on_signal);
        if (was[i] != SIG_DFL) {
            std::signal(signal.number, was[i]);
        }
#else
        struct sigaction old = {}, mine_too = {};
        sigaction(signal.number, nullptr, &old);
        ours[i] = !(old.sa_flags & SA_SIGINFO) && old.sa_handler == SIG_DFL;
        if (ours[i]) {
            mine_too.sa_handler = on_signal;
            mine_too.sa_flags   = SA_ONSTACK;
            sigemptyset(&mine_too.sa_mask);
            sigaction(signal.number, &mine_too, nullptr);
        }
#endif
        ++i;
    }
}

static void remove() { // keep handlers that others have installed since
    if (std::get_terminate() == on_terminate) {
        std::set_terminate(terminate_was);
    }
    if (const auto now = ggml_set_abort_callback(abort_was); now != on_abort) {
        ggml_set_abort_callback(now);
    }
    size_t i = 0;
    for (const auto & signal : SIGNALS) {
#ifdef _WIN32
        if (was[i] == SIG_DFL) {
            const auto now = std::signal(signal.number, SIG_DFL);
            if (now != on_signal) {
                std::signal(signal.number, now);
            }
        }
#else
        struct sigaction now = {};
        sigaction(signal.number, nullptr, &now);
        if (ours[i] && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == on_signal) {
            std::signal(signal.number, SIG_DFL);
        }
#endif
        ++i;
    }
#ifndef _WIN32
    stack_t now = {};
    sigaltstack(nullptr, &now);
    if ((stack_was.ss_flags & SS_DISABLE) && now.ss_sp == stack) {
        sigaltstack(&stack_was, nullptr);
    }
#endif
}

void notes_guard_set(const char * before, const char * after) {
    if (before) {
        copy(before_text, sizeof(before_text), before);
        copy(after_text,  sizeof(after_text),  after);
    }
    if (before && !on) {
        install();
    } else if (!before && on) {
        remove();
    }
    on = before != nullptr;
}
