"""Translates JSON schemas to llguidance grammars: each keyword is enforced, or the schema is refused with the place.

llguidance enforces most of JSON Schema, and refuses what it lacks. This module refuses what it ignores, as unknown
keywords; rewrites what clients send and it lacks, as `nullable`, `propertyNames` and `oneOf` of references; and closes
objects: they have no members that the schema does not describe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from notes_cli.errors import GrammarError
from notes_cli.guidance import HEAD, Grammar, check_grammar, problem_of

Schema = Any  # JSON: an object, true or false

MAX_DEPTH = 50  # nested schemas
MAX_LEVELS = 500  # of all definitions together: llguidance recurses through them, some 1,500 on a stack of 8 MB
MAX_BYTES = 4 << 20  # as JSON
MAX_STEPS = 50_000  # schemas, values and names: some 300 ms of work
MAX_SEARCH = 300  # schemas among which the refused one is searched for
MAX_TRIES = 8  # to drop subschemas of a tool that is not strict, one at a time
EXACT = 2**53  # llguidance has constants as floating point, exact for integers up to here
PLACE = 200  # last characters of a place to show
OPTIONS = {  # JSON as llguidance writes it: between tokens a blank, or a line break and indentation; no \u0061 for a
    "whitespace_pattern": " |\n( {0,12}|\t{0,4})",
    "json_allowed_escapes": 'nrbtf\\"',
}
ANNOTATIONS = {  # restrict nothing; $schema would select a draft, in which llguidance ignores the keywords of others
    *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "externalDocs", "xml"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}
COMBINED = {"allOf", "anyOf", "oneOf", "$ref"}
MEMBERS = {"properties", "required", "patternProperties"}
OF_TYPE = {  # keywords that restrict values of one type
    "object": {*MEMBERS, "additionalProperties", "propertyNames", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
GENERAL = {"type", "enum", "const", *COMBINED}
KNOWN = GENERAL.union({"nullable"}, *OF_TYPE.values())
NATIVE = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")  # llguidance's
PATTERNS = {  # of formats that it lacks; and its dates have February 29 in all years
    "date": r"^(?:[0-9]{4}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)",
    "uri-reference": r"^/?(?:[\w.~-]+(?:/[\w.~-]+)*/?)?(?:\?[\w.~=&-]*)?(?:#[\w.~-]*)?$",
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
RANGES = {"int32": 2**31 - 1, "int64": EXACT, "uint32": 2**32 - 1, "uint64": EXACT}  # highest integers of formats
FREE = {"password", "binary", "float", "double"}  # formats that restrict nothing
FORMATS = sorted({*NATIVE, *PATTERNS, *RANGES, *FREE})
CLASS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.S)  # a class of characters in a pattern, or an escape
IN_CLASS = re.compile(r"\\.|[\[&~]|(?<=-)-", re.S)


def schema_grammar(schema: Schema) -> Grammar:
    """Return the grammar of JSON texts that are valid by a parsed schema. Raises GrammarError for an invalid schema,
    and for one that cannot be enforced."""
    return Grammar(_grammar(*_Reader(schema).read()))


def calls_grammar(parameters: Mapping[str, Any], strict: Collection[str] = ()) -> Grammar:
    """Return the grammar of a tool call as JSON, `{"name": ..., "arguments": {...}}`. `parameters`: schemas by tool.

    A tool without parameters is called with `{}`. For tools in `strict` all keywords are enforced, else GrammarError is
    raised with the tool and the place in its schema. For others the enforceable keywords are; the model has the rest in
    the definition.
    """
    calls: list[Schema] = []
    definitions: dict[str, Schema] = {}
    for name, schema in parameters.items():
        arguments, more = _arguments(name, _parameters(schema), f"{len(calls)}.", strict=name in strict)
        definitions.update(more)
        members = {"name": {"type": "string", "const": name}, "arguments": arguments}
        calls.append({"type": "object", "properties": members, "required": [*members], "additionalProperties": False})
    return check_grammar(_grammar(calls[0] if len(calls) == 1 else {"anyOf": calls}, definitions))


def read_schema(text: str) -> Any:
    """Parse the text of a schema. Raises GrammarError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error


