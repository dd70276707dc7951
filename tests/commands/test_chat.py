"""Tests `notes chat`: turns, corrections, undo, and errors that do not end the conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import SAMPLES

from .conftest import Notes

QUESTION = "May I return this?"


@pytest.fixture
def returns(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The skill `returns`, compiled for the model that ships, which answers questions about it."""
    monkeypatch.setenv("NOTES_MODEL", "notes-tiny")
    assert notes("compile", SAMPLES / "returns").code == 0


def test_a_conversation(notes: Notes, returns: None) -> None:
    """Its answers are those of `notes ask --session`, and an erratum comes with the next question only."""
    lines = [QUESTION, "/erratum date=2026-07-01", QUESTION, "/skills", "/show"]
    outcome = notes("chat", "mine", "--splice", "returns", stdin="\n".join(lines))
    assert outcome.code == 0 and "session mine with notes-tiny" in outcome.err
    first, second, skill, *shown = outcome.out.splitlines()
    assert (first, second, skill) == ("accepted", "refused", "* returns")
    assert [line.split()[0] for line in shown if line.strip()] == [
        *("turn", "skill", "user", "assistant"),
        *("turn", "correction", "user", "assistant"),
    ]
    again = ("ask", QUESTION, "--session", "other")
    assert notes(*again, "--splice", "returns").out.strip() == first
    assert notes(*again, "--erratum", "date=2026-07-01").out.strip() == second
    later = notes("chat", "mine", stdin="/undo\n/exit\nnever asked")
    assert "1 turn" not in later.out and f"took back: {QUESTION}" in later.err
    assert notes("session", "show", "mine", "--json").json["turns"] == 1


def test_errors_leave_the_conversation_as_it_is(notes: Notes, returns: None) -> None:
    """Each is a line on stderr, and the next question is answered; the exit status is that of a failure."""
    lines = ["/none", "/erratum", "/splice nothing", "/undo", "/show", "What \\", "is it?", QUESTION]
    outcome = notes("chat", "--splice", "returns", "-n", "4", stdin="\n".join(lines))
    assert outcome.code == 1 and outcome.out.splitlines()[-1] == "accepted"
    assert "5 of the lines failed" in outcome.err
    errors = outcome.err.splitlines()[1:]
    for line, words in zip(
        errors, ("no command /none", "needs a correction", "nothing", "", "no turn yet"), strict=False
    ):
        assert words in line
    [session] = notes("session", "ls", "--json").json
    assert session["name"].startswith("chat-") and session["turns"] == 2


@pytest.mark.parametrize("command", ["/erratum none=1", "/splice returns"])
def test_a_command_that_fails_later_fails_once(notes: Notes, returns: None, command: str) -> None:
    """The next question fails and names the dropped erratum or skill; the question after that is answered."""
    lines = [QUESTION, command, QUESTION, QUESTION + " \\"]  # the last line ends in the middle
    outcome = notes("chat", "mine", "--splice", "returns", stdin="\n".join(lines))
    assert outcome.code == 1 and outcome.out.split() == ["accepted", "accepted"]
    assert f"left out from now on: {command.split()[1]}" in outcome.err


def test_a_correction_without_a_question_is_named(notes: Notes, returns: None) -> None:
    outcome = notes("chat", "--splice", "returns", stdin=f"{QUESTION}\n/erratum date=2026-07-01")
    assert outcome.code == 1 and "no question followed: date=2026-07-01" in outcome.err


def test_a_conversation_goes_on_with_the_same_options(notes: Notes, returns: None) -> None:
    """A skill that it has is not spliced again; its system text cannot be another one."""
    for _ in range(2):
        outcome = notes("chat", "mine", "--splice", "returns", stdin=QUESTION)
        assert (outcome.code, outcome.out.strip()) == (0, "accepted")
    outcome = notes("chat", "mine", "--system", "Be brief.", stdin=QUESTION)
    assert outcome.code == 1 and "session mine has begun" in outcome.err


def test_another_chat_template(notes: Notes, returns: None, tmp_path: Path) -> None:
    """The prompt is rendered by the file; one that is no template is refused in a line."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}Answer:")
    options = ("ask", QUESTION, "--json", "-n", 1, "--chat-template-file", file)
    assert notes(*options).json["tokens"]["total"] != notes(*options[:-2]).json["tokens"]["total"]
    pieces = notes(*options, "--explain", "--splice", "returns").json["pieces"]
    assert {piece["kind"] for piece in pieces} == {"text", "splice", "question"}
    file.write_text("{% for %}")
    outcome = notes(*options)
    assert outcome.code == 1 and outcome.err.startswith("notes: the chat template cannot be read")
    outcome = notes(*options[:-1], tmp_path / "none")
    assert outcome.code == 2 and "cannot read" in outcome.err
