"""Random operations on several sequences of one context, in any order, with interrupts and failures between them.

Each sequence has the tokens, pieces and cells that a list has after the same operations. An operation on one leaves the
K/V of all others bit for bit. K/V that was decoded in order is that of a prefill, and so are the logits after it.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from reference import all_rows, distance, nmse, same, stopping, written

from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.positions import Patch, position_map
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError
from notes_cli.explanations import why

from ..conftest import MakeModel

LEFT, SKILL = np.arange(10, 18, dtype=np.int32), np.arange(60, 100, dtype=np.int32)
UNIFIED: dict[str, Any] = {"n_sequences": 2, "unified": True}
KINDS: list[tuple[str, dict[str, Any], float]] = [  # and the bound of the nmse to a prefill
    *((kind, UNIFIED, 1e-4) for kind in ("llama", "gemma3", "lfm2", "mamba")),
    *(("llama", {"type_k": "f32", "type_v": "f32"}, 1e-6), ("llama", {"n_ctx": 3072, "n_sequences": 6}, 1e-4)),
    ("qwen3", {"type_k": "q8_0", "type_v": "q8_0", "flash_attention": "on"}, 1e-2),
]
SCRIPTS, STEPS = 4, 50


@dataclass
class Twin:
    """A sequence, a dry sequence with the same operations, and the tokens and cells that both must have."""

    sequence: KVSequence
    dry: KVSequence
    tokens: list[int] = field(default_factory=list)
    cells: list[object] = field(default_factory=list)  # of each decoded row one; that of shared rows is the same
    exact: int = 0  # leading tokens whose rows are, or will be, those of a prefill

    def cut(self, length: int) -> None:
        self.dry.truncate(length)
        del self.tokens[length:], self.cells[length:]
        self.exact = min(self.exact, length)

    def appended(self, tokens: Sequence[int]) -> None:
        self.exact += len(tokens) if self.exact == len(self.tokens) else 0
        self.tokens += tokens

    def recomputed(self, places: Sequence[int]) -> None:
        for place in places:
            self.cells[place : place + 1] = [object()]
            self.exact = place + 1 if place <= self.exact else self.exact


@contextmanager
def interrupting(step: str, before: bool = False, error: BaseException | None = None) -> Iterator[None]:
    """A method of contexts is interrupted once, before it begins or, as ctypes is, after it; "" and others are not."""
    call = getattr(Context, step, None)
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(*arguments: Any, **how: Any) -> None:
            patch.undo()
            if call and not before:
                call(*arguments, **how)
            raise error or KeyboardInterrupt

        if call:
            patch.setattr(Context, step, interrupted)
        yield


class Script:
    def __init__(self, model: Model, options: dict[str, Any], bound: float, seed: int, done: Counter[str]) -> None:
        self.random, self.bound, self.log, self.done = random.Random(seed), bound, list[str](), done
        settings = ContextOptions(**{"n_ctx": 512, "n_threads": 1, "flash_attention": "off", **options})
        self.context, self.alone = Context(model, settings), Context(model, settings)
        self.context.append({0: np.concatenate([LEFT, SKILL])})
        layers = () if model.recurrent else self.context.read(0, 8, 40, base=8)
        self.segment = Segment("s", "", "", SKILL, 8, LEFT, (), self.context.identity("w"), layers)
        self.context.clear()
        self.twins: list[Twin] = []
        self.handle, self.attention = self.context.handle, model.architecture != "mamba"

    def run(self) -> None:
        waiting = [self.append, self.append, self.truncate, self.resize, self.fail_to_resize, self.close]
        flushed = [self.splice, *[self.replace] * 4, self.share, self.share, self.lookahead, self.logits]
        for _ in range(STEPS):
            self.begin()
            twin, operation = self.random.choice(self.twins), self.random.choice([*waiting, *flushed])
            self.log.append(f"{operation.__name__} {self.twins.index(twin)}")
            if operation in flushed:
                twin.sequence.flush()
                twin.cells += [object() for _ in twin.tokens[len(twin.cells) :]]
            others = [(one.sequence, all_rows(one.sequence)) for one in self.twins if one is not twin]
            own, pieces = all_rows(twin.sequence), [*twin.sequence.pieces]
            try:
                operation(twin)
                self.done[operation.__name__] += 1
                if operation in (self.resize, self.fail_to_resize, self.lookahead, self.share):
                    assert same(all_rows(twin.sequence), own), self.log
            except EngineError as error:
                self.log.append(f"refused: {error.what}")
                assert same(all_rows(twin.sequence), own) and twin.sequence.pieces == pieces, self.log
            assert all(same(all_rows(sequence), before) for sequence, before in others), self.log
            self.check()
        self.context.close()
        self.alone.close()

    def check(self) -> None:
        for twin in self.twins:
            sequence, at = twin.sequence, 0
            assert sequence.intact and sequence.tokens.tolist() == twin.tokens == twin.dry.tokens.tolist(), self.log
            assert sequence.pieces == twin.dry.pieces, self.log
            for piece in sequence.pieces:
                assert piece.position == at and piece.tokens and piece.rewritten <= piece.tokens, self.log
                assert why(piece).count("recomputed in place") == bool(piece.rewritten)
                at += piece.tokens
            assert at == len(twin.tokens) and self.context.length(sequence.seq_id) == len(twin.cells), self.log
        if self.context.model.recurrent and self.context.handle is not self.handle:  # grown: a state is shared whole
            shared: dict[tuple[object, ...], list[object]] = {}
            for twin in self.twins:
                twin.cells = [*shared.setdefault((*twin.cells,), [object() for _ in twin.cells])]
        self.handle = self.context.handle
        cells = {cell for twin in self.twins for cell in twin.cells}
        assert self.context.n_leased == len(self.twins), self.log
        assert self.context.used == (len(cells) if self.attention else 0), self.log

    def some(self, least: int, most: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(self.random.randint(least, most))]

    def prefill(self, tokens: Sequence[int]) -> KVSequence:
        self.alone.clear()
        return written(self.alone, tokens)

    # Operations. One that is refused changes nothing.

    def begin(self) -> None:
        if not self.twins or (len(self.twins) < 6 and self.random.random() < 0.1):
            with suppress(EngineError):  # where the context cannot grow now
                self.twins.append(Twin(KVSequence(self.context), KVSequence(self.context, dry=True)))

    def append(self, twin: Twin) -> None:
        """Tokens wait until they are decoded, also if that is stopped or interrupted; a stopped state is lost."""
        tokens, how = self.some(1, 40), self.random.choice(["stop", "append", ""])
        twin.sequence.append(tokens)
        twin.dry.append(tokens)
        twin.appended(tokens)
        if how == "append":
            with interrupting(how), pytest.raises(KeyboardInterrupt):
                twin.sequence.flush()
            twin.cells += [object() for _ in twin.tokens[len(twin.cells) :]]
        elif how and not self.context.model.recurrent:
            with stopping(self.context), pytest.raises(EngineError, match="the computation was stopped"):
                twin.sequence.flush()

    def splice(self, twin: Twin) -> None:
        if self.segment.layers:
            seam = self.random.choice([0, 3, 40])
            twin.sequence.splice(self.segment, seam=seam)
            twin.dry.splice(self.segment, seam=seam)
            twin.appended(SKILL[:seam].tolist())
            twin.tokens += SKILL[seam:].tolist()
            twin.cells += [object() for _ in SKILL[: self.context.length(twin.sequence.seq_id) - len(twin.cells)]]

    def truncate(self, twin: Twin) -> None:
        length = self.random.randint(0, len(twin.tokens))
        twin.sequence.truncate(length)
        twin.cut(length)
        self.logits_at_times(twin)

    def change(self, twin: Twin) -> tuple[list[Patch], list[int]]:
        """Return patches of any length, and positions outside of them to decode again."""
        end = len(twin.tokens)
        cuts = sorted(self.random.choice([0, end, *[self.random.randint(0, end)] * 4]) for _ in range(4))
        cuts[2] = self.random.choice(cuts[1:3])
        alike, pairs = self.random.random() < 0.4, [pair for pair in (cuts[:2], cuts[2:]) if pair[0] < pair[1]]
        patches = [
            Patch(first, last, self.some(last - first, last - first) if alike else self.some(0, 9))
            for first, last in pairs[: self.random.randint(1, 2)]
        ]
        if not patches:
            return [], []
        inside = {place for patch in patches for place in range(patch.first, patch.last)}
        behind = range(patches[0].first, end)  # with all of it, K/V is that of a prefill
        return patches, sorted({*self.random.choice([behind, self.random.choices(behind, k=2)])} - inside)

    def replace(self, twin: Twin) -> None:
        """Undisturbed, stopped by the abort callback, or interrupted before or after a step: nothing has changed, or
        what the sequence has ends at the first change."""
        patches, also = self.change(twin)
        step = self.random.choice(["rewrite", "splice", "truncate", "read", "stop", "", ""])
        with interrupting(step, self.random.random() < 0.5), stopping(self.context, 0 if step == "stop" else np.inf):
            try:
                twin.sequence.replace(patches, also)
            except (EngineError, KeyboardInterrupt) as error:
                if len(twin.sequence) == len(twin.tokens):
                    raise EngineError("nothing is to have changed") from error
                twin.cut(patches[0].first)
                return
        twin.dry.replace(patches, also)
        shift, new, grown = position_map(patches), list[int](), 0
        for patch in patches:
            new += range(patch.first + grown, patch.first + grown + len(patch.tokens))
            grown += patch.grows
        for patch in reversed(patches):
            twin.tokens[patch.first : patch.last] = patch.tokens
        if any(patch.grows for patch in patches):  # what follows the first one is moved
            twin.exact = min(twin.exact, patches[0].first)
            twin.cells[patches[0].first :] = [object() for _ in twin.tokens[patches[0].first :]]
        new = sorted([*new, *map(shift, also)])
        twin.recomputed(new)
        for piece in twin.sequence.pieces:
            count = sum(piece.position <= place < piece.position + piece.tokens for place in new)
            assert count <= piece.rewritten, self.log
        del twin.cells[self.context.length(twin.sequence.seq_id) :]  # new tokens at the end wait
        self.logits_at_times(twin)

    def share(self, twin: Twin) -> None:
        length = self.random.choice([len(twin.tokens), self.random.randint(0, len(twin.tokens))])
        if len(self.twins) < 6:
            fork = Twin(twin.sequence.share(length), twin.dry.share(), [*twin.tokens], [*twin.cells], twin.exact)
            fork.cut(length)
            self.twins.append(fork)

    def lookahead(self, twin: Twin) -> None:
        more = self.some(1, 30)
        if self.random.random() < 0.3:
            with interrupting("append"), pytest.raises(KeyboardInterrupt):
                twin.sequence.lookahead(more)
            return
        ahead = twin.sequence.lookahead(more)
        assert ahead.shape == (len(more), self.context.model.n_vocab)
        if twin.exact == len(twin.tokens):
            assert nmse(ahead[-1], self.prefill([*twin.tokens, *more]).logits()) < self.bound, self.log

    def logits(self, twin: Twin) -> None:
        lost = twin.sequence._logits is None  # then its last token is decoded again, in a cell of its own
        found = twin.sequence.logits()
        if lost:
            twin.recomputed([len(twin.tokens) - 1])
        alone, recurrent = self.prefill(twin.tokens), self.context.model.recurrent
        if twin.exact == len(twin.tokens):
            assert nmse(found, alone.logits()) < self.bound, self.log
        if twin.exact and not recurrent:
            both = ([one.cut(slice(twin.exact)) for one in all_rows(each)] for each in (twin.sequence, alone))
            assert self.bound > 1e-3 or distance(*both) < self.bound, self.log

    def logits_at_times(self, twin: Twin) -> None:
        if len(twin.cells) == len(twin.tokens) and self.random.random() < 0.5:
            with suppress(EngineError):  # the last one is spliced
                self.logits(twin)

    def close(self, twin: Twin) -> None:
        """Close the sequence, or only drop the last reference to it."""
        self.twins.remove(twin)
        if self.random.random() < 0.5:
            twin.sequence.close()
            uses = (twin.sequence.flush, twin.sequence.logits, twin.sequence.share, lambda: twin.sequence.truncate(0))
            for use in uses if twin.cells else ():
                with pytest.raises(EngineError, match=r"given back|closed, or changed|no logits"):
                    use()
            assert not twin.sequence.intact
        del twin.sequence
        gc.collect()

    def resize(self, twin: Twin) -> None:
        larger, sequences = self.random.choice([0, 256]), self.random.choice([0, 7, 9])
        self.context.resize(n_ctx=self.context.n_ctx + larger, n_sequences=sequences)

    def fail_to_resize(self, twin: Twin) -> None:
        """At its first step, or when K/V is written back."""
        options = self.context.options
        step, failure = self.random.choice(["_open", "splice"]), self.random.choice([EngineError("x"), None])
        with interrupting(step, before=True, error=failure), suppress(KeyboardInterrupt, EngineError):
            self.context.resize(n_ctx=self.context.n_ctx + 512)
            options = self.context.options  # it had no such step
        assert self.context.options == options, self.log


@pytest.mark.parametrize(("kind", "options", "bound"), KINDS, ids=str)
def test_any_operations_in_any_order(make_model: MakeModel, kind: str, options: dict[str, Any], bound: float) -> None:
    done = Counter[str]()
    with Model(make_model(kind)) as model:
        for seed in range(SCRIPTS):
            Script(model, options, bound, seed, done).run()
    assert len(done) >= 9, "all but one are done, and not always refused"
