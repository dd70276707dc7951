"""Rules of the code base (layers, imports, docstrings, options in docs), and that each check finds a violation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import click
import markers
import pytest

import notes_cli
from bench import counts
from notes_cli.cli import cli

from .refused import FLAG

PACKAGE = Path(notes_cli.__file__).parent
ROOT = PACKAGE.parent
PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "LOG.md")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"docs/{page}" for page in PAGES))

# Folders and modules from top to bottom: each imports itself and lower levels only.
# "" is `notes_cli` itself, of which all may know the version; `lib` is made by the build.
LEVELS = (
    *("__main__", "cli", "commands", "serve", "explanations output signals", "", "api", "measure", "sessions"),
    "runtime",
)
LEVELS += ("editing library", "text engine", "config", "documents images guidance", "errors lib")

# Who alone may import these: paths are handed in below `runtime`, and bindings stay in the engine.
ONLY = {
    "notes_cli.lib": {"engine"},
    "ctypes": {"engine"},
    "notes_cli.engine.native": {"engine"},
    "notes_cli.config": {"", "cli", "commands", "api", "measure", "runtime", "text"},
    "click": {"cli", "commands", "output"},
    "jinja2": {"text"},
    "yaml": {"documents"},
    "PIL": {"images"},
    "llguidance": {"guidance", "engine"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "prometheus_client": {"serve"},
    "httpx": {"serve"},
}

# The command line, and files with flags of pip or sentences that an earlier version wrote into sessions.
MAY_NAME_FLAGS = {"cli.py", "output.py", "explanations.py", "engine/native.py", "sessions/state.py"}

# Modules that must not import llama.cpp, besides all of `text`.
PURE = ("engine.positions", "engine.pieces", "sessions.state")
PURE += ("engine.header", "library.segment_files", "library.models", "runtime.naming")


parsed = cache(ast.parse)


def sources(package: Path) -> Iterator[tuple[str, ast.Module]]:
    """The modules of a package: path and syntax tree."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), parsed(path.read_text(encoding="utf-8"))


def room(path: str) -> str:
    """Which part of the house a file is in: a folder, or a module at the top."""
    return path.split("/")[0].removesuffix(".py").replace("__init__", "")


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports anywhere: in functions, for type checkers, and by name in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else node.args[:1]
            yield str(parts[0].value).rstrip(".") if isinstance(parts[0], ast.Constant) else "?"


def misplaced(package: Path) -> list[str]:
    """Imports of the package's own modules that do not point down."""
    level = {name: depth for depth, names in enumerate(LEVELS) for name in names.split(" ")}
    found = []
    for path, tree in sources(package):
        if room(path) not in level:
            found.append(f"{path}: no room of the house")
            continue
        for name in imports(tree):
            first, _, rest = name.partition(".")
            if first in ("", "?"):  # relative, or of unknown name
                found.append(f"{path}: {name}")
            if first != "notes_cli" or rest in ("", "__version__"):
                continue
            part = rest.split(".")[0]
            target = part if part in level else ""
            if room(path) != target and not level[room(path)] < level[target]:
                found.append(f"{path}: {name}")
    return found


def foreign(package: Path) -> list[str]:
    """Return imports of packages that are reserved to other folders."""
    return [
        f"{path}: {name}"
        for path, tree in sources(package)
        for name in imports(tree)
        for owned, rooms in ONLY.items()
        if f"{name}.".startswith(f"{owned}.") and room(path) not in rooms
    ]


def flags(package: Path) -> list[str]:
    """Texts below the edge that name a flag or a command of `notes`; docstrings may."""
    found = []
    for path, tree in sources(package):
        nodes = list(ast.walk(tree))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [
            n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
        ]
        if room(path) != "commands" and path not in MAY_NAME_FLAGS:
            found += [f"{path}: {text}" for text in texts if FLAG.search(text)]
    return found


def jobless(folder: Path) -> list[str]:
    """Return modules whose docstring does not begin with a line that is a sentence."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    said = re.compile(r'(#.*\n)*"""\S+ .+[.?!]("""|\n)')
    return [path.relative_to(folder).as_posix() for path, text in texts.items() if text and not said.match(text)]


def options(command: click.Command) -> Iterator[str]:
    """All options of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child
            yield from options(child)


def unknown(root: Path) -> list[str]:
    """Return options of `notes` in documents that do not exist."""
    known = {*options(cli), "--help", "--version"}
    found = []
    for document in DOCUMENTS:
        text = (root / document).read_text(encoding="utf-8") if (root / document).is_file() else ""
        code = re.findall(r"`(notes [^`]*|--[^`]*)`", text) + re.findall(r"^ *(?:\$ )?(notes [^#\n]*)", text, re.M)
        named = {option for line in code for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)}
        found += [f"{document}: {option}" for option in sorted(named - known)]
    return found


