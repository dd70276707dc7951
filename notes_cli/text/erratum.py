"""Parses errata (`field=value` or free text), resolves the fields that they name, and words them as sentences.

Wordings are in prompts/errata.json, the default one in several languages, of which that of the skill is taken. {field},
{value} and the other slots are filled in one pass, so that braces in values stay. prompt.py places errata in a prompt.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from notes_cli.config import resource
from notes_cli.errors import Help, SkillError
from notes_cli.text.fields import clean_value, is_quoted
from notes_cli.text.keys import MAX_WORDS, field_name, is_name, listed

T = TypeVar("T")
COLON = re.compile("[:\uff1a]")  # as in a line of a text, in any script (keys.py)
NOTE = re.compile("note\\s*[:\uff1a]\\s*", re.IGNORECASE)  # before free text
ANOTHER = re.compile(r"[,;]([^,;=:]+)[=:]")  # in a value: possibly another field with its value
MOST_NAMED = 256  # characters searched for such a name: skill and field have at most as many
SLOT = re.compile(r"\{(field|value|text|skill)\}")
READ = 20_000  # characters of a text whose language is determined
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
# Words in Latin letters, Cyrillic, Arabic; parts as long as words in Chinese, kana and Hangul.
WORDS = {
    "latin": "[a-z\u00df-\u024f]+",
    "ru": "[\u0400-\u052f]+",
    "ar": "[\u0600-\u06ff]+",
    "zh": "[\u3400-\u9fff]{1,2}",
    "ja": "[\u3040-\u30ff]{1,2}",
    "ko": "[\uac00-\ud7af]{1,3}",
}
WORD = re.compile("|".join(f"(?P<{script}>{word})" for script, word in WORDS.items()))
# Letters of other languages in these scripts, and letters without which a text is not Russian.
OTHERS = re.compile("[\u0456\u0457\u0454\u0491\u045e\u0458\u0459\u045a\u045b\u0452\u067e\u0686\u06af\u06cc\u0679]")
RUSSIAN = re.compile("[\u044b\u044d\u0451]")
KANA = 0.1  # at least this share of them in Japanese, which has Chinese characters, too
FEWEST = 3  # frequent words of a language
SENTENCE_END = re.compile(r"[.!?]\s|[\u3002\uff01\uff1f]")
MARKS = " \t-*#>|"  # around a line of Markdown
MOST_QUOTED = 60  # characters on either side of a value in a sentence about it


@dataclass(frozen=True, slots=True)
class Erratum:
    """A correction: of a field (`field` and `value`), or as free text (`text`)."""

    field: str | None
    value: str | None
    text: str  # as the user wrote it
    skill: str = ""  # of the field, where several skills have one of that name

    @property
    def key(self) -> str:
        """Key of the field (`Reference`); empty for free text."""
        return f"{self.skill}.{self.field}" if self.skill else self.field or ""


class OfField(str):
    """`field=value`, made of a field and its value: never parsed as free text."""

    __slots__ = ()


def of_fields(errata: Mapping[str, str]) -> tuple[OfField, ...]:
    """Return errata for new values by field. Raises SkillError for a name that no field can have."""
    for name in errata:
        if not name.strip() or ("=" in name and not is_quoted(name)):
            raise SkillError(f"an erratum is of {name!r}, and no field is called so")
    return tuple(OfField(f"{name}={value}") for name, value in errata.items())


def parse_erratum(text: str, known_fields: Collection[str]) -> Erratum:
    """Parse `field=value`, the line of a known field as texts have it (`field: value`), or free text, which begins with
    `Note:` if there is an equals sign in it. `known_fields`: those of all spliced skills.

    Raises SkillError for an empty erratum, for a value that is empty or has several lines, for the name of a field
    alone, for `field=value` with an unknown field, and for `field: value` with one that is nearly a known one.
    """
    is_field, text = isinstance(text, OfField), text.strip()
    if not text:
        raise SkillError("the erratum is empty", "Write field=value, or the correction in your own words")
    name, equals, value = text.partition("=")
    before, mark, after = text.partition('"=')  # of a place that has its text as name, which may have = in it
    if field_name(f'{before}"') in known_fields:
        name, equals, value = f'{before}"', mark, after
    colon = None if is_field else COLON.search(text)
    if field_name(name) not in known_fields and colon and field_name(text[: colon.start()]) in known_fields:
        name, equals, value = text[: colon.start()], colon[0], text[colon.end() :]
    name = field_name(name)
    if equals and not name:
        raise SkillError(f"the erratum {text!r} names no field", "Write field=value")
    if name not in known_fields:
        if not is_field and NOTE.match(text):
            return Erratum(None, None, text)
        if not equals:
            name = field_name(text[: colon.start()]) if colon else ""
            if not _resembles_field(name, known_fields):
                return Erratum(None, None, text)
        advice = "" if is_field or " " not in name else '. Begin words of your own with "Note:"'
        raise SkillError(f"no spliced skill has a field {name!r}", f"{_suggestion(known_fields, name)}{advice}")
    value = clean_value(name, value)
    if (second := _second_field(value, known_fields)) is not None:
        problem = f"the erratum {text!r} gives {name!r} a value, and {second!r} another one"
        raise SkillError(problem, "Write an erratum for each")
    return Erratum(name, value, text)


def _second_field(value: str, known_fields: Collection[str]) -> str | None:
    """Return a second field that a value assigns: its name comes before "=", or between a comma and a colon."""
    candidates = [[field_name(match[1])] for match in ANOTHER.finditer(value)]
    for end in (place for place, letter in enumerate(value) if letter == "="):
        words = value[max(0, end - MOST_NAMED) : end].replace(",", " ").replace(";", " ").split()
        candidates.append([field_name(" ".join(words[-count:])) for count in range(MAX_WORDS, 0, -1)])
    return next((name for names in candidates for name in names if name in known_fields), None)


def _resembles_field(name: str, known_fields: Collection[str]) -> bool:
    """Return True if a name, with or without a skill, is a field's name except for a few letters or their case."""
    from difflib import get_close_matches

    name, fields = name.rpartition(".")[2], [field.rpartition(".")[2].casefold() for field in known_fields]
    return is_name(name) and bool(get_close_matches(name.casefold(), fields, n=1, cutoff=0.8))


