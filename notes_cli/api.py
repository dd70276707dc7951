"""The Python API: open a model, compile skills, ask, keep sessions, measure. The commands are written with it.

    import notes_cli as notes

    with notes.open() as model:
        returns = model.compile("skills/returns")
        print(model.ask("May I return this?", splice=[returns], errata=["date=2026-07-01"]))

What goes wrong is a NotesError, with `what` happened and a `remedy`. Nothing is printed: notices, progress and texts go
to a Listener. Threads may share a model and what it hands out: what one of them asks waits for what another has asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from notes_cli.config import Paths, shipped_model
from notes_cli.editing.methods import Method
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError, Notice
from notes_cli.runtime.alone import alone, alone_each
from notes_cli.runtime.asking import PARALLEL, SILENT, Answer, Listener, Plan, Request, Stream, ask, ask_stream, explain
from notes_cli.runtime.naming import model_file, projector_of
from notes_cli.runtime.opening import SkillRef, open_segments
from notes_cli.runtime.settings import AUTO, method_named
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from notes_cli.library.store import Store
    from notes_cli.measure.battery import Case
    from notes_cli.measure.calibrate import Calibration
    from notes_cli.measure.edits import Edits
    from notes_cli.measure.examination import Examination
    from notes_cli.measure.pairs import Pair
    from notes_cli.measure.probe import Probe
    from notes_cli.measure.probing import Probing
    from notes_cli.measure.session import SessionReport
    from notes_cli.measure.speed import Benching, Speed
    from notes_cli.measure.verify import Report
    from notes_cli.runtime.importing import Imported
    from notes_cli.runtime.keeping import Compiled
    from notes_cli.sessions.edits import Compacted, Edited
    from notes_cli.sessions.folder import Sessions
    from notes_cli.sessions.forgetting import Forgotten
    from notes_cli.sessions.lines import Line
    from notes_cli.sessions.session import Session as Held
    from notes_cli.sessions.state import Entry
    from notes_cli.text.blocks import Blocks
    from notes_cli.text.skill import Skill


class Asking(TypedDict, total=False):
    """How a question is to be answered; what is left out goes by what was measured of the model, or by the defaults of
    Request (runtime/asking.py)."""

    results: Sequence[tuple[str, str]]  # in a session, for a question: each tool that was called, what it returned
    splice: Sequence[SkillRef]  # names of compiled skills, segment files or texts, or segments
    images: Sequence[SkillRef]  # shown with the question: files of images, names or segments
    errata: Sequence[str] | Mapping[str, str]  # field=value, or free words; or fields and their values
    fields: Mapping[str, str]  # new values of fields, brought in by `method`
    system: str | None  # text before the skills
    think: bool  # reason first
    max_think: int  # tokens to reason with at most
    choices: Sequence[str] | None  # decide among these answers, at least two
    json_schema: Any  # the answer is JSON that is valid by this schema (JSON, read already)
    grammar: str | None  # what the answer is held to instead, in GBNF
    max_tokens: int  # to answer with at most
    sampling: SamplerOptions  # greedy by default
    seam: int | None  # tokens to recompute where a skill follows another context than at compile time
    place: str | None  # skills in the system message ("early"), or right before the question ("late")
    wording: str | None  # of errata, as prompts/errata.yaml names it
    recompute: bool  # decode the very same tokens instead of splicing, to compare
    decode: Sequence[str]  # of `splice`: decode these, so that they see what precedes them
    strict: bool  # refuse a skill that cannot be spliced, instead of decoding it
    exact: bool  # reuse rows only where they are those of a prefill of the whole prompt, decode all others


class Examining(TypedDict, total=False):
    """How skills are to be verified; what is left out goes by the defaults of Examination (measure/examination.py)."""

    questions: Sequence[str]  # without any, the value of each field
    errata: Sequence[str] | Mapping[str, str]  # each question is asked without them and with them
    choices: Sequence[str] | None  # without any, greedy answers are compared
    system: str | None  # by default a few sentences, so that skills move, where they can
    seam: int | None
    wording: str | None


def open(
    model: str | os.PathLike[str] | None = None,
    options: ContextOptions | None = None,
    *,
    paths: Paths | None = None,
    library: Store | None = None,
    fixed_size: bool = False,
    beyond_trained: bool = False,
    gpu_layers: int = -1,
    rpc: Sequence[str] = (),
    projector: str | os.PathLike[str] | None = None,
    image_tokens: tuple[int | None, int | None] = (None, None),
    carry: bool | None = None,
) -> Model:
    """Open a GGUF model: a file, or a name that a store of models on this machine has; None for the small one that
    ships. Close what is returned, or use it as a context manager.

    `options`: how the context is made; without any, it has 4096 tokens and grows as needed. `paths`: the folders of one
    user, by default those that NOTES_HOME or the system names. `library`: where compiled skills are, by default the
    folder in `paths`. `fixed_size`: the context keeps the size that `options` gives it, and what does not fit is an
    error. `beyond_trained`: more tokens than the model was trained for are allowed. `gpu_layers`: -1 for all.
    `rpc`: RPC servers of llama.cpp, "host:port", that layers go to first. `projector`: the GGUF file that makes rows of
    images (mmproj), and `image_tokens` how many of one at least and at most. `carry`: whether the state of recurrent
    layers is carried through skills that are not at the start of a prompt; None: where that was measured to hold.

    Raise ModelError for a model that cannot be loaded, EngineError for a context that cannot be made.
    """
    if model is None:
        file = shipped_model()
    else:
        file = model_file(model) if isinstance(model, str) else Path(model).expanduser()
    return Model(
        Workspace(
            file,
            options,
            paths=paths,
            library=library,
            fixed_size=fixed_size,
            beyond_trained=beyond_trained,
            gpu_layers=gpu_layers,
            rpc=rpc,
            projector=projector_of(file) if projector is None else Path(projector).expanduser(),
            image_tokens=image_tokens,
            carry=carry,
        )
    )


class Model:
    """A model that is open, with one context in which everything is computed.

    Several things may be alive at once: sessions, streams, and what is asked meanwhile.
    """

    def __init__(self, workspace: Workspace) -> None:
        """It takes the workspace over, and closes it. `open` makes both."""
        self.workspace = workspace
        self._sessions: list[Session] = []  # that are open

    @alone
    def close(self) -> None:
        """Close the sessions that are open, and the model."""
        try:
            _close(self._sessions)
        finally:
            self.workspace.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The name and the quantization, for people."""
        return f"{self.workspace.model.name} {self.workspace.model.quantization}"

    # Skills.

    @alone
    def compile(
        self,
        source: str | os.PathLike[str] | Skill,
        *,
        name: str | None = None,
        force: bool = False,
        influence: bool = False,
        blocks: Blocks = 1,
        kv: str = "f16",
        listener: Listener = SILENT,
    ) -> Segment:
        """The segment of a skill, to be spliced: that of the library if it is up to date, else compiled into it.

        `source`: a text file, a folder with a SKILL.md, or a Skill. `name`: in the library, by default the skill's own.
        `force`: compile it although nothing has changed, or in place of a text that came from elsewhere. `influence`:
        measure which tokens each field's value changes, for selective edits. `blocks`: so many parts, or "headings" for
        one a heading, each compiled on its own. `kv`: what its file keeps rows as, "f16", "f16/q8_0" (V alone) or
        "q8_0".

        Raise SkillError for a text that cannot be read, TakenError for a name that another text has, UnsupportedError
        where this model's rows cannot be kept, EngineError for more tokens than it was trained for.
        """
        compiled = self.bring_up_to_date(
            source, name=name, force=force, influence=influence, blocks=blocks, kv=kv, listener=listener
        )
        return self.workspace.open(compiled.path)

    def compiling(self) -> AbstractContextManager[None]:
        """Within the block several compiles share what precedes their skills, which is decoded once. Each has the rows
        that it has by itself."""
        return self.workspace.compiling()

    @alone
    def bring_up_to_date(
        self,
        source: str | os.PathLike[str] | Skill,
        *,
        name: str | None = None,
        output: Path | None = None,
        force: bool = False,
        influence: bool = False,
        blocks: Blocks | None = 1,
        kv: str | None = "f16",
        listener: Listener = SILENT,
    ) -> Compiled:
        """`compile`, without opening the segment: where it is, how many tokens it has, and why it was compiled.

        `output`: write it to this file, not into the library. `blocks`, `kv`: None for what it has there.
        """
        from notes_cli.runtime.compiling import block_warnings
        from notes_cli.runtime.keeping import compile_to_library
        from notes_cli.text.skill import Skill, load_skill

        workspace = self.workspace
        if not isinstance(source, Skill):
            source = load_skill(os.fspath(source), name=name)
            for warning in source.warnings:
                listener.notice(Notice(warning, warning=True))
        warnings = tuple(block_warnings(workspace, source, blocks)) if blocks not in (None, 1) else ()
        for warning in warnings:
            listener.notice(Notice(warning, warning=True))

        def measured(done: int, of: int) -> None:
            listener.notice(Notice(f"measured the influence of {done} of {of} fields"))

        with listener.watch(f"compiling {source.name}") as update:
            compiled = compile_to_library(
                *(workspace, source),
                force=force,
                progress=update,
                output=output,
                measure=measured if influence else None,
                blocks=blocks,
                kv=kv,
                say=listener.notice,
            )
        return replace(compiled, warnings=warnings)

    @alone
    def import_segment(
        self,
        source: str | os.PathLike[str],
        *,
        name: str | None = None,
        trust: bool = False,
        force: bool = False,
        listener: Listener = SILENT,
    ) -> Imported:
        """Take a segment file that somebody else compiled into the library: a sample of its rows is computed again and
        compared, unless you `trust` it; where it is another model's, its text is compiled. Raise SegmentError for one
        that is damaged, or not what this model computes, TakenError for a name that another text has, unless `force`d.
        """
        from notes_cli.runtime.importing import import_segment

        with listener.watch(f"compiling {Path(source).name}", later=True) as update:
            return import_segment(
                *(self.workspace, Path(source)),
                name=name,
                trust=trust,
                force=force,
                progress=update,
                say=listener.notice,
            )

    @alone
    def segment(self, name: str) -> Segment:
        """A compiled skill by its name, or a segment file. Raise SegmentError if it is not there, or does not fit this
        model."""
        (segment,) = open_segments(self.workspace, [name], SILENT.notice)
        return segment

    # Questions.

    @alone
    def ask(
        self,
        question: str | Request,
        *,
        method: Method | str | None = None,
        listener: Listener = SILENT,
        **how: Unpack[Asking],
    ) -> Answer:
        """Answer one question. `str` of the answer is its text; `choice` the one of the `choices` that the model
        prefers. Raise NotesError where that cannot be."""
        return ask(self.workspace, _request(question, method, how), listener)

    @alone_each
    def stream(
        self,
        question: str | Request,
        *,
        method: Method | str | None = None,
        listener: Listener = SILENT,
        **how: Unpack[Asking],
    ) -> Stream:
        """Yield the answer's text as it comes, or the choice at once, and return what `ask` returns. Nothing happens
        before the first text is asked for; closing the generator ends the answer."""
        return ask_stream(self.workspace, _request(question, method, how), listener)

    @alone_each
    def ask_many(
        self,
        questions: Iterable[str | Request | NotesError],
        *,
        parallel: int = PARALLEL,
        method: Method | str | None = None,
        listener: Listener = SILENT,
        **how: Unpack[Asking],
    ) -> Iterator[Answer | NotesError]:
        """Answer many questions, at most `parallel` at a time: what their prompts have in common is computed once, and
        they are decoded together. Yield the answer to each, or its error, in their order; they are read as they are
        needed, and an error among them is passed on in its place. The listener hears of no single answer."""
        from notes_cli.runtime.batch import ask_many

        if isinstance(questions, str):
            raise NotesError(f"questions is the text {questions!r}, and not a list", f"Write [{questions!r}]")
        like = _request("", method, how)  # whose lists serve all questions, also those that can be gone through once
        kept: Any = {name: getattr(like, name) for name in how}
        requests = (one if isinstance(one, NotesError) else _request(one, method, kept) for one in questions)
        for _, outcome in ask_many(self.workspace, requests, parallel, listener):
            yield outcome

    @alone
    def explain(
        self,
        question: str | Request,
        *,
        method: Method | str | None = None,
        listener: Listener = SILENT,
        **how: Unpack[Asking],
    ) -> Plan:
        """What asking would do: the pieces of the prompt, and how each would be made. Nothing is computed."""
        return explain(self.workspace, _request(question, method, how), listener)

    # Sessions.

    @property
    def sessions(self) -> Sessions:
        """The sessions on disk, by name."""
        from notes_cli.sessions.folder import Sessions

        return Sessions(self.workspace.paths.sessions)

    @alone
    def session(self, name: str, *, new: bool = True, reading: bool = False) -> Session:
        """Begin a session of this name or go on with it. It is held until it, or the model, is closed.

        `new`: it need not have been begun. `reading`: it will not be changed, so that a read-only folder will do. Raise
        SessionError if there is none, if it is open already, or if it is another model's, UnsupportedError where
        this model's rows cannot be kept.
        """
        from notes_cli.sessions.session import Session as Held

        with ExitStack() as held:
            stored = held.enter_context(self.sessions.locked(name, new=new, reading=reading))
            return Session(held.enter_context(Held(self.workspace, stored)), held.pop_all(), self._sessions)

    # Measuring.

    @alone
    def verify(
        self,
        splice: Sequence[SkillRef] | Examination,
        *,
        listener: Listener = SILENT,
        **how: Unpack[Examining],
    ) -> Report:
        """Compare what is spliced, with errata and without, with a full recompute of the same tokens: `passed`, and
        `cases`, a question each. Raise NotesError where that cannot be."""
        from notes_cli.measure.examination import Examination, examine_splice

        given: Any = how  # whose errata may be a mapping
        wanted = splice if isinstance(splice, Examination) else Examination(splice=splice, **given)
        return examine_splice(self.workspace, wanted, listener)

    @alone
    def verify_edits(
        self,
        splice: Sequence[SkillRef] | Examination,
        fields: Mapping[str, str] | None = None,
        methods: Sequence[str] = (AUTO,),
        *,
        listener: Listener = SILENT,
        **how: Unpack[Examining],
    ) -> Edits:
        """Compare edit methods that bring in new values of fields with a full recompute of the corrected text.
        `methods` may hold "auto" and "all". Raise NotesError where that cannot be."""
        from notes_cli.measure.examination import Examination, examine_edits

        if not isinstance(splice, Examination):
            given: Any = how  # whose errata may be a mapping
            splice = Examination(splice=splice, fields=fields or {}, methods=methods, **given)
        return examine_edits(self.workspace, splice, listener)

    @alone
    def calibrate(
        self,
        cases: Sequence[Case] | None = None,
        *,
        pairs: Sequence[Pair] | None = None,
        listener: Listener = SILENT,
    ) -> Calibration:
        """Measure which edit method, wording, seam and place to trust on this model, and over pairs of skills whether
        those that were compiled apart compose; keep that as its profile if there are cases enough. Without any, over
        those that ship. Raise UnsupportedError where its rows cannot be kept."""
        from notes_cli.measure.battery import shipped_battery
        from notes_cli.measure.calibrate import calibrate_and_keep
        from notes_cli.measure.pairs import pairs as drawn

        if pairs is None:
            pairs = drawn() if cases is None else ()
        return calibrate_and_keep(self.workspace, shipped_battery() if cases is None else cases, listener, pairs)

    @alone
    def probe(self, wanted: Probing, *, listener: Listener = SILENT) -> Probe:
        """Measure on which tokens of a skill a decision rests. Raise NotesError where that cannot be."""
        from notes_cli.measure.probing import probe_skill

        return probe_skill(self.workspace, wanted, listener)

    @alone
    def bench(self, wanted: Benching | None = None, *, listener: Listener = SILENT) -> Speed:
        """Measure how fast a splice is here, beside a memcpy of its bytes, the question after it and a prefill of its
        tokens. Raise UnsupportedError for a model whose rows cannot be moved, EngineError where none of the lengths
        can be measured."""
        from notes_cli.measure.speed import Benching, bench

        return bench(self.workspace, wanted or Benching(), listener)


