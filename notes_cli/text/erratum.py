"""Errata: short corrections, as `field=value` or as free text, and the sentences that a model reads.

The wordings are in prompts/errata.json. Only {field}, {value}, {skill} and {text} are filled in, in one pass, so
braces in a user's text are left alone. Where an erratum is placed in a prompt is decided elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from notes_cli.config import resource
from notes_cli.errors import SkillError
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import MAX_WORDS, Known, field_name, is_name, known

COLON = re.compile("[:\uff1a]")  # as in a line of a text, in any script (keys.py)
# As a name is written, a reference to a skill's field, or a placeholder: "1=2" is none.
LIKE_NAME = re.compile(r"\*\.|[\w.*{}-]*[^\W\d_][\w.*{}-]*")
ANOTHER = re.compile(r"[,;]([^,;=:]+)[=:]")  # in a value: what may be meant as a field and its value
MOST_NAMED = 256  # characters of a value that are looked at for such a name: no skill and field have more together
SLOT = re.compile(r"\{(field|value|text|skill)\}")


@dataclass(frozen=True, slots=True)
class Erratum:
    """A correction: of a field (`field` and `value`), or as free text (`text`)."""

    field: str | None
    value: str | None
    text: str  # as the user wrote it
    skill: str = ""  # the skill that has the field, if several skills have one of that name

    @property
    def key(self) -> str:
        """The key of the field (keys.py); empty for free text."""
        return f"{self.skill}.{self.field}" if self.skill else self.field or ""


class OfField(str):
    """`field=value`, given as a field and its value: never read as free words."""

    __slots__ = ()


def of_fields(errata: Mapping[str, str]) -> tuple[OfField, ...]:
    """Errata given as fields and their values. Raise SkillError for a name that no field has."""
    for name in errata:
        if not name.strip() or "=" in name:
            raise SkillError(f"an erratum is of {name!r}, and no field is called so")
    return tuple(OfField(f"{name}={value}") for name, value in errata.items())


@dataclass(frozen=True, slots=True)
class Wordings:
    """How corrections are worded: the forms for a field, by name; the default one; the form for free text."""

    default: str
    forms: Mapping[str, str]
    free: str
    of: str  # the field, if several skills have one of that name


def parse_erratum(text: str, known_fields: Collection[str]) -> Erratum:
    """Read `field=value`, the line of a known field as texts have it (`field: value`), or free text. `known_fields` are
    those of all spliced skills.

    Raise SkillError for an empty erratum, for a value that is empty or has several lines, for a field's name alone, and
    for what looks like `field=value` with a field that no skill has: a word with nothing in it but what names of skills
    and fields are written with, and several words if they are nearly a field's name.
    """
    certain, text = isinstance(text, OfField), text.strip()
    if not text:
        raise SkillError("the erratum is empty", "Write field=value, or the correction in your own words")
    name, equals, value = text.partition("=")
    colon = None if certain else COLON.search(text)
    if field_name(name) not in known_fields and colon and field_name(text[: colon.start()]) in known_fields:
        name, equals, value = text[: colon.start()], colon[0], text[colon.end() :]
    name = field_name(name)
    if equals and not name:
        raise SkillError(f"the erratum {text!r} names no field", "Write field=value")
    if name not in known_fields:
        if colon and not equals and _is_written(field_name(text[: colon.start()]), known_fields):
            given = text[: colon.start()].strip()
            raise SkillError(f"no spliced skill has a field {given!r}", known(known_fields, given))
        if not equals or not (certain or LIKE_NAME.fullmatch(name) or _nearly(name, known_fields)):
            return Erratum(None, None, text)  # "We now say x=1 everywhere."
        raise SkillError(f"no spliced skill has a field {name!r}", known(known_fields, name))
    value = clean_value(name, value)
    if (other := _another(value, known_fields)) is not None:
        what = f"the erratum {text!r} gives {name!r} a value, and {other!r} another one"
        raise SkillError(what, "Write an erratum for each")
    return Erratum(name, value, text)


def _another(value: str, known_fields: Collection[str]) -> str | None:
    """A field that a value gives another value: its name is before an equals sign, or after a comma before a colon."""
    found = [[field_name(other[1])] for other in ANOTHER.finditer(value)]
    for end in (place for place, letter in enumerate(value) if letter == "="):
        words = value[max(0, end - MOST_NAMED) : end].replace(",", " ").replace(";", " ").split()
        found.append([field_name(" ".join(words[-count:])) for count in range(MAX_WORDS, 0, -1)])
    return next((name for names in found for name in names if name in known_fields), None)


def _is_written(name: str, known_fields: Collection[str]) -> bool:
    """Whether a name is that of a field but for its case, or the skill that it names."""
    fields = {field.rpartition(".")[2].casefold() for field in known_fields}
    return name.rpartition(".")[2].casefold() in fields


def _nearly(name: str, known_fields: Collection[str]) -> bool:
    """Whether several words are a field's name but for a few letters, or their case."""
    from difflib import get_close_matches

    fields = [field.casefold() for field in known_fields]
    return is_name(name.rpartition(".")[2]) and bool(get_close_matches(name.casefold(), fields, n=1, cutoff=0.8))


def read_errata(given: Iterable[str], known: Known) -> list[Erratum]:
    """Errata as the user wrote them; `*.field` gives one for each skill. Raise SkillError as `parse_erratum` does, and
    for a field that several skills have if the skill is not named."""
    found: list[Erratum] = []
    for text in given:
        erratum = parse_erratum(text, known)
        if erratum.field is None:
            found.append(erratum)
            continue
        for one in known.resolve(erratum.field):
            found.append(replace(erratum, field=one.field, skill=one.skill if one.shared else ""))
    return found


def word(erratum: Erratum, wording: str | None = None, wordings: Wordings | None = None) -> str:
    """The erratum as a sentence for the model. Raise SkillError for a wording that does not exist."""
    wordings = wordings or shipped_wordings()
    if erratum.field is None or erratum.value is None:
        return _fill(wordings.free, {"text": erratum.text})
    form = wordings.forms.get(wording or wordings.default)
    if form is None:
        raise SkillError(f"no erratum wording {wording!r}", f"Known wordings: {', '.join(wordings.forms)}")
    field = erratum.field
    if erratum.skill:
        field = _fill(wordings.of, {"field": field, "skill": erratum.skill})
    return _fill(form, {"field": field, "value": erratum.value})


@cache
def shipped_wordings() -> Wordings:
    """The wordings that ship with notes."""
    data = json.loads((resource("prompts") / "errata.json").read_text(encoding="utf-8"))
    return Wordings(data["default"], data["wordings"], data["free"], data["of"])


def _fill(form: str, values: Mapping[str, str]) -> str:
    return SLOT.sub(lambda match: values.get(match[1], match[0]), form)