def _grammar(schema: Schema, definitions: Mapping[str, Schema]) -> str:
    whole = {
        "x-guidance": OPTIONS,
        "$defs": definitions,
        **(schema if isinstance(schema, dict) else {"allOf": [schema]}),
    }
    return f"{HEAD}start: %json {json.dumps(whole)}"


def _arguments(name: str, schema: Schema, prefix: str, *, strict: bool) -> tuple[Schema, dict[str, Schema]]:
    """Rewrite the schema of a tool's arguments; if not strict, as much of it as can be enforced. Returns it with its
    definitions, whose names begin with `prefix`."""
    free: list[str] = []  # places that llguidance cannot enforce
    for _ in range(MAX_TRIES):
        try:
            return _Reader(schema, prefix, free=None if strict else free).read()
        except _Wrong as error:
            if strict or not error.at:
                remedy = 'Without "strict" its arguments are held to the rest of its schema' if error.at else None
                raise GrammarError(f"the tool {name}: {error.what}", remedy) from error
            free.append(error.at)
    return {"type": "object"}, {}


def _parameters(parameters: Any) -> Schema:
    """Return the schema of a tool's arguments, which is `{}` for a tool without any, as the model would invent some."""
    if not isinstance(parameters, dict) or not {
        key for key, value in parameters.items() if value or key == "additionalProperties"
    } - ANNOTATIONS - {"type"}:
        return {"type": "object", "additionalProperties": False}
    return {**parameters, "type": "object"}


class _Wrong(GrammarError):
    """A schema that cannot be enforced, because of the one at `at`; empty: it is too large."""

    def __init__(self, at: str, problem: str) -> None:
        super().__init__(f"the JSON schema {problem}" + (f" (at {at})" if at else ""))
        self.at = at


