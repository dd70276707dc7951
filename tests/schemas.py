"""JSON schemas of the kinds that people use: those that are enforced, and those that are refused, with the reason."""

from __future__ import annotations

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
_LONG = {"type": "string", "minLength": 1, "maxLength": 65536}

HELD: list[Any] = [
    True,
    {},
    *({"type": kind} for kind in ("object", "array", "string", "number", "integer", "boolean", "null")),
    {"type": ["string", "null"]},
    # Objects.
    {"type": "object", "properties": {"a": STRING, "b": INTEGER, "c": {"type": "boolean"}}, "required": ["b"]},
    {"properties": {"x": {"default": None, "title": "X"}}, "title": "G", "type": "object"},
    {"properties": {"a": INTEGER}, "required": ["a"]},  # no type
    {"type": "object", "properties": {"x": {"anyOf": [STRING, NULL]}}, "required": ["x"]},
    {"type": "object", "properties": {'Größe "x"': INTEGER, "": NULL}, "required": [""]},
    # Names that are prefixes of others, empty, or escaped in JSON, among ordinary ones.
    {"properties": {"ab": STRING, "abc": NULL, 'q"x': NULL}, "additionalProperties": INTEGER, "required": ["z"]},
    {"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    {"type": "object", "patternProperties": {"^[a-z]+$": INTEGER}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x-": STRING}, "properties": {"n": NULL}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"enum": ["red", "blue"]}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 4}},
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 3},
    # Arrays.
    {"items": {"items": {"items": INTEGER, "minItems": 1}, "maxItems": 2}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [STRING, INTEGER]},
    {"type": "array", "prefixItems": [STRING], "items": NULL, "minItems": 3, "maxItems": 5},
    {"type": "array", "prefixItems": [STRING, INTEGER], "items": False},
    {
        "type": "array",
        "items": {"type": "object", "properties": {"summary": {"type": "string", "maxLength": 2000}}},
        "maxItems": 100,
    },
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    # Values.
    {"const": {"a": [1, 2]}},
    {"const": {"x": "\u2028", "y": "\b\f"}},
    {"enum": ["größe", "日本", "🙂", 'a"b', "back\\slash", "tab\t", None, 1, 1.5, True, {"k": [1, "x"]}]},
    {"enum": [f"value-{number}" for number in range(3000)]},
    {"type": "integer", "enum": [1, "a", 2.0, 2.5]},
    # Numbers.
    {"type": "integer", "minimum": -17, "maximum": 2345},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "exclusiveMaximum": -3},
    {"type": "integer", "exclusiveMinimum": 99, "maximum": 1001},
    {"type": "integer", "minimum": 1.5, "maximum": 7.2},
    {"type": "integer", "multipleOf": 7, "minimum": 10},
    {"type": "integer", "format": "int32"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": -100, "maximum": -5.25},
    {"type": "number", "exclusiveMaximum": 0},
    {"type": "number", "minimum": 123456},
    {"type": "number", "multipleOf": 0.5, "minimum": 0},
    # Strings.
    {"type": "string", "examples": ["a"], "deprecated": True, "readOnly": True, "x-note": "q", "nullable": False},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "object", "properties": {"o": {"type": "object", "properties": {"s": _LONG}, "required": ["s"]}}},
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            *(r"^[A-Z]{2}\d{3,5}$", r"^(a|b\"c|\\d)*[^\w]+.?$", r"^[a-z0-9]+@[a-z]+\.[a-z]{2,}$"),
            *(r"^(?:([12]\d{3})-(0[1-9]|1[0-2]))?$", r"^\u0041\x42[\n\t\b-]\/$", r"^[^a-z\"]{0,5}$", r"^[\W\s]$"),
            *(r"^[^\W\d]\S$", r"^good day to you\!$", r"^(yes|no|può)$", r"^a|b$", r"^[[a&&b~~]{2}$", r"[0-9]{3}"),
            r"\D",
            "",
        )
    ),
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "duration")),
    *({"type": "string", "format": name} for name in ("hostname", "email", "uri", "uri-reference", "json-pointer")),
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
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": STRING}, NULL]},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^[0-9]+$"}]},
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
    {"not": NULL},
    # As OpenAI's response_format has one.
    {"name": "x", "strict": True, "schema": {"type": "object", "properties": {"a": INTEGER}}},
]

