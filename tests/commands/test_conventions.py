"""Conventions of command lines and sources of settings, for every command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from notes_cli.cli import COMMANDS, SYNONYMS, cli, command_named
from notes_cli.commands.ask import KEYS
from notes_cli.commands.request import QUESTION
from notes_cli.commands.terminal import Command, Setting

from .conftest import Notes, on_a_pty, on_a_terminal, run_apart, run_here


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


def test_every_command_has_what_all_have() -> None:
    """-q, --color, --help-all, help for each option, a variable for each but --json, short flags as elsewhere."""
    usual = {"-m": "--model", "-f": ("--file", "--force"), "-s": "--system", "-o": "--output", "-y": "--yes"}
    usual |= {"-c": "--ctx-size", "-t": "--threads", "-ngl": "--gpu-layers", "-v": "--verbose", "-p": "--prompt"}
    for words, command in LEAVES.items():
        options = [one for one in command.params if isinstance(one, click.Option)]
        flags = {flag: one for one in options for flag in one.opts}
        assert {"-q", "--quiet", "--color", "--help-all"} <= set(flags), words
        assert [one.name for one in options if not one.help] == [], words
        assert [one.name for one in options if one.envvar is None] in (["help_all"], ["json_", "help_all"]), words
        for short, long in usual.items():
            assert short not in flags or set(flags[short].opts) & {long, *long}, (words, short)


def test_a_variable_of_several_values_has_a_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, paths and corrections have blanks and colons: part of a key must not be a key."""
    many = [one for command in LEAVES.values() for one in command.params if one.multiple]  # type: ignore[attr-defined]
    assert len(many) > 10
    for option in many:
        assert isinstance(option.envvar, str)
        monkeypatch.setenv(option.envvar, "tier=very gold:er\r\n\n  \n/a b\n")
        assert option.value_from_envvar(click.Context(cli)) == ["tier=very gold:er", "/a b"]


def test_help() -> None:
    """It has examples, those of groups show subcommands, and fits a terminal."""
    for name in COMMANDS:
        shown = run_here(name, "--help").out
        assert "Examples:\n" in shown and all(len(line) <= 80 for line in shown.splitlines()), name


def test_colour_on_a_terminal(compiled: Path) -> None:
    """By --color, NOTES_COLOR, then other variables, whose precedence is that of tests/test_output.py."""
    for environment, arguments, coloured in (
        ({}, [], True),
        ({"NO_COLOR": "1"}, [], False),
        ({"NO_COLOR": "1"}, ["--color", "always"], True),
        ({"NOTES_COLOR": "never"}, [], False),
        ({"NOTES_COLOR": "never"}, ["--color=always"], True),
    ):
        shown = on_a_terminal(["ls", *arguments], **environment)
        assert ("\x1b[1m" in shown) == coloured and "returns" in shown, (environment, arguments)
    assert run_here("ls", "--color", "red").code == 2


@pytest.mark.model
def test_quiet(home: Path, skill: Path) -> None:
    """-q: no notice, no hint, no thought; the result and errors are as ever."""
    loud, soft = run_here("ask", "Why?", "-n", 2, "--splice", skill), run_here("ask", "Why?", "-n", 2, "-q")
    assert loud.err.count("\n") == 3 and (soft.code, soft.err) == (0, "") and soft.out.strip()
    assert run_here("ask", "Why?", "-q", "--splice", "nothing").err.startswith("notes: no compiled skill")
    assert run_here("session", "show", "-q", "nobody").err.startswith("notes: there is no session")
    assert run_here("ask", "Why?", "-n", 2).err, "nothing of it is left for the next call"


