"""Tests of replacing tokens inside a sequence: patches add up, later rows move, no failure leaves a wrong row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference import Load, distance, nmse, same

from notes_cli.engine.context import Context
from notes_cli.engine.positions import Patch, align, apply_patches, changed_ranges, is_ascending, position_map
from notes_cli.engine.segment import LayerRows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, UnsupportedError

BOUND = {"f32": 1e-6, "f16": 1e-5}
LEFT = np.arange(10, 18, dtype=np.int32)
SKILL = np.arange(60, 100, dtype=np.int32)
TEXT = [*LEFT, *SKILL]
ASK = [72, 105, 63]
LONGER, SHORTER = Patch(20, 22, (1, 2, 3, 4)), Patch(30, 34, (5, 6))


def written(context: Context, tokens: list[Any] | None = None) -> KVSequence:
    return reference.written(context, TEXT if tokens is None else tokens)


def read(context: Context, first: int, last: int) -> tuple[LayerRows, ...]:
    return context.read(0, first, last - first, base=first, dtype="f32") if first < last else ()


def goes_on_right(seq: KVSequence, kv: str) -> bool:
    """Rows and next logits are those of the sequence's own tokens, decoded from the start."""
    seq.append(ASK)
    found, rows, tokens = seq.logits(), read(seq.context, 0, len(seq)), seq.tokens.tolist()
    seq.context.clear()
    straight = written(seq.context, tokens)
    wanted = straight.logits()
    return nmse(found, wanted) < BOUND[kv] and distance(rows, read(seq.context, 0, len(tokens))) < BOUND[kv]


# ---- rows that move, and rows that do not


@pytest.mark.parametrize(("kind", "kv"), [("llama", "f16"), ("gemma3", "f32"), ("smollm3", "f16")])
@pytest.mark.parametrize("patch", [LONGER, SHORTER, Patch(0, 3, (7,)), Patch(20, 30, ())])
def test_what_stands_behind_is_turned_to_its_new_place(load: Load, kind: str, kv: str, patch: Patch) -> None:
    """Rows before the change are bit-identical, those after are the old ones spliced where they are now."""
    context = load(kind, type_k=kv, type_v=kv)
    seq = written(context)
    head, tail = read(context, 0, patch.first), context.read(0, patch.last, 48 - patch.last, base=patch.last, dtype=kv)
    assert seq.replace([patch]) == len(patch.tokens)
    now = patch.first + len(patch.tokens)
    assert seq.tokens.tolist() == [*TEXT[: patch.first], *patch.tokens, *TEXT[patch.last :]]
    assert context.length(0) == len(seq) == 48 + patch.grows
    assert same(read(context, 0, patch.first), head)
    moved, own = read(context, now, len(seq)), read(context, patch.first, now)

    for rotate in (True, False):  # the control: not turned
        context.clear()
        context.splice(0, now, np.array(TEXT[patch.last :], np.int32), tail, patch.last, rotate=rotate)
        assert same(moved, read(context, now, len(seq))) is rotate
    context.clear()
    written(context, seq.tokens[:now].tolist())  # new tokens attend to the rows before them
    assert distance(own, read(context, patch.first, now)) < BOUND[kv]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_two_changes_at_once(load: Load, kind: str) -> None:
    """Each part moves by the changes before it: none, two, and back to none, where rows are bit-identical."""
    context = load(kind)
    seq = written(context)
    before, between = read(context, 34, 48), context.read(0, 22, 8, base=22)
    assert seq.replace([LONGER, SHORTER], [45]) == 7
    assert seq.tokens.tolist() == [*TEXT[:20], 1, 2, 3, 4, *TEXT[22:30], 5, 6, *TEXT[34:]]
    after, moved = read(context, 34, 48), read(context, 24, 32)
    kept = [at - 34 for at in range(34, 48) if at != 45]
    for a, b in zip(after, before, strict=True):
        assert (a.k[kept] == b.k[kept]).all() and (a.v[kept] == b.v[kept]).all()
    assert (after[2].v[11] != before[2].v[11]).any()  # recomputed with them
    context.clear()
    context.splice(0, 24, np.array(TEXT[22:30], np.int32), between, 22)
    assert same(moved, read(context, 24, 32))


@pytest.mark.parametrize(
    ("type_k", "type_v"), [("f16", "f32"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "f16"), ("f32", "f16")]
)
def test_rows_that_stay_keep_their_bits_in_any_cache(load: Load, type_k: str, type_v: str) -> None:
    """Rows of any type that are put aside and come back to their place are as they were."""
    context = load("qwen3", type_k=type_k, type_v=type_v, flash_attention="on")
    seq = written(context)
    before = read(context, 34, 48)
    seq.replace([LONGER, SHORTER])
    assert same(read(context, 34, 48), before)


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_all_that_follows_recomputed_is_a_recompute(load: Load, kv: str) -> None:
    """A value and every token after it, or all, in one pass: rows and logits are those of the new text, decoded."""
    whole = Patch(0, 48, (7,)), Patch(0, 48, (7,) * 60)
    for patch in (LONGER, SHORTER, Patch(0, 3, (7,)), Patch(0, 1, (7, 8)), *whole):
        seq = written(load("llama", type_k=kv, type_v=kv))
        assert seq.replace([patch], range(patch.last, 48)) == 48 - patch.last + len(patch.tokens)
        assert goes_on_right(seq, kv)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2, 3, 4, 5)])
