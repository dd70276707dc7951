"""Costs of commands as counts: modules, tokens decoded, bytes read and written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import notes_cli as notes
from bench import counts
from notes_cli.engine import native
from notes_cli.engine.limits import ContextOptions
from notes_cli.runtime.assemble import APART

from .conftest import TEXT, run_here

# Packages that `notes --help` and an answer import; each costs milliseconds, or seconds, before the first token.
HELP = {"notes_cli", "click"}
ASK = HELP | {"numpy", "xxhash"}
ALL = {"--help": 145, "ask": 315}  # including Python's, whose number varies by tens between versions
# Modules that an answer from a compiled skill does not need, with their import times.
UNUSED = {
    *(f"notes_cli.runtime.{name}" for name in ("compile", "recompile", "batch")),
    *(f"notes_cli.library.{name}" for name in ("tidy", "models")),
    *(f"notes_cli.text.{name}" for name in ("tools", "schema", "grammar")),
    *("notes_cli.documents", "notes_cli.commands.remedies", "notes_cli.engine.vision"),
    *("llguidance", "platformdirs", "jinja2", "logging", "socket", "multiprocessing", "asyncio"),
    *("secrets", "tempfile", "gguf", "yaml"),
    *(f"numpy.{name}" for name in ("ctypeslib", "ma", "random", "fft", "testing")),
}

LOADED = """
import json, sys
from notes_cli.cli import run
run(sys.argv[1:])
read = [line for line in open("/proc/self/io") if line.startswith("rchar")] if sys.platform == "linux" else ["r 0"]
print(json.dumps([sorted(sys.modules), int(read[0].split()[1])]), file=sys.stderr)
"""


def started(*arguments: object) -> tuple[set[str], int]:
    """The modules that a command has loaded in a process of its own, and the bytes that it has asked the system for."""
    command = [sys.executable, "-c", LOADED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    modules, read = json.loads(done.stderr.splitlines()[-1])
    return set(modules), read


def foreign(modules: set[str]) -> set[str]:
    """Packages that are neither Python's own nor helpers of the installation."""
    first = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    return {name for name in first if not name.startswith("_") and "cython" not in name}


