"""`notes ask --image --server`: the bytes go to the server, which opens no file, and answers as this process would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from projectors import image_bytes

from notes_cli.serve.registry import ASK

from .test_warm import Running, comparable, run_here, serving

QUESTION = "What shape is at the top left?"
SEES = ("-m", "notes-eye", "--seed", "1", "--json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("warm-images"), "-m", "notes-eye", "--max-body", "1") as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, server: Running, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process is: another folder than the server's, with pictures."""
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
    ["--image", "photo"],
    ["--image", "my\nphoto (1).png", "--image", "photo.png", "--image", "photo.png", "-s", "Be brief."],
    ["--image", "photo.png", "--choices", "circle,square"],
    ["--image", "photo.png", "--recompute"],
    ["--image", "photo.png", "--splice", "photo", "--erratum", "the receipt is void."],
    ["--image", "text.png"],
    ["--image", "note.txt"],
    ["--image", "none \u2603.jpg"],
    ["--image", "photo.png", "--erratum", "colour=red"],
]


def test_a_server_looks_at_what_it_is_sent(server: Running, folder: Path) -> None:
    """It compiles an image that is new, says so, and keeps it under the name that this process would give it."""
    first = run_here("ask", QUESTION, "--image", "photo.png", *SEES, "--server", server.url)
    assert first.code == 0 and "compiled photo.png as photo (18 tokens)" in first.err
    assert first.json["server"] == server.url and first.json["tokens"]["spliced"] == 17
    assert [path.name.partition(".")[0] for path in (server.home / "library").glob("*.gguf")] == ["photo"]


@pytest.mark.parametrize("arguments", CASES, ids=lambda one: repr(" ".join(one))[:60])
def test_it_answers_as_this_process_does(server: Running, folder: Path, arguments: list[str]) -> None:
    """Text, notices, document and status, for images that are compiled already and for what is none."""
    run_here("ask", QUESTION, "--image", "photo.png", "--image", "my\nphoto (1).png", *SEES, "--server", "off")
    cold = run_here("ask", QUESTION, *arguments, *SEES, "--server", "off")
    warm = run_here("ask", QUESTION, *arguments, *SEES, "--server", server.url)
    for one, other in zip(comparable(warm), comparable(cold), strict=True):
        assert one == other
    if cold.code == 0:
        assert warm.json["server"] == server.url


def test_a_session_with_images(server: Running, folder: Path) -> None:
    """Begun by either, gone on with by the other: the same turns."""
    said = {}
    for name, order in (("one", ("off", server.url)), ("two", (server.url, "off"))):
        for turn, which in enumerate(order):
            image = ["photo.png", "my\nphoto (1).png"][turn]
            found = run_here("ask", QUESTION, "--image", image, "--session", name, *SEES, "--server", which)
            assert found.code == 0, found.err
            said.setdefault(turn, []).append(found.json["answer"])
    assert all(len(set(answers)) == 1 for answers in said.values())


def test_what_cannot_be_sent(server: Running, folder: Path) -> None:
    """No file, a folder, more than the server takes: one line where it was named; by itself this process answers."""
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


def test_a_server_opens_no_file(server: Running, folder: Path) -> None:
    """Paths without bytes, bytes that are none: refused before anything is begun."""
    token = json.loads(server.file.read_text())["token"]
    words = {"grammar": None, "json_schema": None}
    photo = str(folder / "photo.png")
    for image in (
        {"word": photo, "path": photo},
        {"word": photo, "path": photo, "data": "%%%"},
        {"word": photo, "path": photo, "data": None},
        photo,
        None,
    ):
        asked = {"words": words, "following": None, "session": None, "explain": False, "images": [image]}
        found = httpx.post(f"{server.url}{ASK}", json=asked, headers={"Authorization": f"Bearer {token}"})
        assert found.status_code == 400 and "these are no words of a question" in found.text
