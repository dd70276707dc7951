"""Time of a splice on this model and machine beside a prefill of the same tokens, and when a compile pays.

All in one run and by turns, so that a busy machine slows them alike: ratios hold where times do not.
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
from notes_cli.text.sizes import human_size
from notes_cli.text.skill import load_skill

COMPILED_AT, SPLICED_AT = 16, 64  # the tokens before the skill; its keys turn by the difference
PATIENCE = 60.0  # seconds that prefills of one length may take before the next one is left out
KILLED = 86400.0  # seconds after which a run has ended, whatever became of it


@dataclass(frozen=True, slots=True)
class Benching:
    """Skills of so many `tokens`, and a `question` of so many after them, each measured `runs` times."""

    tokens: Sequence[int] = (1024, 4096)
    runs: int = 5
    question: int = 16

    @property
    def around(self) -> int:
        """Tokens beside those of the skill."""
        return SPLICED_AT + self.question


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the same work, in the order in which it was done."""

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
        """How many times as long as the other: the median of the ratios turn by turn, where both were done as often."""
        if len(self.seconds) != len(other.seconds):
            return self.median / other.median
        return median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True, slots=True)
class Length:
    """The times for skills of one length, in seconds."""

    tokens: int
    cached: int  # bytes of K/V in the cache
    stored: int  # bytes of the rows in the file
    prefill: Times  # of the tokens
    write: float  # of their rows into a file, once
    splice: Times  # from that file, every byte checked, to the cache
    question: Times  # to the logits after it, right after the splice

    @property
    def pays_from(self) -> int | None:
        """From which question on a compile and splices take less time than prefills; None: never."""
        saved = self.prefill.median - self.splice.median
        return math.floor((self.prefill.median + self.write) / saved) + 1 if saved > 0 else None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A length that was not measured."""

    tokens: int
    why: str


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of a model."""

    model: str
    threads: int
    flash_attention: str
    cache: str
    wanted: Benching
    lengths: tuple[Length, ...]
    left_out: tuple[LeftOut, ...]

    def __repr__(self) -> str:
        shown = [
            f"{one.tokens} tokens spliced in {one.splice.median:.3f} s, prefilled in {one.prefill.median:.3f} s"
            for one in self.lengths
        ]
        return f"Speed({self.model!r}, {', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Need:
    """What measuring one length takes for a while, in bytes."""

    memory: int
    disk: int


def bench(workspace: Workspace, wanted: Benching, callbacks: Callbacks = NO_CALLBACKS) -> Speed:
    """Measure the lengths that there is memory for, the shortest first. Raise UnsupportedError for a model whose rows
    cannot be moved, EngineError where no length can be measured, UnwritableError where the disk refuses."""
    context, name = workspace.context, workspace.model.name
    for operation in ("read", "splice"):
        if why := context.supports(operation):
            raise UnsupportedError(f"there is no splice to measure: {name} cannot {operation} rows: {why}")
    with _folder(workspace) as folder:
        possible, left = _possible(workspace, wanted, folder)
        if not possible:
            raise EngineError(f"{left[0].tokens:,} tokens cannot be measured: {left[0].why}", "Measure fewer")
        for one in left:
            callbacks.on_notice(Notice(f"{one.tokens:,} tokens are left out: {one.why}"))
        most = possible[max(possible)]
        there = limits.available_memory()
        callbacks.on_notice(
            Notice(
                f"measuring needs about {human_size(most.memory)} of memory"
                + (f", of which {human_size(there)} are available," if there else "")
                + f" and for a while {human_size(most.disk)} in {folder.parent}"
            )
        )
        tokens = _tokens(workspace, max(possible) + SPLICED_AT)
        lengths = tuple(_measure(workspace, wanted, count, tokens, folder, callbacks) for count in sorted(possible))
    options = workspace.options
    return Speed(
        f"{name} {workspace.model.quantization}",
        workspace.context.threads,
        options.flash_attention,
        options.cache,
        *(wanted, lengths, tuple(left)),
    )


@contextmanager
def _folder(workspace: Workspace) -> Iterator[Path]:
    """A folder on the disk of the library, for this run alone. Those of runs that were killed are removed."""
    place = workspace.paths.library.parent
    try:
        make_private(place)
        for old in place.glob("bench-*"):
            if time.time() - old.stat().st_mtime > KILLED:
                shutil.rmtree(old, ignore_errors=True)
        made = tempfile.TemporaryDirectory(prefix="bench-", dir=place)
    except OSError as error:
        raise UnwritableError(f"cannot write in {place}: {reason(error)}") from error
    with made as folder:
        yield Path(folder)


