"""Completion by a shell: installed by one command, quick, and of everything that has a name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from notes_cli.cli import run

from .conftest import Notes, run_here


@pytest.fixture
def shell(tmp_path: Path, compiled: Path, notes: Notes, notes_on_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `notes` on the path of a user with a skill and a session; its folder."""
    assert notes("ask", "Why?", "-n", 1, "--session", "mine").code == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    return notes_on_path


def completed(*lines: str, word: str = "", source: str = "<(notes completion bash)") -> list[list[str]]:
    """bash's completions of each line, for each way of word splitting; `word`: the last word."""
    script = f"source {source}; word=$1; shift; "
    script += """for line; do COMP_LINE=$line; COMP_POINT=${#line}; COMP_WORDS=("$word"); COMP_CWORD=0; COMPREPLY=()
    _notes_complete notes
    ((${#COMPREPLY[@]})) && printf '%s\\n' "${COMPREPLY[@]}"; echo --; done"""
    done = subprocess.run(["bash", "-c", script, "-", word, *lines], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [part.splitlines() for part in done.stdout.split("--\n")[:-1]]


def offered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The candidates that `notes` gives a shell for a line."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setenv("_NOTES_COMPLETE", "bash_complete")
        patch.setenv("COMP_WORDS", line)
        patch.setenv("COMP_CWORD", "-1")
        run([])
    return [one.removeprefix("plain,") for one in capsys.readouterr().out.splitlines()]


def test_what_is_completed(shell: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, options and their values, skills, fields of the skill in the line, their values, sessions, samples."""
    for line, wanted in (
        ("comp", ["compile", "completion"]),
        ("ask --spl", ["--splice"]),
        ("ls --color=a", ["auto", "always"]),
        ("ask --splice re", ["returns"]),
        ("verify re", ["returns"]),
        ("ask --splice returns --field ", ["date=", "tier="]),
        ("ask --erratum da", ["date="]),
        ("edit mine --field date=", ["date=2026-06-01"]),
        ("ask --session ", ["mine"]),
        ("session undo m", ["mine"]),
        ("compile store", ["store-handbook"]),
        ("ask --splice no", ["file,no"]),
    ):
        assert offered(f"notes {line}", monkeypatch, capsys) == wanted, line


def test_what_a_shell_would_take_apart_is_quoted(shell: Path, tmp_path: Path) -> None:
    """Names and values with blanks, quotes and other signs; not where a quote has been opened."""
    (tmp_path / "odd.txt").write_text(
        "# Odd\n\nDelivery time: 3 days\nquote: It's $HOME\n日期: 2026-06-01\n\nRules.\n", "utf-8"
    )
    assert run_here("compile", tmp_path / "odd.txt").code == 0
    start = "notes ask --splice odd --erratum "
    assert completed(f"{start}Del", f"{start}Delivery\\ time=", f"{start}quote=", f"{start}日") == [
        *(["Delivery\\ time="], ["3\\ days"], ["It\\'s\\ \\$HOME"], ["日期="])
    ]
    (quoted,) = completed(f"{start}'Delivery time=", word="'Delivery time=")
    assert quoted == ["Delivery time=3 days"]


def test_models_with_a_colon(shell: Path, home: Path) -> None:
    """bash splits at the colon: the part before it is not offered again."""
    home.joinpath("config.yaml").write_text(f"models:\n  'small:1b': {os.environ['NOTES_MODEL']}\n")
    assert completed("notes ask -m sm", "notes ask -m small:") == [["small:1b"], ["1b"]]


def test_nothing_heavy_is_loaded(shell: Path) -> None:
    """Neither numpy nor llama.cpp: a person waits at a keyboard."""
    script = "import os, sys\nfrom notes_cli.cli import run\n"
    script += "for words in 'ask --field da', 'ask --session m', 'ask -m a', 'compile r':\n"
    script += "    os.environ['COMP_WORDS'] = 'notes ' + words\n    try: run([])\n    except SystemExit: pass\n"
    script += "print(*sorted({'numpy', 'notes_cli.lib', 'gguf', 'rich'} & set(sys.modules)), file=sys.stderr)"
    environment = {**os.environ, "_NOTES_COMPLETE": "bash_complete", "COMP_CWORD": "-1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (done.stdout.count("returns"), done.stderr) == (1, "\n"), done


def test_one_command_installs_it(shell: Path, tmp_path: Path) -> None:
    """Writes a script and one line in .bashrc, whose content stays; a second run changes nothing."""
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    done = run_here("completion", "bash", "--install")
    path, start = Path(done.out.strip()), (tmp_path / ".bashrc").read_text()
    assert path.is_file() and str(path) in start and start.startswith("alias ll='ls -l'\n") and start.endswith("\n")
    assert run_here("completion", "bash", "--install", "-q").err == "" and (tmp_path / ".bashrc").read_text() == start
    assert completed("notes inspect --text ret", source="~/.bashrc") == [["returns"]]
    path.unlink()
    gone = subprocess.run(["bash", "-c", "source ~/.bashrc"], capture_output=True)
    assert (gone.returncode, gone.stderr) == (0, b""), "a shell starts without it as well"


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_scripts_of_other_shells(shell: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each looks for it; without a name it is the user's own shell; where that shell is there it reads it."""
    monkeypatch.setenv("SHELL", f"/usr/bin/{name}")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    path = Path(run_here("completion", "--install").out.strip())
    assert f"_NOTES_COMPLETE={name}_complete" in path.read_text()
    if name == "fish":
        assert path == tmp_path / ".config" / "fish" / "completions" / "notes.fish"
    else:
        assert str(path) in (tmp_path / ".zshrc").read_text()
    if shutil.which(name):
        subprocess.run([name, "-n", path], check=True)
        if name == "fish":
            asked = ["fish", "-c", "complete -C 'notes ask --splice re'"]
            assert subprocess.run(asked, capture_output=True, text=True).stdout == "returns\n"


def test_a_home_or_a_shell_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is written into the folder that happens to be the current one."""
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "The variable SHELL is 'tcsh'" in run_here("completion").refusal(2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    for home in ("", "here"):
        monkeypatch.setenv("HOME", home)
        assert f"HOME is {home!r}" in run_here("completion", "bash", "--install").refusal()
    assert not [*tmp_path.iterdir()]
