"""Benchmarks splices against prefills of the same tokens on this machine, and computes when a compile pays off.

Both are measured alternately in one run, so that load on the machine slows them equally and the ratios stay valid.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from notes_cli.config import sample_skills
from notes_cli.engine import limits
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, Notice, Progress, UnsupportedError, UnwritableError, reason
from notes_cli.library.container import open_stored, write_segment
from notes_cli.library.safe_files import make_private
from notes_cli.runtime.request import NO_CALLBACKS, Callbacks
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.names import human_size
from notes_cli.text.skill import load_skill

COMPILED_AT, SPLICED_AT = 16, 64  # tokens before the skill; its keys are rotated by the difference
PATIENCE = 60.0  # seconds of prefills of one length, after which no further one starts
KILLED = 86400.0  # seconds after which a leftover folder belongs to a killed run


@dataclass(frozen=True, slots=True)
class Benching:
    """Options: lengths of skills and of the question after them in tokens, and the number of runs."""

    tokens: Sequence[int] = (1024, 4096)
    runs: int = 5
    question: int = 16

    @property
    def around(self) -> int:
        """Tokens in addition to those of the skill."""
        return SPLICED_AT + self.question


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of repeated runs, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)

    def over(self, other: Times) -> float:
        """Return the ratio to the other: the median of the ratios run by run if their numbers are equal, else the ratio
        of the medians."""
        if len(self.seconds) != len(other.seconds):
            return self.median / other.median
        return median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True, slots=True)
class Length:
    """Times in seconds for a skill of one length."""

    tokens: int
    cached: int  # bytes of K/V in the cache
    stored: int  # bytes of K/V in the file
    prefill: Times
    write: float  # of the K/V to a file, once
    splice: Times  # from that file to the cache, with checksums verified
    question: Times  # to the logits after the question, after a splice

    @property
    def pays_from(self) -> int | None:
        """Number of questions from which a compile and splices take less time than prefills; None: never."""
        saved = self.prefill.median - self.splice.median
        return math.floor((self.prefill.median + self.write) / saved) + 1 if saved > 0 else None


@dataclass(frozen=True, slots=True)
class Speed:
    """The results for a model."""

    model: str
    threads: int
    flash_attention: str
    cache: str
    wanted: Benching
    lengths: tuple[Length, ...]
    left_out: dict[int, str]  # lengths that were not measured, and why

    def __repr__(self) -> str:
        shown = [
            f"{each.tokens} tokens spliced in {each.splice.median:.3f} s, prefilled in {each.prefill.median:.3f} s"
            for each in self.lengths
        ]
        return f"Speed({self.model!r}, {', '.join(shown)})"


def bench(workspace: Workspace, wanted: Benching, callbacks: Callbacks = NO_CALLBACKS) -> Speed:
    """Measure the lengths that fit into memory and disk, shortest first. Raises UnsupportedError if the model's K/V
    cannot be moved, EngineError if no length fits, UnwritableError if the folder is not writable."""
    context, name = workspace.context, workspace.model.name
    for operation in ("read", "splice"):
        if why := context.supports(operation):
            raise UnsupportedError(f"there is no splice to measure: {name} cannot {operation} rows: {why}")
    lengths: list[Length] = []
    left_out: dict[int, str] = {}
    with _temporary_folder(workspace) as folder:
        text = "\n\n".join(load_skill(str(path)).text for path in sample_skills())
        tokens: Tokens = np.resize(workspace.model.tokenize(text), max(wanted.tokens) + SPLICED_AT)
        for count in sorted(set(wanted.tokens)):
            try:
                lengths.append(_measure(workspace, wanted, count, tokens, folder, callbacks))
            except (EngineError, UnwritableError) as error:
                left_out[count] = f"with {wanted.around} around them: {error.what}"
                callbacks.on_event(Notice(f"{count:,} tokens are left out, {left_out[count]}"))
    if not lengths:
        count, why = next(iter(left_out.items()))
        raise EngineError(f"{count:,} tokens cannot be measured, {why}", "Measure fewer")
    options = workspace.options
    return Speed(
        f"{name} {workspace.model.quantization}",
        workspace.context.threads,
        options.flash_attention,
        options.cache,
        *(wanted, tuple(lengths), left_out),
    )


@contextmanager
def _temporary_folder(workspace: Workspace) -> Iterator[Path]:
    """Create a temporary folder on the disk of the library, and remove those of killed runs."""
    place = workspace.paths.library.parent
    try:
        make_private(place)
        for old in place.glob("bench-*"):
            if time.time() - old.stat().st_mtime > KILLED:
                shutil.rmtree(old, ignore_errors=True)
        temporary = tempfile.TemporaryDirectory(prefix="bench-", dir=place)
    except OSError as error:
        raise UnwritableError(f"cannot write in {place}: {reason(error)}") from error
    with temporary as folder:
        yield Path(folder)


def _measure(
    workspace: Workspace, wanted: Benching, count: int, tokens: Tokens, folder: Path, callbacks: Callbacks
) -> Length:
    size, options = count + wanted.around, workspace.options
    k, v = limits.ELEMENT[options.type_k], limits.ELEMENT[options.type_v]
    layers = workspace.context.layers
    cached = count * int(sum(layer.n_embd_k * k + layer.n_embd_v * v for layer in layers))
    rows = 2 * count * sum(layer.n_embd_k + layer.n_embd_v for layer in layers)  # bytes of a copy and of its file, f16
    needed = rows + limits.context_bytes(workspace.model, replace(options, n_ctx=max(options.n_ctx, size)))
    memory, disk = limits.available_memory(), shutil.disk_usage(folder).free
    if memory is not None and needed > memory:  # the system would give it, and swap
        raise EngineError(f"they need {human_size(needed)} of memory, and {human_size(memory)} are available")
    if rows > disk:
        raise UnwritableError(f"they need {human_size(rows)} of disk, and {human_size(disk)} are free")
    workspace.make_room(size)
    path = folder / "skill.notes"
    with workspace.sequence() as sequence:
        sequence.append(tokens[:SPLICED_AT])
        sequence.flush()
        with callbacks.progress(f"prefilling {count:,} tokens") as update:
            prefills = _time_prefills(sequence, tokens[SPLICED_AT:][:count], wanted.runs, update)
        stored, write = _store(sequence, count, path)
        turns = []
        with callbacks.progress(f"splicing {count:,} tokens", unit="times") as update:
            for number in range(wanted.runs):
                turns.append(_time_splice(sequence, path, wanted))
                update(number + 1, wanted.runs)
    splice, question = (Times(seconds) for seconds in zip(*turns, strict=True))
    return Length(count, cached, stored, prefills, write, splice, question)


def _time_prefills(sequence: KVSequence, tokens: Tokens, runs: int, update: Progress) -> Times:
    """Prefill up to `runs` times, within PATIENCE. The K/V of the last run stays."""
    seconds: list[float] = []
    while len(seconds) < runs and sum(seconds) < PATIENCE:
        sequence.truncate(SPLICED_AT)
        sequence.append(tokens)
        seconds.append(_seconds(lambda: sequence.flush(update)))
    return Times(tuple(seconds))


def _store(sequence: KVSequence, count: int, path: Path) -> tuple[int, float]:
    """Write the last tokens of the sequence as a segment. Returns the bytes of its K/V, and the seconds."""
    started = time.perf_counter()
    layers = sequence.context.read(sequence.seq_id, SPLICED_AT, count, base=COMPILED_AT)
    tokens = sequence.tokens[-count:]
    left = np.zeros(COMPILED_AT, np.int32)
    identity = sequence.context.identity("0" * 64)  # no model has this digest, so no other program opens the file
    segment = Segment("bench", "", "", tokens, COMPILED_AT, left, (), identity, layers)
    write_segment(path, segment)
    return segment.nbytes, time.perf_counter() - started


def _time_splice(sequence: KVSequence, path: Path, wanted: Benching) -> tuple[float, float]:
    """Return the seconds of a splice, and of the question after it."""
    sequence.truncate(SPLICED_AT)
    splice = _seconds(lambda: sequence.splice(open_stored(path)))
    sequence.append(np.resize(sequence.tokens[: wanted.question], wanted.question))
    return splice, _seconds(sequence.logits)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
