"""Counts the server's tokens, request outcomes and latencies for Prometheus, and logs a line for each HTTP request."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notes_cli import output
from notes_cli.serve.replies import Reply, usage

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # upper, in seconds
disable_created_metrics()  # type: ignore[no-untyped-call]  # series of when each histogram was made
KIND = "text/plain; version=0.0.4; charset=utf-8"


def _histogram(name: str, help_text: str) -> Histogram:
    return Histogram(f"notes_{name}_seconds", help_text, buckets=BOUNDS, registry=None)


@dataclass(slots=True)
class Metrics:
    """Counters. The decode thread writes them, except `outcomes`; with --upstream, the event loop writes all."""

    decoded: int = 0  # prompt tokens
    spliced: int = 0  # prompt tokens
    live: int = 0  # prompt tokens found in the prefix cache
    unreported: int = 0  # prompt tokens of another server that does not report how many were cached
    generated: int = 0  # tokens
    steps: int = 0
    preempted: int = 0  # answers
    restored: int = 0  # evicted prefixes, from memory
    restored_tokens: int = 0  # of `live`
    outcomes: Counter[str] = field(default_factory=Counter)  # answered, failed, gone, refused
    first_token: Histogram = field(
        default_factory=partial(_histogram, "first_token", "From a request to its first token.")
    )
    queued: Histogram = field(default_factory=partial(_histogram, "queue", "From a request to its beginning."))


class _Snapshot(Collector):
    def __init__(self, metrics: Metrics, gauges: dict[str, float]) -> None:
        self._metrics, self._gauges = metrics, gauges

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        requests = CounterMetricFamily("notes_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome, count in metrics.outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        prompts = CounterMetricFamily(
            "notes_prompt_tokens", "Tokens of prompts by how their K/V was made.", labels=["how"]
        )
        for how in ("decoded", "spliced", "live", *(["unreported"] if metrics.unreported else [])):
            prompts.add_metric([how], getattr(metrics, how))
        yield prompts
        yield CounterMetricFamily("notes_answer_tokens", "Tokens that were written.", value=metrics.generated)
        yield CounterMetricFamily("notes_steps", "Calls of llama.cpp.", value=metrics.steps)
        yield CounterMetricFamily("notes_set_aside", "Answers that made room for others.", value=metrics.preempted)
        restored, tokens = metrics.restored, metrics.restored_tokens
        yield CounterMetricFamily("notes_restored_prefixes", "Evicted prefixes restored from memory.", value=restored)
        yield CounterMetricFamily("notes_restored_tokens", "Tokens of these prefixes.", value=tokens)
        yield from (*metrics.first_token.collect(), *metrics.queued.collect())
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"notes_{name}", name.replace("_", " "), value=value)


def render_metrics(metrics: Metrics, gauges: dict[str, float]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Snapshot(metrics, gauges))
    return generate_latest(registry)


POLLED = ("/health", "/metrics")  # paths that monitors request all the time
LONGEST_ERROR = 10_000  # bytes of an error's body that are read
COUNTS = "counts"  # key of the request's state: a function that returns a text about tokens


def access_log(app: ASGIApp, left_out: Sequence[str]) -> ASGIApp:
    """Log each request, except those for the paths `left_out`. An endpoint that answers prompts puts COUNTS into the
    request's state."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in left_out:
            await app(scope, receive, send)
            return
        began, status, error = time.perf_counter(), 499, b""  # 499: the client is gone

        async def watched(message: Message) -> None:
            nonlocal status, error
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                error = (error + message.get("body", b""))[:LONGEST_ERROR]
            await send(message)

        try:
            await app(scope, receive, watched)
        finally:
            milliseconds = round(1000 * (time.perf_counter() - began))
            counts = scope.get("state", {}).get(COUNTS, str)()
            why = f": {why}" if (why := _message_in(error)) else ""
            output.say(f"{scope['method']} {scope['path'][:200]} {status}, {counts}{milliseconds:,} ms{why}")

    return logged


def _message_in(error: bytes) -> str:
    """Return the beginning of the message of an error's body, in the form of any API; "" without one."""
    try:
        found = json.loads(error)["error"]
        return str(found["message"] if isinstance(found, dict) else found)[:200]
    except (ValueError, LookupError, TypeError):
        return ""


def counts_of(replies: Sequence[Reply]) -> str:
    """Return the token counts of replies, as far as they are known."""
    prefills = [reply.prefill for reply in replies if reply.prefill]
    if not prefills:
        return ""
    counts = usage(replies)
    first = round(1000 * min(prefill.seconds for prefill in prefills))
    reused = counts["prompt_tokens_details"]["cached_tokens"]
    missed = "".join(f"; {prefill.missed}" for prefill in prefills if prefill.missed)
    text = f"prompt {counts['prompt_tokens']:,} tokens ({reused:,} reused, {first:,} ms{missed})"
    done = sum(len(reply.done) for reply in replies) == sum(reply.request.answers for reply in replies)
    return f"{text}, answer {counts['completion_tokens']:,}, " if done else f"{text}, answer cut off, "
