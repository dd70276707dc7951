"""What a segment's file keeps its rows as: bytes, time of a splice, and what becomes of logits and decisions.

    python -m bench.kept [--cases 216] [--tokens 1024] [--timed 4096] [--repeat 15] [--threads N] [--json FILE]

One compile a skill, whose rows are written in each type, opened and spliced by turns. On the model that ships:
decisions of bench/protocol/texts.py in words of one token, each skill moved by a system text. On a random model of the
shape of Qwen3-0.6B (rows that it computed; what it says is noise): the logits after a question. Each against the splice
of the f16 file; `recompute` is how far that one is from a full recompute of the same tokens. Times are medians of turns
that alternate, over those of the f16 file, from opening the file to the last row, every byte checked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bench.experiments.cases import SYSTEM, THINK, WAYS, decided_in, segments_of
from bench.experiments.frame import grid
from bench.protocol.texts import Next
from bench.random_model import random_model
from bench.speed import SPLICED_AT, make_segment, random_rows, seconds
from notes_cli import config
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import KEPT, Segment
from notes_cli.library.container import open_stored, peek, write_segment
from notes_cli.measure.compare import cosine, divergence, same_top
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

Logits = NDArray[np.float32]
Row = dict[str, Any]
EXACT = "recompute"
QUESTION = 32  # tokens after a splice on the random model


def written(folder: Path, segment: Segment, number: int = 0) -> dict[str, Path]:
    """A file of the segment for each type."""
    paths = {kv: folder / f"{number}-{index}.gguf" for index, kv in enumerate(KEPT)}
    for kv, path in paths.items():
        write_segment(path, replace(segment, kv=kv))
    return paths


def compared(kv: str, found: Logits, reference: Logits, **more: Any) -> Row:
    return {
        "kv": kv,
        "cosine": cosine(found, reference),
        "kl": divergence(found, reference),
        "same_top": same_top(found, reference),
        **more,
    }


def decisions(cases: int, folder: Path) -> Iterator[Row]:
    """On the model that ships."""
    with Workspace(config.shipped_model(), paths=config.Paths.under(folder)) as workspace:
        for number, case in Next("bench.kept", "known").cases("decisions", cases):
            files = [written(folder, one, index) for index, one in enumerate(segments_of(workspace, case.skills))]
            for way in WAYS:
                found: dict[str, tuple[str, Logits]] = {}
                for kv in (*KEPT, EXACT):
                    segments = [open_stored(paths.get(kv, paths["f16"])) for paths in files]
                    prompt = Prompt(case.question, segments, system=SYSTEM, think=way == "reasoned")
                    notebook = assemble(workspace, prompt, splice=kv != EXACT, room=THINK)
                    logits = notebook.logits()
                    found[kv] = decided_in(workspace, notebook, prompt, case.choices), logits
                choice, reference = found["f16"]
                for kv, (other, logits) in found.items():
                    right = other == case.answer
                    yield compared(kv, logits, reference, way=way, case=number, right=right, same=other == choice)
            print(f"\rcase {number} of {cases}", end="", file=sys.stderr)
    print(file=sys.stderr)


def shape(tokens: int, threads: int, folder: Path) -> Iterator[Row]:
    """On the random model, in caches of several types."""
    random = np.random.default_rng(2)
    text, before, question = (random.integers(0, 256, n).astype(np.int32) for n in (tokens, SPLICED_AT, QUESTION))
    with Model(random_model()) as model:
        options = ContextOptions(n_ctx=tokens + 512, n_threads=threads)
        with Context(model, options) as context, Notebook(context) as notebook:
            left = np.zeros(16, np.int32)
            notebook.append(left)
            notebook.append(text)
            notebook.flush()
            rows = context.read(notebook.sequence, len(left), tokens, base=len(left))
            paths = written(folder, make_segment(context, text, rows))
        first: Logits | None = None
        for cache, flash in (("f16", "on"), ("f16", "off"), ("q8_0", "on")):
            options = replace(options, type_k=cache, type_v=cache, flash_attention=flash)
            with Context(model, options) as context:
                found: dict[str, Logits] = {}
                for kv in (*KEPT, *([EXACT] if flash == "on" else [])):
                    with Notebook(context) as notebook:
                        notebook.append(before)
                        if kv == EXACT:
                            notebook.append(text)
                        else:
                            notebook.splice(open_stored(paths[kv]))
                        found[kv] = notebook.lookahead([int(token) for token in question])
                for kv, logits in found.items():
                    for one, reference in zip(logits, found["f16"], strict=True):
                        yield compared(kv, one, reference, cache=cache, flash=flash)
                first = found["f16"] if first is None else first
                if cache != "f16":  # what such a cache costs by itself
                    for one, reference in zip(found["f16"], first, strict=True):
                        yield compared("f16", one, reference, cache=f"{cache}, against f16", flash=flash)


def timed(tokens: int, repeat: int, threads: int, folder: Path) -> Iterator[Row]:
    """Splices by turns, on the random model."""
    flashes: tuple[Literal["on", "off"], ...] = ("on", "off")
    with Model(random_model()) as model:
        for flash in flashes:
            options = ContextOptions(n_ctx=tokens + 256, n_threads=threads, flash_attention=flash)
            with Context(model, options) as context, Notebook(context) as notebook:
                text = np.zeros(tokens, np.int32)
                paths = written(folder, make_segment(context, text, random_rows(context, tokens)))
                notebook.append(np.arange(SPLICED_AT))
                notebook.flush()
                times: dict[str, list[float]] = {kv: [] for kv in KEPT}
                for _ in range(repeat + 1):
                    for kv, path in paths.items():
                        notebook.truncate(SPLICED_AT)
                        times[kv].append(seconds(lambda path=path: notebook.splice(open_stored(path))))  # type: ignore[misc]
                for kv, path in paths.items():
                    taken = median(times[kv][1:])
                    ratio = taken / median(times["f16"][1:])
                    yield {"kv": kv, "flash": flash, "seconds": taken, "ratio": ratio, "bytes": peek(path).rows}


def some(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def line(kv: str, rows: Sequence[Row], *cells: str) -> str:
    near, apart = [row["cosine"] for row in rows], [row["kl"] for row in rows]
    return " | ".join((kv, f"{1 - fmean(near):.1e}", f"{1 - min(near):.1e}", f"{fmean(apart):.1e}", *cells))


def told(found: dict[str, list[Row]]) -> Iterator[str]:
    """Markdown tables."""
    plain = some(found["timed"], kv="f16", flash="on")[0]["bytes"]
    rows = []
    for kv in KEPT:
        one, other = (some(found["timed"], kv=kv, flash=flash)[0] for flash in ("on", "off"))
        rows.append(f"{kv} | {one['bytes'] / plain:.2f} | {one['ratio']:.2f} | {other['ratio']:.2f}")
    yield grid("kept as | bytes | splice, flash attention on | off", rows)
    rows = []
    for kv in (*KEPT, EXACT):
        direct, reasoned = (some(found["decisions"], kv=kv, way=way) for way in WAYS)
        shares = [
            f"{sum(not row['same'] for row in part)} of {len(part)} | {sum(row['right'] for row in part)}"
            for part in (direct, reasoned)
        ]
        rows.append(line(kv, direct, *shares))
    head = "the model that ships | 1 - cosine, mean | worst | KL, mean"
    yield grid(f"{head} | direct: decisions changed | right | reasoned: changed | right", rows)
    rows = []
    for cache, flash in dict.fromkeys((row["cache"], row["flash"]) for row in found["shape"]):
        for kv in (*KEPT, EXACT):
            part = some(found["shape"], kv=kv, cache=cache, flash=flash)
            if part:
                top = sum(not row["same_top"] for row in part)
                rows.append(f"{cache}, flash attention {flash} | " + line(kv, part, f"{top} of {len(part)}"))
    yield grid("cache | kept as | 1 - cosine, mean | worst | KL, mean | another token first", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=216)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--timed", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("decisions", "shape", "timed"), help="Raw rows of some alone.")
    parser.add_argument("--json", type=Path, help="Write every row there, too.")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="notes-kept-"))
    try:
        measures = {
            "timed": lambda: timed(given.timed, given.repeat, given.threads, folder),
            "shape": lambda: shape(given.tokens, given.threads, folder),
            "decisions": lambda: decisions(given.cases, folder),
        }
        found = {name: list(measure()) for name, measure in measures.items() if name in (given.only or measures)}
    finally:
        shutil.rmtree(folder)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    if given.only:
        print(json.dumps(found, indent=1))
    else:
        print("\n\n".join(told(found)))


if __name__ == "__main__":
    main()
