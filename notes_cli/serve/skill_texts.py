"""Writes skills as text at the beginning of messages for another server, and corrections of their fields at the end.

That server's prefix cache hits as long as prompts begin with the same bytes. So skills come first, sorted by name and
with the values that they were read with, and other values are errata before the last message of the user or a tool.
An erratum stays before that message in later turns, as long as the conversation's requests have the same value.

A system message with a known skill's text, but with other values of its fields, is edited: it gets the skill's own
text, and errata with these values. Messages of users and tools are left as they are, since they may be about the text.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from notes_cli import output
from notes_cli.errors import Help, NotesError, SegmentError, SkillError, reason
from notes_cli.library.global_errata import GlobalErrata, holding
from notes_cli.library.segment_files import skill_named
from notes_cli.library.store import Library
from notes_cli.runtime.freshness import skill_from_segment
from notes_cli.serve.parsing import parse_notes
from notes_cli.serve.refusals import Refused, invalid
from notes_cli.serve.segment_cache import SHORTEST, skill_name
from notes_cli.text.erratum import Erratum, Known, read_errata, word
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import BREAKS
from notes_cli.text.messages import BETWEEN
from notes_cli.text.skill import Skill, load_skill, skill_file, skill_sources

Json = dict[str, Any]
Values = dict[tuple[str, str], str]  # by skill and field; a correction in free text is ("", text)
LONGEST_VALUE = 80  # characters of another value than the text has, as in the lines of fields
MOST = 4096  # messages that are remembered, the latest
SYSTEM, INPUTS = ("system", "developer"), ("user", "tool")  # roles
NEED_A_MODEL = ("session", "ask", "recompute", "cache_salt")  # keys of `notes`


@dataclass(frozen=True, slots=True)
class Placed:
    """A request for the other server, and the pieces that were put into it."""

    body: Json
    skills: tuple[str, ...]
    errata: tuple[str, ...]
    explain: bool

    @property
    def notes(self) -> Json:
        skills = [{"kind": "splice", "name": name, "how": "text"} for name in self.skills]
        return {"pieces": [*skills, *({"kind": "erratum", "text": text} for text in self.errata)]}


class SkillTexts:
    """Finds skills by name, in the library and in other texts. They are read again when a file has changed."""

    def __init__(self, library: Library, sources: Sequence[str] = (), splice: Sequence[str] = ()) -> None:
        """`sources`: files of texts, skills' folders, or folders of these, which come before the library. `splice`:
        names, and files of further texts, for requests that name no skill. Raises NotesError for one that cannot be
        read."""
        compiled = library.names()
        files = [word for word in splice if os.path.exists(word) and not skill_named(word, compiled)]
        self.errata = GlobalErrata(library.folder)
        self._library, self._sources = library, (*sources, *files)
        self._lock = threading.Lock()
        self._stamp, self._skills = self._read()
        self._problem = ""
        self.splice = tuple(self.find(load_skill(word).name if word in files else word).name for word in splice)

    def all(self) -> Mapping[str, Skill]:
        """Return the skills by name. If a file has become unreadable, they stay as they were, and a line reports it."""
        with self._lock:
            try:
                if self._files() != self._stamp:
                    self._stamp, self._skills = self._read()
                self._problem = ""
            except NotesError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    output.say(f"warning: skills stay as they were: {error}")
            return self._skills

    def find(self, word: str) -> Skill:
        """Return the skill that a client names. Raises SegmentError."""
        skill = self.all().get(skill_name(word))
        if skill is None:
            raise SegmentError(f"no skill {word[:80]!r}", Help.LIST_SKILLS())
        return skill

    def values(self, skill: Skill) -> dict[str, str]:
        """Return the values that global errata set and that differ from the skill's text, by field."""
        return holding(self.errata.all(), skill)

    def _files(self) -> list[tuple[object, ...]]:
        texts = [skill_file(one) for source in self._sources for one in skill_sources(source)]
        folder = self._library.folder  # its time changes with every compile
        try:
            stats = [(path, os.stat(path)) for path in (*texts, *([folder] if folder.exists() else []))]
        except OSError as error:
            raise SkillError(f"cannot read {error.filename}: {reason(error)}") from error
        return [(path, status.st_ino, status.st_size, status.st_mtime_ns) for path, status in stats]

    def _read(self) -> tuple[list[tuple[object, ...]], dict[str, Skill]]:
        stamp, texts = self._files(), dict[str, Skill]()
        for source in self._sources:
            for one in skill_sources(source):
                skill = replace(load_skill(one), source=str(Path(one).absolute()))
                for warning in skill.warnings:
                    output.say(f"warning: {warning}")
                if texts.setdefault(skill.name, skill).source != skill.source:
                    raise SkillError(f"{one} and {texts[skill.name].source} are both called {skill.name}")
        infos = [entry.info for entry in self._library.entries() if entry.info]
        infos = sorted((info for info in infos if not (info.tools or info.media)), key=lambda info: info.created)
        compiled = {info.name: skill_from_segment(info) for info in infos}
        return stamp, {**compiled, **{name: skill for name, skill in texts.items() if not skill.pictures}}


