"""Translates JSON schemas to llguidance grammars: enforces each keyword, or refuses the schema by keyword and place.

llguidance accepts keywords of other drafts and unknown ones without enforcing them, and differs from JSON Schema in
some (patterns, large numbers, February). So schemas are rewritten: keywords without effect are dropped, missing ones
expressed by others where possible, and objects have no undescribed members.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from notes_cli.errors import GrammarError
from notes_cli.guidance import HEAD, Grammar, check_grammar, problem_of

Schema = Any  # JSON: an object, true or false
Rule = Callable[[Any, dict[str, Any], str], None]  # method of a reader: rewrites a keyword in a copy of the schema

MAX_DEPTH = 50  # nested schemas
MAX_LEVELS = 256  # of definitions with references: llguidance recurses through them, 1,000 on a stack of 8 MB
MAX_STEPS = 50_000  # schemas, values and names: some 300 ms of work
MAX_SEARCH = 300  # steps of a schema in which the refused subschema is searched for
MAX_TRIES = 8  # to drop subschemas of a tool that is not strict, one at a time
MAX_PATTERN = 1000  # characters
MAX_PATTERNS = 16  # patternProperties of an object, each compared with each other
MAX_MULTIPLE = 10_000  # of multipleOf
EXACT = 2**53  # llguidance has bounds as floating point, exact for integers up to here
PLACE = 200  # last characters of a place to show
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
OPTIONS = {  # JSON as llguidance writes it: between tokens a blank, or a line break and indentation; no \u0061 for a
    "whitespace_pattern": " |\n( {0,12}|\t{0,4})",
    "json_allowed_escapes": 'nrbtf\\"',
}

_NO_EFFECT = (
    "$schema $id id $anchor $comment $defs definitions title description default example examples deprecated readOnly "
    "writeOnly discriminator externalDocs xml contentEncoding contentMediaType contentSchema"
)
_ANNOTATIONS = frozenset(_NO_EFFECT.split())
_KEYWORDS = {
    "object": "properties required additionalProperties patternProperties propertyNames minProperties maxProperties",
    "array": "items prefixItems additionalItems minItems maxItems uniqueItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_OF_TYPE = {kind: frozenset(keywords.split()) for kind, keywords in _KEYWORDS.items()}
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
_GENERAL = {"type", "enum", "const", "not", "nullable", *_COMBINED}
_KNOWN = _GENERAL.union(*_OF_TYPE.values())
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_DAYS = r"(?:0[1-9]|1[0-9]|2[0-8])"  # in all months
_DATE = rf"[1-9][0-9]{{3}}-(?:(?:0[1-9]|1[0-2])-{_DAYS}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_HOUR = r"(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_UNRESERVED = r"[A-Za-z0-9._~-]"
_FORMATS = {  # as patterns, where llguidance lacks the format or accepts invalid dates
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uri-reference": rf"/?(?:{_UNRESERVED}+(?:/{_UNRESERVED}+)*/?)?(?:\?[A-Za-z0-9._~=&-]*)?(?:#{_UNRESERVED}*)?",
    "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
    "byte": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
_NATIVE_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # enforced by llguidance
_LIKE = {"iri": "uri", "iri-reference": "uri-reference", "idn-email": "email", "idn-hostname": "hostname"}
_WIDTHS = {"int32": 2**31 - 1, "int64": EXACT}  # of OpenAPI
_FREE_FORMATS = {"password", "binary", "float", "double"}  # restrict nothing
FORMATS = sorted({*_FORMATS, *_NATIVE_FORMATS, *_LIKE, *_WIDTHS, *_FREE_FORMATS})

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def schema_grammar(schema: Schema) -> Grammar:
    """Return the grammar of JSON texts that are valid by a parsed schema. Raises GrammarError for an invalid schema,
    and for one that cannot be enforced."""
    definitions: dict[str, Schema] = {}
    reader = _Reader(schema, definitions)
    return _check(reader, reader.root())


def calls_grammar(parameters: Mapping[str, Any], strict: Collection[str] = ()) -> Grammar:
    """Return the grammar of a tool call as JSON, `{"name": ..., "arguments": {...}}`. `parameters`: schemas by tool.

    A tool without parameters is called with `{}`. For tools in `strict` all keywords are enforced, else GrammarError is
    raised with the tool and the place in its schema. For others the enforceable keywords are; the model has the rest in
    the definition.
    """
    definitions: dict[str, Schema] = {}
    calls = []
    for name, schema in parameters.items():
        arguments = _arguments(name, _parameters(schema), definitions, strict=name in strict)
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
    whole = {"x-guidance": OPTIONS, "$defs": definitions, **(schema if isinstance(schema, dict) else {})}
    return f"{HEAD}start: %json {json.dumps(whole)}"


def _check(reader: _Reader, schema: Schema) -> Grammar:
    """Return the grammar of a rewritten schema. Raises GrammarError if llguidance cannot use it."""
    grammar = _grammar(schema, reader.definitions)
    if problem := problem_of(grammar):
        raise _wrong(reader.failing(), f"cannot be enforced: {problem}")
    return Grammar(grammar)


def _arguments(name: str, schema: Schema, definitions: dict[str, Schema], *, strict: bool) -> Schema:
    """Rewrite the schema of a tool's arguments; if not strict, as much of it as can be enforced."""
    free: set[str] = set()  # places that llguidance cannot enforce
    for _ in range(MAX_TRIES):
        reader = _Reader(schema, dict(definitions), loose=not strict, free=free)
        try:
            rewritten = reader.root()
            _check(reader, rewritten)
        except _TooLarge as error:
            raise GrammarError(f"the tool {name}: {error.what}") from error
        except GrammarError as error:
            if strict:
                remedy = 'Without "strict" its arguments are held to the rest of its schema'
                raise GrammarError(f"the tool {name}: {error.what}", remedy) from error
            free.add(reader.failing())
            continue
        if isinstance(rewritten, dict):
            definitions.update(reader.definitions)
            return rewritten
    return ANY_OBJECT


