"""Answers a request, or many together: resolves its settings, assembles the prompt in a sequence, decodes, generates.

A session assembles its own sequence (sessions/session.py); the rest is the same. Of many requests, prompts that begin
alike share that prefix by the prefix cache, which ends where `notes ask` begins a batch: so a question that is decoded
alone has exactly the logits of `notes ask`.

The method `auto` decides for one question whether its new values need an erratum besides their K/V in place. It
compares the decisions by `field` and by `field+erratum` in forks of one sequence. With choices a decision is their
probabilities, without choices the distribution of the first token of the answer in which the two differ. After the
author's diagnostic (19PINE-AI/programmable-kv), which takes the very first token: often a word such as "The".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.methods import AUTO, FIELD, FIELD_ERRATUM, Method
from notes_cli.engine.pieces import Piece
from notes_cli.engine.positions import Patch, align
from notes_cli.engine.sequence import KVSequence, Task
from notes_cli.engine.sequence import run as run_task
from notes_cli.errors import EngineError, Help, NotesError, Notice, UnsupportedError, reason
from notes_cli.runtime.assemble import assemble, assemble_task, saved_seconds, warn_unspliced
from notes_cli.runtime.generate import (
    ANSWER_RESERVE,
    ReplyGenerator,
    decide,
    decide_after_reasoning,
    ignore_text,
    log_softmax,
)
from notes_cli.runtime.prompt import Prompt, rendered
from notes_cli.runtime.request import (
    NO_CALLBACKS,
    PARALLEL,
    UNLIMITED,
    Answer,
    Callbacks,
    Counts,
    Request,
    Settings,
    Stream,
)
from notes_cli.runtime.resolve import Prepared, resolve_request
from notes_cli.runtime.scheduler import Job, Scheduler, run
from notes_cli.runtime.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt in a sequence: its tokens by origin, its pieces, the time saved, and its settings."""

    counts: Counts
    pieces: tuple[Piece, ...]
    settings: Settings
    saved: float | None  # seconds of prefill (assemble.py)

    def __repr__(self) -> str:
        counts = self.counts
        return f"Prefilled({counts.total} tokens, {counts.spliced} spliced, {counts.decoded} decoded)"

    @classmethod
    def of(cls, prepared: Prepared, sequence: KVSequence, cached: int = 0, shared: int = 0) -> Prefilled:
        """Describe the prompt of a sequence. `cached`: tokens that came from the prefix cache; `shared`: tokens in
        cells that others share."""
        saved = saved_seconds([piece for piece in sequence.pieces if piece.position >= cached], prepared.segments)
        counts = replace(Counts.of(sequence), shared=shared)
        return cls(counts, tuple(sequence.pieces), prepared.settings, saved)


OnPrefill = Callable[[Prefilled], object]  # a callback for a decoded prompt


def prompt_task(
    workspace: Workspace,
    prepared: Prepared,
    job: Job[Any],
    callbacks: Callbacks,
    on_boundary: Callable[[], object] | None = None,
    on_prefill: OnPrefill | None = None,
    *,
    compare: bool = False,
) -> Task[Answer]:
    """Assemble the prompt in the job's sequence and answer it. `on_boundary` is called when the tokens before the job's
    boundary are decoded, `on_prefill` when all are. `compare`: choose the method by comparing decisions."""
    assert job.sequence is not None
    sequence = job.sequence
    try:
        yield from assemble_task(workspace, prepared.prompt, begun=sequence, counted=True)
        if compare:
            sequence, prepared = choose_per_edit(workspace, prepared, sequence)
        if on_boundary and job.boundary:
            if len(sequence) - sequence.undivided < job.boundary:  # its question would be in the same batch
                sequence.divide(job.boundary)
            while not sequence.divided:
                yield [sequence]
            on_boundary()
        prefilled = Prefilled.of(prepared, sequence, job.live, job.boundary or 0)
        return (yield from answer_task(workspace, prepared, prefilled, sequence, callbacks, on_prefill))
    finally:
        sequence.close()


