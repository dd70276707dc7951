"""Replays requests of real clients, recorded by `python -m bench.agents --record`, each answered as its API has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.options import ContextOptions
from notes_cli.serve.jobs import Limits

from .conftest import Served, started
from .test_agent import MARKS, SOURCES, MakeModel

REQUESTS = sorted((Path(__file__).parent / "requests").glob("*.jsonl"))
CLIENTS = 14
ANSWER = {"/v1/chat/completions": "choices", "/v1/responses": "output", "/v1/messages": "content"}
LAST = {  # of a stream
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": ("event: response.completed", "event: response.incomplete"),
    "/v1/messages": "event: message_stop",
}


@pytest.fixture(scope="module")
def local(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model with a template that has tools, a long context, and short answers."""
    path = make_model("llama", template=SOURCES["Qwen-Qwen2.5-7B-Instruct"], added=MARKS[:4], trained=65536)
    home, context = tmp_path_factory.mktemp("recorded"), ContextOptions(n_threads=1)
    with started(home, Limits(tokens=8), context=context, model=path, names=("local",)) as found:
        yield found


def test_every_client_is_recorded() -> None:
    assert len(REQUESTS) == CLIENTS


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_is_answered(local: Served, path: Path) -> None:
    """Streams end with their last event, and other answers have a text or a call."""
    previous = ""
    for line in path.read_text().splitlines():
        request = json.loads(line)
        body: dict[str, Any] = request["body"]
        if "previous_response_id" in body:
            body["previous_response_id"] = previous
        reply = local.http.post(request["path"], json=body)
        assert reply.status_code == 200, reply.text
        if body.get("stream"):
            last = reply.text.strip().split("\n\n")[-1]
            assert last.startswith(LAST[request["path"]]), last
        elif request["path"] in ANSWER:
            assert reply.json()[ANSWER[request["path"]]]
            previous = reply.json()["id"]
