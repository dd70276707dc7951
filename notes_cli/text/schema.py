"""JSON schemas as grammars (GBNF): each text that the grammar lets through is JSON, and valid.

The other way round not all that is valid can be written: properties come in the order of the schema, one that it does
not name only where it says what such a one is, and each value in one form. A keyword that restricts a value and has no
rule here is a GrammarError that names it, never passed over. (The converter that comes with llama.cpp's binding passes
over most of them, and its patterns let quotes through: docs/LOG.md.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from notes_cli.errors import GrammarError
from notes_cli.text.digits import Bound, mirrored, positive, whole_between
from notes_cli.text.grammar import MAX_RULES, MAX_TEXT, MAX_WAYS, ROOT, WaysError, check_grammar, times
from notes_cli.text.pattern import PLAIN, pattern_rule, set_rule, text_rule, without

FEW = 32  # texts to choose from that are written out as they are
MAX_DEPTH = 64  # schemas in schemas, and $ref by $ref
MAX_STEPS = 200_000  # schemas, values and names that are looked at: a few seconds of work
MAX_PATTERN = 1000  # characters
MAX_REF = 1000  # characters
PLACE = 200  # characters of a place in the schema that are told
LETTERS = 100  # of rules: so many are built in a step
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

# Keywords that restrict nothing, and those that a type is told by.
_NOTES = {"$schema", "$id", "id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
_NOTES |= {"example", "deprecated", "readOnly", "writeOnly", "discriminator"}
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_OF_TYPE["integer"] = _OF_TYPE["number"]
_GENERAL = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_KNOWN = _NOTES | _GENERAL | {keyword for keywords in _OF_TYPE.values() for keyword in keywords}

_DAYS = '("0" [1-9] | "1" [0-9] | "2" [0-8])'  # that each month has
_DATE = (
    f'[1-9] [0-9]{{3}} "-" (("0" [1-9] | "1" [0-2]) "-" {_DAYS} | ("0" [13-9] | "1" [0-2]) "-" ("29" | "30")'
    ' | ("0" [13578] | "1" [02]) "-31")'
)
_HOUR = '([01] [0-9] | "2" [0-3])'
_TIME = f'{_HOUR} ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{{1,6}})? ("Z" | [+-] {_HOUR} ":" [0-5] [0-9])'
_BYTE = '("25" [0-5] | "2" [0-4] [0-9] | "1" [0-9] [0-9] | [1-9]? [0-9])'
_WORD = "[A-Za-z0-9]{1,20}"
_HOST = f'({_WORD} ("-" {_WORD}){{0,2}} "."){{1,4}} [A-Za-z]{{2,10}}'
_PATH = "[A-Za-z0-9._~-]*"
_HEX = "[0-9a-fA-F]"
FORMATS = {  # what is between the quotes
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": f'{_HEX}{{8}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{12}}',
    "ipv4": f'{_BYTE} "." {_BYTE} "." {_BYTE} "." {_BYTE}',
    "hostname": _HOST,
    "email": f'{_WORD} ([._+-] {_WORD}){{0,4}} "@" {_HOST}',
    "uri": f'"http" "s"? "://" {_HOST} ("/" {_PATH}){{0,8}} ("?" [A-Za-z0-9._~=&-]*)? ("#" {_PATH})?',
}
_CHAR = (  # one character of a string; half of a surrogate pair is none
    f"{set_rule(PLAIN)} | " + r'"\\" (["\\/bfnrt] | "u" ([0-9A-Ca-cE-Fe-f] [0-9A-Fa-f]{3} | [Dd] [0-7] [0-9A-Fa-f]{2}))'
)
_BASICS = {
    "ws": r'| " " | "\n" [ \t]{0,20}',  # between the parts of an object or an array
    "char": _CHAR,
    "string": r'"\"" char* "\""',
    "whole": '"-"? ("0" | [1-9] [0-9]{0,14})',
    "number": 'whole ("." [0-9]{1,16})? ([eE] [+-]? [0-9]{1,2})?',
    "value": 'object | array | string | number | "true" | "false" | "null"',
    "object": '"{" ws (string ":" ws value ("," ws string ":" ws value)* ws)? "}"',
    "array": '"[" ws (value ("," ws value)* ws)? "]"',
}
_ANY = {"object": "object", "array": "array", "string": "string", "number": "number", "integer": "whole"}
_ANY |= {"boolean": '("true" | "false")', "null": '"null"'}

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def schema_grammar(schema: Any) -> str:
    """The grammar of the JSON texts that are valid by a schema (JSON, read already). Raise GrammarError for what is no
    schema, or has no rule here."""
    return _Converter(schema).grammar()


def calls_grammar(parameters: Mapping[str, Any], strict: Collection[str] = ()) -> str:
    """The grammar of one call as JSON, `{"name": ..., "arguments": {...}}`. `parameters`: schemas by names of tools.

    A tool that names no parameters is called with `{}`. For the tools in `strict` each keyword is enforced, and
    GrammarError, with the tool and the place in its schema, is raised where that cannot be done; for the others the
    arguments are held to what has a rule here, and the model has read the rest in the definition.
    """
    return _Converter(None).calls(parameters, strict)


def read_schema(text: str) -> Any:
    """A schema from its text. Raise GrammarError if that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error