def missing(root: Path) -> list[str]:
    """Return files and folders in CONTRIBUTING that do not exist."""
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[\w./-]*)", text) + re.findall(r"^([a-z_]+/[\w./-]*) ", text, re.M)
    named = [name for name in named if not name.startswith("build/")]
    return [name for name in named if not any((base / name).exists() for base in (root, root / "notes_cli"))]


def unquoted(makefile: str) -> list[str]:
    """Lines in which the folder of the project is a word of a command without quotes, or of a variable that is used so:
    it may have a space."""
    return [
        line
        for line in makefile.splitlines()
        if "$(CURDIR)" in re.sub(r'"[^"]*"', "", line) or "$(PWD)" in line or "abspath" in line
    ]


RULES = [(misplaced, PACKAGE), (foreign, PACKAGE), (flags, PACKAGE), (unknown, ROOT), (missing, ROOT)]
RULES += [(jobless, ROOT / folder) for folder in ("notes_cli", "native", "bench", "training", "tests")]


@pytest.mark.parametrize(("rule", "folder"), RULES)
def test_the_house_keeps_the_rule(rule: Callable[[Path], list[str]], folder: Path) -> None:
    assert rule(folder) == []
    assert all((ROOT / document).is_file() for document in DOCUMENTS)


def test_a_folder_with_a_space() -> None:
    assert unquoted((ROOT / "Makefile").read_text(encoding="utf-8")) == []
    assert unquoted('BIN := $(CURDIR)/x\n\t@PATH="$(CURDIR)/$(BIN):$$PATH" go\n') == ["BIN := $(CURDIR)/x"]


def loaded(modules: list[str]) -> set[str]:
    """The packages that a process has loaded after importing these modules, and modules of ours."""
    script = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_pure_modules_load_no_engine() -> None:
    pure = [*PURE, *(f"text.{path.stem}" for path in (PACKAGE / "text").glob("[a-z]*.py"))]
    assert not loaded([f"notes_cli.{name}" for name in pure]) & {"notes_cli.lib", "click"}
    assert "notes_cli.lib" in loaded(["notes_cli.engine.context"])


BROKEN: list[tuple[Callable[[Path], list[str]], str, str, str]] = [
    (misplaced, "engine/a.py", "from notes_cli.text.b import c", "notes_cli.text.b.c"),
    (misplaced, "library/a.py", "def f():\n    import notes_cli.editing.b", "notes_cli.editing.b"),
    (misplaced, "editing/a.py", "if TYPE_CHECKING:\n    from notes_cli import commands", "notes_cli.commands"),
    (misplaced, "runtime/a.py", "from notes_cli import KVSequence", "notes_cli.KVSequence"),
    (misplaced, "runtime/a.py", "importlib.import_module(f'notes_cli.sessions.{b}')", "notes_cli.sessions"),
    (misplaced, "runtime/a.py", "from importlib import import_module\nimport_module(b)", "?"),
    (misplaced, "sessions/a.py", "from ..measure import b", "..measure.b"),
    (misplaced, "measure/a.py", "from notes_cli.output import say", "notes_cli.output.say"),
    (misplaced, "helpers/a.py", "A = 1", "no room of the house"),
    (foreign, "commands/a.py", "from notes_cli.engine import native", "notes_cli.engine.native"),
    (foreign, "commands/a.py", "def f():\n    import ctypes", "ctypes"),
    (foreign, "runtime/a.py", "import_module('notes_cli.lib.llama_cpp')", "notes_cli.lib.llama_cpp"),
    (foreign, "engine/a.py", "from notes_cli.config import paths", "notes_cli.config.paths"),
    (foreign, "runtime/a.py", "import click", "click"),
    (flags, "runtime/a.py", "def f(n):\n    return f'{n}. Give it -c {n}'", ". Give it -c "),
    (flags, "text/a.py", "raise NotesError('no. See: notes ls')", "no. See: notes ls"),
]