def test_at_the_end_it_waits_to_be_decoded(load: Load, tokens: tuple[int, ...]) -> None:
    """At the end of the sequence, the new tokens are decoded with the next ones, and the logits are right."""
    seq = written(load())
    seq.replace([Patch(45, 48, tokens)])
    assert seq.context.length(0) == (45 if len(tokens) != 3 else 48)
    assert seq.tokens.tolist() == [*TEXT[:45], *tokens]
    assert goes_on_right(seq, "f16")


# ---- refusals and failures


@pytest.mark.parametrize("dry", [False, True])
def test_what_cannot_be_moved_stays(load: Load, dry: bool) -> None:
    """Into another stretch of positions, with learned ones, after recurrent layers: refused, and as it was."""
    for kind, length in (("mistral3", 260), ("gpt2", 48), ("lfm2", 48)):
        seq = KVSequence(load(kind), dry=dry)
        seq.append((TEXT * 6)[:length])
        seq.flush()
        with pytest.raises(UnsupportedError, match="what follows the change cannot be moved: "):
            seq.replace([LONGER])
        assert seq.tokens.tolist() == (TEXT * 6)[:length]


def test_a_failed_move(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cannot be put back are not missed silently: the sequence ends before the change."""
    seq = written(load())
    splice = Context.splice

    def broken(self: Context, seq_id: int, position: int, tokens: Any, layers: Any, base: int, **how: Any) -> None:
        rows = [replace(one, v=np.full_like(one.v, np.nan)) for one in layers]
        splice(self, seq_id, position, tokens, rows, base, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Context, "splice", broken)
        with pytest.raises(EngineError, match="NaN"):
            seq.replace([LONGER])
    assert seq.tokens.tolist() == TEXT[:20]
    assert goes_on_right(seq, "f16")


@st.composite
def patches_of(draw: st.DrawFn) -> tuple[int, list[Patch]]:
    """A length, and patches of as many tokens: shorter, longer, empty ones and insertions, neighbours too."""
    length = draw(st.integers(0, 12))
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    sizes = draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
    fresh = iter(range(1000, 2000))
    return length, [
        Patch(first, last, [next(fresh) for _ in range(size)]) for (first, last), size in zip(pairs, sizes, strict=True)
    ]


def naive(length: int, patches: Sequence[Patch]) -> list[int]:
    tokens = list(range(length))
    for patch in reversed(patches):
        tokens[patch.first : patch.last] = patch.tokens
    return tokens


@given(patches_of(), st.data())
def test_patches_of_tokens(case: tuple[int, list[Patch]], data: st.DataObject) -> None:
    """Several patches give the tokens of list slices replaced in turn, also after other tokens; kept tokens are where
    the map says, removed ones map into their replacement. An alignment covers both sequences once. A row is unchanged
    only if its token is where it was: none from the first patch of another length on, also if moved back."""
    length, patches = case
    tokens, shift = naive(length, patches), position_map(patches)
    assert is_ascending([patch.span for patch in patches], length)
    assert apply_patches(range(length), patches) == tokens
    before, moved = [500, 501, 502], [patch.offset(3) for patch in patches]
    assert apply_patches([*before, *range(length)], moved) == before + tokens
    gone = {position for patch in patches for position in range(patch.first, patch.last)}
    assert all(tokens[shift(position)] == position for position in set(range(length)) - gone)
    assert shift(length) == len(tokens)
    for patch in patches:
        for position in range(patch.first, patch.last):
            start = tokens.index(patch.tokens[0]) if patch.tokens else shift(patch.first)
            assert shift(position) == start + min(position - patch.first, len(patch.tokens))
    places = [shift(position) for position in range(length + 1)]
    assert places == sorted(places)
    parts = align(patches, length)
    assert [part.patch for part in parts if part.patch] == patches
    assert [p for part in parts for p in range(*part.before)] == list(range(length))
    assert [p for part in parts for p in range(*part.after)] == list(range(len(tokens)))
    for part in parts:
        assert tokens[slice(*part.after)] == (part.patch.tokens if part.patch else list(range(*part.before)))
    also = (data.draw(st.sets(st.integers(0, length - 1))) if length else set()) - gone
    first_move = next((patch.first for patch in patches if patch.grows), length)
    same = [at for at, token in enumerate(tokens) if token == at and token not in also and at < first_move]
    spans = changed_ranges(patches, length, also)
    assert sorted({*range(len(tokens))} - {*same}) == [position for span in spans for position in range(*span)]
    assert all(one[1] < other[0] for one, other in pairwise(spans))