def _parameters(parameters: Any) -> Schema:
    """Return the schema of a tool's arguments, which is `{}` for a tool without any, as the model would invent some."""
    no_arguments = {"type": "object", "additionalProperties": False}
    if not isinstance(parameters, dict):
        return no_arguments
    keywords = {key for key, value in parameters.items() if value or key == "additionalProperties"}
    if not keywords - _ANNOTATIONS - {"type"}:
        return no_arguments
    return {**parameters, "type": "object"}


class _TooLarge(GrammarError):
    """A schema that takes more work than allowed."""


class _Reader:
    """Rewrites a schema for llguidance."""

    def __init__(
        self, schema: Schema, definitions: dict[str, Schema], *, loose: bool = False, free: Collection[str] = ()
    ) -> None:
        """`definitions` receives those that the schema refers to. `loose`: drop keywords that cannot be enforced, and
        all except the type at the places in `free`."""
        wrapper = (
            isinstance(schema, dict) and "schema" in schema and {*schema} <= {"name", "strict", "schema", "description"}
        )
        self._schema = schema["schema"] if wrapper else schema
        self.definitions = definitions
        self._loose, self._free = loose, free
        self._referred: dict[tuple[str, bool], str] = {}  # names of definitions, by $ref and open_
        self._visited: list[tuple[str, Schema]] = []  # places and their rewritten schemas
        self._steps = self._levels = 0
        self._deepest = 0  # depth of the current definition
        self._refers = False  # True if it refers to others

    def root(self) -> Schema:
        """Rewrite the whole schema."""
        try:
            rewritten = self._visit(self._schema, "", 0)
            json.dumps(rewritten).encode()
        except RecursionError:
            raise _TooLarge(f"{_START} is nested too deeply") from None
        if rewritten is False:
            raise _wrong("", "allows no value")
        return rewritten

    def failing(self) -> str:
        """Return the place of the smallest subschema that llguidance refuses; the root of a large schema."""
        if self._steps < MAX_SEARCH:
            for at, schema in self._visited:
                if problem_of(_grammar(schema, self.definitions)):
                    return at
        return ""

    def _refuse(self, at: str, problem: str) -> None:
        """Raise GrammarError, unless the reader is loose."""
        if not self._loose:
            raise _wrong(at, problem)

    def _spend(self, steps: int) -> None:
        """Count work on an untrusted schema. Raises GrammarError beyond the limit."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _TooLarge(f"{_START} is too large: it has more than {MAX_STEPS:,} schemas, values and names")

    def _visit(self, schema: Schema, at: str, depth: int, *, open_: bool = False) -> Schema:
        """Rewrite the schema at `at`. `open_`: objects may have undescribed members, as other schemas describe them."""
        at = at[-PLACE:]
        self._spend(1)
        self._deepest = max(self._deepest, depth)
        if depth > MAX_DEPTH:
            raise _wrong(at, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(at, "is neither an object nor true or false")
            return True
        kept = {key: value for key, value in schema.items() if self._matters(key, at)}
        for keyword, rule in _RULES:
            if keyword in kept:
                try:
                    rule(self, kept, at)
                except _TooLarge:
                    raise
                except GrammarError:
                    if not self._loose:
                        raise
                    kept.pop(keyword, None)
        if kept:
            self._type(kept, at)
        if not kept:
            return True
        rewritten = self._parts(kept, at, depth, open_)
        self._visited.append((at, rewritten))
        return rewritten

    def _matters(self, keyword: str, at: str) -> bool:
        """Return True if a keyword restricts values. Raises GrammarError for an unknown one."""
        if keyword in _ANNOTATIONS or keyword.startswith("x-") or (at in self._free and keyword != "type"):
            return False
        if keyword not in _KNOWN:
            self._refuse(at, f"uses {keyword[:80]!r}, which is not supported")
        return keyword in _KNOWN

    def _type(self, schema: dict[str, Any], at: str) -> None:
        """Add the types that the keywords apply to if there is none: otherwise values of other types are valid."""
        if "type" not in schema and not _GENERAL & {*schema}:
            schema["type"] = [kind for kind, keywords in _OF_TYPE.items() if keywords & {*schema}]
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or any(kind not in TYPES for kind in kinds):
            self._refuse(at, f"has the type {schema['type']!r}, which is none")
            del schema["type"]
        elif "integer" in kinds and "number" not in kinds:  # else digits without end
            schema.setdefault("minimum", -EXACT)
            schema.setdefault("maximum", EXACT)

    def _parts(self, schema: dict[str, Any], at: str, depth: int, open_: bool) -> Schema:
        """Rewrite the subschemas, in the order in which llguidance reads members."""
        combined = any(key in schema for key in _COMBINED)
        own = {"properties", "required", "additionalProperties", "patternProperties"} & {*schema}
        closes = not open_ and "additionalProperties" not in schema
        inner = open_ or (combined and bool(own or "allOf" in schema or len({*schema} & {*_COMBINED}) > 1))
        names = self._described(schema) if closes and (own or inner) else None
        if closes and not inner and "patternProperties" in schema:
            names = [*schema.get("properties", {}), *schema.get("required", [])]
        result: dict[str, Any] = {}

        def visit(part: Schema, place: str, *, is_open: bool = False) -> Schema:
            return self._visit(part, f"{at}/{place}", depth + 1, open_=is_open)

        for key, value in schema.items():
            if key in ("properties", "patternProperties"):
                for name in _strings(schema.get("required")):
                    if value.get(name) is False:
                        self._refuse(f"{at}/{key}/{name}", "allows no value")
                members = {name: visit(part, f"{key}/{name}") for name, part in value.items()}
                result[key] = {name: part or self._loose for name, part in members.items()}
            elif key in ("allOf", "anyOf", "oneOf"):
                parts = [visit(part, f"{key}/{number}", is_open=inner) for number, part in enumerate(value)]
                if key == "oneOf" and not self._loose and self._overlap(value, open_=inner):
                    raise _wrong(at, "uses 'oneOf' with alternatives that a value could fit two of: write 'anyOf'")
                if key == "oneOf" and "anyOf" in result:
                    result["allOf"] = [*result.get("allOf", []), {"anyOf": parts}]
                else:
                    result[key if key == "allOf" else "anyOf"] = parts
            elif key == "$ref":
                try:
                    result[key] = self._reference(value, at, inner)
                except GrammarError as error:
                    if not self._loose or isinstance(error, _TooLarge):
                        raise
            elif key in ("items", "additionalProperties"):
                result[key] = visit(value, key)
            elif key == "prefixItems":
                result[key] = [visit(part, f"{key}/{number}") for number, part in enumerate(value)]
            else:
                result[key] = value
        if names:
            result["properties"] = dict.fromkeys(names, True) | result.get("properties", {})
        if names or (own and names is not None):
            result["additionalProperties"] = False
        prefix = result.get("prefixItems")
        if prefix is not None and "items" not in result and result.get("minItems", 0) <= len(prefix):
            result["items"] = False
        return result

    def _described(self, schema: Schema) -> list[str] | None:
        """Return the names of all members; None if a reference cannot be resolved."""
        try:
            return self._names(schema, set())
        except GrammarError:
            if not self._loose:
                raise
            return None

    def _names(self, schema: Schema, seen: set[int]) -> list[str] | None:
        """Return the names of all members that a schema describes; None if it allows any name."""
        self._spend(1)
        if not isinstance(schema, dict) or id(schema) in seen:
            return []
        seen.add(id(schema))
        if schema.get("additionalProperties", False) is not False or "patternProperties" in schema:
            return None
        names = [*schema["properties"]] if isinstance(schema.get("properties"), dict) else []
        if isinstance(schema.get("required"), list):
            names += [name for name in schema["required"] if isinstance(name, str)]
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(key))]
        if "$ref" in schema:
            parts.append(self._resolved(schema["$ref"], ""))
        for part in parts:
            more = self._names(part, seen)
            if more is None:
                return None
            names += more
        self._spend(len(names))
        return [*dict.fromkeys(names)]

    # References.

    def _reference(self, ref: Any, at: str, open_: bool) -> str:
        target = self._resolved(ref, at)
        name = self._referred.get((ref, open_))
        if name is None:
            name = self._referred[ref, open_] = f"d{len(self.definitions)}"
            self.definitions[name] = True  # reserved, as it may refer to itself
            before, self._deepest, self._refers = (self._deepest, self._refers), 0, False
            self.definitions[name] = self._visit(target, str(ref).lstrip("#"), 0, open_=open_)
            if self._refers:
                self._levels += 1 + self._deepest
            self._deepest, self._refers = before
            if self._levels > MAX_LEVELS:
                raise _TooLarge(f"{_START} has definitions that refer to others through more than {MAX_LEVELS} levels")
        self._refers = True
        return f"#/$defs/{name}"

    def _resolved(self, ref: Any, at: str) -> Schema:
        """Return the schema that a reference refers to."""
        base = self._schema.get("$id") if isinstance(self._schema, dict) else None
        local = ref
        if isinstance(ref, str) and isinstance(base, str) and ref.startswith(f"{base}#"):
            local = ref[len(base) :]
        if not isinstance(local, str) or not (local == "#" or local.startswith("#/")):
            raise _wrong(at, f"refers to {str(ref)[:80]!r}: only #/... is supported, a place in this schema")
        target = self._schema
        self._spend(1 + local.count("/"))
        for part in local.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and re.fullmatch("[0-9]{1,6}", key) and int(key) < len(target):
                target = target[int(key)]
            else:
                raise _wrong(at, f"refers to {ref[:80]!r}, which is not there")
        return target

    def _followed(self, schema: Schema) -> Schema:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._resolved(schema["$ref"], "")
        return schema

    # oneOf.

    def _overlap(self, parts: Sequence[Schema], *, open_: bool) -> bool:
        """Return True if a value for one of these schemas might fit another."""
        heads = [self._followed(part) for part in parts]
        self._spend(len(heads) ** 2 // 10)
        if len({id(head) for head in heads}) < len(heads):
            return True
        return not all(self._disjoint(a, b, open_=open_) for a, b in permutations(heads, 2))

    def _disjoint(self, first: Schema, second: Schema, *, open_: bool) -> bool:
        """Return True if no value for the first schema fits the second."""
        if not isinstance(first, dict) or not isinstance(second, dict):
            return False
        values, other_values = _listed(first), _listed(second)
        if values is not None and other_values is not None:
            self._spend((len(values) + len(other_values)) // 10)
            return _keys(values).isdisjoint(_keys(other_values))
        kinds, other_kinds = _kinds(first), _kinds(second)
        if not kinds & other_kinds:
            return True
        if kinds != {"object"} or {*_COMBINED, "patternProperties"} & {*first, *second}:
            return False
        members, other_members = (schema.get("properties", {}) for schema in (first, second))
        required, other_required = (_strings(schema.get("required")) for schema in (first, second))
        if not open_ and not first.get("additionalProperties") and {*other_required} - {*members, *required}:
            return True  # the second needs a member that the first lacks
        tags = [name for name in other_required if name in members and name in other_members and name in required]
        heads = ((self._followed(members[name]), self._followed(other_members[name])) for name in tags)
        return any(self._disjoint(head, other, open_=True) for head, other in heads)

    # Rules of keywords.

    def values(self, schema: dict[str, Any], at: str) -> None:
        keyword = "const" if "const" in schema else "enum"
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise _wrong(at, f"allows no value: 'enum' is {str(values)[:80]}")
        for value in values:
            self._value(value, keyword, at)

    def _value(self, value: Any, keyword: str, at: str) -> None:
        """Raise GrammarError for a value that cannot be enforced as it is."""
        self._spend(1)
        for part in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._value(part, keyword, at)
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(at, f"has a value for {keyword!r} that is not JSON: {value}")
        if isinstance(value, int) and abs(value) > EXACT:
            raise _wrong(at, f"has {value} for {keyword!r}: whole numbers beyond {EXACT:,} are not supported")
        if isinstance(value, str):
            _check_text(value, at)
            if match := re.search(r"[\x00-\x07\x0b\x0e-\x1f\x7f]", value):
                raise _wrong(
                    at, f"has the control character {match[0]!r} in a value for {keyword!r}, which is not supported"
                )

    def lists(self, schema: dict[str, Any], at: str) -> None:
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema and not _list(schema[keyword]):
                raise _wrong(at, f"needs a list of schemas for {keyword!r}")

    def objects(self, schema: dict[str, Any], at: str) -> None:
        for keyword in ("properties", "patternProperties"):
            named = schema.get(keyword, {})
            if not isinstance(named, dict):
                raise _wrong(at, f"needs an object for {keyword!r}")
            for name in named:
                self._spend(len(name) // 100)
                _check_text(name, at)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _wrong(at, "needs a list of names for 'required'")
        for name in required:
            _check_text(name, at)
        self._spend(len(required))
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            for name in required:
                if schema.get("properties", {}).get(name, False) is False:
                    raise _wrong(at, f"requires {name!r}, which it does not allow")

    def patterned(self, schema: dict[str, Any], at: str) -> None:
        if len(schema["patternProperties"]) > MAX_PATTERNS:
            raise _wrong(at, f"has more than {MAX_PATTERNS} 'patternProperties'")
        schema["patternProperties"] = {
            self._pattern(name, at): value for name, value in schema["patternProperties"].items()
        }

    def names(self, schema: dict[str, Any], at: str) -> None:
        """Express `propertyNames` by keywords of members."""
        rule = self._followed(schema.pop("propertyNames"))
        if rule is True or rule == {}:
            return
        listed = _listed(rule)
        used = {*rule} - _ANNOTATIONS - {"type"} if isinstance(rule, dict) else {""}
        supported: list[set[str]] = [{"enum", "const"}, {"pattern"}, {"minLength", "maxLength"}]
        more = schema.get("additionalProperties", True)
        if {"properties", "patternProperties"} & {*schema} or not any(used <= keywords for keywords in supported):
            raise _wrong(at, "uses 'propertyNames' with more than a pattern, lengths or values, which is not supported")
        schema["additionalProperties"] = False
        if listed is not None:
            schema["properties"] = dict.fromkeys(_strings(listed), more)
        elif "pattern" in used:
            schema["patternProperties"] = {rule["pattern"]: more}
        else:
            schema["patternProperties"] = {f"^[^]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$": more}

    def counts(self, schema: dict[str, Any], at: str) -> None:
        """Check numbers of characters, items and members."""
        for keyword in _LENGTHS:
            value = schema.get(keyword, 0)
            if not _is_number(value) or value != int(value) or not 0 <= value < 2**31:
                raise _wrong(at, f"needs a whole number for {keyword!r}, not {str(value)[:80]}")
            if keyword in schema:
                schema[keyword] = int(value)
        for kind in ("Length", "Items", "Properties"):
            least, most = schema.get(f"min{kind}", 0), schema.get(f"max{kind}", math.inf)
            if least > most:
                raise _wrong(at, f"allows no value: 'min{kind}' is {least} and 'max{kind}' is {most}")
        if schema.get("minProperties", 0) > max(1, len(_strings(schema.get("required")))):
            raise _wrong(at, "uses 'minProperties' above 1, which is not supported: the same name could come twice")

    def items(self, schema: dict[str, Any], at: str) -> None:
        """Convert lists of `items`, of drafts before 2020, to `prefixItems`."""
        if isinstance(schema.get("items"), list):
            schema["prefixItems"] = schema.pop("items")
            if "additionalItems" in schema:
                schema["items"] = schema["additionalItems"]
        schema.pop("additionalItems", None)  # without effect otherwise
        if not isinstance(schema.get("prefixItems", []), list):
            raise _wrong(at, "needs a list of schemas for 'prefixItems'")
        if not schema.get("prefixItems", True):
            del schema["prefixItems"]
        if schema.get("items") is False and schema.get("minItems", 0) > len(schema.get("prefixItems", [])):
            raise _wrong(at, f"allows no value: 'minItems' is {schema['minItems']}, and there are fewer")

    def unique(self, schema: dict[str, Any], at: str) -> None:
        if schema.pop("uniqueItems") is not False and schema.get("maxItems", 2) > 1:
            raise _wrong(at, "uses 'uniqueItems', which is not supported")

    def bounds(self, schema: dict[str, Any], at: str) -> None:
        """Check bounds of numbers, and limit those of integers to exact ones."""
        for keyword in _BOUNDS:
            if keyword in schema and not _is_number(schema[keyword]):
                raise _wrong(at, f"needs a number for {keyword!r}, not {str(schema[keyword])[:80]}")
        whole = schema.get("type") == "integer"
        for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
            value = schema.get(keyword, 0)
            if abs(value) <= EXACT:
                continue
            if value * sign > 0 and whole:  # integers are within it
                schema[keyword] = EXACT * sign
            else:
                raise _wrong(at, f"has {value} for {keyword!r}: bounds beyond {EXACT:,} are not supported")

    def multiple(self, schema: dict[str, Any], at: str) -> None:
        value = schema["multipleOf"]
        if not _is_number(value) or value <= 0:
            raise _wrong(at, f"needs a number above 0 for 'multipleOf', not {str(value)[:80]}")
        if not 1e-6 <= value <= MAX_MULTIPLE:
            raise _wrong(at, f"has {value} for 'multipleOf': from 0.000001 to {MAX_MULTIPLE:,} is supported")

    def pattern(self, schema: dict[str, Any], at: str) -> None:
        schema["pattern"] = self._pattern(schema["pattern"], at)

    def _pattern(self, pattern: Any, at: str) -> str:
        """Translate an ECMAScript regular expression for llguidance."""
        if not isinstance(pattern, str):
            raise _wrong(at, "needs a text for 'pattern'")
        if len(pattern) > MAX_PATTERN:
            raise _wrong(at, f"has a pattern of more than {MAX_PATTERN:,} characters")
        _check_text(pattern, at)
        try:
            return _in_rust(pattern)
        except ValueError as error:
            looks = "looks ahead or back, or sets flags" if str(error) == "(?" else f"uses {error}"
            raise _wrong(at, f"has the pattern {pattern[:80]!r}, which {looks}: that is not supported") from None

    def format(self, schema: dict[str, Any], at: str) -> None:
        name = schema["format"]
        name = _LIKE.get(name, name) if isinstance(name, str) else name
        if name not in FORMATS:
            problem = f"uses the format {str(name)[:80]!r}, which is not supported (known: {', '.join(FORMATS)})"
            raise _wrong(at, problem)
        if name in _NATIVE_FORMATS:
            schema["format"] = name
            return
        del schema["format"]
        if name in _FORMATS:
            pattern = f"^(?:{_FORMATS[name]})$"
            if "pattern" in schema:
                schema["allOf"] = [*_list(schema.get("allOf")), {"pattern": pattern, "type": "string"}]
            else:
                schema["pattern"] = pattern
        elif name in _WIDTHS and _kinds(schema) <= {"integer", "number"}:
            schema["maximum"] = min(schema.get("maximum", EXACT), _WIDTHS[name])
            schema["minimum"] = max(schema.get("minimum", -EXACT), -_WIDTHS[name])

    def excluded(self, schema: dict[str, Any], at: str) -> None:
        """Convert `not` of types to the other types."""
        negated = schema.pop("not")
        only_types = isinstance(negated, dict) and {*negated} <= {*_ANNOTATIONS, "type"}
        types = [*_list(negated.get("type"), str)] if only_types else []
        if not types or "integer" in types:
            raise _wrong(at, "uses 'not', which is not supported but for types")
        types += ["integer"] * ("number" in types)
        allowed = [kind for kind in _list(schema.get("type"), str) or set(TYPES) - {"integer"} if kind not in types]
        if not allowed:
            raise _wrong(at, "allows no value")
        schema["type"] = [kind for kind in TYPES if kind in allowed]

    def nullable(self, schema: dict[str, Any], at: str) -> None:
        """Convert OpenAPI's `nullable` to the type null."""
        if schema.pop("nullable") is True and "type" in schema:
            schema["type"] = [*dict.fromkeys([*_list(schema["type"], str), "null"])]
            if None not in schema.get("enum", [None]):
                schema["enum"] = [*schema["enum"], None]


