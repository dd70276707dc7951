"""Conventions of command lines, for every command: colour, quiet, variables, help, typing errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from notes_cli import output
from notes_cli.cli import COMMANDS, SYNONYMS, cli

from .conftest import Notes, on_a_terminal, run_apart, run_here

NUMPY = "import sys\nfrom notes_cli.cli import run\n"


def leaves(command: click.Command = cli, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with its words."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child
            yield from leaves(child, *path, name)
    else:
        yield path, command


LEAVES = dict(leaves())


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_what_all_have(words: tuple[str, ...]) -> None:
    """-q, --color, a line of help for each option, a variable for each but --json, and short flags as elsewhere."""
    options = [one for one in LEAVES[words].params if isinstance(one, click.Option)]
    flags = {flag: one for one in options for flag in one.opts}
    assert {"-q", "--quiet", "--color"} <= set(flags)
    assert [one.name for one in options if not one.help] == []
    assert [one.name for one in options if one.envvar is None] in ([], ["json_"])
    usual = {"-m": "--model", "-f": ("--file", "--force"), "-s": "--system", "-o": "--output", "-y": "--yes"}
    usual |= {"-c": "--ctx-size", "-t": "--threads", "-ngl": "--gpu-layers", "-v": "--verbose", "-p": "--prompt"}
    for short, long in usual.items():
        if short in flags:
            assert set(flags[short].opts) & {long, *long}, short


MANY = [
    pytest.param(option, id=" ".join((*words, str(option.name))))
    for words, one in LEAVES.items()
    for option in one.params
    if isinstance(option, click.Option) and option.multiple
]


@pytest.mark.parametrize("option", MANY)
def test_a_variable_of_several_values_has_a_line_for_each(
    option: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, paths and corrections have blanks and colons: part of a key must not be a key."""
    assert len(MANY) > 10 and isinstance(option.envvar, str)
    monkeypatch.setenv(option.envvar, "tier=very gold:er\r\n\n  \n/a b\n")
    assert option.value_from_envvar(click.Context(cli)) == ["tier=very gold:er", "/a b"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_examples(name: str) -> None:
    """Help pages have examples; those of groups show examples of subcommands."""
    command = cli.get_command(click.Context(cli), name)
    assert command and "Examples:\n" in command.get_help(click.Context(command))


@pytest.mark.parametrize(
    ("environment", "arguments", "terminal", "coloured"),
    [
        ({}, [], True, True),
        ({}, [], False, False),
        ({"NO_COLOR": "1"}, [], True, False),
        ({"NO_COLOR": ""}, [], True, True),
        ({"TERM": "dumb"}, [], True, False),
        ({"CLICOLOR": "0"}, [], True, False),
        ({"FORCE_COLOR": "1"}, [], False, True),
        ({"CLICOLOR_FORCE": "1"}, [], False, True),
        ({"CLICOLOR_FORCE": "0"}, [], False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, [], False, False),
        ({}, ["--color", "always"], False, True),
        ({"NO_COLOR": "1"}, ["--color", "always"], False, True),
        ({"FORCE_COLOR": "1"}, ["--color", "never"], True, False),
        ({"NOTES_COLOR": "never"}, [], True, False),
        ({"NOTES_COLOR": "never"}, ["--color=always"], True, True),
    ],
)
def test_colour(
    compiled: Path, environment: dict[str, str], arguments: list[str], terminal: bool, coloured: bool
) -> None:
    """Precedence: --color, NOTES_COLOR, then NO_COLOR, FORCE_COLOR and CLICOLOR, then the kind of stdout."""
    if terminal:
        shown = on_a_terminal(["ls", *arguments], **environment)
    else:
        os.environ.update(environment)
        try:
            shown = run_apart("ls", *arguments).out
        finally:
            for name in environment:
                del os.environ[name]
    assert ("\x1b[1m" in shown) == coloured and "returns" in shown


def test_colour_as_a_setting(notes: Notes, compiled: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.yaml is asked after the variables, and no file of colour is a typing error."""
    (home / "config.yaml").write_text("color: always\n")
    assert "\x1b[1m" in notes("ls").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in notes("ls").out and notes("ls", "--color", "red").code == 2


@pytest.mark.model
def test_quiet(home: Path, skill: Path) -> None:
    """-q: no notice, no hint, no thought; the result and errors are as ever."""
    loud, soft = run_here("ask", "Why?", "-n", 2, "--splice", skill), run_here("ask", "Why?", "-n", 2, "-q")
    assert loud.err.count("\n") == 3 and (soft.code, soft.err) == (0, "") and soft.out.strip()
    assert run_here("ask", "Why?", "-q", "--splice", "nothing").err.startswith("notes: no compiled skill")
    assert run_here("session", "show", "-q", "nobody").err.startswith("notes: there is no session")
    assert run_here("ask", "Why?", "-n", 2).err, "nothing of it is left for the next call"


def test_settings_come_from_the_nearest(notes: Notes, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, then the variable that is called as it, then the command's own setting, then that of all, the default."""

    def tokens(*arguments: object) -> int:
        return int(notes("ask", "Why?", "--json", *arguments).json["tokens"]["answer"])

    home.mkdir()
    (home / "config.yaml").write_text("max-tokens: 2\n")
    assert tokens() == 2
    (home / "config.yaml").write_text("max-tokens: 2\nask: {max-tokens: 3}\n")
    assert tokens() == 3
    monkeypatch.setenv("NOTES_ASK_MAX_TOKENS", "4")
    assert tokens() == 4 and tokens("-n", 5) == 5
    monkeypatch.setenv("NOTES_ASK_MAX_TOKENS", "x")
    assert "'x' is not a whole number" in notes("ask", "Why?").err


@pytest.mark.parametrize(
    ("word", "meant"), [("aks", "ask"), ("complie", "compile"), ("run", "ask"), ("remove", "rm"), ("config", "paths")]
)
def test_a_mistyped_command(word: str, meant: str) -> None:
    """A similar command, or the one with another program's name for it, is suggested; status 2."""
    outcome = run_here(word)
    assert (outcome.code, outcome.out) == (2, "") and f"Did you mean {meant}?" in outcome.err
    assert set(SYNONYMS.values()) <= set(COMMANDS) and not set(SYNONYMS) & set(COMMANDS)


def test_a_mistyped_option() -> None:
    outcome = run_here("ask", "x", "--spice", "returns")
    assert outcome.code == 2 and "--splice" in outcome.err


def test_verbose_tells_of_times_and_twice_of_llama_cpp(notes: Notes, home: Path) -> None:
    """-v: a line with tokens and times; -vv: llama.cpp's log, too. A setting may be true."""
    once, twice = notes("ask", "Why?", "-n", 3, "-v").err, run_apart("ask", "Why?", "-n", 3, "-vv").err
    assert " tokens, 0 of them spliced, in " in once and "tokens/s" in once
    assert "llama_model_loader" not in once and "llama_model_loader" in twice
    home.mkdir(exist_ok=True)
    for setting in ("true", "1"):
        (home / "config.yaml").write_text(f"verbose: {setting}\n")
        assert "tokens/s" in notes("ask", "Why?", "-n", 3).err


@pytest.mark.model
def test_version_names_the_native_build() -> None:
    """One line, whose second word is the version."""
    out = run_here("--version").out
    assert out.split()[:2] == ["notes", "0.1.0"] and "llama-cpp-python 0." in out and out.count("\n") == 1


@pytest.mark.parametrize("name", ["NOTES_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before any request, with the name of the variable."""
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a port without a listener
    for arguments in (("a/b",), ("a/b", "--dry-run")):
        outcome = run_here("pull", *arguments)
        assert outcome.code == 1 and outcome.err.startswith(f"notes: {name} is set: nothing is fetched")
    monkeypatch.setenv(name, "0")
    assert run_here("pull", "a/b").err.startswith("notes: cannot reach Hugging Face")


def test_nothing_is_left_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of one call in a process do not affect the next."""
    output.begin(json=False)
    output.set_quiet()
    output.say("one")
    output.begin(json=False)
    output.say("two")
    assert capsys.readouterr().err == "two\n"