class Placer:
    """Edits requests. Any thread may use it."""

    def __init__(self, texts: SkillTexts, errata: Sequence[str] = ()) -> None:
        """`errata`: for requests that name no skill and have no errata."""
        self.texts, self._errata = texts, tuple(errata)
        self._lock = threading.Lock()
        self._stated: OrderedDict[bytes, Values] = OrderedDict()  # by digest of the messages up to the errata's

    def skills_of_alias(self, model: object) -> tuple[object, list[str]]:
        """Return the model and the skills of `model@returns+support`. Raises Refused for a word that is no skill."""
        base, at, tail = model.rpartition("@") if isinstance(model, str) else ("", "", "")
        if not base:
            return model, []
        words, known = [word for word in tail.split("+") if word], self.texts.all()
        if unknown := [word for word in words if skill_name(word) not in known] or ([] if words else [at]):
            message = f"The model '{base[:80]}' may be named with skills after an @, and {unknown[0][:80]!r} is none"
            raise Refused(404, message, param="model", code="model_not_found")
        return base, words

    def place(self, data: Any, client: str = "") -> Placed:
        """Put skills and errata into a chat request. `client`: as in ChatRequest. Raises NotesError."""
        if not isinstance(data, dict):
            raise Refused(400, "the body must be a JSON object")
        body, given = {name: value for name, value in data.items() if name != "notes"}, data.get("notes")
        for key in NEED_A_MODEL:
            if isinstance(given, dict) and given.get(key):
                message = f"notes.{key} needs a model of this server, which only passes requests on"
                raise Refused(400, message, param=f"notes.{key}", code="unsupported_value")
        notes = parse_notes(given)
        model, words = self.skills_of_alias(body.get("model"))
        body |= {"model": model} if words else {}
        if not words and "splice" not in notes.given:
            errata = notes.errata if notes.given & {"errata", "fields"} else self._errata
            notes = replace(notes, splice=self.texts.splice, errata=errata)
        skills = {skill.name: skill for skill in map(self.texts.find, (*words, *notes.splice))}
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise invalid("messages", "messages must be a list of objects")
        for number, message in enumerate(messages):
            if not isinstance(message.get("content"), str | list | None):
                name = f"messages[{number}].content"
                raise invalid(name, f"{name} must be a text, a list or null")
        body["messages"] = messages = copy.deepcopy(messages)
        found = _match(messages, self.texts.all().values()) if notes.match else {}
        named = {name: (skills[name], dict[str, str]()) for name in sorted(skills) if name not in found}
        present, values = dict[str, Skill](), Values()
        for name, (skill, others) in {**named, **found}.items():
            present[name] = skill
            values |= {(name, each): value for each, value in {**self.texts.values(skill), **others}.items()}
        known = Known((name, skill.values) for name, skill in present.items())
        for erratum in read_errata(notes.errata, known):
            if erratum.field is None or erratum.value is None:
                values["", erratum.text] = erratum.text
            for reference in known.find(erratum.key) if erratum.field else ():
                values[reference.skill, reference.field] = erratum.value or ""
        values = {key: value for key, value in values.items() if not key[0] or present[key[0]].values[key[1]] != value}
        stated = self._state(messages, values, known, client)
        if named:
            if messages[:1] == [] or messages[0].get("role") not in SYSTEM:
                messages.insert(0, {"role": "system", "content": ""})
            _put_before(messages[0], [skill.text for skill, _ in named.values()])
        return Placed(body, tuple(present), tuple(stated), notes.explain)

    def _state(self, messages: list[Json], values: Values, known: Known, client: str) -> list[str]:
        """Put errata before messages of the user or of tools, and return those that hold now."""
        if values and not any(message.get("role") in INPUTS for message in messages):
            messages.append({"role": "user", "content": ""})
        last = max((number for number, message in enumerate(messages) if message.get("role") in INPUTS), default=-1)
        missing, digest, places = dict(values), hashlib.sha256(client.encode()), dict[int, Values]()
        with self._lock:
            for number, message in enumerate(messages):
                digest.update(json.dumps(message, sort_keys=True).encode() + b"\0")
                if message.get("role") not in INPUTS:
                    continue
                if number == last:
                    places[number] = missing
                    if missing:
                        self._stated[digest.digest()] = missing
                        self._stated.move_to_end(digest.digest())
                    break
                earlier = self._stated.get(digest.digest(), {})
                places[number] = {key: value for key, value in earlier.items() if missing.get(key) == value}
                missing = {key: value for key, value in missing.items() if key not in places[number]}
            while len(self._stated) > MOST:
                self._stated.popitem(last=False)
        for number, stated in places.items():
            _put_before(messages[number], [_sentence(known, key, value) for key, value in stated.items()])
        return [_sentence(known, key, value) for stated in places.values() for key, value in stated.items()]


