"""Tests translating JSON schemas: unenforceable keywords are refused by name, and common schemas are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from notes_cli.errors import GrammarError
from notes_cli.text.schema import calls_grammar, read_schema, schema_grammar

from ..schemas import REFUSED


def inner(grammar: str) -> Any:
    return json.loads(grammar.partition("%json ")[2])


def arguments(schema: Any, *, strict: bool = False) -> Any:
    found = inner(calls_grammar({"odd": schema}, {"odd"} if strict else ()))
    return {"$defs": found["$defs"], **found["properties"]["arguments"]}


def test_what_restricts_nothing() -> None:
    """Titles, descriptions and defaults do not change the grammar, and options of llguidance cannot be injected."""
    for text in ("{", "", "[" * 100_000, '{"a": 1} x'):
        with pytest.raises(GrammarError, match="the JSON schema is not JSON"):
            read_schema(text)
    notes = {"title": "T", "description": "d", "default": 1, "examples": [1], "x-own": 1, "$schema": "s", "$id": "i"}
    lenient = {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}}
    assert schema_grammar({"type": "integer", **notes, **lenient}) == schema_grammar({"type": "integer"})


def deep(levels: int) -> Any:
    schema: Any = True
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def chain(length: int) -> Any:
    """Return definitions that refer to one another: llguidance recurses through all of them."""
    definitions = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
    return {"$defs": {**definitions, f"d{length}": True}, "$ref": "#/$defs/d0"}


def wide(count: int) -> Any:
    definitions = {f"d{n}": deep(40) for n in range(count)}
    return {"$defs": definitions, "prefixItems": [{"$ref": f"#/$defs/{name}"} for name in definitions]}


_SMALL = {"type": "string"}
_STATES = {"type": "string", "pattern": "(a|b)*a(a|b){20}c"}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        *((deep(51), "nested more than 50 levels"), (deep(500), "nested more than 50 levels")),
        *((wide(20), "more than 500 levels together"), (chain(2000), "nested too deeply")),
        *(({"enum": list(range(60_000))}, "too large"), ({"anyOf": [{}] * 60_000}, "too large")),
        ({"oneOf": [{"const": number} for number in range(1000)]}, "too large"),
        ({"required": [f"a{number}" for number in range(60_000)]}, "too large"),
        (
            {"allOf": [{"$ref": "#/$defs/p"}] * 9000, "$defs": {"p": {"properties": {str(n): {} for n in range(99)}}}},
            "too large",
        ),
        ({"properties": {f"{'x' * 200_000}{number}": _SMALL for number in range(30)}}, "too large"),
        ({"allOf": [{"anyOf": [{"required": [f"a{n}{m}"]} for m in range(4)]} for n in range(12)]}, "too large"),
        ({"patternProperties": {f"a{n}": {} for n in range(300)}}, "too large"),
        *((False, "schema is false"), ({"maxLength": 1e999}, "is not JSON: Out of range float")),
        ({"properties": {"\ud800": {}}}, "is not JSON: .*surrogates"),
        ({"anyOf": [_STATES | {"minLength": number} for number in range(200)]}, "cannot be enforced"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_of_strangers(schema: Any, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        schema_grammar(schema)


def test_arguments_are_an_object() -> None:
    """For any schema; without parameters it is {}, as the model would invent other arguments."""
    empty = {"type": "object", "properties": {}}
    for none in (None, {}, {"type": "object"}, {"properties": {}}, {**empty, "required": []}):
        assert arguments(none) == {"$defs": {}, "type": "object", "additionalProperties": False}
    for odd in ({"type": "string", "format": "x"}, {"$ref": "#/nowhere"}, [], "x", {"not": {}}):
        assert arguments(odd)["type"] == "object"


def test_references_in_the_schemas_of_tools() -> None:
    """They begin at the root of the tool's own schema, as Pydantic writes them. A catalogue may be too large."""
    large = {"properties": {"a": {"enum": [*range(60_000)]}}}
    with pytest.raises(GrammarError, match=r"^the tool second: the JSON schema is too large"):
        calls_grammar({"first": {"properties": {"a": _SMALL}}, "second": large})
    one, other = (
        {"$defs": {"P": {"const": word}}, "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]}
        for word in ("one", "other")
    )
    found = inner(calls_grammar({"a": one, "b": other, "c": one}))
    names = [call["properties"]["arguments"]["properties"]["p"]["$ref"] for call in found["anyOf"]]
    assert [found["$defs"][name.rpartition("/")[2]] for name in names] == [
        {"const": word} for word in ("one", "other", "one")
    ]


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=str)
def test_nothing_is_passed_over(schema: Any, says: str) -> None:
    """One line has the keyword and its place: an answer that only seems valid would be worse. In a tool it is dropped
    and the rest is enforced; with `strict` the error has the tool and the place in its schema."""
    with pytest.raises(GrammarError, match=says) as caught:
        schema_grammar(schema)
    assert "\n" not in str(caught.value) and "(at /" in str(caught.value)
    schema = schema if not isinstance(schema, dict) or "$ref" not in schema else {"$ref": "#/nowhere"}
    tool = {"type": "object", "properties": {"odd": schema, "even": {"const": "kept"}}, "required": ["odd", "even"]}
    assert arguments(tool)["properties"]["even"] == {"const": "kept"}
    with pytest.raises(GrammarError, match=r"^the tool odd: the JSON schema ") as caught:
        calls_grammar({"fine": {}, "odd": tool}, {"odd"})
    assert "(at /properties/odd" in str(caught.value) and 'Without "strict"' in str(caught.value)
    assert calls_grammar({"fine": {}, "odd": tool}, {"fine"})


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"type": "array", "items": {"const": "kept"}, "uniqueItems": True}, "kept"),
        ({"type": "object", "properties": {"a": {"const": "kept"}}, "if": {}, "then": {}}, "kept"),
        ({"oneOf": [{"const": "kept"}, {"type": "string"}]}, "kept"),
        ({"type": "object", "properties": {"a": {"const": "kept"}, "b": {"pattern": "a^b"}}}, "kept"),
        ({"type": "string", "format": "semver"}, "string"),
        ({"type": "array", "minItems": 4, "maxItems": 3}, "array"),
    ],
)
def test_what_is_left_of_a_schema(schema: Any, kept: str) -> None:
    assert kept in json.dumps(arguments({"properties": {"a": schema}, "required": ["a"]})["properties"]["a"])
