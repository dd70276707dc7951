"""The owner's own lines, word for word, with the model that ships and the samples in skills/: it must really read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from samples import SAMPLES

from notes_cli.config import shipped_model

QUESTION = "May I return this?"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with `notes` on the path and a home in which skills/returns is compiled."""
    folder = tmp_path_factory.mktemp("shipped")
    command = folder / "notes"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m notes_cli "$@"\n')
    command.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NOTES_")}
    environment |= {"NOTES_HOME": str(folder / "home"), "NOTES_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    assert run("notes compile skills/returns", environment).startswith(str(folder / "home"))
    return environment


def run(line: str, environment: dict[str, str]) -> str:
    """Run a line of shell in the folder of skills/ and return its output; it must succeed."""
    folder = SAMPLES.parent
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_model_ships() -> None:
    """It is in the package and at most 10 MB."""
    assert shipped_model().stat().st_size <= 10_000_000


@pytest.mark.parametrize("form", ["", " --choices accepted,refused", " --recompute"])
def test_the_erratum_turns_the_answer(shell: dict[str, str], form: str) -> None:
    """The same question: accepted without the erratum, refused with it; streamed, chosen or prefilled."""
    ask = f'echo "{QUESTION}" | notes ask --splice returns{form}'
    assert "accepted" in run(ask, shell)
    corrected = run(f'{ask} --erratum "date=2026-07-01"', shell)
    assert "refused" in corrected and "accepted" not in corrected


def test_verify_passes(shell: dict[str, str]) -> None:
    """Decisions equal those of a full recompute and of the corrected text; exit 0."""
    report = run('notes verify returns --erratum "date=2026-07-01"', shell)
    assert report.splitlines()[-1].startswith("pass: ")
    decided = run(
        f'notes verify returns --question "{QUESTION}" --choices accepted,refused --erratum "date=2026-07-01"', shell
    )
    assert decided.splitlines()[-1].startswith("pass: 2 of 2 decisions")


def test_everybody_is_told(shell: dict[str, str]) -> None:
    """`notes edit --all` applies to a single question, a batch and a recompute as to sessions and servers; errata and
    edits of the question override it; the text's value withdraws it."""
    ask = f'notes ask "{QUESTION}" --splice returns'
    asked = (
        ask,
        f"{ask} --recompute",
        f"{ask} --session told",
        f"echo '\"{QUESTION}\"' | notes ask --batch - --splice returns",
    )
    run("notes edit --all --field returns.date=2026-07-01", shell)
    try:
        for line in asked:
            assert "refused" in run(line, shell), line
        assert "erratum" in run(f"{ask} --explain", shell)
        assert "date is 2026-07-01: a correction for all sessions" in run(f"{ask} 2>&1", shell)
        for own in ("--erratum date=2026-05-02", "--field date=2026-05-02 --method field", "--field date=2026-05-02"):
            assert "accepted" in run(f"{ask} {own}", shell), own
    finally:
        run("notes edit --all --field returns.date=2026-05-01", shell)
    assert run(ask, shell) == "accepted\n" and "told" not in run(f"{ask} 2>&1", shell)