def read_errata(texts: Iterable[str], known: Known) -> list[Erratum]:
    """Parse errata; `*.field` gives one for each skill. Raises SkillError as `parse_erratum` does, and for a field of
    several skills without the name of the skill."""
    errata: list[Erratum] = []
    for text in texts:
        erratum = parse_erratum(text, known)
        if erratum.field is None:
            errata.append(erratum)
            continue
        for reference in known.resolve(erratum.field):
            errata.append(replace(erratum, field=reference.field, skill=reference.skill if reference.shared else ""))
    return errata


def word(erratum: Erratum, wording: str | None = None, skill: Fielded | None = None) -> str:
    """Return the erratum as a sentence for the model, in the language of the skill. `wording`: a name, or a sentence
    with {field} and {value}. Raises SkillError for an unknown one."""
    forms = language_forms(skill.text if skill else "")
    if erratum.field is None or erratum.value is None:
        return _fill(forms["free"], {"text": NOTE.sub("", erratum.text, count=1)})
    if skill and is_quoted(erratum.field) and wording in (None, shipped_wordings()["default"]):
        # Without the old text: SmolLM2 answers with it if the sentence has both.
        return _fill(forms["free"], {"text": _line_with(skill, erratum.field, erratum.value)})
    field, form = erratum.field, wording_form(wording, forms)
    if erratum.skill:
        field = _fill(forms["of"], {"field": field, "skill": erratum.skill})
    return _fill(form, {"field": field, "value": erratum.value})


def wording_form(wording: str | None, forms: Mapping[str, str] = {}) -> str:
    """Return the sentence with slots of a wording, of the `forms` of a language if they have it; None: of the default
    one. Raises SkillError for an unknown one, and for a sentence without the slots."""
    wordings = shipped_wordings()
    name = wording or wordings["default"]
    form: str | None = forms.get(name) or wordings["wordings"].get(name)
    if form is None and {"{field}", "{value}"} <= {match[0] for match in SLOT.finditer(name)}:
        return name
    if form is None:
        known = f"Known wordings: {', '.join(wordings['wordings'])}"
        raise SkillError(f"no erratum wording {wording!r}", f"{known}; or a sentence with {{field}} and {{value}}")
    return form


def language_forms(text: str) -> Mapping[str, str]:
    """Return the wordings in the language of a text by kind: `now` (not of English), `free`, `of`."""
    languages: Mapping[str, Mapping[str, str]] = shipped_wordings()["languages"]
    return {**languages["en"], **languages[language_of(text[:READ])]}