class Session:
    """A conversation that is kept on disk, held by this process. Close it, or use it as a context manager."""

    def __init__(self, held: Held, stack: ExitStack, beside: list[Session]) -> None:
        """`stack` gives it up when it is closed; `beside`: what is open with it. `Model.session` makes all of it."""
        self._held, self._stack, self._beside = held, stack, beside
        self._forks: list[Session] = []
        beside.append(self)

    @alone
    def close(self) -> None:
        """Give it up, and the forks that were made of it. All complete turns are on disk."""
        try:
            _close(self._forks)
        finally:
            if self in self._beside:
                self._beside.remove(self)
            self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workspace(self) -> Workspace:
        """That of its model."""
        return self._held.workspace

    @property
    def _session(self) -> Held:
        """Raise SessionError once it is closed: another process may have gone on with it."""
        self._held.stored.check_held()
        return self._held

    @property
    def name(self) -> str:
        return self._held.stored.name

    @property
    def empty(self) -> bool:
        """Whether the next turn is its first."""
        return self._session.empty

    @property
    def turns(self) -> int:
        """How many questions were asked and answered."""
        return self._session.state.turns

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self._session.state.tokens)

    @property
    def fields(self) -> dict[str, str]:
        """The value of each field of its skills, as it is now."""
        return dict(self._session.state.fields)

    @property
    def entries(self) -> Sequence[Entry]:
        """What it is made of, in order: pieces of prompts, answers and edits."""
        return tuple(self._session.state.entries)

    @alone
    def ask(
        self,
        question: str | Request,
        *,
        method: Method | str | None = None,
        listener: Listener = SILENT,
        **how: Unpack[Asking],
    ) -> Answer:
        """The next turn: ask, answer, and keep both. Raise SessionError where a session that has begun is asked for
        what belongs to its first turn: `fields`, `recompute`, `place` and `system`."""
        return self._session.ask(_request(question, method, how), listener)

    @alone_each
    def stream(
        self,
        question: str | Request,
        *,
        method: Method | str | None = None,
        listener: Listener = SILENT,
        **how: Unpack[Asking],
    ) -> Stream:
        """Yield the answer's text as it comes, and return what `ask` returns. The turn is kept once the answer is
        complete, and not if the generator is closed before."""
        return self._session.stream(_request(question, method, how), listener)

    @alone
    def edit(
        self, field: str, value: str, method: Method | str | None = None, *, listener: Listener = SILENT
    ) -> list[Edited]:
        """Give a field another value, `*.field` that of each skill that has it. `method`: None for the one that was
        measured to be best. Raise NotesError where that cannot be; then nothing is changed."""
        return list(self.edits({field: value}, method, listener=listener))

    @alone_each
    def edits(
        self, fields: Mapping[str, str], method: Method | str | None = None, *, listener: Listener = SILENT
    ) -> Iterator[Edited]:
        """Give several fields other values; yield each edit when it is made. Raise NotesError, before the first, where
        one of them cannot be."""
        return self._session.edits(fields, method_named(method), listener)

    @alone
    def undo(self) -> Line:
        """Go back to before the last turn, edit, compaction or cut, which is returned. Raise SessionError if there is
        none."""
        return self._session.undo()

    @alone
    def compact(self) -> Compacted:
        """Take out the errata that later ones of the same field supersede."""
        return self._session.compact()

    @alone
    def forget(self, *parts: str | int, method: str = "cut", dry: bool = False) -> Forgotten:
        """Take out parts: a turn (`3`), turns (`3-5`), a chain of thought (`thought:3`), results of tools (`tool:3`).

        By `cut` what follows is moved, its rows may still carry notes of what is gone, and an undo brings that back. By
        `suffix` it is decoded again, and nothing that was said is kept: there is no undo. Without parts, `suffix` is
        for what was cut before. `dry`: only tell. Raise NotesError where it cannot be; then nothing is changed.
        """
        return self._session.forget([str(part) for part in parts], method, dry=dry)

    @alone
    def fork(self, name: str) -> Session:
        """A second session that goes on from here. It is closed with this one, or before. Raise SessionError if there
        is one of that name, or nothing to fork yet."""
        stack = ExitStack()
        return Session(stack.enter_context(self._session.fork(name)), stack, self._forks)

    @alone
    def verify(
        self,
        questions: Sequence[str] | Examination = (),
        choices: Sequence[str] | None = None,
        *,
        wording: str | None = None,
        listener: Listener = SILENT,
    ) -> SessionReport:
        """Compare what is put back from disk with a prefill of the session's tokens, at its end and after each
        question; without questions, after those for the value of each field. Raise NotesError where there is no
        turn."""
        from notes_cli.measure.examination import Examination, examine_session

        if not isinstance(questions, Examination):
            questions = Examination(questions=questions, choices=choices, wording=wording)
        return examine_session(self._session, questions, listener)


def _close(sessions: list[Session]) -> None:
    """Close all of them, the latest first, whatever goes wrong with one."""
    with ExitStack() as closing:
        for session in sessions:
            closing.callback(session.close)


def _request(question: str | Request, method: Method | str | None, how: Asking) -> Request:
    """The request that is meant. Raise NotesError for an edit method that there is not."""
    request = question if isinstance(question, Request) else Request(question)
    given: Any = how  # whose errata may be a mapping
    return replace(request, method=method_named(method) or request.method, **given)
