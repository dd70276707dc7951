"""JSON schemas as grammars: what has no rule is refused by name, and what people write most is taken."""

from __future__ import annotations

import re
from typing import Any

import pytest

from notes_cli.errors import GrammarError
from notes_cli.text.grammar import check_grammar
from notes_cli.text.schema import calls_grammar, read_schema, schema_grammar

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


_SMALL = {"type": "string"}
_LONG = "x" * 200_000


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": list(range(250_000))},
        {"anyOf": [{}] * 250_000},
        {"oneOf": [{"const": number} for number in range(1000)]},
        {"required": [f"a{number}" for number in range(30_000)]},
        {
            "$defs": {"p": {"properties": {str(n): _SMALL for n in range(999)}}},
            "allOf": [{"$ref": "#/$defs/p"}] * 250_000,
        },
        {"properties": {_LONG: _SMALL, f"{_LONG}y": _SMALL, f"{_LONG}z": _SMALL}, "additionalProperties": _SMALL},
        {"properties": {str(number): {"pattern": "[^" + "a" * 900 + "]"} for number in range(50)}},
        {"properties": {_LONG + str(number): _SMALL for number in range(6)}},
    ],
    ids=["values", "schemas", "alternatives", "names", "references", "letters", "classes", "characters"],
)
def test_large_schemas(schema: Any) -> None:
    """Refused by the work that they would be, which is counted: they come from strangers."""
    with pytest.raises(GrammarError, match=r"the JSON schema is (too large: |nested too deeply)"):
        schema_grammar(schema)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"pattern": "a" * 1001}, "a pattern of more than 1,000 characters"),
        ({"$ref": "#/" + "9" * 5000}, "by more than 1,000 characters"),
        ({"maxLength": 1e999}, "needs a whole number for 'maxLength', not inf"),
        ({"maximum": -1e999}, "needs a number for 'maximum'"),
        ({"enum": [1e999]}, "has a value for 'enum' that is not JSON"),
        ({"type": "string", "format": {}}, r"uses the format \{\}, which is not supported"),
        ({"oneOf": [{"required": [{}], "type": "object"}] * 2}, "needs a list of names for 'required'"),
        ({"oneOf": [{"type": "object", "properties": []}] * 2}, "needs an object for 'properties'"),
        ({"allOf": [{"properties": []}, {}]}, "needs an object for 'properties'"),
        ({"allOf": [{"required": 3}, {}]}, "needs a list of names for 'required'"),
    ],
)
def test_what_no_schema_holds(schema: Any, says: str) -> None:
    """A line, and no fault of ours."""
    with pytest.raises(GrammarError, match=says):
        schema_grammar(schema)


def test_many_properties() -> None:
    """As many as a grammar may have rules; each rule is looked up as often as it is named."""
    names = [f"a{number}" for number in range(8000)]
    grammar = schema_grammar({"properties": dict.fromkeys(names, _SMALL), "required": names})
    check_grammar(grammar)
    assert grammar.count("\n") > 8000


def test_values_that_are_equal() -> None:
    """1.0 is 1, and true is not, for alternatives of which one must fit."""
    with pytest.raises(GrammarError, match="write 'anyOf'"):
        schema_grammar({"oneOf": [{"enum": [1, "a"]}, {"const": 1.0}]})
    assert "true" in schema_grammar({"oneOf": [{"const": 1}, {"const": True}]})


def calls(**parameters: Any) -> str:
    return calls_grammar(parameters)


NOTHING = calls(now={"type": "object", "properties": {}, "additionalProperties": False})


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"properties": {}}, {"type": "object", "properties": {}, "required": []}],
)
def test_a_tool_without_parameters(parameters: Any) -> None:
    """It is called with {}: what else is written there would be made up."""
    assert calls(now=parameters) == NOTHING
    assert "arguments" in NOTHING and "string" not in NOTHING
    free = {"type": "object", "additionalProperties": True}
    assert "string" in calls(now=free)