def test_what_is_refused_is_named(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of a wrong value, where it came from there; a temperature out of its range."""
    assert "--temperature': 5000 is not a number from 0 to 100" in notes("ask", "x", "--temp", 5000).refusal(2)
    monkeypatch.setenv("NOTES_ASK_MAX_TOKENS", "x")
    assert "Invalid value for NOTES_ASK_MAX_TOKENS: 'x' is not" in notes("ask", "x").refusal(2)
    assert "'--n-predict': 'y' is not a whole number" in notes("ask", "x", "-n", "y").refusal(2)


def test_settings_come_from_the_nearest(notes: Notes, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, the variable that is called as it, a setting (test_config.py has more); flags may be settings."""

    def tokens(*arguments: object) -> int:
        return int(notes("ask", "Why?", "--json", *arguments).json["tokens"]["answer"])

    home.mkdir()
    (home / "config.yaml").write_text("max-tokens: 2\n")
    assert tokens() == 2
    monkeypatch.setenv("NOTES_ASK_MAX_TOKENS", "4")
    assert tokens() == 4 and tokens("-n", 5) == 5
    monkeypatch.setenv("NOTES_ASK_MAX_TOKENS", "x")
    assert "'x' is not a whole number" in notes("ask", "Why?").err
    (home / "config.yaml").write_text("json: true\n")
    assert notes("ls").json == [] and notes("session", "show", "nobody").json["error"]["status"] == 1
    (home / "config.yaml").write_text("color: always\n")
    assert "\x1b[1m" in notes("models").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in notes("models").out


def test_another_programs_word_for_a_command() -> None:
    """The command that means it is suggested; status 2."""
    for word, command in SYNONYMS.items():
        assert f"Did you mean {command}?" in run_here(word).refusal(2)
        assert command in COMMANDS and word not in COMMANDS


def test_verbose_tells_of_times_and_twice_of_llama_cpp(notes: Notes, home: Path) -> None:
    """-v: a line with tokens and times; -vv: llama.cpp's log, too. A setting may be true."""
    once, twice = notes("ask", "Why?", "-n", 3, "-v").err, run_apart("ask", "Why?", "-n", 1, "-vv").err
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


ONE = {"errata": "erratum", "fields": "field", "images": "image", "results": "result"}  # a repeatable option is of one
ALIKE = {  # an argument; options each; of Python and HTTP alone
    *("question", "sampling", "conversation", "stops", "likely", "allowed", "call_grammar", "must_call", "tools"),
    "tool_choice",
}


def flags() -> set[str]:
    return {flag.lstrip("-") for one in command_named("ask").params for flag in one.opts}


@pytest.mark.model
def test_keys_are_named_as_their_options() -> None:
    """Python, lines of a batch and HTTP use the command line's name for an option."""
    from notes_cli.runtime.request import Request
    from notes_cli.serve.parsing import NotesParams

    keys = {*(one.name for one in (*fields(Request), *fields(NotesParams))), *KEYS}
    for key in keys - ALIKE - {"id", "cache_salt", "match", "reuse", "ask", "given"}:
        assert ONE.get(key, key).replace("_", "-") in flags(), key


@pytest.mark.model
def test_options_of_a_question_are_those_of_a_request() -> None:
    """Each sets the field of its name, and has its default."""
    from notes_cli.engine.sampler import SamplerOptions
    from notes_cli.runtime.request import Request

    defaults = {one.name: one.default for kind in (Request, SamplerOptions) for one in fields(kind)}
    assert {*(one.name for one in fields(Request))} - ALIKE <= {*QUESTION} <= {*defaults}
    options = {name: make.keywords for name, make in QUESTION.items() if "default" in make.keywords}
    assert len(options) > 5 and {name: defaults[name] for name in options} == {
        name: how["default"] for name, how in options.items()
    }


def test_help_is_what_people_use_and_help_all_the_rest() -> None:
    """Under headings, in all commands alike; neither has what all commands have, nor settings."""
    shown, everything = run_here("ask", "--help").out, run_here("ask", "--help-all").out
    assert re.findall(r"(?m)^([A-Z]\w+):$", shown) == ["Options", "Answer", "Model"]
    assert re.findall(r"(?m)^([A-Z]\w+):$", everything) == ["Options", "Answer", "Splice", "Model"]
    for flag in ("--top-k", "--rope-scaling", "--exact"):
        assert flag not in shown and flag in everything
    assert shown.endswith("\nMore options: notes ask --help-all. For all commands: notes --help\n")
    for words, command in LEAVES.items():
        shown, everything = (run_here(*words, flag).out for flag in ("--help", "--help-all"))
        rare = [one for one in command.params if getattr(one, "rare", False) and not isinstance(one, Setting)]
        assert isinstance(command, Command) and ("--help-all" in shown) == bool(rare) and "--color" not in everything
        assert all(one.opts[-1] in everything for one in rare) and everything.endswith("commands: notes --help\n")
    assert all(flag in run_here("--help").out for flag in ("--quiet", "--color", "--help-all"))


ASK = ("ask", "Why?", "-n", 2)


def test_settings_of_other_commands_are_no_errors(notes: Notes, home: Path) -> None:
    """Other commands ignore them; a section may hold options; _ equals -; YAML's words and numbers are the option's."""
    home.mkdir()
    settings = "top_k: 3\nblocks: headings\nsession: {force: true}\nask: {predict: 2}\n"
    settings += "flash-attn: on\nthink: off\nrope-freq-base: 1e4\njson: yes\n"
    (home / "config.yaml").write_text(settings)
    outcome = notes("ask", "Why?")
    assert (outcome.code, outcome.json["sampling"]["top_k"], outcome.json["tokens"]["answer"]) == (0, 3, 2)
    assert notes("ls", "-q").code == 0


@pytest.fixture
def begun(notes: Notes, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A session `mine`, begun with a model of its own that nothing names any more; its file."""
    path = tmp_path / "my model.gguf"
    shutil.copy(model, path)
    assert notes(*ASK, "--session", "mine", "-m", path, "-ctk", "bf16").code == 0
    monkeypatch.delenv("NOTES_MODEL")
    return path


def test_a_session_remembers_its_model(
    notes: Notes, begun: Path, monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., Path]
) -> None:
    """Model and cache types are the session's, not those of settings; an explicit other model is refused."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model("qwen2")))
    outcome = notes("ask", "And?", "-n", 2, "--session", "mine")
    assert outcome.code == 0, outcome.err
    assert notes("session", "compact", "mine").code == 0
    assert notes("verify", "--session", "mine", "--question", "Why?").code == 0
    refused = notes("ask", "And?", "--session", "mine", "-m", make_model("qwen2"))
    assert refused.code == 1 and f"Its model: {begun}" in refused.err
    refused = notes("ask", "And?", "--session", "mine", "-ctk", "f16")
    assert refused.code == 1 and "bf16/f16" in refused.err


def test_a_session_whose_model_is_another_one_now(notes: Notes, begun: Path, make_model: Callable[..., Path]) -> None:
    """As after an update of the shipped model: an error with advice, and nothing is lost."""
    former = begun.read_bytes()
    shutil.copy(make_model(seed=1), begun)
    refused = notes("ask", "And?", "-n", 2, "--session", "mine")
    assert refused.code == 1 and refused.err.endswith(
        f". {begun} is another model since then: begin another session, or put the former one there\n"
    )
    begun.write_bytes(former)
    assert notes("ask", "And?", "-n", 2, "--session", "mine").code == 0


def test_a_relative_model_is_found_from_anywhere(
    notes: Notes, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ledger keeps where the file is, not how it was named."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(model.parent)
    assert notes(*ASK, "--session", "mine", "-m", model.name).code == 0
    monkeypatch.delenv("NOTES_MODEL")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert notes(*ASK, "--session", "mine").code == 0


@pytest.mark.model
def test_keys_of_a_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable holds a key per line; a line warns if a flag overrides it."""
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr("notes_cli.serve.server.serve", lambda service, *_: found.append(service.options.keys))
    monkeypatch.setenv("NOTES_API_KEY", "correct horse\n\nbattery staple\n")
    assert "NOTES_API_KEY" not in run_here("serve", "--port", 0).err
    assert "NOTES_API_KEY is ignored" in run_here("serve", "--port", 0, "--api-key", "staple").err
    assert found == [("correct horse", "battery staple"), ("staple",)]


def test_what_takes_time_is_shown(model: Path, skill: Path) -> None:
    """On a terminal: loading a large model, and compiling a text on the way."""
    shown = on_a_pty(["ask", "Why?", "-n", 1, "--splice", skill], "import notes_cli.commands.options as o; o.LARGE = 1")
    assert f"loading {model.name}" in shown and "compiling returns" in shown
    assert "loading" not in on_a_terminal(["ask", "Why?", "-n", "1"])