def _sentence(known: Known, key: tuple[str, str], value: str) -> str:
    skill, name = key
    if not skill:
        return word(Erratum(None, None, value))
    shared = any(reference.shared for reference in known.find(f"{skill}.{name}"))
    return word(Erratum(name, value, "", skill if shared else ""))


def _put_before(message: Json, texts: Sequence[str]) -> None:
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [*({"type": "text", "text": text} for text in texts), *content]
    else:
        message["content"] = BETWEEN.join([*texts, *([content] if content else [])])


# Texts of skills in messages.

_Slot = tuple[Json, str, bool]  # a text: its object, its key there, and True if it may be edited


def _match(messages: Sequence[Json], skills: Iterable[Skill]) -> dict[str, tuple[Skill, dict[str, str]]]:
    """Find the texts of skills in messages, longest first, and give them the values of the skills. Return them with the
    values that they had instead. A skill with copies of different values is left as it is: the messages may compare
    them."""
    slots, found = list(_slots(messages)), dict[str, tuple[Skill, dict[str, str]]]()
    for skill in sorted(skills, key=lambda skill: -len(skill.text)):
        constants = _constants(skill)
        longest = max(constants, key=len)
        with_it = [slot for slot in slots if longest in slot[0][slot[1]]]
        if sum(map(len, constants)) < SHORTEST or not with_it:
            continue
        pattern = _pattern(skill)
        copies = [(_values(skill, match), slot) for slot in with_it for match in pattern.finditer(slot[0][slot[1]])]
        first = copies[0][0] if copies else None
        if first is None or any(values != first or (values and not slot[2]) for values, slot in copies):
            continue
        found[skill.name] = skill, first
        for holder, key, _ in with_it:  # shorter skills are not looked for in this one
            holder[key] = pattern.sub(f"\0{skill.name}\0", holder[key])
    for holder, key, _ in slots:
        for skill, _ in found.values():
            holder[key] = holder[key].replace(f"\0{skill.name}\0", skill.text)
    return found


def _slots(messages: Sequence[Json]) -> Iterator[_Slot]:
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role in (*SYSTEM, *INPUTS):
            parts = content if isinstance(content, list) else []
            holders = [(message, "content"), *((part, "text") for part in parts if isinstance(part, dict))]
            yield from ((holder, key, role in SYSTEM) for holder, key in holders if isinstance(holder.get(key), str))


def _constants(skill: Skill) -> list[str]:
    starts, ends = [place.start for place in skill.fields], [place.end for place in skill.fields]
    return [skill.text[at:end] for at, end in zip([0, *ends], [*starts, len(skill.text)], strict=True)]


@lru_cache(256)
def _pattern(skill: Skill) -> re.Pattern[str]:
    """Return a pattern of whole lines for the skill's text with any values, each the same in all its places."""
    groups = dict[str, str]()
    pattern, *constants = map(re.escape, _constants(skill))
    for place, constant in zip(skill.fields, constants, strict=True):
        if place.name in groups:
            pattern += f"(?P={groups[place.name]}){constant}"
        else:
            groups[place.name] = group = f"v{len(groups)}"
            most = max(LONGEST_VALUE, len(place.value)) - 2
            pattern += rf"(?P<{group}>[^\s=](?:[^{BREAKS}]{{0,{most}}}[^\s])?){constant}"
    return re.compile(rf"(?<![^\n]){pattern}(?![^\n])")


def _values(skill: Skill, match: re.Match[str]) -> dict[str, str] | None:
    """Return the values that differ from the skill's; None if one cannot be a field's value."""
    values = dict(zip(skill.values, match.groups(), strict=True))
    try:
        return {name: clean_value(name, value) for name, value in values.items() if value != skill.values[name]}
    except SkillError:
        return None
