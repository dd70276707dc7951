"""Errata: short corrections, as `field=value` or in free words, and the wordings that a model reads.

The wordings stand in prompts/errata.yaml. Only {field}, {value} and {text} are filled in, in one pass, so
braces in a user's words stay what they are. Where an erratum is placed in a prompt is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from notes_cli.config import resource
from notes_cli.documents import read_yaml
from notes_cli.errors import NotesError, SkillError
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import field_name, is_name, listed

SLOT = re.compile(r"\{(field|value|text)\}")


@dataclass(frozen=True, slots=True)
class Erratum:
    """A correction: of a field (`field` and `value`), or in free words (`text`)."""

    field: str | None
    value: str | None
    text: str  # as the user wrote it


@dataclass(frozen=True, slots=True)
class Wordings:
    """How a correction is said: forms for a field, by name; which is the default; the form for free words."""

    default: str
    forms: Mapping[str, str]
    free: str


def parse_erratum(text: str, known_fields: Collection[str]) -> Erratum:
    """Read `field=value` or free words. `known_fields` are those of all spliced skills.

    Raise SkillError for an empty erratum, a value that is empty or has several lines, and for what looks like
    `field=value` with a field that no skill has: several words do if they are nearly the name of one.
    """
    text = text.strip()
    if not text:
        raise SkillError("the erratum is empty. Write field=value, or the correction in your own words")
    name, equals, value = text.partition("=")
    name = field_name(name)
    if not equals or not is_name(name):
        return Erratum(None, None, text)
    if name not in known_fields:
        if " " in name and not get_close_matches(name, known_fields, n=1, cutoff=0.8):
            return Erratum(None, None, text)  # "We now say x=1 everywhere."
        raise SkillError(f"no spliced skill has a field {name!r}. Known fields: {listed(sorted(known_fields))}")
    return Erratum(name, clean_value(name, value), text)


def word(erratum: Erratum, wording: str | None = None, wordings: Wordings | None = None) -> str:
    """The erratum as a sentence for the model. Raise SkillError for a wording that does not exist."""
    wordings = wordings or shipped_wordings()
    if erratum.field is None or erratum.value is None:
        return _fill(wordings.free, {"text": erratum.text})
    form = wordings.forms.get(wording or wordings.default)
    if form is None:
        raise SkillError(f"no erratum wording {wording!r}. Known wordings: {', '.join(wordings.forms)}")
    return _fill(form, {"field": erratum.field, "value": erratum.value})


def load_wordings(path: Path) -> Wordings:
    """Read a file of wordings. Raise NotesError if a part is missing or a form leaves out the value."""
    data = read_yaml(path)
    try:
        wordings = Wordings(
            str(data["default"]), {str(k): str(v) for k, v in data["wordings"].items()}, str(data["free"])
        )
    except (AttributeError, KeyError, TypeError):
        raise NotesError(f"{path} must hold default, wordings and free") from None
    if wordings.default not in wordings.forms or "{text}" not in wordings.free:
        raise NotesError(f"{path}: default must name one of the wordings, and free must hold {{text}}")
    for name, form in wordings.forms.items():
        if "{field}" not in form or "{value}" not in form:
            raise NotesError(f"{path}: the wording {name!r} must hold {{field}} and {{value}}")
    return wordings


@cache
def shipped_wordings() -> Wordings:
    """The wordings that come with notes."""
    return load_wordings(resource("prompts") / "errata.yaml")


def _fill(form: str, values: Mapping[str, str]) -> str:
    return SLOT.sub(lambda match: values.get(match[1], match[0]), form)
