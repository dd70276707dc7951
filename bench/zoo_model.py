"""Measure one model of the zoo: compare splice, restore and rewrite with decoding, in every kind of context.

    python -m bench.zoo_model MODEL.gguf [--columns REGEX]     a line of JSON a combination

Tokens are compiled at position BASE and spliced at TARGET; the rows and the logits that follow are compared with those
of decoding the same tokens at TARGET with stock calls, in a context of the same kind. It uses nothing of bench.zoo, so
that a crash takes one model's process with it and no more.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from notes_cli.engine import native, recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows
from notes_cli.errors import EngineError, NotesError, UnsupportedError

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "engine"))
from reference import decode, nmse

BASE, TARGET, TOKENS, QUESTION = 3, 40, 24, 6

Outcome = tuple[Sequence[LayerRows], np.ndarray]


class Errors(NamedTuple):
    """Normalised mean squared errors; 0 where nothing was compared."""

    first: float = 0.0
    rows: float = 0.0
    logits: float = 0.0

    @classmethod
    def between(cls, found: Outcome, wanted: Outcome) -> Errors:
        pairs = [pair for pair in zip(found[0], wanted[0], strict=True) if pair[1].k.any()]
        rows = [(a.layer, nmse(a.k, b.k)) for a, b in pairs]
        first = [error for layer, error in rows if layer == rows[0][0]]
        return cls(max(first, default=0.0), max((error for _, error in rows), default=0.0), nmse(found[1], wanted[1]))

    def worse(self, other: Errors) -> Errors:
        return Errors(*map(max, self, other))


# Bounds of the position-exact: normalised mean squared error of the rows of the first layer, which follow from the
# tokens alone; of all rows; of the logits. With flash attention on, the CPU kernel works in f16 inside.
BOUND = {"f32": (1e-8, 1e-6, 1e-6), "f16": (1e-6, 1e-5, 1e-5), "bf16": (5e-5, 1e-3, 1e-3)}
# One rounding; rows of a quantized cache are compiled in f16. That of f32 is not of the rows but of the kernel's
# angles, some 60 radians in a float.
ROUNDING = {"f32": 2.0**-20, "f16": 2.0**-11, "bf16": 2.0**-8}
# Some random models blow a rounding up. What one does with a rounding of every row is measured, and the error may be
# a few times that.
AMPLIFIED = 4.0
QUANTIZED = ("q8_0", "q4_0")
# A quantized cache is compared with what it does itself: rows with the right ones quantized once, logits with those of
# decoding there. Both are noise, so it is averaged over several texts, and over more where some do not decide.
RATIO = Errors(1.2, 1.2, 1.5)
TEXTS = (3, 32)

SCALING: dict[str, dict[str, Any]] = {
    "plain": {},
    # another base than the file's, which shows graphs that take the file's all the same
    "yarn": {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "rope_freq_base": 20000.0},
    "longrope": {"rope_scaling": "longrope", "yarn_attn_factor": 1.19, "n_ctx": 512},  # beyond the 256 trained for
    "linear": {"rope_scaling": "linear", "rope_freq_scale": 0.25, "rope_freq_base": 20000.0},
}
STREAMS: dict[str, dict[str, Any]] = {
    "one": {},
    "unified": {"n_sequences": 2, "unified": True},
    "streams": {"n_sequences": 2, "unified": False},
}
COLUMNS = list(product(("f32", "f16", "bf16", *QUANTIZED), SCALING, ("off", "on"), STREAMS))


@dataclass(frozen=True)
class Verdict:
    """Outcome of a combination: a word per operation, the reason of a refused splice, and errors by name."""

    column: str
    splice: str
    restore: str
    rewrite: str
    carry: str = ""  # empty: there is no state to carry
    why: str = ""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    missed: tuple[str, ...] = ()  # controls that should have been called wrong and were not
    blind: tuple[str, ...] = ()  # those that could not be: they move rows by less than the cache rounds them
    amplified: tuple[str, ...] = ()  # operations that are exact within the model's amplified rounding


def options_of(kv: str, scaling: str, flash: str, streams: str) -> ContextOptions:
    type_v = kv if flash == "on" or kv not in QUANTIZED else "f16"  # V is quantized with flash attention only
    more: dict[str, Any] = {"flash_attention": flash, **SCALING[scaling], **STREAMS[streams]}
    return ContextOptions(**({"n_ctx": 256} | more), n_batch=64, n_ubatch=64, n_threads=1, type_k=kv, type_v=type_v)


class Case:
    """One model in one kind of context."""

    def __init__(self, model: Model, column: tuple[str, str, str, str], text: int = 0) -> None:
        self.model, self.column, self.text = model, column, text
        self.kv, _, self.flash, self.streams = column
        self.options = options_of(*column)
        if self.options.n_sequences > 1:  # a context is divided among streams
            self.options = replace(self.options, n_ctx=2 * self.options.n_ctx)
        self.seq_id = self.options.n_sequences - 1
        random = np.random.default_rng(text)
        self.skill, self.question, self.other = (
            random.integers(0, model.n_vocab, n).astype(np.int32) for n in (TOKENS, QUESTION, TOKENS)
        )

    @property
    def master(self) -> str:
        """The type that a segment keeps its rows in."""
        return "f32" if self.kv == "f32" else "f16"

    def context(self, kv: str | None = None) -> Context:
        kv = kv or self.kv
        context = Context(self.model, self.options if kv == self.kv else replace(self.options, type_k=kv, type_v=kv))
        if self.seq_id:  # the cache also holds entries of another sequence
            decode(context, self.other[:7], 0, 0)
        return context

    def segment(self, base: int) -> tuple[LayerRows, ...]:
        """Rows compiled at `base`, in a cache of the master's type."""
        with self.context(self.master) as context:
            decode(context, self.skill, base, self.seq_id)
            return context.read(self.seq_id, base, TOKENS, base=base, dtype=self.master)

    def outcome(self, context: Context, position: int) -> Outcome:
        """Rows of the skill where it is, and the logits of each token of a question after it."""
        whole = context.supports("splice") is not None  # recurrent: the state is that of the last token
        rows = () if whole else context.read(self.seq_id, position, TOKENS, base=position, dtype="f32")
        context.append({self.seq_id: self.question}, "all")
        logits = [context.logits(index) for index in range(QUESTION)]
        return rows, np.stack(logits)

    def decoded(self, position: int, kv: str | None = None) -> Outcome:
        with self.context(kv) as context:
            decode(context, self.skill, position, self.seq_id)
            return self.outcome(context, position)

    def placed(self, rows: Sequence[LayerRows], base: int, position: int) -> Outcome:
        with self.context() as context:
            context.splice(self.seq_id, position, self.skill, rows, base)
            return self.outcome(context, position)

    def carried(self) -> Outcome:
        """Compile the skill at the start, and carry it to TARGET of a sequence that has only its seam.
        tests/engine/test_carry.py checks states with other texts."""
        with self.context(self.master) as context:
            first, tail = recurrent.margins(context)
            seam = max(1, first)
            decode(context, self.skill[:seam], 0, self.seq_id)
            with recurrent.capturing(context, self.seq_id) as captured:
                context.append({self.seq_id: self.skill[seam : TOKENS - tail]}, "none")
                transitions = captured()
            rows = context.read(self.seq_id, 0, TOKENS - tail, base=0, dtype=self.master)
        with self.context() as context:
            decode(context, self.skill[:seam], TARGET, self.seq_id)
            cut = [one if one.part == "state" else one.cut(slice(seam, None)) for one in rows]
            middle = self.skill[seam : TOKENS - tail]
            recurrent.carry(context, self.seq_id, TARGET + seam, middle, cut, transitions, seam)
            if tail:
                context.append({self.seq_id: self.skill[TOKENS - tail :]}, "none")
            return self.outcome(context, TARGET)

    def amplified(self, position: int) -> Errors:
        """Return how the model amplifies one rounding of all entries: decode the skill in steps, and round each step's
        entries at random before the next step attends to them."""
        kv = self.kv if self.kv in ROUNDING else self.master
        wanted = self.decoded(position, kv)
        size = ROUNDING["f16"] if self.flash == "on" and kv == "f32" else ROUNDING[kv]
        worst = Errors()
        for seed in range(8):
            random = np.random.default_rng(seed)
            with self.context(kv) as context:
                for first in range(0, TOKENS, 6):
                    at, part = position + first, self.skill[first : first + 6]
                    decode(context, part, at, self.seq_id)
                    rows = context.read(self.seq_id, at, len(part), base=at, dtype="f32")
                    context.truncate(self.seq_id, at)
                    context.splice(self.seq_id, at, part, [_shaken(layer, size, random) for layer in rows], at)
                worst = worst.worse(Errors.between(self.outcome(context, position), wanted))
        return worst

    def limit(self, own: Errors | None) -> Errors:
        """Return the largest errors of rounding. `own`: of a quantized cache."""
        if own is not None:
            return Errors(*(ratio * max(error, 1e-6) for ratio, error in zip(RATIO, own, strict=True)))
        limit = Errors(*BOUND[self.kv])
        return limit.worse(Errors(0.0, *BOUND["f16"][1:])) if self.flash == "on" else limit

    def right(self, found: Errors, position: int, own: Errors | None) -> str:
        """Classify an error of rounding: "plainly", or "amplified" by the model; "" if it is larger."""
        limit = self.limit(own)
        if found.first > limit.first:
            return ""
        if found.rows <= limit.rows and found.logits <= limit.logits:
            return "plainly"
        if self.model.recurrent:  # its rows cannot be shaken half way
            return ""
        floor = self.amplified(position)
        parts = zip(found, limit, floor, strict=True)
        return "amplified" if all(error <= at_most + AMPLIFIED * noise for error, at_most, noise in parts) else ""

    def hides(self, control: Sequence[LayerRows], base: int, own: Errors) -> bool:
        """True if a quantized cache rounds by more than a control moves, so that the control stays within the
        bounds."""
        exact = Case(self.model, ("f32", *self.column[1:]), self.text)
        moved = Errors.between(exact.placed(control, base, TARGET), exact.decoded(TARGET))
        return all(a + b <= at_most for a, b, at_most in zip(moved, own, self.limit(own), strict=True))


