"""JSON schemas as grammars: what has no rule is refused by name, and what people write most is taken."""

from __future__ import annotations

from typing import Any

import pytest

from notes_cli.errors import GrammarError
from notes_cli.text.grammar import check_grammar
from notes_cli.text.schema import read_schema, schema_grammar

from ..engine.schemas import REFUSED, TAKEN


@pytest.mark.parametrize("schema", TAKEN, ids=str)
def test_a_grammar_that_can_be_read(schema: Any) -> None:
    """What it becomes is sound GBNF."""
    check_grammar(schema_grammar(schema))


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=str)
def test_nothing_is_passed_over(schema: Any, says: str) -> None:
    """One line that says what cannot be, and where: an answer that seems to be valid would be worse."""
    with pytest.raises(GrammarError, match=says) as caught:
        schema_grammar(schema)
    assert "\n" not in str(caught.value) and "(at /" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, '{"a": 1} x'])
def test_a_schema_that_is_not_json(text: str) -> None:
    """Refused in one line."""
    with pytest.raises(GrammarError, match="the JSON schema is not JSON"):
        read_schema(text)


def test_deep_nests() -> None:
    """Bounded: they come from strangers."""
    deep: Any = True
    for _ in range(500):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="nested more than 64 levels deep"):
        schema_grammar(deep)


def test_what_restricts_nothing() -> None:
    """Titles, descriptions and defaults change no grammar."""
    notes = {"title": "T", "description": "d", "default": 1, "examples": [1], "x-own": 1, "$schema": "s"}
    assert schema_grammar({"type": "integer", **notes}) == schema_grammar({"type": "integer"})
