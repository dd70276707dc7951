"""Marks tests by folder, file and the helpers and fixtures that they use; `make quick` runs those without a marker.

A test is `model` if importing its file loads llama.cpp, or if it writes or loads a model; `zoo` if it reads build/zoo;
`process` if it starts a process or a server. Calls of helpers and fixtures are followed by the names in their code.
A test without a marker runs without a build of llama.cpp, and `unmarked` fails it where it starts a process.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
NATIVE = ROOT / "notes_cli" / "engine" / "native.py"
MARKERS = ("model", "zoo", "process", "pages", "bench")
QUICK = " and ".join(f"not {marker}" for marker in MARKERS)  # the expression that `make quick` passes as -m
FOLDERS = {"engine": ["model"], "editing": ["model"], "serve": ["model", "process"], "bench": ["bench"]}
FILES = {"test_pages.py": ["pages", "process"], "serve/test_document.py": ["pages"]}
LOAD_IT_LATER = ("test_python.py", "commands/test_begin.py")
FILES |= {name: ["model"] for name in LOAD_IT_LATER}  # they load llama.cpp in a test
NAMES = {
    "model": {"make_model", "write_model", "smollm2", "shipped_model", "notes_cli.lib"},
    "zoo": {"load_zoo", "zoo_model", "WILD", "SOURCES", "GRAMMARS", "LLAMA_CPP"},
    "process": {"Popen", "subprocess", "forkpty"},
}


@cache
def loads_llama(path: Path) -> bool:
    """True if importing this file of the package or of the tests loads llama.cpp."""
    if path == NATIVE:
        return True
    modules: list[tuple[Path, str]] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            modules += [(base, one.name) for base in (ROOT, TESTS, TESTS / "engine") for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            bases = [path.parents[node.level - 1]] if node.level else [ROOT, TESTS, TESTS / "engine"]
            names = [node.module or "", *(f"{node.module or ''}.{one.name}".strip(".") for one in node.names)]
            modules += [(base, name) for base in bases for name in names if name]
    files = [(base / name.replace(".", "/")).with_suffix(".py") for base, name in modules]
    return any(file.exists() and file != path and loads_llama(file) for file in files)


def ours(function: Any) -> bool:
    """True for functions of the tests, but for those here."""
    return (
        isinstance(function, FunctionType)
        and Path(function.__code__.co_filename).is_relative_to(TESTS)
        and function.__module__ != __name__
    )


@cache
def names_used(function: FunctionType) -> frozenset[str]:
    """Names in the code of a test or fixture, and in that of the helpers of the tests that it calls."""
    found: set[str] = set()
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop()
        seen.add(one)
        codes = [one.__code__]
        while codes:
            code = codes.pop()
            found |= {*code.co_names}
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in {*found} & one.__globals__.keys():
            used = one.__globals__[name]
            parts = [*vars(used).values()] if isinstance(used, type) else [used]
            for part in parts:
                part = getattr(part, "__wrapped__", part)
                if ours(part) and part not in seen:
                    waiting.append(part)
    return frozenset(found)


def markers_of(item: pytest.Function) -> set[str]:
    """Return the markers of a test, from its folder and the names that it uses."""
    path = item.path.relative_to(TESTS)
    found = {*FOLDERS.get(path.parts[0], ()), *FILES.get(path.as_posix(), ())}
    found |= {"model"} if loads_llama(item.path) else set()
    fixtures: dict[str, Any] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    functions = [item.function, *(one.func for definitions in fixtures.values() for one in definitions)]
    names = {*item.fixturenames}
    for function in functions:
        function = getattr(function, "__wrapped__", function)
        if ours(function):
            names |= names_used(function)
    return found | {marker for marker, used in NAMES.items() if names & used}


def skipped_when_quick(path: Path) -> bool:
    """True for files and folders that have no quick test; importing them may need llama.cpp."""
    if TESTS not in path.parents:
        return False
    name = path.relative_to(TESTS)
    return bool(FOLDERS.get(name.parts[0]) or name.as_posix() in FILES or (path.suffix == ".py" and loads_llama(path)))


@contextmanager
def unmarked(name: str) -> Iterator[None]:
    """Fail a test that starts a process, except the one in which chat templates are rendered."""
    start = subprocess.Popen.__init__

    def checked(process: Any, args: Any, *more: Any, **options: Any) -> None:
        if "notes_cli.text.rendering" not in str(args):
            pytest.fail(f"{name} starts a process: mark it with @pytest.mark.process")
        start(process, args, *more, **options)

    with patch.object(subprocess.Popen, "__init__", checked):
        yield
