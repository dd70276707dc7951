"""Measure how much llama-server's prefix cache hits behind `notes serve --upstream`, if each request has another date.

    python -m bench.upstream_cache [--count 300] [--limit 900] [--threads 2]

The same requests go to llama-server itself and to it by way of `notes serve --upstream`: a policy of 2,000 tokens in
the system message, with today's date in its third line, and a question. They come at random times (Poisson) at three
loads; a load of 1 is as many requests a second as llama-server answers one after the other if nothing is edited.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta

from bench.processes import llama_server, post, running
from bench.random_model import ROOT
from bench.serving.load import Figures, arrivals, figures, offer, times
from bench.serving.stock import stock
from bench.serving.texts import FIRST, Json, policy, questions
from notes_cli.runtime.naming import model_file

FOLDER = ROOT / "build" / "upstream-cache"
LOADS = (0.2, 0.5, 1.0)
WAYS = ("notes serve --upstream", "llama-server itself")
SECTIONS, TOKENS, SEED, CELLS, PARALLEL = 4, 8, 7, 4096, 2


def body(number: int, question: str) -> Json:
    """The request of a day, as a client sends it to any server."""
    system = policy(FIRST + timedelta(number), sections=SECTIONS)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"messages": messages, "max_tokens": TOKENS, "temperature": 0, **usage}


@contextmanager
def in_front_of(url: str) -> Iterator[str]:
    """Run `notes serve --upstream` in the block, and yield its address."""
    text = FOLDER / "policy.md"
    text.write_text(policy(sections=SECTIONS))
    command = [sys.executable, "-m", "notes_cli", "serve", "--port", "0", "--upstream", url, "--skills", str(text)]
    with running(command, FOLDER / "notes.log", {"NOTES_HOME": str(FOLDER / "home")}, r" on (http://\S+)") as server:
        yield server.url


def warm(url: str) -> float:
    """Prefill the policy of the first day in each slot; return the seconds of a request after that."""
    whole = {key: value for key, value in body(0, "What is the return?").items() if not key.startswith("stream")}
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(lambda _: post(f"{url}/v1/chat/completions", whole), range(PARALLEL)))
    started = time.perf_counter()
    post(f"{url}/v1/chat/completions", whole)
    return time.perf_counter() - started


def row(load: float, way: str, found: Figures) -> str:
    """A row of the table."""
    reused = "" if found.reused is None else f"{found.reused:.1%}"
    return f"| {load:g} | {way} | {reused} | {found.p50} s | {found.p90} s | {found.answered} of {found.sent} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="requests in all, a third at each load [300]")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a phase, after which it is cut off [900]")
    parser.add_argument("--threads", type=int, default=2, help="of llama-server; 1 beside other programs [2]")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with us
    FOLDER.mkdir(parents=True, exist_ok=True)
    size = ["-np", str(PARALLEL), "-c", str(PARALLEL * CELLS), "-t", str(given.threads)]
    count, second, seen = given.count // len(LOADS), 0.0, dict[tuple[float, str], Figures]()
    for way in WAYS:  # each with a server of its own
        with (
            llama_server(stock(), model_file("smollm2"), FOLDER / "llama-server.log", *size) as server,
            in_front_of(server.url) if way == WAYS[0] else nullcontext(server.url) as url,
        ):
            warmed = warm(url)
            second = second or warmed
            for number, load in enumerate(LOADS):
                day = 1 + number * count
                asked = [body(day + n, one.question) for n, one in enumerate(questions(count, SEED + number))]
                due = arrivals(count, load / second, SEED + number, given.limit)
                outcome = asyncio.run(offer(url, list(zip(due, asked, strict=False)), given.limit))
                seen[load, way] = figures(outcome, given.limit)
                print(row(load, way, seen[load, way]), [one.failed for one in outcome if one.failed][:3], flush=True)
    print(f"\nA load of 1 is {1 / second:.2f} requests a second.\n")
    print("| load | requests go to | cached | first token, p50 | p90 | answered | p90, times ours |")
    print("| ---: | --- | ---: | ---: | ---: | --- | ---: |")
    for load in LOADS:
        for way in WAYS:
            slower = times(seen[load, way].p90, seen[load, WAYS[0]].p90) if way != WAYS[0] else ""
            print(f"{row(load, way, seen[load, way])} {slower} |")
    failed = sum(found.failed for found in seen.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
