"""The memory of a session: each turn moves it to just before its question, from its file, and decodes nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.editing.methods import ERRATUM, SUFFIX
from notes_cli.errors import Notice, SessionError, UnsupportedError
from notes_cli.runtime.request import Answer, Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.session import Session
from tests.events import on

from .test_session import Open, held, make, rows

__all__ = ["make"]  # a fixture

PROFILE = "diet: vegan\ncity: Bern\n\nThe user likes long walks and short answers."


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.md"
    path.write_text(PROFILE)
    return path


def ask(session: Session, question: str, memory: Path | None = None, **options: Any) -> Answer:
    return session.ask(Request(question, memory=memory, max_tokens=3, **options))


def text_of(session: Session) -> str:
    model, tokens = session.workspace.model, session.state.tokens
    return b"".join(model.token_bytes(token, special=True) for token in tokens).decode(errors="replace")


def first_layer(session: Session, other: Workspace) -> bool:
    """True if K and V of the first layer, which depend on tokens and positions alone, equal those of a prefill."""
    found, sequence = rows(session.sequence)[:2], other.sequence()
    sequence.append(session.state.tokens)
    sequence.flush()
    return all(np.allclose(one, two, atol=1e-4) for one, two in zip(found, rows(sequence)[:2], strict=True))


def is_before_question(session: Session) -> bool:
    """True if the memory is in the sequence once, and only errata are between it and the last question."""
    text, question = text_of(session), session.state.questions[-1]
    after = text.partition("short answers.")[2]
    return text.count("The user likes long walks") == 1 and after.index(question) < 200


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_moves_to_each_question(make: Open, profile: Path, kind: str) -> None:
    """One copy, before the last question; positions are those of a prefill; values of moved rows are bit-identical."""
    workspace, other = make(kind, "f32"), make(kind, "f32")
    with held(workspace) as session:
        ask(session, "What can I eat?", profile, system="Be kind.")
        for number, question in enumerate(("And tomorrow?", "Why?"), 2):
            before, old = rows(session.sequence), session.state.span("profile")
            ask(session, question)
            after, new = rows(session.sequence), session.state.span("profile")
            assert session.state.turns == number and is_before_question(session) and first_layer(session, other)
            assert new[0] > old[0] and new[1] - new[0] == old[1] - old[0]
            start = min(entry.position for entry in session.state.entries if entry.turn == number)
            moved = start - old[0]
            assert 0 < moved < len(before[0]) - old[0]
            for one, two in zip(before, after, strict=True):
                assert np.array_equal(one[: old[0]], two[: old[0]])
            for one, two in zip(before[1::2], after[1::2], strict=True):
                assert np.array_equal(one[-moved:], two[old[0] : start])
            assert not np.allclose(before[0][-moved:], after[0][old[0] : start])  # keys are rotated
        assert [entry.text for entry in session.state.traces] == ["the memory profile"] * 2
        assert workspace.library.entries("profile")


def test_decodes_nothing_twice(make: Open, profile: Path, decoded: list[int]) -> None:
    """A turn decodes its own tokens besides the memory, and those that an edit computes in place."""
    with held(make("llama", "f32")) as session:
        ask(session, "What can I eat?", profile)
        for question in ("And tomorrow?", "And on Sunday?", "And now?"):
            edited = question == "And now?"
            if edited:
                session.edit("diet", "kosher")
            decoded.clear()
            ask(session, question)
            own = [entry for entry in session.state.entries if entry.turn == session.state.turns]
            assert edited or any(entry.how == "spliced" for entry in own)
            assert sum(decoded) <= sum(entry.tokens for entry in own if entry.how != "spliced") + 8 * edited


@pytest.mark.parametrize("edit", [True, False])
def test_new_value_and_back(make: Open, profile: Path, edit: bool) -> None:
    """The copy has the value, one erratum at most states it, and the last copy is that of the file."""
    workspace, other = make("llama", "f32"), make("llama", "f32")
    with held(workspace) as session:
        ask(session, "What can I eat?", profile)
        copies = []
        for value in ("kosher", "vegan"):
            if edit:
                session.edit("diet", value)
                ask(session, "And now?")
            else:
                ask(session, "And now?", errata=[f"diet={value}"])
            [skill] = session.state.skills
            copies.append(session.state.tokens[slice(*session.state.span(skill.name))])
            errata = [entry for entry in session.state.entries if entry.kind == "erratum"]
            assert f"diet: {value}" in skill.text and session.state.fields["diet"] == value
            assert (
                len(errata) == 1 and value in errata[0].text and errata[0].position > session.state.span(skill.name)[0]
            )
            assert is_before_question(session) and first_layer(session, other)
        compiled = workspace.open(workspace.library.find("profile", workspace.identity))
        assert copies[0] != copies[1] == compiled.tokens.tolist()
        ask(session, "And then?")  # the value stays, without another erratum
        assert session.state.fields["diet"] == "vegan" and first_layer(session, other)


@pytest.mark.parametrize("later", [True, False])
def test_a_correction_of_the_first_copy_follows_it(make: Open, profile: Path, later: bool) -> None:
    """Now and in later turns: the rows of a copy after the value were computed with that of the file."""
    with held(make("llama", "f32")) as session:
        if later:
            ask(session, "Why?", system="Be kind.")
        ask(session, "What can I eat?", profile, errata=["diet=kosher"])
        for _ in range(2):
            [skill] = session.state.skills
            [erratum] = [entry for entry in session.state.entries if entry.kind == "erratum"]
            assert "diet: kosher" in skill.text and session.state.fields["diet"] == "kosher"
            assert erratum.position > session.state.span(skill.name)[0] and erratum.turn == session.state.turns
            ask(session, "And now?")
            assert is_before_question(session)


def test_value_stays_after_a_restart(make: Open, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process goes on without --memory, from another folder, with the edited value."""
    monkeypatch.chdir(profile.parent)
    with held(make("llama", "f32")) as session:
        ask(session, "What can I eat?", Path("profile.md"))
        session.edit("city", "Basel on the Rhine")
    monkeypatch.chdir("/")
    for question in ("Where am I?", "And now?"):
        with held(make("llama", "f32")) as session:
            ask(session, question)
            assert "city: Basel on the Rhine" in session.state.skills[0].text and is_before_question(session)


