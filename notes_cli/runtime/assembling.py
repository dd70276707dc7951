"""From a prompt to a notebook: segments and errata become pieces, and pieces become rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from notes_cli.classes import dataclass
from notes_cli.editing.amend import amend, free_cells, prepare
from notes_cli.editing.change import Change, change
from notes_cli.editing.methods import ERRATUM, Method
from notes_cli.engine.loop import Task, run
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import Help, NotesError, Notice, UnsupportedError
from notes_cli.library.info import SegmentInfo
from notes_cli.runtime.corrections import resolved
from notes_cli.runtime.settings import DEFAULT_SEAM, choose, repair
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum, word
from notes_cli.text.keys import listed
from notes_cli.text.messages import Conversation, SkillPart, asking, check_once
from notes_cli.text.prompt import Chunk, build

if TYPE_CHECKING:
    from notes_cli.engine.eye import Seen

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
    # Of fields that have others now, brought in by `method`, by a reference to each (text/references.py).
    values: Mapping[str, str] = field(default_factory=dict)
    method: Method = field(default_factory=Method)
    place: str = "early"  # skills and errata in the system message, or "late": right before the question
    shown: frozenset[str] = frozenset()  # segments that are in the user's message, wherever skills are
    decoded: frozenset[str] = frozenset()  # skills whose tokens are decoded instead: they see what precedes them
    think: bool = False  # the prompt ends where a chain of thought begins (runtime/thinking.py goes on)
    # Instead of question, system text, turns, place and errata: messages made of parts, with tools, calls and results.
    conversation: Conversation | None = None

    @property
    def sentences(self) -> list[str]:
        """What is said after the skills: the method's errata, then those that were given."""
        return [word(erratum, self.wording) for erratum in (*self.said, *self.errata)]

    @property
    def said(self) -> list[Erratum]:
        """The method's errata: one for each value, if it appends any."""
        if not self.method.record.appends_erratum:
            return []
        return [
            Erratum(one.field, value, f"{one.key}={value}", one.skill if one.shared else "")
            for one, value in resolved(self.values, self.segments)
        ]


@dataclass(frozen=True, slots=True)
class Parts:
    """A prompt as chunks with the tokens of each; of a skill the most that it takes, before or after its change."""

    chunks: tuple[Chunk, ...]
    tokens: tuple[Tokens, ...]
    opening: Tokens  # BOS, where the first chunk is a skill
    changes: Mapping[str, Change]  # by skill

    @property
    def stem(self) -> Parts:
        """All but the last chunk, what is asked."""
        return replace(self, chunks=self.chunks[:-1], tokens=self.tokens[:-1])

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
        errata=prompt.sentences,
        turns=prompt.turns,
        place=prompt.place,
    )
    return build(template, conversation)


def _check_conversation(prompt: Prompt, conversation: Conversation) -> None:
    check_once([segment.name for segment in prompt.segments])
    named = {part.name for message in conversation.messages for part in message.parts if isinstance(part, SkillPart)}
    given = {segment.name for segment in prompt.segments}
    if named != given:
        what = (
            f"the messages have the skills {listed(sorted(named))}, and the segments given are {listed(sorted(given))}"
        )
        raise NotesError(what)
    if prompt.sentences:
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
    opening = workspace.opened(np.zeros(0, np.int32))  # BOS, where a template without words of its own begins
    if chunks[0].kind != "splice":
        tokens[0], opening = workspace.opened(tokens[0]), opening[:0]
    return Parts(tuple(chunks), tuple(tokens), opening, changes)


