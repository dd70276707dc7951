"""Answers a request, or many together: calls resolve and assemble, decodes the prompt, drives the generator.

A session assembles its own sequence (sessions/session.py); the rest is the same. Of many requests, prompts that begin
alike share that prefix by the prefix cache, which ends where `notes ask` begins a batch: so a question that is decoded
alone has exactly the logits of `notes ask`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from notes_cli.engine.model import Model
from notes_cli.engine.sequence import KVSequence, Logits, Task
from notes_cli.errors import EngineError, Help, NotesError, Notice, reason
from notes_cli.runtime.assemble import assemble, assemble_task, saved_seconds, warn_unspliced
from notes_cli.runtime.generate import (
    ANSWER_RESERVE,
    Decision,
    Reply,
    ReplyGenerator,
    decide_after_reasoning,
    decide_task,
    log_softmax,
)
from notes_cli.runtime.prompt import rendered
from notes_cli.runtime.request import (
    NO_CALLBACKS,
    PARALLEL,
    UNLIMITED,
    Answer,
    Callbacks,
    Counts,
    Event,
    Prefilled,
    Request,
    Stream,
    Text,
    Token,
)
from notes_cli.runtime.resolve import Prepared, resolve_request
from notes_cli.runtime.scheduler import Job, Scheduler, run
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from notes_cli.text.messages import Conversation, ToolCall
    from notes_cli.text.tools import Calls


def describe(prepared: Prepared, sequence: KVSequence, cached: int = 0, shared: int = 0) -> Prefilled:
    """Describe the prompt of a sequence. `cached`: tokens that came from the prefix cache; `shared`: tokens in cells
    that others share."""
    saved = saved_seconds([piece for piece in sequence.pieces if piece.position >= cached], prepared.prompt.segments)
    counts = replace(Counts.of(sequence), shared=shared)
    return Prefilled(counts, tuple(sequence.pieces), prepared.settings, saved, time.perf_counter() - prepared.begun)


def prompt_task(
    workspace: Workspace,
    prepared: Prepared,
    job: Job[Any],
    callbacks: Callbacks,
    on_boundary: Callable[[], object] | None = None,
) -> Task[Answer]:
    """Assemble the prompt in the job's sequence and answer it. `on_boundary` is called when the tokens before the job's
    boundary are decoded."""
    assert job.sequence is not None
    sequence = job.sequence
    try:
        yield from assemble_task(workspace, prepared.prompt, begun=sequence, counted=True)
        if on_boundary and job.boundary:
            if len(sequence) - sequence.undivided < job.boundary:  # its question would be in the same batch
                sequence.divide(job.boundary)
            while not sequence.divided:
                yield [sequence]
            on_boundary()
        return (yield from answer_task(workspace, prepared, sequence, callbacks, job.live, job.boundary or 0))
    finally:
        sequence.close()


def ask(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Answer:
    """Answer one question. Raises NotesError."""
    answer = run(workspace, _job(workspace, request, callbacks))
    callbacks.on_event(answer)
    return answer


def ask_stream(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Stream:
    """As `ask`, yielding texts as they are generated. Starts at the first `next`; closing it frees its sequence."""
    return (yield from stream(workspace, lambda callbacks: _job(workspace, request, callbacks), callbacks))


def stream(workspace: Workspace, make: Callable[[Callbacks], Job[Answer]], callbacks: Callbacks) -> Stream:
    """Run the job that `make` makes with these callbacks, yielding its texts as they are generated; a choice as a
    whole."""
    texts: list[str] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Text) and not event.reasoning:
            texts.append(event.text)
        callbacks.on_event(event)

    job = make(replace(callbacks, on_event=on_event))
    with Scheduler(workspace) as scheduler:
        scheduler.submit(job)
        while not job.ended:
            scheduler.step()
            yield from texts
            texts.clear()
    answer = job.result
    callbacks.on_event(answer)
    return answer


def explain(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Prefilled:
    """Return the pieces of a request's prompt and how each would be made, without computing."""
    prepared = prepare(workspace, request, callbacks, dry=True)
    room = max_new_tokens(workspace, prepared.request, prepared.settings.think)
    return describe(prepared, assemble(workspace, prepared.prompt, dry=True, counted=True, room=room))


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
    return Job(
        lambda job: prompt_task(workspace, prepared, job, callbacks),
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
    sequence: KVSequence,
    callbacks: Callbacks = NO_CALLBACKS,
    cached: int = 0,
    shared: int = 0,
) -> Task[Answer]:
    """Decode the rest of an assembled prompt, and answer it. `cached`, `shared`: as in `describe`."""
    prefilled = yield from prefill_task(workspace, prepared, sequence, callbacks, cached, shared)
    return (yield from generate_task(workspace, prepared, prefilled, sequence, callbacks))


def prefill_task(
    workspace: Workspace,
    prepared: Prepared,
    sequence: KVSequence,
    callbacks: Callbacks,
    cached: int = 0,
    shared: int = 0,
) -> Task[Prefilled]:
    """Decode the rest of an assembled prompt. `cached`, `shared`: as in `describe`."""
    warn_unspliced(sequence, callbacks.on_event)
    with callbacks.progress("reading the prompt", sequence.decoded) as update:
        total = len(sequence.pending)
        while sequence.pending:
            yield [sequence]
            update(total - len(sequence.pending), total)
    yield from sequence.next_logits()
    prefilled = describe(prepared, sequence, cached, shared)
    callbacks.on_event(prefilled)
    return prefilled


