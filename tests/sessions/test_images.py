"""Images in sessions: put back from disk they are as if the session had never stopped, and nothing takes them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from projectors import image_bytes

from notes_cli import config
from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.engine.context import ContextOptions
from notes_cli.errors import NotesError, SessionError
from notes_cli.measure.session import verify_session
from notes_cli.runtime.asking import Request
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions import rows
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.ledger import LedgerError, read_ledger
from notes_cli.sessions.session import Session
from notes_cli.text.skill import parse_skill


@contextmanager
def seeing(cache: str = "f16") -> Iterator[Workspace]:
    model, projector = config.shipped_eye()
    options = ContextOptions(n_ctx=512, n_threads=1, type_k=cache, type_v=cache)
    with Workspace(model, options, projector=projector) as workspace:
        yield workspace


@contextmanager
def held(workspace: Workspace, name: str = "mine") -> Iterator[Session]:
    with Sessions(paths().sessions).locked(name, new=True) as stored, Session(workspace, stored) as session:
        yield session


def photo(folder: Path, seed: int, size: tuple[int, int] = (48, 48)) -> str:
    path = folder / f"photo-{seed}.png"
    path.write_bytes(image_bytes(*size, seed=seed))
    return str(path)


@pytest.fixture
def asked(tmp_path: Path) -> list[Request]:
    """Four turns: with an image, without, with one of a single line of rows, with the first one again."""
    one, long = photo(tmp_path, 1), photo(tmp_path, 2, (96, 12))
    return [
        Request("What is the total?", images=[one], limit=3, system="Be brief."),
        Request("What is the day?", errata=["the receipt is void."], limit=3),
        Request("How many shapes are there?", images=[long], limit=3),
        Request("What is the total?", images=[one], limit=3),
    ]


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_a_session_with_images_goes_on_as_if_it_had_never_stopped(
    asked: list[Request], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn in a process of its own, put back in small parts, gives the tokens, positions and logits of one in
    which all of it is said; an undo goes back to the very rows."""
    monkeypatch.setattr(rows, "CHUNK", 10)
    with seeing(cache) as workspace, held(workspace, "whole") as whole:
        for request in asked:
            whole.ask(request)
        tokens, images = whole.state.tokens, whole.state.images
        wanted = whole.notebook.lookahead([7])[0]
    assert [(image.last - image.first, image.positions, image.grid) for image in images] == [
        (16, 4, (4, 4)),
        (8, 8, (1, 8)),
        (16, 4, (4, 4)),
    ]
    for request in asked:
        with seeing(cache) as workspace, held(workspace) as session:
            session.ask(request)
    with seeing(cache) as workspace, held(workspace) as session:
        assert session.state.tokens == tokens and session.state.images == images
        assert np.array_equal(session.notebook.lookahead([7])[0], wanted)
        session.undo()
        assert session.state.images == images[:2]
        answer = session.ask(asked[-1])
        assert session.state.tokens == tokens and answer.text == session.state.entries[-1].text
        assert np.array_equal(session.notebook.lookahead([7])[0], wanted)
        with session.fork("other") as other:
            other.ask(Request("What is the day?", limit=2))
            assert other.state.images == images


def test_nothing_takes_an_image_apart(asked: list[Request], tmp_path: Path) -> None:
    """What would decode its rows as tokens is refused with a reason, or done by an erratum; nothing changes."""
    skill = parse_skill("total: 42", source="note.txt", default="note")
    with seeing() as workspace, held(workspace) as session:
        session.ask(Request("What is the total?", [compile_skill(workspace, skill)], images=asked[0].images, limit=2))
        tokens = session.state.tokens
        assert session.edit("total", "17").method == "erratum"
        session.undo()
        for method in ("field", "suffix"):
            with pytest.raises(NotesError, match="the session has images"):
                session.edit("total", "17", Method.parse(method))
        with pytest.raises(SessionError, match="has images, and nothing of such a session can be taken out"):
            session.forget(["1"])
        with pytest.raises(NotesError, match="which a prefill of its tokens cannot show"):
            verify_session(session, [])
        assert session.state.tokens == tokens
        session.ask(Request("What is the day?", limit=2))


def test_results_of_tools_come_without_images(asked: list[Request]) -> None:
    """An image beside what a tool has returned is refused, not dropped, and nothing has changed."""
    with seeing() as workspace, held(workspace) as session:
        session.ask(asked[1])
        tokens = session.state.tokens
        with pytest.raises(SessionError, match="images and errata do not go with the results of tools"):
            session.ask(Request("", results=[("scan", "done")], images=asked[0].images))
        assert session.state.tokens == tokens


def test_older_versions_do_not_read_it(asked: list[Request]) -> None:
    """From the first image on the ledger has format 4; one of texts has what it had."""
    with seeing() as workspace, held(workspace) as session:
        session.ask(Request("What is the total?", limit=2))
        ledger = session.stored.ledger
        assert json.loads(ledger.read_text().splitlines()[0])["format"] == 2
        session.ask(asked[2])
        assert json.loads(ledger.read_text().splitlines()[0])["format"] == 4
        session.undo()


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": 1000},
        {"first": -1},
        {"positions": 3},
        {"grid": [2, 4]},
        {"grid": None},
        {"grid": ["4", 4]},
        {"first": "4"},
    ],
)
def test_a_ledger_whose_images_do_not_fit_is_damaged(asked: list[Request], wrong: dict[str, object]) -> None:
    """Numbers of another image, or none at all: never rows in another place than they were."""
    with seeing() as workspace, held(workspace) as session:
        session.ask(asked[0])
        lines = [json.loads(line) for line in session.stored.ledger.read_text().splitlines()]
    assert read_ledger(b"".join(json.dumps(line).encode() + b"\n" for line in lines)).state.images
    lines[1]["images"][0] |= wrong
    with pytest.raises(LedgerError):
        read_ledger(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