def test_references_in_the_schemas_of_tools() -> None:
    """They begin at the head of their own schema, as in each that Pydantic writes."""
    one, other = (
        {"$defs": {"P": {"const": word}}, "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]}
        for word in ("one", "other")
    )
    grammar = calls(a=one, b=other, c=one)
    check_grammar(grammar)
    assert "one" in grammar and "other" in grammar
    check_grammar(calls(tree={"properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}}}))


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=str)
def test_a_keyword_without_a_rule_in_a_tool(schema: Any, says: str) -> None:
    """It is left out where it is, and the rest is enforced: one tool of a catalogue costs no request. Where `strict`
    asks for all of it, the error has the tool and the place in its own schema."""
    tool = {"type": "object", "properties": {"odd": schema, "even": {"const": "kept"}}, "required": ["odd", "even"]}
    grammar = calls_grammar({"fine": {}, "odd": tool})
    check_grammar(grammar)
    assert "kept" in grammar
    with pytest.raises(GrammarError, match=r"^the tool odd: the JSON schema ") as caught:
        calls_grammar({"fine": {}, "odd": tool}, {"odd"})
    assert re.search(says.partition(r".*\(at")[0], str(caught.value)) or "$ref" in str(schema)
    assert "(at /properties/odd" in str(caught.value) and 'Without "strict"' in str(caught.value)
    check_grammar(calls_grammar({"fine": {}, "odd": tool}, {"fine"}))


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"type": "array", "items": {"const": "kept"}, "uniqueItems": True}, "kept"),
        ({"type": "object", "properties": {"a": {"const": "kept"}}, "if": {}, "then": {}}, "kept"),
        ({"properties": {"a": {"const": "kept"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "kept"),
        ({"oneOf": [{"const": "kept"}, {"type": "string"}]}, "kept"),
        ({"$defs": {"a": {"const": "kept"}}, "$ref": "#/$defs/a", "maxLength": 9}, "kept"),
        ({"type": "string", "format": "semver"}, "string"),
        ({"type": "integer", "minimum": 3, "multipleOf": 3}, "[3-9]"),
        ({"type": "float"}, "value"),
        ({"$ref": "https://example.org/schema"}, "value"),
        (False, "value"),
    ],
)
def test_what_is_left_of_a_schema(schema: Any, kept: str) -> None:
    """As much as has a rule."""
    head = schema if isinstance(schema, dict) and "$defs" in schema else {}
    tool = {"$defs": head.get("$defs", {}), "properties": {"a": schema}, "required": ["a"]}
    grammar = calls(odd=tool)
    check_grammar(grammar)
    assert kept in grammar


def test_arguments_are_an_object() -> None:
    """Whatever a tool's schema says."""
    for schema in ({"type": "string", "format": "x"}, {"$ref": "#/nowhere"}, [], "x", {"not": {}}):
        grammar = calls(odd=schema)
        assert re.search(r'arguments\\":" ws (object|r\d+) ', grammar), grammar


def test_a_catalogue_that_is_too_large() -> None:
    """Refused with the tool at which it is."""
    with pytest.raises(GrammarError, match=r"^the tool second: the JSON schema is too large"):
        calls(first={"properties": {"a": _SMALL}}, second={"properties": {"a": {"enum": list(range(250_000))}}})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"city": {"enum": [chr(0x4E00 + number) for number in range(1500)]}}}, "/properties/city"),
        ({"properties": {f"p{number}": {"type": "integer"} for number in range(1500)}}, "/"),
    ],
    ids=["letters", "properties"],
)
def test_more_ways_than_there_may_be(schema: dict[str, Any], place: str) -> None:
    """The place in the schema and the limit are named, and no rule of the grammar."""
    with pytest.raises(GrammarError) as error:
        schema_grammar({"type": "object", **schema})
    assert str(error.value) == (f"the JSON schema allows more than 1,000 ways to go on at one place (at {place})")