def _shaken(layer: LayerRows, size: float, random: np.random.Generator) -> LayerRows:
    def shake(values: np.ndarray) -> np.ndarray:
        noise = 1 + size * random.uniform(-1, 1, values.shape)
        return (values * noise).astype(np.float32)

    return replace(layer, k=shake(layer.k), v=shake(layer.v))


def _scaled(rows: Sequence[LayerRows], layers: Sequence[native.Layer]) -> list[LayerRows]:
    """K with the magnitude of YaRN or LongRoPE once more, as llama.cpp's own shift leaves it."""
    return [
        replace(r, k=(r.k * np.float32(layer.magnitude)).astype(r.k.dtype)) if layer.rope >= 0 else r
        for r, layer in zip(rows, layers, strict=True)
    ]


def judge(model: Model, column: tuple[str, str, str, str]) -> Verdict:
    case = Case(model, column)
    try:
        with case.context() as context:
            why = {op: context.supports(op) or "" for op in ("splice", "restore", "rewrite", "carry")}
            if not why["carry"] and not why["restore"]:
                why["carry"] = recurrent.can_carry(context, 0, TARGET, TOKENS) or ""
            why["splice"] = why["splice"] or context.can_move(BASE, TARGET, TOKENS) or ""
            layers = [] if why["restore"] else context.layers
        case.decoded(0)
    except EngineError as error:  # llama.cpp makes no such context, or computes no numbers in it
        return _nothing(model, column, "refused", error)

    words, errors = dict.fromkeys(why, "refused"), {}
    if not model.recurrent:
        words["carry"] = ""
    missed, blind, amplified = [], [], []
    measured: list[dict[str, tuple[Errors, Errors | None]]] = []
    for texts in TEXTS if case.kv in QUANTIZED else (1,):
        some = (Case(model, column, text) for text in range(len(measured), texts))
        measured += [_measure(one, why, layers, one.text == 0) for one in some]
        kept = {name: [text[name] for text in measured if name in text] for name in measured[0]}
        means = {name: tuple(map(_mean, zip(*texts, strict=True))) for name, texts in kept.items()}
        places = {name: 0 if name in ("restore", "rewrite") else TARGET for name in means}
        rights = {name: case.right(found, places[name], own) for name, (found, own) in means.items()}
        if all(rights.get(operation, True) for operation in words):
            break
    for name, (found, own) in means.items():
        errors[name] = found._asdict()
        if own is not None:
            errors[f"{name}: the cache's own"] = own._asdict()
        if name in words:
            words[name] = "exact" if rights[name] else "wrong"
            if rights[name] == "amplified":
                amplified.append(name)
        elif rights[name]:
            rows, base = _controls(case, layers)[name]
            (blind if own is not None and case.hides(rows, base, own) else missed).append(name)
    return Verdict(
        " ".join(column),
        **words,
        why=why["carry"] if model.recurrent else why["splice"],
        errors=errors,
        missed=tuple(missed),
        blind=tuple(blind),
        amplified=tuple(amplified),
    )


