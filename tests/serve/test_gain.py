"""Tests the savings of splicing in headers, in usage, and in the library's records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.engine.segment import Prefill
from notes_cli.library.container import open_segment, write_segment
from notes_cli.library.segment_files import Spliced, spliced_from
from notes_cli.sessions.folder import Sessions

from .conftest import QUESTION, Json, Served, compile_into, started

GIVEN: Json = {"messages": [{"role": "user", "content": QUESTION}], "notes": {"splice": ["returns"]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A segment of `returns` with a recorded compile time of one second per token."""
    compile_into(tmp_path, "returns")
    (found,) = (tmp_path / "library").glob("returns.*.gguf")
    segment = open_segment(found)
    write_segment(found, replace(segment, prefill=Prefill(float(len(segment)), len(segment), 1)))
    return found


@pytest.fixture
def own(path: Path) -> Iterator[Served]:
    with started(path.parents[1]) as found:
        yield found


def asked(served: Served, **more: object) -> tuple[dict[str, str], Json]:
    """Return the x-notes headers, and `notes` of the usage."""
    reply = served.http.post("/v1/chat/completions", json={**GIVEN, **more})
    assert reply.status_code == 200, reply.text
    found = {name: value for name, value in reply.headers.items() if name.startswith("x-notes-")}
    return found, reply.json()["usage"]["prompt_tokens_details"]["notes"]


def test_headers_and_usage(own: Served, path: Path) -> None:
    """Spliced tokens count as saved, cached ones of an earlier prompt do not."""
    tokens = len(open_segment(path))
    headers, usage = asked(own)
    assert usage == {"spliced_tokens": tokens, "decoded_tokens": usage["decoded_tokens"], "saved_ms": 1000 * tokens}
    assert headers == {f"x-notes-{name.replace('_', '-')}": str(number) for name, number in usage.items()}
    headers, usage = asked(own)
    assert (usage["spliced_tokens"], usage["saved_ms"], headers["x-notes-saved-ms"]) == (0, 0, "0")
    assert spliced_from(path) == Spliced(1, tokens, float(tokens))
    _, usage = asked(own, notes={"splice": ["returns"], "recompute": True})
    assert (usage["spliced_tokens"], usage["saved_ms"]) == (0, 0)
    assert spliced_from(path).times == 1


def test_the_last_chunk_of_a_stream_has_it(own: Served, path: Path) -> None:
    """With usage, if requested, as the headers are sent before."""
    asked = {**GIVEN, "stream": True, "stream_options": {"include_usage": True}}
    reply = own.http.post("/v1/chat/completions", json=asked)
    *_, last = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    assert not [name for name in reply.headers if name.startswith("x-notes-")]
    assert json.loads(last)["usage"]["prompt_tokens_details"]["notes"]["saved_ms"] == 1000 * len(open_segment(path))


def test_no_time_where_none_is_known(path: Path) -> None:
    """A file without a time, and a session restored from disk, have only tokens."""
    tokens = len(open_segment(path))
    write_segment(path, replace(open_segment(path), prefill=None))
    with started(path.parents[1]) as served:
        headers, usage = asked(served)
        assert usage["spliced_tokens"] == tokens and "saved_ms" not in usage and "x-notes-saved-ms" not in headers
        asked(served, notes={"splice": ["returns"], "session": "mine"})
        headers, usage = asked(served, notes={"session": "mine"})
        assert usage["spliced_tokens"] > tokens and "saved_ms" not in usage
        assert Sessions(path.parents[1] / "sessions").names() == ["mine"]
    assert spliced_from(path) == Spliced(2, 2 * tokens, 0.0)
