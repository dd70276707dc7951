"""Compare random scripts of append, rewrite, splice, truncate and copy with a float64 forward pass (tests/forward.py).

    python -m bench.windows [--scripts 1000] [--seed 0]

A script runs on one context: a model without a window or with one of several sizes, `swa_full` on or off, one sequence
or three, few cells, micro-batches of several sizes. After each operation the logits that it gives are compared with the
reference, and at the end all rows that the cache has. What the engine refuses it must refuse with a sentence and for a
reason, and leave everything as it was. Exits 1 where anything differs, or a control does not.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.random_model import ROOT  # puts tests/ on the path
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import LayerRows
from notes_cli.errors import EngineError

sys.path.append(str(ROOT / "tests"))
from forward import Forward, Rows  # type: ignore[import-not-found]
from tiny import write_model  # type: ignore[import-not-found]

MODELS = [("llama", 0), ("qwen3", 0), ("smollm3", 0), ("gemma3", 8), ("gemma3", 20), ("gemma3", 32), ("gemma3", 48)]
WINDOWED = 3  # the first of them that has a window; most scripts are theirs
TOKENS = 256  # that are drawn from: the bytes
# Of rows and logits, nmse. ggml looks GELU up in a table of f16: next to a step of it, rounding is a thousandth.
BOUNDS = {"f32 cache, SiLU": 1e-10, "f32 cache, GELU": 1e-6, "f16 cache": 1e-5}
STEPS = 24  # operations of a script
SEGMENT, BASE = 60, 5  # tokens of a compiled segment, and where it was compiled
CONTROLS = {
    "window": "the reference sees one position more than the window",
    "rewrite": "the reference keeps the old row of the first token that is rewritten",
    "turn": "the reference rotates spliced keys by one position too many",
}
CONTROL_SCRIPTS = 40


@dataclass
class Totals:
    """Totals of all scripts."""

    operations: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)  # by message, without numbers
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))  # nmse, by cache
    compared: int = 0  # rows and logits
    wrong: list[str] = field(default_factory=list)

    @property
    def bad_scripts(self) -> int:
        """Scripts in which something differed."""
        return len({line.split(":")[0] for line in self.wrong})


class Shapes:
    """The models, each with its reference and a segment of it: the engine's rows, and the reference's own."""

    def __init__(self, folder: Path) -> None:
        self.models: list[tuple[Model, Forward]] = []
        for number, (kind, window) in enumerate(MODELS):
            path = write_model(folder / f"{kind}-{window}.gguf", kind, seed=number, window=window)
            self.models.append((Model(path), Forward(path)))
        self.tokens = np.random.default_rng(1).integers(0, TOKENS, BASE + SEGMENT).astype(np.int32)
        self.compiled = [self._compile(model, forward) for model, forward in self.models]

    def _compile(self, model: Model, forward: Forward) -> tuple[tuple[LayerRows, ...], Rows]:
        rows: Rows = {}
        forward.compute(rows, range(len(self.tokens)), self.tokens)
        options = ContextOptions(n_ctx=256, n_threads=1, flash_attention="off", type_k="f32", type_v="f32")
        with Context(model, options) as ctx:
            ctx.append({0: self.tokens})
            return ctx.read(0, BASE, SEGMENT, base=BASE, dtype="f32"), rows

    def close(self) -> None:
        for model, _ in self.models:
            model.close()


class Script:
    """One script, all of it drawn from its seed. `spoil` makes the reference do something else: for controls."""

    def __init__(self, shapes: Shapes, seed: int, totals: Totals, spoil: str = "") -> None:
        self.random = random = np.random.default_rng(seed)
        self.shapes, self.totals, self.seed, self.spoil = shapes, totals, seed, spoil
        self.number = int(random.integers(0 if random.random() < 0.3 else WINDOWED, len(MODELS)))
        self.model, self.forward = shapes.models[self.number]
        sequences = int(random.choice([1, 3]))
        n_ubatch = int(random.choice([4, 16, 48, 64, 512]))
        cache = "f16" if random.random() < 0.1 else "f32"
        self.options = ContextOptions(
            n_ctx=int(random.choice([256, 512, 768])),
            n_batch=int(random.choice([n_ubatch, 64, 512])),
            n_ubatch=n_ubatch,
            n_threads=1,
            n_sequences=sequences,
            unified=bool(sequences > 1 and random.random() < 0.6),
            swa_full=bool(random.random() < 0.4),
            flash_attention="off",
            type_k=cache,
            type_v=cache,
        )
        activation = "GELU" if self.forward.arch == "gemma3" else "SiLU"
        self.kind = "f16 cache" if cache == "f16" else f"f32 cache, {activation}"
        self.rows: list[Rows] = [{} for _ in range(sequences)]  # of each sequence, as they must be
        self.log: list[str] = []

    def run(self) -> None:
        steps = {"append": 6, "rewrite": 5, "splice": 3, "truncate": 2, "copy": 2 if len(self.rows) > 1 else 0}
        chances = np.array(list(steps.values())) / sum(steps.values())
        with Context(self.model, self.options) as self.context:
            for _ in range(STEPS):
                name = str(self.random.choice(list(steps), p=chances))
                seq_id = int(self.random.integers(len(self.rows)))
                if not self.rows[seq_id] and self.random.random() < 0.8:
                    name = "append"
                self.totals.operations[name] += 1
                getattr(self, f"_{name}")(seq_id)
            for seq_id in range(len(self.rows)):
                self._append(seq_id, 3)
                self._compare_rows(seq_id)

    # Operations, by the engine and then by the reference.

    def _append(self, seq_id: int, count: int = 0) -> None:
        several = [seq_id] if count or self.random.random() < 0.8 else list(range(len(self.rows)))
        draw, sizes = self.random, [1, 2, 7, 30, 100, 250]
        counts = {one: count or int(draw.choice(sizes) * draw.uniform(0.5, 1)) + 1 for one in several}
        tokens = {one: self._tokens(count) for one, count in counts.items()}
        outputs = sum(counts.values()) <= self.options.n_batch
        if not self._engine(f"append {counts}", lambda: self.context.append(tokens, "all" if outputs else "last")):
            self._after_failure(several)
            return
        ends = {one: self._end(one) for one in several}
        wanted = [self._computed(one, [*range(ends[one], ends[one] + len(new))], new) for one, new in tokens.items()]
        self._compare_logits(np.concatenate(wanted) if outputs else np.stack([part[-1] for part in wanted]))

    def _rewrite(self, seq_id: int) -> None:
        end = self._end(seq_id)
        reach = end if self.random.random() < 0.3 else min(end, int(self.random.choice([4, 12, 40, 120])))
        count = max(1, min(reach, int(self.random.choice([1, 3, 10, 40]))))
        places = [*range(max(0, end - reach), max(0, end - reach) + count)]
        if self.random.random() < 0.5 and reach:
            places = sorted(self.random.choice(np.arange(end - reach, end), count, replace=False).tolist())
        tokens = self._tokens(count)
        if self._engine(f"rewrite {seq_id} {places}", lambda: self.context.rewrite(seq_id, places, tokens, "last")):
            before = {place: self.rows[seq_id].get(place) for place in places}
            logits = self._computed(seq_id, places, tokens)
            self._compare_logits(logits[-1:])
            if self.spoil == "rewrite" and before[places[0]]:
                self.rows[seq_id][places[0]] = before[places[0]]

    def _splice(self, seq_id: int) -> None:
        first = int(self.random.integers(SEGMENT - 1))
        last = int(self.random.integers(first + 1, SEGMENT + 1))
        position = self._end(seq_id) + (int(self.random.integers(1, 12)) if self.random.random() < 0.15 else 0)
        layers, rows = self.shapes.compiled[self.number]
        part = [layer.cut(slice(first, last)) for layer in layers]
        tokens = self.shapes.tokens[BASE + first : BASE + last]
        base = BASE + first
        what = f"splice {seq_id} at {position} +{last - first} of {base}"
        if self._engine(what, lambda: self.context.splice(seq_id, position, tokens, part, base)):
            turn = position - base + (1 if self.spoil == "turn" else 0)
            for i in range(last - first):
                self.rows[seq_id][position + i] = self.forward.moved(rows[base + i], turn)

    def _truncate(self, seq_id: int) -> None:
        end = self._end(seq_id)
        whole = self.random.random() < 0.3
        length = int(self.random.integers(end + 1)) if whole else max(0, end - int(self.random.integers(40)))
        if self._engine(f"truncate {seq_id} to {length}", lambda: self.context.truncate(seq_id, length)):
            self.rows[seq_id] = {place: row for place, row in self.rows[seq_id].items() if place < length}

    def _copy(self, seq_id: int) -> None:
        """Copy a sequence, or its first entries, over another one, with llama.cpp's own calls."""
        other = (seq_id + 1 + int(self.random.integers(len(self.rows) - 1))) % len(self.rows)
        whole = not self.options.unified or self.random.random() < 0.7
        length = self._end(seq_id) if whole else int(self.random.integers(self._end(seq_id) + 1))
        self.log.append(f"copy {seq_id} to {other}, {length} of {self._end(seq_id)}")
        memory = llama.llama_get_memory(self.context.handle)
        llama.llama_memory_seq_rm(memory, other, -1, -1)
        if length:
            llama.llama_memory_seq_cp(memory, seq_id, other, -1 if whole else 0, -1 if whole else length)
        self.rows[other] = {place: row for place, row in self.rows[seq_id].items() if place < length}

    # The engine and the reference, side by side.

    def _engine(self, what: str, work: Callable[[], None]) -> bool:
        """Run an operation; return False for a refusal, which must have a reason."""
        self.log.append(what)
        try:
            work()
        except EngineError as error:
            reason = str(error)
            self.log[-1] += f" REFUSED {reason}"
            self.totals.refusals[re.sub(r"-?\d+", "N", reason)] += 1
            if len(reason) < 20 or ("sliding" in reason and self._whole):
                self._wrong(f"refused without a reason: {reason!r}")
            return False
        return True

    def _after_failure(self, sequences: Sequence[int]) -> None:
        """Drop a copy of first entries whose window is gone. With a window-only cache, a long append that fails
        half-way may leave its sequences empty."""
        lacking = re.search(r"of sequence (\d+) looks at", self.log[-1])
        gone = [one for one in sequences if not self._whole and self.context.length(one) == 0]
        for one in [int(lacking[1])] if lacking else gone:
            llama.llama_memory_seq_rm(llama.llama_get_memory(self.context.handle), one, -1, -1)
            self.rows[one] = {}

    @property
    def _whole(self) -> bool:
        """True if the cache keeps all entries: with swa_full, without a window, or with as many cells."""
        sequences = len(self.rows) if self.options.unified else 1
        size = self.forward.window * sequences + min(self.options.n_batch, self.options.n_ubatch)
        size = -(-size // 256) * 256
        return self.options.swa_full or not self.forward.window or size >= self.context.n_ctx

    def _computed(self, seq_id: int, places: list[int], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        window = self.forward.window
        self.forward.window += 1 if self.spoil == "window" and window else 0
        try:
            return np.asarray(self.forward.compute(self.rows[seq_id], places, tokens))
        finally:
            self.forward.window = window

    def _compare_logits(self, wanted: NDArray[np.float64]) -> None:
        self._compare("logits", np.stack([self.context.logits(i - len(wanted)) for i in range(len(wanted))]), wanted)

    def _compare_rows(self, seq_id: int) -> None:
        """All rows that every layer has: all of them, or those that the smaller cache still keeps."""
        memory = llama.llama_get_memory(self.context.handle)
        kept = int(llama.llama_memory_seq_pos_min(memory, seq_id))
        places = sorted(place for place in self.rows[seq_id] if kept <= place)
        if self._whole and len(places) < len(self.rows[seq_id]):
            self._wrong(f"sequence {seq_id} has lost rows before {kept}")
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places else []:
            first, count = int(run[0]), len(run)
            try:
                found = self.context.read(seq_id, first, count, base=first, dtype="f32")
            except EngineError as error:
                self._wrong(f"rows cannot be read: {error}")
                continue
            for i, layer in enumerate(found):
                for name, part in (("k", layer.k), ("v", layer.v)):
                    wanted = np.stack([getattr(self.rows[seq_id][place], name)[i].ravel() for place in run])
                    self._compare(f"{name} rows of layer {i}", part, wanted)

    def _compare(self, what: str, found: NDArray[np.float32], wanted: NDArray[np.float64]) -> None:
        error = float(((found - wanted) ** 2).sum() / (wanted**2).sum())  # normalised mean squared error
        self.totals.compared += 1
        self.totals.worst[self.kind] = max(self.totals.worst[self.kind], error)
        if not error < BOUNDS[self.kind]:
            self._wrong(f"{what} differ by {error:.1e}")

    def _wrong(self, what: str) -> None:
        last = "; ".join(line[:160] for line in self.log[-6:])
        self.totals.wrong.append(f"script {self.seed}: {what}, after: {last}")

    def _end(self, seq_id: int) -> int:
        return max(self.rows[seq_id], default=-1) + 1

    def _tokens(self, count: int) -> NDArray[np.int32]:
        return self.random.integers(0, TOKENS, count).astype(np.int32)


def run(shapes: Shapes, seeds: Sequence[int], spoil: str = "") -> Totals:
    """Run the scripts of these seeds."""
    totals = Totals()
    for seed in seeds:
        Script(shapes, seed, totals, spoil).run()
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.windows", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scripts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first script; the others follow")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shapes = Shapes(Path(folder))
        seeds = range(args.seed, args.seed + args.scripts)
        totals = run(shapes, seeds)
        controls = {name: run(shapes, seeds[:CONTROL_SCRIPTS], name) for name in CONTROLS}
        shapes.close()
    print(*totals.wrong, *(f"{count:6,} refused: {why}" for why, count in totals.refusals.most_common()), sep="\n")
    print(f"{args.scripts:,} scripts: {totals.bad_scripts} differ, in {totals.compared:,} comparisons")
    print(*(f"greatest error, {kind}: {worst:.1e}" for kind, worst in totals.worst.items()), sep="\n")
    print(*(f"control, {CONTROLS[one]}: {found.bad_scripts} differ" for one, found in controls.items()), sep="\n")
    sys.exit(bool(totals.wrong) or not all(found.wrong for found in controls.values()))


if __name__ == "__main__":
    main()
