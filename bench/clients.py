"""Clients that misbehave, by the thousands, against `notes serve`: vanish, stall, flood, send garbage, repeat; and ask.

    python -m bench.clients [--requests 10000] [--seed 5] [--parallel 24] [--write docs/results/clients.json]

Every answer that is complete must be the right one, which was asked for by itself before. In the end nothing may be
left: no request, no sequence but those of idle prefixes, no promised cell; and the memory may not grow after the first
fifth. Exits 1 if anything of that fails. At last, a small request is timed beside large ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.processes import notes_serve
from notes_cli.config import shipped_model
from tests.samples import SAMPLES

Json = dict[str, Any]
SKILLS = ("returns", "support")
QUESTIONS = ("May I return this?", "What is the tier?", "What is the plan?", "May I return this? Think first.")
ERRATA: tuple[Json, ...] = ({}, {"date": "2026-07-01"}, {"tier": "basic"})
PATIENCE = 120.0  # seconds for one request
LARGE = 2 << 20  # bytes of a text
GROWTH = 1.15  # of the memory after the first fifth
SERVE = ("-c", "4096", "--parallel", "16", "-ctk", "f32", "-ctv", "f32", "-t", "1")


@dataclass
class Outcome:
    """Counts and failures of the campaign."""

    kinds: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    right: int = 0
    wrong: list[str] = field(default_factory=list)  # with what was asked


class Campaign:
    """Requests that are drawn by chance, against one server."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.outcome = url, Outcome()
        self._host, _, port = urlsplit(url).netloc.rpartition(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._expected: dict[str, str] = {}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits)

    async def learn(self) -> None:
        """Return the answer to each question when asked alone."""
        for number in range(len(QUESTIONS) * len(SKILLS) * len(ERRATA)):
            asked = self._asked(number)
            reply = await self.http.post("/v1/chat/completions", json=asked)
            self._expected[json.dumps(asked)] = reply.json()["choices"][0]["message"]["content"]

    def _asked(self, number: int) -> Json:
        skill = SKILLS[number % len(SKILLS)]
        question = QUESTIONS[number // len(SKILLS) % len(QUESTIONS)]
        errata = ERRATA[number // len(SKILLS) // len(QUESTIONS) % len(ERRATA)]
        errata = errata if skill == "returns" else {}
        notes = {"splice": [skill], "errata": errata}
        return {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "notes": notes}

    async def run(self, count: int, parallel: int, progress: Callable[[int], object]) -> None:
        """So many requests, so many at a time."""
        kinds = [*[self.ask] * 8, *[self.talk] * 2, *[self.vanish] * 4, self.stall, *[self.babble] * 2]
        kinds += [*[self.mistake] * 2, self.exceed]
        drawn = [(self._random.choice(kinds), random.Random(self._random.random())) for _ in range(count)]
        waiting = iter(drawn)
        done = 0

        async def one_after_the_other() -> None:
            nonlocal done
            for kind, chance in waiting:
                self.outcome.kinds[kind.__name__] += 1
                try:
                    await asyncio.wait_for(kind(chance), PATIENCE)
                except (OSError, httpx.HTTPError, asyncio.TimeoutError) as error:
                    self.outcome.wrong.append(f"{kind.__name__}: {type(error).__name__} {error}")
                done += 1
                progress(done)

        await asyncio.gather(*(one_after_the_other() for _ in range(parallel)))

    # Those who ask.

    async def ask(self, chance: random.Random) -> None:
        """A question, whole or as a stream."""
        asked = self._asked(chance.randrange(100))
        self._judge(asked, await self._answer({**asked, "stream": chance.random() < 0.5}))

    async def talk(self, chance: random.Random) -> None:
        """A question again, in the same words, after a turn of the same conversation."""
        asked = self._asked(chance.randrange(100))
        first = await self._answer(asked)
        self._judge(asked, first)
        turns = [*asked["messages"], {"role": "assistant", "content": first}, asked["messages"][0]]
        await self._answer({**asked, "messages": turns})

    async def _answer(self, asked: Json) -> str:
        while True:
            if not asked.get("stream"):
                reply = await self.http.post("/v1/chat/completions", json=asked)
                if reply.status_code == 200:
                    text: str = reply.json()["choices"][0]["message"]["content"]
                    return text
            else:
                async with self.http.stream("POST", "/v1/chat/completions", json=asked) as reply:
                    if reply.status_code == 200:
                        chunks = [json.loads(line[6:]) async for line in reply.aiter_lines() if line[:7] == "data: {"]
                        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("choices")]
                        return "".join(delta.get("content", "") for delta in deltas)
            self.outcome.states[str(reply.status_code)] += 1
            if reply.status_code != 429:
                raise OSError(f"status {reply.status_code}")
            await asyncio.sleep(float(reply.headers["retry-after"]) / 4)

    def _judge(self, asked: Json, answer: str) -> None:
        wanted = self._expected[json.dumps(asked)]
        if answer == wanted:
            self.outcome.right += 1
        else:
            self.outcome.wrong.append(f"{json.dumps(asked)}: {answer!r}, not {wanted!r}")

    # Those who misbehave.

    async def vanish(self, chance: random.Random) -> None:
        """Gone in the middle of its request, or of the answer."""
        long = {**self._asked(chance.randrange(100)), "max_tokens": 400, "stream": chance.random() < 0.7}
        long |= {"temperature": 3, "top_k": 0, "min_p": 0, "n": chance.choice([1, 1, 1, 4])}
        data = self._request(json.dumps(long).encode())
        reader, writer = await asyncio.open_connection(self._host, self._port)
        at = chance.random()
        writer.write(data[: int(len(data) * 4 * at)] if at < 0.25 else data)
        await writer.drain()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1 + int(4000 * chance.random())), chance.random() / 4)
        writer.transport.abort()

    async def stall(self, chance: random.Random) -> None:
        """A client that sends or reads next to nothing."""
        long = {**self._asked(0), "max_tokens": 200, "stream": True, "temperature": 3, "logprobs": True}
        data = self._request(json.dumps(long).encode())
        _, writer = await asyncio.open_connection(self._host, self._port, limit=1)
        writer.write(data if chance.random() < 0.7 else data[:40])
        await writer.drain()
        await asyncio.sleep(1.5 * chance.random())
        writer.transport.abort()

    async def babble(self, chance: random.Random) -> None:
        """Bytes that are no HTTP, or no JSON."""
        noise = chance.randbytes(chance.randrange(1, 4000))
        whole = self._request(json.dumps(self._asked(0)).encode())
        torn = bytearray(whole)
        for _ in range(8):
            torn[chance.randrange(len(torn))] = chance.randrange(256)
        reader, writer = await asyncio.open_connection(self._host, self._port)
        headers = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9999
        writer.write(chance.choice([noise, bytes(torn), self._request(noise), headers]))
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await writer.drain()
            writer.write_eof()
            head = await asyncio.wait_for(reader.read(4000), 3)
            if match := re.match(rb"HTTP/1.1 (\d+)", head):
                self._state(int(match[1]))
        writer.transport.abort()

    async def mistake(self, chance: random.Random) -> None:
        """A request of which something is wrong."""
        asked = self._asked(chance.randrange(100))
        strange = chance.choice([None, -1, 1e99, "x" * 999, [], {}, True, [[]], "\x00", {"a": [1]}, float(2**63)])
        keys = ("messages", "model", "n", "stop", "seed", "max_tokens", "temperature", "notes", "tools", "logprobs")
        wrong = {**asked, chance.choice([*keys, "response_format", "stream_options", "what"]): strange}
        paths = ["/v1/chat/completions", "/v1/completions", "/v1/notes/errata", "/tokenize", "/v1/notes/explain"]
        path = chance.choice(paths)
        self._state((await self.http.post(path, json=wrong)).status_code)

    async def exceed(self, chance: random.Random) -> None:
        """Requests beyond the server's limits."""
        asked = self._asked(0) | {"messages": [{"role": "user", "content": "a b " * 9000}]}
        reply = await self.http.post("/v1/chat/completions", json=asked)
        self._state(reply.status_code)
        if reply.status_code not in (400, 429):
            self.outcome.wrong.append(f"too much was taken: status {reply.status_code}")

    def _state(self, status: int) -> None:
        self.outcome.states[str(status)] += 1
        if status >= 500:
            self.outcome.wrong.append(f"status {status}")

    def _request(self, body: bytes) -> bytes:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def gauges(self) -> dict[str, float]:
        """Return the server's metrics once it is idle."""
        for _ in range(200):
            text = (await self.http.get("/metrics")).text
            found = {name: float(value) for name, value in re.findall(r"^notes_(\w+) (\S+)$", text, re.M)}
            if not found["requests_running"] + found["requests_waiting"]:
                return found
            await asyncio.sleep(0.05)
        return found

    def left_behind(self, gauges: dict[str, float], sequences: float) -> list[str]:
        """Return gauges that should be 0 at rest. `sequences`: free and idle ones at the beginning."""
        left = {name: gauges[name] for name in ("requests_running", "requests_waiting", "cells_promised")}
        left["sequences"] = sequences - gauges["sequences_free"] - gauges["prefixes_idle"]
        return [f"{name}: {value:g} left over" for name, value in left.items() if value]


