"""JSON schemas that a grammar can be made of, and those that it cannot, with what is said of each."""

from __future__ import annotations

from typing import Any

_NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value"],
    "additionalProperties": False,
}
_KIND_A = {"type": "object", "properties": {"kind": {"const": "a"}, "v": {"type": "integer"}}, "required": ["kind"]}
_KIND_B = {"type": "object", "properties": {"kind": {"const": "b"}, "w": {"type": "string"}}, "required": ["kind"]}

TAKEN: list[Any] = [
    True,
    *({"type": kind} for kind in ("object", "array", "string", "number", "integer", "boolean", "null")),
    {"type": ["string", "null"]},
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
        "required": ["b"],
    },
    # Names that others begin with, that are empty, and that JSON escapes; others beside them.
    {
        "properties": {
            "ab": {"type": "string"},
            "abc": {"type": "null"},
            "": {"type": "null"},
            'q"x': {"type": "null"},
        },
        "additionalProperties": {"type": "integer"},
        "required": ["z"],
    },
    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    # Names of rules.
    {"type": "object", "properties": {name: {"type": "null"} for name in ("ws", "char", "value", "root", "é")}},
    {"items": {"items": {"items": {"type": "integer"}, "minItems": 1}, "maxItems": 2}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "null"}, "minItems": 3, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
    {"enum": ["a", 'é\n"\\', "日本", 1, 1.5, None, True, {"k": [1, "x"]}]},
    {"type": "integer", "enum": [1, "a", 2.0, 2.5]},
    {"const": {"x": "\u2028", "y": "\x7f\x00"}},
    {"type": "integer", "minimum": -17, "maximum": 2345},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "exclusiveMaximum": -3},
    {"type": "integer", "exclusiveMinimum": 99, "maximum": 1001},
    {"type": "integer", "minimum": 1.5, "maximum": 7.2},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": -100, "maximum": -5},
    {"type": "number", "exclusiveMaximum": 0},
    {"type": "number", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "minimum": 123456},
    {"type": "number", "maximum": -123456, "exclusiveMinimum": -99999999},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "maxLength": 2500},
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            r"^[A-Z]{2}\d{3,5}$",
            r"^(a|b\"c|\\d)*[^\w]+.?$",
            r"^[a-z0-9]+@[a-z]+\.[a-z]{2,}$",
            r"^(?:([12]\d{3})-(0[1-9]|1[0-2]))?$",
            r"^\u0041\x42[\n\t\b-]\/$",
            r"^[^a-z\"]{0,5}$",
            r"^.*$",
            r"^[\W\s]$",
            r"\D",
            "",
        )
    ),
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4")),
    *({"type": "string", "format": name} for name in ("hostname", "email", "uri")),
    {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    # References whose last parts are the same, and the name of a type.
    {
        "$defs": {"a/b": {"string": {"type": "integer"}}, "b": {"string": {"type": "null"}}},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a~1b/string"}, "y": {"$ref": "#/$defs/b/string"}},
        "required": ["x", "y"],
    },
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    {"oneOf": [_KIND_A, _KIND_B]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "null"}}}]},
]

REFUSED: list[tuple[Any, str]] = [
    (False, "allows no value"),
    ([], "is neither an object nor true"),
    ({"type": "frob"}, "has the type 'frob', which is none"),
    ({"nullable": True}, "uses 'nullable', which is not supported"),
    ({"not": {}}, "uses 'not'"),
    ({"if": {}}, "uses 'if'"),
    ({"patternProperties": {"a": {}}}, "uses 'patternProperties'"),
    ({"items": {"type": "string", "contentEncoding": "base64"}}, r"uses 'contentEncoding'.*\(at /items\)"),
    ({"type": "array", "uniqueItems": True}, "uses 'uniqueItems'"),
    ({"type": "array", "items": False, "minItems": 1}, "allows no value"),
    ({"type": "integer", "multipleOf": 3}, "uses 'multipleOf'"),
    ({"type": "number", "maximum": 0.5}, "only whole bounds"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "its bounds leave none"),
    ({"type": "integer", "exclusiveMinimum": True}, "needs a number"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "allows no value"),
    ({"type": "string", "maxLength": -1}, "needs a whole number"),
    ({"type": "string", "format": "iri"}, r"uses the format 'iri'.*known: date, "),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "beside another bound"),
    ({"type": "string", "pattern": "(?=a)b"}, "looks ahead or back"),
    ({"type": "string", "pattern": r"(a)\1"}, r"has \\1, which is not supported"),
    ({"type": "string", "pattern": r"\bx"}, r"has \\b, which is not supported"),
    ({"type": "string", "pattern": "(a$)b"}, "inside of a group"),
    ({"type": "string", "pattern": "[b-a]"}, "a range that is none"),
    ({"type": "string", "pattern": "a**"}, "repeats a repetition"),
    ({"type": "string", "pattern": "(a"}, "an open parenthesis"),
    ({"type": "string", "pattern": "a)"}, "where it cannot be"),
    ({"enum": []}, "allows no value"),
    ({"enum": ["a"], "type": "integer"}, "none of the type 'integer'"),
    ({"enum": ["a"], "maxLength": 3}, "uses 'maxLength' beside 'enum'"),
    ({"const": float("nan")}, "is not JSON"),
    ({"properties": {"\ud800": {}}}, "half of a UTF-16 surrogate pair"),
    ({"type": "object", "minProperties": 2}, "uses 'minProperties'"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "requires 'a', which it does not allow"),
    ({"$ref": "http://x/y"}, "only #/... is supported"),
    ({"$ref": "#/nope"}, "refers to '#/nope', which is not there"),
    ({"$ref": "#", "type": "object"}, "uses 'type' beside '\\$ref'"),
    ({"anyOf": []}, "needs a list of schemas"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "could fit two of"),
    ({"oneOf": [_KIND_A, _KIND_A]}, "could fit two of"),
    ({"anyOf": [{"type": "string"}], "maxLength": 3}, "uses 'maxLength' beside 'anyOf'"),
    ({"type": "object", "anyOf": [{"anyOf": [True]}]}, "combines others"),
    ({"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]}, "in 'allOf'"),
]
