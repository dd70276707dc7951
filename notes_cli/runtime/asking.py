"""Asking: a request is settled, assembled in a notebook and answered. Every edge asks in this one way.

A session assembles its own notebook (sessions/session.py) and is settled and answered by the same functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import field, replace
from typing import Any

from notes_cli.classes import dataclass
from notes_cli.editing.methods import ERRATUM, RECOMPUTE, SUFFIX, Method
from notes_cli.engine.decision import Decision, deciding
from notes_cli.engine.grammar import Grammar
from notes_cli.engine.loop import Task, run, steps
from notes_cli.engine.notebook import Notebook, Stopped
from notes_cli.engine.pieces import Piece
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import GrammarError, Help, NotesError, Notice, SessionError, SkillError
from notes_cli.library.files import ERRATA
from notes_cli.library.store import Library
from notes_cli.runtime.assembling import Prompt, assemble, check_seam, method_for, unspliced
from notes_cli.runtime.corrections import Fielded, check_values, known_fields, meant, parse_errata
from notes_cli.runtime.opening import Watch, no_image, open_segments, unseen
from notes_cli.runtime.settings import UNMEASURED, composing, defaults
from notes_cli.runtime.thinking import ROOM, THINK, Chosen, Thought, deciding_after, replying, thinking
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum, of_fields, parse_erratum, read_errata, shipped_wordings, word
from notes_cli.text.keys import listed

PARALLEL = 16  # questions at once of many (bench/batch.py)
ENDLESS = 2**31 - 1  # tokens: no limit but the context's
ENDLESS_ROOM = 4096  # tokens that there is room for at least, for an answer without a limit


SkillRef = str | os.PathLike[str] | Segment  # a name of a compiled skill, a segment file or a text, or a segment
SKILLS = (str, os.PathLike, Segment)  # the same, to ask of a value


def keep_lists(of: object, **kinds: type | tuple[type, ...]) -> None:
    """Make tuples of the lists that a frozen dataclass has by these names: what can be gone through once would be empty
    the second time. Errata may be a mapping of fields and values, choices None. Raise NotesError for what is no list,
    such as a text, which is one of its letters, and for what is in it and none of these kinds."""
    for name, kind in kinds.items():
        given = getattr(of, name)
        if name == "choices" and given is None:
            continue
        if name == "errata" and isinstance(given, Mapping):
            given = of_fields(given)
        if isinstance(given, str):
            raise NotesError(f"{name} is the text {given!r}, and not a list", f"Write [{given!r}]")
        if not isinstance(given, Iterable):
            raise NotesError(f"{name} is {_short(given)}, and not a list")
        found = tuple(given)
        for part in found:
            if not isinstance(part, kind):
                raise NotesError(f"{name} has {_short(part)}, which cannot be one of them")
        object.__setattr__(of, name, found)


def _short(one: object) -> str:
    return f"a {type(one).__name__}" if isinstance(one, Segment) else repr(one)[:80]


@dataclass(frozen=True, slots=True)
class Request:
    """One question and how it is to be answered. What is None goes by what was measured of the model.

    `splice`: names of compiled skills, segment files or texts, or segments. `errata`: `field=value` or free words, or a
    mapping of fields and values. `images`: files of images, or names and segments as of `splice`, which are shown with
    the question.
    `values`: new values of fields, brought in by `method`. `max_think`, `limit`: tokens. `recompute`: decode the very
    same tokens instead of splicing; `decode`: those of these skills alone, each of `splice`, so that they see what
    precedes them. `strict`: refuse a skill that cannot be spliced, instead of decoding it. `exact`: reuse rows only
    where they are those of a prefill of the whole prompt, and decode what would have to be moved.
    `json_schema` (JSON, read), `grammar` (GBNF): what the answer is held to, one of them, and not with choices.
    `results`: in a session, in the place of a question: the name of each tool that the last answer called, and what the
    tool has returned. Raise NotesError where one text is given for a list of them, and for less than no tokens.
    """

    question: str
    splice: Sequence[SkillRef] = ()
    errata: Sequence[str] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    method: Method | None = None
    system: str | None = None
    think: bool = False
    max_think: int = THINK
    choices: Sequence[str] | None = None
    limit: int = 256
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
        for name, one, kind in (("values", self.values, Mapping), ("sampling", self.sampling, SamplerOptions)):
            if not isinstance(one, kind):
                raise NotesError(f"{name} is {one!r}, and no {kind.__name__}")
        keep_lists(self, splice=SKILLS, images=SKILLS, errata=str, decode=str, choices=str, results=(tuple, list))
        words = [
            ("question", self.question),
            ("system", self.system or ""),
            *((f"the value of {name}", value) for name, value in self.values.items()),
        ]
        for name, value in words:
            if not isinstance(value, str):
                raise NotesError(f"{name} is {value!r}, and no text")
        for name, count in (("max_think", self.max_think), ("limit", self.limit), ("seam", self.seam or 0)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise NotesError(f"{name} is {count!r}, and no number of tokens")

    @property
    def room(self) -> int:
        """Tokens that there must be room for when the answer begins."""
        return ENDLESS_ROOM if self.limit == ENDLESS else self.limit


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for a request: what was named, else what was measured of the model, else what is safe."""

    think: bool
    wording: str
    place: str
    seam: int
    method: Method | None = None  # None where no new values come in
    why: str | None = None  # the method, if it was not named


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens on the way, and gets texts as they come. By default nobody is."""

    notice: Callable[[Notice], object] = lambda notice: None
    watch: Watch = unseen
    thought: Callable[[str], None] | None = None
    thought_ended: Callable[[Thought, bool], object] = lambda thought, asked: None  # asked for, or begun unasked
    answer: Callable[[str], object] | None = None
    chosen: Chosen | None = None  # each token of an answer, before its text is told
    answered: Callable[[Answer], object] = lambda answer: None


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a prompt by how their rows come about. A seam, an erratum and what is rewritten are decoded, too."""

    total: int
    spliced: int
    seam: int
    decoded: int
    rewritten: int
    erratum: int
    shared: int = 0  # in cells of a stem (runtime/batch.py), which were computed or placed once for many

    @classmethod
    def of(cls, notebook: Notebook) -> Counts:
        rewritten = sum(piece.rewritten for piece in notebook.pieces)
        errata = sum(piece.tokens for piece in notebook.pieces if piece.kind == "erratum")
        spliced, seam = notebook.count("spliced"), notebook.count("seam")
        return cls(len(notebook), spliced, seam, notebook.decoded, rewritten, errata)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt, assembled: its notebook, what held for it, and when the skills were there (time.perf_counter)."""

    notebook: Notebook
    settings: Settings
    counts: Counts
    opened: float
    grammar: str | None = None  # what the answer is held to


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, and how it was come to. Of times, seconds since the skills were there."""

    text: str
    tokens: int  # that were written
    settings: Settings
    counts: Counts  # of the prompt
    pieces: tuple[Piece, ...]
    thought: Thought | None = None
    decision: Decision | None = None
    stopped: Stopped | None = None  # why it ends; None for a choice
    opened: float = 0.0  # when the skills were there (time.perf_counter)
    splice: float = 0.0
    prompt: float = 0.0
    first_token: float = 0.0  # or the choice

    def __str__(self) -> str:
        return self.text

    @property
    def choice(self) -> str | None:
        """The one of the choices that the model prefers; None without choices."""
        return self.decision.choice if self.decision else None

    @property
    def probabilities(self) -> dict[str, float]:
        """That of each of the choices, together 1; none without choices."""
        return self.decision.probabilities if self.decision else {}

    @property
    def unwritten(self) -> str:
        """A choice that is nowhere in the notebook; empty where the answer is, if only at the end of a chain."""
        at_the_end = self.thought is not None and self.thought.answer.casefold() == self.text.casefold()
        return self.text if self.decision and not at_the_end else ""