@pytest.mark.parametrize(("command", "packages"), [("--help", HELP), ("ask", ASK)])
def test_little_is_imported(
    command: str, packages: set[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits on packages and modules: others are imported where they are used."""
    if sys.platform == "linux":  # elsewhere the folders of the system are asked of a package
        for name in ("NOTES_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
    arguments = ["--help"]
    if command == "ask":
        (tmp_path / "skill.txt").write_text(TEXT)
        assert run_here("compile", tmp_path / "skill.txt").code == 0
        arguments = ["ask", "May I?", "--splice", "skill", "--erratum", "date=2026-07-01", "-n", "2", "--server", "off"]
        assert run_here(*arguments).code == 0  # cached from then on
    modules, _ = started(*arguments)
    more = foreign(modules) - packages
    assert not more, f"notes {command} now loads {', '.join(sorted(more))}"
    assert len(modules) <= ALL[command], f"notes {command} loads {len(modules)} modules"
    unused = modules & UNUSED
    assert not unused, f"notes {command} loads {', '.join(sorted(unused))}"


def test_templates_wait_for_no_import() -> None:
    """The process that renders them imports jinja2 before it reads the first one."""
    code = "import sys; from notes_cli.text.rendering import serve; serve(); print('jinja2.sandbox' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout == "True\n"


def test_settings_load_no_other_commands(model: Path, home: Path) -> None:
    """With a config.yaml, only the running command is imported, and those with sections in it."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.yaml").write_text("temp: 0\nserve: {port: 9000}\nmodels: {}\n")
    modules, _ = started("ask", "May I?", "-n", "1", "--server", "off")
    commands = {name for name in modules if name.startswith("notes_cli.commands.")}
    assert {"notes_cli.commands.ask", "notes_cli.commands.serve"} <= commands
    assert not commands & {f"notes_cli.commands.{name}" for name in ("compile", "verify", "session", "setup")}


def test_an_answer_uses_few_types_and_lines() -> None:
    """A question and a turn of a session, with a skill and an erratum, and a chat, on the model that ships."""
    for name, count in counts.entered().items():
        limit = counts.LIMITS[name].limit
        assert 0 < count <= limit, f"{name}: {count:g}, at most {limit:g}"


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's counters")
def test_the_model_is_hashed_once(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And then never read again, only mapped: of a large one that would be seconds before the first token."""
    path = make_model("qwen3", embd=1024, heads=32, kv_heads=32)
    size = path.stat().st_size
    assert size > 30e6
    os.utime(path, (1.7e9, 1.7e9))  # a file written just now is not cached, as it may still change
    monkeypatch.setenv("NOTES_MODEL", str(path))
    (tmp_path / "skill.txt").write_text(TEXT)
    asked = ["May I?", "--splice", "skill", "-n", "2", "--server", "off"]
    first = started("compile", tmp_path / "skill.txt")[1]
    again = started("ask", *asked)[1]
    assert first > size, "the control: it is hashed there"
    assert again < 12e6, f"{again} bytes were read for an answer; the model has {size}, the rest is modules"


class Counted:
    """Tokens that the library's hooks were to decode, passes over the weights, and bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = self.rewritten = self.passes = 0
        self._traffic = native.traffic()
        hook = native._hook

        def counting(name: str, arguments: tuple[Any, ...]) -> Any:
            if name == "notes_append":
                self.decoded += sum(arguments[2][: arguments[4]])
            self.rewritten += arguments[4] if name == "notes_rewrite" else 0
            self.passes += name in ("notes_append", "notes_rewrite")
            return hook(name, arguments)

        monkeypatch.setattr(native, "_hook", counting)

    def clear(self) -> None:
        self.decoded = self.rewritten = self.passes = 0
        self._traffic = native.traffic()

    @property
    def traffic(self) -> tuple[int, int]:
        read, written, _ = (now - then for now, then in zip(native.traffic(), self._traffic, strict=True))
        return read, written


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture
def opened(model: Path, home: Path, tmp_path: Path) -> Iterator[notes.Model]:
    with notes.open(model, ContextOptions(n_ctx=1024, n_threads=1)) as found:
        (tmp_path / "skill.txt").write_text(TEXT)
        found.compile(tmp_path / "skill.txt")
        yield found


LIMIT = 5  # tokens of an answer


@pytest.mark.parametrize("errata", [[], ["date=2026-07-01"]])
def test_an_answer_decodes_what_is_new(opened: notes.Model, counted: Counted, errata: list[str]) -> None:
    """Only the seam of a spliced skill is decoded: its K/V comes from the file, each byte once, in one call."""
    plain = opened.ask("May I?", splice=["skill"], max_tokens=LIMIT, recompute=True)
    assert counted.decoded == plain.counts.total + LIMIT
    assert counted.traffic == (0, 0)

    counted.clear()
    found = opened.ask("May I?", splice=["skill"], errata=errata, max_tokens=LIMIT, method="erratum")
    counts, segment = found.counts, opened.segment("skill")
    assert counts.spliced == len(segment) - counts.seam > 50
    between = found.pieces[-2].tokens - plain.pieces[-2].tokens if errata else 0  # the empty line before the question
    opening = sum(piece.tokens for piece in found.pieces[2:-3])  # of the user's message, before the erratum
    assert counts.total == plain.counts.total + counts.erratum + between + opening
    assert bool(counts.erratum) == bool(errata)
    assert counted.decoded + counted.rewritten == counts.total - counts.spliced + LIMIT
    apart = counts.erratum > APART  # from the question, as many tokens take as long
    assert counted.passes == 2 + apart + LIMIT, "over the weights: before and after the skill, one for each token"
    row = segment.nbytes // (len(segment) + segment.base - segment.first)
    assert counted.traffic == (segment.nbytes, row * counts.spliced)


@pytest.mark.parametrize(("method", "rewritten"), [("field", 10), ("erratum", 0)])
def test_an_edit_of_a_session_decodes_what_changed(
    opened: notes.Model, counted: Counted, method: str, rewritten: int
) -> None:
    """In place: the tokens of the field and no more. By an erratum: its text, and the next answer's question."""
    with opened.session("talk") as session:
        first = session.ask("May I?", splice=["skill"], max_tokens=LIMIT)
        counted.clear()
        session.edit("date", "2026-07-01", method=method)
        assert (counted.rewritten, counted.traffic) == (rewritten, (0, 0))
        second = session.ask("And now?", max_tokens=LIMIT)
        # The prompt has grown by the first answer as well, which is there, and the second one comes, as long.
        assert counted.decoded == second.counts.total - first.counts.total, "what was there is not decoded again"
        assert counted.traffic == (0, 0)
