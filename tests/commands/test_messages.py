"""Outputs in full: messages of refusals in tests/messages.yaml, and a first day and a first hour with notes.

Other tests assert the kind of error and a keyword. messages.yaml has a line for each refusal: what is typed, or the
settings, text or line of a batch, and the message. `MESSAGES=write pytest tests/commands/test_messages.py` writes the
current messages into it, for review as a diff; `NEWCOMER=FOLDER` writes the actual outputs of the steps.

Each step of newcomer.txt and newcomer-smollm2.txt is a command as typed, with `! ` before lines on stderr, `> ` before
lines on stdout, and `[1]` for an exit status other than 0. {n} matches a number, {id} letters and digits, {*} anything
in a line, two blanks any number of them, and a line `> ...` any lines. Nothing else may be printed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import ABSENT

from .conftest import TEXT, Notes, Outcome, run_here, snapshot, without_uses

FILE = Path(__file__).parents[1] / "messages.yaml"
KEPT: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))


def kept(home: Path) -> dict[str, bytes]:
    """The files of a user: neither locks nor memories of templates and digests."""
    passing = (".lock", "digests.json")
    return {name: data for name, data in without_uses(snapshot(home)).items() if not name.endswith(passing)}


Check = Callable[..., str]


@pytest.fixture
def check(notes: Notes, model: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run a line in a folder of its own: one line, nothing on stdout, and all files as they were."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "returns.txt").write_text(TEXT)

    def checked(line: str, says: str, status: int = 1) -> str:
        """Return the message, which is the kept one unless messages are written."""
        before = kept(home) if home.exists() else None
        shown = notes(*shlex.split(line)).refusal(status).rstrip("\n")
        for place, name in ((folder, "here"), (home, "home"), (model, "model")):
            shown = shown.replace(str(place), f"<{name}>")
        assert shown == says or "MESSAGES" in os.environ, line
        assert shown.startswith("notes: ") and (kept(home) if home.exists() else None) == before, line
        return shown

    return checked


class Dumper(yaml.SafeDumper):
    """Writes each text in one line."""


Dumper.add_representer(
    str, lambda to, text: to.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)
)


@contextmanager
def written_at_the_end() -> Iterator[None]:
    try:
        yield
    finally:
        if "MESSAGES" in os.environ:
            written = yaml.dump(KEPT, Dumper=Dumper, width=1000, sort_keys=False, allow_unicode=True)
            FILE.write_text(written, encoding="utf-8")


def test_wrong_usage(check: Check, home: Path) -> None:
    """Exit 2 with advice or the help page to read; no file is created."""
    usage = KEPT["usage"]
    with written_at_the_end():
        for line in usage:
            usage[line] = check(line, usage[line], 2)
            assert not home.exists(), line


def test_what_is_refused(check: Check, notes: Notes) -> None:
    """With a skill `returns` in the library and a session `mine` of one turn, which stay as they are."""
    assert notes("compile", "returns.txt").code == 0
    assert notes("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 2).code == 0
    with written_at_the_end():
        for status, refusals in ((1, KEPT["refusals"]), (2, KEPT["refused_usage"])):
            for line in refusals:
                refusals[line] = check(line, refusals[line], status)
                if " --splice returns --field " in line:  # before anything is printed
                    check(f"{line} --explain", refusals[line], status)


def test_settings_that_cannot_be_used(check: Check, notes: Notes, home: Path) -> None:
    """They name the key; --help still works."""
    home.mkdir()
    with written_at_the_end():
        for line, settings in KEPT["settings"].items():
            for config in settings:
                (home / "config.yaml").write_text(config)
                settings[config] = check(line, settings[config])
                assert notes("--help").code == 0


def test_texts_that_are_no_skills(check: Check, home: Path) -> None:
    """They name the file; nothing is compiled."""
    texts = KEPT["texts"]
    with written_at_the_end():
        for text in texts:
            Path("returns.txt").write_text(text)
            texts[text] = check("compile returns.txt", texts[text])
            assert "returns.txt" in texts[text] and not (home / "library").exists()


FIRST_DAY = Path(__file__).with_name("newcomer.txt")
FIRST_HOUR = Path(__file__).with_name("newcomer-smollm2.txt")
PATTERNS = {"n": r"-?[0-9][0-9,.]*(?:e[-+]?[0-9]+)?", "id": r"[0-9a-zA-Z-]+", "*": r".*"}
FILES = {
    "returns.txt": "# Returns\n\ndate: 2026-06-01\nCustomer tier: gold\n\nReturns before 2026-06-15 are accepted.\n",
    "support.md": "---\nname: support\ndescription: How we answer.\n---\ntone: friendly\n\nAnswer in a day.\n",
    "Rückgabe.txt": "# Rückgabe\n\nStichtag: 2026-06-01\nKundenstufe: Gold\n\nBis zum 15. Juni nehmen wir alles.\n",
    "退货.txt": "# 退货规则\n\n日期\uff1a2026-06-01\n会员: 金卡\n\n六月十五日之前可以退货。\n",
    "evil.txt": "name: \x1b]0;owned\x07\ntier: gold\n\nBe \x1b[31mred\x1b[0m.\n",
    "empty.txt": "\n",
    "question.txt": "May I return this?\n",
}
HOUSE = {
    "boiler.md": """# The boiler

