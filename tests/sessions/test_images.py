"""Images in sessions: restored from disk without a difference, and never split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from projectors import image_bytes
from reference import nmse

from notes_cli import config
from notes_cli.editing.methods import Method
from notes_cli.engine.limits import ContextOptions
from notes_cli.errors import NotesError, SessionError
from notes_cli.measure.verify import verify_session
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions import session_kv
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.session import Session
from notes_cli.text.skill import parse_skill

from .snapshots import forge
from .test_forget import held

FOUR = 'root ::= "four"'  # a fixed answer


@contextmanager
def seeing(cache: str = "f16") -> Iterator[Workspace]:
    model, projector = config.shipped_eye()
    options = ContextOptions(n_ctx=512, n_threads=1, type_k=cache, type_v=cache)
    with Workspace(model, options, projector=projector) as workspace:
        yield workspace


def photo(folder: Path, seed: int, size: tuple[int, int] = (48, 48)) -> str:
    path = folder / f"photo-{seed}.png"
    path.write_bytes(image_bytes(*size, seed=seed))
    return str(path)


@pytest.fixture
def asked(tmp_path: Path) -> list[Request]:
    """Four turns: with an image, without one, with an image of a single line, with the first image again."""
    one, long = photo(tmp_path, 1), photo(tmp_path, 2, (96, 12))
    return [
        Request("What is the total?", images=[one], max_tokens=3, system="Be brief."),
        Request("What is the day?", errata=["the receipt is void."], max_tokens=3),
        Request("How many shapes are there?", images=[long], max_tokens=3),
        Request("What is the total?", images=[one], max_tokens=3),
    ]


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_a_session_with_images_goes_on_as_if_it_had_never_stopped(
    asked: list[Request], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored for each turn: tokens, positions and logits are equal; an undo restores the K/V."""
    monkeypatch.setattr(session_kv, "CHUNK", 10)
    with seeing(cache) as workspace, held(workspace, "whole") as whole:
        for request in asked:
            whole.ask(request)
        tokens, images = whole.state.tokens, whole.state.images
        wanted = whole.sequence.lookahead([7])[0]
    assert [(image.last - image.first, image.positions, image.grid) for image in images] == [
        (16, 4, (4, 4)),
        (8, 8, (1, 8)),
        (16, 4, (4, 4)),
    ]
    with seeing(cache) as workspace:
        for request in asked:
            with held(workspace) as session:
                session.ask(request)
    with seeing(cache) as workspace, held(workspace) as session:
        assert session.state.tokens == tokens and session.state.images == images
        assert np.array_equal(session.sequence.lookahead([7])[0], wanted)
        session.undo()
        assert session.state.images == images[:2]
        answer = session.ask(asked[-1])
        assert session.state.tokens == tokens and answer.text == session.state.entries[-1].text
        assert np.array_equal(session.sequence.lookahead([7])[0], wanted)
        with session.fork("other") as other:
            other.ask(Request("What is the day?", max_tokens=2))
            assert other.state.images == images


def test_nothing_takes_an_image_apart(asked: list[Request], tmp_path: Path) -> None:
    """Operations that would decode an image as tokens are refused with a reason, or use an erratum; nothing changes."""
    skill = parse_skill("total: 42", source="note.txt", default="note")
    with seeing() as workspace, held(workspace) as session:
        session.ask(
            Request("What is the total?", [compile_skill(workspace, skill)], images=asked[0].images, max_tokens=2)
        )
        tokens = session.state.tokens
        assert session.edit("total", "17", Method.parse("erratum")).how == "erratum"
        session.undo()
        with pytest.raises(NotesError, match="an image follows"):
            session.edit("total", "17", Method.parse("suffix"))
        with pytest.raises(NotesError, match="which a prefill of its tokens cannot show"):
            verify_session(session, [])
        with pytest.raises(SessionError, match="images, errata and a memory do not go with the results of tools"):
            session.ask(Request("", results=[("scan", "done")], images=asked[0].images))
        session.ask(Request("What is the day?", max_tokens=2))
        gone = session.forget(["1"])  # with the image in the message of its question; the system message stays
        assert gone.skills == ("photo-1",) and not session.state.images and session.state.fields == {"total": "42"}
        session.undo()
        session.undo()
        assert session.state.tokens == tokens