def generate_task(
    workspace: Workspace,
    prepared: Prepared,
    prefilled: Prefilled,
    sequence: KVSequence,
    callbacks: Callbacks,
    index: int = 0,
) -> Task[Answer]:
    """Reason after a decoded prompt if requested, then decide or generate, with an event for each new text. The
    sequence then ends with the answer, unless that is a choice. `index`: of the answer."""
    request, prompt, settings = prepared.request, prepared.prompt, prepared.settings
    recorder = None if request.likely is None else TokenRecorder(workspace.model, request.likely)
    talk = request.conversation
    tools = allowed_calls(workspace, request, talk) if talk and talk.tools else None
    calls = tools and tools.stream()
    first: list[float] = []
    texts: list[str] = []  # of the answer, without its calls

    def tokens() -> tuple[Token, ...]:
        return recorder.take() if recorder else ()

    def on_text(text: str) -> None:
        if text := calls.feed(text) if calls else text:
            first.append(time.perf_counter())
            texts.append(text)
            callbacks.on_event(Text(text, index, tokens=tokens()))
        for call, part in calls.arguments() if calls else ():
            first.append(time.perf_counter())
            callbacks.on_event(Text(part, index, call=call))

    def on_reasoning(text: str) -> None:
        callbacks.on_event(Text(text, index, reasoning=True))

    def call_begins() -> int:
        """Return where a call begins; what follows is one in the form of a required call."""
        nonlocal calls
        place = calls.call_position if calls else -1
        if tools and place >= 0:
            calls = tools.stream(required=True)
            tokens()
        return place

    generator = ReplyGenerator(
        *(workspace, request.sampling, request.max_tokens, request.max_think),
        on_text=on_text,
        on_reasoning=on_reasoning,
        ended=callbacks.ended,
        stops=request.stops,
        on_token=recorder.chosen if recorder else None,
        grammar=prepared.grammar,
        calls=None if request.must_call else tools,
        opened=not (talk and talk.tools),
        prefilled=prompt.is_raw or bool(talk and talk.prefill),
        call_begins=call_begins if request.call_grammar else None,
        call_grammar=request.call_grammar,
        raw=prompt.is_raw,
    )
    thought = (yield from generator.reason(sequence)) if settings.think else None
    decision: Decision | None = None
    if request.choices is None:
        reply = yield from generator.reply(sequence, thought)
    else:
        if thought:
            decision = yield from decide_after_reasoning(workspace, sequence, request.choices, thought)
        else:
            decision = yield from decide_task(sequence, request.choices)
        callbacks.on_event(Text(decision.choice, index))
        reply = Reply(decision.choice, 0, thought, None)
    found: tuple[ToolCall, ...] = ()
    if calls:
        rest, found = calls.end(cut=reply.stopped != "end")
        texts.append(rest)
        if rest:
            callbacks.on_event(Text(rest, index, tokens=tokens()))
    return Answer(
        "".join(texts).strip() if found else reply.text,
        reply.tokens,
        settings,
        prefilled.counts,
        tuple(sequence.pieces),
        reply.thought,
        decision,
        reply.stopped,
        begun=prepared.begun,
        load=prepared.ready - prepared.begun,
        splice=sequence.seconds["splice"],
        prompt=prefilled.seconds - (prepared.ready - prepared.begun),
        first_token=(first[0] if first else time.perf_counter()) - prepared.ready,
        saved=prefilled.saved,
        index=index,
        calls=found,
        stop=reply.stop,
        rest=tokens(),
    )


def allowed_calls(workspace: Workspace, request: Request, conversation: Conversation) -> Calls | None:
    """Return the tools that the answer may call, with the format of calls; None if the model's is unknown."""
    from notes_cli.text.tools import FORCED, Calls, form_of

    form = form_of(workspace.template.tool_source)
    if conversation.prefill and form:
        form = replace(form, bare="", waits="", prefix="")  # a call does not begin the answer
    elif request.must_call:
        form = FORCED
    return Calls(form, request.allowed or conversation.tools) if form else None


@dataclass(slots=True)
class TokenRecorder:
    """Collects the tokens of an answer between two texts, with `likely` alternatives each."""

    model: Model
    likely: int
    new: list[Token] = field(default_factory=list)

    def chosen(self, token: int, logits: Logits) -> None:
        scores = log_softmax(logits)
        best = np.argsort(-scores)[: self.likely]
        likely = tuple((*self._text(int(candidate)), float(scores[candidate])) for candidate in best)
        self.new.append(Token(*self._text(token), float(scores[token]), likely, self.model.token_bytes(token)))

    def _text(self, token: int) -> tuple[str, bytes]:
        raw = self.model.token_bytes(token, special=True)
        return raw.decode(errors="replace"), raw

    def take(self) -> tuple[Token, ...]:
        tokens, self.new = tuple(self.new), []
        return tokens


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
        self._on_event = callbacks.on_event
        self._callbacks = replace(callbacks, on_event=self._notice)

    def _notice(self, event: Event) -> None:
        """Pass a new notice on."""
        if isinstance(event, Notice) and str(event) not in self._notices:
            self._notices.add(str(event))
            self._on_event(event)

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
