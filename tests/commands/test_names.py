"""One word for one thing: on the command line, in config.yaml, in lines of a batch and in Python."""

from __future__ import annotations

import re
from dataclasses import fields

import click
import pytest

from notes_cli.cli import COMMANDS, command_named
from notes_cli.commands.ask import GROUPS
from notes_cli.commands.batch import KEYS
from notes_cli.runtime.request import Request
from notes_cli.serve.parsing import NotesParams

from .conftest import run_here

ONE = {"errata": "erratum", "fields": "field", "images": "image", "results": "result"}  # a repeatable option is of one
ALIKE = {"question", "sampling"}  # an argument; options each


def flags() -> set[str]:
    return {flag.lstrip("-") for one in command_named("ask").params for flag in one.opts}


@pytest.mark.parametrize(
    "key", [*(one.name for one in fields(Request)), *KEYS, *(one.name for one in fields(NotesParams))]
)
def test_a_key_is_named_as_its_option(key: str) -> None:
    """Python, lines of a batch and HTTP use the command line's name for an option."""
    if key not in ALIKE | {"id", "cache_salt", "match", "ask"}:
        assert ONE.get(key, key).replace("_", "-") in flags()


def test_help_has_its_options_in_groups() -> None:
    """All options of `notes ask` in one group each, those that few need last."""
    command = command_named("ask")
    named = [name for names in GROUPS.values() for name in names]
    options = {one.name for one in command.params if isinstance(one, click.Option)} | {"help"}
    assert sorted(named) == sorted(options)
    shown = run_here("ask", "--help").out
    headings = re.findall(r"(?m)^([A-Z]\w+):$", shown)
    assert headings == ["Question", "Corrections", "Answer", "Output", "Model", "Expert"]
    assert "--seam" in shown.partition("\nExpert:")[2] and "--erratum" in shown.partition("\nAnswer:")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal(name: str) -> None:
    assert all(len(line) <= 80 for line in run_here(name, "--help").out.splitlines())