@pytest.mark.parametrize(("gone", "cache"), [(["2"], "f16"), (["3"], "f32"), (["2", "3"], "f32")])
def test_turns_around_images_are_taken_out(asked: list[Request], gone: list[str], cache: str) -> None:
    """By cut, with their images, as if they had never been; the saved session is the same, undo restores all."""
    asked = [replace(request, grammar=FOUR, max_tokens=8) for request in asked]
    left = [request for number, request in enumerate(asked, 1) if str(number) not in gone]
    with seeing(cache) as workspace, held(workspace, "without") as without, held(workspace) as session:
        for request in left:
            without.ask(request)
        for request in asked:
            session.ask(request)
        had = session.state.tokens, session.state.images
        plan = session.forget(gone, dry=True)
        found = session.forget(gone)
        assert found == plan and found.tokens == len(session.state.tokens)
        assert (session.state.tokens, session.state.images) == (without.state.tokens, without.state.images)
        for mine, other in zip(session.state.images, without.state.images, strict=True):
            rows = [one.sequence.read(im.first, im.last, "f32") for one, im in ((session, mine), (without, other))]
            for one, wanted in zip(rows[0][0], rows[1][0], strict=True):
                assert nmse(one.v, wanted.v) < 1e-9 and nmse(one.k, wanted.k) < (1e-5 if cache == "f16" else 1e-9)
        logits = session.sequence.lookahead([7])[0]
        state = session.state
    with seeing(cache) as workspace, held(workspace) as session:
        assert (session.state.tokens, session.state.images) == (state.tokens, state.images)
        assert np.array_equal(session.sequence.lookahead([7])[0], logits)
        session.ask(Request("What is the day?", max_tokens=2))
        session.undo()
        session.undo()
        assert (session.state.tokens, session.state.images) == had
        session.sequence.lookahead([7])


def test_fields_beside_images_are_edited(asked: list[Request]) -> None:
    """A longer value before an image moves it, bit for bit, also to the disk."""
    skill = parse_skill("The shop is open.\n\ntotal: 42\n\nBe kind.", source="note.txt", default="note")
    with seeing("f32") as workspace, held(workspace) as session:
        note = compile_skill(workspace, skill)
        session.ask(Request("What is the total?", [note], images=asked[0].images, max_tokens=2))
        (image,), rows = session.state.images, session.sequence.read(*_span(session), "f32")[0]
        session.edit("total", "one hundred and 17", Method.parse("field"))
        (moved,) = session.state.images
        assert moved.first > image.first and moved.last - moved.first == image.last - image.first
        for one, before in zip(session.sequence.read(*_span(session), "f32")[0], rows, strict=True):
            assert nmse(one.v, before.v) < 1e-12
        state = session.state
    with seeing("f32") as workspace, held(workspace) as session:
        assert session.state.images == state.images
        session.sequence.lookahead([7])


def test_a_text_with_images_in_a_session(tmp_path: Path) -> None:
    """The session continues; its fields are corrected by errata, and edits of its K/V are refused."""
    (tmp_path / "photo.png").write_bytes(image_bytes(36, 60, seed=1))
    (tmp_path / "report.md").write_text("Read this: ![receipt](photo.png)\n\nday: four")
    with seeing() as workspace, held(workspace) as session:
        session.ask(Request("What is the total?", [str(tmp_path / "report.md")], max_tokens=2))
        for method in ("field", "suffix"):
            with pytest.raises(NotesError, match="report has an image, and its fields cannot be edited by"):
                session.edit("day", "five", Method.parse(method))
        edited = session.edit("day", "five")
        assert edited.how == "erratum" and "has an image" in edited.detail
        logits = session.sequence.lookahead([7])[0]
    with seeing() as workspace, held(workspace) as session:
        assert np.array_equal(session.sequence.lookahead([7])[0], logits)
        answer = session.ask(Request("What is the day?", max_tokens=2))
        assert any(piece.kind == "erratum" for piece in answer.pieces)


def _span(session: Session) -> tuple[int, int]:
    (image,) = session.state.images
    return image.first, image.last


def test_a_snapshot_whose_images_do_not_fit_is_damaged(asked: list[Request]) -> None:
    """Invalid numbers are refused: K/V is never placed at a wrong position."""
    with seeing() as workspace, held(workspace) as session:
        session.ask(asked[0])
        stored = session.stored
    wrong: list[tuple[str, object]] = [("last", 1000), ("first", -1), ("positions", 3)]
    for key, value in (*wrong, ("grid", (2, 4)), ("grid", None)):
        saved = stored.path(1).read_bytes()
        forge(stored, lambda state: replace(state, images=(replace(state.images[0], **{key: value}),)))  # noqa: B023
        with pytest.raises(SessionError, match="contradict"):
            _ = SessionFolder(stored.folder).state
        stored.path(1).write_bytes(saved)
        assert SessionFolder(stored.folder).state == stored.state
