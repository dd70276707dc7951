"""Errors: what happened and what would help are apart, and each edge words the latter."""

from __future__ import annotations

import ast
import pickle
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import notes_cli
from notes_cli.commands.remedies import advice, worded
from notes_cli.errors import EngineError, Help, NotesError, Notice, Remedy

from .refused import FLAG

VALUES: dict[str, Any] = {"tokens": 8192, "scale": 0.5, "options": {"n_ctx": 8192, "influence": True}}


def remedies() -> dict[Help, set[frozenset[str]]]:
    """Of each kind, the names of the values that it is given somewhere in the package."""
    found: dict[Help, set[frozenset[str]]] = {}
    for path in Path(notes_cli.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
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


def test_without_a_remedy_or_with_the_same_for_all() -> None:
    for remedy, text in ((None, "no"), ("Try again", "no. Try again")):
        error = NotesError("no", remedy)
        assert str(error) == worded(error) == text
    assert worded(NotesError("no 'a'. Did you mean b?", Help.LIST_SKILLS())) == "no 'a'. Did you mean b? See: notes ls"


def test_an_error_passes_between_processes() -> None:
    """With its remedy: a template is rendered in another one."""
    error = EngineError("no", Help.LARGER_CONTEXT(tokens=1))
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.what, back.remedy, str(back)) == (EngineError, "no", error.remedy, str(error))


def test_what_is_pasted_is_one_word() -> None:
    name = "a b'; rm -rf /"
    command = advice(Help.COMPILE_OTHERWISE(name=name, options={"blocks": 8, "influence": True}))
    words = shlex.split(command.removeprefix("Run: "))
    assert words == ["notes", "compile", "--from", name, "--blocks", "8", "--influence"]
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


def texts(path: Path) -> Iterator[str]:
    """The texts in a module that are no docstrings; what an f-string is of, in parts."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    docs = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


# What names a flag or a command for other reasons: pip's, and sentences that an earlier version wrote into sessions.
NAMES_THEM = {"engine/native.py", "sessions/origin.py"}


def test_nothing_below_the_commands_names_a_flag() -> None:
    """Only the edge knows what its user can type."""
    root = Path(notes_cli.__path__[0])
    edge = {root / "cli.py", root / "output.py", *(root / "commands").glob("*.py")}
    found = {
        f"{path.relative_to(root)}: {text}"
        for path in root.rglob("*.py")
        if path not in edge and path.relative_to(root).as_posix() not in NAMES_THEM
        for text in texts(path)
        if FLAG.search(text)
    }
    assert not found


def test_the_rule_finds_what_breaks_it(tmp_path: Path) -> None:
    """A flag or a command in a message, and neither in a docstring."""
    path = tmp_path / "bad.py"
    path.write_text('''"""Says -c."""
def f(n):
    """--strict."""
    return f"{n}. Give it -c {n}", "See: notes ls", "a-b"
''')
    assert {text for text in texts(path) if FLAG.search(text)} == {". Give it -c ", "See: notes ls"}
