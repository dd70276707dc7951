#include "notes_grammar.h"

#include "llama-impl.h"

static thread_local bool    counts = false;
static thread_local int64_t steps  = 0;

notes_grammar_call::notes_grammar_call() {
    counts = true;
    steps  = 0;
}

notes_grammar_call::~notes_grammar_call() {
    counts = false;
}

void notes_grammar_stepped(size_t n) {
    steps += counts ? (int64_t) n : 0;
    if (counts && steps > NOTES_GRAMMAR_STEPS) {
        throw notes_grammar_limit();
    }
}

int64_t notes_grammar_counted() {
    return steps;
}

void notes_grammar_log() {
    LLAMA_LOG_ERROR("it can be read in too many ways (more than %lld steps for one token)\n", (long long) NOTES_GRAMMAR_STEPS);
}
