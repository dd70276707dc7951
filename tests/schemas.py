"""JSON schemas of the kinds that people use: those that are enforced, and those that are refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
_NODE = {
    "type": "object",
    "properties": {"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value"],
    "additionalProperties": False,
}
_KIND_A = {"type": "object", "properties": {"kind": {"const": "a"}, "v": INTEGER}, "required": ["kind"]}
_KIND_B = {"type": "object", "properties": {"kind": {"const": "b"}, "w": STRING}, "required": ["kind"]}

HELD: list[Any] = [
    True,
    {},
    *({"type": kind} for kind in ("object", "array", "string", "number", "integer", "boolean", "null")),
    {"type": ["string", "null"]},
    # Objects.
    {"type": "object", "properties": {"a": STRING, "b": INTEGER, "c": {"type": "boolean"}}, "required": ["b"]},
    {"properties": {"x": {"default": None, "title": "X"}}, "title": "G", "type": "object"},
    {"properties": {"a": INTEGER}, "required": ["a"]},  # no type
    {"type": "object", "properties": {'Größe "x"': INTEGER, "": NULL}, "required": [""]},
    # Names that are prefixes of others, empty, or escaped in JSON, among ordinary ones.
    {"properties": {"ab": STRING, "abc": NULL, 'q"x': NULL}, "additionalProperties": INTEGER, "required": ["z"]},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    {"type": "object", "patternProperties": {"^x-": STRING}, "properties": {"n": NULL}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"enum": ["red", "blue"]}, "additionalProperties": INTEGER},
    # Arrays.
    {"type": "array", "prefixItems": [STRING, INTEGER]},
    # Values.
    {"const": {"x": "\u2028", "y": "\b\f"}},
    {"enum": ["größe", "日本", "🙂", 'a"b', "back\\slash", "tab\t", None, 1, 1.5, True, {"k": [1, "x"]}]},
    {"enum": [f"value-{number}" for number in range(3000)]},
    # Numbers.
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "multipleOf": 7, "minimum": 10},
    {"type": "integer", "format": "int32"},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    # Strings.
    {"type": "string", "examples": ["a"], "deprecated": True, "readOnly": True, "x-note": "q", "nullable": False},
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            *(r"^[A-Z]{2}\d{3,5}$", r"^(a|b\"c|\\d)*[^\w\u0080-\uffff]+.?$", r"^[a-z0-9]+@[a-z]+\.[a-z]{2,}$"),
            *(r"^(?:([12]\d{3})-(0[1-9]|1[0-2]))?$", r"^\u0041\x42[\n\t-]\/$", r"^[^a-z\"]{0,5}$"),
            *(r"^[^\W\d]\S$", r"^good day to you\!$", r"^(yes|no|può)$", r"^a|b$", r"^[[a&&b~~]{2}$", r"[0-9]{3}"),
            r"\D",
            "",
        )
    ),
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "duration")),
    *({"type": "string", "format": name} for name in ("hostname", "email", "uri", "uri-reference")),
    {"type": "string", "format": "date-time", "minLength": 25},
    {"type": "string", "format": "date", "pattern": "^2026-02-"},
    # References and combinations.
    {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}},
    {
        "definitions": {"a/b": {"string": INTEGER}, "c~d": {"string": NULL}},
        "type": "object",
        "properties": {"x": {"$ref": "#/definitions/a~1b/string"}, "y": {"$ref": "#/definitions/c~0d/string"}},
        "required": ["x", "y"],
    },
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.org/x", "type": "boolean"},
    {"oneOf": [_KIND_A, _KIND_B]},
    {
        "$defs": {"A": _KIND_A, "B": _KIND_B},
        "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A"}},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"type": "object", "properties": {"b": STRING}, "required": ["b"]},
        ]
    },
    {"allOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": NULL}}]},
    {
        "$defs": {"base": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}},
        "allOf": [{"$ref": "#/$defs/base"}],
        "properties": {"b": STRING},
        "required": ["b"],
    },
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    # As OpenAI's response_format has one.
    {"name": "x", "strict": True, "schema": {"type": "object", "properties": {"a": INTEGER}}},
]

_A = {"type": "object", "properties": {"a": STRING}}
INVALID: list[tuple[Any, Any, Any]] = [  # with a value that can be written, and one that cannot
    (INTEGER, 12, 1.5),
    ({"type": "integer", "maximum": 150}, 150, 151),
    ({"type": "string", "maxLength": 3}, "äöü", "äöüx"),
    ({"type": "string", "format": "date"}, "2024-02-28", "2024-02-30"),
    ({"type": "string", "format": "date-time"}, "2024-02-28T10:00:00Z", "2024-02-28"),
    *(({"const": True}, True, 1), (_A, {"a": "x"}, {"a": 1}), (_A, {}, {"b": 1})),
    ({**_A, "required": ["a"]}, {"a": ""}, {}),
    ({**_A, "additionalProperties": INTEGER}, {"a": "", "b": 1}, {"b": "x"}),
    ({**_A, "additionalProperties": INTEGER}, {"a": ""}, {"a": "", "a ": ""}),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, {"x": 1}, {"y": 1}),
    ({"type": "array", "prefixItems": [STRING, INTEGER]}, ["a", 1], [1, "a"]),
    ({"$defs": {"node": _NODE}, "$ref": "#/$defs/node"}, {"value": 1, "children": [{"value": 2}]}, {"children": []}),
    ({"oneOf": [_KIND_A, _KIND_B]}, {"kind": "b", "w": "x"}, {"kind": "a", "w": "x"}),
    ({"allOf": [_A, {"required": ["a"]}]}, {"a": "x"}, {}),
    ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
    ({"type": "string", "format": "byte", "pattern": "^Y"}, "YWI=", "YWI"),
    *(({"type": "string", "pattern": f"^[^{part}]$"}, "c", "a") for part in ("a&&b", "+--a", "a[b")),
    ({"anyOf": [{"not": {}}, INTEGER]}, 1, "a"),
    ({"prefixItems": [INTEGER]}, [1], [1, 2]),
    ({"type": "string", "nullable": True}, None, 1),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}}, [1, 2, 2], [2]),
]

REFUSED: list[tuple[Any, str]] = [
    ([], "must be an object or boolean"),
    *(({"type": "frob"}, "Invalid type: frob"), ({"properties": []}, "must be an object")),
    *(({"not": {"type": "null"}}, "uses 'not', which"), ({"if": {}}, "uses 'if'"), ({"minimun": 3}, "uses 'minimun'")),
    ({"x": {}, "dependentRequired": {"a": ["b"]}}, "uses 'x'"),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "contains": {}}, "uses 'contains'"),
    ({"properties": {"a": {"unevaluatedProperties": False}}}, r"uses 'unevaluatedProperties'.*\(at /properties/a\)"),
    ({"type": "array", "uniqueItems": True}, "uses 'uniqueItems'"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "bounds less than 1 apart"),
    ({"type": "number", "maximum": "4"}, "Expected f64 for 'maximum'"),
    ({"const": 2**60}, "whole number beyond 9,007,199,254,740,992 for 'const'"),
    ({"enum": [{"a": [2**60]}]}, "for 'enum'"),
    ({"type": "string", "format": "semver"}, r"uses the format .semver.*known: binary, byte"),
    *(({"type": "string", "format": name}, "uses the format") for name in ("unknown", {}, ["date"])),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    *(
        ({"type": "string", "pattern": pattern}, "cannot be enforced: ")
        for pattern in (r"(a)\1", r"\bx", "a^b", "[b-a]")
    ),
    ({"properties": {"a": {"type": "string", "pattern": "(a"}}}, r"unclosed group \(at /properties/a\)"),
    ({"type": "object", "minProperties": 2}, "uses 'minProperties'"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a' is unsatisfiable"),
    ({"patternProperties": {"^a": {}, "a$": {}}}, "not disjoint"),
    *(
        ({"propertyNames": rule}, "uses 'propertyNames'")
        for rule in ({"not": {}}, {"pattern": "a", "maxLength": 3}, False)
    ),
    ({"properties": {}, "propertyNames": {"pattern": "a"}}, "uses 'propertyNames'"),
    *(({"$ref": ref}, "which is no place in it") for ref in ("http://x/y", "#/nope", "#nope", 3)),
    *(({"anyOf": []}, "anyOf is empty"), ({"anyOf": {}}, "must be an array"), ({"items": 3}, "object or boolean")),
    *(
        ({"oneOf": parts}, "could fit two of")
        for parts in (
            *([INTEGER, {"type": "number"}], [_KIND_A, _KIND_A], [{"enum": [1, "a"]}, {"const": 1.0}]),
            *([{"type": "object", "additionalProperties": True}, _KIND_B], [INTEGER, {"maxLength": 3}]),
            [{**_KIND_A, "properties": {"kind": {"const": "a", "type": "string", "nullable": True}}}, _KIND_B],
        )
    ),
]


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 5, -3, 1.5, 14, "", "a", "ab", "abc", "b", "x1", "2024-02-29", "2023-02-29"),
    *([], [1], ["a"], [1, 2], ["a", 1], ["a", 1, None], [[1]], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"c": None}),
    *({"a": 1, "b": "x"}, {"a": 1, "b": 2, "c": 3}, {"kind": "b", "w": "x"}, {"kind": "a", "w": "x"}, {"ab": 1}),
]


def random_schema(random: Random) -> dict[str, Any]:
    """Draw keywords, nested at most three deep, whether they make sense together or not."""

    def inner(depth: int) -> Any:
        if depth > 2 or random.random() < 0.3:
            values = random.sample(VALUES, 3)
            ref = {"$ref": random.choice(["#/$defs/A", "#/$defs/B"])}
            return random.choice([INTEGER, STRING, NULL, {"type": "number"}, {"enum": values}, True, {}, ref])
        drawn: dict[str, Callable[[], Any]] = {
            "type": lambda: random.choice(["object", "array", "string", "integer", "number", ["string", "null"]]),
            "properties": lambda: {name: inner(depth + 1) for name in random.sample(["a", "b", "kind"], 2)},
            "required": lambda: random.sample(["a", "b", "kind"], random.choice([1, 2])),
            "additionalProperties": lambda: random.choice([False, True, inner(depth + 1)]),
            "patternProperties": lambda: {random.choice(["^a", "b$", "^[a-c]$"]): inner(depth + 1)},
            "propertyNames": lambda: random.choice([{"pattern": "^[ab]"}, {"enum": ["a", "b"]}, STRING]),
            "items": lambda: inner(depth + 1),
            "prefixItems": lambda: [inner(depth + 1) for _ in range(random.choice([1, 2]))],
            "pattern": lambda: random.choice(["^a", "b$", "^[a-z]+$", "a|b"]),
            "format": lambda: random.choice(["date", "email", "int32", "byte", "uri"]),
            "multipleOf": lambda: random.choice([2, 7, 0.5]),
            "enum": lambda: random.sample(VALUES, random.choice([1, 3, 5])),
            "const": lambda: random.choice(VALUES),
            "uniqueItems": lambda: random.choice([False, True]),
            "not": dict,
        }
        for name in ("anyOf", "allOf", "oneOf"):
            drawn[name] = lambda: [inner(depth + 1) for _ in range(random.choice([1, 2, 3]))]
        for name in ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength", "minimum"):
            drawn[name] = lambda: random.choice([0, 1, 2])
        for name in ("maximum", "exclusiveMinimum", "exclusiveMaximum"):
            drawn[name] = lambda: random.choice([0, 1, 1.5, 5])
        return {name: drawn[name]() for name in random.sample([*drawn], random.choice([1, 2, 3]))}

    whole = inner(0)
    return {**(whole if isinstance(whole, dict) else {}), "$defs": {"A": inner(1), "B": _KIND_B}}
