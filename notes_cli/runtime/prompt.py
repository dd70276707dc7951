"""A prompt: what it says, in which chunks, and the tokens of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from notes_cli.editing.change import Change, change
from notes_cli.editing.methods import ERRATUM, Method
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import Help, NotesError, UnsupportedError
from notes_cli.library.info import SegmentInfo
from notes_cli.runtime.corrections import resolve_values
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum, word
from notes_cli.text.keys import listed
from notes_cli.text.messages import Conversation, SkillPart, asking, check_once
from notes_cli.text.prompt import Chunk, build

_OPENING = Chunk("text")  # BOS


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: the question, the spliced segments, errata in the order given, and the system text before all."""

    question: str
    segments: Sequence[Segment] = ()
    errata: Sequence[Erratum] = ()
    system: str | None = None
    wording: str | None = None
    turns: Sequence[tuple[str, str]] = field(default=())
    # Of fields that have others now, brought in by `method`, by a reference to each (text/keys.py).
    fields: Mapping[str, str] = field(default_factory=dict)
    method: Method = field(default_factory=Method)
    place: str = "early"  # of skills: in the system message, or "late": right before the question
    shown: frozenset[str] = frozenset()  # segments that are in the user's message, wherever skills are
    decoded: frozenset[str] = frozenset()  # skills whose tokens are decoded instead: they see what precedes them
    think: bool = False  # the prompt ends where a chain of thought begins (runtime/generate.py goes on)
    # Instead of question, system text, turns, place and errata: messages made of parts, with tools, calls and results.
    conversation: Conversation | None = None

    @property
    def after_skills(self) -> list[str]:
        """The errata after the skills: those of a method that refreshes the entries of fields, too."""
        return [
            word(erratum, self.wording) for erratum in (self.method_errata if self.method.record.edits_rows else ())
        ]

    @property
    def before_question(self) -> list[str]:
        """The errata before the question: those of a method that leaves all entries, then those in free words."""
        before = () if self.method.record.edits_rows else self.method_errata
        return [word(erratum, self.wording) for erratum in (*before, *self.errata)]

    @property
    def method_errata(self) -> list[Erratum]:
        """The method's errata: one for each value, if it appends any."""
        if not self.method.record.appends_erratum:
            return []
        return [
            Erratum(one.field, value, f"{one.key}={value}", one.skill if one.shared else "")
            for one, value in resolve_values(self.fields, self.segments)
        ]


@dataclass(frozen=True, slots=True)
class Parts:
    """A prompt as chunks with the tokens of each; of a skill the most that it takes, before or after its change."""

    chunks: tuple[Chunk, ...]
    tokens: tuple[Tokens, ...]
    opening: Tokens  # BOS, where the first chunk is a skill
    changes: Mapping[str, Change]  # by skill
    asking: int = 1  # how many chunks at the end are what is asked, with the template's words around it

    @property
    def stem(self) -> Parts:
        """All but the last chunk, what is asked."""
        return replace(self, chunks=self.chunks[:-1], tokens=self.tokens[:-1], asking=self.asking - 1)

    @property
    def all_chunks(self) -> Iterator[tuple[Chunk, Tokens]]:
        """The chunks with their tokens, in the order of the prompt: BOS first, where it is apart."""
        return zip((_OPENING, *self.chunks), (self.opening, *self.tokens), strict=True)

    @property
    def count(self) -> int:
        """Tokens in all."""
        return len(self.opening) + sum(map(len, self.tokens))


def chunks_of(workspace: Workspace, prompt: Prompt) -> list[Chunk]:
    """The chunks of a prompt; the question, with the template's words around it, is the last one.

    Raise NotesError for a conversation whose skills are not those of the prompt.
    """
    template = workspace.thinking_template if prompt.think else workspace.template
    if prompt.conversation:
        _check_conversation(prompt, prompt.conversation)
        return build(template, prompt.conversation)
    conversation = asking(
        prompt.question,
        system=prompt.system,
        skills=[segment.name for segment in prompt.segments if segment.name not in prompt.shown],
        images=[segment.name for segment in prompt.segments if segment.name in prompt.shown],
        after_skills=prompt.after_skills,
        before_question=prompt.before_question,
        turns=prompt.turns,
        place=prompt.place,
    )
    return build(template, conversation)


