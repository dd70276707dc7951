"""Tests values that errata name by their text, in sessions, chats and questions: the cache is that of their text."""

from __future__ import annotations

from pathlib import Path

import pytest

import notes_cli as notes
from notes_cli.errors import NotesError, SkillError

TEXT = "Salaries are paid on the 27th of each month. Claims are due\nby the 5th. Parking is 4 EUR.\n\nOwner: Anna Berg"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> notes.Model:
    monkeypatch.setenv("NOTES_HOME", str(tmp_path))
    return notes.open(n_ctx=2048)


def test_a_text_is_corrected_by_every_method(model: notes.Model) -> None:
    """Where all is decoded the prompt is that of the corrected text; an erratum states it with its sentence."""
    with model:
        pay, new = (model.compile(text=text, name=name) for name, text in _TEXTS.items())
        prompts = {}
        for method in ("recompute", "suffix", "field", "field+erratum", "erratum"):
            answer = model.ask("When?", splice=[pay], fields={'"the 27th"': "the 28th"}, method=method, max_tokens=1)
            prompts[method] = answer.counts.total
        plain = model.ask("When?", splice=[new], max_tokens=1).counts.total
        assert prompts["recompute"] == prompts["suffix"] == prompts["field"] == plain < prompts["erratum"]
        answer = model.ask(
            "When?", splice=[pay], errata=["the 27th => the 28th", "due by the 5th => now due"], max_tokens=1
        )
        stated = [piece for piece in answer.pieces if piece.kind == "erratum"]
        assert len(stated) == 2


_TEXTS = {"pay": TEXT, "new": TEXT.replace("27th", "28th")}


def test_a_session_names_values_by_their_text(model: notes.Model) -> None:
    """By the old text or the present one, in turns and edits; undone, saved, and refused where it is a memory's."""
    with model:
        pay = model.compile(text=TEXT, name="pay")
        with model.session("mine") as session:
            session.ask("When?", splice=[pay], errata=["the 27th => the 28th"], max_tokens=1)
            session.ask("When?", errata=["the 28th => the 29th", "4 EUR => 50 EUR"], max_tokens=1)
            assert session.fields == {"Owner": "Anna Berg", '"the 27th"': "the 29th", '"4 EUR"': "50 EUR"}
        with model.session("mine") as session:
            (edit,) = session.edit('"by the 5th"', "by noon", "suffix")
            assert edit.text == '"by the 5th"=by noon' and session.fields['"by the 5th"'] == "by noon"
            (edit,) = session.edit('"Anna Berg"', "Bo Li")
            assert edit.name == "Owner" and session.fields["Owner"] == "Bo Li"
            session.undo()
            assert session.fields["Owner"] == "Anna Berg"
            with pytest.raises(SkillError, match=r"no spliced skill has the text 'the 5th'.*pay line 1"):
                session.ask("When?", errata=["the 5th => x"], max_tokens=1)
            session.ask("When?", errata=["the 29th => the 1st"], max_tokens=1)
            assert session.fields['"the 27th"'] == "the 1st"
        with model.session("other") as session, pytest.raises(NotesError, match="a memory is read again at each turn"):
            session.ask("When?", memory=pay, errata=["the 27th => the 28th"], max_tokens=1)