def _possible(workspace: Workspace, wanted: Benching, folder: Path) -> tuple[dict[int, Need], list[LeftOut]]:
    """The lengths that can be measured, with what they need, and those that cannot."""
    there, disk = limits.available_memory(), shutil.disk_usage(folder).free
    possible: dict[int, Need] = {}
    left = []
    for count in sorted(set(wanted.tokens)):
        need, size = _need(workspace, wanted, count), count + wanted.around
        if workspace.longest is not None and size > workspace.longest:
            trained = f"the {workspace.longest:,} that {workspace.model.name} was trained for"
            why = f"with {wanted.around} around them they are more than {trained}"
        elif not workspace.grows and size > workspace.options.n_ctx:
            why = f"with {wanted.around} around them they do not fit into a context of {workspace.options.n_ctx:,}"
        elif there is not None and need.memory > there:
            why = f"they need about {human_size(need.memory)} of memory, and {human_size(there)} are available"
        elif need.disk > disk:
            why = f"they need {human_size(need.disk)} of disk, and {human_size(disk)} are free in {folder.parent}"
        else:
            possible[count] = need
            continue
        left.append(LeftOut(count, why))
    return possible, left


def _need(workspace: Workspace, wanted: Benching, count: int) -> Need:
    """The context, and beside it the rows before they are in the file."""
    options = replace(workspace.options, n_ctx=max(workspace.options.n_ctx, count + wanted.around))
    rows = _row_bytes(workspace, "f16") * count
    return Need(limits.estimate_memory(workspace.model, options).total + rows, rows)


def _row_bytes(workspace: Workspace, kv_type: str | None = None) -> int:
    """Bytes of a token's rows, in the types of the cache or in another one."""
    options = workspace.options
    k, v = (limits.ELEMENT[kv_type or own] for own in (options.type_k, options.type_v))
    return int(sum(layer.n_embd_k * k + layer.n_embd_v * v for layer in workspace.context.layers))


def _tokens(workspace: Workspace, count: int) -> Tokens:
    """Words, not noise: those of the sample skills, over and over."""
    text = "\n\n".join(load_skill(str(path)).text for path in sample_skills())
    found: Tokens = np.resize(workspace.model.tokenize(text), count)
    return found


def _measure(
    workspace: Workspace, wanted: Benching, count: int, tokens: Tokens, folder: Path, callbacks: Callbacks
) -> Length:
    workspace.make_room(count + wanted.around)
    cached, path = _row_bytes(workspace) * count, folder / "skill.notes"
    with workspace.sequence() as sequence:
        sequence.append(tokens[:SPLICED_AT])
        sequence.flush()
        with callbacks.progress(f"prefilling {count:,} tokens") as update:
            prefills = _prefills(sequence, tokens[SPLICED_AT:][:count], wanted.runs, update)
        stored, write = _store(sequence, count, path)
        turns = []
        with callbacks.progress(f"splicing {count:,} tokens", unit="times") as update:
            for number in range(wanted.runs):
                turns.append(_turn(sequence, path, wanted))
                update(number + 1, wanted.runs)
    splice, question = (Times(seconds) for seconds in zip(*turns, strict=True))
    return Length(count, cached, stored, prefills, write, splice, question)


def _prefills(sequence: KVSequence, tokens: Tokens, runs: int, update: Progress) -> Times:
    """As often as asked, or for as long as PATIENCE lasts. The rows of the last one stay."""
    found: list[float] = []
    while len(found) < runs and sum(found) < PATIENCE:
        sequence.truncate(SPLICED_AT)
        sequence.append(tokens)
        found.append(_seconds(lambda: sequence.flush(update)))
    return Times(tuple(found))


def _store(sequence: KVSequence, count: int, path: Path) -> tuple[int, float]:
    """Write the last tokens of the sequence as a segment. Return the bytes of its rows, and the seconds."""
    started = time.perf_counter()
    layers = sequence.context.read(sequence.seq_id, SPLICED_AT, count, base=COMPILED_AT)
    tokens = sequence.tokens[-count:]
    left = np.zeros(COMPILED_AT, np.int32)
    identity = sequence.context.identity("0" * 64)  # of no weights: nobody else opens it
    segment = Segment("bench", "", "", tokens, COMPILED_AT, left, (), identity, layers)
    write_segment(path, segment)
    return segment.nbytes, time.perf_counter() - started


def _turn(sequence: KVSequence, path: Path, wanted: Benching) -> tuple[float, float]:
    """Seconds of a splice, and of the question after it."""
    sequence.truncate(SPLICED_AT)
    splice = _seconds(lambda: sequence.splice(open_stored(path)))
    sequence.append(np.resize(sequence.tokens[: wanted.question], wanted.question))
    return splice, _seconds(sequence.logits)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
