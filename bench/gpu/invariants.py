"""Invariants of a device: rows have the bits of the CPU, and splices give the results of decoding.

Keys are rotated on the host, so a spliced row that is read back from the device must have the bits that it has in a
cache in the host's memory. Logits depend on the device's kernels: they are compared with those of decoding the same
tokens at the same place on the same device, by bench/zoo_model.py. Those of every operation, with half of the layers on
the device and with all, are compared with the CPU's, by the bound of test-backend-ops.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from bench.zoo_model import TARGET as POSITION
from bench.zoo_model import TOKENS as TEXT
from bench.zoo_model import Case, Errors, judge
from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows
from notes_cli.errors import NotesError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
import tiny  # type: ignore[import-not-found]  # noqa: E402
from operations import TEXT as STEPS_TEXT  # noqa: E402
from operations import Done, all_operations  # noqa: E402
from reference import decode, distance, nmse  # noqa: E402

KINDS = ("llama", "qwen2", "qwen3", "smollm3", "gemma", "gemma3", "mistral3", "lfm2", "mamba")
TINY = ROOT / "notes_cli" / "models" / "notes-tiny-q8_0.gguf"
Line = dict[str, Any]
Flash = Literal["on", "off"]
CACHES: list[tuple[str, Flash]] = [
    ("f16", "on"),
    ("f16", "off"),
    ("f32", "on"),
    ("f32", "off"),
    ("bf16", "on"),
    ("q8_0", "on"),
    ("q4_0", "on"),
]
COLUMNS = [
    *((kv, "plain", flash, streams) for kv, flash in CACHES for streams in ("one", "unified")),
    ("f16", "yarn", "on", "one"),
    ("f16", "yarn", "off", "streams"),
]
TOKENS, BASE, TARGET = 300, 5, 77


def models(folder: Path, more: list[Path]) -> Iterator[Path]:
    """Tiny random models of several architectures, the demo model, and those that are given."""
    for kind in KINDS:
        yield tiny.write_model(folder / f"{kind}.gguf", kind)
    yield TINY
    yield from more


def each(work: Callable[[Path], list[Line]], more: list[Path]) -> list[Line]:
    """The lines of all models, several processes at a time."""
    processes = min(8, os.cpu_count() or 1)
    with TemporaryDirectory() as folder, ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [line for lines in pool.map(work, models(Path(folder), more)) for line in lines]


def rows(path: Path) -> list[Line]:
    """For each cache: whether rows read back from the device equal those of the host's cache, bit for bit, and how many
    calls copied them."""
    return [_line(path, f"{kv} {flash}", partial(_rows, path, kv, flash)) for kv, flash in CACHES]


def logits(path: Path) -> list[Line]:
    """Verdicts of bench/zoo_model.py, with the device's own rounding: the same tokens decoded in two batches."""
    with Model(path) as model:

        def measured(column: tuple[str, str, str, str]) -> Line:
            found = asdict(judge(model, column))
            if found["splice"] == found["carry"] == "refused":
                return found
            return found | {"noise": noise(Case(model, column))._asdict()}

        return [_line(path, " ".join(column), partial(measured, column)) for column in COLUMNS]


def operations(path: Path) -> list[Line]:
    """For each cache, and for half of the layers on the device and all: the largest error of any operation's rows and
    logits beside the CPU's, that of decoding alone, that of rows spliced from a wrong position, and the calls that
    copied one splice."""
    return [
        _line(path, f"{kv} {flash} {place}", partial(_operations, path, kv, flash, place))
        for kv, flash in CACHES
        for place in ("half", "all")
    ]


def _line(path: Path, column: str, work: Callable[[], Line]) -> Line:
    try:
        return {"model": path.stem, "column": column} | work()
    except NotesError as error:
        return {"model": path.stem, "column": column, "refused": str(error)}