@pytest.mark.parametrize(("rule", "path", "source", "named"), BROKEN)
def test_a_package_that_breaks_a_rule(
    tmp_path: Path, rule: Callable[[Path], list[str]], path: str, source: str, named: str
) -> None:
    """One bad file among good ones is reported, with the violation."""
    good = {
        "commands/good.py": "from notes_cli.engine.b import c\nfrom notes_cli import output\nUSE = '--strict'",
        "runtime/good.py": '"""Says -c."""\nimport notes_cli\nfrom notes_cli.library.b import c',
        "engine/good.py": "import ctypes\nfrom notes_cli.engine import native\nA = 'a-b'",
    }
    for name in ("measure", "sessions", "editing", "library", "text", "helpers", *good):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name not in good else (tmp_path / name).write_text(good[name])
    (tmp_path / "output.py").touch()
    assert rule(tmp_path) == []
    (tmp_path / path).write_text(source)
    assert rule(tmp_path) == [f"{path}: {named}"]


def test_files_and_documents_that_break_a_rule(tmp_path: Path) -> None:
    for name, source in (("none.py", "A = 1"), ("word.py", '"""Helpers."""'), ("good.py", '"""Reads a file."""')):
        (tmp_path / name).write_text(source)
    assert jobless(tmp_path) == ["none.py", "word.py"]
    (tmp_path / "CONTRIBUTING.md").write_text(
        "`tests/none.py`, `none.py`, `build/x`\n\n    notes ask --nowhere --json\n"
    )
    assert missing(tmp_path) == ["tests/none.py"]
    assert unknown(tmp_path) == ["CONTRIBUTING.md: --nowhere"]


def test_texts_and_files_are_tested_without_llama_cpp() -> None:
    """Almost all files of these folders are quick; a file that loads llama.cpp is left out of `make quick`."""
    files = [path for name in ("text", "library") for path in (ROOT / "tests" / name).glob("test_*.py")]
    slow = sorted(path.name for path in files if markers.skipped_when_quick(path))
    assert slow == ["test_histories.py", "test_quantized.py", "test_reasoning.py", "test_stored.py"]
    assert f'-m "{markers.QUICK}"' in (ROOT / "Makefile").read_text(encoding="utf-8"), "by which llama.cpp is hidden"


HELPERS: list[tuple[str, str, set[str]]] = [
    ("import subprocess\ndef helper(): subprocess.run(['true'])", "helper()", {"process"}),
    ("import pty, os\nclass Helper:\n    def start(self): return os.forkpty()", "Helper().start()", {"process"}),
    ("", "(lambda: zoo_model('x'))()", {"zoo"}),
    ("from notes_cli.engine.model import Model", "pass", {"model"}),
    ("from notes_cli.text.skill import Skill", "pass", set()),
]


@pytest.mark.parametrize(("helper", "body", "found"), HELPERS)
def test_markers_follow_helpers(tmp_path: Path, helper: str, body: str, found: set[str]) -> None:
    """A test gets the markers of the helpers that it calls, also in a class, a helper or a lambda."""
    path = tmp_path / "test_it.py"
    path.write_text(f"{helper}\ndef test_it(): {body}\n")
    names: dict[str, object] = {"__name__": "test_it"}
    with patch.object(markers, "TESTS", tmp_path):
        if "engine" not in helper:
            exec(compile(path.read_text(), path, "exec"), names)
            used = markers.names_used(names["test_it"])  # type: ignore[arg-type]
            assert {marker for marker, some in markers.NAMES.items() if some & used} == found
        assert markers.loads_llama(path) is ("model" in found)


@pytest.mark.process  # runs git ls-files
def test_counts_only_go_down() -> None:
    """Where a count has gone down, its limit in bench/counts.py follows."""
    found = counts.counted()
    assert {name: count for name, count in found.items() if count > counts.LIMITS[name].limit} == {}
    assert {*found, *counts.ENTERED} == {*counts.LIMITS} and found["package lines"] > 0


def test_what_is_counted(tmp_path: Path) -> None:
    """Circles, also for type checkers and in functions, and stilted phrases, also in comments of several lines."""
    package = tmp_path / "package"
    package.mkdir()
    for name, source in {
        "a": "from package.b import x",
        "b": "def f():\n    import package.c",
        "c": "if TYPE_CHECKING:\n    from package import a",
        "d": "from package import a",
    }.items():
        (package / f"{name}.py").write_text(source)
    assert counts.circles(package) == [["package.a", "package.b", "package.c"]]
    good = '"""Reads a file."""\n# It is read\n# once.\nx = "told"  # of bytes\n'
    assert list(counts.remarks(good)) == ["Reads a file.", "It is read once.", "of bytes"] and not counts.stilted(
        counts.remarks(good)
    )
    bad = '"""What a file is."""\n# Nobody\n# is told.\ndef f():\n    """Whether it is."""\n    # what it was\n'
    assert len(counts.stilted(counts.remarks(bad))) == len(list(counts.remarks(bad))) == 4
