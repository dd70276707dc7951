"""Tests images in messages of OpenAI's API: matched by their bytes, never fetched, never text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from projectors import image_bytes

from notes_cli import config
from notes_cli.api import Model
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.images import read_picture
from notes_cli.library import check
from notes_cli.library.store import Library
from notes_cli.runtime.workspace import Workspace

from .conftest import Served, reply_text, started

ONE, TWO = (image_bytes(48, 48, seed=seed) for seed in (1, 2))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on the small vision model, with one compiled image."""
    home = tmp_path_factory.mktemp("seeing")
    model, projector = config.shipped_eye()
    (home / "photo.png").write_bytes(ONE)
    options = ContextOptions(n_threads=1)
    with Model(Workspace(model, options, paths=Paths.under(home), projector=projector)) as opened:
        opened.compile(home / "photo.png")
    with started(home, model=model, projector=projector) as served:
        yield served


def image(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def shown(*parts: Any) -> list[dict[str, Any]]:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]


def test_an_image_is_known_by_its_bytes(seeing: Served) -> None:
    """A compiled one is spliced under any name, another is compiled and stored; both are answered as alone."""
    found = seeing.chat(shown(image(ONE), "What is the total?"), notes={"explain": True})
    named = [one for one in found["notes"]["pieces"] if one["name"]]
    assert {one["name"] for one in named} == {"photo"} and sum(one["tokens"] for one in named) == 18
    assert named[-1]["how"] == "spliced"
    for _ in range(2):
        other = seeing.chat(shown(image(TWO), "What is the total?"), notes={"explain": True})
        piece = [one for one in other["notes"]["pieces"] if one["name"]][-1]
        assert piece["name"] == f"image-{read_picture(TWO, '').sha256[:16]}" and piece["how"] in ("spliced", "live")
    recomputed = seeing.chat(shown(image(TWO), "What is the total?"), notes={"recompute": True, "explain": True})
    assert not any(one["how"] == "spliced" for one in recomputed["notes"]["pieces"])
    assert reply_text(recomputed) == reply_text(other)


def test_several_images_and_a_conversation(seeing: Served) -> None:
    messages = shown("Look:", image(ONE), image(TWO), "What shape is at the top left in the first picture?")
    first = seeing.chat(messages, notes={"explain": True}, max_tokens=4)
    messages += [{"role": "assistant", "content": reply_text(first)}, *shown(image(ONE), "What is the total?")]
    second = seeing.chat(messages, notes={"explain": True}, max_tokens=4)
    names = [one["name"] for one in second["notes"]["pieces"] if one["name"]]
    assert len(set(names)) == 3 and "photo" in names and "photo-2" in names
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 36


def test_bad_images_are_refused(seeing: Served) -> None:
    whole, url = image(ONE), "data:image/png;base64,%%%"
    for part, message in (
        (image(b"no image"), "is no image that can be read"),
        (image(ONE[:200]), "cut off or damaged"),
        ({**whole, "image_url": {"url": "https://example.org/a.png"}}, "no image is fetched"),
        ({**whole, "image_url": {"url": "file:///etc/passwd"}}, "no image is fetched"),
        ({**whole, "image_url": {"url": url}}, "is not base64"),
        ({**whole, "image_url": "data:"}, "must be a JSON object"),
        ({"type": "input_audio", "input_audio": {}}, "only text is supported"),
    ):
        assert message in seeing.chat(shown(part, "What?"), status=400)["message"]


def test_who_shares_nothing_shares_no_image(seeing: Served, home: Path) -> None:
    """Nor is a text an image."""
    before = sorted(path.name for path in (seeing.home / "library").iterdir())
    three = image_bytes(48, 48, seed=3)
    seeing.chat(shown(image(three), "What is the total?"), notes={"cache_salt": "mine"}, max_tokens=2)
    assert sorted(path.name for path in (seeing.home / "library").iterdir()) == before
    found = seeing.chat(shown(read_picture(ONE, "").text, "What is the total?"), notes={"explain": True}, max_tokens=2)
    assert not any(one["name"] for one in found["notes"]["pieces"])


def test_explaining_compiles_nothing(seeing: Served, home: Path) -> None:
    """A new image is explained without encoding it; a session is refused."""
    before = sorted(path.name for path in (seeing.home / "library").iterdir())
    messages = shown(image(image_bytes(48, 48, seed=20)), "What is the total?")
    reply = seeing.http.post("/v1/notes/explain", json={"messages": messages})
    assert reply.status_code == 200, reply.text
    assert any(one["name"].startswith("image-") and one["how"] == "spliced" for one in reply.json()["pieces"])
    assert sorted(path.name for path in (seeing.home / "library").iterdir()) == before
    refused = seeing.http.post("/v1/notes/explain", json={"messages": messages, "notes": {"session": "mine"}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "notes.session"


def test_a_private_image_is_read_once_in_a_conversation(seeing: Served, home: Path) -> None:
    """Its K/V serves the next turn like a stored one's, but no other salt."""
    four, salt = image_bytes(48, 48, seed=4), {"cache_salt": "turns", "explain": True}
    messages = shown(image(four), "What is the total?")
    first = seeing.chat(messages, notes=salt, max_tokens=2)
    messages += [{"role": "assistant", "content": reply_text(first)}, *shown("And now?")]
    second = seeing.chat(messages, notes=salt, max_tokens=2)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]
    other = seeing.chat(messages, notes={**salt, "cache_salt": "others"}, max_tokens=2)
    assert not any(one["how"] == "live" for one in other["notes"]["pieces"])


def test_images_that_are_sent_push_nothing_else_out(seeing: Served, home: Path) -> None:
    """A full library evicts them first; the user's own compiled image stays."""
    library = seeing.scheduler.workspace.library
    assert isinstance(library, Library)
    photo, *_ = [one for one in check.library_files(library.folder) if one.name == "photo"]
    before, library.max_size = library.max_size, 3 * photo.nbytes
    try:
        for seed in range(10, 14):
            seeing.chat(shown(image(image_bytes(48, 48, seed=seed)), "What is the total?"), max_tokens=1)
            assert library.names()[-1] == "photo" and len(library.names()) <= 4
    finally:
        library.max_size = before


def test_a_turn_of_a_session_is_what_it_would_be_without(seeing: Served, home: Path) -> None:
    """Texts of a message are joined as without a session, and none is dropped."""
    parts = shown("Look at this.", image(ONE), "What is the total?")
    assert seeing.chat(shown(image(ONE), "What?"), notes={"session": "parts"}, max_tokens=1)
    system = {"role": "system", "content": parts[0]["content"]}
    error = seeing.chat([system, *shown("What?")], 400, notes={"session": "other"})
    assert "has no images" in error["message"]
    texts = shown("One line.", "What is the total?")
    both = [seeing.chat(texts, notes={"explain": True, **more}, max_tokens=1) for more in ({}, {"session": "texts"})]
    assert both[0]["usage"]["prompt_tokens"] == both[1]["usage"]["prompt_tokens"]
    first = seeing.chat(shown(image(ONE), "What?"), notes={"session": "whole", "recompute": True, "explain": True})
    assert not any(one["how"] == "spliced" for one in first["notes"]["pieces"])


def test_a_model_without_vision_says_so(served: Served) -> None:
    error = served.chat(shown(image(ONE), "What?"), status=400)
    assert "projector" in error["message"]
    assert served.ask()
