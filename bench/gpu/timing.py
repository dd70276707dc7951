"""Time splices, prefill and cudaMemcpy, and the first token of `notes serve` and llama-server of the same build."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from bench.gpu.cuda import Copies
from bench.processes import running
from bench.random_model import ROOT, random_model
from bench.speed import COMPILED_AT, SPLICED_AT, make_segment, random_rows, seconds
from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sequence import KVSequence
from notes_cli.library.container import open_segment, open_stored, write_segment

LONG = 120.0  # seconds for a request
ROUNDS = 7
TEXTS = tuple(f"skills/{name}/SKILL.md" for name in ("store-handbook", "api-reference", "style-guide"))


def splices(counts: list[int], flash: str = "on") -> list[dict[str, Any]]:
    """Seconds to prefill so many tokens of a random model of Qwen3-0.6B's shape on the device; to splice their rows
    from memory and from a file; to read them back; and to copy as many bytes by one cudaMemcpy."""
    options = ContextOptions(n_ctx=max(counts) + 256, flash_attention=flash)  # type: ignore[arg-type]
    with Model(random_model()) as model, TemporaryDirectory() as folder, Context(model, options) as context:
        return [{"flash": flash} | _splices(context, count, Path(folder) / "random.notes") for count in counts]


def _splices(context: Context, count: int, path: Path) -> dict[str, Any]:
    tokens = np.random.default_rng(1).integers(0, 256, count).astype(np.int32)
    write_segment(path, make_segment(context, tokens, random_rows(context, count)))
    segment, stored = open_segment(path), open_stored(path)
    with KVSequence(context) as sequence:
        sequence.append(np.arange(SPLICED_AT, dtype=np.int32))
        sequence.flush()

        def prefill() -> None:
            sequence.append(tokens)
            sequence.flush()
            context.logits()  # waits for the device

        def timed(work: Callable[[], object], repeat: int) -> float:
            times = []
            for _ in range(repeat):
                sequence.truncate(SPLICED_AT)
                times.append(seconds(work))
            return min(times)

        before = native.traffic()
        file = timed(lambda: sequence.splice(stored), ROUNDS)
        memory = timed(lambda: sequence.splice(segment), ROUNDS)
        calls = (native.traffic().copies - before.copies) // (2 * ROUNDS)
        read = min(seconds(lambda: context.read(0, SPLICED_AT, count, base=COMPILED_AT)) for _ in range(3))
        taken = timed(prefill, 3)
    return {
        "tokens": count,
        "bytes": segment.nbytes,
        "calls": calls,
        "prefill": taken,
        "memory": memory,
        "file": file,
        "read": read,
        **_memcpy(segment.nbytes),
    }


def _memcpy(size: int) -> dict[str, float]:
    try:
        copies = Copies(size)
    except OSError:  # a dry run
        return {}
    try:
        return {"memcpy_pinned": copies.seconds(pinned=True), "memcpy_pageable": copies.seconds(pinned=False)}
    finally:
        copies.close()


def first_tokens(name: str, model: Path, text: str, llama_server: Path) -> dict[str, Any]:
    """Seconds to the first token of an answer about a text, median of several: `again` is another question about it,
    `moved` a question with another line before it, `new` the first question of all (notes has compiled the text)."""
    found: dict[str, Any] = {"model": name}
    with TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "long.md").write_text(text, encoding="utf-8")
        for server, context in (("llama-server", _llama_server), ("notes serve", _notes_serve)):
            with context(model, home, llama_server) as (url, ask):
                found[server] = {}
                for case in ("again", "moved"):
                    times = []
                    for number in range(ROUNDS + 1):
                        line = f"Today is day {number}." if case == "moved" else ""
                        times.append(_first(url, ask(line, text, f"What is point {number}?")))
                    if case == "again":
                        found[server]["new"] = times[0]
                    found[server][case] = median(times[1:])
    return found


def _first(url: str, body: dict[str, Any]) -> float:
    """Seconds until the first piece of text arrives."""
    start = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LONG) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{url}: {reply.read().decode()[:400]}")
        for line in reply.iter_lines():
            if line.startswith("data: {") and any(
                one["delta"].get("content") for one in json.loads(line[6:])["choices"]
            ):
                return time.perf_counter() - start
    return time.perf_counter() - start


def _body(system: str, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "stream": True, **more}


@contextmanager
def _llama_server(model: Path, home: Path, program: Path) -> Iterator[tuple[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--offline", "-np", "1"]
    command += ["-c", "8192", "-ngl", "99"]
    with running(command, home / "llama-server.log", {}, r"listening on (http://\S+)") as server:
        _first(server.url, _body("", "Hello"))
        yield server.url, lambda line, text, question: _body(f"{line}\n\n{text}".strip(), question)


@contextmanager
def _notes_serve(model: Path, home: Path, program: Path) -> Iterator[tuple[str, Any]]:
    settings = {"NOTES_HOME": str(home), "NOTES_MODEL": str(model)}
    command = [sys.executable, "-m", "notes_cli", "serve", "--port", "0", "-c", "8192"]
    compile_ = [sys.executable, "-m", "notes_cli", "compile", str(home / "long.md"), "--name", "long", "-c", "8192"]
    subprocess.run(compile_, check=True, env=os.environ | settings, capture_output=True)
    with running(command, home / "serve.log", settings, r"serving \S+ on (http://\S+)") as server:
        _first(server.url, _body("", "Hello"))
        yield server.url, lambda line, text, question: _body(line, question, notes={"splice": ["long"]})


def long_text(model: Path, tokens: int) -> str:
    """The sample skills, repeated and cut to so many tokens of the model."""
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    with Model(model, gpu_layers=0) as opened:
        text *= 1 + tokens // len(opened.tokenize(text))
        return opened.text(opened.tokenize(text)[:tokens])
