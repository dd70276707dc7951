// notes_call.h: wraps calls of the C interface, converting exceptions to a status and a message.
#pragma once

#include "notes_kv.h"

// Keep the message for notes_error() and return the status.
int32_t fail(notes_status status, const char * why) noexcept;

int32_t null_argument();

template<typename F>
int32_t guarded(F && f) noexcept {
    try {
        return f();
    } catch (const notes_failure & e) {
        return fail(e.status, e.what());
    } catch (const std::exception & e) {
        return fail(NOTES_E_DECODE, e.what());
    } catch (...) {
        return fail(NOTES_E_DECODE, "unknown error");
    }
}
