"""The Python API: open a model, compile skills, ask, keep sessions, measure. The commands are written with it.

    import notes_cli as notes

    with notes.open() as model:
        handbook = model.compile("skills/store-handbook")
        print(model.ask("Which carrier do we use?", splice=[handbook], errata=["Carrier=Kestrel Freight"]))

Errors are NotesErrors with `what` happened and a `remedy`. Nothing is printed: notices, progress and texts go
to Callbacks. Threads may share a model and its objects: their computations run one after another.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing
from dataclasses import MISSING, fields, replace
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from notes_cli.config import Paths, from_variables
from notes_cli.editing.methods import Method
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError, Notice
from notes_cli.runtime.answering import Plan, ask, ask_stream, explain
from notes_cli.runtime.keywords import check_keywords, checked
from notes_cli.runtime.naming import chosen_model, model_file, projector_of
from notes_cli.runtime.open_skills import SkillRef, open_segments
from notes_cli.runtime.request import NO_CALLBACKS, PARALLEL, Answer, Asking, Callbacks, Request, Stream
from notes_cli.runtime.settings import AUTO, parse_method
from notes_cli.runtime.synchronized import Computing, synchronized, synchronized_steps
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from notes_cli.library.store import Store
    from notes_cli.measure.battery import Case, Pair
    from notes_cli.measure.calibrate import Calibration
    from notes_cli.measure.examination import Examination, SessionReport
    from notes_cli.measure.speed import Benching, Speed
    from notes_cli.measure.verify import Edits, Report
    from notes_cli.runtime.importing import Imported
    from notes_cli.runtime.recompile import Compiled
    from notes_cli.sessions.edits import Compacted, Edited
    from notes_cli.sessions.folder import Sessions
    from notes_cli.sessions.forget import Forgotten
    from notes_cli.sessions.lines import Line
    from notes_cli.sessions.session import Session as Held
    from notes_cli.sessions.state import Entry
    from notes_cli.text.blocks import Blocks
    from notes_cli.text.skill import Skill


F = TypeVar("F", bound=Callable[..., object])


def asking(method: F) -> F:
    """Add the options of Asking to the method's signature, and their meanings to a docstring that ends with
    "Options:"."""
    own = signature(method)
    first = [one for one in own.parameters.values() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    last = [one for one in own.parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
    method.__signature__ = own.replace(parameters=[*first, *_OPTIONS, *last])  # type: ignore[attr-defined]
    if (method.__doc__ or "").rstrip().endswith("Options:"):
        method.__doc__ = f"{cleandoc(method.__doc__ or '')}\n\n{_meanings()}"
    return method


def _options() -> Iterator[Parameter]:
    """A parameter for each option, with its default."""
    found: dict[str, Any] = {}
    for one in (*fields(SamplerOptions), *fields(Request)):
        found[one.name] = one.default if one.default_factory is MISSING else one.default_factory()
    found["sampling"] = None  # what the options say that are named for it
    for name, hint in Asking.__annotations__.items():
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=found[name], annotation=hint.__forward_arg__)


_OPTIONS = tuple(_options())
_SAMPLING = [one.name for one in fields(SamplerOptions) if one.name in Asking.__annotations__]


def _meanings() -> str:
    """A line for each option, in the order of the signature: name, default, meaning."""
    texts: dict[str, str] = {}
    for kind in (SamplerOptions, Request):
        name = ""
        for line in cleandoc(kind.__doc__ or "").splitlines():
            if line.startswith(" "):
                texts[name] += f"\n{line}"
            else:
                name, _, text = line.partition(": ")
                texts[name] = text
    return "\n".join(f"{one.name}={one.default!r}: {texts.get(one.name, '')}" for one in _OPTIONS)


@checked({one.name: f"options=notes.ContextOptions({one.name}=...)" for one in fields(ContextOptions)})
def open(
    model: str | os.PathLike[str] | None = None,
    options: ContextOptions | None = None,
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    paths: Paths | None = None,
    library: Store | None = None,
    fixed_size: bool = False,
    beyond_trained: bool = False,
    rpc: Sequence[str] = (),
    projector: str | os.PathLike[str] | None = None,
    image_tokens: tuple[int | None, int | None] = (None, None),
    carry: bool | None = None,
) -> Model:
    """Open a GGUF model: a file, or a name that `notes models` lists; None for the one that NOTES_MODEL or config.yaml
    names, else smollm2 if it is there, else the tiny one that ships. Close what is returned, or use it as a context
    manager.

    What is not given is as NOTES_CTX_SIZE, NOTES_THREADS and the other variables of the command line have it.

    `n_ctx`: tokens that the context has to begin with, 4096 by default; it grows as needed. `n_threads`: by default as
    many as fit the machine and the model. `n_gpu_layers`: -1, the default, for all. `options`: all of what a context is
    made with; of the variables only NOTES_THREADS holds beside it. `paths`: the folders of one user, by default those
    that NOTES_HOME or the system names. `library`: where compiled skills are, by default the folder in `paths`.
    `fixed_size`: the context keeps its size, and what does not fit is an error. `beyond_trained`: more tokens than the
    model was trained for are allowed. `rpc`: RPC servers of llama.cpp, "host:port", that layers go to first.
    `projector`: the GGUF file that makes rows of images (mmproj), and `image_tokens` how many of one at least and at
    most. `carry`: whether the state of recurrent layers is carried through skills that are not at the start of a
    prompt; None: where that was measured to hold.

    Raise ModelError for a model that cannot be loaded, EngineError for a context that cannot be made.
    """
    numbers: dict[str, Any] = {"n_ctx": n_ctx, "n_threads": n_threads}
    given = {name: number for name, number in numbers.items() if number is not None}
    if given and options is not None:
        raise NotesError(f"options and {' and '.join(given)} are both given", "Write all into the options")
    variables = from_variables()
    others = {name: variables.pop(name, None) for name in ("n_gpu_layers", "rpc", "projector")}
    if n_gpu_layers is None:
        n_gpu_layers = -1 if others["n_gpu_layers"] is None else others["n_gpu_layers"]
    projector = others["projector"] if projector is None else projector
    if options is None:
        options = ContextOptions(**variables | given)
    elif options.n_threads is None:
        options = replace(options, n_threads=variables.get("n_threads"))
    if model is None:
        file = chosen_model(paths)
    else:
        file = model_file(model, paths) if isinstance(model, str) else Path(model).expanduser()
    return Model(
        Workspace(
            file,
            options,
            paths=paths,
            library=library,
            fixed_size=fixed_size,
            beyond_trained=beyond_trained,
            gpu_layers=n_gpu_layers,
            rpc=rpc or others["rpc"] or (),
            projector=projector_of(file) if projector is None else Path(projector).expanduser(),
            image_tokens=image_tokens,
            carry=carry,
        )
    )


class _Streaming(Computing, Protocol):
    """A model or a session."""

    def stream(self, question: Request, *, callbacks: Callbacks) -> Stream: ...


class _Awaited:
    """The asyncio methods of Model and Session."""

    @asking
    async def aask(
        self: _Streaming,
        question: str | Request,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Answer:
        """`ask` in the model's worker thread; concurrent calls queue. Cancelling the task ends the answer, and a
        session does not keep the turn. The listener is called in that thread. The options are those of `Model.ask`."""
        from notes_cli.runtime import async_answering

        check_keywords(_Awaited.aask, how)
        request = _request(question, how)
        return await async_answering.answer(self.workspace, lambda: self.stream(request, callbacks=callbacks))

    @asking
    async def astream(
        self: _Streaming,
        question: str | Request,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> AsyncGenerator[str, None]:
        """`stream` for `async for`, in the same thread. The listener's `answered` gets the answer."""
        from notes_cli.runtime import async_answering

        check_keywords(_Awaited.astream, how)
        request = _request(question, how)
        async with aclosing(
            async_answering.texts(self.workspace, lambda: self.stream(request, callbacks=callbacks))
        ) as texts:
            async for text in texts:
                yield text