def test_changed_text_and_another_file_replace_it(make: Open, profile: Path) -> None:
    """A new value ends an edit of that field alone; those of a replaced memory end with it."""
    notices: list[str] = []
    callbacks = on(Notice, lambda notice: notices.append(str(notice)))
    with held(make("llama", "f32")) as session:
        ask(session, "What can I eat?", profile)
        ask(session, "And now?", errata=["diet=kosher", "city=Basel"])
        profile.write_text(PROFILE.replace("vegan", "halal"))
        session.ask(Request("And now?", max_tokens=3), callbacks)
        assert any("profile" in notice and "compiled" in notice for notice in notices)
        assert session.state.fields == {"diet": "halal", "city": "Basel"}
        assert "diet: halal\ncity: Basel" in session.state.skills[0].text
        assert "kosher" not in text_of(session) and is_before_question(session)
        other = profile.with_name("other.md")
        other.write_text("diet: fish\ncity: Rome\n\nThe user is another one.")
        ask(session, "And now?", other)
        assert session.state.fields == {"diet": "fish", "city": "Rome"}
        assert [skill.name for skill in session.state.skills] == ["other"]
        assert "short answers." not in text_of(session) and "Basel" not in text_of(session).partition("another one.")[2]
        assert session.state.memory and session.state.memory.reference == str(other)
        session.undo()
        assert session.state.fields == {"diet": "halal", "city": "Basel"}


@pytest.mark.parametrize("kind", ["lfm2", "gpt2"])
def test_rows_that_cannot_be_moved(make: Open, profile: Path, kind: str) -> None:
    """Refused in the first turn, and nothing is kept."""
    with held(make(kind)) as session:
        with pytest.raises(UnsupportedError, match="cannot keep a memory"):
            ask(session, "What can I eat?", profile)
        assert session.empty


def test_does_not_use_up_the_moves(make: Open, profile: Path) -> None:
    """A row is moved once by its turn's end, so a q4_0 cache, which allows two moves, serves any number of turns."""
    with held(make("qwen3", "q4_0")) as session:
        ask(session, "What can I eat?", profile)
        for _ in range(3):
            ask(session, "And now?")
            assert is_before_question(session)


def test_refusals(make: Open, profile: Path) -> None:
    """A memory that is a skill of the session, and edits by methods whose rows the next turn would drop."""
    with held(make()) as session:
        ask(session, "Why?", splice=[profile])
        with pytest.raises(SessionError, match="is in session mine already"):
            ask(session, "And then?", profile)
    with held(make(), "other") as session:
        ask(session, "Why?", profile)
        with pytest.raises(UnsupportedError, match="is the memory of session other"):
            session.edit("diet", "kosher", SUFFIX)
        with pytest.raises(SessionError, match="is in session other already"):
            ask(session, "And then?", splice=[profile])
        assert session.state.edits == 0
        assert session.edit("diet", "kosher", ERRATUM).rewritten == 0