@lru_cache(256)
def language_of(text: str) -> str:
    """Return the language of a text, of those in prompts/errata.json: by its script, or in Latin letters by its most
    frequent words. English if it is another one, or unclear."""
    text = CODE.sub(" ", unicodedata.normalize("NFC", text).casefold())
    found = Counter((str(match.lastgroup), match[0]) for match in WORD.finditer(text))
    scripts = Counter[str]()
    for (script, _), count in found.items():
        scripts[script] += count
    script = max(scripts, key=lambda name: scripts[name], default="latin")
    if script in ("zh", "ja"):
        return "ja" if scripts["ja"] > KANA * (scripts["ja"] + scripts["zh"]) else "zh"
    if script != "latin":
        return "en" if OTHERS.search(text) or (script == "ru" and not RUSSIAN.search(text)) else script
    lists = {
        name: forms["words"].split() for name, forms in shipped_wordings()["languages"].items() if "words" in forms
    }
    counts = Counter({name: sum(found["latin", word] for word in words) for name, words in lists.items()})
    (first, most), (_, second) = counts.most_common(2)
    return first if most >= FEWEST and most > second else "en"


def _line_with(skill: Fielded, field: str, value: str) -> str:
    """Return the sentence of a place with its new value, or the words around it."""
    span = next(span for span in skill.fields if span.name == field)
    before = skill.text[: span.start].rpartition("\n")[2]
    after = skill.text[span.end :].partition("\n")[0]
    ends = [match.end() for match in SENTENCE_END.finditer(before)]
    before = before[ends[-1] if ends else 0 :]
    end = SENTENCE_END.search(after)
    after = after[: end.start() + 1] if end else after
    if len(before) > MOST_QUOTED:
        before = "\u2026" + before[-MOST_QUOTED:].partition(" ")[2]
    if len(after) > MOST_QUOTED:
        after = after[:MOST_QUOTED].rpartition(" ")[0] + "\u2026"
    return f"{before}{value}{after}".strip(MARKS)


@cache
def shipped_wordings() -> Mapping[str, Any]:
    """Return prompts/errata.json: `wordings` of fields by name, the name of the `default`, and by language the default
    one, that of `free` text, how a field is named `of` a skill where several skills have one of that name, and frequent
    words."""
    data: dict[str, Any] = json.loads((resource("prompts") / "errata.json").read_text(encoding="utf-8"))
    return data


def _fill(form: str, values: Mapping[str, str]) -> str:
    return SLOT.sub(lambda match: values.get(match[1], match[0]), form)


# References to fields: `date`, `returns.date`, `*.date`.

ALL = "*"


class Reference(NamedTuple):
    """A field of a skill."""

    skill: str
    field: str
    key: str  # `date`, or `returns.date` if other skills have a field of that name, too

    @property
    def shared(self) -> bool:
        """True if other skills have a field of that name."""
        return self.key != self.field

    def erratum(self, value: str) -> Erratum:
        """Return the erratum that gives the field this value."""
        return Erratum(self.field, value, "", self.skill if self.shared else "")


class Known(Collection[str]):
    """Fields of some skills. `in` takes a reference to one or more of them; iterating gives the keys."""

    def __init__(self, skills: Iterable[tuple[str, Iterable[str]]]) -> None:
        """`skills`: each skill's name with its field names."""
        self._fields: dict[str, dict[str, None]] = {}  # skill -> fields, in order
        self._owners: dict[str, dict[str, None]] = {}  # field -> skills
        for skill, fields in skills:
            for field in fields:
                self._fields.setdefault(skill, {})[field] = None
                self._owners.setdefault(field, {})[skill] = None

    def __contains__(self, reference: object) -> bool:
        return isinstance(reference, str) and bool(self.find(reference))

    def __iter__(self) -> Iterator[str]:
        return (self.key(skill, field) for skill, fields in self._fields.items() for field in fields)

    def __len__(self) -> int:
        return sum(map(len, self._fields.values()))

    def key(self, skill: str, field: str) -> str:
        return field if len(self._owners.get(field, ())) < 2 else f"{skill}.{field}"

    def find(self, reference: str) -> list[Reference]:
        """Return all fields that a reference may mean; without a skill, those of every skill that has the field. Case
        is ignored if only one field matches."""
        skill, dot, field = reference.partition(".")
        if skill.strip() not in (*self._fields, ALL):
            skill, dot, field = "", "", reference  # a dot of the field: GPT-4.1
        field, skill = field_name(field), skill.strip()
        known = self._owners if not dot or skill == ALL else self._fields.get(skill, {})
        if field not in known:
            similar = [name for name in known if name.casefold() == field.casefold()]
            field = similar[0] if len(similar) == 1 else field
        owners = self._owners.get(field, {})
        selected = owners if not dot or skill == ALL else [skill] if skill in owners else ()
        return [Reference(owner, field, self.key(owner, field)) for owner in selected]

    def resolve(self, reference: str, subject: str = "no spliced skill has") -> list[Reference]:
        """Return the field that a reference means, or with `*.` all of that name.

        Raises SkillError for an unknown field, with the known ones, and for one of several skills, with each. `subject`
        begins the former message.
        """
        references = self.find(reference)
        if not references:
            raise SkillError(f"{subject} a field {reference!r}", _suggestion(self, reference))
        if len(references) > 1 and reference.partition(".")[0].strip() != ALL:
            which = listed([match.key for match in references])
            raise SkillError(
                f"several skills have a field {reference!r}: name one of {which}, or all: {ALL}.{reference}"
            )
        return references