class Model(_Awaited):
    """A model that is open, with one context in which everything is computed.

    Several things may be alive at once: sessions, streams, and what is asked meanwhile.
    """

    def __init__(self, workspace: Workspace) -> None:
        """It takes the workspace over, and closes it. `open` makes both."""
        self.workspace = workspace
        self._sessions: list[Session] = []  # that are open

    @synchronized
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

    def __repr__(self) -> str:
        return f"Model({self.name!r}, context of {self.workspace.options.n_ctx} tokens)"

    @property
    def name(self) -> str:
        """The name and the quantization, for people."""
        return f"{self.workspace.model.name} {self.workspace.model.quantization}"

    # Skills.

    @synchronized
    def compile(
        self,
        source: str | os.PathLike[str] | Skill | None = None,
        *,
        text: str | None = None,
        name: str | None = None,
        force: bool = False,
        influence: bool = False,
        blocks: Blocks = 1,
        kv: str = "f16",
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Segment:
        """The segment of a skill, to be spliced: that of the library if it is up to date, else compiled into it.

        `source`: a text file, a folder with a SKILL.md, or a Skill; in its place `text`: the text itself, with a name,
        under which it replaces a text that had no file either. `name`: in the library, by default the skill's own.
        `force`: compile it although nothing has changed, or in place of a text that came from elsewhere. `influence`:
        measure which tokens each field's value changes, for selective edits. `blocks`: so many parts, or "headings" for
        one a heading, each compiled on its own. `kv`: what its file keeps rows as, "f16", "f16/q8_0" (V alone) or
        "q8_0".

        Raise SkillError for a text that cannot be read, TakenError for a name that another text has, UnsupportedError
        where this model's rows cannot be kept, EngineError for more tokens than it was trained for.
        """
        compiled = self.bring_up_to_date(
            source, text=text, name=name, force=force, influence=influence, blocks=blocks, kv=kv, callbacks=callbacks
        )
        return self.workspace.open(compiled.path)

    def compiling(self) -> AbstractContextManager[None]:
        """Within the block several compiles share what precedes their skills, which is decoded once. Each has the rows
        that it has by itself."""
        return self.workspace.compiling()

    @synchronized
    def bring_up_to_date(
        self,
        source: str | os.PathLike[str] | Skill | None = None,
        *,
        text: str | None = None,
        name: str | None = None,
        output: Path | None = None,
        force: bool = False,
        influence: bool = False,
        blocks: Blocks | None = 1,
        kv: str | None = "f16",
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Compiled:
        """`compile`, without opening the segment: where it is, how many tokens it has, and why it was compiled.

        `output`: write it to this file, not into the library. `blocks`, `kv`: None for what it has there.
        """
        from notes_cli.runtime.compile import block_warnings
        from notes_cli.runtime.recompile import compile_to_library, taken
        from notes_cli.text.skill import Skill

        workspace = self.workspace
        if not isinstance(source, Skill):
            source = _skill(source, text, name)
            for warning in source.warnings:
                callbacks.on_notice(Notice(warning, warning=True))
        elif text is not None:
            raise NotesError("a source and a text are both given to compile", "Give one of them")
        if text is not None and not force and taken(workspace, source):
            force = all(one.info.source == "-" for one in workspace.library.entries(source.name) if one.info)
        warnings = tuple(block_warnings(workspace, source, blocks)) if blocks not in (None, 1) else ()
        for warning in warnings:
            callbacks.on_notice(Notice(warning, warning=True))

        def measured(done: int, of: int) -> None:
            callbacks.on_notice(Notice(f"measured the influence of {done} of {of} fields"))

        with callbacks.progress(f"compiling {source.name}") as update:
            compiled = compile_to_library(
                *(workspace, source),
                force=force,
                progress=update,
                output=output,
                measure=measured if influence else None,
                blocks=blocks,
                kv=kv,
                say=callbacks.on_notice,
            )
        return replace(compiled, warnings=warnings)

    @synchronized
    def import_segment(
        self,
        source: str | os.PathLike[str],
        *,
        name: str | None = None,
        trust: bool = False,
        force: bool = False,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Imported:
        """Take a segment file that somebody else compiled into the library: all of its rows are computed again and
        compared, which takes as long as a compile, unless you `trust` it; where it is another model's, its text is
        compiled. Raise SegmentError for one that is damaged, or not what this model computes, TakenError for a name
        that another text has, unless `force`d.
        """
        from notes_cli.runtime.importing import import_segment

        with callbacks.progress(f"computing {Path(source).name}", later=True) as update:
            return import_segment(
                *(self.workspace, Path(source)),
                name=name,
                trust=trust,
                force=force,
                progress=update,
                say=callbacks.on_notice,
            )

    @synchronized
    def segment(self, name: str) -> Segment:
        """A compiled skill by its name, or a segment file. Raise SegmentError if it is not there, or does not fit this
        model."""
        (segment,) = open_segments(self.workspace, [name], NO_CALLBACKS.on_notice)
        return segment

    # Questions.

    @synchronized
    @asking
    def ask(
        self,
        question: str | Request,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Answer:
        """Answer one question. `str` of the answer is its text; `choice` the one of the `choices` that the model
        prefers. Raise NotesError where that cannot be. `listener` gets notices, progress and texts.

        Options:
        """
        return ask(self.workspace, _request(question, how), callbacks)

    @synchronized_steps
    @asking
    def stream(
        self,
        question: str | Request,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Stream:
        """Yield the answer's text as it comes, or the choice at once, and return what `ask` returns. Nothing happens
        before the first text is asked for; closing the generator ends the answer. The options are those of `ask`."""
        return ask_stream(self.workspace, _request(question, how), callbacks)

    @synchronized_steps
    @asking
    def ask_many(
        self,
        questions: Iterable[str | Request | NotesError],
        *,
        parallel: int = PARALLEL,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Iterator[Answer | NotesError]:
        """Answer many questions, at most `parallel` at a time: what their prompts have in common is computed once, and
        they are decoded together. Yield the answer to each, or its error, in their order; they are read as they are
        needed, and an error among them is passed on in its place. The listener hears of no single answer."""
        from notes_cli.runtime.batch import ask_many

        if isinstance(questions, str):
            raise NotesError(f"questions is the text {questions!r}, and not a list", f"Write [{questions!r}]")
        like = _request("", how)  # whose lists serve all questions, also those that can be gone through once
        kept: Any = {name: getattr(like, name, value) for name, value in how.items()}
        if how.get("sampling") is None:
            kept.pop("sampling", None)
        requests = (one if isinstance(one, NotesError) else _request(one, kept) for one in questions)
        for _, outcome in ask_many(self.workspace, requests, parallel, callbacks):
            yield outcome

    @synchronized
    @asking
    def explain(
        self,
        question: str | Request,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Plan:
        """What asking would do: the pieces of the prompt, and how each would be made. Nothing is computed."""
        return explain(self.workspace, _request(question, how), callbacks)

    # Sessions.

    @property
    def sessions(self) -> Sessions:
        """The sessions on disk, by name."""
        from notes_cli.sessions.folder import Sessions

        return Sessions(self.workspace.paths.sessions)

    @synchronized
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

    @synchronized
    def verify(
        self,
        splice: Sequence[SkillRef] | Examination,
        *,
        questions: Sequence[str] = (),
        errata: Sequence[str] | Mapping[str, str] = (),
        choices: Sequence[str] | None = None,
        system: str | None = None,
        seam: int | None = None,
        wording: str | None = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Report:
        """Compare what is spliced, with errata and without, with a full recompute of the same tokens: `passed`, and
        `cases`, a question each. The options mean what those of Examination do. Raise NotesError where that cannot
        be."""
        from notes_cli.measure.examination import Examination, examine_splice

        if not isinstance(splice, Examination):
            said: Any = errata  # may be a mapping
            splice = Examination(splice, questions, said, choices=choices, system=system, seam=seam, wording=wording)
        return examine_splice(self.workspace, splice, callbacks)

    @synchronized
    def verify_edits(
        self,
        splice: Sequence[SkillRef] | Examination,
        fields: Mapping[str, str] | None = None,
        methods: Sequence[str] = (AUTO,),
        *,
        questions: Sequence[str] = (),
        errata: Sequence[str] | Mapping[str, str] = (),
        choices: Sequence[str] | None = None,
        system: str | None = None,
        seam: int | None = None,
        wording: str | None = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Edits:
        """Compare edit methods that bring in new values of fields with a full recompute of the corrected text.
        `methods` may hold "auto" and "all". Raise NotesError where that cannot be."""
        from notes_cli.measure.examination import Examination, examine_edits

        if not isinstance(splice, Examination):
            said: Any = errata  # may be a mapping
            places = choices, system, seam, wording
            splice = Examination(splice, questions, said, fields or {}, methods, *places)
        return examine_edits(self.workspace, splice, callbacks)

    @synchronized
    def calibrate(
        self,
        cases: Sequence[Case] | None = None,
        *,
        pairs: Sequence[Pair] | None = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Calibration:
        """Measure which edit method, wording, seam and place to trust on this model, and over pairs of skills whether
        those that were compiled apart compose; keep that as its profile if there are cases enough. Without any, over
        those that ship. Raise UnsupportedError where its rows cannot be kept."""
        from notes_cli.measure.battery import pairs as drawn
        from notes_cli.measure.battery import shipped_battery
        from notes_cli.measure.calibrate import calibrate_and_keep

        if pairs is None:
            pairs = drawn() if cases is None else ()
        return calibrate_and_keep(self.workspace, shipped_battery() if cases is None else cases, callbacks, pairs)

    @synchronized
    def bench(self, wanted: Benching | None = None, *, callbacks: Callbacks = NO_CALLBACKS) -> Speed:
        """Measure how fast a splice is here, beside a memcpy of its bytes, the question after it and a prefill of its
        tokens. Raise UnsupportedError for a model whose rows cannot be moved, EngineError where none of the lengths
        can be measured."""
        from notes_cli.measure.speed import Benching, bench

        return bench(self.workspace, wanted or Benching(), callbacks)


class Session(_Awaited):
    """A conversation that is kept on disk, held by this process. Close it, or use it as a context manager."""

    def __init__(self, held: Held, stack: ExitStack, beside: list[Session]) -> None:
        """`stack` gives it up when it is closed; `beside`: what is open with it. `Model.session` makes all of it."""
        self._held, self._stack, self._beside = held, stack, beside
        self._forks: list[Session] = []
        beside.append(self)

    @synchronized
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

    def __repr__(self) -> str:
        state = self._held.state
        turns = f"{state.turns} turn{'s' * (state.turns != 1)}"
        how = "closed" if self._held.stored.closed else f"{turns}, {len(state.tokens)} tokens"
        return f"Session({self.name!r}, {how})"

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

    @synchronized
    @asking
    def ask(
        self,
        question: str | Request,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Answer:
        """The next turn: ask, answer, and keep both. Raise SessionError where a session that has begun is asked for
        what belongs to its first turn: `fields`, `recompute`, `place` and `system`. The options are those of
        `Model.ask`."""
        return self._session.ask(_request(question, how), callbacks)

    @synchronized_steps
    @asking
    def stream(
        self,
        question: str | Request,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Stream:
        """Yield the answer's text as it comes, and return what `ask` returns. The turn is kept once the answer is
        complete, and not if the generator is closed before."""
        return self._session.stream(_request(question, how), callbacks)

    @synchronized
    def edit(
        self, field: str, value: str, method: Method | str | None = None, *, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Edited]:
        """Give a field another value, `*.field` that of each skill that has it. `method`: None for the one that was
        measured to be best. Raise NotesError where that cannot be; then nothing is changed."""
        return list(self.edits({field: value}, method, callbacks=callbacks))

    @synchronized_steps
    def edits(
        self, fields: Mapping[str, str], method: Method | str | None = None, *, callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[Edited]:
        """Give several fields other values; yield each edit when it is made. Raise NotesError, before the first, where
        one of them cannot be."""
        return self._session.edits(fields, parse_method(method), callbacks)

    @synchronized
    def undo(self) -> Line:
        """Go back to before the last turn, edit, compaction or cut, which is returned. Raise SessionError if there is
        none."""
        return self._session.undo()

    @synchronized
    def compact(self) -> Compacted:
        """Take out the errata that later ones of the same field supersede."""
        return self._session.compact()

    @synchronized
    def forget(self, *parts: str | int, method: str = "cut", dry: bool = False) -> Forgotten:
        """Take out parts: a turn (`3`), turns (`3-5`), a chain of thought (`thought:3`), results of tools (`tool:3`).

        By `cut` what follows is moved, its rows may still carry notes of what is gone, and an undo brings that back. By
        `suffix` it is decoded again, and nothing that was said is kept: there is no undo. Without parts, `suffix` is
        for what was cut before. `dry`: only tell. Raise NotesError where it cannot be; then nothing is changed.
        """
        return self._session.forget([str(part) for part in parts], method, dry=dry)

    @synchronized
    def fork(self, name: str) -> Session:
        """A second session that goes on from here. It is closed with this one, or before. Raise SessionError if there
        is one of that name, or nothing to fork yet."""
        stack = ExitStack()
        return Session(stack.enter_context(self._session.fork(name)), stack, self._forks)

    @synchronized
    def verify(
        self,
        questions: Sequence[str] | Examination = (),
        choices: Sequence[str] | None = None,
        *,
        wording: str | None = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> SessionReport:
        """Compare what is put back from disk with a prefill of the session's tokens, at its end and after each
        question; without questions, after those for the value of each field. Raise NotesError where there is no
        turn."""
        from notes_cli.measure.examination import Examination, examine_session

        if not isinstance(questions, Examination):
            questions = Examination(questions=questions, choices=choices, wording=wording)
        return examine_session(self._session, questions, callbacks)


def _close(sessions: list[Session]) -> None:
    """Close all of them, the latest first, whatever goes wrong with one."""
    with ExitStack() as closing:
        for session in sessions:
            closing.callback(session.close)


def _skill(source: str | os.PathLike[str] | None, text: str | None, name: str | None) -> Skill:
    """The skill in a file or folder, or in a text. Raise NotesError unless one of them is given, a text with a name."""
    from notes_cli.text.skill import load_skill, parse_skill

    if source is not None and text is None:
        return load_skill(os.fspath(source), name=name)
    if source is not None or text is None or name is None:
        given = "nothing is given" if text is None else "a text without a name" if source is None else "both are given"
        raise NotesError(f"compile takes a path, or text=... and name=...: {given}")
    return parse_skill(text, source="-", default=name, name=name, where=f"the text of {name}")


def _request(question: str | Request, how: Asking) -> Request:
    """The request that is meant. Raise NotesError for an edit method that there is not, and for sampling that is given
    twice."""
    request = question if isinstance(question, Request) else Request(question)
    given: Any = {**how}
    one_by_one = {name: given.pop(name) for name in _SAMPLING if name in given}
    if given.get("sampling") is None:
        given["sampling"] = request.sampling
    elif one_by_one:
        (name, *_) = one_by_one
        raise NotesError(f"sampling and {name} are both given", f"Write {name} into the SamplerOptions")
    if one_by_one:
        given["sampling"] = replace(request.sampling, **one_by_one)
    given["method"] = parse_method(given.get("method")) or request.method
    return replace(request, **given)
