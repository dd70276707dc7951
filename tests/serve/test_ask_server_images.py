"""Tests `notes ask --image --server`: the bytes are sent, as the server opens no file, and the answer is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from projectors import image_bytes

from .test_ask_server import Running, comparable, run_here, serving

QUESTION = "What shape is at the top left?"
SEES = ("-m", "notes-eye", "--seed", "1", "--json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("warm-images"), "-m", "notes-eye", "--max-body", "1") as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, server: Running, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder other than the server's, with pictures."""
    monkeypatch.setenv("NOTES_HOME", str(server.home))
    monkeypatch.setenv("NOTES_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("photo.png", "my\nphoto (1).png", "text.png")):
        (tmp_path / name).write_bytes(image_bytes(48, 48, seed=seed))
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "note.txt").write_text("no picture")
    (tmp_path / "none \u2603.jpg").write_bytes(b"\xff\xd8\xff")
    return tmp_path


CASES = [
    ["--image", "photo.png"],
    ["--image", "photo.png", "--explain"],
    ["--image", "my\nphoto (1).png", "--image", "photo.png", "--image", "photo.png", "-s", "Be brief."],
    ["--image", "photo.png", "--choices", "circle,square"],
    ["--image", "photo.png", "--recompute"],
    ["--image", "photo.png", "--splice", "photo", "--erratum", "the receipt is void."],
]


@pytest.mark.parametrize("arguments", CASES, ids=lambda one: repr(" ".join(one))[:60])
def test_it_answers_as_this_process_does(server: Running, folder: Path, arguments: list[str]) -> None:
    """The same text, document and status, for compiled images."""
    run_here("ask", QUESTION, "--image", "photo.png", "--image", "my\nphoto (1).png", *SEES, "--server", "off")
    cold = run_here("ask", QUESTION, *arguments, *SEES, "--server", "off")
    warm = run_here("ask", QUESTION, *arguments, *SEES, "--server", server.url)
    (_, here, _), (_, there, _) = comparable(cold), comparable(warm)
    for document in (here, there):
        for piece in document["pieces"]:
            piece["name"] = ""  # a sent image is named after its bytes
    assert there == here and cold.code == 0 and warm.json["server"] == server.url


def test_what_cannot_be_sent(server: Running, folder: Path) -> None:
    """No file, a folder, too large: one line if the server was named, else this process answers."""
    (folder / "noise.png").write_bytes(image_bytes(700, 700, seed=1))
    for given, why in (
        ("gone.png", "gone.png is no file of an image"),
        (".", ". is no file of an image"),
        ("noise.png", "the body is larger than 1,048,576 bytes"),
    ):
        found = run_here("ask", QUESTION, "--image", given, *SEES, "--server", server.url)
        assert found.code == 1 and why in found.err and len(found.err.splitlines()) == 1
    auto = run_here("ask", QUESTION, "--image", "noise.png", *SEES, "--server", "auto")
    assert auto.code == 0 and auto.json["server"] is None