class Valued(Protocol):
    """A field with its value: characters [start, end) of a text."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Fielded(Protocol):
    """A skill with fields: a text, a segment, or an entry of a session."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def fields(self) -> Sequence[Valued]: ...


def known_fields(*skills: Fielded) -> Known:
    """Return the fields of skills, by name."""
    return Known((skill.name, [span.name for span in skill.fields]) for skill in skills)


def describe_wildcards(texts: Iterable[str], known: Known) -> list[str]:
    """Describe the fields that each `*.field` in errata and references stands for."""
    names = [text.partition("=")[0].strip() for text in texts]
    return [
        f"{name} is {', '.join(reference.key for reference in known.find(name))}"
        for name in names
        if name.startswith(f"{ALL}.") and name in known
    ]


def resolve_values(values: Mapping[str, str], known: Known) -> list[tuple[Reference, str]]:
    """Return the field of one skill for each value; for `*.field`, one for each skill that has it. Raises SkillError
    for an unknown field, for an unqualified one that several skills have, and for one with two values."""
    pairs = ((reference, value) for name, value in values.items() for reference in known.resolve(name))
    return list(unique_values(pairs, lambda reference: reference.key).items())


def unique_values(pairs: Iterable[tuple[T, str]], key: Callable[[T], str] = str) -> dict[T, str]:
    """Return the value of each field. Raises SkillError for one with two values, naming it by `key`."""
    values: dict[T, str] = {}
    for field, value in pairs:
        if values.setdefault(field, value).strip() != value.strip():
            raise SkillError(f"{key(field)} is given two new values, {values[field]!r} and {value!r}", Help.ONE_VALUE())
    return values


def as_new_values(
    errata: Iterable[str], fields: Mapping[str, str], known: Known
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Combine field values and errata: the new value of each field (the last erratum counts), and the free-text errata.
    Raises SkillError as `read_errata` and `resolve_values` do, and where an erratum and a new value of a field differ:
    neither is the later one."""
    stated, free = dict[Reference, str](), []
    for text in errata:
        erratum = parse_erratum(text, known)
        if erratum.field is None or erratum.value is None:
            free.append(text)
        else:
            stated |= dict.fromkeys(known.resolve(erratum.field), erratum.value)
    for field, value in resolve_values(fields, known):
        other = stated.pop(field, value)
        if other.strip() != value.strip():
            text = f"{field.key} is given the new value {value!r}, and {other!r} by an erratum"
            raise SkillError(text, Help.ONE_VALUE())
    return {**fields, **{field.key: value for field, value in stated.items()}}, tuple(free)


def _suggestion(fields: Collection[str], wanted: str) -> str:
    """Return the remedy for an unknown field `wanted`: the known fields and those with a similar name, or one that
    begins with it; without fields, how to write one."""
    from difflib import get_close_matches

    names = listed(sorted(fields))
    folded = {name.casefold(): field for field in fields for name in (field.rpartition(".")[2], field)}
    begun = [name for name in folded if name.startswith(f"{wanted.casefold()} ")]
    similar = [folded[name] for name in begun or get_close_matches(wanted.casefold(), folded, n=3)]
    hint = f"Did you mean {' or '.join(dict.fromkeys(similar))}? " if similar else ""
    help_ = "" if fields else ". A field is a `key: value` line, a {{placeholder}}, or named under fields: at the top"
    return f"{hint}Known fields: {names}{help_}"
