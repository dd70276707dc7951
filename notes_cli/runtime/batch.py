"""Many questions at once: what their prompts have in common is put together once, and they are decoded side by side.

Requests that differ in the question and in how it is answered share a *stem*: all of the prompt that precedes the words
of the question. Each goes on from there in a sequence of its own, in the same cells as the others (copy on write). Of
the stem's end it decodes again what `notes ask` would decode in one batch with the question, so that a question that
is decoded alone has the very logits of `notes ask`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace

from notes_cli.engine.decision import variants_of
from notes_cli.engine.loop import AHEAD, Task, one_request_at_a_time, serve
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, NotesError, Notice
from notes_cli.errors import reason as reason_of
from notes_cli.runtime.answering import (
    NO_CALLBACKS,
    PARALLEL,
    UNLIMITED,
    Answer,
    Callbacks,
    Counts,
    Plan,
    Request,
    answer_task,
    max_new_tokens,
)
from notes_cli.runtime.assemble import (
    APART,
    AssembleOptions,
    assemble,
    divide_before_question,
    saved_seconds,
    temporary_cells,
    warn_unspliced,
)
from notes_cli.runtime.open_skills import SkillRef, open_segments
from notes_cli.runtime.prompt import Parts, Prompt, chunks_of, parts_of
from notes_cli.runtime.resolve import Settings, check_no_results, constraint_of, resolve
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.prompt import Chunk, at_question

AT_MOST = 64
STEMS = 4  # that are kept
WAITING = 16  # answers for each of the parallel ones that may wait for an earlier one
# What requests of one stem may differ in.
_OWN = {
    "question",
    "choices",
    "max_tokens",
    "sampling",
    "max_think",
    "json_schema",
    "grammar",
}


@dataclass(slots=True, eq=False)
class _Stem:
    """What some requests have in common, and the sequence of it, once one of them is asked."""

    wanted: Sequence[SkillRef]  # skills and images, as they were called
    settings: Settings
    prompt: Prompt  # of the first of them
    how: AssembleOptions
    chunks: Sequence[Chunk] = ()
    sequence: KVSequence | None = None
    saved: float | None = 0.0  # seconds of prefill, until an answer has them

    @property
    def tokens(self) -> int:
        return 0 if self.sequence is None else len(self.sequence)

    @property
    def rows(self) -> int:
        """Tokens of it whose rows are shared."""
        return 0 if self.sequence is None else self.sequence.rows

    def ready(self, chunks: Sequence[Chunk]) -> bool:
        """Whether its sequence is there, and is the beginning of a prompt of these chunks (some templates tell the
        time)."""
        return self.sequence is not None and self.sequence.intact and list(chunks[:-1]) == list(self.chunks)

    def assemble(self, workspace: Workspace, place: _Place, callbacks: Callbacks) -> None:
        """Put the sequence together, if it is not there, and decode what of it is decoded apart from a question."""
        parts = place.parts
        if parts is None:
            return
        self.close()
        self.chunks = parts.chunks[:-1]
        self.sequence = assemble(workspace, self.prompt, **self.how, parts=parts.stem)
        self.saved = saved_seconds(self.sequence.pieces, self.prompt.segments)
        if not parts.stem.asking:  # else it was divided there
            divide_before_question(self.sequence)
        warn_unspliced(self.sequence, callbacks.on_notice)
        try:
            with callbacks.progress("reading what the prompts share", len(self.sequence.pending)) as update:
                self.sequence.flush_divided(update)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.sequence is not None:
            self.sequence.close()
            self.sequence = None


@dataclass(slots=True, eq=False)
class _Place:
    """A question that is being answered, and what is kept free for it."""

    request: Request
    stem: _Stem
    question: Tokens
    bound: int  # tokens of its sequence at most
    looks: int  # cells for what it tries out, before it chooses
    begun: float
    before: int  # tokens of the stem
    again: int  # of them, those that it decodes itself at most
    parts: Parts | None  # of the whole prompt, where the stem is not there yet
    meanwhile: int  # cells that it takes to put the stem together
    grammar: str | None
    sequence: KVSequence | None = None

    @property
    def cells(self) -> int:
        """Cells that it is still going to take at most."""
        assert self.sequence is not None
        return max(0, self.bound - self.sequence.rows) + self.looks


def ask_many(
    workspace: Workspace,
    requests: Iterable[Request | NotesError],
    parallel: int = PARALLEL,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Iterator[tuple[int, Answer | NotesError]]:
    """Answer many questions, at most `parallel` of them at a time, and fewer where a context of a given size has no
    room for them. Yield the number of each, counted from 0, and its answer or its error, in the order of the requests,
    which are read as they are needed. An error among them is that request's own.

    The listener hears of what happens to all of them, each thing once, and of no single answer. One without a limit has
    as much room as there must be for it (Request.room).
    """
    if not 1 <= parallel <= AT_MOST:
        raise NotesError(f"{parallel!r} questions at once are not possible", f"Take from 1 to {AT_MOST}")
    batch = _Batch(workspace, parallel, callbacks)
    done: dict[int, Answer | NotesError] = {}
    try:
        with closing(serve(batch.tasks(requests), parallel)) as outcomes:
            for number, outcome in outcomes:
                done[number] = outcome
                while batch.told in done:
                    told = done.pop(batch.told)
                    batch.told += 1
                    yield batch.told - 1, told
    finally:
        batch.close()


class _Batch:
    """The questions that are being answered, and the stems that they go on from."""

    def __init__(self, workspace: Workspace, parallel: int, callbacks: Callbacks) -> None:
        self.told = 0  # answers that were yielded
        self._begun = time.perf_counter()
        self._workspace, self._parallel = workspace, parallel
        self._notices: set[str] = set()
        self._callbacks = replace(NO_CALLBACKS, on_notice=self._notice, progress=callbacks.progress)
        self._notice_to = callbacks.on_notice
        self._stems: dict[object, _Stem] = {}  # the latest last
        self._segments: dict[str, list[Segment]] = {}  # of the stems, by what they were called
        self._places: list[_Place] = []
        self._grows = True

    def close(self) -> None:
        for stem in self._stems.values():
            stem.close()

    def _notice(self, notice: Notice) -> None:
        if str(notice) not in self._notices:
            self._notices.add(str(notice))
            self._notice_to(notice)

    def tasks(self, requests: Iterable[Request | NotesError]) -> Iterator[Task[Answer] | None]:
        """A task for each request; None while there is no room for the next one."""
        for number, request in enumerate(requests):
            while number - self.told >= WAITING * self._parallel:
                yield None
            if isinstance(request, NotesError):
                yield _failing(request)
                continue
            try:
                place = self._place(request)
                while not self._seen_to(place):
                    yield None
                place.stem.assemble(self._workspace, place, self._callbacks)
            except NotesError as error:
                yield _failing(error)
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                yield _failing(NotesError(f"{where}{reason_of(error)}"))
            else:
                self._places.append(place)
                yield self._answering(place)

    def _answering(self, place: _Place) -> Task[Answer]:
        """Go on from the stem with the question, and answer it."""
        stem = place.stem
        assert stem.sequence is not None
        try:
            shared = stem.rows
            with stem.sequence.share_rows() as sequence:
                place.sequence, sequence.token_limit = sequence, place.bound
                sequence.seconds["splice"] = stem.sequence.seconds["splice"]
                stem.sequence.seconds["splice"] = 0.0  # it was the first one's, and so is what it saved
                gain, stem.saved = stem.saved, 0.0
                if stem.chunks and stem.chunks[-1].kind == "question":  # the template's words before it
                    sequence.extend(place.question)
                else:
                    sequence.append(place.question, "question")
                counts = replace(Counts.of(sequence), shared=shared)
                plan = Plan(sequence, stem.settings, counts, self._begun, place.begun, gain, place.grammar)
                return (yield from one_request_at_a_time(answer_task(self._workspace, place.request, plan)))
        finally:
            self._places.remove(place)

    def _place(self, request: Request) -> _Place:
        """What is needed for the request. Raise NotesError where it cannot be answered at all."""
        begun, workspace = time.perf_counter(), self._workspace
        grammar = constraint_of(workspace, request)
        stem = self._stem(request)
        prompt = replace(stem.prompt, question=request.question)
        chunks = chunks_of(workspace, prompt)
        whole, chunks = len(chunks), at_question(chunks)
        if stem.ready(chunks):
            parts, before, again, meanwhile = None, stem.tokens, stem.tokens - stem.rows, 0
            question = workspace.tokenize(chunks[-1])
            question = question if len(chunks) > 1 else workspace.with_bos(question)
        else:
            parts = replace(parts_of(workspace, prompt, chunks), asking=1 + len(chunks) - whole)
            before, meanwhile, question = parts.stem.count, temporary_cells(prompt, parts), parts.tokens[-1]
            again = min(before, APART + sum(len(tokens) for tokens in parts.tokens[whole - 1 : -1]))
        total = before + len(question)
        workspace.check_length(total + 1)
        return _Place(
            *(request, stem, question),
            bound=min(total + _written(workspace, request, stem.settings), workspace.longest or UNLIMITED),
            looks=sum(map(len, _looks(workspace, request.choices))),
            begun=begun,
            before=before,
            again=again,
            parts=parts,
            meanwhile=meanwhile,
            grammar=grammar,
        )

    def _seen_to(self, place: _Place) -> bool:
        """Whether there is room for the place, and for its stem. Raise EngineError where there will never be."""
        own, stem = (
            place.bound - place.before + place.again + place.looks,
            0 if place.parts is None else place.before + place.meanwhile,
        )
        beside = (place.parts is not None) + (AHEAD if place.looks else 0)  # sequences
        fits = self._fits(stem + own, beside + 1)
        if self._grows and not (self._places and fits):
            self._grow(stem, own, beside)
            fits = self._fits(stem + own, beside + 1)
        if fits:
            return True
        if self._places:
            return False
        for other in self._stems.values():
            if other is not place.stem:
                other.close()
        if self._workspace.grows:
            self._workspace.reserve(stem + own, beside + 1)
        else:
            tokens = place.before + place.meanwhile + len(place.question)
            spare = place.bound - place.before - len(place.question) + place.looks
            self._workspace.make_room(tokens, spare, held=place.stem.rows)
        return True

    @property
    def _promised(self) -> int:
        """Cells that are kept for those that are being answered."""
        return sum(place.cells for place in self._places)

    def _fits(self, cells: int, sequences: int) -> bool:
        """Whether so much is free beside what was promised."""
        context = self._workspace.context
        return sequences <= context.n_free and context.used + self._promised + cells <= context.cells

    def _grow(self, stem: int, cells: int, beside: int) -> None:
        """See to room for as many like this as may still begin, or for fewer where there cannot be so much."""
        slots = self._parallel - len(self._places)
        while slots:
            try:
                self._workspace.reserve(self._promised + stem + slots * cells, beside + slots)
                return
            except EngineError:
                self._grows = False  # not again: each time takes a context
                slots //= 2

    def _stem(self, request: Request) -> _Stem:
        """What the request has in common with others. Raise NotesError where a skill or a field is not there."""
        check_no_results(request)
        key = _key(request)
        if key in self._stems:
            self._stems[key] = self._stems.pop(key)
            return self._stems[key]
        wanted = (*request.splice, *request.images)
        skills = [segment for word in request.splice for segment in self._open(word)]
        images = [segment for word in request.images for segment in self._open(word, image=True)]
        draft = resolve(self._workspace, request, [*skills, *images], self._callbacks)
        stem = _Stem(wanted, draft.settings, draft.prompt, draft.how)
        busy = [place.stem for place in self._places]
        for other in [one for one, found in self._stems.items() if found not in busy][: 1 - STEMS or None]:
            self._stems.pop(other).close()
        self._stems[key] = stem
        words = {word for one in self._stems.values() for word in one.wanted if isinstance(word, str)}
        self._segments = {word: found for word, found in self._segments.items() if word in words}
        return stem

    def _open(self, word: SkillRef, *, image: bool = False) -> list[Segment]:
        """The segment, which another stem may have opened already."""
        known = self._segments.get(word) if isinstance(word, str) else None
        if known is None or image:
            say, watch = self._callbacks.on_notice, self._callbacks.progress
            known = open_segments(self._workspace, known or [word], say, image=image, watch=watch)
        if isinstance(word, str):
            self._segments[word] = known
        return known


def _key(request: Request) -> object:
    """The same for requests of one stem."""
    values = [getattr(request, one.name) for one in fields(request) if one.name not in _OWN]
    return request.max_think > 0, *(_hashable(value) for value in values)


def _hashable(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(one if isinstance(one, str) else id(one) for one in value)  # a segment is itself alone
    return value


def _written(workspace: Workspace, request: Request, settings: Settings) -> int:
    """Tokens that will be written at most: a choice is not."""
    return max_new_tokens(workspace, request, settings.think) - (request.room if request.choices is not None else 0)


def _looks(workspace: Workspace, choices: Sequence[str] | None) -> list[tuple[int, ...]]:
    """The tokens of what is tried out before one of the choices is taken."""
    return [tokens for options in variants_of(workspace.model, choices or ()).values() for tokens in options]


def _failing(error: NotesError) -> Task[Answer]:
    """A task that fails."""
    raise error
    yield
