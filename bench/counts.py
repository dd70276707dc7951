"""Count lines, files, options, types and lines that a question uses, import circles and stilted phrases.

    python -m bench.counts [--entered] [--list]

Each count has a limit, which is the value of today and may only go down, and a goal. `--entered` runs a question, a
turn of a session and a chat over HTTP on the model that ships, which needs llama.cpp; types are those that pass as
argument or result of a function of the package (bench/traced.py). tests/test_house.py and tests/commands/test_counts.py
hold the limits.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import socket
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click

from notes_cli.cli import COMMANDS, command_named
from notes_cli.commands.terminal import Command

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "notes_cli"
SCALE = 1024  # bytes in a KB


class Bound(NamedTuple):
    """The most that a count may be, and the most that it should be."""

    limit: float
    goal: float


LIMITS = {
    "package lines": Bound(38_900, 32_500),
    "package files": Bound(132, 130),
    "test lines": Bound(36_580, 29_500),
    "bench and training lines": Bound(16_040, 16_500),
    "docs lines": Bound(4_000, 4_000),
    "commands": Bound(19, 21),
    "lines of options": Bound(269, 260),
    "stored results in KB": Bound(97, 200),
    "modules in import circles": Bound(0, 0),
    "stilted docstrings and comments in %": Bound(1, 2),
    "types in a question": Bound(60, 65),
    "types in a session's turn": Bound(75, 75),
    "types in a chat": Bound(62, 60),
    "lines executed by a question": Bound(2_585, 2_000),
    "functions of 3 statements in a question": Bound(338, 260),
    "modules imported by ask": Bound(59, 60),
}
ENTERED = tuple(name for name in LIMITS if re.search("types|executed|functions|modules imported", name))
MODEL = str(PACKAGE / "models" / "notes-tiny-q8_0.gguf")
SKILL = "# Returns\n\ndate: 2026-06-01\n\nReturns before 2026-06-15 are accepted.\n"
ASK = ["ask", "May I?", "-n", "2", "--server", "off", "--erratum", "date=2026-07-01"]

STILTED = re.compile(
    r"\A(?:what|whether)\b|\b(?:what (?:it|they|he) (?:is|was|are|were|has|had)|told|heard|said|laid|whoever|nobody)\b",
    re.IGNORECASE,
)


def python_files(*folders: str) -> list[Path]:
    """The Python files of these folders, without the binding that the build makes."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "lib" not in path.relative_to(ROOT).parts)


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def stored() -> list[Path]:
    """Files of figures that programs wrote: tracked data in docs/, bench/ and training/."""
    tracked = subprocess.run(["git", "ls-files", "docs", "bench", "training"], cwd=ROOT, capture_output=True, text=True)
    data = (".json", ".jsonl", ".csv", ".txt", ".log", ".tsv")
    return [ROOT / name for name in tracked.stdout.splitlines() if name.endswith(data) and (ROOT / name).exists()]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module with all of its statements, at any depth: a tenth of the nodes of `ast.walk`."""
    yield node
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(part)


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere: at the top, in functions, for type checkers."""
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def circles(package: Path) -> list[list[str]]:
    """Groups of modules of a package that import each other, directly or by others."""
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path
        for path in package.rglob("*.py")
        if path.name != "__init__.py" and "lib" not in path.relative_to(package).parts
    }
    graph = {name: imported(path) & modules.keys() for name, path in modules.items()}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in graph}
    groups = {frozenset({name, *(other for other in reach[name] if name in reach[other])}) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def remarks(source: str) -> Iterator[str]:
    """The docstrings and comments of a file. A comment of several lines is one."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
    block: list[str] = []
    ended = 0  # the line of the last comment that had a line of its own
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            if block and not (alone and token.start[0] == ended + 1):
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            ended = token.start[0] if alone else 0
    if block:
        yield " ".join(block)


def stilted(texts: Iterable[str]) -> list[str]:
    """Those docstrings and comments that have a stilted phrase."""
    return [text for text in texts if STILTED.search(text)]


class Used(NamedTuple):
    """Types, lines and functions (of each file, first line) of the package, and the number of its modules."""

    types: list[str]
    lines: list[tuple[str, int]]
    functions: list[tuple[str, int]]
    modules: int


def traced(folder: Path, *command: str) -> Used:
    """What a command uses (bench/traced.py), with `folder` for its files."""
    environment = {"NOTES_HOME": str(folder), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "NOTES_THREADS": "1"}
    output = folder / "used.json"
    output.unlink(missing_ok=True)
    run = [sys.executable, "-m", "bench.traced", str(output), *command, "-m", MODEL]
    done = subprocess.run(
        run, cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )
    status, *found = json.loads(output.read_text()) if output.exists() else [1]
    if status:
        raise SystemExit(done.stderr)
    return Used(*found)


def big(functions: Iterable[tuple[str, int]]) -> int:
    """How many of these functions have three statements or more."""
    by_file: dict[str, set[int]] = {}
    for path, line in functions:
        by_file.setdefault(path, set()).add(line)
    count = 0
    for path, first_lines in by_file.items():
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                statements = [one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
                docstring = ast.get_docstring(node) is not None
                count += first in first_lines and len(statements) - docstring >= 3
    return count


def entered(*, show: bool = False) -> dict[str, float]:
    """Trace a question, a session's second turn and a chat on the model that ships, the first two with a skill and an
    erratum, and count. `show`: print the types, and the executed lines by file."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        (folder / "returns.txt").write_text(SKILL)
        traced(folder, "compile", str(folder / "returns.txt"))
        for _ in range(2):  # the last one finds all that is remembered
            question = traced(folder, *ASK, "--splice", "returns")
        traced(folder, *ASK[:-2], "--session", "s", "--splice", "returns")
        turn = traced(folder, *ASK, "--session", "s")
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        chat = traced(folder, "--chat", port, "serve", "--port", port)
    if show:
        for way, used in (("a question", question), ("a session's turn", turn), ("a chat", chat)):
            print(f"types in {way}:", *used.types, sep="\n    ")
        for path, count in Counter(path for path, _ in question.lines).most_common():
            print(f"{count} lines of {Path(path).relative_to(PACKAGE)}")
    types = [len(used.types) for used in (question, turn, chat)]
    counts = *types, len(question.lines), big(question.functions), question.modules
    return dict(zip(ENTERED, map(float, counts), strict=True))


def option_lines(command: click.Command) -> int:
    """The options that `--help-all` of a command and of its subcommands lists, an entry each."""
    if isinstance(command, click.Group):
        return sum(map(option_lines, command.commands.values()))
    assert isinstance(command, Command)
    return sum(map(len, command.help_records(click.Context(command), everything=True).values()))


def counted() -> dict[str, float]:
    """All counts that need no llama.cpp."""
    package = python_files("notes_cli")
    files = python_files("notes_cli", "bench", "training", "tests")
    found = [remark for path in files for remark in remarks(path.read_text(encoding="utf-8"))]
    return {
        "package lines": lines(package),
        "package files": len(package),
        "test lines": lines(python_files("tests")),
        "bench and training lines": lines(python_files("bench", "training")),
        "docs lines": lines((ROOT / "docs").rglob("*.md")),
        "commands": len(COMMANDS),
        "lines of options": sum(option_lines(command_named(name)) for name in COMMANDS),
        "stored results in KB": round(sum(path.stat().st_size for path in stored()) / SCALE),
        "modules in import circles": sum(map(len, circles(PACKAGE))),
        "stilted docstrings and comments in %": round(100 * len(stilted(found)) / len(found), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entered", action="store_true", help="count what a question, a turn and a chat use, too")
    parser.add_argument("--list", action="store_true", help="print circles, stilted phrases, types, lines by file")
    options = parser.parse_args()
    found = counted() | (entered(show=options.list) if options.entered else {})
    print(f"{'':40} {'now':>8} {'limit':>8} {'goal':>8}")
    for name, value in found.items():
        print(f"{name:40} {value:>8,g} {LIMITS[name].limit:>8,g} {LIMITS[name].goal:>8,g}")
    if options.list:
        for group in circles(PACKAGE):
            print("circle:", *group)
        for path in python_files("notes_cli"):
            for remark in stilted(remarks(path.read_text(encoding="utf-8"))):
                print(f"{path.relative_to(ROOT)}: {remark.splitlines()[0]}")
    sys.exit(any(value > LIMITS[name].limit for name, value in found.items()))


if __name__ == "__main__":
    main()