class _Reader:
    """Rewrites a schema for llguidance."""

    def __init__(self, schema: Schema, prefix: str = "", *, free: Sequence[str] | None = None) -> None:
        """`prefix`: of the names of definitions. `free`: places where only the type is kept, and not even that if
        they are there twice; with it, keywords that cannot be enforced are dropped, without it (None) refused."""
        self._schema = schema
        if isinstance(schema, dict) and "schema" in schema and {*schema} <= {"name", "strict", "schema", "description"}:
            self._schema = schema["schema"]  # as in OpenAI's response_format
        self._prefix, self._loose, self._free = prefix, free is not None, free or ()
        self._definitions: dict[str, Schema] = {}
        self._defined: dict[tuple[str, bool], str] = {}  # names of definitions, by $ref and open_
        self._visited: list[tuple[str, Schema]] = []  # places and their rewritten schemas, inner ones first
        self._steps = self._levels = 0
        self._deepest = 0  # depth of the current definition

    def read(self) -> tuple[Schema, dict[str, Schema]]:
        """Return the rewritten schema and its definitions. Raises GrammarError if llguidance cannot use them."""
        try:
            text = json.dumps(self._schema, ensure_ascii=False, allow_nan=False).encode()
            if len(text) > MAX_BYTES:
                raise _Wrong("", f"is too large: it has {len(text):,} bytes, more than {MAX_BYTES:,}")
            rewritten = self._visit(self._schema, "/", 0)
        except RecursionError:
            raise _Wrong("", "is nested too deeply") from None
        except ValueError as error:  # half of a surrogate pair, NaN
            raise _Wrong("", f"is not JSON: {error}") from None
        if problem := problem_of(_grammar(rewritten, self._definitions)):
            for at, schema in self._visited if len(self._visited) < MAX_SEARCH else ():
                if smaller := problem_of(_grammar(schema, self._definitions)):
                    raise _Wrong(at, f"cannot be enforced: {smaller}")
            raise _Wrong("/", f"cannot be enforced: {problem}")
        return rewritten, self._definitions

    def _spend(self, steps: int) -> None:
        """Count work on an untrusted schema. Raises GrammarError beyond the limit."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _Wrong("", f"is too large: it has more than {MAX_STEPS:,} schemas, values and names")

    def _refuse(self, schema: dict[str, Any], keyword: str, at: str, problem: str) -> None:
        """Raise GrammarError; if the reader is loose, drop the keyword instead."""
        if not self._loose:
            raise _Wrong(at, problem)
        schema.pop(keyword, None)

    def _visit(self, schema: Schema, at: str, depth: int, *, open_: bool = False) -> Schema:
        """Rewrite the schema at `at`. `open_`: objects may have undescribed members, as other schemas describe them."""
        self._spend(1)
        self._deepest = max(self._deepest, depth)
        if depth > MAX_DEPTH:
            raise _Wrong(at, f"is nested more than {MAX_DEPTH} levels deep")
        if schema == {"not": {}}:  # as zod writes that there is no value
            return False
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._visited.append((at, schema))
            return self._loose or schema
        kept = self._keywords(schema, at)
        own, combined = MEMBERS & {*kept}, COMBINED & {*kept}
        inner = open_ or bool(combined and (own or len(combined) > 1 or len(_list(kept.get("allOf"))) > 1))

        def visit(part: Schema, *place: object, is_open: bool = False) -> Schema:
            inside = "/".join([at.rstrip("/"), *map(str, place)])[-PLACE:]
            return self._visit(part, inside, depth + 1, open_=is_open)

        result: dict[str, Any] = {}
        more: list[Schema] = []  # further schemas that all hold
        for key, value in kept.items():
            if key in ("properties", "patternProperties") and isinstance(value, dict):
                result[key] = {name: visit(part, key, name) for name, part in value.items()}
            elif key in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
                parts = [visit(part, key, n, is_open=inner and key in COMBINED) for n, part in enumerate(value)]
                if key != "oneOf":
                    result[key] = parts
                elif self._loose or self._disjoint(value, open_=inner):
                    more.append({"anyOf": parts})
                else:
                    raise _Wrong(at, "uses 'oneOf' with alternatives that a value could fit two of: write 'anyOf'")
            elif key in ("items", "additionalProperties"):
                result[key] = visit(value, key)
            elif key == "$ref":
                result[key] = self._reference(value, inner)
            elif key == "format" and value in PATTERNS:
                more.append({"pattern": PATTERNS[value]})
                result |= {key: value} if value in NATIVE else {}
            else:
                result[key] = value
        if "additionalProperties" not in kept and not open_ and (own or inner):
            names = self._members(kept, set()) if inner else _names(kept)
            if (names or (own and names is not None)) and isinstance(result.get("properties", {}), dict):
                result["properties"] = dict.fromkeys(names, True) | result.get("properties", {})
                result["additionalProperties"] = False
        if more:
            result["allOf"] = [*result.get("allOf", ()), *more]
        self._visited.append((at, result or True))
        return result or True

    # Keywords.

    def _keywords(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the keywords that restrict values, as llguidance has them. Raises GrammarError for others."""
        kept: dict[str, Any] = {}
        self._spend(len(_list(schema.get("required"))) ** 2 // 1000)  # the time that llguidance takes for it
        for key, value in schema.items():
            self._spend(len(value) if isinstance(value, (dict, list)) else 0)
            if key in ANNOTATIONS or key.startswith("x-") or (key == "uniqueItems" and value is False):
                continue
            if at in self._free and (key != "type" or self._free.count(at) > 1):
                continue
            kept[key] = value
            if key not in KNOWN:
                self._refuse(kept, key, at, f"uses {key[:80]!r}, which is not supported")
        if kept.pop("nullable", None) is True and "type" in kept:  # OpenAPI's
            kept["type"] = [*dict.fromkeys([*_list(kept["type"]), "null"])]
            kept |= {"enum": [*_list(kept["enum"]), None]} if "enum" in kept else {}
        if kept and not GENERAL & {*kept}:  # the types that they apply to
            kept["type"] = [kind for kind, keywords in OF_TYPE.items() if keywords & {*kept}]
        for key in ("enum", "const"):
            if _inexact(kept.get(key)):
                self._refuse(kept, key, at, f"has a whole number beyond {EXACT:,} for {key!r}, which is not supported")
        if "$ref" in kept and self._target(kept["$ref"]) is None:
            self._refuse(kept, "$ref", at, f"refers to {str(kept['$ref'])[:80]!r}, which is no place in it (#/...)")
        self._adapt_objects(kept, at)
        self._adapt_arrays(kept)
        self._adapt_numbers(kept, at)
        name = kept.get("format", "password")
        if name not in FORMATS:
            problem = f"uses the format {str(name)[:80]!r}, which is not supported (known: {', '.join(FORMATS)})"
            self._refuse(kept, "format", at, problem)
        elif name in FREE or name in RANGES:
            kept.pop("format", None)
        if isinstance(kept.get("pattern"), str):
            kept["pattern"] = _escaped(kept["pattern"])
        return kept

    def _adapt_objects(self, kept: dict[str, Any], at: str) -> None:
        """Express `propertyNames` by keywords of members, and check others."""
        rule = self._followed(kept.pop("propertyNames", {}))
        wanted = {*rule} - ANNOTATIONS - {"type"} if isinstance(rule, dict) else {""}
        if wanted in ({"enum"}, {"pattern"}) and not {"properties", "patternProperties"} & {*kept}:
            (key,) = wanted
            members = dict.fromkeys(_texts(rule[key]), kept.get("additionalProperties", True))
            kept |= {"properties" if key == "enum" else "patternProperties": members, "additionalProperties": False}
        elif wanted and rule is not True:
            problem = "uses 'propertyNames' with more than a pattern or values, which is not supported"
            self._refuse(kept, "propertyNames", at, problem)
        if isinstance(kept.get("patternProperties"), dict):
            kept["patternProperties"] = {_escaped(key): value for key, value in kept["patternProperties"].items()}
            self._spend(len(kept["patternProperties"]) ** 2)
        least = kept.get("minProperties", 0)
        if isinstance(least, int) and least > max(1, len(_list(kept.get("required")))):
            problem = "uses 'minProperties' above 1, which is not supported: the same name could come twice"
            self._refuse(kept, "minProperties", at, problem)

    def _adapt_arrays(self, kept: dict[str, Any]) -> None:
        """Convert lists of `items`, of drafts before 2020, and end arrays after the described items."""
        if isinstance(kept.get("items"), list):
            kept["prefixItems"] = kept.pop("items")
            kept |= {"items": kept["additionalItems"]} if "additionalItems" in kept else {}
        kept.pop("additionalItems", None)  # without effect otherwise
        count, least = len(_list(kept.get("prefixItems"))), kept.get("minItems", 0)
        if count and isinstance(least, int) and least <= count:
            kept.setdefault("items", False)

    def _adapt_numbers(self, kept: dict[str, Any], at: str) -> None:
        """Limit integers to exact ones, and refuse bounds that llguidance has wrong: 0 as a number above 0, below 1."""
        types, form = _list(kept.get("type")), str(kept.get("format"))
        if "integer" in types and "number" not in types:
            high = RANGES.get(form, EXACT)
            kept["minimum"] = _limited(max, kept.get("minimum"), 0 if form.startswith("u") else -high)
            kept["maximum"] = _limited(min, kept.get("maximum"), high)
            return
        bounds: list[Any] = [kept.get(f"exclusive{end}", kept.get(end.lower())) for end in ("Minimum", "Maximum")]
        whole = any(_is_whole(kept.get(key)) for key in ("exclusiveMinimum", "exclusiveMaximum"))
        if whole and all(isinstance(bound, (int, float)) for bound in bounds) and bounds[1] - bounds[0] < 1:
            problem = "has bounds less than 1 apart, one of them a whole number and exclusive, which is not supported"
            self._refuse(kept, "exclusiveMinimum", at, problem)

    # References.

    def _reference(self, ref: str, open_: bool) -> str:
        """Return a reference to the rewritten definition."""
        name = self._defined.get((ref, open_))
        if name is None:
            name = self._defined[ref, open_] = f"{self._prefix}{len(self._defined)}"
            self._definitions[name] = True  # reserved, as it may refer to itself
            before, self._deepest = self._deepest, 0
            self._definitions[name] = self._visit(self._target(ref), ref.lstrip("#") or "/", 0, open_=open_)
            self._levels += 1 + self._deepest
            self._deepest = before
            if self._levels > MAX_LEVELS:
                raise _Wrong("", f"has definitions of more than {MAX_LEVELS} levels together")
        return f"#/$defs/{name}"

    def _target(self, ref: Any) -> Schema | None:
        """Return the schema that a reference refers to; None if it is not in the whole schema."""
        target = self._schema
        base = target.get("$id") if isinstance(target, dict) else None
        local = ref.removeprefix(base) if isinstance(ref, str) and isinstance(base, str) else ref
        if not isinstance(local, str) or not (local == "#" or local.startswith("#/")):
            return None
        self._spend(1 + local.count("/"))
        for part in local.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and len(key) < 7 and int(key) < len(target):
                target = target[int(key)]
            else:
                target = target.get(key) if isinstance(target, dict) else None
        return target

    def _followed(self, schema: Schema) -> Schema:
        """Return the schema that one refers to, if it does nothing else."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or {*schema} - ANNOTATIONS != {"$ref"}:
                break
            schema = self._target(schema["$ref"])
        return schema

    def _members(self, schema: Schema, seen: set[int]) -> list[str] | None:
        """Return the names of all members that a schema describes; None if it allows other names."""
        self._spend(1)
        if not isinstance(schema, dict) or id(schema) in seen:
            return []
        seen.add(id(schema))
        if schema.get("additionalProperties", False) is not False or "patternProperties" in schema:
            return None
        names = _names(schema)
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(key))]
        for part in [*parts, *([self._target(schema["$ref"])] if "$ref" in schema else [])]:
            if (more := self._members(part, seen)) is None:
                return None
            names += more
        self._spend(len(names))
        return names

    def _disjoint(self, parts: list[Schema], *, open_: bool) -> bool:
        """Return True if llguidance finds that no value fits two of these schemas, by type, values and members."""
        self._spend(len(parts) ** 2 // 10)
        return not problem_of(_grammar({"oneOf": [self._head(part, open_=open_) for part in parts]}, {}))

    def _head(self, schema: Schema, *, open_: bool) -> Schema:
        """Return a schema without references for all values of this one, and others."""

        def outline(schema: Schema, *keys: str) -> dict[str, Any]:
            schema = self._followed(schema)
            known = isinstance(schema, dict) and "nullable" not in schema
            return {key: schema[key] for key in keys if key in schema} if known else {}

        head = outline(schema, "type", "enum", "const", "required", "properties", "additionalProperties")
        if isinstance(properties := head.get("properties"), dict):
            members = {name: outline(part, "type", "enum", "const") for name, part in properties.items()}
            head["properties"] = dict.fromkeys(_names(head), True) | members
            closed = (
                not open_
                and not head.get("additionalProperties")
                and not outline(schema, *COMBINED, "patternProperties")
            )
            head["additionalProperties"] = not closed
        else:
            head.pop("additionalProperties", None)
        return head


def _escaped(pattern: str) -> str:
    """Return a pattern with escapes before characters in classes that have a meaning in Rust only, as in [^a&&b]."""

    def escape(part: re.Match[str]) -> str:
        return part[0] if len(part[0]) > 1 else f"\\{part[0]}"

    return CLASS.sub(lambda part: part[0] if part[0][0] == "\\" else "[" + IN_CLASS.sub(escape, part[0][1:]), pattern)


def _limited(limit: Callable[[float, float], float], value: Any, bound: float) -> Any:
    """Return a bound of a schema within ours; one that is no number stays, and is refused."""
    return bound if value is None else limit(value, bound) if isinstance(value, (int, float)) else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and value % 1 == 0


def _inexact(value: Any) -> bool:
    """Return True for an integer that llguidance changes, or a list or object with one."""
    if isinstance(value, (list, dict)):
        return any(map(_inexact, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > EXACT


def _names(schema: Mapping[str, Any]) -> list[str]:
    """Return the names under `properties` and `required`."""
    properties = schema.get("properties")
    return [*dict.fromkeys([*(properties if isinstance(properties, dict) else ()), *_texts(schema.get("required"))])]


def _list(value: Any) -> list[Any]:
    """Return a list; a text as the only item of one, anything else as an empty one."""
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _texts(value: Any) -> list[str]:
    return [item for item in _list(value) if isinstance(item, str)]
