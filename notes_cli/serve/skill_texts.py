"""Writes skills as text at the beginning of messages for another server, and corrections of their fields at the end.

That server's prefix cache hits as long as prompts begin with the same bytes. So skills come first, sorted by name and
with the values that they were read with, and other values are errata in the last message of the user or a tool. They
stay there in later turns (conversations.py), as long as the conversation's requests have them.

A system message with a known skill's text, but with other values of its fields, is edited: it gets the skill's own
text, and errata with these values. Messages of users and tools are left as they are, since they may be about the text.
"""

from __future__ import annotations

import copy
import json
import os
import re
import threading
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
from notes_cli.serve.conversations import Conversations, add_errata, prefix_digests
from notes_cli.serve.parsing import BILLING, ChatRequest, parse_notes
from notes_cli.serve.refusals import Refused, invalid, renaming
from notes_cli.serve.segment_cache import SHORTEST, skill_name
from notes_cli.text.erratum import of_fields
from notes_cli.text.fields import any_quoted, clean_value
from notes_cli.text.keys import BREAKS
from notes_cli.text.messages import BETWEEN, ErratumPart, Message, SkillPart, TextPart
from notes_cli.text.skill import Skill, load_skill, skill_file, skill_sources

Json = dict[str, Any]
LONGEST_VALUE = 80  # characters of another value than the text has, as in the lines of fields
MARK = f"<{os.urandom(8).hex()}>"  # around the name of a skill in the place of its text; clients cannot know it
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
                    output.warn(f"skills stay as they were: {error}")
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
                    output.warn(warning)
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
        self._conversations: Conversations[Skill] = Conversations()

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
        for holder, key, system in _slots(messages):
            if system:
                holder[key] = BILLING.sub("", holder[key])
        found = _match(messages, self.texts.all().values()) if notes.match else {}
        named = [skills[name] for name in sorted(skills) if name not in found]
        present = {skill.name: skill for skill in (*named, *(skill for skill, _ in found.values()))}
        changed = {f"{name}.{key}": value for name, (_, values) in found.items() for key, value in values.items()}
        notes = replace(notes, splice=tuple(skills), errata=(*of_fields(changed), *notes.errata))
        if added := not any(message.get("role") in INPUTS for message in messages):
            messages.append({"role": "user", "content": ""})  # for errata
        stated = self._add_errata(messages, named, present, ChatRequest(str(model), notes=notes, client=client))
        if added and not messages[-1]["content"]:
            messages.pop()
        for holder, key, _ in _slots(messages):
            texts = holder[key].split(MARK)
            holder[key] = "".join(found[text][0].text if number % 2 else text for number, text in enumerate(texts))
        if named:
            if messages[:1] == [] or messages[0].get("role") not in SYSTEM:
                messages.insert(0, {"role": "system", "content": ""})
            _put_before(messages[0], [skill.text for skill in named])
        return Placed(body, tuple(present), tuple(stated), notes.explain)

    def place_in(self, keys: tuple[str, str], data: Any, client: str = "") -> Placed:
        """As `place`, for a request of another API. `keys`: those of its system text and of its messages."""
        head_key, key = keys
        given = data.get(key) if isinstance(data, dict) else None
        listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(listed, list):
            raise invalid(key, f"{key} must be a list")
        head = [{"role": "system", "content": data[head_key]}] if data.get(head_key) else []
        rest = {name: value for name, value in data.items() if name not in keys}
        places = {f"messages[{number}]": f"{key}[{number - len(head)}]" for number in range(len(head), 1 + len(listed))}
        with renaming({**places, "messages[0].content": head_key, "messages": key}):
            placed = self.place({**rest, "messages": [*head, *listed]}, client)
        messages = placed.body.pop("messages")
        if head or (_begins_with_system(messages) and not _begins_with_system(listed)):
            placed.body[head_key] = messages.pop(0)["content"]
        for message in messages if key == "input" else ():
            for part in message["content"] if isinstance(message.get("content"), list) else ():
                part["type"] = "input_text" if part.get("type") == "text" else part.get("type")
        placed.body[key] = messages
        return placed

    def _add_errata(
        self, messages: list[Json], named: Sequence[Skill], present: dict[str, Skill], chat: ChatRequest
    ) -> list[str]:
        """Put the errata of earlier turns and new ones into messages. Return them all."""
        chat = replace(chat, messages=tuple(map(_message, messages)))
        digests = prefix_digests(chat)
        state, _ = self._conversations.find(chat, digests)
        errata = chat.notes.errata
        if any_quoted(errata):
            from notes_cli.text.quotations import name_quoted

            errata, _, added = name_quoted(errata, {}, [*present.values()])
            present |= {name: replace(present[name], fields=fields) for name, fields in added.items()}
        head = Message("system", tuple(SkillPart(skill.name) for skill in named))
        end = 1 + max(number for number, message in enumerate(messages) if message.get("role") in INPUTS)
        placed, state = add_errata(
            *(state, [head, *chat.messages[:end]], present, self.texts.errata.all(), errata, None), head=True
        )
        self._conversations.keep(chat, digests, replace(state, client_errata=chat.notes.errata), ())
        stated = [[part.sentence for part in one.parts if isinstance(part, ErratumPart)] for one in placed[1:]]
        for message, sentences in zip(messages, stated, strict=False):
            _put_after_skills(message, sentences)
        return [sentence for sentences in stated for sentence in sentences]