def _controls(case: Case, layers: Sequence[native.Layer]) -> dict[str, tuple[Sequence[LayerRows], int]]:
    """Yield controls that must be detected: K/V with a wrong compile position."""
    controls: dict[str, tuple[Sequence[LayerRows], int]] = {}
    segment = case.segment(BASE)
    if any(layer.rope >= 0 for layer in layers):
        controls["no rotation"] = segment, TARGET
        controls["distance off by one"] = segment, BASE + 1
    if any(layer.rope >= 0 and abs(layer.magnitude - 1) > 1e-3 for layer in layers):
        controls["magnitude twice"] = _scaled(segment, layers), BASE
    return controls


def _measure(
    case: Case, why: dict[str, str], layers: Sequence[native.Layer], first: bool
) -> dict[str, tuple[Errors, Errors | None]]:
    """By operation and control: the errors, and those that a quantized cache makes by itself.

    `first`: the first of several texts. A rewrite, which involves no rounding of ours, needs no more.
    """
    found: dict[str, tuple[Errors, Errors | None]] = {}

    def compare(operations: dict[str, tuple[Sequence[LayerRows], int]], position: int) -> None:
        own = None
        if case.kv in QUANTIZED:  # the reference is an f32 cache
            wanted = case.decoded(position, "f32")
            once = Errors.between(case.placed(case.segment(position), position, position), wanted)
            own = once._replace(logits=Errors.between(case.decoded(position), wanted).logits)
        else:
            wanted = case.decoded(position)
        for name, (rows, base) in operations.items():
            found[name] = Errors.between(case.placed(rows, base, position), wanted), own

    if not why["splice"]:
        compare({"splice": (case.segment(BASE), BASE), **_controls(case, layers)}, TARGET)
    if not why["restore"]:
        compare({"restore": (case.segment(0), 0)}, 0)
    if not why["carry"]:
        wanted = case.decoded(TARGET, "f32" if case.kv in QUANTIZED else None)
        own = Errors.between(case.decoded(TARGET), wanted) if case.kv in QUANTIZED else None
        found["carry"] = Errors.between(case.carried(), wanted), own
    if not why["rewrite"] and first:
        start = TOKENS - TOKENS // 3  # the last third holds other tokens first
        with case.context() as context:
            decode(context, [*case.skill[:start], *case.other[start:]], 0, case.seq_id)
            context.rewrite(case.seq_id, list(range(start, TOKENS)), case.skill[start:])
            rewritten = case.outcome(context, 0)
        straight = case.decoded(0)
        truth = case.decoded(0, "f32") if case.kv in QUANTIZED else straight
        own = Errors.between(straight, truth) if case.kv in QUANTIZED else None
        found["rewrite"] = Errors.between(rewritten, truth), own
    return found


def _mean(errors: Sequence[Errors | None]) -> Errors | None:
    """Geometric: a text that a random model happens to take badly would outweigh all others."""
    given = [error for error in errors if error is not None]
    if not given:
        return None
    mean = np.exp(np.log(np.maximum(given, 1e-30)).mean(axis=0))
    return Errors(*np.where(mean > 1e-29, mean, 0).tolist())


def _nothing(model: Model, column: Sequence[str], word: str, error: Exception) -> Verdict:
    """The verdict of a combination in which nothing could be compared."""
    return Verdict(" ".join(column), word, word, word, word if model.recurrent else "", str(error))


def measure(path: Path, columns: str = "") -> Iterator[Verdict]:
    model = Model(path)
    for column in COLUMNS:
        if not re.search(columns, " ".join(column)):
            continue
        try:
            yield judge(model, column)
        except UnsupportedError as error:
            yield _nothing(model, column, "refused", error)
        except NotesError as error:
            yield _nothing(model, column, "wrong", error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--columns", default="", help="only combinations that match, such as 'f16 plain on one'")
    given = parser.parse_args()
    for verdict in measure(given.model, given.columns):
        print(json.dumps(asdict(verdict)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
