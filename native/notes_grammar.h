// How much one call of llama.cpp's grammar sampler may do. Of a grammar that can be read in many ways it keeps every way as
// a stack, and their number may double with each character.
#pragma once

#include <cstddef>
#include <cstdint>

// About a second, some 256 MB of stacks; a thousand ways to go on, for each of 262,144 tokens.
constexpr int64_t NOTES_GRAMMAR_STEPS = int64_t(1) << 28;

// While it lives, steps of this thread are counted.
struct notes_grammar_call {
    notes_grammar_call();
    ~notes_grammar_call();
    notes_grammar_call(const notes_grammar_call &) = delete;
};

struct notes_grammar_limit {}; // thrown where a call has done enough

// A step: a token or a stack that is looked at, or a byte of a stack that is made. Outside of a call none is counted.
void notes_grammar_stepped(size_t n);

// For a stack of n elements that is made.
inline void notes_grammar_stack(size_t n) {
    notes_grammar_stepped(64 + 8*n);
}

// Steps of the last call in this thread.
int64_t notes_grammar_counted();

// What a call that has done enough leaves in the log.
void notes_grammar_log();