_RULES: Sequence[tuple[str, Rule]] = [  # in this order
    (keyword, rule)
    for keywords, rule in (
        ("allOf anyOf oneOf", _Reader.lists),
        ("const enum", _Reader.values),
        ("not", _Reader.excluded),
        ("nullable", _Reader.nullable),
        ("required properties patternProperties", _Reader.objects),
        ("propertyNames", _Reader.names),
        ("patternProperties", _Reader.patterned),
        ("minLength maxLength minItems maxItems minProperties maxProperties", _Reader.counts),
        ("items prefixItems additionalItems", _Reader.items),
        ("uniqueItems", _Reader.unique),
        ("minimum exclusiveMinimum maximum exclusiveMaximum", _Reader.bounds),
        ("multipleOf", _Reader.multiple),
        ("pattern", _Reader.pattern),
        ("format", _Reader.format),
    )
    for keyword in keywords.split()
]

_PARTS = re.compile(  # of a regular expression
    r"\\u\{([0-9A-Fa-f]{1,6})\}|\\u([0-9A-Fa-f]{4})|\\x([0-9A-Fa-f]{2})|\\(.)?|\(\?(?!:|<[A-Za-z_])|\[\^?\]?|--|.", re.S
)
_CLASSES = {  # characters of a class in all dialects, and in some
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"\p{L}\p{M}\p{N}\p{Pc}"),
    "s": (r" \t-\r", r"\t-\r\x1C-\x1F\x{85}\x{FEFF}\p{Z}"),
}
_START = "the JSON schema"