_A = {"type": "object", "properties": {"a": STRING}}
INVALID: list[tuple[Any, Any, Any]] = [  # with a value that can be written, and one that cannot
    (INTEGER, 12, 1.5),
    ({"type": "integer", "maximum": 150}, 150, 151),
    ({"type": "integer", "multipleOf": 7}, 49, 50),
    ({"type": "number", "exclusiveMinimum": 0}, 0.5, 0),
    ({"type": "string", "maxLength": 3}, "äöü", "äöüx"),
    ({"type": "string", "pattern": "^a$"}, "a", "ab"),
    ({"type": "string", "format": "date"}, "2024-02-28", "2024-02-30"),
    ({"type": "string", "format": "date-time"}, "2024-02-28T10:00:00Z", "2024-02-28"),
    ({"type": "string", "format": "email"}, "a@b.org", "a.b.org"),
    ({"enum": ["x", 1]}, "x", "1"),
    *(({"const": True}, True, 1), (_A, {"a": "x"}, {"a": 1}), (_A, {}, {"b": 1})),
    ({**_A, "required": ["a"]}, {"a": ""}, {}),
    ({**_A, "additionalProperties": INTEGER}, {"a": "", "b": 1}, {"b": "x"}),
    ({**_A, "additionalProperties": INTEGER}, {"a": ""}, {"a": "", "a ": ""}),
    ({"type": "object", "maxProperties": 1}, {"x": 1}, {"x": 1, "y": 2}),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, {"x": 1}, {"y": 1}),
    ({"type": "array", "items": NULL, "maxItems": 2}, [None, None], [None, None, None]),
    ({"type": "array", "prefixItems": [STRING, INTEGER]}, ["a", 1], [1, "a"]),
    ({"$defs": {"node": _NODE}, "$ref": "#/$defs/node"}, {"value": 1, "children": [{"value": 2}]}, {"children": []}),
    ({"oneOf": [_KIND_A, _KIND_B]}, {"kind": "b", "w": "x"}, {"kind": "a", "w": "x"}),
    ({"allOf": [_A, {"required": ["a"]}]}, {"a": "x"}, {}),
    ({"not": NULL}, 1, None),
    ({"type": "string", "nullable": True}, None, 1),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}}, [1, 2, 2], [2]),
]

REFUSED: list[tuple[Any, str]] = [
    (False, "allows no value"),
    ([], "is neither an object nor true"),
    ({"type": "frob"}, "has the type 'frob', which is none"),
    ({"not": {}}, "uses 'not', which"),
    ({"not": {"enum": [1]}}, "uses 'not', which"),
    ({"if": {}}, "uses 'if'"),
    ({"x": {}, "dependentRequired": {"a": ["b"]}}, "uses 'x'"),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "contains": {}}, "uses 'contains'"),
    ({"properties": {"a": {"unevaluatedProperties": False}}}, r"uses 'unevaluatedProperties'.*\(at /properties/a\)"),
    ({"type": "array", "uniqueItems": True}, "uses 'uniqueItems'"),
    ({"type": "array", "items": False, "minItems": 1}, "allows no value"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "cannot be enforced"),
    ({"type": "integer", "multipleOf": 99991}, "for 'multipleOf'"),
    ({"type": "number", "maximum": 2**60}, "bounds beyond"),
    ({"const": 2**60}, "beyond"),
    ({"type": "integer", "exclusiveMinimum": True}, "needs a number"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "allows no value"),
    ({"type": "string", "maxLength": -1}, "needs a whole number"),
    ({"maxLength": 1e999}, "needs a whole number for 'maxLength', not inf"),
    ({"type": "string", "format": "semver"}, r"uses the format .semver.*known: binary, byte"),
    ({"type": "string", "format": "unknown"}, "uses the format 'unknown'"),
    ({"type": "string", "format": {}}, "uses the format"),
    ({"type": "string", "pattern": "a" * 1001}, "more than 1,000 characters"),
    ({"type": "string", "pattern": "(?=a)b"}, "looks ahead or back"),
    ({"type": "string", "pattern": "(?i)b"}, "or sets flags"),
    ({"type": "string", "pattern": r"(a)\1"}, r"uses \\1"),
    ({"type": "string", "pattern": r"\bx"}, r"uses \\b"),
    ({"type": "string", "pattern": r"a^b"}, "cannot be enforced: lookarounds"),
    ({"type": "string", "pattern": "[b-a]"}, "cannot be enforced"),
    ({"properties": {"a": {"type": "string", "pattern": "(a"}}}, r"cannot be enforced: .*\(at /properties/a\)"),
    ({"enum": []}, "allows no value"),
    ({"enum": ["a"], "type": "integer"}, "cannot be enforced"),
    ({"const": "\x7f"}, "control character"),
    ({"const": float("nan")}, "is not JSON"),
    ({"properties": {"\ud800": {}}}, "half of a UTF-16 surrogate pair"),
    ({"type": "object", "minProperties": 2}, "uses 'minProperties'"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "requires 'a', which it does not allow"),
    ({"properties": []}, "needs an object for 'properties'"),
    ({"required": 3}, "needs a list of names for 'required'"),
    ({"patternProperties": {"^a": {}, "a$": {}}}, "not disjoint"),
    ({"propertyNames": {"not": {}}}, "uses 'propertyNames'"),
    ({"$ref": "http://x/y"}, "only #/... is supported"),
    ({"$ref": "#/nope"}, "refers to '#/nope', which is not there"),
    ({"anyOf": []}, "needs a list of schemas"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "could fit two of"),
    ({"oneOf": [_KIND_A, _KIND_A]}, "could fit two of"),
    ({"oneOf": [{"enum": [1, "a"]}, {"const": 1.0}]}, "could fit two of"),
    ({"oneOf": [{"type": "object", "additionalProperties": True}, _KIND_B]}, "could fit two of"),
]
