"""Printing: harmful characters are escaped, pipes lose nothing, and no module prints by other means."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from pathlib import Path

import pytest

import notes_cli
from notes_cli import output
from notes_cli.errors import OutputError

HARMFUL = "\x1b[2J\x07\x08\x7f\x9b\r\u202e\u2066\u200f\u2028\ufeff\U000e0041\udc9b\0"
JOINED = "क्‍ष 👩‍🚀 می‌خواهم"  # joiners that a script or an emoji needs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def obeyed(text: str) -> set[str]:
    """Return the harmful characters in a text."""
    return (set(HARMFUL) - set("[2J")) & set(text)


@pytest.mark.parametrize(
    "show",
    [
        *(output.say, output.log, output.aside, output.result, lambda text: output.fail(text, 1)),
        *(lambda text: output.table((text,), [(text,)]), lambda text: output.styled([(text, "bold")])),
    ],
)
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_nothing_harmful_is_printed(
    show: object, kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    """Names, tables, errors, logs: every control and reordering character is shown, in a pipe as on a terminal."""
    out, err = kind(), kind()
    monkeypatch.setenv("TERM", "dumb")  # no colour of ours
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    show(f"a{HARMFUL}b{JOINED}")  # type: ignore[operator]
    printed = out.getvalue() + err.getvalue()
    assert not obeyed(printed)
    assert "\\x1b[2J" in printed and "\\u202e" in printed and "\\x9b" in printed


def test_a_label_is_no_markup_and_no_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar escapes the name of an untrusted skill."""
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with output.progress("compiling [/x]\x1b]0;title\x07") as update, output.progress("inner", later=True) as inner:
        update(1, 10)
        inner(1, 2)
        inner(2, 2)
    assert "compiling [/x]\\x1b]0;title\\x07" in err.getvalue() and "\x1b]" not in err.getvalue()


def test_an_answer_is_harmless_on_a_terminal_and_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes are shown where they would be obeyed; a pipe gets every byte. A line of Windows stays one line."""
    for kind, expected in ((Terminal, "\\x1b[31m\\x9b\\x0d!\r\n"), (io.StringIO, "\x1b[31m\x9b\r!\r\n")):
        out = kind()
        monkeypatch.setattr(sys, "stdout", out)
        for part in ("\x1b", "[31m\x9b", "\r!\r\n"):  # as tokens may come
            output.data(part, end="")
        assert out.getvalue() == expected


def test_json_and_errors_spell_out_what_is_harmful(capsys: pytest.CaptureFixture[str]) -> None:
    """The value is the same, the terminal is left alone, and a lone surrogate does not break UTF-8. An error is one
    line, also where a name in it has a line break."""
    output.as_json([{HARMFUL: [HARMFUL, JOINED]}])
    printed = capsys.readouterr().out
    assert not obeyed(printed) and json.loads(printed) == [{HARMFUL: [HARMFUL, JOINED]}]
    assert JOINED in printed
    assert output.fail("a\nb", 2) == 2
    assert capsys.readouterr() == ("", "notes: a\\nb\n")
    assert output.fitting("x" * 80, "short") == "x" * 80 and output.fitting("x" * 81, "short") == "short"


@pytest.mark.parametrize("show", [output.result, output.data, output.as_json, lambda text: output.table((text,), [])])
def test_a_stream_that_takes_nothing_is_an_error(show: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a closed terminal: OutputError has the reason."""
    monkeypatch.setattr(sys, "stdout", output.Stdout(open("/dev/full", "wb")))  # noqa: SIM115
    with pytest.raises(OutputError, match="cannot write to standard output: No space left on device"):
        show("text")  # type: ignore[operator]


def test_nobody_prints_round_the_door() -> None:
    """print, click's printing, rich's Console and the standard streams belong to output.py alone."""
    root, found = Path(notes_cli.__file__).parent, []
    for path in root.rglob("*.py"):
        if path in (root / "output.py", root / "text" / "rendering.py"):  # that one is a child with pipes of its own
            continue
        text = path.read_text()
        suspicious = re.search(r"\b(print|stdout|stderr|__std|Console|click|warnings|input|echo)", text)
        for node in ast.walk(ast.parse(text)) if suspicious else ():
            name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            imported = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if name in ("print", "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__", "Console"):
                found.append(f"{path.name}:{node.lineno} {name}")  # type: ignore[attr-defined]
            if name.startswith("click.") and name.split(".")[1] in ("echo", "secho", "confirm", "prompt", "pause"):
                found.append(f"{path.name}:{node.lineno} {name}")  # type: ignore[attr-defined]
            if {"echo", "Console", "stdout", "stderr"} & set(imported) or name in ("warnings.warn", "input"):
                found.append(f"{path.name}:{node.lineno} import")  # type: ignore[attr-defined]
    assert found == []


@pytest.mark.parametrize(
    ("environment", "on_terminal", "coloured"),
    [
        *(({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False), ({"NO_COLOR": ""}, True, True)),
        *(({"TERM": "dumb"}, True, False), ({"CLICOLOR": "0"}, True, False), ({"FORCE_COLOR": "1"}, False, True)),
        *(({"CLICOLOR_FORCE": "1"}, False, True), ({"CLICOLOR_FORCE": "0"}, False, False)),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_variables_of_colour(
    environment: dict[str, str], on_terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR, then FORCE_COLOR and CLICOLOR_FORCE, then CLICOLOR and the kind of stdout; --color is before them."""
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    assert output._coloured(on_terminal) == coloured
    for when in ("always", "never"):
        monkeypatch.setattr(output.run, "colour", when)
        assert output._coloured(on_terminal) == (when == "always")
