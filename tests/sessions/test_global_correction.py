"""A global erratum reaches each session that has the skill, and none with another skill of the same name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import notes_cli as notes
from notes_cli.errors import HeldSessionError, Notice
from notes_cli.library.global_errata import GlobalErrata, GlobalErratum, holding, now
from notes_cli.library.store import Library
from notes_cli.sessions.session import add_errata, correct_sessions
from tests.events import on

from ..conftest import MakeModel

WAS, LATE, LATER, OWN = "2026-06-01", "2026-07-01", "2026-08-01", "2026-05-05"
BODY = "Returns are accepted."


@pytest.fixture
def model(make_model: MakeModel, home: Path) -> Iterator[notes.Model]:
    with notes.open(make_model(), notes.ContextOptions(n_ctx=2048, n_threads=1)) as opened:
        yield opened


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return written(tmp_path / "returns.md")


@pytest.fixture
def compiled(model: notes.Model, text: Path) -> notes.Segment:
    return model.compile(text)


def written(path: Path, date: str = WAS, body: str = BODY) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"date: {date}\n\n{body}\n")
    return path


def library_of(model: notes.Model) -> Library:
    assert isinstance(model.workspace.library, Library)
    return model.workspace.library


def errata_of(model: notes.Model) -> GlobalErrata:
    return GlobalErrata(library_of(model).folder)


def corrected(model: notes.Model, date: str = LATE) -> dict[str, object]:
    """Correct all sessions; return those that were, with the number of errata or the error."""
    add_errata(model.workspace, errata_of(model), {"date": date})
    return {name: outcome for name, outcome in correct_sessions(model.workspace, errata_of(model)) if outcome}


def new_errata(model: notes.Model, name: str, **how: object) -> list[str]:
    """The errata pending for the next turn of a session."""
    with model.session(name) as session:
        turn = session.turns
        session.ask("Why?", max_tokens=1, **how)  # type: ignore[arg-type]
        return [entry.text for entry in session.entries if entry.kind == "erratum" and entry.turn == turn + 1]


def alone(model: notes.Model, skill: object) -> int:
    """The number of tokens of errata in a question without a session."""
    return model.ask("Why?", splice=[skill], max_tokens=1).counts.erratum  # type: ignore[list-item]


def test_another_skill_of_the_name_is_not_corrected(
    model: notes.Model, compiled: notes.Segment, tmp_path: Path
) -> None:
    """A text of another origin: in a question, and in sessions from before and after it."""
    other = {"same": WAS, "other": OWN}
    for name, date in other.items():
        path = written(tmp_path / name / "returns.md", date, "We have moved to another street.")
        assert new_errata(model, f"before-{name}", splice=[str(path)]) == []
    new_errata(model, "mine", splice=[compiled])
    assert corrected(model) == {"mine": 1}
    assert alone(model, compiled) and LATE in new_errata(model, "mine")[0]
    for name in other:
        path = str(tmp_path / name / "returns.md")
        assert alone(model, path) == 0 and new_errata(model, f"before-{name}") == []
        assert new_errata(model, f"after-{name}", splice=[path]) == []


def test_a_correction_follows_its_text(model: notes.Model, compiled: notes.Segment, text: Path, tmp_path: Path) -> None:
    """The text is changed around the value, moved, and changed there: it is recognised in both places."""
    corrected(model)
    segment = model.compile(written(text, body="Returns are accepted, but for books."))
    assert alone(model, segment)
    moved = tmp_path / "moved" / "returns.md"
    moved.parent.mkdir()
    text.rename(moved)
    assert alone(model, model.compile(moved))
    assert alone(model, segment := model.compile(written(moved, body="All is accepted.")))
    assert alone(model, segment) and alone(model, "returns")


def test_a_correction_goes_with_the_skill(model: notes.Model, compiled: notes.Segment, tmp_path: Path) -> None:
    """Another text compiled later under the name is not corrected, and the compile reports that."""
    corrected(model)
    library_of(model).remove("returns")
    notices: list[Notice] = []
    path = written(tmp_path / "new" / "returns.md", body="We have moved to another street.")
    segment = model.compile(path, callbacks=on(Notice, notices.append))
    assert alone(model, segment) == 0
    assert [str(one) for one in notices if "the correction returns.date=2026-07-01 for all sessions ends" in str(one)]


def test_the_author_has_the_last_word_for_good(model: notes.Model, compiled: notes.Segment, text: Path) -> None:
    """A correction ended by a compile does not return with the value that it corrected."""
    corrected(model)
    model.compile(written(text, date=OWN))
    assert alone(model, model.compile(written(text))) == 0
    assert new_errata(model, "mine", splice=["returns"]) == []
    corrected(model, LATER)
    assert alone(model, "returns"), "it can be corrected again"


@pytest.mark.parametrize("own", [False, True])
def test_a_session_in_its_first_turn_gets_it(model: notes.Model, compiled: notes.Segment, own: bool) -> None:
    """It is applied before the next question, not in the middle of a turn, and not before an erratum of that question's
    own."""
    with model.session("racer") as session:
        going = session.stream("Why?", splice=[compiled], max_tokens=4)
        next(going)
        assert corrected(model) == {}
        list(going)
    (only,) = new_errata(model, "racer", errata=[f"returns.date={OWN}"] if own else [])
    assert (OWN if own else LATE) in only
    assert new_errata(model, "racer") == [], "once"


def test_a_session_that_was_away_hears_of_it(model: notes.Model, compiled: notes.Segment, tmp_path: Path) -> None:
    """A session restored from a backup is corrected, and so is one that was locked, also after forgetting for good."""
    for name in ("away", "cut"):
        new_errata(model, name, splice=[compiled])
        new_errata(model, name)
    folder = model.workspace.paths.sessions / "away"
    shutil.copytree(folder, tmp_path / "kept")
    with model.session("cut"):
        assert isinstance(corrected(model)["cut"], HeldSessionError)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)
    with model.session("cut") as session:
        session.forget(2, method="suffix")
    for name in ("away", "cut"):
        assert LATE in new_errata(model, name)[0] and new_errata(model, name) == []


def test_the_last_word_is_the_sessions_own(model: notes.Model, compiled: notes.Segment) -> None:
    """A session's own later edit stays, also to the value of the text, and so does an undo."""
    new_errata(model, "edited", splice=[compiled])
    new_errata(model, "undone", splice=[compiled])
    new_errata(model, "forgotten", splice=[compiled])
    corrected(model)
    assert new_errata(model, "asked", splice=[compiled], errata=[f"date={OWN}"])
    with model.session("edited") as session:
        session.edit("date", WAS, "erratum")
    with model.session("undone") as session:
        session.undo()
    with model.session("forgotten") as session:
        session.edit("date", OWN, "erratum")
        session.ask("And now?", max_tokens=1)
        session.forget(1, method="suffix")
    assert LATE not in "".join(new_errata(model, "edited"))
    assert new_errata(model, "undone") == new_errata(model, "asked") == new_errata(model, "forgotten") == []
    assert set(corrected(model, LATER)) == {"edited", "undone", "asked", "forgotten"}


def test_the_later_of_two_corrections_reaches_all(model: notes.Model, compiled: notes.Segment) -> None:
    """Also if a session sees the earlier one last."""
    names = ("p", "q")
    for name in names:
        new_errata(model, name, splice=[compiled])
    add_errata(model.workspace, errata_of(model), {"date": LATE})
    going = correct_sessions(model.workspace, errata_of(model))
    assert next(going) == ("p", 1)
    corrected(model, LATER)
    list(going)
    for name in names:
        with model.session(name) as session:
            assert session.fields["date"] == LATER
    assert holding(errata_of(model).all(), compiled) == {"date": LATER}


def test_a_correction_is_timed_as_it_is_written(tmp_path: Path) -> None:
    """A reader of the file up to a time has all earlier corrections, whatever their order."""
    errata = GlobalErrata(tmp_path / "library")
    late, early = (GlobalErratum("returns", "date", WAS, value, now()) for value in (LATE, LATER))
    errata.add([early])
    errata.add([late])
    times = [one.time for one in errata.all()]
    assert times == sorted(times) and [one.value for one in errata.all()] == [LATER, LATE]