def _check_conversation(prompt: Prompt, conversation: Conversation) -> None:
    check_once([segment.name for segment in prompt.segments])
    named = {part.name for message in conversation.messages for part in message.parts if isinstance(part, SkillPart)}
    given = {segment.name for segment in prompt.segments}
    if named != given:
        there, here = listed(sorted(named)), listed(sorted(given))
        raise NotesError(f"the messages have the skills {there}, and the segments given are {here}")
    if prompt.after_skills or prompt.before_question:
        raise NotesError("the errata of a conversation are parts of its messages")


def parts_of(workspace: Workspace, prompt: Prompt, chunks: Sequence[Chunk] | None = None) -> Parts:
    """The chunks of a prompt and their tokens. `chunks`: they have been made already. Raise SkillError for a field that
    no skill has."""
    by_name = {segment.name: segment for segment in prompt.segments}
    chunks = chunks_of(workspace, prompt) if chunks is None else chunks
    changes = changes_of(workspace, prompt)
    tokens = [
        _longest(by_name[chunk.name], changes) if chunk.kind == "splice" else workspace.tokenize(chunk)
        for chunk in chunks
    ]
    opening = workspace.with_bos(np.zeros(0, np.int32))  # BOS, where a template without words of its own begins
    if chunks[0].kind != "splice":
        tokens[0], opening = workspace.with_bos(tokens[0]), opening[:0]
    return Parts(tuple(chunks), tuple(tokens), opening, changes)


def with_tools(
    workspace: Workspace, prompt: Prompt, known: Iterable[SegmentInfo], open_: Callable[[SegmentInfo], Segment | None]
) -> tuple[Prompt, list[Chunk]]:
    """The prompt with a compiled set of tools in the place where its template tells of the very same ones, token by
    token, and its chunks; both as they are where none is known. `open_` gives the one of `known` that is placed, None
    where it is not there any more."""
    from notes_cli.text.toolset import with_splice  # for those whose conversation has tools

    chunks = chunks_of(workspace, prompt)
    taken = {segment.name for segment in prompt.segments}
    if prompt.conversation and prompt.conversation.tools:
        for info in known:
            found = with_splice(chunks, info.text, info.name) if info.tools else None
            if found is None or info.name in taken:
                continue
            cut, runs = found
            same = np.array_equal(workspace.model.tokenize_runs(runs), info.tokens)
            if same and (segment := open_(info)) is not None:
                return replace(prompt, segments=[*prompt.segments, segment]), cut
    return prompt, chunks


def changes_of(workspace: Workspace, prompt: Prompt) -> dict[str, Change]:
    """What the prompt's new values change, by skill. Raise SkillError for a field that no skill has."""
    values = resolve_values(prompt.fields, prompt.segments)
    for segment in prompt.segments if prompt.method.record.edits_rows else ():
        if segment.media and any(one.skill == segment.name for one, _ in values):
            what = f"{segment.name} has an image, and its fields cannot be edited by {prompt.method.name}"
            raise UnsupportedError(what, Help.OTHER_METHOD(method=ERRATUM))
    found = {
        segment.name: change(
            workspace.model, segment, {one.field: value for one, value in values if one.skill == segment.name}
        )
        for segment in prompt.segments
        if not segment.media  # of which no row is edited
    }
    return {name: changed for name, changed in found.items() if changed}


def _longest(segment: Segment, changes: Mapping[str, Change]) -> Tokens:
    """The most tokens that a skill takes, before or after its change."""
    changed = changes.get(segment.name)
    return changed.tokens if changed and len(changed.tokens) > len(segment) else segment.tokens
