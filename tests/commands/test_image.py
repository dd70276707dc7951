"""Images on the command line: `notes compile photo.png`, `notes ask --image`, and errors of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from projectors import image_bytes, write_projector

from notes_cli import config

from .conftest import Notes


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(image_bytes(48, 48, seed=1))
    return path


SEES = ("-m", "notes-eye", "-t", "1")


def test_ask_with_an_image_compiles_it_once(notes: Notes, photo: Path, tmp_path: Path) -> None:
    """After skills, before errata; later it is spliced from disk, and another image of that name is kept separately."""
    (tmp_path / "note.txt").write_text("Answer in one word.")
    words = ("What is the total?", "--splice", tmp_path / "note.txt", "--erratum", "the receipt is void.")
    first = notes("ask", *words, "--image", photo, *SEES)
    assert first.code == 0 and "as photo (18 tokens)" in first.err
    second = notes("ask", *words, "--image", photo, "--json", *SEES)
    assert "compiled" not in second.err
    pieces = [(piece["kind"], piece["name"]) for piece in second.json["pieces"]]
    assert list(dict.fromkeys(pair for pair in pieces if pair[0] not in ("text", "answer"))) == [
        ("splice", "note"),
        ("splice", "photo"),
        ("erratum", ""),
        ("question", ""),
    ]
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "photo.png"
    other.write_bytes(image_bytes(48, 48, seed=2))
    third = notes("ask", "What is the total?", "--image", other, *SEES)
    assert third.code == 0 and "as photo-" in third.err
    plan = notes("ask", "What?", "--image", photo, "--image", other, "--explain", *SEES)
    assert plan.code == 0 and plan.out.count("spliced") >= 2


def test_a_model_without_vision_says_so(notes: Notes, photo: Path, tmp_path: Path) -> None:
    """Without a projector, with another model's, or with a wrong file: one line with advice."""
    blind = config.shipped_model()
    text = notes("compile", photo, "-m", blind)
    assert text.code == 1 and "--mmproj FILE" in text.err
    wrong = notes("compile", photo, "-m", blind, "--mmproj", config.shipped_eye()[1])
    assert wrong.code == 1 and "is no projector for notes-tiny (error" in wrong.err
    same_width = write_projector(tmp_path / "mmproj.gguf", "qwen2vl_merger", 224)  # notes-tiny's, too
    marked = notes("compile", photo, "-m", blind, "--mmproj", same_width)
    assert marked.code == 1 and "marks an image by <|vision_start|>" in marked.err
    for no_projector, message in ((blind, "is no projector (mmproj): its architecture is llama"), (photo, "photo.png")):
        outcome = notes("compile", photo, *SEES, "--mmproj", no_projector)
        assert outcome.code == 1 and message in outcome.err and "Traceback" not in outcome.err


def test_an_image_is_not_quantized(notes: Notes, photo: Path) -> None:
    """Refused with the reason and advice, and nothing is written; f16 is accepted."""
    for kv in ("q8_0", "f16/q8_0"):
        outcome = notes("compile", photo, "--kv", kv, *SEES)
        assert outcome.code == 1 and f"photo is an image and cannot be kept as {kv}" in outcome.err
        assert "Take --kv f16" in outcome.err
    assert notes("ls", "--json").json == []
    assert notes("compile", photo, "--kv", "f16", *SEES).code == 0
