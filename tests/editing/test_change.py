"""Changes of field values: the patches, applied to the old tokens, always give the tokens of the corrected text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from notes_cli.config import shipped_model
from notes_cli.editing.methods import Change, change, field_spans
from notes_cli.engine.model import Model
from notes_cli.engine.segment import Identity, Segment, Tokens
from notes_cli.errors import SkillError
from notes_cli.text.fields import Field

NOBODY = Identity(*[""] * 8)
Parts = list[tuple[str, str]]  # a text, and the field that follows it
words = st.text("ab12 -\né€", max_size=5)
value_texts = st.text("ab12 -é€", min_size=1, max_size=6).map(str.strip).filter(bool)


@pytest.fixture(scope="module", params=["a byte a token", "shipped"])
def model(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Iterator[Model]:
    """A tokenizer whose tokens never depend on adjacent text, or one that merges."""
    with Model(shipped_model() if request.param == "shipped" else make_model("llama")) as loaded:
        yield loaded


def filled(parts: Parts, values: dict[str, str]) -> str:
    return "".join(text + values[name] for text, name in parts)


def segment_of(model: Model, parts: Parts, values: dict[str, str]) -> Segment:
    """A segment, without K/V, of alternating texts and fields."""
    fields, text = [], ""
    for before, name in parts:
        start = len(text) + len(before)
        text += before + values[name]
        fields.append(Field(name, values[name], start, len(text)))
    tokens = model.tokenize(text)
    spans = field_spans(model, text, fields, tokens)
    return Segment("s", "", text, tokens, 0, model.tokenize(""), spans, NOBODY, ())


def applied(found: Change, old: Tokens) -> list[int]:
    """The old tokens with the patches applied, last first."""
    tokens = old.tolist()
    for patch in reversed(found.patches):
        tokens[patch.first : patch.last] = patch.tokens
    return tokens


@given(
    parts=st.lists(st.tuples(words, st.sampled_from("xyz")), min_size=1, max_size=5),
    old=st.fixed_dictionaries(dict.fromkeys("xyz", value_texts)),
    new=st.dictionaries(st.sampled_from(["x", "y", "z", "elsewhere"]), value_texts),
)
@example(parts=[("", "x"), ("", "y")], old={"x": "a", "y": "2", "z": "-"}, new={"x": "1"})  # two fields, one token
@example(parts=[("", "x"), ("", "y")], old={"x": "1", "y": "2", "z": "-"}, new={"x": "a"})  # and the other way round
@example(parts=[("", "x"), ("", "y")], old={"x": "a", "y": "b", "z": "-"}, new={"x": "1", "y": "2"})
@example(parts=[("1", "x"), ("2", "x")], old={"x": "ab", "y": "-", "z": "-"}, new={"x": "abab"})
@settings(max_examples=40)
def test_patches_give_the_corrected_tokens(
    model: Model, parts: Parts, old: dict[str, str], new: dict[str, str]
) -> None:
    """For any adjacent texts: ascending, non-empty patches that give the tokens of the corrected text."""
    segment = segment_of(model, parts, old)
    used = {name for _, name in parts}
    here = {name: value for name, value in new.items() if name in used and old[name] != value}
    found = change(model, segment, new)
    if not here:
        assert found is None
        return
    assert found is not None and set(found.fields) == set(here)
    assert found.text == filled(parts, old | here)
    assert found.tokens.tolist() == model.tokenize(found.text).tolist() == applied(found, segment.tokens)
    assert all(0 <= patch.first < patch.last <= len(segment) for patch in found.patches)
    assert all(one.last <= other.first for one, other in pairwise(found.patches))


def test_a_patch_for_every_place_of_a_field(model: Model) -> None:
    """If adjacent tokens stay the same, each patch covers exactly the value."""
    parts = [("from ", "x"), (" or ", "y"), (" to ", "x"), (".", "z")]
    segment = segment_of(model, parts, {"x": "gold", "y": "free", "z": "\n"})
    found = change(model, segment, {"x": "silver", "y": "free"})
    assert found is not None and found.fields == ("x",)
    spans = [(span.first, span.last) for span in segment.fields if span.name == "x"]
    assert [(patch.first, patch.last) for patch in found.patches] == spans
    assert all(model.text(patch.tokens).strip() == "silver" for patch in found.patches)


@pytest.mark.parametrize("model", ["shipped"], indirect=True)
@pytest.mark.parametrize(
    ("parts", "value", "patches"),
    [
        ([("gold ", "x"), ("b", "y")], "a", [(1, 4, " ab")]),  # the new value and what follows become one token
        ([("gold", "x"), ("", "y")], "1", [(1, 3, "12")]),  # as do two fields, if only one changes
        ([("gold", "x"), (" silver", "y")], "-", [(1, 2, "-")]),  # here they do not
    ],
)
def test_neighbours_that_become_other_tokens(
    model: Model, parts: Parts, value: str, patches: list[tuple[int, int, str]]
) -> None:
    """A single patch covers everything that differs, where tokens merge."""
    segment = segment_of(model, parts, {"x": "?", "y": "2"})
    found = change(model, segment, {"x": value})
    assert found is not None
    assert [(patch.first, patch.last, model.text(patch.tokens)) for patch in found.patches] == patches


def test_a_value_that_is_none(model: Model) -> None:
    """Surrounding blanks are ignored; empty values and several lines are refused, as in a skill."""
    segment = segment_of(model, [("is ", "x")], {"x": "gold"})
    assert change(model, segment, {"x": "  gold "}) is None
    for value in ("", "  ", "a\nb"):
        with pytest.raises(SkillError, match="field 'x'"):
            change(model, segment, {"x": value})
