"""Finds the values that errata name by their text, `the 27th => the 28th`, and makes each a field of its skill.

The text must be in one place, as whole words. Within the value of a field it is a new value of that field; any other
place becomes a field that has the old text in quotation marks as its name, so that all edit methods apply to it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from notes_cli.errors import SkillError
from notes_cli.text.erratum import NOTE, Fielded, OfField, Valued, known_fields
from notes_cli.text.fields import ARROW, Field, clean_value, is_quoted, quoted
from notes_cli.text.keys import field_name, listed

# Scripts without spaces between words, or with endings that follow a value.
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")
GAP = r"(?:[^\S\n]+|[^\S\n]*\n[^\S\n]*)"  # between words, also at the end of a line
QUOTES = "\"'\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb"
IN_NUMBER = re.compile(r"\d[.,:/]\d")  # 1.5, 3,000, 17:00, 1/2
SHOWN = 60  # characters of a line in a message
MOST_SHOWN = 3  # lines


class _Place(NamedTuple):
    """Where a text was found: characters [start, end) of a skill's text, and the field whose value it is in."""

    skill: Fielded
    start: int
    end: int
    field: Field | None
    new: str  # the new value of the field, else of the place


def name_quoted(
    errata: Sequence[str], fields: Mapping[str, str], skills: Sequence[Fielded]
) -> tuple[tuple[str, ...], dict[str, str], dict[str, tuple[Field, ...]]]:
    """Return errata, and new values by field, with a field for each text: `OLD => NEW`, or of `fields` a name in
    quotation marks. And by name all fields of each skill that gets one by it.

    Raises SkillError for an old text that is nowhere or in several places, with the lines, and for an empty text.
    """
    known, added = known_fields(*skills), dict[str, tuple[Field, ...]]()

    def named(old: str, new: str) -> tuple[str, str]:
        place = _only_place(old, new, skills)
        has = added.get(place.skill.name) or tuple(map(_field, place.skill.fields))
        there = place.skill.text[place.start : place.end]
        field = place.field or Field(quoted(field_name(there)), there, place.start, place.end)
        if all(field.name != other.name for other in has):
            if any(other.start < field.end and field.start < other.end for other in has):
                raise SkillError(f"two corrections are of the same place: {old!r}", "Write one for both")
            added[place.skill.name] = tuple(sorted((*has, field), key=lambda field: field.start))
        return f"{place.skill.name}.{field.name}", place.new

    texts, values = list[str](), dict[str, str]()
    for text in errata:
        parts = _parsed(text, known)
        texts.append(text if parts is None else OfField("=".join(named(*parts))))
    for name, value in fields.items():
        key, new = named(name[1:-1], value) if is_quoted(name) and name not in known else (name, value)
        values[key] = new
    return tuple(texts), values, added


def _parsed(text: str, known: Collection[str]) -> tuple[str, str] | None:
    """Return old and new text of `OLD => NEW`; None for other errata, among them a field with => in its value."""
    if isinstance(text, OfField):
        name, _, value = text.rpartition('"=')
        return (name[1:], value) if is_quoted(f'{name}"') and f'{name}"' not in known else None
    text = text.strip()
    name = text.partition("=")[0]
    is_value = field_name(name) in known and not ARROW.match(text, len(name.rstrip()))
    if "=>" not in text or is_value or NOTE.match(text):
        return None
    parts = ARROW.split(text)
    parts = text.split("=>") if len(parts) == 1 else parts
    if len(parts) != 2 or not all(parts):
        raise SkillError(f"the erratum {text!r} is not an old text and a new one", "Write OLD => NEW")
    return parts[0], parts[1]


def _only_place(old: str, new: str, skills: Sequence[Fielded]) -> _Place:
    """Return the only place of a text, which may come after the name of a skill. Raises SkillError."""
    old, new = field_name(old), clean_value(old, new)
    names = {name for skill in skills for span in skill.fields for name in (span.name, f"{skill.name}.{span.name}")}
    if old in names and not is_quoted(old):
        raise SkillError(f"{old!r} is the name of a field", f"Write {old}={new}, or quote more of the line")
    skill_name, _, rest = old.partition(".")
    found = list(_found(old, new, skills))
    if not found and rest and skill_name in [skill.name for skill in skills]:
        return _only_place(rest, new, [skill for skill in skills if skill.name == skill_name])
    if not found and len(old) > 2 and old[0] in QUOTES and old[-1] in QUOTES:
        return _only_place(old[1:-1], new[1:-1] if new[0] in QUOTES and new[-1] in QUOTES else new, skills)
    if not found:
        near = listed(_nearest(old, skills), most=MOST_SHOWN)
        raise SkillError(f"no spliced skill has the text {old!r}", f"The lines that come near: {near}")
    owners = {one.skill.name for one in found}
    if len({(one.skill.name, one.field.name if one.field else one.start, one.new) for one in found}) > 1:
        lines = "; ".join(dict.fromkeys(_line_shown(one.skill, one.start) for one in found[:9]))
        other = f", or name the skill: {found[0].skill.name}.{old} => ..." if len(owners) > 1 else ""
        raise SkillError(f"the text {old!r} is in {len(found)} places: {lines}", f"Quote more of the line{other}")
    return found[0]


