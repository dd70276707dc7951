"""README and docs/: their commands print the shown output, Python runs, JSON and YAML parse.

The commands of a page are run in the folder ~/work of a new home: lines of `notes` alone in this process, others by a
shell. In an output `...` matches anything and two blanks any number, and a time or a speed another one of the same
order of size; in the shorter README the line about the shipped model is left out. A block after `<!-- not run: why -->`
is not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from itertools import takewhile
from pathlib import Path

import click
import pytest
import stores
from samples import ABSENT

from bench import readme
from notes_cli import config
from notes_cli.cli import cli
from notes_cli.documents import parse_yaml

from .commands.conftest import is_operator, run_line, words

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = "serving.md"  # run against a server: tests/serve/test_document.py
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>[^>]+) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
TIME = re.compile(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?(?= s\b| tokens/s)")
ORDER = 30  # how many times slower or faster a machine may be than the one of the page
NOT_RUN = 1


def blocks(page: Path, *kinds: str) -> list[str]:
    """The blocks of these kinds that are run."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [block["body"] for block in found if block["kind"] in kinds and not block["why"]]


def having(kind: str) -> list[Path]:
    """The pages that have such blocks, but for those that are run elsewhere."""
    return [page for page in PAGES if blocks(page, kind) and page.name != ELSEWHERE]


def steps(body: str) -> list[tuple[str, str]]:
    """Yield commands, with continuation lines that begin with `>`, and their outputs."""
    found = []
    for step in re.split(r"^\$ ", body, flags=re.M)[1:]:
        lines = step.splitlines()
        length = next((n for n, line in enumerate(lines) if n and line[:2] not in ("> ", ">")), len(lines))
        command = "\n".join([lines[0], *(line[2:] for line in lines[1:length])])
        found.append((command, "\n".join(lines[length:])))
    return found


def matches(shown: str, found: str) -> bool:
    """True if an output matches the page."""
    shown, found = (text.replace(" tokens spliced", " spliced") for text in (shown, found))  # shorter if it is slow
    found = re.sub(r"(\d+) min(?: (\d+) s)?", lambda slow: f"{60 * int(slow[1]) + int(slow[2] or 0)} s", found)
    parts = re.split(rf"(\.\.\.|{TIME.pattern})", shown)
    patterns = [re.sub(r"(?:\\ ){2,}", " +", re.escape(part)) for part in parts]
    patterns[1::2] = ["(?:.|\n)*?" if part == "..." else f"({TIME.pattern})" for part in parts[1::2]]
    match = re.fullmatch(rf"\s*{''.join(patterns)}\s*", re.sub(r" +$", "", found, flags=re.M))
    if match is None:
        return False
    times = zip(match.groups(), TIME.findall(shown), strict=True)
    return all(
        1 / ORDER < float(here.replace(",", "")) / float(there.replace(",", "")) < ORDER for here, there in times
    )


@pytest.fixture
def user(tmp_path: Path, notes_on_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the home of a user with `notes` installed, and be in its folder `work`."""
    home = tmp_path / "user"
    (home / "work").mkdir(parents=True)
    for name in ("NOTES_HOME", "OLLAMA_MODELS", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NOTES_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(ABSENT)])
    monkeypatch.chdir(home / "work")
    monkeypatch.setenv("PWD", str(home / "work"))
    return home


@pytest.mark.parametrize("page", having("console"), ids=lambda page: page.name)
def test_what_is_typed_prints_what_is_shown(
    page: Path, user: Path, make_model: object, handbook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name == "your-model.md":
        root = user / ".ollama" / "models"
        model = make_model("qwen3", trained=32768)  # type: ignore[operator]
        stores.ollama(root, "registry.ollama.ai/library/qwen3/0.6b", stores.manifest(root, model))
    if page.name == "README.md":
        shutil.copytree(ROOT / "skills", user / "work" / "skills")
    if page.name == "images.md":
        shutil.copytree(ROOT / "docs" / "images", user / "work" / "photos")
    if "$ notes compile -q store-handbook\n" in page.read_text(encoding="utf-8"):
        shutil.copytree(handbook / "library", config.paths().library)
    for command, shown in (step for block in blocks(page, "console") for step in steps(block)):
        if command.startswith("export "):
            for word in words(command)[1:]:
                monkeypatch.setenv(*os.path.expandvars(word).split("=", 1))
            continue
        done = run_line(command, together=True)
        printed = done.out.replace(str(user), "~")
        assert matches(shown, printed), f"$ {command}\n{printed}"
        assert done.code == 0 or "notes: " in shown, command


@pytest.mark.parametrize("page", having("python"), ids=lambda page: page.name)
def test_python_prints_what_its_comments_say(
    page: Path, tmp_path: Path, handbook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES_THREADS", "1")
    shutil.copytree(handbook, tmp_path / "home")
    for example in blocks(page, "python"):
        assert readme.promised(example)
        assert readme.run(sys.executable, example, tmp_path, str(ROOT)) == readme.promised(example)


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """Console, Python, JSON and YAML; blocks that are not run have a reason, and are few. Every page is in the index
    and in the site."""
    kinds, reasons = set(), []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```") == 2 * len(BLOCK.findall(text)), page
        for block in BLOCK.finditer(text):
            kinds.add(block["kind"])
            reasons += [block["why"]] if block["why"] else []
    assert kinds == {"console", "python", "yaml"} and len(reasons) == NOT_RUN
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert page.name in site and (page.name == "index.md" or f"({page.name})" in index), page


def calls(text: str) -> list[list[str]]:
    """The words of the calls of `notes` in lines that are indented by four, up to a comment, redirection or pipe."""
    lines = re.findall(r"^    (notes .*)$", text, re.M)
    return [list(takewhile(lambda word: not is_operator(word), words(line))) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_passing_and_data_can_be_read(page: Path) -> None:
    """Commands without output have existing options and valid values; JSON and YAML are valid."""
    for block in blocks(page, "json"):
        json.loads(block)
    assert all(parse_yaml(block) for block in blocks(page, "yaml"))
    for call in calls(page.read_text(encoding="utf-8")):
        rest = call[1:]
        with click.Context(cli, info_name="notes") as root:
            command: click.Command = cli
            context = root
            while isinstance(command, click.Group) and rest:
                found = command.get_command(context, rest.pop(0))
                assert found, call
                command = found
            try:
                command.make_context(" ".join(call), rest, parent=root)
            except click.UsageError as error:
                raise AssertionError(f"{call}: {error.format_message()}") from error


def test_what_is_not_as_it_is_shown() -> None:
    """The control."""
    assert matches("a  b ...\nc", "a     b x\ny\nc\n") and not matches("a  b", "ab") and not matches("a ...", "b a c")
    assert steps("$ one\n> two\n>\nout\n$ three\n") == [("one\ntwo\n", "out"), ("three", "")]
    assert calls("    notes ask 'x | y' # z\n    notes ls -q | xargs notes rm\n") == [
        *(["notes", "ask", "x | y"], ["notes", "ls", "-q"])
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of headings, as GitHub and mkdocs generate them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Links point to files of the repository and headings in them; links in code are ignored."""
    text = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target
