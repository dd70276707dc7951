"""Answers one request: resolves its settings, assembles the prompt in a sequence, decodes and generates.

A session assembles its own sequence (sessions/session.py) and uses the same functions for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from notes_cli.editing.methods import Method
from notes_cli.engine.decision import Decision, decide_task
from notes_cli.engine.loop import Task, run, run_stepwise
from notes_cli.engine.pieces import Piece
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.sequence import KVSequence, Stopped
from notes_cli.errors import EngineError, Help, NotesError, Notice
from notes_cli.runtime.assemble import assemble, saved_seconds, warn_unspliced
from notes_cli.runtime.generate import (
    ANSWER_RESERVE,
    DEFAULT_MAX_THINK,
    UNLIMITED_RESERVE,
    Chosen,
    ReasoningTrace,
    ReplyGenerator,
    decide_after_reasoning,
    ignore_text,
)
from notes_cli.runtime.open_skills import SkillRef, Watch, no_progress
from notes_cli.runtime.resolve import ResolvedRequest, Settings, resolve_request
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import of_fields

PARALLEL = 16  # concurrent questions
UNLIMITED = 2**31 - 1  # tokens: limited by the context only


def freeze_lists(of: object, *names: str) -> None:
    """Make tuples of the lists that a frozen dataclass has by these names, so that an iterator serves more than once.
    Errata may be a mapping of fields and values, choices None. Raise NotesError for a text in the place of a list."""
    for name in names:
        given = getattr(of, name)
        if given is None:
            continue
        if isinstance(given, str):
            raise NotesError(f"{name} is the text {given!r}, and not a list", f"Write [{given!r}]")
        object.__setattr__(of, name, of_fields(given) if isinstance(given, Mapping) else tuple(given))


@dataclass(frozen=True, slots=True)
class Request:
    """One question and all options for its answer. None means the model's calibrated value, else the default. Raises
    NotesError for an option of the wrong type, and for a negative number of tokens.

    Options:
    splice: Skills to splice: names of compiled skills, paths of segment files or texts, or Segments.
    errata: Corrections stated after the skills: `field=value` or free text, or a mapping of fields to values.
    fields: New values of fields, a mapping, applied by `method`.
    method: Edit method for `fields`, a name or a Method; None or "auto" for the calibrated one.
    system: System text before the skills.
    think: Let the model reason before it answers; the reasoning is not part of the answer's text.
    max_think: Tokens of reasoning at most.
    choices: Decide among these answers (two or more) instead of generating text.
    max_tokens: Tokens of the answer at most.
    sampling: All sampling options, as SamplerOptions.
    json_schema: JSON schema (parsed) that the answer satisfies.
    grammar: Grammar (GBNF) that the answer satisfies, instead of a schema.
    images: Images to show with the question: paths of image files, or names and Segments of compiled images.
    results: In a session, in place of a question: (tool, result) for each tool call of the last answer.
    seam: Tokens to recompute at the start of a skill that follows another context than at compile time.
    place: Place of the skills: "early" in the system message, or "late" before the question.
    wording: Wording of errata, a name in prompts/errata.json.
    recompute: Decode the same tokens instead of splicing them, to compare.
    decode: Names from `splice` to decode instead, so that these skills attend to the text before them.
    strict: Refuse a skill that cannot be spliced, instead of decoding it.
    exact: Reuse K/V only where it equals that of a full prefill of the prompt, and decode the rest.
    """

    question: str
    splice: Sequence[SkillRef] = ()
    errata: Sequence[str] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    method: Method | None = None
    system: str | None = None
    think: bool = False
    max_think: int = DEFAULT_MAX_THINK
    choices: Sequence[str] | None = None
    max_tokens: int = 256
    sampling: SamplerOptions = field(default_factory=SamplerOptions)
    seam: int | None = None
    place: str | None = None
    wording: str | None = None
    recompute: bool = False
    decode: Sequence[str] = ()
    strict: bool = False
    exact: bool = False
    json_schema: Any = None
    grammar: str | None = None
    results: Sequence[tuple[str, str]] = ()
    images: Sequence[SkillRef] = ()

    def __post_init__(self) -> None:
        freeze_lists(self, "splice", "images", "errata", "decode", "choices", "results")
        for name, count in (("max_think", self.max_think), ("max_tokens", self.max_tokens), ("seam", self.seam or 0)):
            if count < 0:
                raise NotesError(f"{name} must be a number of tokens, not {count!r}")

    @property
    def room(self) -> int:
        """Tokens to reserve for the answer."""
        return UNLIMITED_RESERVE if self.max_tokens == UNLIMITED else self.max_tokens


class Asking(TypedDict, total=False):
    """Types of the options of a question as keywords: those of Request and of SamplerOptions, where their meanings and
    defaults are."""

    splice: Sequence[SkillRef]
    errata: Sequence[str] | Mapping[str, str]
    fields: Mapping[str, str]
    method: Method | str | None
    system: str | None
    think: bool
    max_think: int
    choices: Sequence[str] | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    sampling: SamplerOptions | None
    json_schema: Any
    grammar: str | None
    images: Sequence[SkillRef]
    results: Sequence[tuple[str, str]]
    seam: int | None
    place: str | None
    wording: str | None
    recompute: bool
    decode: Sequence[str]
    strict: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks for notices, progress and streamed text; no-ops by default."""

    on_notice: Callable[[Notice], object] = lambda notice: None
    progress: Watch = no_progress
    on_reasoning: Callable[[str], None] | None = None
    # (trace, whether reasoning was requested)
    on_reasoning_end: Callable[[ReasoningTrace, bool], object] = lambda thought, asked: None
    on_text: Callable[[str], object] | None = None
    on_token: Chosen | None = None  # each token of an answer, before its text
    on_answer: Callable[[Answer], object] = lambda answer: None

    def __repr__(self) -> str:
        changed = (item.name for item in fields(self) if getattr(self, item.name) is not item.default)
        return f"Callbacks({', '.join(changed)})"


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a prompt by origin of their K/V. Seam, erratum and rewritten tokens are also decoded."""

    total: int
    spliced: int
    seam: int
    decoded: int
    rewritten: int
    erratum: int
    shared: int = 0  # in cells shared with other requests (runtime/batch.py), computed or spliced once for all

    @classmethod
    def of(cls, sequence: KVSequence) -> Counts:
        rewritten = sum(piece.rewritten for piece in sequence.pieces)
        errata = sum(piece.tokens for piece in sequence.pieces if piece.kind == "erratum")
        spliced, seam = sequence.count("spliced"), sequence.count("seam")
        return cls(len(sequence), spliced, seam, sequence.decoded, rewritten, errata)


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


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, its prompt's statistics, and timings in seconds; `prompt` and `first_token` count from the end of
    `load`."""

    text: str
    tokens: int  # generated
    settings: Settings
    counts: Counts  # of the prompt
    pieces: tuple[Piece, ...]
    thought: ReasoningTrace | None = None
    decision: Decision | None = None
    stopped: Stopped | None = None  # why generation ended; None for a choice
    begun: float = 0.0  # start of the request (time.perf_counter)
    load: float = 0.0  # until model, segments and context were ready
    splice: float = 0.0
    prompt: float = 0.0
    first_token: float = 0.0  # or the choice
    # Time that a prefill of the spliced tokens took on this machine when they were compiled; None if unknown.
    saved: float | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        summary = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        if self.decision:
            summary = f"probability {self.probabilities[self.text]:.2f}"
        cut = {"length": ", cut off at max_tokens", "context": ", cut off by the context's end"}
        counts = f"{self.counts.spliced} spliced, {self.counts.decoded} decoded"
        return f"Answer({shown!r}, {summary}, {counts}{cut.get(self.stopped or '', '')})"

    def _repr_markdown_(self) -> str:
        """Notebooks show the text."""
        return self.text

    @property
    def choice(self) -> str | None:
        """The preferred choice; None without choices."""
        return self.decision.choice if self.decision else None

    @property
    def probabilities(self) -> dict[str, float]:
        """Probability of each choice, with a sum of 1; empty without choices."""
        return self.decision.probabilities if self.decision else {}

    @property
    def unwritten(self) -> str:
        """A choice that is not in the sequence; empty if it is, possibly as the end of the reasoning."""
        at_the_end = self.thought is not None and self.thought.answer.casefold() == self.text.casefold()
        return self.text if self.decision and not at_the_end else ""


Stream = Generator[str, None, Answer]  # yields texts, returns the answer
NO_CALLBACKS = Callbacks()


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
