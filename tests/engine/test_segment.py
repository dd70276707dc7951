"""Tests of segments: a part of one has the rows of its own tokens, at their own positions."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from notes_cli.engine.segment import FieldSpan, Identity, LayerRows, Segment
from notes_cli.errors import EngineError


def segment(**parts: object) -> Segment:
    """Five tokens after two, each row filled with its position."""
    rows = np.repeat(np.arange(2, 7, dtype=np.float16)[:, None], 3, axis=1)
    made = Segment(
        "s",
        "",
        "a b c",
        np.arange(10, 15, dtype=np.int32),
        2,
        np.array([7, 8], np.int32),
        (FieldSpan("x", "b", 2, 3, 1, 2),),
        Identity(*[""] * 8),
        (LayerRows(0, rows, rows[:, :2]),),
        blocks=(0, 3),
    )
    return replace(made, **parts)  # type: ignore[arg-type]


def whole(part: str = "attention") -> Segment:
    """Kept with the rows of its left context."""
    rows = np.repeat(np.arange(7, dtype=np.float16)[:, None], 3, axis=1)
    return segment(prefix_only=True, layers=(LayerRows(0, rows, rows, part),))


def test_a_part_keeps_its_rows_where_they_are() -> None:
    """A part has its tokens, base and rows, and no properties of the whole text; none is beyond it."""
    for first, last in ((0, 5), (0, 2), (1, 4), (3, 5), (2, 2)):
        part = segment().slice(first, last)
        assert part.tokens.tolist() == list(range(10 + first, 10 + last)) and part.base == 2 + first
        assert part.layers[0].k[:, 0].tolist() == part.layers[0].v[:, 1].tolist() == list(range(2 + first, 2 + last))
        assert part.context.tolist() == [7, 8, *range(10, 10 + first)]
        assert (part.text, part.fields, part.blocks) == ("", (), ())
    for first, last in ((-1, 2), (0, 6), (3, 2)):
        with pytest.raises(EngineError, match=r"is not a part of them"):
            segment().slice(first, last)
    assert segment().spans == [(0, 3), (3, 5)] and segment(blocks=()).spans == [(0, 5)]


def test_rows_that_cannot_be_moved_are_cut_at_their_end_only() -> None:
    """A first part keeps the left context; any other is refused, and none is taken from before a recurrent state."""
    assert whole().slice(0, 2).layers[0].k[:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(EngineError, match="cannot be moved, so no part"):
        whole().slice(1, 2)
    with pytest.raises(EngineError, match="cannot be moved, so no part"):
        whole("state").slice(0, 4)
    assert whole("state").slice(0, 5).layers[0].k.shape == (7, 3)


def test_what_makes_two_identities_one(identity: Identity) -> None:
    """A renamed file is the same model, by each of the three ways in which they are compared."""
    for field in [one.name for one in fields(Identity)]:
        other = replace(identity, **{field: "other"})
        same = field in ("model", "quantization", "rope_text")
        assert (other == identity) == (other.key == identity.key) == (not identity.differences(other)) == same
        assert other.as_dict()[field] == "other"
