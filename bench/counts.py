"""Count lines, files, options, functions entered by a question, import circles and stilted phrases, against limits.

    python -m bench.counts [--entered] [--list]

Each count has a limit, which is the value of today and may only go down, and a goal. `--entered` runs a question on the
model that ships, which needs llama.cpp. tests/test_house.py and tests/commands/test_counts.py hold the limits.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
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
    "package lines": Bound(41_195, 29_000),
    "package files": Bound(130, 130),
    "test lines": Bound(36_409, 28_000),
    "bench and training lines": Bound(14_951, 10_000),
    "docs lines": Bound(4_000, 4_000),
    "commands": Bound(19, 19),
    "lines of options": Bound(260, 260),
    "stored results in KB": Bound(91, 200),
    "modules in import circles": Bound(0, 0),
    "stilted docstrings and comments in %": Bound(1, 2),
    "functions entered by ask": Bound(522, 300),
    "files entered by ask": Bound(48, 40),
    "modules imported by ask": Bound(58, 60),
}
ENTERED = tuple(name for name in LIMITS if name.endswith("by ask"))

STILTED = re.compile(
    r"\A(?:what|whether)\b|\b(?:what (?:it|they|he) (?:is|was|are|were|has|had)|told|heard|said|laid|whoever|nobody)\b",
    re.IGNORECASE,
)

# Runs a command in this process and prints, for each function of the package that it enters, file and name.
TRACER = """
import json, sys
root, entered = sys.argv[1], set()
def trace(frame, event, argument):
    code = frame.f_code
    ours = code.co_filename.startswith(root) and "/lib/" not in code.co_filename
    if event == "call" and ours and code.co_flags & 1 and code.co_name[0] != "<":  # no modules, classes, comprehensions
        entered.add((code.co_filename, code.co_name, code.co_firstlineno))
from notes_cli.cli import run
sys.setprofile(trace)
status = run(sys.argv[2:])
sys.setprofile(None)
modules = [name for name in sys.modules if name.partition(".")[0] == "notes_cli"]
print(json.dumps([status, sorted(entered), len(modules)]), file=sys.stderr)
"""


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


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    for node in ast.walk(ast.parse(source)):
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


def entered(*, show: bool = False) -> dict[str, float]:
    """Functions, files and modules of one question with a skill and an erratum, on the model that ships. `show`: print
    the functions of each file, most first."""
    text = "# Returns\n\ndate: 2026-06-01\n\nReturns before 2026-06-15 are accepted.\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "returns.txt").write_text(text)
        environment = {"NOTES_HOME": folder, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "NOTES_THREADS": "1"}
        ask = ["ask", "May I?", "--splice", "returns", "--erratum", "date=2026-07-01", "-n", "2", "--server", "off"]
        model = ["-m", str(PACKAGE / "models" / "notes-tiny-q8_0.gguf")]
        for command in (["compile", f"{folder}/returns.txt"], ask, ask):  # the last one finds all that is remembered
            traced = [sys.executable, "-c", TRACER, str(PACKAGE), *command, *model]
            done = subprocess.run(traced, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            status, functions, modules = json.loads(done.stderr.splitlines()[-1])
            if status:
                raise SystemExit(done.stderr)
    by_file: dict[str, list[str]] = {}
    for path, name, _ in functions:
        by_file.setdefault(path, []).append(name)
    for path, names in sorted(by_file.items(), key=lambda item: -len(item[1])) if show else ():
        print(f"{len(names)} in {Path(path).relative_to(PACKAGE)} ({lines([Path(path)])} lines): {' '.join(names)}")
    return dict(zip(ENTERED, map(float, (len(functions), len(by_file), modules)), strict=True))


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
    parser.add_argument("--entered", action="store_true", help="count what a question enters, too")
    parser.add_argument("--list", action="store_true", help="print circles, stilted phrases, entered functions")
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
