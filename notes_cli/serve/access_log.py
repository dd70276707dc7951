"""Logs a line for each HTTP request: status, tokens of the prompt and the answer, milliseconds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notes_cli import output
from notes_cli.serve.replies import Reply, usage

POLLED = ("/health", "/metrics")  # paths that monitors request all the time
COUNTS = "counts"  # key of the request's state: a function that returns a text about tokens


class AccessLog:
    """ASGI middleware. An endpoint that answers prompts puts COUNTS into the request's state."""

    def __init__(self, app: ASGIApp, left_out: Sequence[str]) -> None:
        """`left_out`: paths without a line."""
        self._app, self._left_out = app, left_out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._left_out:
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499  # the client is gone

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            milliseconds = round(1000 * (time.perf_counter() - began))
            counts = scope.get("state", {}).get(COUNTS, str)()
            output.say(f"{scope['method']} {scope['path'][:200]} {status}, {counts}{milliseconds:,} ms")


def counts_of(replies: Sequence[Reply]) -> str:
    """Return the token counts of replies, as far as they are known."""
    prefills = [reply.prefill for reply in replies if reply.prefill]
    if not prefills:
        return ""
    counts = usage(replies)
    first = round(1000 * min(prefill.seconds for prefill in prefills))
    reused = counts["prompt_tokens_details"]["cached_tokens"]
    text = f"prompt {counts['prompt_tokens']:,} tokens ({reused:,} reused, {first:,} ms)"
    done = sum(len(reply.done) for reply in replies) == sum(reply.request.params.choices for reply in replies)
    return f"{text}, answer {counts['completion_tokens']:,}, " if done else f"{text}, answer cut off, "
