"""Open-loop load: requests arrive independently of earlier ones. Waits that were cut off give bounds, not guesses."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from bench.serving.texts import Json


@dataclass
class Seen:
    """One request. Times in seconds since it arrived; tokens as the server counts them."""

    arrival: float  # after the first
    waited: float = 0.0  # until its first word came; without any: until it was given up
    first: bool = False  # a word came
    done: float | None = None  # all of its answer was there
    prompt: int = 0
    cached: int = 0
    written: int = 0
    text: str = ""
    failed: str = ""  # why

    @property
    def cut(self) -> bool:
        """True if no text had arrived when time was up."""
        return not self.first and self.done is None and not self.failed

    def hear(self, chunk: Json, since: float) -> None:
        """Take a chunk of the stream in."""
        if "error" in chunk:
            self.failed = json.dumps(chunk["error"])[:200]
        for choice in chunk.get("choices") or ():
            if words := choice["delta"].get("content"):
                if not self.first:
                    self.first, self.waited = True, since
                self.text += words
        if timings := chunk.get("timings"):  # of llama-server, with every token
            self.prompt, self.cached = timings["cache_n"] + timings["prompt_n"], timings["cache_n"]
        if usage := chunk.get("usage"):
            self.prompt, self.written = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def arrivals(count: int, per_second: float | None, seed: int, until: float) -> list[float]:
    """Return arrival times with exponential gaps, equal for a seed up to scale, until `until`. Without a rate all
    arrive at once."""
    if per_second is None:
        return [0.0] * count
    rng, now, found = random.Random(seed), 0.0, [0.0]
    while len(found) < count:
        now += rng.expovariate(1) / per_second
        if now > until:
            break
        found.append(now)
    return found


STILL = 2.0  # seconds without progress, as on a suspended or busy machine


async def offer(url: str, requests: Sequence[tuple[float, Json]], limit: float) -> list[Seen]:
    """Send each at its time, and give up after `limit` seconds in all, or if nothing moves for STILL seconds."""
    seen = [Seen(arrival) for arrival, _ in requests]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        watching = asyncio.create_task(_watch(http, url))
        started = time.perf_counter()
        tasks = [
            asyncio.create_task(_ask(http, url, body, one, started + one.arrival))
            for one, (_, body) in zip(seen, requests, strict=True)
        ]
        _, late = await asyncio.wait(tasks, timeout=limit)
        ended = time.perf_counter() - started
        for task in late:
            task.cancel()
        watching.cancel()
        await asyncio.gather(*tasks, watching, return_exceptions=True)
    for one in seen:
        if one.cut:
            one.waited = ended - one.arrival
    return seen


async def _watch(http: httpx.AsyncClient, url: str) -> None:
    """Raise SystemExit where time went by without us, or without the server, which has a thread for this."""
    while True:
        before = time.perf_counter()
        await http.get(f"{url}/health")
        await asyncio.sleep(STILL / 4)
        if (gone := time.perf_counter() - before) > STILL:
            raise SystemExit(f"nothing moved for {gone:.0f} seconds: measure this phase again, on a quiet machine")


async def _ask(http: httpx.AsyncClient, url: str, body: Json, one: Seen, due: float) -> None:
    """Times count from when it was due: a client that is late itself makes nothing look better."""
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                one.failed = f"status {reply.status_code}"
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    one.hear(json.loads(line[6:]), time.perf_counter() - due)
                elif line.startswith("data: [DONE]"):
                    one.done = time.perf_counter() - due
    except httpx.HTTPError as error:
        one.failed = f"{type(error).__name__}: {error}"
    if one.done is None and not one.failed:
        one.failed = "the stream has ended early"
    if one.done is not None and not one.first:
        one.waited = one.done  # an answer without a word


@dataclass(frozen=True)
class Wait:
    """A percentile of the time to the first token, in seconds."""

    seconds: float
    at_least: bool = False  # some of those who were cut off might have raised it

    def __str__(self) -> str:
        digits = 0 if self.seconds >= 9.95 else 1 if self.seconds >= 0.995 else 2
        return f"{'> ' if self.at_least else ''}{self.seconds:.{digits}f}"


@dataclass(frozen=True)
class Figures:
    """Figures of the requests of one phase."""

    sent: int
    answered: int  # to their ends
    cut: int  # not answered when time was up
    failed: int
    reused: float | None  # share of prompt tokens, of requests that reported it: at the first text, ours at the end
    prompt: float | None  # tokens of theirs, mean
    seconds: float  # from the first arrival to the last answer; where some were cut, to when time was up
    answers: float  # a second
    tokens: float  # written a second
    p50: Wait | None
    p90: Wait | None


def figures(seen: Sequence[Seen], limit: float) -> Figures:
    """Those of a phase that had `limit` seconds."""
    done = [one for one in seen if one.done is not None and not one.failed]
    failed = sum(bool(one.failed) for one in seen)
    cut = len(seen) - len(done) - failed
    seconds = limit if cut else max((one.arrival + (one.done or 0) for one in done), default=0.0)
    read = [one for one in seen if one.prompt and not one.failed]
    prompt = sum(one.prompt for one in read)
    waits = [(one.waited, one.cut) for one in seen if not one.failed]
    return Figures(
        sent=len(seen),
        answered=len(done),
        cut=cut,
        failed=failed,
        reused=sum(one.cached for one in read) / prompt if prompt else None,
        prompt=prompt / len(read) if read else None,
        seconds=seconds,
        answers=len(done) / seconds if seconds else 0.0,
        tokens=sum(one.written for one in done) / seconds if seconds else 0.0,
        p50=percentile(waits, 0.5),
        p90=percentile(waits, 0.9),
    )


def percentile(waits: Sequence[tuple[float, bool]], share: float) -> Wait | None:
    """Return the least wait that this share does not exceed. Requests that were cut off (True) have lower bounds only;
    if one might come later in the order, so does the result."""
    if not waits:
        return None
    ordered = sorted(waits)
    seconds = ordered[math.ceil(share * len(ordered)) - 1][0]
    return Wait(seconds, any(cut and bound <= seconds for bound, cut in ordered))


def times(slower: Wait | None, faster: Wait | None) -> Wait | None:
    """How many times longer one wait is than another. None where the shorter one is a bound itself."""
    if slower is None or faster is None or faster.at_least:
        return None
    return Wait(slower.seconds / faster.seconds, slower.at_least)