def with_tools(
    workspace: Workspace, prompt: Prompt, known: Iterable[SegmentInfo], opened: Callable[[SegmentInfo], Segment | None]
) -> tuple[Prompt, list[Chunk]]:
    """The prompt with a compiled set of tools in the place where its template tells of the very same ones, token by
    token, and its chunks; both as they are where none is known. `opened` gives the one of `known` that is placed, None
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
            if same and (segment := opened(info)) is not None:
                return replace(prompt, segments=[*prompt.segments, segment]), cut
    return prompt, chunks


def assemble(
    workspace: Workspace,
    prompt: Prompt,
    *,
    seam: int = DEFAULT_SEAM,
    splice: bool = True,
    rotate: bool = True,
    dry: bool = False,
    room: int = 0,
    strict: bool = False,
    parts: Parts | None = None,
    later: bool = False,
) -> Notebook:
    """Put the prompt into a fresh notebook of the workspace, with room for `room` more tokens.

    `splice=False` decodes the very same tokens instead: the full recompute that everything is compared with.
    `rotate=False` places rows without turning them: the control that must go wrong. `dry` computes nothing. `strict`:
    raise UnsupportedError for a skill whose rows cannot be placed, which is decoded otherwise (`unspliced` tells).
    `parts`: these of the prompt's, if not all. `later`: what is asked is decoded next, and with it the few tokens that
    precede a skill.
    """
    parts = parts_of(workspace, prompt) if parts is None else parts
    workspace.make_room(parts.count + cells_meanwhile(prompt, parts), room)
    going = assembling(
        workspace, prompt, parts, seam=seam, splice=splice, rotate=rotate, dry=dry, strict=strict, later=later
    )
    return run(going)


def assembling(
    workspace: Workspace,
    prompt: Prompt,
    parts: Parts,
    *,
    seam: int = DEFAULT_SEAM,
    splice: bool = True,
    rotate: bool = True,
    dry: bool = False,
    strict: bool = False,
    begun: Notebook | None = None,
    later: bool = False,
) -> Task[Notebook]:
    """`assemble` as a task of a loop, in the room that there is: what precedes a splice is decoded with what others
    decode. `begun`: a notebook with the first tokens of it already, up to the beginning or the end of a skill or to
    anywhere between; it is closed where this fails."""
    by_name = {segment.name: segment for segment in prompt.segments}
    if splice:
        for segment in prompt.segments:  # again: a larger context may rotate otherwise (LongRoPE)
            workspace.check(segment)

    try:
        prepared = {
            name: prepare(workspace.scratch, by_name[name], changed, prompt.method, dry=dry)
            for name, changed in (parts.changes.items() if splice else ())
            if name not in prompt.decoded
        }
    except NotesError as error:
        workspace.advise(error)
        raise
    place = Placing(seam, rotate, strict, partial(workspace.look, dry=dry))
    notebook = workspace.notebook(dry=dry) if begun is None else begun
    try:
        there = len(notebook)
        for chunk, ids in zip((_OPENING, *parts.chunks), (parts.opening, *parts.tokens), strict=True):
            done, there = min(there, len(ids)), max(0, there - len(ids))
            ids = ids[done:]
            if not len(ids):
                continue
            if chunk.kind != "splice":
                notebook.append(ids, chunk.kind, chunk.name)
                continue
            segment, changed = by_name[chunk.name], parts.changes.get(chunk.name)
            if segment.media and (not splice or chunk.name in prompt.decoded):
                if len(ids) < len(segment):  # a notebook that begins within it
                    raise NotesError(f"{chunk.name} is an image, which is there as a whole or not")
                if notebook.pending and not dry:
                    yield [notebook]
                seen = workspace.look(segment, dry=dry)
                notebook.show(seen, chunk.kind, chunk.name, reason=Reason.NOT_SPLICED)
            elif not splice or chunk.name in prompt.decoded:
                text = changed.tokens if changed and prompt.method.record.edits_rows else segment.tokens
                notebook.append(text[done:], chunk.kind, chunk.name, reason=Reason.NOT_SPLICED)
            elif changed:
                amend(notebook, segment, changed, prompt.method, prepared[chunk.name], place)
            else:
                yield from place.task(notebook, segment, later)
    except BaseException:
        notebook.close()
        raise
    if splice and not dry:
        for segment in prompt.segments:
            workspace.used(segment.name)
    return notebook


def cells_meanwhile(prompt: Prompt, parts: Parts) -> int:
    """Cells that are needed while the prompt is assembled, and free again afterwards."""
    by_name = {segment.name: segment for segment in prompt.segments}
    return sum(free_cells(by_name[name], changed, prompt.method) for name, changed in parts.changes.items())


def changes_of(workspace: Workspace, prompt: Prompt) -> dict[str, Change]:
    """What the prompt's values change, by skill. Raise SkillError for a field that no skill has."""
    values = resolved(prompt.values, prompt.segments)
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


def method_for(workspace: Workspace, prompt: Prompt) -> tuple[Method, str]:
    """The edit method for the prompt's values where the user names none, and why."""
    if any(
        one.skill == segment.name
        for segment in prompt.segments
        if segment.media
        for one, _ in resolved(prompt.values, prompt.segments)
    ):
        return ERRATUM, f"{ERRATUM}: a skill that it corrects has an image, and no rows of such a one are edited"
    return choose(workspace, list(changes_of(workspace, prompt).values()), think=prompt.think)