def _field(span: Valued) -> Field:
    return Field(span.name, span.value, span.start, span.end)


def _found(old: str, new: str, skills: Sequence[Fielded]) -> Iterator[_Place]:
    """Yield the places of a text as whole words, in any form of accents and quotation marks, also across lines."""
    words = ["".join(map(_either_form, word)) for word in unicodedata.normalize("NFC", old).split()]
    pattern = re.compile(f"(?=({GAP.join(words)}))")
    for skill in skills:
        for match in pattern.finditer(skill.text):
            start, end = match.span(1)
            if not (_within_word(skill.text, start) or _within_word(skill.text, end)):
                yield _place(skill, start, end, new)
        for span in skill.fields:
            if span.name == quoted(old) and span.value != old:  # of an earlier erratum, whose value is in its place
                yield _Place(skill, span.start, span.end, _field(span), new)


def _either_form(char: str) -> str:
    if char in QUOTES:
        return f"[{QUOTES}]"
    apart = unicodedata.normalize("NFD", char)
    return re.escape(char) if apart == char else f"(?:{char}|{apart})"


def _within_word(text: str, at: int) -> bool:
    """Return True if a position is between two characters of a word or a number."""

    def joins(char: str) -> bool:
        return unicodedata.category(char)[0] in "LMN_" or char in "_-"

    before, after = text[at - 1 : at] if at else "", text[at : at + 1]
    if not before or not after:
        return False
    if any(IN_NUMBER.fullmatch(text, first, first + 3) for first in (at - 2, at - 1) if first >= 0):
        return True
    return joins(before) and joins(after) and not (UNSPACED.match(before) or UNSPACED.match(after))


def _place(skill: Fielded, start: int, end: int, new: str) -> _Place:
    """Return a place with the field whose value has it, if need be without the words that old and new text share."""
    text = skill.text
    touched = [_field(span) for span in skill.fields if span.start < end and start < span.end]
    if not touched:
        return _Place(skill, start, end, None, new)
    old_words, new_words = (re.findall(r"\w+|\W", part) for part in (text[start:end], new))
    for cut in (False, True):
        first, last, core = start, end, new
        if cut:
            same = _shared(old_words, new_words)
            tail = _shared(old_words[same:][::-1], new_words[same:][::-1])
            first += len("".join(old_words[:same]))
            last -= len("".join(old_words[len(old_words) - tail :]))
            core = "".join(new_words[same : len(new_words) - tail])
        for field in touched:
            if field.start <= first < last <= field.end:
                value = field.value[: first - field.start] + core + field.value[last - field.start :]
                return _Place(skill, start, end, field, clean_value(field.name, value))
    name = touched[0].name
    raise SkillError(f"the text {text[start:end]!r} holds the value of field {name!r}", f"Write {name}=VALUE")


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many of the first words are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _line_shown(skill: Fielded, at: int) -> str:
    """Return the line of a place for a message."""
    first, last = skill.text.rfind("\n", 0, at) + 1, skill.text.find("\n", at)
    line = skill.text[first : last if last >= 0 else None]
    begin = max(0, min(at - first - SHOWN // 2, len(line) - SHOWN))
    shown = line[begin : begin + SHOWN].strip()
    shown = f"{'...' if begin else ''}{shown}{'...' if begin + SHOWN < len(line) else ''}"
    return f'{skill.name} line {skill.text.count(chr(10), 0, first) + 1}: "{shown}"'


def _nearest(old: str, skills: Sequence[Fielded]) -> list[str]:
    """Return the lines that share the most pairs of letters with a text, the nearest first."""
    wanted, near = _pairs(old), list[tuple[float, str]]()
    for skill in skills:
        at = 0
        for line in skill.text.split("\n"):
            share = len(wanted & _pairs(line)) / len(wanted or "1")
            near += [(-share, _line_shown(skill, at))] if share > 0.3 else []
            at += len(line) + 1
    return [line for _, line in sorted(near, key=lambda pair: pair[0])[:MOST_SHOWN]]


def _pairs(text: str) -> set[str]:
    text = unicodedata.normalize("NFC", text).casefold()
    return {text[at : at + 2] for at in range(len(text) - 1)} or {text}