async def campaign(
    url: str, count: int, seed: int, parallel: int, progress: Callable[[int], object] = lambda done: None
) -> Outcome:
    """Run the campaign; failures are in the outcome."""
    one = Campaign(url, seed)
    async with one.http:
        await one.learn()
        before = await one.gauges()
        await one.run(count, parallel, progress)
        after = await one.gauges()
        sequences = before["sequences_free"] + before["prefixes_idle"]
        one.outcome.wrong += one.left_behind(after, sequences)
        answers = [await one._answer(json.loads(asked)) for asked in one._expected]
        one.outcome.wrong += ["the last answers are wrong"] if answers != list(one._expected.values()) else []
    return one.outcome


async def beside_large(url: str) -> Json:
    """Return the seconds until a small answer, at best and at most: alone, and beside four requests of 2 MiB."""
    found: Json = {}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:

        async def ask(text: str) -> float:
            started = time.monotonic()
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            await http.post("/v1/chat/completions", json=body)
            return time.monotonic() - started

        texts = {"alone": "", "letter": "a", "blanks": "a" + " " * 99, "word": "a ", "sign": "\u4e2d"}
        for name, text in texts.items():
            large = [asyncio.ensure_future(ask(text * (LARGE // len(text.encode())))) for _ in range(4 if text else 0)]
            times = [await ask("Why?")]
            while len(times) < 9 or not all(one.done() for one in large):
                times.append(await ask("Why?"))
            found[name] = {"best": round(min(times), 3), "most": round(max(times), 3)}
            found[name] |= {"large": round(max(await asyncio.gather(*large)), 3)} if large else {}
    return found


def memory(pid: int) -> int:
    """Return a process's memory in bytes, 0 if unknown."""
    with contextlib.suppress(OSError):
        return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) << 10
    return 0


def prepare(url: str) -> None:
    for name in SKILLS:
        text = (SAMPLES / name / "SKILL.md").read_text(encoding="utf-8")
        httpx.post(f"{url}/v1/notes/compile", json={"name": name, "text": text}, timeout=60).raise_for_status()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=24)
    parser.add_argument("--write", type=Path, metavar="FILE")
    given = parser.parse_args()
    started, sizes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "log"
        with notes_serve(shipped_model(), Path(home), log, *SERVE) as server:
            prepare(server.url)

            def progress(done: int) -> None:
                if done % max(1, given.requests // 20) == 0:
                    sizes.append(memory(server.pid))
                    print(f"{done:,} requests, {sizes[-1] >> 20} MiB", flush=True)

            outcome = asyncio.run(campaign(server.url, given.requests, given.seed, given.parallel, progress))
            large = asyncio.run(beside_large(server.url))
        if "Traceback" in (text := log.read_text()):
            outcome.wrong.append(text[-4000:])
    early, late = max(sizes[: len(sizes) // 5] or [0]), max(sizes[-len(sizes) // 5 :] or [0])
    if early and late > GROWTH * early:
        outcome.wrong.append(f"the memory grew from {early >> 20} to {late >> 20} MiB")
    report: Json = {"requests": given.requests, "seed": given.seed}
    report |= {"kinds": dict(outcome.kinds), "statuses": dict(outcome.states)}
    report |= {"right": outcome.right, "wrong": outcome.wrong}
    report |= {"memory_mib": {"first_fifth": early >> 20, "last_fifth": late >> 20}}
    report |= {"beside_large_seconds": large}
    report |= {"minutes": round((time.monotonic() - started) / 60, 1)}
    print(json.dumps(report, indent=1))
    if given.write:
        given.write.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