def _rows(path: Path, kv: str, flash: Flash) -> Line:
    options = ContextOptions(n_ctx=1024, type_k=kv, type_v=kv, flash_attention=flash, n_sequences=2, unified=True)
    tokens = np.random.default_rng(3).integers(0, 256, TOKENS).astype(np.int32)
    with Model(path, gpu_layers=0) as model:
        on_host = replace(options, offload_kv=False)
        with Context(model, replace(on_host, type_k=options.compiled[0], type_v=options.compiled[1])) as context:
            if why := context.supports("splice"):
                return {"refused": why}
            context.decode_at(0, BASE, tokens)
            segment = context.read(0, BASE, TOKENS, base=BASE, dtype=options.compiled[0])
        with Context(model, on_host) as context:
            before = native.traffic().copies
            wanted = _spliced(context, tokens, segment)
            assert native.traffic().copies == before
    try:
        with Model(path) as model, Context(model, options) as context:
            before = native.traffic().copies
            got = _spliced(context, tokens, segment)
            copies = native.traffic().copies - before
    except NotesError as error:  # the host's cache took them
        raise RuntimeError(f"{path.stem} {kv} {flash}: the device refuses what the host takes: {error}") from error
    different = sum(int((a != b).sum()) for a, b in zip(got, wanted, strict=True))
    return {"elements": sum(one.size for one in wanted), "different": different, "copies": copies}


def _spliced(context: Context, tokens: np.ndarray, segment: tuple[LayerRows, ...]) -> list[np.ndarray]:
    """Rows as they are read after splices into two sequences whose cells alternate with each other's."""
    for position in range(0, 40, 5):
        for seq_id in (0, 1):
            context.append({seq_id: tokens[position : position + 5]}, "none")
    read = []
    for seq_id, position in ((0, 40), (1, TARGET)):
        if position > 40:
            context.append({seq_id: tokens[40:position]}, "none")
        context.splice(seq_id, position, tokens, segment, BASE)
        read += list(context.read(seq_id, position, TOKENS, base=position, dtype="f32"))
    return [part.view(np.uint32) for layer in read for part in (layer.k, layer.v)]


def noise(case: Case) -> Errors:
    """How far decoding a text in two batches is from decoding it in one: kernels of a GPU depend on the tokens of a
    batch. The farther of two cuts, one of them that of a rewrite."""
    wanted, worst = case.decoded(POSITION), Errors()
    for first in (TEXT // 2, TEXT - TEXT // 3):
        with case.context() as context:
            decode(context, case.skill[:first], POSITION, case.seq_id)
            decode(context, case.skill[first:], POSITION + first, case.seq_id)
            worst = worst.worse(Errors.between(case.outcome(context, POSITION), wanted))
    return worst


def _operations(path: Path, kv: str, flash: Flash, place: str) -> Line:
    small = (1024, 24, 24)  # a batch that llama.cpp does not lend to a device that holds no layer
    options = ContextOptions(*small, type_k=kv, type_v=kv, flash_attention=flash, n_sequences=3, unified=True)

    def done(model: Model, **more: int) -> Done:
        with Context(model, options) as context:
            return all_operations(context, **more)

    with Model(path, gpu_layers=0) as model:
        wanted = done(model)
        moved = not model.recurrent
        control = {"control": max(_errors(done(model, base=4), wanted))} if moved else {}
        layers = int(model.metadata(f"{model.metadata('general.architecture')}.block_count") or 0)
    there = layers // 2 if place == "half" else layers
    with Model(path, gpu_layers=1 + there) as model:  # the output's, and the last layers
        errors = _errors(done(model), wanted)
        counted = {"copies": _copies(model, options), "expected": 2 * there} if moved else {}
    # decoding alone: the first logits and rows
    return {"error": max(errors), "decoding": max(errors[0], errors[len(wanted[0])])} | control | counted


def _errors(found: Done, wanted: Done) -> list[float]:
    """Normalised mean squared errors of the logits, and the worst of each sequence's rows."""
    return [*map(nmse, found[0], wanted[0]), *map(distance, found[1], wanted[1])]


def _copies(model: Model, options: ContextOptions) -> int:
    """The calls that copy a splice of neighbouring rows: K and V of each layer on the device."""
    with Context(model, options) as context:
        context.append({0: STEPS_TEXT})
        rows = context.read(0, 0, len(STEPS_TEXT), base=0)
        context.clear()
        before = native.traffic().copies
        context.splice(0, 7, STEPS_TEXT, rows, 0)
        return native.traffic().copies - before