def _in_rust(pattern: str) -> str:
    """Translate an ECMAScript regular expression to the syntax of Rust, which llguidance reads. Raises ValueError with
    a part that has no equivalent; llguidance refuses others."""
    parts: list[str] = []
    inside = ""  # opening of the current class
    for match in _PARTS.finditer(pattern):
        part, code, letter = match[0], match[1] or match[2] or match[3], match[4]
        if code:
            part = f"\\x{{{code}}}"
        elif letter is not None and letter.lower() in _CLASSES:
            excluded = letter.isupper()
            characters = _CLASSES[letter.lower()][excluded != (inside == "[^")]
            part = f"[^{characters}]" if excluded else characters if inside else f"[{characters}]"
        elif part[0] == "\\":
            if letter is None or (letter.isalnum() and letter not in "tnrfvpP" and not (letter == "b" and inside)):
                raise ValueError(part)
            if not letter.isalnum() or letter == "b":
                part = f"\\x{{{8 if letter == 'b' else ord(letter):X}}}"
        elif part.startswith("(?") or part == "[]" or (inside and part == "--"):
            raise ValueError(part)
        elif inside:
            inside = "" if part == "]" else inside
            part = "".join(f"\\x{{{ord(char):X}}}" if char in "[&~" else char for char in part)
        elif part in ("[", "[^"):
            inside = part
        elif part in (".", "[^]"):
            part = r"(?s:.)" if part == "[^]" else r"[^\n\r\x{2028}\x{2029}]"
        parts.append(part)
    return "".join(parts)


