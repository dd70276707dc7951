"""From what is asked to a prompt in pieces: which skills it has and where, what is said of them, how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import ModelError, NotesError
from notes_cli.runtime.assembling import Prompt, parse_errata, parts_of
from notes_cli.runtime.prefixes import Layout, Prefixes
from notes_cli.runtime.settings import UNMEASURED, defaults
from notes_cli.runtime.thinking import ROOM
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.parsing import Asked
from notes_cli.serve.refusals import Refused
from notes_cli.serve.shelf import Shelf
from notes_cli.text.erratum import word
from notes_cli.text.messages import Conversation, ErratumPart, Message, Part, SkillPart

MATCHED = ("system", "user", "tool")  # messages in which texts of skills are looked for


@dataclass(frozen=True, slots=True)
class Laid:
    """A request, ready to be read and answered."""

    asked: Asked
    layout: Layout
    think: bool
    limit: int  # tokens of the answer
    room: int  # tokens that are written at most, a chain of thought and all


def model_of(model: str, known: Sequence[str]) -> tuple[str, ...]:
    """The skills that a model's alias names, `model@returns+support`. Raise Refused for another model."""
    base, _, skills = model.partition("@")
    if model in known or not model:
        return ()
    if base not in known:
        raise Refused(
            404, f"The model '{model[:80]}' does not exist. There is {known[0]}", param="model", code="model_not_found"
        )
    return tuple(name for name in skills.split("+") if name)


def lay(workspace: Workspace, shelf: Shelf, prefixes: Prefixes, asked: Asked, known: Sequence[str], most: int) -> Laid:
    """Lay a request out. `known`: what the model is called; `most`: tokens of an answer. Raise NotesError."""
    named = model_of(asked.model, known)
    if asked.prompt is not None:
        if named:
            raise Refused(400, "skills are spliced into messages: use /v1/chat/completions", param="model")
        return _finished(workspace, asked, prefixes.raw(_raw(workspace, asked.prompt)), False, most)
    skills: dict[str, Segment] = {}
    for name in (*named, *asked.notes.splice):
        segment = shelf.segment(name)
        skills.setdefault(segment.name, segment)
    return laid_out(workspace, shelf, prefixes, asked, skills, most)


def laid_out(
    workspace: Workspace, shelf: Shelf, prefixes: Prefixes, asked: Asked, skills: dict[str, Segment], most: int
) -> Laid:
    """Lay messages out, with these skills in the system message and those that are matched where they are."""
    writing = asked.writing
    think = writing.think and (writing.max_think > 0 or bool(workspace.reasoning.open))
    named, found = dict(skills), dict(skills)
    messages = list(asked.messages)
    if asked.notes.match and not asked.notes.cache_salt:
        messages = [
            replace(one, parts=shelf.matched(one.parts, found)) if one.role in MATCHED else one for one in messages
        ]
    settings = defaults(workspace, think=think) if found else UNMEASURED
    errata = parse_errata(asked.notes.errata, list(found.values()))
    given: list[Part] = [
        *map(SkillPart, named),
        *(ErratumPart(word(one, settings.wording)) for one in errata),
    ]
    messages = _placed(messages, given, settings.place)

    def layout(messages: Sequence[Message], segments: Sequence[Segment]) -> Layout:
        conversation = Conversation(tuple(messages), asked.tools)
        prompt = Prompt("", segments, think=think, conversation=conversation)
        parts = parts_of(workspace, prompt)
        return prefixes.layout(prompt, parts, settings.seam, splice=not asked.notes.recompute)

    try:
        made = layout(messages, list(found.values()))
    except ModelError:
        if len(found) == len(named):
            raise
        # A template that encodes results of tools has no place for a skill there: the text goes as it is.
        plain = replace(asked, notes=replace(asked.notes, match=False))
        return laid_out(workspace, shelf, prefixes, plain, named, most)
    return _finished(workspace, asked, made, think, most)


def _placed(messages: list[Message], given: list[Part], place: str) -> list[Message]:
    """The messages with skills and errata at the end of the system message, or before the last question."""
    if not given:
        return messages
    if place == "late":
        last = max((number for number, one in enumerate(messages) if one.role == "user"), default=None)
        if last is None:
            raise NotesError("there is no message of the user to put skills before")
        messages[last] = replace(messages[last], parts=(*given, *messages[last].parts))
    elif messages[0].role == "system":
        messages[0] = replace(messages[0], parts=(*messages[0].parts, *given))
    else:
        messages.insert(0, Message("system", tuple(given)))
    return messages


def _finished(workspace: Workspace, asked: Asked, layout: Layout, think: bool, most: int) -> Laid:
    """With how much may be written."""
    writing = asked.writing
    workspace.check_length(len(layout) + 1)
    limit = most if writing.limit is None else min(writing.limit, most)
    thinks = asked.prompt is None and (think or workspace.reasoning.open)
    room = limit + (writing.max_think + ROOM if thinks else 0)
    if workspace.longest is not None:
        room = min(room, workspace.longest - len(layout))
    return Laid(asked, layout, think, limit, room)


def _raw(workspace: Workspace, prompt: str | tuple[int, ...]) -> Tokens:
    """The tokens of a raw prompt, in which control tokens are such."""
    if isinstance(prompt, str):
        tokens = workspace.opened(workspace.model.tokenize(prompt, special=True))
    else:
        tokens = np.array(prompt, np.int32)
    if not len(tokens):
        raise Refused(400, "the prompt is empty", param="prompt")
    if (strange := workspace.model.unknown(tokens.tolist())) is not None:
        raise Refused(400, f"there is no token {strange}", param="prompt")
    return tokens