The boiler is in the cellar, behind the blue door. It heats the water and all rooms but the attic.

- Pressure: 1.5 bar
- Inspector: Ada Brandt
- Inspection month: March

If the pressure falls, open the valve under the boiler until it is right again. Never open it with gloves.
""",
    "garden.md": """# The garden

The garden is watered in the evening. The roses are on the south wall, and the compost is behind the shed.

- Gardener: Tom Ellis
- Mowing day: Friday

The key of the shed hangs beside the kitchen door.
""",
}


@dataclass
class Step:
    """A command with its expected output."""

    line: str
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    status: int = 0


def steps(script: Path) -> Iterator[Step]:
    step: Step | None = None
    for line in script.read_text().splitlines():
        if line.startswith("$ "):
            if step:
                yield step
            step = Step(line[2:])
        elif step and (line[:2] in ("> ", "! ") or line in (">", "!")):
            (step.out if line[0] == ">" else step.err).append(line[2:])
        elif step and re.fullmatch(r"\[\d+\]", line):
            step.status = int(line[1:-1])
        else:
            assert not line or line.startswith("#"), line
    if step:
        yield step


def pattern(lines: list[str], places: dict[str, str]) -> str:
    found = ""
    for line in lines:
        if line == "...":
            found += r"(?:.*\n)*"
            continue
        for part in re.split(r"(\{[^{} ]+\}|^ +| {2,})", line):
            name = part[1:-1]
            if part.isspace():
                found += " +"
            else:
                found += PATTERNS.get(name) or re.escape(places.get(name, part)) if part[:1] == "{" else re.escape(part)
        found += r"\n"
    return found


def played(line: str) -> Outcome:
    """Run a line: `notes` or a shell command, after `VAR=value`, before `<<< text`."""
    words = shlex.split(line)
    *words, stdin = [*words[:-2], words[-1] + "\n"] if "<<<" in words else [*words, ""]
    with pytest.MonkeyPatch.context() as patch:
        while "=" in words[0]:
            patch.setenv(*words.pop(0).split("=", 1))
        command, *arguments = words
        if command == "notes":
            return run_here(*arguments, stdin=stdin)
    if command == "mv":
        os.rename(*arguments)
    else:
        assert command == "write", line
        Path(arguments[0]).write_text(arguments[1].replace("\\n", "\n") + "\n")
    return Outcome(0, "", "")


def play(script: Path, home: Path) -> list[str]:
    """Run each step and compare its output with the script."""
    places = {"home": str(home), "here": str(Path.cwd())}
    transcript: list[str] = []
    for step in steps(script):
        done = played(step.line.replace("{here}", places["here"]))
        shown = "".join(f"! {line}\n" for line in done.err.splitlines())
        shown += "".join(f"> {line}\n" for line in done.out.splitlines())
        shown = shown.replace(places["home"], "{home}").replace(places["here"], "{here}")
        transcript.append(f"$ {step.line}\n{shown}" + (f"[{done.code}]\n" if done.code else ""))
        if "NEWCOMER" not in os.environ:
            assert done.code == step.status, transcript[-1]
            assert re.fullmatch(pattern(step.out, places), done.out), transcript[-1]
            assert re.fullmatch(pattern(step.err, places), done.err), transcript[-1]
    if "NEWCOMER" in os.environ:
        (Path(os.environ["NEWCOMER"]) / script.name).write_text("\n".join(transcript))
    return transcript


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my texts"
    folder.mkdir()
    home.mkdir(mode=0o700)
    monkeypatch.chdir(folder)
    return folder


def test_a_first_day(make_model: Callable[..., Path], home: Path, folder: Path) -> None:
    """Each step prints exactly what the script has."""
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("my model.gguf").write_bytes(make_model("llama", trained=2048).read_bytes())
    Path("other.gguf").write_bytes(make_model("qwen2").read_bytes())
    Path("pdf/references").mkdir(parents=True)
    Path(".notes").mkdir()
    Path("pdf/SKILL.md").write_text("---\nname: pdf\ndescription: Reads PDF.\n---\nSee [more](references/more.md).\n")
    Path("pdf/references/more.md").write_text("More.\n")
    assert sum("notes " in line for line in play(FIRST_DAY, home)) >= 40


def test_a_first_hour_on_a_real_model(
    handbook: Path, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 is the default model; its answers are right where the script has them in full."""
    shutil.copytree(handbook, home, dirs_exist_ok=True)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(ABSENT)])
    Path("house").mkdir()
    for name, text in HOUSE.items():
        Path("house", name).write_text(text)
    assert len(play(FIRST_HOUR, home)) >= 25