def _listed(schema: Schema) -> list[Any] | None:
    """Return the values that a schema enumerates; None if it does not."""
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema["enum"] if _list(schema.get("enum")) else None


def _keys(values: Iterable[Any]) -> set[Any]:
    """Return JSON values as comparable keys: true is not 1, and 1.0 is."""
    return {value if _is_number(value) else json.dumps(value, sort_keys=True) for value in values}


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the possible types of the values of a schema, integers among the numbers."""
    kinds: Iterable[Any] = _list(schema.get("type"), str)
    if not kinds and (listed := _listed(schema)) is not None:
        kinds = map(_kind, listed)
    elif not kinds:
        kinds = [kind for kind, keywords in _OF_TYPE.items() if keywords & {*schema}] or TYPES
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", dict: "object", list: "array", int: "number", float: "number"}
    return names.get(type(value), "null")


def _list(value: Any, single: type | None = None) -> list[Any]:
    """Return a list, or a list of a value that is a `single`, else an empty list."""
    if single and isinstance(value, single):
        return [value]
    return value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [item for item in _list(value) if isinstance(item, str)]


def _is_number(value: Any) -> bool:
    """Return True for numbers, except those beyond floating point, which JSON can spell (1e999)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _check_text(text: str, at: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(at, f"has the text {text[:80]!a}, with half of a UTF-16 surrogate pair") from None


def _wrong(at: str, problem: str) -> GrammarError:
    return GrammarError(f"{_START} {problem} (at {at or '/'})")