def _longest(segment: Segment, changes: Mapping[str, Change]) -> Tokens:
    """The most tokens that a skill takes, before or after its change."""
    changed = changes.get(segment.name)
    return changed.tokens if changed and len(changed.tokens) > len(segment) else segment.tokens


@dataclass(frozen=True, slots=True)
class Placing:
    """How a segment comes to a notebook's end, the best that is right: restored, spliced, or decoded where its rows
    cannot be placed, and why. `strict`: raise UnsupportedError instead of decoding it. `look` at the images of a
    segment where its rows cannot be placed."""

    seam: int
    rotate: bool = True
    strict: bool = False
    look: Callable[[Segment], Seen] | None = None

    def __call__(self, notebook: Notebook, segment: Segment) -> None:
        run(self.task(notebook, segment))

    def task(self, notebook: Notebook, segment: Segment, later: bool = False) -> Task[None]:
        """The same as a task of a loop. `later`: as Notebook.splice has it."""
        same_left = np.array_equal(notebook.tokens, segment.context)
        if segment.pinned and same_left:
            notebook.restore(segment)
            return
        context = notebook.context
        if segment.pinned:
            reason = _uncarried(notebook, segment)
            refusal: str | None = f"preceded by a different context than at compile time; {reason}" if reason else None
        else:
            refusal = context.can_move(segment.base, notebook.position(len(notebook)), segment.positions)
        if refusal is None and segment.carry:
            notebook.open_carry(segment)
            if notebook.pending and not notebook.dry:
                yield [notebook]
            notebook.carry(segment, rotate=self.rotate)
        elif refusal is None:
            seam = 0 if same_left else self.seam
            notebook.open_splice(segment, seam)
            if notebook.pending and not notebook.dry and not later:
                yield [notebook]
            notebook.splice(segment, seam=seam, rotate=self.rotate, opened=True, later=later)
        elif self.strict:
            raise UnsupportedError(
                f"{segment.name} cannot be spliced here: {refusal}", Help.NOT_STRICT(tokens=len(segment))
            )
        elif segment.media:
            if self.look is None:
                raise UnsupportedError(f"{segment.name} has an image, and cannot be spliced here: {refusal}")
            if notebook.pending and not notebook.dry:
                yield [notebook]
            notebook.show(self.look(segment), "splice", segment.name, Reason.REFUSED, refusal)
        else:
            notebook.append(segment.tokens, "splice", segment.name, reason=Reason.REFUSED, detail=refusal)


def _uncarried(notebook: Notebook, segment: Segment) -> str | None:
    """None if the state of recurrent layers can be carried through this segment here, else the reason it cannot."""
    from notes_cli.runtime.compiling import UNCAPTURED, UNTRUSTED  # what most prompts never say

    context = notebook.context
    if context.supports("carry") is not None:
        return context.supports("splice") or "its rows can be moved if it is compiled again"
    if not context.carries:
        return UNTRUSTED
    if segment.carry is None:
        return UNCAPTURED
    seam = segment.carry.seam
    position = notebook.position(len(notebook)) + seam
    return context.can_carry(segment.base + seam, position, len(segment) - seam - segment.carry.tail)


def unspliced(notebook: Notebook) -> list[Notice]:
    """A warning for each skill that was to be spliced and is decoded: which, how many tokens, why, and what helps."""
    tokens: dict[tuple[str, str], int] = {}
    for piece in notebook.pieces:
        if piece.refused:
            key = piece.name, piece.detail
            tokens[key] = tokens.get(key, 0) + piece.tokens
    chain = _chain(notebook.pieces)
    remedy = repair("together", chain) if len(chain) > 1 else None
    return [
        Notice(
            f"{name} is not spliced, its {count} tokens are decoded: {why}",
            remedy if remedy and name in chain else Help.STRICT(),
            warning=True,
        )
        for (name, why), count in tokens.items()
    ]


def _chain(pieces: Sequence[Piece]) -> list[str]:
    """The skills with which a prompt begins, if the first of them was restored: as one all of them could be."""
    opening = takewhile(lambda piece: piece.kind in ("text", "splice"), pieces)
    skills = [piece for piece in opening if piece.kind == "splice"]
    restored = bool(skills) and skills[0].reason is Reason.RESTORED
    return list(dict.fromkeys(piece.name for piece in skills)) if restored else []
