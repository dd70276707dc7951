"""Tests of the algebra of token patches, on lists of distinct tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from notes_cli.engine.positions import (
    Patch,
    align,
    apply_patches,
    changed_ranges,
    is_ascending,
    merge_ranges,
    position_map,
)


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


@given(patches_of())
def test_tokens_are_those_of_slices_replaced_one_by_one(case: tuple[int, list[Patch]]) -> None:
    length, patches = case
    assert apply_patches(range(length), patches) == naive(length, patches)


@given(patches_of())
def test_what_stays_is_where_shift_says(case: tuple[int, list[Patch]]) -> None:
    length, patches = case
    tokens, shift = naive(length, patches), position_map(patches)
    gone = {position for patch in patches for position in range(patch.first, patch.last)}
    for position in set(range(length)) - gone:
        assert tokens[shift(position)] == position
    assert shift(length) == len(tokens)


@given(patches_of())
def test_what_gives_way_stays_inside_of_what_takes_its_place(case: tuple[int, list[Patch]]) -> None:
    """And its order stays: pieces whose ends are shifted neither overlap nor swap."""
    length, patches = case
    tokens, shift = naive(length, patches), position_map(patches)
    for patch in patches:
        for position in range(patch.first, patch.last):
            start = tokens.index(patch.tokens[0]) if patch.tokens else shift(patch.first)
            assert shift(position) == start + min(position - patch.first, len(patch.tokens))
    places = [shift(position) for position in range(length + 1)]
    assert places == sorted(places)


@given(patches_of())
def test_alignment_covers_both_sequences_once(case: tuple[int, list[Patch]]) -> None:
    length, patches = case
    tokens, parts = naive(length, patches), align(patches, length)
    assert [part.patch for part in parts if part.patch] == patches
    assert [p for part in parts for p in range(*part.before)] == list(range(length))
    assert [p for part in parts for p in range(*part.after)] == list(range(len(tokens)))
    for part in parts:
        expected = part.patch.tokens if part.patch else list(range(*part.before))
        assert tokens[slice(*part.after)] == expected


@given(patches_of(), st.data())
def test_a_row_is_disturbed_unless_its_token_is_where_it_was(
    case: tuple[int, list[Patch]], data: st.DataObject
) -> None:
    """All tokens from the first patch of another length on count as moved, also if later patches move them back."""
    length, patches = case
    tokens = naive(length, patches)
    also = data.draw(st.sets(st.integers(0, length - 1))) if length else set()
    also -= {position for patch in patches for position in range(patch.first, patch.last)}
    first_move = next((patch.first for patch in patches if patch.grows), length)
    same = [at for at, token in enumerate(tokens) if token == at and token not in also and at < first_move]
    found = [position for span in changed_ranges(patches, length, also) for position in range(*span)]
    assert sorted({*range(len(tokens))} - {*same}) == found


@given(st.lists(st.integers(0, 30)))
def test_ranges_hold_the_positions_and_do_not_touch(positions: list[int]) -> None:
    found = merge_ranges(positions)
    assert [p for span in found for p in range(*span)] == sorted(set(positions))
    assert all(one[1] < other[0] for one, other in pairwise(found))


@given(patches_of(), st.integers(1, 5))
def test_an_offset_is_that_of_tokens_put_before(case: tuple[int, list[Patch]], by: int) -> None:
    length, patches = case
    before = list(range(500, 500 + by))
    moved = [patch.offset(by) for patch in patches]
    assert apply_patches([*before, *range(length)], moved) == before + naive(length, patches)


def test_only_ranges_inside_that_ascend() -> None:
    assert is_ascending([], 0) and is_ascending([(0, 2), (2, 2), (2, 5)], 5)
    assert not is_ascending([(0, 2), (1, 3)], 5)  # overlap
    assert not is_ascending([(3, 4), (0, 1)], 5)
    assert not is_ascending([(2, 1)], 5) and not is_ascending([(-1, 1)], 5)
    assert not is_ascending([(4, 6)], 5)