Stream = Generator[str, None, Answer]  # texts as they come, and the answer that they come to
SILENT = Listener()


def ask(workspace: Workspace, request: Request, listener: Listener = SILENT) -> Answer:
    """Answer one question. Raise NotesError where that cannot be."""
    plan = prepare(workspace, request, listener)
    with plan.notebook:
        return answer(workspace, request, plan, listener)


def ask_stream(workspace: Workspace, request: Request, listener: Listener = SILENT) -> Stream:
    """`ask`, step by step. It begins when the first text is asked for; closing it gives back what it holds."""
    plan = prepare(workspace, request, listener)
    with plan.notebook:
        return (yield from stream(workspace, request, plan, listener))


def explain(workspace: Workspace, request: Request, listener: Listener = SILENT) -> Plan:
    """What asking would do: the pieces of the prompt, and how each would be made. Nothing is computed."""
    return prepare(workspace, request, listener, dry=True)


def prepare(workspace: Workspace, request: Request, listener: Listener, *, dry: bool = False) -> Plan:
    """Open the skills, settle what holds and assemble the prompt, with room for what will be written."""
    draft = settled(workspace, request, listener, dry=dry)
    notebook = assemble(
        workspace,
        draft.prompt,
        seam=draft.settings.seam,
        splice=not request.recompute,
        dry=dry,
        room=room_for(workspace, request, draft.settings.think),
        strict=request.strict,
        exact=request.exact,
        later=True,
    )
    return draft.planned(notebook)


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that is to be assembled: what holds for it, and when the skills were there (time.perf_counter)."""

    prompt: Prompt
    settings: Settings
    opened: float
    grammar: str | None

    def planned(self, notebook: Notebook) -> Plan:
        """It has been assembled."""
        return Plan(notebook, self.settings, Counts.of(notebook), self.opened, self.grammar)


def settled(workspace: Workspace, request: Request, listener: Listener, *, dry: bool = False) -> Draft:
    """Open the skills and settle what holds."""
    check_no_results(request)
    grammar = held_to(workspace, request)
    skills = opened(workspace, request.splice, listener, dry=dry)
    segments = named_apart([*skills, *opened(workspace, request.images, listener, image=True, dry=dry)])
    at = time.perf_counter()
    request = corrected(workspace, request, segments, listener)
    settings = settle(workspace, request, segments, listener)
    tell_meant(request, segments, listener)
    return Draft(prompt_of(request, settings, segments), settings, at, grammar)


def check_no_results(request: Request) -> None:
    """Raise SessionError for results of tools: the calls that they answer are in a session."""
    if request.results:
        raise SessionError("results of tools go with a session, whose last answer has called them")


def corrected(
    workspace: Workspace,
    request: Request,
    segments: Sequence[Segment],
    listener: Listener,
    had: Sequence[Fielded] = (),
) -> Request:
    """The request with what everybody is told of the skills that come with it, unless it says something itself. `had`:
    the skills that were there before."""
    library = workspace.library
    if not segments or not isinstance(library, Library) or not (library.folder / ERRATA).exists():
        return request
    from notes_cli.library.standing import StandingErrata, holding

    errata = StandingErrata(library.folder).all()
    known = known_fields(*had, *segments)
    own = {one.key for one in read_errata(request.errata, known) if one.field}
    own |= {one.key for name in request.values for one in known.find(name)}
    said = []
    for segment in segments:
        fields = {span.name: span.value for span in segment.fields}
        for name, value in holding(errata, segment.name, fields).items():
            key = known.key(segment.name, name)
            if key not in own:
                said.append(f"{key}={value}")
                listener.notice(Notice(f"{key} is {value}: everybody is told"))
    return replace(request, errata=(*said, *request.errata))


def named_apart(segments: Iterable[Segment], taken: Iterable[str] = ()) -> list[Segment]:
    """The segments, an image whose name is taken, or that another before it has, by another name: it may be shown
    twice."""
    seen = set(taken)
    named: list[Segment] = []
    for one in segments:
        name, number = one.name, 1
        while one.is_image and name in seen:
            number += 1
            name = f"{one.name}-{number}"
        seen.add(name)
        named.append(one if name == one.name else replace(one, name=name))
    return named


def held_to(workspace: Workspace, request: Request) -> str | None:
    """The grammar that the answer is held to; None without one. Raise GrammarError for one that cannot be used."""
    if request.json_schema is None and request.grammar is None:
        return None
    from notes_cli.text.grammar import check_grammar
    from notes_cli.text.schema import schema_grammar

    given = [request.json_schema is not None, request.grammar is not None, request.choices is not None]
    if sum(given) > 1:
        raise GrammarError("an answer can be held to one of: a JSON schema, a grammar, choices", "Leave the others out")
    grammar = request.grammar if request.json_schema is None else schema_grammar(request.json_schema)
    assert grammar is not None
    check_grammar(grammar)
    check_usable(workspace, grammar)
    return grammar


def check_usable(workspace: Workspace, grammar: str) -> None:
    """Raise GrammarError for a grammar that was read and cannot be used: a rule begins with itself."""
    Grammar(workspace.model, grammar).close()


def opened(
    workspace: Workspace, wanted: Sequence[SkillRef], listener: Listener, *, image: bool = False, dry: bool = False
) -> list[Segment]:
    """A segment for each, in order; texts are compiled now (`dry`: they are not), and those at hand checked. `image`:
    each must be an image. Raise SkillError for one that is none."""
    segments: list[Segment] = []
    how = {"image": image, "dry": dry}
    for one in wanted:
        if isinstance(one, Segment):
            workspace.check(one)
            segments.append(one)
        else:
            segments += open_segments(workspace, [os.fspath(one)], listener.notice, watch=listener.watch, **how)
        if image and not segments[-1].is_image:
            raise no_image(segments[-1].name)
    _ = workspace.context
    return segments


def settle(
    workspace: Workspace,
    request: Request,
    segments: Sequence[Segment],
    listener: Listener = SILENT,
    *,
    session: bool = False,
    goes_on: bool = False,
) -> Settings:
    """What holds for the request. `session`: it is one's turn, so the profile holds without skills, too; one that
    `goes_on` amends its skills by edits alone."""
    check_seam(request.seam or 0, segments)
    if request.wording:
        word(Erratum("", "", ""), request.wording)  # raises for one that there is not, also where nothing is worded
    check_values(request.values, request.errata, segments)
    # A cue without a chain would only mislead: such a model is asked directly.
    think = request.think and (request.max_think > 0 or bool(workspace.reasoning.open))
    # Without skills nothing goes by the profile, and a model need not be read for it.
    found = defaults(workspace, think=think) if segments or session else UNMEASURED
    if found.note:
        listener.notice(Notice(found.note.what, found.note.remedy, warning=True))
    wording = request.wording or found.wording or shipped_wordings().default
    seam = found.seam if request.seam is None else request.seam
    told = composing(found.composition, [one.name for one in segments], _decoded(request, segments), seam)
    if told and not request.recompute and not think:  # it was measured without a chain of thought
        listener.notice(told)
    method, why = (None, None) if goes_on else _method(workspace, request, segments, think)
    return Settings(think, wording, request.place or found.place, seam, method, why)


def _method(
    workspace: Workspace, request: Request, segments: Sequence[Segment], think: bool
) -> tuple[Method | None, str | None]:
    """The method that was named, or the one that fits, and why; None where nothing is amended."""
    if not request.values:
        return None, None
    if request.method:
        if request.exact and not request.method.record.exact:
            what = f"{request.method} leaves rows that were computed with the old value, and exact rows were asked for"
            raise NotesError(what, Help.OTHER_METHOD(method=f"{SUFFIX} or {ERRATUM}"))
        return request.method, None
    if request.recompute:
        return RECOMPUTE, f"{RECOMPUTE}: nothing is spliced"
    method, why = method_for(workspace, Prompt(request.question, segments, values=request.values, think=think))
    if request.exact and not method.record.exact:
        return ERRATUM, f"{ERRATUM}: exact rows were asked for, and {method} leaves some of the old value"
    return method, why


def tell_meant(request: Request, skills: Sequence[Fielded], listener: Listener) -> None:
    """Tell which fields `*.field` stands for, and which errata with an equals sign are of none."""
    fields = known_fields(*skills)
    for told in meant([*request.errata, *request.values], fields):
        listener.notice(Notice(told))
    for text in request.errata:
        if "=" in text and parse_erratum(text, fields).field is None:
            what = f"no skill has a field {text.partition('=')[0].strip()!r}: {text.strip()!r} is said in these words"
            listener.notice(Notice(what))


def prompt_of(request: Request, settings: Settings, segments: Sequence[Segment]) -> Prompt:
    """The prompt of a request's first turn. Raise SkillError for an erratum of a field that no skill has, and for a
    skill to be decoded that is not spliced."""
    return Prompt(
        request.question,
        segments,
        parse_errata(request.errata, segments),
        request.system,
        settings.wording,
        values=request.values,
        method=settings.method or Method(),
        place=settings.place,
        shown=frozenset(one.name for one in segments[len(segments) - len(request.images) :]),
        decoded=_decoded(request, segments),
        think=settings.think,
    )


def _decoded(request: Request, segments: Sequence[Segment]) -> frozenset[str]:
    """The names of the skills that are to be decoded. Raise SkillError for one that is not to be spliced."""
    names = {one.name: one.name for one in segments}
    words = zip(request.splice, segments, strict=False)
    names |= {os.fspath(word): segment.name for word, segment in words if not isinstance(word, Segment)}
    for one in request.decode:
        if one not in names:
            raise SkillError(
                f"{one} is to be decoded, and is none of the skills to splice",
                f"They are: {listed(sorted(set(names.values())))}",
            )
    return frozenset(names[one] for one in request.decode)


def room_for(workspace: Workspace, request: Request, think: bool) -> int:
    """Tokens that will be written at most. `think`: the model is asked for a chain of thought."""
    thinks = think or workspace.reasoning.open  # some begin one unasked
    return request.room + (request.max_think + ROOM if thinks else 0)


def answer(workspace: Workspace, request: Request, plan: Plan, listener: Listener = SILENT) -> Answer:
    """Decode the prompt and answer it. The notebook ends with the answer, unless that is a choice."""
    _read(plan, listener)
    found = run(answering(workspace, request, plan, listener))
    listener.answered(found)
    return found


def stream(workspace: Workspace, request: Request, plan: Plan, listener: Listener = SILENT) -> Stream:
    """`answer`, step by step: the text as it comes, a choice whole."""
    _read(plan, listener)
    heard: list[str] = []

    def hear(text: str) -> None:
        heard.append(text)
        if listener.answer:
            listener.answer(text)

    with closing(steps(answering(workspace, request, plan, replace(listener, answer=hear)))) as going:
        found: Answer | None = None
        while found is None:
            try:
                next(going)
            except StopIteration as done:
                found = done.value
            yield from heard
            heard.clear()
    if found.decision:
        yield found.text
    listener.answered(found)
    return found


def _read(plan: Plan, listener: Listener) -> None:
    """Decode the prompt, telling what of it could not be spliced, and how far it has come."""
    tell_unspliced(plan.notebook, listener)
    with listener.watch("reading the prompt", plan.counts.decoded) as update:
        plan.notebook.flush(update)


def tell_unspliced(notebook: Notebook, listener: Listener) -> None:
    """Tell what of a prompt could not be spliced."""
    for notice in unspliced(notebook):
        listener.notice(notice)


def answering(workspace: Workspace, request: Request, plan: Plan, listener: Listener = SILENT) -> Task[Answer]:
    """`answer` as a task of a loop: think if that is asked for, then decide or write."""
    notebook = plan.notebook
    yield [notebook]
    read = time.perf_counter()
    first: list[float] = []

    def hear(text: str) -> None:
        first.append(time.perf_counter())
        if listener.answer:
            listener.answer(text)

    thought, decision, stopped, text, tokens = None, None, None, "", 0
    if plan.settings.think:
        thought = yield from thinking(workspace, notebook, request.sampling, request.max_think, listener.thought)
        listener.thought_ended(thought, True)
    if request.choices is not None:
        if thought:
            decision = yield from deciding_after(workspace, notebook, request.choices, thought)
        else:
            decision = yield from deciding(notebook, request.choices)
        text = decision.choice
    else:
        reply = yield from replying(
            *(workspace, notebook, request.sampling, request.limit),
            max_think=request.max_think,
            say=hear,
            thought=thought,
            chosen=listener.chosen,
            grammar=plan.grammar,
        )
        if thought is None and reply.thought:  # one that nobody had asked for
            listener.thought_ended(reply.thought, False)
        thought, text, tokens, stopped = reply.thought, reply.text, reply.tokens, reply.stopped
    return Answer(
        text,
        tokens,
        plan.settings,
        plan.counts,
        tuple(notebook.pieces),
        thought,
        decision,
        stopped,
        opened=plan.opened,
        splice=notebook.seconds["splice"],
        prompt=read - plan.opened,
        first_token=(first[0] if first else time.perf_counter()) - plan.opened,
    )
