"""Time splices, prefill and cudaMemcpy, and the first token of `notes serve` and llama-server of the same build."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.gpu.cuda import memcpy
from bench.processes import llama_server, notes_serve, stream
from bench.random_model import ROOT, random_model
from bench.speed import COMPILED_AT, SPLICED_AT, make_segment, random_rows, seconds
from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.sequence import KVSequence
from notes_cli.library.container import open_segment, open_stored, write_segment

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
    times = {"prefill": taken, "memory": memory, "file": file, "read": read, **memcpy(segment.nbytes)}
    return {"tokens": count, "bytes": segment.nbytes, "calls": calls, **times}


def first_tokens(name: str, model: Path, text: str, program: Path) -> dict[str, Any]:
    """Seconds to the first token of an answer about a text, median of several: `again` is another question about it,
    `moved` a question with another line before it, `new` the first question of all (notes has compiled the text)."""
    found: dict[str, Any] = {"model": name}
    with TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "long.md").write_text(text, encoding="utf-8")
        for server, context in (("llama-server", _llama_server), ("notes serve", _notes_serve)):
            with context(model, home, program) as ask:
                found[server] = {}
                for case in ("again", "moved"):
                    times = []
                    for number in range(ROUNDS + 1):
                        line = f"Today is day {number}." if case == "moved" else ""
                        times.append(ask(line, text, f"What is point {number}?"))
                    if case == "again":
                        found[server]["new"] = times[0]
                    found[server][case] = median(times[1:])
    return found


def _first(url: str, system: str, question: str, **more: Any) -> float:
    """Seconds until the first piece of text arrives."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    return stream(f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": 4, **more}).first


@contextmanager
def _llama_server(model: Path, home: Path, program: Path) -> Iterator[Callable[[str, str, str], float]]:
    with llama_server(program, model, home / "llama-server.log", "-np", "1", "-c", "8192", "-ngl", "99") as server:
        _first(server.url, "", "Hello")
        yield lambda line, text, question: _first(server.url, f"{line}\n\n{text}".strip(), question)


@contextmanager
def _notes_serve(model: Path, home: Path, program: Path) -> Iterator[Callable[[str, str, str], float]]:
    settings = {"NOTES_HOME": str(home), "NOTES_MODEL": str(model)}
    compile_ = [sys.executable, "-m", "notes_cli", "compile", str(home / "long.md"), "--name", "long", "-c", "8192"]
    subprocess.run(compile_, check=True, env=os.environ | settings, capture_output=True)
    with notes_serve(model, home, home / "serve.log", "-c", "8192") as server:
        _first(server.url, "", "Hello")
        yield lambda line, text, question: _first(server.url, line, question, notes={"splice": ["long"]})


def long_text(model: Path, tokens: int) -> str:
    """The sample skills, repeated and cut to so many tokens of the model."""
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    with Model(model, gpu_layers=0) as opened:
        text *= 1 + tokens // len(opened.tokenize(text))
        return opened.text(opened.tokenize(text)[:tokens])