class _TooLarge(GrammarError):
    """A schema that takes more work, or more rules, than are allowed."""


class _Converter:
    """The rules of one schema, as they are needed."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._rules: dict[str, str] = dict(_BASICS)
        self._named: dict[str, str] = {}  # rules by what they say
        self._places: dict[str, str] = {}  # of rules in the schema
        self._referred: dict[str, str] = {}  # rules by $ref
        self._values: dict[int, tuple[Any, set[Any]]] = {}  # those that a schema lists, by the schema's id
        self._loose = False  # whether keywords without a rule are left out
        self._steps = self._letters = 0

    def grammar(self) -> str:
        return self._from(self._root(self._schema))

    def calls(self, parameters: Mapping[str, Any], strict: Collection[str]) -> str:
        """The grammar of one call; each schema is one by itself, whose references begin at its own head."""
        found = []
        for name, schema in parameters.items():
            self._schema, self._referred, self._loose = _arguments(schema), {}, name not in strict
            try:
                members = {"name": text_rule(json.dumps(name)), "arguments": self._root(self._schema)}
            except _TooLarge as error:
                raise GrammarError(f"the tool {name}: {error.what}") from error
            except GrammarError as error:
                remedy = 'Without "strict" its arguments are held to the rest of its schema'
                raise GrammarError(f"the tool {name}: {error.what}", remedy) from error
            written = [(f"{text_rule(_quoted(key, '') + ':')} ws {rule}", True) for key, rule in members.items()]
            found.append(self._rule(self._members(written, "", name), name))
        return self._from(" | ".join(found))

    def _root(self, schema: Any) -> str:
        try:
            return self._visit(schema, "", 0)
        except RecursionError:
            raise _TooLarge("the JSON schema is nested too deeply, or has a number that is too long") from None

    def _from(self, root: str) -> str:
        """The grammar of all rules that one leads to."""
        needed = self._needed(root)
        rules = {name: rule for name, rule in self._rules.items() if name in needed}
        text = "\n".join([f"{ROOT} ::= {root}", *(f"{name} ::= {rule}" for name, rule in rules.items())]) + "\n"
        try:
            check_grammar(text)
        except WaysError as error:
            what = f"the JSON schema allows more than {MAX_WAYS:,} ways to go on at one place"
            raise _TooLarge(f"{what} (at {self._places.get(error.rule) or '/'})") from error
        return text

    def _needed(self, root: str) -> set[str]:
        """The rules that a rule leads to."""
        found: set[str] = set()
        waiting = [root]
        while waiting:
            words = re.sub(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', " ", waiting.pop())
            for name in re.findall(r"[A-Za-z][A-Za-z0-9-]*", words):
                if name in self._rules and name not in found:
                    found.add(name)
                    waiting.append(self._rules[name])
        return found

    def _spend(self, steps: int) -> None:
        """Raise GrammarError where a stranger's schema takes more work than any that is meant."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _TooLarge(f"the JSON schema is too large: it takes more than {MAX_STEPS:,} steps to read")

    def _rule(self, body: str, at: str) -> str:
        """The name of a rule that says this, called after its place in the schema. Raise GrammarError where there is
        more already than a grammar may have."""
        self._spend(len(body) // LETTERS)
        if body not in self._named:
            self._letters += len(body)
            if self._letters > MAX_TEXT or len(self._rules) > MAX_RULES:
                most = f"{MAX_RULES:,} rules or {MAX_TEXT:,} characters"
                raise _TooLarge(f"the JSON schema is too large: its grammar has more than {most}")
            place = "-".join(re.findall(r"[A-Za-z0-9]+", at.replace("/properties/", "/")))[-40:].strip("-")
            self._named[body] = name = f"r{len(self._rules)}-{place}".rstrip("-")
            self._places[name] = at.removesuffix("/rest").removesuffix("/more")
            self._rules[name] = body
        return self._named[body]

    def _visit(self, schema: Any, at: str, depth: int) -> str:
        """A symbol for the values that a schema allows. `at`: where it is."""
        for fewer in [schema, *_looser(schema)] if self._loose else [schema]:
            try:
                return self._enforced(fewer, at, depth)
            except _TooLarge:
                raise
            except GrammarError:
                if not self._loose:
                    raise
        return "value" if at else "object"  # arguments are at the head

    def _enforced(self, schema: Any, at: str, depth: int) -> str:
        """A symbol for the values that a schema allows, each keyword enforced."""
        if depth > MAX_DEPTH:
            raise _wrong(at, f"is nested more than {MAX_DEPTH} levels deep")
        at = at[-PLACE:]  # names of strangers may be long, and each level would have them all once more
        self._spend(1)
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, dict):
            raise _wrong(at, "allows no value" if schema is False else "is neither an object nor true")
        if at and "$id" in schema:
            raise _wrong(at, "uses '$id' below its head, which is not supported")
        self._spend(len(schema) // 10)
        for keyword in schema:
            if keyword not in _KNOWN and not keyword.startswith("x-"):
                raise _wrong(at, f"uses {keyword!r}, which is not supported")
        if "$ref" in schema:
            return self._ref(schema, at, depth)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema:
                return self._combined(schema, keyword, at, depth)
        types = self._types(schema, at)
        if "const" in schema or "enum" in schema:
            return self._constants(schema, types, at)
        if types is None:
            return "value"
        ways: Mapping[str, Callable[[dict[str, Any], str, int], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._whole,
        }
        found = []
        for kind in types:
            used = [keyword for keyword in _OF_TYPE.get(kind, ()) if keyword in schema]
            found.append(ways[kind](schema, at, depth) if used else _ANY[kind])
        return found[0] if len(found) == 1 else self._rule(" | ".join(found), at)

    def _types(self, schema: Mapping[str, Any], at: str) -> list[str] | None:
        """The types that a value may have; None for any."""
        if "type" not in schema:
            told = [
                kind for kind in TYPES if kind != "integer" and any(key in schema for key in _OF_TYPE.get(kind, ()))
            ]
            return told or None
        given = schema["type"]
        types = given if isinstance(given, list) else [given]
        for kind in types:
            if kind not in TYPES:
                raise _wrong(at, f"has the type {kind!r}, which is none")
        if not types:
            raise _wrong(at, "allows no value")
        return [kind for kind in dict.fromkeys(types) if not (kind == "integer" and "number" in types)]

    def _alone(self, schema: Mapping[str, Any], keyword: str, at: str, also: Iterable[str] = ()) -> None:
        """Raise GrammarError if something beside a keyword restricts the value, too."""
        beside = [key for key in schema if key in _KNOWN - _NOTES and key != keyword and key not in also]
        if beside:
            raise _wrong(at, f"uses {beside[0]!r} beside {keyword!r}, which is not supported")

    # References and combinations.

    def _ref(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        self._alone(schema, "$ref", at)
        ref = schema["$ref"]
        target = self._resolved(ref, at)
        if ref not in self._referred:
            name = self._referred[ref] = f"r{len(self._rules)}-ref"
            self._rules[name] = ""  # it may refer to itself
            self._rules[name] = self._visit(target, str(ref).lstrip("#") or "/", depth + 1)
        return self._referred[ref]

    def _resolved(self, ref: Any, at: str) -> Any:
        """What a reference inside of the schema means."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise _wrong(at, f"refers to {ref!r}: only #/... is supported, a place in this schema")
        if len(ref) > MAX_REF:
            raise _wrong(at, f"refers to a place by more than {MAX_REF:,} characters")
        self._spend(1 + ref.count("/") // 10)
        target = self._schema
        for part in ref.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise _wrong(at, f"refers to {ref!r}, which is not there")
        return target

    def _followed(self, schema: Any, at: str) -> Any:
        """A schema without a reference at its head."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            self._alone(schema, "$ref", at)
            schema = self._resolved(schema["$ref"], at)
        raise _wrong(at, "refers to itself")

    def _combined(self, schema: Mapping[str, Any], keyword: str, at: str, depth: int) -> str:
        parts = schema[keyword]
        if not isinstance(parts, list) or not parts:
            raise _wrong(at, f"needs a list of schemas for {keyword!r}")
        if keyword == "allOf":
            return self._all(schema, parts, at, depth)
        beside = {key: schema[key] for key in schema if key in _KNOWN - _NOTES and key not in (keyword, "type")}
        if beside:
            raise _wrong(at, f"uses {next(iter(beside))!r} beside {keyword!r}, which is not supported")
        if "type" in schema:
            parts = [self._typed(part, schema["type"], f"{at}/{keyword}/{i}") for i, part in enumerate(parts)]
        if keyword == "oneOf":
            self._check_apart(parts, at)
        found = [self._visit(part, f"{at}/{keyword}/{i}", depth + 1) for i, part in enumerate(parts)]
        return found[0] if len(found) == 1 else self._rule(" | ".join(dict.fromkeys(found)), at)

    def _typed(self, part: Any, given: Any, at: str) -> Any:
        """An alternative of a schema that has a type of its own."""
        part = self._followed(part, at)
        if isinstance(part, bool):
            return {"type": given} if part else part
        if not isinstance(part, dict) or part.get("type", given) != given or {*part} & {"anyOf", "oneOf", "allOf"}:
            raise _wrong(at, f"is an alternative of the type {given!r} and combines others, which is not supported")
        return {**part, "type": given}

    def _all(self, schema: Mapping[str, Any], parts: Sequence[Any], at: str, depth: int) -> str:
        """One schema, or objects that have different properties."""
        if len(parts) == 1 and not any(key in schema for key in _KNOWN - _NOTES - {"allOf"}):
            return self._visit(parts[0], f"{at}/allOf/0", depth + 1)
        kept = ("type", "properties", "required")
        beside = {key: value for key, value in schema.items() if key != "allOf"}
        merged: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        seen: set[int] = set()  # by reference one may come again and again
        for number, part in enumerate([beside, *parts]):
            where = at if number == 0 else f"{at}/allOf/{number - 1}"
            part = self._followed(part, where)
            if not isinstance(part, dict) or part.get("type", "object") != "object":
                raise _wrong(where, "is no object, and only objects are supported as several of 'allOf'")
            for key in part:
                if key not in kept and key not in _NOTES and not key.startswith("x-"):
                    raise _wrong(where, f"uses {key!r} in 'allOf', which is not supported")
            if id(part) in seen:
                continue
            seen.add(id(part))
            properties, required = _properties(part, where), _required(part, where)
            self._spend(len(properties) + len(required))
            for name, value in properties.items():
                if merged["properties"].get(name, value) != value:
                    raise _wrong(where, f"has another schema of {name!r} than the rest of 'allOf'")
                merged["properties"][name] = value
            merged["required"] += required
        return self._object(merged, at, depth)

    def _check_apart(self, parts: Sequence[Any], at: str) -> None:
        """Raise GrammarError unless no value fits two of the alternatives, as oneOf demands."""
        heads = [self._followed(part, f"{at}/oneOf/{number}") for number, part in enumerate(parts)]
        for number, head in enumerate(heads):
            if any(not self._apart(head, other) for other in heads[:number]):
                raise _wrong(at, "uses 'oneOf' with alternatives that a value could fit two of: write 'anyOf'")

    def _apart(self, one: Any, other: Any) -> bool:
        """Whether it is plain that no value fits both."""
        self._spend(1)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        kinds = [self._types(schema, "") for schema in (one, other)]
        if kinds[0] and kinds[1]:
            wide = [{"number" if kind == "integer" else kind for kind in types or ()} for types in kinds]
            if not wide[0] & wide[1]:
                return True
        values = [self._listed(schema) for schema in (one, other)]
        if values[0] is not None and values[1] is not None:
            self._spend(min(len(values[0]), len(values[1])) // 10)
            return values[0].isdisjoint(values[1])
        required = [_required(schema, "") for schema in (one, other)]
        self._spend(sum(map(len, required)) // 10)
        properties = [_properties(schema, "") for schema in (one, other)]
        tags = [tuple(found.get(key) for found in properties) for key in {*required[0]} & {*required[1]}]
        return kinds[0] == kinds[1] == ["object"] and any(self._apart(a, b) for a, b in tags if a and b)

    def _listed(self, schema: Mapping[str, Any]) -> set[Any] | None:
        """What tells the values apart that a schema lists; None where it lists none. True is not 1, and 1.0 is."""
        values = _constants(schema)
        if values is None:
            return None
        if id(schema) not in self._values:
            self._spend(len(values))
            numbers = (one if _is_number(one) else json.dumps(one, sort_keys=True) for one in values)
            self._values[id(schema)] = schema, set(numbers)  # with the schema, whose id would be another's soon
        return self._values[id(schema)][1]

    # Values.

    def _constants(self, schema: Mapping[str, Any], types: Sequence[str] | None, at: str) -> str:
        keyword = "const" if "const" in schema else "enum"
        self._alone(schema, keyword, at, ("type",))
        values = _constants(schema)
        self._spend(len(values or ()))
        if not values:
            raise _wrong(at, f"allows no value: 'enum' is {schema.get('enum')!r}")
        fitting = [value for value in values if "type" not in schema or _kinds(value) & {*(types or ())}]
        if not fitting:
            raise _wrong(at, f"allows no value: {keyword!r} has none of the type {schema['type']!r}")
        try:
            texts = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in fitting]
            "".join(texts).encode()
        except (ValueError, UnicodeEncodeError) as error:
            raise _wrong(at, f"has a value for {keyword!r} that is not JSON: {error}") from error
        return self._rule(self._one_of([*dict.fromkeys(texts)], at, 0), at)

    def _one_of(self, texts: Sequence[str], at: str, depth: int) -> str:
        """One of several texts. What many have in common at their beginning is written once: llama.cpp follows every
        alternative that there is at a place."""
        if len(texts) <= FEW or depth > MAX_DEPTH:
            return " | ".join(map(text_rule, texts))
        groups: dict[str, list[str]] = {}
        for text in texts:
            groups.setdefault(text[:1], []).append(text)
        ways = []
        for group in groups.values():
            if len(group) == 1:
                ways.append(text_rule(group[0]))
                continue
            ends = [*zip(min(group), max(group), strict=False)]  # between which all others are
            shared = next((place for place, (one, other) in enumerate(ends) if one != other), len(ends))
            rest = self._rule(self._one_of([text[shared:] for text in group], at, depth + 1), at)
            ways.append(f"{text_rule(group[0][:shared])} {rest}")
        return " | ".join(ways)

    def _object(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        properties, required = dict(_properties(schema, at)), dict.fromkeys(_required(schema, at))
        self._spend(len(properties) + len(required))
        more = schema.get("additionalProperties")
        if more is None and not properties and not required:
            more = True
        for name in required:
            if name not in properties:
                if more is False:
                    raise _wrong(at, f"requires {name!r}, which it does not allow")
                properties[name] = more if isinstance(more, dict) else True
        members = []
        for name, value in properties.items():
            if value is False and name not in required:
                continue
            rule = self._visit(value, f"{at}/properties/{name}", depth + 1)
            members.append((f"{text_rule(_quoted(name, at) + ':')} ws {rule}", name in required))
        others = self._others(properties, more, at, depth)
        self._check_counts(schema, len(required), None if others else len(members), at)
        return self._rule(self._members(members, others, at), at)

    def _others(self, properties: Iterable[str], more: Any, at: str, depth: int) -> str:
        """A member of another name than these; empty if there may be none."""
        if more in (None, False):
            return ""
        value = self._visit(more, f"{at}/additionalProperties", depth + 1)
        names = list(properties)
        self._spend(sum(map(len, names)) // 10)  # each is taken apart, letter by letter
        key = self._other_names(names, at)
        return self._rule(f'"\\"" {key} "\\":" ws {value}', f"{at}/more")

    def _other_names(self, names: Sequence[str], at: str) -> str:
        """The names but these, without escapes: with them one could be spelled in another way."""
        plain = self._rule(set_rule(PLAIN), "plain")
        following: dict[str, list[str]] = {}
        for name in names:
            if name:
                following.setdefault(name[0], []).append(name[1:])
        self._spend(1 + len(names) // 10)
        ways = [f"{text_rule(first)} {self._other_names(rest, at)}" for first, rest in following.items()]
        self._spend(sum(map(len, ways)) // LETTERS)
        rest = without(PLAIN, [(ord(first), ord(first)) for first in following])
        ways += [f"{set_rule(rest)} {plain}*", *([] if "" in names else ['""'])]
        return f"({' | '.join(ways)})"

    def _members(self, members: Sequence[tuple[str, bool]], others: str, at: str) -> str:
        """An object with these members in their order, each required or not, then any number of others."""
        comma = '"," ws'
        first = f"({others} ({comma} {others})*)?" if others else '""'
        after = f"({comma} {others})*" if others else '""'
        for member, required in reversed(members):
            further = self._rule(after, f"{at}/rest")
            first, after = (
                f"{member} {further}" if required else f"{member} {further} | {self._rule(first, f'{at}/rest')}",
                f"{comma} {member} {further}" if required else f"({comma} {member})? {further}",
            )
        return f'"{{" ws {self._rule(first, f"{at}/rest")} ws "}}"'

    def _check_counts(self, schema: Mapping[str, Any], least: int, most: int | None, at: str) -> None:
        """Raise GrammarError for bounds of how many members there are, unless they hold in any case."""
        low, high = self._bounds(schema, "minProperties", "maxProperties", at)
        if low > least or (high is not None and (most is None or high < most)):
            raise _wrong(at, "uses 'minProperties' or 'maxProperties', which is not supported")

    def _bounds(self, schema: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
        least, most = schema.get(low, 0), schema.get(high)
        for keyword, value in ((low, least), (high, most)):
            if value is not None and (not _is_whole(value) or value < 0):
                raise _wrong(at, f"needs a whole number for {keyword!r}, not {value!r}")
        if most is not None and most < least:
            raise _wrong(at, f"allows no value: {low!r} is {least} and {high!r} is {most}")
        return int(least), None if most is None else int(most)

    def _array(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        items, first = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(items, list):  # as drafts before 2020 have it
            first, items = items, schema.get("additionalItems", True)
        elif "additionalItems" in schema:
            raise _wrong(at, "uses 'additionalItems' without a list of 'items', which is not supported")
        if not isinstance(first, list):
            raise _wrong(at, "needs a list of schemas for 'prefixItems'")
        least, most = self._bounds(schema, "minItems", "maxItems", at)
        most = most if items is not False else min(len(first), len(first) if most is None else most)
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise _wrong(at, "uses 'uniqueItems', which is not supported")
        if most is not None and most < least:
            raise _wrong(at, f"allows no value: it has at most {most} items, and 'minItems' is {least}")
        fixed = [self._visit(one, f"{at}/prefixItems/{i}", depth + 1) for i, one in enumerate(first[:most])]
        more_least, more_most = max(0, least - len(fixed)), None if most is None else most - len(fixed)
        if first and "items" not in schema and "minItems" not in schema:
            more_most = 0  # no more than those that are described
        item = self._visit(items, f"{at}/items", depth + 1) if more_most != 0 else ""
        further = f'("," ws {item})'
        head = ' "," ws '.join(fixed)
        if not item:
            body = head
        elif fixed:
            body = f"{head} {times(further, more_least, more_most)}"
        else:
            rest = times(further, max(0, more_least - 1), None if more_most is None else more_most - 1)
            body = f"{item} {rest}" if more_least else f"({item} {rest})?"
        return self._rule(f'"[" ws {body} ws "]"', at)

    def _string(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        least, most = self._bounds(schema, "minLength", "maxLength", at)
        used = [key for key in ("pattern", "format") if key in schema]
        if len(used) == 2 or (used and (least or most is not None)):
            raise _wrong(at, f"uses {used[0]!r} beside another bound of a string, which is not supported")
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise _wrong(at, "needs a text for 'pattern'")
            if len(schema["pattern"]) > MAX_PATTERN:
                raise _wrong(at, f"has a pattern of more than {MAX_PATTERN:,} characters")
            self._spend(len(schema["pattern"]) ** 2 // 100)  # a class is compared with itself
            try:
                body = f"({pattern_rule(schema['pattern'])})"
            except GrammarError as error:
                raise _wrong(at, f"has {error.what}") from error
        elif "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
                known = ", ".join(FORMATS)
                raise _wrong(at, f"uses the format {schema['format']!r}, which is not supported (known: {known})")
            body = FORMATS[schema["format"]]
        else:
            body = times("char", least, most)
        return self._rule(f'"\\"" {body} "\\""', at)

    def _whole(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        if schema.get("multipleOf", 1) != 1:
            raise _wrong(at, "uses 'multipleOf', which is not supported")
        low, high = None, None
        for keyword, rounded, strict in (
            ("minimum", math.ceil, 0),
            ("exclusiveMinimum", math.floor, 1),
        ):
            if keyword in schema:
                bound = rounded(_number(schema, keyword, at)) + strict
                low = bound if low is None else max(low, bound)
        for keyword, rounded, strict in (("maximum", math.floor, 0), ("exclusiveMaximum", math.ceil, -1)):
            if keyword in schema:
                bound = rounded(_number(schema, keyword, at)) + strict
                high = bound if high is None else min(high, bound)
        if low is not None and high is not None and low > high:
            raise _wrong(at, "allows no value: its bounds leave none")
        if low is None and high is None:
            return "whole"
        return self._rule(" | ".join(whole_between(low, high)), at)

    def _number(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        """A number between whole ones; it has no exponent then."""
        if "multipleOf" in schema:
            if schema["multipleOf"] == 1:
                return self._whole(schema, at, depth)
            raise _wrong(at, "uses 'multipleOf', which is not supported")
        low = _tighter(schema, "minimum", "exclusiveMinimum", max, at)
        high = _tighter(schema, "maximum", "exclusiveMaximum", min, at)
        if low is None and high is None:
            return "number"
        found = [*positive(low, high, ""), *positive(mirrored(high), mirrored(low), "-")]
        if not found:
            raise _wrong(at, "allows no value: its bounds leave none")
        return self._rule(" | ".join(found), at)


def _number(schema: Mapping[str, Any], keyword: str, at: str) -> int | float:
    value = schema[keyword]
    if not _is_number(value):
        raise _wrong(at, f"needs a number for {keyword!r}, not {value!r}")
    return value  # type: ignore[no-any-return]


def _tighter(
    schema: Mapping[str, Any], keyword: str, strict: str, best: Callable[[int, int], int], at: str
) -> Bound | None:
    """The bound of two that excludes more."""
    found: list[Bound] = []
    for key in (keyword, strict):
        if key in schema:
            value = _number(schema, key, at)
            if value != int(value):
                raise _wrong(at, f"has {value!r} for {key!r}: of numbers only whole bounds are supported")
            found.append((int(value), key == strict))
    if not found:
        return None
    value = found[0][0] if len(found) == 1 else best(found[0][0], found[1][0])
    return value, (value, True) in found


_COMBINED = {"anyOf", "oneOf", "allOf"}
_EXACT = {"uniqueItems", "minProperties", "maxProperties", "pattern", "format", "minLength", "maxLength", "multipleOf"}


def _looser(schema: Any) -> Iterator[Any]:
    """Schemas that allow all that one does, and more: with ever fewer of its keywords."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield {"$ref": schema["$ref"]}
    kept = {key: value for key, value in schema.items() if key in _KNOWN - _EXACT}
    yield {("anyOf" if key == "oneOf" else key): value for key, value in kept.items()}
    yield {key: value for key, value in kept.items() if key not in _COMBINED}
    kind = schema.get("type", "object" if "properties" in schema else None)
    if kind is not None:
        yield {"type": kind}


def _arguments(parameters: Any) -> Any:
    """The schema of a tool's arguments: `{}` where it names none, for what is written there would be made up."""
    none = {"type": "object", "additionalProperties": False}
    if not isinstance(parameters, dict):
        return none
    said = {key for key, value in parameters.items() if value or key == "additionalProperties"}
    if not said - _NOTES - {"type"}:
        return none
    return {**parameters, "type": "object"} if "type" in parameters else parameters


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that are listed; None if none are."""
    if "const" in schema:
        const = schema["const"]
        return [const] if "enum" not in schema or any(_same(const, one) for one in _list(schema["enum"])) else []
    return _list(schema["enum"]) if "enum" in schema else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _properties(schema: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The schemas of an object's members, by their names."""
    found = schema.get("properties", {})
    if not isinstance(found, dict):
        raise _wrong(at, "needs an object for 'properties'")
    return found


def _required(schema: Mapping[str, Any], at: str) -> list[str]:
    """The names of those that must be there."""
    found = schema.get("required", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _wrong(at, "needs a list of names for 'required'")
    return found


def _is_number(value: Any) -> bool:
    """Whether it is one, and not one beyond all that a computer counts with, which JSON can write (1e999)."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: true is not 1."""
    if _is_number(one) and _is_number(other):
        return bool(one == other)
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _kinds(value: Any) -> set[str]:
    """The types of a JSON value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if _is_whole(value) else {"number"}
    names: dict[type, str] = {str: "string", dict: "object", list: "array", type(None): "null"}
    return {names[type(value)]}


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _quoted(name: str, at: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _wrong(at, f"has a property {name!a}, which is half of a UTF-16 surrogate pair") from None
    return json.dumps(name, ensure_ascii=False)


def _wrong(at: str, what: str) -> GrammarError:
    return GrammarError(f"the JSON schema {what} (at {at or '/'})")