def ask(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Answer:
    """Answer one question. Raises NotesError."""
    return run(workspace, _job(workspace, request, callbacks))


def ask_stream(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Stream:
    """As `ask`, yielding texts as they are generated. Starts at the first `next`; closing it frees its sequence."""
    return (yield from stream(workspace, lambda callbacks: _job(workspace, request, callbacks), callbacks))


def stream(workspace: Workspace, make: Callable[[Callbacks], Job[Answer]], callbacks: Callbacks) -> Stream:
    """Run the job that `make` makes with these callbacks, yielding its texts as they are generated; a choice as a
    whole."""
    texts: list[str] = []

    def on_text(text: str) -> None:
        texts.append(text)
        if callbacks.on_text:
            callbacks.on_text(text)

    job = make(replace(callbacks, on_text=on_text, on_answer=NO_CALLBACKS.on_answer))
    with Scheduler(workspace) as scheduler:
        scheduler.submit(job)
        while not job.ended:
            scheduler.step()
            yield from texts
            texts.clear()
    if job.result.decision:
        yield job.result.text
    callbacks.on_answer(job.result)
    return job.result


def explain(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Prefilled:
    """Return the pieces of a request's prompt and how each would be made, without computing."""
    prepared = prepare(workspace, request, callbacks, dry=True)
    room = max_new_tokens(workspace, prepared.request, prepared.settings.think)
    return Prefilled.of(prepared, assemble(workspace, prepared.prompt, dry=True, counted=True, room=room))


def prepare(
    workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS, *, dry: bool = False
) -> Prepared:
    """Resolve a request and render its prompt. `dry`: do not compile texts."""
    try:
        prepared = resolve_request(workspace, request, callbacks, dry=dry)
    except EngineError as error:
        if not dry and error.remedy and error.remedy.help is Help.LARGER_CONTEXT:
            # replaces an error of a compile, whose remedy does not count the rest of the prompt
            explain(workspace, request)
        raise
    return replace(prepared, prompt=rendered(workspace, prepared.prompt))


def _job(workspace: Workspace, request: Request, callbacks: Callbacks) -> Job[Answer]:
    prepared = prepare(workspace, request, callbacks)
    settings = prepared.settings
    compare = request.method == AUTO and settings.method == FIELD_ERRATUM and not settings.think
    return Job(
        lambda job: prompt_task(workspace, prepared, job, callbacks, compare=compare),
        prepared.prompt.cells,
        max_new_tokens(workspace, prepared.request, prepared.settings.think),
    )


def tokens_of_longest(workspace: Workspace, choices: Sequence[str] | None) -> int:
    """Return the most tokens of a choice; 0 without choices."""
    from notes_cli.runtime.generate import variants_of  # few questions have choices

    variants = variants_of(workspace.model, choices or ()).values()
    return max((len(option) for options in variants for option in options), default=0)


def max_new_tokens(workspace: Workspace, request: Request, think: bool) -> int:
    """Return the maximum number of tokens to generate. `think`: reasoning is requested."""
    thinks = think or workspace.reasoning.open  # such models may reason without a request
    return request.room + (request.max_think + ANSWER_RESERVE if thinks else 0)


def answer_task(
    workspace: Workspace,
    prepared: Prepared,
    prefilled: Prefilled,
    sequence: KVSequence,
    callbacks: Callbacks = NO_CALLBACKS,
    on_prefill: OnPrefill | None = None,
) -> Task[Answer]:
    """Decode the rest of an assembled prompt, reason if requested, then decide or generate. The sequence then ends with
    the answer, unless that is a choice."""
    request, settings = prepared.request, prepared.settings
    warn_unspliced(sequence, callbacks.on_notice)
    with callbacks.progress("reading the prompt", prefilled.counts.decoded) as update:
        total = len(sequence.pending)
        while sequence.pending:
            yield [sequence]
            update(total - len(sequence.pending), total)
    yield from sequence.next_logits()
    prompt_decoded = time.perf_counter()
    if on_prefill:
        on_prefill(prefilled)
    first: list[float] = []

    def on_text(text: str) -> None:
        first.append(time.perf_counter())
        if callbacks.on_text:
            callbacks.on_text(text)

    generator = ReplyGenerator(
        *(workspace, request.sampling, request.max_tokens, request.max_think),
        on_text=on_text,
        # only requested reasoning is streamed
        on_reasoning=(callbacks.on_reasoning if settings.think else None) or ignore_text,
        on_token=callbacks.on_token,
        grammar=prepared.grammar,
    )
    thought, decision, stopped, text, tokens = None, None, None, "", 0
    if settings.think:
        thought = yield from generator.reason(sequence)
        callbacks.on_reasoning_end(thought, True)
    if request.choices is not None:
        from notes_cli.runtime.generate import decide_task

        if thought:
            decision = yield from decide_after_reasoning(workspace, sequence, request.choices, thought)
        else:
            decision = yield from decide_task(sequence, request.choices)
        text = decision.choice
    else:
        reply = yield from generator.reply(sequence, thought)
        if thought is None and reply.thought:  # reasoning without a request
            callbacks.on_reasoning_end(reply.thought, False)
        thought, text, tokens, stopped = reply.thought, reply.text, reply.tokens, reply.stopped
    answer = Answer(
        text,
        tokens,
        settings,
        prefilled.counts,
        tuple(sequence.pieces),
        thought,
        decision,
        stopped,
        begun=prepared.begun,
        load=prepared.ready - prepared.begun,
        splice=sequence.seconds["splice"],
        prompt=prompt_decoded - prepared.ready,
        first_token=(first[0] if first else time.perf_counter()) - prepared.ready,
        saved=prefilled.saved,
    )
    callbacks.on_answer(answer)
    return answer


# Many questions.

AT_MOST = 64
IDLE = 4  # prefixes kept
SPARE = 2  # sequences to begin a request with, beside those that run
WAITING = 16  # answers per concurrent request that may wait for an earlier one


def ask_many(
    workspace: Workspace,
    requests: Iterable[Request | NotesError],
    parallel: int = PARALLEL,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Iterator[tuple[int, Answer | NotesError]]:
    """Answer many questions, at most `parallel` of them at a time, and fewer where a context of a given size has no
    room for them. Yield the number of each, counted from 0, and its answer or its error, in the order of the requests,
    which are read as they are needed. An error among them is that request's own.

    `callbacks` get notices about all of them, each once, and the progress of compiles; no texts. An answer without a
    limit has as much room as there must be for it (Request.room).
    """
    if not 1 <= parallel <= AT_MOST:
        raise NotesError(f"{parallel!r} questions at once are not possible", f"Take from 1 to {AT_MOST}")
    done: dict[int, Answer | NotesError] = {}
    yielded = read = 0
    source = iter(requests)
    with Scheduler(workspace, parallel, idle=IDLE, grow_first=True) as scheduler:
        with suppress(EngineError):  # then fewer run at a time
            workspace.reserve(0, parallel + SPARE)
        batch = _Batch(workspace, scheduler, callbacks)
        while True:
            while len(scheduler.waiting) + len(scheduler.running) < parallel and read - yielded < WAITING * parallel:
                if (request := next(source, None)) is None:
                    break
                batch.submit(request, done, read)
                read += 1
            if scheduler.waiting or scheduler.running:
                scheduler.step()
            elif yielded == read:
                return
            while yielded in done:
                yielded += 1
                yield yielded - 1, done.pop(yielded - 1)


class _Batch:
    """Prepares requests and submits them."""

    def __init__(self, workspace: Workspace, scheduler: Scheduler, callbacks: Callbacks) -> None:
        self._workspace, self._scheduler = workspace, scheduler
        self._begun = time.perf_counter()  # waiting for earlier requests counts as loading
        self._notices: set[str] = set()
        self._notice_to = callbacks.on_notice
        self._callbacks = replace(NO_CALLBACKS, on_notice=self._notice, progress=callbacks.progress)

    def _notice(self, notice: Notice) -> None:
        if str(notice) not in self._notices:
            self._notices.add(str(notice))
            self._notice_to(notice)

    def submit(self, request: Request | NotesError, done: dict[int, Answer | NotesError], number: int) -> None:
        """Submit a request; its outcome goes to `done`."""

        def end(outcome: Answer | Exception | None) -> None:
            if isinstance(outcome, OSError):
                where = f"{outcome.filename}: " if outcome.filename else ""
                outcome = NotesError(f"{where}{reason(outcome)}")
            if isinstance(outcome, (Answer, NotesError)):
                done[number] = outcome
            elif outcome is not None:
                raise outcome

        try:
            if isinstance(request, NotesError):
                raise request
            job = self._job(prepare(self._workspace, request, self._callbacks))
        except (NotesError, OSError) as error:
            end(error)
        else:
            job.on_end = lambda job: end(job.outcome)
            self._scheduler.submit(job)

    def _job(self, prepared: Prepared) -> Job[Answer]:
        prepared = replace(prepared, begun=self._begun)
        workspace, scheduler, request = self._workspace, self._scheduler, prepared.request
        layout, tokens = scheduler.prefixes.layout(prepared.prompt), prepared.prompt.cells
        boundary = layout.boundary

        def task(job: Job[Answer]) -> Task[Answer]:
            kept = (lambda: scheduler.keep_prefix(job)) if job.prefix else None
            return prompt_task(workspace, prepared, job, callbacks, kept)

        callbacks = replace(self._callbacks, progress=NO_CALLBACKS.progress)
        lookahead = tokens_of_longest(workspace, request.choices)
        max_new = max_new_tokens(workspace, request, prepared.settings.think)
        max_new -= request.room if request.choices is not None else 0
        workspace.check_length(tokens + 1)
        return Job(
            task,
            tokens,
            max_new,
            lookahead=lookahead,
            limit=min(tokens + max_new + lookahead, workspace.longest or UNLIMITED),
            layout=layout if boundary else None,
            boundary=boundary,
        )


MARGIN = 0.2  # in probability
COMPARED_TOKENS = 16  # of an answer that are compared
Probabilities = NDArray[np.float64]  # of choices, or of tokens, [n]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The method for an edit, and the reason."""

    method: Method
    why: str


def compare(field: Probabilities, both: Probabilities, stale: Callable[[], Probabilities]) -> Verdict:
    """Choose by the decisions with the field in place, with the erratum as well, and without an edit; `stale` is called
    if needed."""
    ours, wanted = int(field.argmax()), int(both.argmax())
    if ours == wanted:
        return Verdict(FIELD, "field decides as field+erratum")
    apart = float(both[wanted] - both[ours])
    if apart > MARGIN:
        return Verdict(FIELD_ERRATUM, f"field decides otherwise, by {apart:.2f} in probability")
    moved = float(both[wanted] - both[int(stale().argmax())])
    if moved > MARGIN:
        return Verdict(FIELD_ERRATUM, f"it moves the decision by {moved:.2f} in probability, and field otherwise")
    return Verdict(FIELD, f"field+erratum moves the decision by no more than {MARGIN} in probability")


def choose_per_edit(workspace: Workspace, draft: Prepared, sequence: KVSequence) -> tuple[KVSequence, Prepared]:
    """Return the sequence of the method that `compare` chooses, and the request with this method. `sequence`: the
    prompt by `field+erratum`; it is closed if the other one is chosen, or on failure."""
    trial = _Trial(workspace, draft, sequence)
    try:
        verdict = trial.verdict()
    except (UnsupportedError, EngineError) as error:
        verdict = Verdict(FIELD_ERRATUM, f"not compared: {error.what}")
    except BaseException:
        trial.close(None)
        raise
    kept = trial.forks[0] if verdict.method == FIELD else sequence
    tried = trial.decoded - (len(kept) - trial.end)  # the prompt's own tokens are counted with it
    trial.close(kept)
    settings = replace(draft.settings, method=verdict.method, why=f"{verdict.method}: {verdict.why}", tried=tried)
    return kept, replace(draft, settings=settings)


class _Trial:
    """Decisions of one question by several methods, in forks of the sequence with the prompt by `field+erratum`."""

    def __init__(self, workspace: Workspace, draft: Prepared, sequence: KVSequence) -> None:
        self._workspace, self._draft, self._sequence = workspace, draft, sequence
        self._prompt, self._choices = draft.prompt, draft.request.choices
        self.end = min(piece.position for piece in sequence.pieces if piece.kind == "erratum")
        self.forks: list[KVSequence] = []
        self.decoded = len(sequence) - self.end  # tokens after the skills, in all sequences

    def close(self, kept: KVSequence | None) -> None:
        for sequence in (self._sequence, *self.forks):
            if sequence is not kept:
                sequence.close()

    def verdict(self) -> Verdict:
        values, tail = self._compiled_values(), len(self._sequence) - self.end + COMPARED_TOKENS
        cells = len(self._sequence) + 3 * tail + sum(len(patch.tokens) for patch in values)
        self._workspace.make_room(cells, held=len(self._sequence))
        answer = self._answer() if self._choices is None else []
        both = self._decisions(self._sequence, answer)
        field = self._decisions(self._fork(replace(self._prompt, method=FIELD)), answer)
        pairs = zip(field, both, strict=True)
        place = next((at for at, (one, other) in enumerate(pairs) if one.argmax() != other.argmax()), 0)

        def stale() -> Probabilities:
            return self._decisions(self._fork(replace(self._prompt, fields={}), values), answer)[place]

        return compare(field[place], both[place], stale)

    def _answer(self) -> list[int]:
        """Return the likeliest first tokens of the answer by `field+erratum`."""
        tokens: list[int] = []
        ends = self._workspace.model.end_tokens
        with self._sequence.share() as fork:
            while len(tokens) < COMPARED_TOKENS and (token := int(fork.logits().argmax())) not in ends:
                tokens.append(token)
                fork.append([token], "answer")
        self.decoded += len(tokens)
        return tokens

    def _decisions(self, sequence: KVSequence, answer: Sequence[int]) -> list[Probabilities]:
        """Return the probabilities of the choices; without these, those of each token of the answer and of the next, as
        one may end where the other goes on."""
        if self._choices is not None:
            return [np.array([*decide(sequence, self._choices).probabilities.values()], np.float64)]
        self.decoded += len(answer)
        rows = [sequence.logits(), *(sequence.lookahead(answer) if answer else ())]
        return [np.exp(log_softmax(row)) for row in rows]

    def _fork(self, prompt: Prompt, patches: Sequence[Patch] = ()) -> KVSequence:
        """Return a fork with another prompt, whose skills differ by the patches."""
        fork = self._sequence.share(self.end)
        self.forks.append(fork)
        if patches:
            self.decoded += fork.replace(patches)
        start = len(fork)
        run_task(assemble_task(self._workspace, rendered(self._workspace, prompt), begun=fork, counted=True))
        self.decoded += len(fork) - start
        return fork

    def _compiled_values(self) -> list[Patch]:
        """Return the patches of the sequence that put the compiled values back."""
        patches = []
        for name, changed in self._prompt.changes.items():
            segment = next(segment for segment in self._prompt.segments if segment.name == name)
            start = min(
                piece.position for piece in self._sequence.pieces if (piece.kind, piece.name) == ("splice", name)
            )
            for part in align(changed.patches, len(segment)):
                if part.patch:
                    old = segment.tokens[slice(*part.before)].tolist()
                    patches.append(Patch(start + part.after[0], start + part.after[1], old))
        return sorted(patches, key=lambda patch: patch.first)
