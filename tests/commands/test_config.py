"""Settings of config.yaml and of variables: where each comes from, and what answers have of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Notes, run_here

TEXT = "# Shop\n\ndate: 2026-06-01\n\nParcels go by ship.\n"


@pytest.fixture
def settings(home: Path) -> Path:
    home.mkdir()
    return home / "config.yaml"


def shown(command: str = "ask") -> dict[str, tuple[object, str]]:
    """Value and source of each setting of a command, but the threads of all tests."""
    rows = run_here("config", "show", command, "--json").json["settings"]
    return {row["setting"]: (row["value"], row["from"]) for row in rows if row["setting"] != "threads"}


def test_precedence(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables before the file, a command's own settings before those for all, also by another flag of the option."""
    assert list(shown()) == ["model"] and shown()["model"][1] == "default"
    settings.write_text("model: notes-tiny\nsplice: [a, b]\nerratum: x=1\npredict: 5\nserve: {splice: mine}\n")
    monkeypatch.setenv("NOTES_ASK_ERRATUM", "date=2026-08-01")
    file = str(settings)
    assert shown() == {
        "splice": (["a", "b"], file),
        "erratum": (["date=2026-08-01"], "NOTES_ASK_ERRATUM"),
        "max-tokens": ("5", file),
        "model": ("notes-tiny", file),
    }
    assert shown("serve")["splice"] == (["mine"], file) and shown("serve")["erratum"] == (["x=1"], file)
    assert {*shown("verify")} == {"model", "erratum"}


def test_errata_belong_to_skills(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them if others are named, which may have no such fields. A file without skills corrects any."""
    for command in ("ask", "chat", "serve"):
        settings.write_text("splice: returns\nerratum: date=2026-07-01\n")
        assert shown(command)["erratum"][0] == ["date=2026-07-01"]
        monkeypatch.setenv(f"NOTES_{command.upper()}_SPLICE", "support")
        assert "erratum" not in shown(command)
        settings.write_text("erratum: date=2026-07-01\n")
        assert shown(command)["erratum"][0] == ["date=2026-07-01"]


@pytest.mark.model
def test_an_answer_has_the_skills_of_the_settings(notes: Notes, settings: Path, tmp_path: Path) -> None:
    """Unless an option replaces them; a session and a chat that have begun keep theirs."""
    handbook = tmp_path / "handbook.md"
    handbook.write_text(TEXT)
    options = ("--splice", handbook, "--erratum", "date=2026-07-01")
    given = notes("ask", "Why?", "--json", "-n", 2, *options).json
    own = f"{{splice: {handbook}, erratum: [date=2026-07-01], system: Be brief., max-tokens: 2}}"
    settings.write_text(f"ask: {own}\nchat: {own}\n")
    found = notes("ask", "Why?", "--json", "--system", "").json
    assert [piece["kind"] for piece in given["pieces"]].count("erratum") == 1
    assert (found["answer"], found["pieces"], found["tokens"]) == (given["answer"], given["pieces"], given["tokens"])
    memory = notes("ask", "Why?", "--json", "--memory", handbook).json  # it is there once
    assert [piece["how"] for piece in memory["pieces"]].count("spliced") == 1
    assert notes("chat", "kept", "--memory", handbook, stdin="Why?").code == 0
    batch = notes("ask", "--batch", "-", stdin='{"question": "Why?", "splice": []}\n"Why?"\n')
    answers = [json.loads(line) for line in batch.out.splitlines()]
    assert [[piece["kind"] for piece in one["pieces"]].count("erratum") for one in answers] == [0, 1]
    for _ in range(2):
        assert notes("chat", "mine", stdin="Why?").code == 0
    session = notes("ask", "Why?", "--session", "mine", "--json").json
    assert [piece["kind"] for piece in session["pieces"]].count("erratum") == 1
