"""Compute shares, throughput and percentiles of clients' measurements; requests cut off give bounds, not guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.serving.load import Seen


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
