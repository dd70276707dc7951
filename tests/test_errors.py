"""Errors: description and remedy are separate, and each interface words the remedy."""

from __future__ import annotations

import ast
import pickle
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import notes_cli
from notes_cli.commands.remedies import advice, worded
from notes_cli.errors import EngineError, Help, NotesError, Notice, Remedy

from .refused import FLAG

VALUES: dict[str, Any] = {"tokens": 8192, "scale": 0.5, "options": {"n_ctx": 8192, "beyond_trained": True}}


@cache
def remedies() -> dict[Help, set[frozenset[str]]]:
    """Of each kind, the names of the values that it is given somewhere in the package."""
    found: dict[Help, set[frozenset[str]]] = {}
    for path in Path(notes_cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(text)) if "Help." in (text := path.read_text()) else ():
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "Help":
                assert isinstance(node, ast.Call) and not node.args
                names = frozenset(keyword.arg or "**" for keyword in node.keywords)
                found.setdefault(Help[called.attr], set()).add(names)
    return found


def test_a_remedy_is_worded_by_the_edge() -> None:
    """The same error in Python and on the command line; the text of neither is in the error."""
    error = EngineError("the context is full", Help.LARGER_CONTEXT(tokens=8192))
    assert error.what == "the context is full" and error.remedy == Help.LARGER_CONTEXT(tokens=8192)
    assert str(error) == "the context is full. Give it a context of 8,192 tokens or more"
    assert worded(error) == "the context is full. Give it -c 8192 or more"
    assert worded(Notice("it is full", error.remedy)) == "it is full. Give it -c 8192 or more"
    back = pickle.loads(pickle.dumps(error))  # it passes between processes
    assert (type(back), back.what, back.remedy, str(back)) == (EngineError, error.what, error.remedy, str(error))
    for remedy, text in ((None, "no"), ("Try again", "no. Try again")):
        plain = NotesError("no", remedy)
        assert str(plain) == worded(plain) == text
    assert worded(NotesError("no 'a'. Did you mean b?", Help.LIST_SKILLS())) == "no 'a'. Did you mean b? See: notes ls"


def test_what_is_pasted_is_one_word() -> None:
    name = "a b'; rm -rf /"
    command = advice(Help.COMPILE_AGAIN(name=name, model="m.gguf", options={"n_ctx": 8, "beyond_trained": True}))
    words = shlex.split(command.removeprefix("Run: "))
    assert words == ["notes", "compile", "--from", name, "-m", "m.gguf", "-c", "8", "--beyond-trained"]
    assert shlex.split(advice(Help.UNDO(name=name)).rpartition(": ")[2])[-1] == name
    assert shlex.split(advice(Help.CLOSE_FOLDERS(folders=["a b", "c"])).rpartition(": ")[2])[-2:] == ["a b", "c"]


@pytest.mark.parametrize("kind", Help)
def test_words_are_there_for_every_remedy(kind: Help) -> None:
    """Given the same values everywhere, worded with these by all, and neutral where no edge is meant."""
    given = remedies().get(kind, set())
    assert len(given) == 1, f"{kind} is given {given}"
    for names in given:
        remedy = Remedy(kind, {name: VALUES.get(name, "x y") for name in names})
        assert advice(remedy) and "{" not in advice(remedy)
        assert not FLAG.search(str(remedy)), remedy
    assert not FLAG.search(kind.value)
