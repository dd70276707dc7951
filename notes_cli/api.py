"""The Python API, on which most commands are built: open a model, compile skills, ask, keep sessions, measure.

    import notes_cli as notes

    with notes.open() as model:
        handbook = model.compile("skills/store-handbook")
        print(model.ask("Which carrier do we use?", splice=[handbook], errata=["Carrier=Kestrel Freight"]))

Errors are NotesErrors, with `what` went wrong and a `remedy`. Nothing is printed: notices, progress and streamed text
go to Callbacks. Threads may share a model and its objects; their calls run one after another.
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
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError, Notice, Say
from notes_cli.runtime.answering import ask, ask_stream, explain
from notes_cli.runtime.naming import chosen_model, model_file, projector_of
from notes_cli.runtime.open_skills import SkillRef, open_segments
from notes_cli.runtime.request import NO_CALLBACKS, PARALLEL, Answer, Asking, Callbacks, Prefilled, Request, Stream
from notes_cli.runtime.resolve import parse_method
from notes_cli.runtime.synchronized import Computing, check_keywords, checked, synchronized, synchronized_steps
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.messages import Conversation, message_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from notes_cli.library.store import Store
    from notes_cli.measure.speed import Benching, Speed
    from notes_cli.measure.verify import Report, SessionReport
    from notes_cli.runtime.recompile import Compiled, Imported
    from notes_cli.sessions.edits import Removed
    from notes_cli.sessions.folder import Sessions
    from notes_cli.sessions.session import Session as LiveSession
    from notes_cli.sessions.state import Entry
    from notes_cli.text.fields import Blocks
    from notes_cli.text.skill import Skill


F = TypeVar("F", bound=Callable[..., object])
Question = str | Request | Sequence[Mapping[str, Any]]  # the last: messages of OpenAI's API


def with_question_options(method: F) -> F:
    """Add the options of Asking to the method's signature, and their descriptions to a docstring that ends with
    "Options:"."""
    original = signature(method)
    positional = [item for item in original.parameters.values() if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
    keyword_only = [item for item in original.parameters.values() if item.kind is Parameter.KEYWORD_ONLY]
    parameters = [*positional, *_OPTIONS, *keyword_only]
    method.__signature__ = original.replace(parameters=parameters)  # type: ignore[attr-defined]
    if (method.__doc__ or "").rstrip().endswith("Options:"):
        method.__doc__ = f"{cleandoc(method.__doc__ or '')}\n\n{_describe_options()}"
    return method


def _option_parameters() -> Iterator[Parameter]:
    defaults: dict[str, Any] = {}
    for item in (*fields(SamplerOptions), *fields(Request)):
        defaults[item.name] = item.default if item.default_factory is MISSING else item.default_factory()
    defaults["sampling"] = None  # built from temperature, top_k, ...
    for name, hint in Asking.__annotations__.items():
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint.__forward_arg__)


_OPTIONS = tuple(_option_parameters())
_SAMPLING = [item.name for item in fields(SamplerOptions) if item.name in Asking.__annotations__]


def _describe_options() -> str:
    """Return a line for each option, in the order of the signature: name, default, description."""
    texts: dict[str, str] = {}
    for options in (SamplerOptions, Request):
        name = ""
        for line in cleandoc(options.__doc__ or "").splitlines():
            if line.startswith(" "):
                texts[name] += f"\n{line}"
            else:
                name, _, text = line.partition(": ")
                texts[name] = text
    return "\n".join(f"{option.name}={option.default!r}: {texts.get(option.name, '')}" for option in _OPTIONS)


@checked({item.name: f"options=notes.ContextOptions({item.name}=...)" for item in fields(ContextOptions)})
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
    chat_template: str | None = None,
) -> Model:
    """Open a GGUF model. Close the Model that is returned, or use it as a context manager.

    Defaults come from NOTES_CTX_SIZE, NOTES_THREADS and the other variables of the command line; with `options` only
    NOTES_THREADS, NOTES_GPU_LAYERS, NOTES_RPC and NOTES_MMPROJ apply.

    model: A file, or a name that `notes models` lists. None: NOTES_MODEL, else the model of config.yaml, else smollm2
        if it is installed, else the tiny model that ships.
    options: All options of the context, in place of `n_ctx` and `n_threads`.
    n_ctx: Initial size of the context in tokens, 4096 by default; it grows as needed.
    n_threads: Threads; by default as many as suit the machine and the model.
    n_gpu_layers: Layers on the GPU; -1, the default, for all.
    paths: Folders of the user; by default those of NOTES_HOME, else of the system.
    library: Store of compiled skills; by default the folder in `paths`.
    fixed_size: Keep the context at its size; longer prompts are an error.
    beyond_trained: Allow more tokens than the model was trained for.
    rpc: llama.cpp RPC servers, "host:port", whose devices take layers first.
    projector: GGUF file of the projector (mmproj), which encodes images.
    image_tokens: Fewest and most tokens of an image.
    carry: Carry the state of recurrent layers through skills that are not at the start of a prompt. None: as
        config.yaml has it for the model.
    chat_template: The Jinja text of a chat template in place of the model's.

    Raises ModelError if the model cannot be loaded, EngineError if the context cannot be created.
    """
    numbers: dict[str, Any] = {"n_ctx": n_ctx, "n_threads": n_threads}
    explicit = {name: number for name, number in numbers.items() if number is not None}
    if explicit and options is not None:
        raise NotesError(f"options and {' and '.join(explicit)} are both given", "Write all into the options")
    variables = from_variables()
    others = {name: variables.pop(name, None) for name in ("n_gpu_layers", "rpc", "projector")}
    if n_gpu_layers is None:
        n_gpu_layers = -1 if others["n_gpu_layers"] is None else others["n_gpu_layers"]
    projector = others["projector"] if projector is None else projector
    if options is None:
        options = ContextOptions(**variables | explicit)
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
            chat_template=chat_template,
        )
    )


class _Streaming(Computing, Protocol):
    def stream(self, question: Request, *, callbacks: Callbacks) -> Stream: ...


class _AsyncMethods:
    """The asyncio methods of Model and Session."""

    @with_question_options
    async def aask(
        self: _Streaming, question: Question, *, callbacks: Callbacks = NO_CALLBACKS, **how: Unpack[Asking]
    ) -> Answer:
        """Answer one question as `ask` does, in the model's worker thread, where concurrent calls queue and callbacks
        run. Cancelling the task cancels the generation; a session does not keep the turn. Options as in `Model.ask`."""
        from notes_cli.runtime.synchronized import answer_in_thread

        check_keywords(_AsyncMethods.aask, how)
        request = _request(question, how)
        return await answer_in_thread(self.workspace, lambda: self.stream(request, callbacks=callbacks))

    @with_question_options
    async def astream(
        self: _Streaming, question: Question, *, callbacks: Callbacks = NO_CALLBACKS, **how: Unpack[Asking]
    ) -> AsyncGenerator[str, None]:
        """Yield the text as `stream` does, for `async for`; `callbacks.on_event` gets the Answer. Options as in
        `Model.ask`."""
        from notes_cli.runtime.synchronized import texts_from_thread

        check_keywords(_AsyncMethods.astream, how)
        request = _request(question, how)
        async with aclosing(
            texts_from_thread(self.workspace, lambda: self.stream(request, callbacks=callbacks))
        ) as texts:
            async for text in texts:
                yield text


class Model(_AsyncMethods):
    """An open model with one context. Sessions, streams and other questions may be in use at the same time."""

    def __init__(self, workspace: Workspace) -> None:
        """Wrap a workspace, which `close` closes. `open` creates both."""
        self.workspace = workspace
        self._sessions: list[Session] = []  # open ones

    @synchronized
    def close(self) -> None:
        """Close the model and its open sessions."""
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
        """Name and quantization, for display."""
        return self.workspace.name

    # Skills.

    @synchronized
    def compile(
        self,
        source: str | os.PathLike[str] | Skill | None = None,
        *,
        text: str | None = None,
        name: str | None = None,
        force: bool = False,
        blocks: Blocks = 1,
        kv: str = "f16",
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Segment:
        """Return the segment of a skill, ready to be spliced, from the library; prefill it first if it is missing or
        out of date.

        source: A text file, a folder with a SKILL.md, or a Skill.
        text: The text itself instead, with `name`; it replaces another text without a file under that name.
        name: Name in the library; by default the skill's own.
        force: Compile again although nothing changed, and replace a text of that name that came from elsewhere.
        blocks: Number of blocks compiled independently, or "headings" for a block per heading.
        kv: Type of K/V in the file: "f16", "f16/q8_0" (V alone) or "q8_0".

        Raises SkillError if the text cannot be read, TakenError if the name belongs to another text, UnsupportedError
        if this model's K/V cannot be saved, EngineError for more tokens than the model was trained for.
        """
        compiled = self.bring_up_to_date(
            source, text=text, name=name, force=force, blocks=blocks, kv=kv, callbacks=callbacks
        )
        return self.workspace.open(compiled.path)

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context manager in which compiles share the left context of their skills, decoded once. The segments
        are the same as without it."""
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
        blocks: Blocks | None = 1,
        kv: str | None = "f16",
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Compiled:
        """Compile as `compile` does without opening the segment; return its path, size, and the reasons for compiling.

        output: Write the segment to this file instead of the library.
        blocks, kv: None keeps those of the segment in the library.
        """
        from notes_cli.runtime.compile import block_warnings
        from notes_cli.runtime.recompile import compile_to_library, taken
        from notes_cli.text.skill import Skill

        workspace = self.workspace
        if not isinstance(source, Skill):
            source = _skill(source, text, name)
            for warning in source.warnings:
                callbacks.on_event(Notice(warning, warning=True))
        elif text is not None:
            raise NotesError("a source and a text are both given to compile", "Give one of them")
        if text is not None and not force and taken(workspace, source):
            entries = workspace.library.entries(source.name)
            force = all(entry.info.source == "-" for entry in entries if entry.info)
        warnings = tuple(block_warnings(workspace, source, blocks)) if blocks not in (None, 1) else ()
        for warning in warnings:
            callbacks.on_event(Notice(warning, warning=True))

        with callbacks.progress(f"compiling {source.name}") as update:
            compiled = compile_to_library(
                *(workspace, source),
                force=force,
                progress=update,
                output=output,
                blocks=blocks,
                kv=kv,
                say=callbacks.on_event,
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
        """Import a segment file from elsewhere into the library. Its K/V is computed again and compared, which takes as
        long as a compile. A segment of another model is compiled from its text.

        name: Name in the library; by default the segment's own.
        trust: Skip the comparison.
        force: Replace a skill of that name that came from elsewhere.

        Raises SegmentError if the file is damaged or its K/V differs from what this model computes, TakenError if the
        name belongs to another text.
        """
        from notes_cli.runtime.recompile import import_segment

        with callbacks.progress(f"computing {Path(source).name}", later=True) as update:
            return import_segment(
                *(self.workspace, Path(source)),
                name=name,
                trust=trust,
                force=force,
                progress=update,
                say=callbacks.on_event,
            )

    @synchronized
    def segment(self, name: str) -> Segment:
        """Open a compiled skill by name, or a segment file. Raises SegmentError if it does not exist or belongs to
        another model."""
        (segment,) = open_segments(self.workspace, [name], NO_CALLBACKS.on_event)
        return segment

    @property
    def skills(self) -> dict[str, str]:
        """The description of each skill that is compiled for this model, by name."""
        compiled = [entry.info for entry in self.workspace.library.entries() if entry.info]
        return {one.name: one.description for one in compiled if one.identity == self.workspace.identity}

    # Questions.

    @synchronized
    @with_question_options
    def ask(self, question: Question, *, callbacks: Callbacks = NO_CALLBACKS, **how: Unpack[Asking]) -> Answer:
        """Answer one question: splice the skills, decode the rest of the prompt, generate.

        Return an Answer: `str(answer)` is its text, `answer.choice` the preferred one of `choices`, `answer.counts` the
        tokens spliced and decoded, `answer.calls` the tools that it calls. `callbacks` get notices, progress and
        streamed text. `question` may be a Request, whose options are the defaults, or a list of messages as OpenAI's
        API has them, to which `answer.message` and the results of its calls are appended. Raises NotesError for options
        that do not fit this model or its skills, such as an unknown field, and ContextLengthError for a prompt that is
        too long.

        Options:
        """
        return ask(self.workspace, _request(question, how), callbacks)

    @synchronized_steps
    @with_question_options
    def stream(self, question: Question, *, callbacks: Callbacks = NO_CALLBACKS, **how: Unpack[Asking]) -> Stream:
        """Yield the answer's text as it is generated, or the choice at once, and return the Answer. Nothing is computed
        before the first `next`; closing the generator cancels the generation. Options as in `ask`."""
        return ask_stream(self.workspace, _request(question, how), callbacks)

    @synchronized_steps
    @with_question_options
    def ask_many(
        self,
        questions: Iterable[Question | NotesError],
        *,
        parallel: int = PARALLEL,
        callbacks: Callbacks = NO_CALLBACKS,
        **how: Unpack[Asking],
    ) -> Iterator[Answer | NotesError]:
        """Yield the Answer to each question, or its error, in their order. At most `parallel` are decoded together, and
        the common prefix of their prompts is computed once.

        `questions` are consumed lazily; an error among them is yielded in its place. Options as in `ask`; `callbacks`
        get notices and progress only.
        """
        from notes_cli.runtime.answering import ask_many

        if isinstance(questions, str):
            raise NotesError(f"questions is the text {questions!r}, and not a list", f"Write [{questions!r}]")
        template = _request("", how)  # holds iterators of `how` as tuples, which serve all questions
        shared: Any = {name: getattr(template, name, value) for name, value in how.items()}
        if how.get("sampling") is None:
            shared.pop("sampling", None)
        requests = (item if isinstance(item, NotesError) else _request(item, shared) for item in questions)
        for _, outcome in ask_many(self.workspace, requests, parallel, callbacks):
            yield outcome

    @synchronized
    @with_question_options
    def explain(self, question: Question, *, callbacks: Callbacks = NO_CALLBACKS, **how: Unpack[Asking]) -> Prefilled:
        """Return the plan of a prompt without computing it: its pieces, and whether each would be spliced or decoded
        and why. Options as in `ask`."""
        return explain(self.workspace, _request(question, how), callbacks)

    # Sessions.

    @property
    def sessions(self) -> Sessions:
        """Sessions on disk, by name."""
        from notes_cli.sessions.folder import Sessions

        return Sessions(self.workspace.paths.sessions)

    @synchronized
    def session(self, name: str, *, new: bool = True, reading: bool = False, say: Say | None = None) -> Session:
        """Start or continue a session on disk, locked until it or the model is closed.

        new: Create the session if it does not exist.
        reading: Open it without changes, as a read-only folder requires.
        say: Wait while another process has it open, with a notice after a second.

        Raises SessionError if it does not exist, is open already or belongs to another model, UnsupportedError if this
        model's K/V cannot be saved.
        """
        from notes_cli.sessions.session import Session as LiveSession

        with ExitStack() as stack:
            stored = stack.enter_context(self.sessions.locked(name, new=new, reading=reading, say=say))
            live = stack.enter_context(LiveSession(self.workspace, stored))
            return Session(live, stack.pop_all(), self._sessions)

    # Measuring.

    @synchronized
    def verify(
        self,
        splice: Sequence[SkillRef],
        *,
        questions: Sequence[str] = (),
        errata: Sequence[str] | Mapping[str, str] = (),
        fields: Mapping[str, str] | None = None,
        methods: Sequence[str] = (),
        choices: Sequence[str] | None = None,
        system: str | None = None,
        seam: int | None = None,
        wording: str | None = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Report:
        """Compare spliced skills, with and without errata, with a full recompute of the same tokens.

        splice: Skills as for `ask`.
        questions: Questions to ask; by default for the value of each field.
        errata: Corrections with which each question is asked again.
        fields: New values: compare the edit methods that apply them with a recompute of the corrected text instead.
        methods: Names of edit methods, by default all.
        choices: Decide among these answers; None compares greedy answers.
        system: Text before the skills; by default a few sentences, so that the skills' K/V is moved.
        seam, wording: As for `ask`.

        Return a Report: `passed`, `failures`, and a case per question; of `fields` an EditReport, with the `cheapest`
        method that agrees. Raises NotesError if the skills cannot be compared, or for an unknown field or method.
        """
        from notes_cli.measure.verify import verify_skills

        how: Any = {"errata": errata, "fields": fields or {}, "choices": choices}  # errata may be a mapping
        request = Request("", splice, **how, system=system, seam=seam, wording=wording)
        return verify_skills(self.workspace, request, questions, methods, callbacks)

    @synchronized
    def bench(self, wanted: Benching | None = None, *, callbacks: Callbacks = NO_CALLBACKS) -> Speed:
        """Measure the seconds of a splice, of a prefill of the same tokens, and of a question after it, for each length
        in `wanted`. Raises UnsupportedError for a model whose K/V cannot be moved, EngineError if no length fits into
        memory."""
        from notes_cli.measure.speed import Benching, bench

        return bench(self.workspace, wanted or Benching(), callbacks)


class Session(_AsyncMethods):
    """A conversation on disk, locked by this process. Close it, or use it as a context manager."""

    def __init__(self, live: LiveSession, stack: ExitStack, siblings: list[Session]) -> None:
        """Wrap a live session; `Model.session` does. Closing it closes `stack` and removes it from `siblings`."""
        self._live, self._stack, self._siblings = live, stack, siblings
        self._forks: list[Session] = []
        siblings.append(self)

    @synchronized
    def close(self) -> None:
        """Unlock the session and its open forks. All complete turns are on disk."""
        try:
            _close(self._forks)
        finally:
            if self in self._siblings:
                self._siblings.remove(self)
            self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._live.state
        turns = f"{state.turns} turn{'s' * (state.turns != 1)}"
        summary = "closed" if self._live.stored.closed else f"{turns}, {len(state.tokens)} tokens"
        return f"Session({self.name!r}, {summary})"

    @property
    def workspace(self) -> Workspace:
        """The workspace of its model."""
        return self._live.workspace

    @property
    def _session(self) -> LiveSession:
        """The live session. Raises SessionError once it is closed: another process may have changed it."""
        self._live.stored.check_held()
        return self._live

    @property
    def name(self) -> str:
        return self._live.stored.name

    @property
    def empty(self) -> bool:
        """True before the first turn."""
        return self._session.empty

    @property
    def turns(self) -> int:
        """Number of complete turns."""
        return self._session.state.turns

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self._session.state.tokens)

    @property
    def fields(self) -> dict[str, str]:
        """Current value of each field of its skills."""
        return dict(self._session.state.fields)

    @property
    def memory(self) -> str | None:
        """Name of the skill that each turn moves to just before its question."""
        memory = self._session.state.memory
        return memory.name if memory else None

    @property
    def entries(self) -> Sequence[Entry]:
        """Pieces of prompts, answers and edits, in order."""
        return tuple(self._session.state.entries)

    @synchronized
    @with_question_options
    def ask(self, question: Question, *, callbacks: Callbacks = NO_CALLBACKS, **how: Unpack[Asking]) -> Answer:
        """Answer the next question and save the turn. Options as in `Model.ask`. Raises SessionError for `fields`,
        `system`, `place`, `recompute`, `decode` or `exact` after the first turn."""
        return self._session.ask(_request(question, how), callbacks)

    @synchronized_steps
    @with_question_options
    def stream(self, question: Question, *, callbacks: Callbacks = NO_CALLBACKS, **how: Unpack[Asking]) -> Stream:
        """Yield the answer's text as it is generated, and return the Answer. The turn is saved when the answer is
        complete, not if the generator is closed before. Options as in `ask`."""
        return self._session.stream(_request(question, how), callbacks)

    @synchronized
    def edit(
        self, field: str, value: str, method: Method | str | None = None, *, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Entry]:
        """Give a field a new value and return the edits; `*.field` edits each skill that has it. `method`: None for the
        model's default. Raises NotesError for an unknown field or method; then nothing is changed."""
        return list(self.edits({field: value}, method, callbacks=callbacks))

    @synchronized_steps
    def edits(
        self, fields: Mapping[str, str], method: Method | str | None = None, *, callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[Entry]:
        """Give several fields new values, and yield each edit when it is done. Raises NotesError before the first edit
        if one of them is impossible."""
        return self._session.edits(fields, parse_method(method), callbacks)

    @synchronized
    def undo(self) -> dict[str, str]:
        """Undo the last turn, edit, compaction or cut, and return its `op` and `what` it was about. Raises SessionError
        if there is none."""
        return self._session.undo()

    @synchronized
    def compact(self) -> Removed:
        """Remove errata that later ones of the same field supersede."""
        return self._session.compact()

    @synchronized
    def forget(self, *parts: str | int, method: str = "cut", dry: bool = False) -> Removed:
        """Remove parts: a turn (`3`), turns (`3-5`), reasoning (`thought:3`), results of tools (`tool:3`).

        method: "cut" moves the K/V that follows, which was computed with the removed text; `undo` restores it.
            "suffix" decodes what follows again and deletes the removed text for good; without parts, that of earlier
            cuts.
        dry: Change nothing; only return the outcome.

        Raises NotesError for parts that do not exist; then nothing is changed.
        """
        return self._session.forget([str(part) for part in parts], method, dry=dry)

    @synchronized
    def fork(self, name: str) -> Session:
        """Copy the session under a new name. The fork is closed with this one, or before. Raises SessionError if the
        name exists, or if there is no turn yet."""
        stack = ExitStack()
        return Session(stack.enter_context(self._session.fork(name)), stack, self._forks)

    @synchronized
    def verify(
        self,
        questions: Sequence[str] = (),
        choices: Sequence[str] | None = None,
        *,
        wording: str | None = None,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> SessionReport:
        """Compare the session's K/V, restored from disk, with a prefill of its tokens, at its end and after each
        question (by default for the value of each field). Return a SessionReport. Raises NotesError if there is no
        turn."""
        from notes_cli.measure.verify import verify_session

        return verify_session(self._session, questions, choices=choices, wording=wording, callbacks=callbacks)


def _close(sessions: list[Session]) -> None:
    """Close all sessions, latest first, even if one fails."""
    with ExitStack() as closing:
        for session in sessions:
            closing.callback(session.close)


def _skill(source: str | os.PathLike[str] | None, text: str | None, name: str | None) -> Skill:
    """Return the skill of a file or folder, or of a text with a name. Raises NotesError unless exactly one is given."""
    from notes_cli.text.skill import load_skill, parse_skill

    if source is not None and text is None:
        return load_skill(os.fspath(source), name=name)
    if source is not None or text is None or name is None:
        mistake = (
            "nothing is given" if text is None else "a text without a name" if source is None else "both are given"
        )
        raise NotesError(f"compile takes a path, or text=... and name=...: {mistake}")
    return parse_skill(text, source="-", default=name, name=name, where=f"the text of {name}")


def _request(question: Question, how: Asking) -> Request:
    """Return the request with these options. Raises NotesError for an unknown edit method, and for sampling options
    that are given twice."""
    options: Any = {**how}
    if isinstance(question, str | Request):
        request = question if isinstance(question, Request) else Request(question)
    elif options.get("system") is not None:
        raise NotesError("system and messages are both given", "Write the system text as the first message")
    else:
        request = Request("", conversation=Conversation(tuple(map(message_of, question))))
    sampling = {name: options.pop(name) for name in _SAMPLING if name in options}
    if options.get("sampling") is None:
        options["sampling"] = request.sampling
    elif sampling:
        (name, *_) = sampling
        raise NotesError(f"sampling and {name} are both given", f"Write {name} into the SamplerOptions")
    if sampling:
        options["sampling"] = replace(request.sampling, **sampling)
    options["method"] = parse_method(options.get("method")) or request.method
    return replace(request, **options)
