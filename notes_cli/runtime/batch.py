"""Answers many questions concurrently: decodes their shared prefix once, and the questions in joint batches.

Requests that differ only in the question and its answer share a *stem*: the prompt before the question. Each continues
from it in a sequence of its own that shares the stem's cells (copy on write), and decodes again those of its last
tokens that `notes ask` would decode in one batch with the question. So a question that is decoded alone has exactly the
logits of `notes ask`.
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
from notes_cli.runtime.answering import Plan, answer_task, max_new_tokens
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
from notes_cli.runtime.request import NO_CALLBACKS, PARALLEL, UNLIMITED, Answer, Callbacks, Counts, Request, Settings
from notes_cli.runtime.resolve import check_no_results, constraint_of, resolve
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.prompt import Chunk, at_question

AT_MOST = 64
STEMS = 4  # stems kept
WAITING = 16  # answers per concurrent request that may wait for an earlier one
# Fields in which requests of one stem may differ.
_PER_REQUEST = {
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
    """The shared prefix of some requests, and its sequence once the first of them starts."""

    wanted: Sequence[SkillRef]  # skills and images, as given
    settings: Settings
    prompt: Prompt  # of the first request
    how: AssembleOptions
    chunks: Sequence[Chunk] = ()
    sequence: KVSequence | None = None
    saved: float | None = 0.0  # seconds of prefill, until an answer reports them

    @property
    def tokens(self) -> int:
        return 0 if self.sequence is None else len(self.sequence)

    @property
    def rows(self) -> int:
        """Number of shared tokens."""
        return 0 if self.sequence is None else self.sequence.rows

    def ready(self, chunks: Sequence[Chunk]) -> bool:
        """True if its sequence is a prefix of a prompt of these chunks (some templates contain the time)."""
        return self.sequence is not None and self.sequence.intact and list(chunks[:-1]) == list(self.chunks)

    def assemble(self, workspace: Workspace, place: _Place, callbacks: Callbacks) -> None:
        """Assemble the sequence unless it exists, and decode the part that is decoded separately from questions."""
        parts = place.parts
        if parts is None:
            return
        self.close()
        self.chunks = parts.chunks[:-1]
        self.sequence = assemble(workspace, self.prompt, **self.how, parts=parts.stem)
        self.saved = saved_seconds(self.sequence.pieces, self.prompt.segments)
        if not parts.stem.asking:  # otherwise divided by `assemble`
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
    """A request in progress, and the cells reserved for it."""

    request: Request
    stem: _Stem
    question: Tokens
    bound: int  # maximum tokens of its sequence
    looks: int  # cells for lookaheads before a choice
    begun: float
    before: int  # tokens of the stem
    redecoded: int  # how many of them it decodes again at most
    parts: Parts | None  # of the whole prompt, while the stem is missing
    meanwhile: int  # cells to assemble the stem
    grammar: str | None
    sequence: KVSequence | None = None

    @property
    def cells(self) -> int:
        """Cells that it will still take at most."""
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
                while batch.yielded in done:
                    index = batch.yielded
                    batch.yielded += 1
                    yield index, done.pop(index)
    finally:
        batch.close()


class _Batch:
    """The requests in progress and their stems."""

    def __init__(self, workspace: Workspace, parallel: int, callbacks: Callbacks) -> None:
        self.yielded = 0  # answers
        self._begun = time.perf_counter()
        self._workspace, self._parallel = workspace, parallel
        self._notices: set[str] = set()
        self._callbacks = replace(NO_CALLBACKS, on_notice=self._notice, progress=callbacks.progress)
        self._notice_to = callbacks.on_notice
        self._stems: dict[object, _Stem] = {}  # latest last
        self._segments: dict[str, list[Segment]] = {}  # of the stems, by the reference they were opened with
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
        """Yield a task per request; None while the next one has no capacity."""
        for number, request in enumerate(requests):
            while number - self.yielded >= WAITING * self._parallel:
                yield None
            if isinstance(request, NotesError):
                yield _raise_task(request)
                continue
            try:
                place = self._place(request)
                while not self._reserve(place):
                    yield None
                place.stem.assemble(self._workspace, place, self._callbacks)
            except NotesError as error:
                yield _raise_task(error)
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                yield _raise_task(NotesError(f"{where}{reason_of(error)}"))
            else:
                self._places.append(place)
                yield self._answer_request(place)

    def _answer_request(self, place: _Place) -> Task[Answer]:
        """Fork the stem, append the question and answer it."""
        stem = place.stem
        assert stem.sequence is not None
        try:
            shared = stem.rows
            with stem.sequence.share_rows() as sequence:
                place.sequence, sequence.token_limit = sequence, place.bound
                sequence.seconds["splice"] = stem.sequence.seconds["splice"]
                stem.sequence.seconds["splice"] = 0.0  # reported with the first answer only, as is the saved time
                gain, stem.saved = stem.saved, 0.0
                if stem.chunks and stem.chunks[-1].kind == "question":  # template text before the question
                    sequence.extend(place.question)
                else:
                    sequence.append(place.question, "question")
                counts = replace(Counts.of(sequence), shared=shared)
                plan = Plan(sequence, stem.settings, counts, self._begun, place.begun, gain, place.grammar)
                return (yield from one_request_at_a_time(answer_task(self._workspace, place.request, plan)))
        finally:
            self._places.remove(place)

    def _place(self, request: Request) -> _Place:
        """Compute the needs of a request. Raises NotesError where it can never be answered."""
        begun, workspace = time.perf_counter(), self._workspace
        grammar = constraint_of(workspace, request)
        stem = self._stem(request)
        prompt = replace(stem.prompt, question=request.question)
        chunks = chunks_of(workspace, prompt)
        whole, chunks = len(chunks), at_question(chunks)
        if stem.ready(chunks):
            parts, before, redecoded, meanwhile = None, stem.tokens, stem.tokens - stem.rows, 0
            question = workspace.tokenize(chunks[-1])
            question = question if len(chunks) > 1 else workspace.with_bos(question)
        else:
            parts = replace(parts_of(workspace, prompt, chunks), asking=1 + len(chunks) - whole)
            before, meanwhile, question = parts.stem.count, temporary_cells(prompt, parts), parts.tokens[-1]
            redecoded = min(before, APART + sum(len(tokens) for tokens in parts.tokens[whole - 1 : -1]))
        total = before + len(question)
        workspace.check_length(total + 1)
        return _Place(
            *(request, stem, question),
            bound=min(total + _max_generated(workspace, request, stem.settings), workspace.longest or UNLIMITED),
            looks=sum(map(len, _lookahead_tokens(workspace, request.choices))),
            begun=begun,
            before=before,
            redecoded=redecoded,
            parts=parts,
            meanwhile=meanwhile,
            grammar=grammar,
        )

    def _reserve(self, place: _Place) -> bool:
        """Reserve capacity for the request and its stem; False if it has to wait. Raises EngineError if it will never
        fit."""
        request_cells, stem_cells = (
            place.bound - place.before + place.redecoded + place.looks,
            0 if place.parts is None else place.before + place.meanwhile,
        )
        extra_sequences = (place.parts is not None) + (AHEAD if place.looks else 0)  # sequences
        fits = self._fits(stem_cells + request_cells, extra_sequences + 1)
        if self._grows and not (self._places and fits):
            self._grow(stem_cells, request_cells, extra_sequences)
            fits = self._fits(stem_cells + request_cells, extra_sequences + 1)
        if fits:
            return True
        if self._places:
            return False
        for stem in self._stems.values():
            if stem is not place.stem:
                stem.close()
        if self._workspace.grows:
            self._workspace.reserve(stem_cells + request_cells, extra_sequences + 1)
        else:
            tokens = place.before + place.meanwhile + len(place.question)
            spare = place.bound - place.before - len(place.question) + place.looks
            self._workspace.make_room(tokens, spare, held=place.stem.rows)
        return True

    @property
    def _reserved(self) -> int:
        """Cells reserved for requests in progress."""
        return sum(place.cells for place in self._places)

    def _fits(self, cells: int, sequences: int) -> bool:
        """True if so many cells and sequences are free beside the reserved ones."""
        context = self._workspace.context
        return sequences <= context.n_free and context.used + self._reserved + cells <= context.cells

    def _grow(self, stem: int, cells: int, extra_sequences: int) -> None:
        """Enlarge the context for all requests like this that may run concurrently, or for fewer if that fails."""
        slots = self._parallel - len(self._places)
        while slots:
            try:
                self._workspace.reserve(self._reserved + stem + slots * cells, extra_sequences + slots)
                return
            except EngineError:
                self._grows = False  # do not try again: each attempt recreates the context
                slots //= 2

    def _stem(self, request: Request) -> _Stem:
        """Return the stem of a request, resolved or cached. Raises NotesError for an unknown skill or field."""
        check_no_results(request)
        key = _key(request)
        if key in self._stems:
            self._stems[key] = self._stems.pop(key)
            return self._stems[key]
        references = (*request.splice, *request.images)
        skills = [segment for reference in request.splice for segment in self._open(reference)]
        images = [segment for reference in request.images for segment in self._open(reference, image=True)]
        draft = resolve(self._workspace, request, [*skills, *images], self._callbacks)
        stem = _Stem(references, draft.settings, draft.prompt, draft.how)
        busy = [place.stem for place in self._places]
        for unused in [candidate for candidate, segments in self._stems.items() if segments not in busy][
            : 1 - STEMS or None
        ]:
            self._stems.pop(unused).close()
        self._stems[key] = stem
        used = {
            reference
            for candidate in self._stems.values()
            for reference in candidate.wanted
            if isinstance(reference, str)
        }
        self._segments = {reference: segments for reference, segments in self._segments.items() if reference in used}
        return stem

    def _open(self, reference: SkillRef, *, image: bool = False) -> list[Segment]:
        """Open a skill, reusing the segments of other stems."""
        segments = self._segments.get(reference) if isinstance(reference, str) else None
        if segments is None or image:
            on_notice, watch = self._callbacks.on_notice, self._callbacks.progress
            segments = open_segments(self._workspace, segments or [reference], on_notice, image=image, watch=watch)
        if isinstance(reference, str):
            self._segments[reference] = segments
        return segments


def _key(request: Request) -> object:
    """Return a key that is equal for requests of one stem."""
    values = [getattr(request, field_.name) for field_ in fields(request) if field_.name not in _PER_REQUEST]
    return request.max_think > 0, *(_hashable(value) for value in values)


def _hashable(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(item if isinstance(item, str) else id(item) for item in value)  # segments are compared by identity
    return value


def _max_generated(workspace: Workspace, request: Request, settings: Settings) -> int:
    """Return the maximum number of tokens to generate; a choice generates none."""
    return max_new_tokens(workspace, request, settings.think) - (request.room if request.choices is not None else 0)


def _lookahead_tokens(workspace: Workspace, choices: Sequence[str] | None) -> list[tuple[int, ...]]:
    """Return the tokens of all lookaheads for these choices."""
    return [tokens for options in variants_of(workspace.model, choices or ()).values() for tokens in options]


def _raise_task(error: NotesError) -> Task[Answer]:
    """Make a task that raises."""
    raise error
    yield
