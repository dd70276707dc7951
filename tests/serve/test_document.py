"""Runs every example of docs/serving.md against a server, and compares its output."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import SAMPLES

from ..test_pages import matches
from .conftest import Served, compile_into, started

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(console|python)\n(.*?)```", DOCUMENT, re.S)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("document")
    compile_into(home, "returns", "support")
    with started(home, names=()) as found:
        yield found


def test_every_example(
    own: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, as they depend on each other."""
    shutil.copytree(SAMPLES, tmp_path / "tests" / "skills")
    monkeypatch.chdir(tmp_path)
    seen = 0
    for kind, block in BLOCKS:
        block = block.replace("localhost:8080", own.url.removeprefix("http://"))
        if kind == "python":
            exec(block, {})
            printed = re.findall(r"^print\(.*\n# (.*)", block, re.M)
            assert capsys.readouterr().out.splitlines() == printed
            seen += 1
            continue
        for example in re.split(r"^\$ ", block, flags=re.M)[1:]:
            lines = example.splitlines()
            length = next(n for n in range(1, len(lines) + 1) if "\n".join(lines[:n]).count("'") % 2 == 0)
            command, shown = "\n".join(lines[:length]), "\n".join(lines[length:])
            found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300).stdout
            assert matches(shown, found), f"{command}\n{found}"
            seen += 1
    assert seen >= 12
