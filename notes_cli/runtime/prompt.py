"""Defines a prompt: its contents, and how its skills are placed. Renders it by the chat template, and tokenises it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from notes_cli.editing.methods import ERRATUM, Change, Method, change, free_cells
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import Help, NotesError, UnsupportedError
from notes_cli.runtime.place import Corrections, Policy, place
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum, Known, Reference, known_fields, resolve_values
from notes_cli.text.keys import listed
from notes_cli.text.messages import (
    Conversation,
    ErratumPart,
    SkillPart,
    asking,
    check_once,
    question_at,
    results_of,
    with_skills,
)
from notes_cli.text.prompt import Chunk, build, next_turn
from notes_cli.text.template import ChatTemplate

DEFAULT_SEAM = 1  # tokens recomputed at the start of a skill that follows another context than at compile time


@dataclass(frozen=True)
class Prompt:
    """Contents of a prompt: question, spliced segments, errata in order, and system text; and how segments are placed
    (assemble.py). `chunks`, `tokens` and `changes` are set by `rendered`; `replace` leaves them empty."""

    question: str
    segments: Sequence[Segment] = ()
    errata: Sequence[Erratum] = ()
    system: str | None = None
    wording: str | None = None
    # Of fields that have others now, brought in by `method`, by a reference to each (text/keys.py).
    fields: Mapping[str, str] = field(default_factory=dict)
    known: Known | None = None  # the fields of the segments
    method: Method = ERRATUM
    place: str = "early"  # of skills: "early" in the system message, "late" right before the question
    shown: frozenset[str] = frozenset()  # memory and images, in the user's message regardless of `place`
    # skills to decode instead of splicing, so that they attend to everything before them
    decoded: frozenset[str] = frozenset()
    think: bool = False  # the prompt ends where reasoning begins (runtime/generate.py continues)
    # Replaces question and system text: messages with tools, calls and results. Skills and errata that are parts
    # of them stay there; else they are placed as with a question.
    conversation: Conversation | None = None
    seam: int = DEFAULT_SEAM
    splice: bool = True  # False: decode the same tokens, the full prefill that everything is compared with
    strict: bool = False  # raise UnsupportedError for a skill whose K/V cannot be placed, instead of decoding it
    exact: bool = False  # place K/V only where it equals that of a prefill of the whole prompt
    is_raw: bool = False  # made of tokens, without a template
    chunks: tuple[Chunk, ...] = field(default=(), init=False)
    tokens: tuple[Tokens, ...] = field(default=(), init=False)  # of each chunk; of a skill those that the method leaves
    changes: Mapping[str, Change] = field(default_factory=dict, init=False)  # by skill

    @classmethod
    def raw(cls, tokens: Tokens) -> Prompt:
        """Return a prompt of these tokens, without a template."""
        return cls("", is_raw=True)._with((Chunk("text"),), (tokens,), {})

    def _with(self, chunks: tuple[Chunk, ...], tokens: tuple[Tokens, ...], changes: Mapping[str, Change]) -> Prompt:
        prompt = replace(self)
        for name, value in (("chunks", chunks), ("tokens", tokens), ("changes", changes)):
            object.__setattr__(prompt, name, value)
        return prompt

    def __len__(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.tokens))

    @property
    def cells(self) -> int:
        """Number of cells that assembling needs: its tokens, and temporary ones to edit in place and for the tokens as
        compiled where a new value is shorter."""
        by_name = {segment.name: segment for segment in self.segments}
        return len(self) + sum(
            free_cells(by_name[name], changed, self.method) + max(0, len(by_name[name]) - len(changed.tokens))
            for name, changed in (self.changes if self.method.edits_rows else {}).items()
        )

    @cached_property
    def values(self) -> list[tuple[Reference, str]]:
        """The field of one skill for each of `fields`, with its value. Raises SkillError as `resolve_values` does."""
        return resolve_values(self.fields, self.known or known_fields(*self.segments)) if self.fields else []

    @cached_property
    def placed(self) -> tuple[Conversation, Corrections]:
        """The conversation with its errata, and its corrections. The method's are those of new values. Raises
        NotesError for a conversation with other skills than the prompt."""
        if self.conversation and (_has_skills(self.conversation) or not (self.segments or self.errata)):
            _check_conversation(self, self.conversation)
            return self.conversation, Corrections()
        conversation = self.conversation or asking(self.question, system=self.system)
        skills = [segment.name for segment in self.segments if segment.name not in self.shown]
        images = [segment.name for segment in self.segments if segment.name in self.shown]
        messages = with_skills(conversation.messages, skills, place=self.place, images=images)
        at = question_at(messages) + 1
        errata = [*(reference.erratum(value) for reference, value in self.values), *self.errata]
        edits = self.segments if self.fields and self.method.edits_rows else ()
        states = self.method.appends_erratum or not self.fields
        policy = Policy({segment.name for segment in edits if not segment.media}, states, wording=self.wording)
        asked, corrections = place(messages[:at], self.segments, errata, policy=policy, known=self.known)
        return replace(conversation, messages=(*asked, *messages[at:])), corrections


def chunks_of(workspace: Workspace, prompt: Prompt) -> list[Chunk]:
    """Split a prompt into chunks; the last one is the question with the template's text around it. Raises NotesError
    for a conversation with other skills than the prompt."""
    template = workspace.thinking_template if prompt.think else workspace.template
    return build(template, prompt.placed[0])


def _has_skills(conversation: Conversation) -> bool:
    return any(isinstance(part, SkillPart | ErratumPart) for one in conversation.messages for part in one.parts)


def _check_conversation(prompt: Prompt, conversation: Conversation) -> None:
    check_once([segment.name for segment in prompt.segments])
    named = {part.name for message in conversation.messages for part in message.parts if isinstance(part, SkillPart)}
    segment_names = {segment.name for segment in prompt.segments}
    if named != segment_names:
        in_messages, in_segments = listed(sorted(named)), listed(sorted(segment_names))
        raise NotesError(f"the messages have the skills {in_messages}, and the segments given are {in_segments}")
    if prompt.errata or (prompt.fields and prompt.method.appends_erratum):
        raise NotesError("the errata of a conversation are parts of its messages")


def rendered(workspace: Workspace, prompt: Prompt, chunks: Sequence[Chunk] | None = None) -> Prompt:
    """Return the prompt with its chunks (unless given) and their tokens; BOS is a chunk of its own before a skill.
    Raises SkillError for a field that no skill has, EngineError for a prompt that is certain not to fit."""
    chunks = chunks_of(workspace, prompt) if chunks is None else chunks
    changes = changes_of(workspace, prompt)
    skills = {segment.name: segment.tokens for segment in prompt.segments}
    if prompt.method.edits_rows:
        skills |= {name: changed.tokens for name, changed in changes.items()}
    workspace.check_text("".join(chunk.text for chunk in chunks))
    tokens = [skills[chunk.name] if chunk.kind == "splice" else workspace.tokenize(chunk) for chunk in chunks]
    if chunks[0].kind != "splice":
        tokens[0] = workspace.with_bos(tokens[0])
    elif len(opening := workspace.with_bos(np.zeros(0, np.int32))):
        chunks, tokens = [Chunk("text"), *chunks], [opening, *tokens]
    return prompt._with(tuple(chunks), tuple(tokens), changes)


def rendered_with_tools(
    workspace: Workspace, prompt: Prompt, known: Iterable[Segment], open_: Callable[[Segment], Segment | None]
) -> Prompt:
    """As `rendered`, with a compiled tool set spliced where the template renders exactly its tokens. `open_` opens one
    of `known`, or returns None if it is gone."""
    from notes_cli.text.tools import with_splice  # only for conversations with tools

    chunks = chunks_of(workspace, prompt)
    used = {segment.name for segment in prompt.segments}
    if prompt.conversation and prompt.conversation.tools:
        for info in known:
            match = with_splice(chunks, info.text, info.name) if info.tools else None
            if match is None or info.name in used:
                continue
            new_chunks, runs = match
            same = np.array_equal(workspace.model.tokenize_runs(runs), info.tokens)
            if same and (segment := open_(info)) is not None:
                return rendered(workspace, replace(prompt, segments=[*prompt.segments, segment]), new_chunks)
    return rendered(workspace, prompt, chunks)


def changes_of(workspace: Workspace, prompt: Prompt) -> dict[str, Change]:
    """Return the changes of new values by skill. Raises SkillError for a field that no skill has, UnsupportedError if
    the method would edit a skill with an image: next to another one an erratum is enough."""
    if not prompt.fields:
        return {}
    values, method = prompt.values, prompt.method
    corrected = {reference.skill for reference, _ in values}
    with_images = [segment.name for segment in prompt.segments if segment.media and segment.name in corrected]
    stated = method.appends_erratum and len(with_images) < len(corrected)
    if with_images and method.edits_rows and not stated:
        text = f"{with_images[0]} has an image, and its fields cannot be edited by {method}"
        raise UnsupportedError(text, Help.OTHER_METHOD(method=ERRATUM))
    changes = {
        segment.name: change(
            workspace.model,
            segment,
            {reference.field: value for reference, value in values if reference.skill == segment.name},
        )
        for segment in prompt.segments
        if not segment.media  # its K/V cannot be edited
    }
    return {name: changed for name, changed in changes.items() if changed}


Result = tuple[str, str]  # name of a tool, and its output


def results_turn(workspace: Workspace, template: ChatTemplate, results: Sequence[Result]) -> list[Chunk]:
    """Return the prompt chunks from an answer that called these tools to the next answer. Raises ModelError if the chat
    template does not render tool results, NotesError for an invalid tool name."""
    ends = [workspace.model.token_bytes(token, special=True).decode() for token in workspace.model.end_tokens]
    return next_turn(template, results_of(results), ends=ends)