def _message(message: Json) -> Message:
    """Return a message of the client with parts for its skills. Its text is the whole message, for the digest."""
    role, slots = str(message.get("role")), _slots([message])
    names = [name for holder, key, _ in slots for name in holder[key].split(MARK)[1::2]]
    text = TextPart(json.dumps(message, sort_keys=True))
    return Message("system" if role in SYSTEM else role, (text, *map(SkillPart, names)))


def _put_after_skills(message: Json, texts: Sequence[str]) -> None:
    """Add texts after the last skill in a message, without one at its beginning."""
    for holder, key, _ in reversed([*_slots([message])] if texts else []):
        before, mark, after = holder[key].rpartition(MARK)
        if mark:
            holder[key] = BETWEEN.join([before + mark, *texts, *([after.lstrip("\n")] if after.strip() else [])])
            return
    _put_before(message, texts)


def _begins_with_system(messages: Sequence[Json]) -> bool:
    return bool(messages) and messages[0].get("role") == "system"


def _put_before(message: Json, texts: Sequence[str]) -> None:
    content = message.get("content")
    if isinstance(content, list):
        results = sum(isinstance(part, dict) and part.get("type") == "tool_result" for part in content)  # come first
        message["content"] = [
            *content[:results],
            *({"type": "text", "text": text} for text in texts),
            *content[results:],
        ]
    elif texts:
        message["content"] = BETWEEN.join([*texts, *([content] if content else [])])


# Texts of skills in messages.

_Slot = tuple[Json, str, bool]  # a text: its object, its key there, and True if it may be edited


def _match(messages: Sequence[Json], skills: Iterable[Skill]) -> dict[str, tuple[Skill, dict[str, str]]]:
    """Find the texts of skills in messages, longest first, and give them the values of the skills. Return them with the
    values that they had instead. In the messages each is replaced by its name between two of MARK. A skill with copies
    of different values is left as it is: the messages may compare them."""
    slots, found = list(_slots(messages)), dict[str, tuple[Skill, dict[str, str]]]()
    for skill in sorted(skills, key=lambda skill: -len(skill.text)):
        constants = _constants(skill)
        longest = max("\n".join(constants).split("\n"), key=len)
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
            holder[key] = pattern.sub(f"{MARK}{skill.name}{MARK}", holder[key])
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
    lines = (map(re.escape, constant.split("\n")) for constant in _constants(skill))
    pattern, *constants = map(r"[ \t\r]*\n".join, lines)
    for place, constant in zip(skill.fields, constants, strict=True):
        if place.name in groups:
            pattern += f"(?P={groups[place.name]}){constant}"
        else:
            groups[place.name] = group = f"v{len(groups)}"
            most = max(LONGEST_VALUE, len(place.value)) - 2
            pattern += rf"(?P<{group}>[^\s=](?:[^{BREAKS}]{{0,{most}}}[^\s])?){constant}"
    return re.compile(rf"(?<![^\n]){pattern}(?=[ \t\r]*(?:\n|\Z))")


def _values(skill: Skill, match: re.Match[str]) -> dict[str, str] | None:
    """Return the values that differ from the skill's; None if one cannot be a field's value."""
    values = dict(zip(skill.values, match.groups(), strict=True))
    try:
        return {name: clean_value(name, value) for name, value in values.items() if value != skill.values[name]}
    except SkillError:
        return None
