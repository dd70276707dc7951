"""Reasoning: how a model thinks before it answers. What differs between models is in prompts/reasoning.json.

Most put their chain of thought between marks, which their chat template knows; others are asked for it by a cue
after the question. It knows texts only: no tokens, no sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from notes_cli.config import resource
from notes_cli.text.prompt import generation_prompt
from notes_cli.text.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one model thinks. `open` and `close` are empty if it knows no marks; then there is a `cue`."""

    name: str = ""
    known: Sequence[str] = ()  # texts of its chat template that tell it from others
    open: str = ""
    close: str = ""
    answer: str = ""  # between the chain and the answer
    direct: str = ""  # opens an answer without a chain, if the template does not
    end: str = ""  # follows the answer
    thinking: Mapping[str, object] = field(default_factory=dict)  # variables of the template
    otherwise: Mapping[str, object] = field(default_factory=dict)
    cue: str = ""
    inside: re.Pattern[str] | None = None  # finds the answer in a chain that ends with it

    def template(self, template: ChatTemplate, think: bool) -> ChatTemplate:
        """The template as the model's answer is to begin: with its chain of thought, or without one.

        Raise ModelError if the template fails.
        """
        template = template.with_options(self.thinking if think else self.otherwise)
        opened = self.opened(generation_prompt(template))
        free = self.calling
        answered = template.with_words(
            self.closing if opened else self.direct, calling=free.closing if opened else free.direct
        )
        if not think:
            return answered
        return template.with_words("" if opened else self.open, self.cue, answered)

    @property
    def calling(self) -> Reasoning:
        """The same where the answer may be a call of a tool, so that the model itself writes what opens it."""
        return replace(self, answer="" if self.answer.strip() else self.answer, direct="") if self.open else self

    @property
    def closing(self) -> str:
        """The text that ends a chain which did not end by itself, up to where the answer begins."""
        return self.close + self.answer

    def opened(self, text: str) -> bool:
        """Whether the text leaves a chain open."""
        return bool(self.open) and text.rfind(self.open.strip()) > text.rfind(self.close.strip())

    def found(self, chain: str) -> re.Match[str] | None:
        """The answer at the end of the chain itself, as group 1."""
        if self.inside is None:
            return None
        return next(reversed([*self.inside.finditer(chain)]), None)


class Until:
    """A text that comes in parts, up to the first mark: what may be the beginning of one is held back."""

    def __init__(self, mark: str, also: Sequence[str] = ()) -> None:
        """`also`: other marks, to the very blank."""
        self.found = False
        self.rest = ""  # what came after the mark
        self._marks = [one for one in (mark.strip(), *also) if one]
        self._held = ""

    def feed(self, text: str) -> str:
        """What is certainly before the mark."""
        if self.found or not self._marks:
            self.rest += text if self.found else ""
            return "" if self.found else text
        text = self._held + text
        places = [(place, -len(mark), mark) for mark in self._marks if (place := text.find(mark)) >= 0]
        if places:
            place, _, mark = min(places)
            self.found, self.rest, self._held = True, text[place + len(mark) :], ""
            return text[:place]
        begun = (n for mark in self._marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
        kept = max(begun, default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


class Begins:
    """A text that comes in parts: does it begin with a mark? It is held back until that is known."""

    def __init__(self, mark: str) -> None:
        self.found = False
        self.rest = ""  # what came after the mark
        self._mark = mark.strip()
        self._waits = bool(self._mark)
        self._held = ""

    def feed(self, text: str) -> str:
        """What is not the mark."""
        if not self._waits:
            return text
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith(self._mark):
            self.found, self.rest, self._held = True, begun[len(self._mark) :], ""
        elif not self._mark.startswith(begun):
            self._waits = False
        return "" if self._waits else self.flush()

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


def reasoning_of(source: str, name: str, table: Table | None = None) -> Reasoning:
    """How the model with that chat template and name thinks."""
    table = table or shipped_table()
    for entry in table.marks:
        texts = [text in source for text in entry.known or (entry.open.strip(), entry.close.strip())]
        if all(texts) or (any(texts) and not entry.known):
            return entry
    return next(entry for entry in table.cues if name.startswith(entry.name))


@dataclass(frozen=True, slots=True)
class Table:
    """The content of prompts/reasoning.json, in which `switches` has the template variables that all models get.

    Attributes:
        marks: Models that put their chain of thought between marks. A model has the first entry all of whose `known`
            texts (without these: `open` or `close`) its chat template contains. From the templates in llama.cpp's
            models/templates; Hunyuan and EXAONE Deep from their model cards.
        cues: Models without marks, by the beginning of their names; the last entry is for all others. The shipped
            model ends its chain with the outcome, which `inside` finds: on 50 held-out decisions 49 were right with
            the text as it is and 44 with an erratum; weighing the choices after a cue gave 34 at most.
    """

    marks: Sequence[Reasoning]
    cues: Sequence[Reasoning]


@cache
def shipped_table() -> Table:
    """The table that ships with notes."""
    data = json.loads((resource("prompts") / "reasoning.json").read_text(encoding="utf-8"))
    marks, cues = ([_entry(entry, data["switches"]) for entry in data[kind]] for kind in ("marks", "cues"))
    return Table(marks, cues)


def _entry(entry: Mapping[str, Any], switches: Mapping[str, Any]) -> Reasoning:
    options = {way: {**switches[way], **entry.get(way, {})} for way in ("thinking", "otherwise")}
    inside = re.compile(entry["inside"]) if "inside" in entry else None
    return Reasoning(**{**entry, **options, "inside": inside})
