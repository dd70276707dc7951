"""Answers one request: resolves its settings, assembles the prompt in a sequence, decodes and generates.

A session assembles its own sequence (sessions/session.py) and uses the same functions for the rest.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace

from notes_cli.editing.methods import AUTO, FIELD_ERRATUM
from notes_cli.engine.decision import decide_task
from notes_cli.engine.loop import Task, run, run_stepwise
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, Help
from notes_cli.runtime.assemble import assemble, saved_seconds, warn_unspliced
from notes_cli.runtime.generate import (
    ANSWER_RESERVE,
    ReplyGenerator,
    decide_after_reasoning,
    ignore_text,
)
from notes_cli.runtime.request import NO_CALLBACKS, Answer, Callbacks, Counts, Request, Settings, Stream
from notes_cli.runtime.resolve import ResolvedRequest, resolve_request
from notes_cli.runtime.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Plan:
    """An assembled prompt: its sequence, its settings, and when the request started and its skills were ready
    (time.perf_counter)."""

    sequence: KVSequence
    settings: Settings
    counts: Counts
    begun: float
    ready: float
    saved: float | None  # seconds of prefill (assemble.py)
    grammar: str | None = None  # constraint of the answer

    def __repr__(self) -> str:
        counts = self.counts
        return f"Plan({counts.total} tokens, {counts.spliced} spliced, {counts.decoded} decoded)"

    @classmethod
    def of(cls, draft: ResolvedRequest, sequence: KVSequence) -> Plan:
        """Make the plan of a resolved request whose prompt is in this sequence."""
        gain = saved_seconds(sequence.pieces, draft.segments)
        return cls(sequence, draft.settings, Counts.of(sequence), draft.begun, draft.ready, gain, draft.grammar)


def ask(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Answer:
    """Answer one question. Raises NotesError."""
    plan = prepare(workspace, request, callbacks)
    with plan.sequence:
        return answer(workspace, request, plan, callbacks)


def ask_stream(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Stream:
    """As `ask`, yielding texts as they are generated. Starts at the first `next`; closing it frees its sequence."""
    plan = prepare(workspace, request, callbacks)
    with plan.sequence:
        return (yield from stream(workspace, request, plan, callbacks))


def explain(workspace: Workspace, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Plan:
    """Plan a request: the pieces of its prompt and how each would be made, without computing."""
    return prepare(workspace, request, callbacks, dry=True)


def prepare(workspace: Workspace, request: Request, callbacks: Callbacks, *, dry: bool = False) -> Plan:
    """Resolve the request and assemble its prompt, with capacity for the answer."""
    try:
        draft = resolve_request(workspace, request, callbacks, dry=dry)
    except EngineError as error:
        if not dry and error.remedy and error.remedy.help is Help.LARGER_CONTEXT:
            # replaces an error of a compile, whose remedy does not count the rest of the prompt
            explain(workspace, request)
        raise
    sequence = assemble(
        workspace,
        draft.prompt,
        **draft.how,
        dry=dry,
        room=max_new_tokens(workspace, request, draft.settings.think),
    )
    if request.method == AUTO and draft.settings.method == FIELD_ERRATUM and not dry and not draft.settings.think:
        from notes_cli.runtime.auto import choose_per_edit

        sequence, draft = choose_per_edit(workspace, draft, sequence)
    return Plan.of(draft, sequence)


def max_new_tokens(workspace: Workspace, request: Request, think: bool) -> int:
    """Return the maximum number of tokens to generate. `think`: reasoning is requested."""
    thinks = think or workspace.reasoning.open  # such models may reason without a request
    return request.room + (request.max_think + ANSWER_RESERVE if thinks else 0)


def answer(workspace: Workspace, request: Request, plan: Plan, callbacks: Callbacks = NO_CALLBACKS) -> Answer:
    """Decode the prompt and answer it. The sequence then ends with the answer, unless that is a choice."""
    _decode_prompt(plan, callbacks)
    result = run(answer_task(workspace, request, plan, callbacks))
    callbacks.on_answer(result)
    return result


def stream(workspace: Workspace, request: Request, plan: Plan, callbacks: Callbacks = NO_CALLBACKS) -> Stream:
    """As `answer`, yielding texts as they are generated; a choice as a whole."""
    _decode_prompt(plan, callbacks)
    texts: list[str] = []

    def on_text(text: str) -> None:
        texts.append(text)
        if callbacks.on_text:
            callbacks.on_text(text)

    with closing(run_stepwise(answer_task(workspace, request, plan, replace(callbacks, on_text=on_text)))) as pauses:
        result: Answer | None = None
        while result is None:
            try:
                next(pauses)
            except StopIteration as done:
                result = done.value
            yield from texts
            texts.clear()
    if result.decision:
        yield result.text
    callbacks.on_answer(result)
    return result


def _decode_prompt(plan: Plan, callbacks: Callbacks) -> None:
    """Decode the prompt, with warnings for skills that were not spliced, and progress."""
    warn_unspliced(plan.sequence, callbacks.on_notice)
    with callbacks.progress("reading the prompt", plan.counts.decoded) as update:
        plan.sequence.flush(update)


def answer_task(
    workspace: Workspace, request: Request, plan: Plan, callbacks: Callbacks = NO_CALLBACKS
) -> Task[Answer]:
    """As `answer`, as a task of a loop: reason if requested, then decide or generate."""
    sequence = plan.sequence
    yield [sequence]
    prompt_decoded = time.perf_counter()
    first: list[float] = []

    def on_text(text: str) -> None:
        first.append(time.perf_counter())
        if callbacks.on_text:
            callbacks.on_text(text)

    generator = ReplyGenerator(
        *(workspace, request.sampling, request.max_tokens, request.max_think),
        on_text=on_text,
        # only requested reasoning is streamed
        on_reasoning=(callbacks.on_reasoning if plan.settings.think else None) or ignore_text,
        on_token=callbacks.on_token,
        grammar=plan.grammar,
    )
    thought, decision, stopped, text, tokens = None, None, None, "", 0
    if plan.settings.think:
        thought = yield from generator.reason(sequence)
        callbacks.on_reasoning_end(thought, True)
    if request.choices is not None:
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
    return Answer(
        text,
        tokens,
        plan.settings,
        plan.counts,
        tuple(sequence.pieces),
        thought,
        decision,
        stopped,
        begun=plan.begun,
        load=plan.ready - plan.begun,
        splice=sequence.seconds["splice"],
        prompt=prompt_decoded - plan.ready,
        first_token=(first[0] if first else time.perf_counter()) - plan.ready,
        saved=plan.saved,
    )
