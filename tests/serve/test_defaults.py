"""Skills and corrections of the server's options: for requests that name none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import SAMPLES

from notes_cli.errors import NotesError
from notes_cli.serve.prepare import Options

from .conftest import QUESTION, Served, pieces, reply_text, started

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def served(library: Path) -> Iterator[Served]:
    """A server with a text and a correction as its options."""
    options = Options(errata=("date=2026-07-01",), splice=(str(SAMPLES / "returns" / "SKILL.md"),))
    with started(library, options) as found:
        yield found


def kinds(served: Served, **notes: Any) -> list[str]:
    return [kind for kind, _, _ in pieces(served.chat(MESSAGES, max_tokens=8, notes={"explain": True, **notes}))]


def test_they_are_as_if_the_request_had_named_them(served: Served) -> None:
    """In all three APIs, and counted, explained and answered alike; a second turn states the correction no more."""
    given = served.ask(splice=["returns"], errata=["date=2026-07-01"])
    reply = served.ask()
    assert reply_text(reply) == reply_text(given) == "refused"
    assert [(kind, tokens) for kind, _, tokens in pieces(reply)] == [(kind, n) for kind, _, n in pieces(given)]
    counted = served.http.post("/v1/messages/count_tokens", json={"messages": MESSAGES}).json()["input_tokens"]
    assert counted == reply["usage"]["prompt_tokens"]
    body = {"messages": MESSAGES, "max_tokens": 8}
    assert served.http.post("/v1/messages", json=body).json()["content"][0]["text"] == "refused"
    [item] = served.http.post("/v1/responses", json={"input": QUESTION}).json()["output"]
    assert item["content"][0]["text"] == "refused"
    explained = served.http.post("/v1/notes/explain", json={"messages": MESSAGES}).json()
    assert sum(piece["tokens"] for piece in explained["pieces"]) == reply["usage"]["prompt_tokens"]
    more = [*MESSAGES, {"role": "assistant", "content": "refused"}, *MESSAGES]
    again = [kind for kind, _, _ in pieces(served.chat(more, notes={"explain": True}))]
    assert again.count("erratum") == again.count("splice") == 1
    listed = served.http.get("/v1/notes").json()
    assert (listed["splice"], listed["errata"]) == (["returns"], ["date=2026-07-01"])  # the page ticks them


def test_decisions_have_them_too(served: Served) -> None:
    """The probabilities are those of a request that names the skills and corrections; not so with its own skills."""
    options = ["accepted", "refused"]
    question = {"type": "choice", "instructions": QUESTION, "choices": [{"value": option} for option in options]}

    def answer(**more: Any) -> Any:
        reply = served.http.post("/v1/decisions", json={"input": "", "questions": [question], **more}).json()
        return reply["answers"][0], reply["usage"]["input_tokens"]

    given = answer(notes={"splice": ["returns"], "errata": ["date=2026-07-01"]})
    assert answer() == given and given[0]["choice"] == "refused"
    assert answer(notes={"splice": []})[1] < given[1] and answer(notes={"errata": []})[0]["choice"] == "accepted"


def test_a_default_that_is_the_memory_is_there_once(served: Served) -> None:
    """A request that names it as its memory has it in that place, with the corrections."""
    given = served.ask(ask=True, memory="returns", splice=[], errata=["date=2026-07-01"])
    reply = served.ask(ask=True, memory="Returns")
    assert pieces(reply) == pieces(given) and reply_text(reply) == reply_text(given) == "refused"


def test_a_request_that_names_its_own_is_left_as_it_is(served: Served) -> None:
    """Skills, an empty list of them, a skill in the model's name, a session; corrections alone replace corrections."""
    assert "splice" not in kinds(served, splice=[]) and "erratum" not in kinds(served, splice=["support"])
    named = served.chat(MESSAGES, model="tiny@support", max_tokens=8, notes={"explain": True})
    assert [kind for kind, _, _ in pieces(named)].count("splice") == 1 and "erratum" not in str(pieces(named))
    assert "splice" not in kinds(served, session="mine")
    assert reply_text(served.ask(errata=[])) == "accepted" and kinds(served, errata=[]).count("splice") == 1


@pytest.mark.parametrize(("word", "error"), [("nothing", "no compiled skill"), ("-", "- is no text and no skill")])
def test_a_skill_that_there_is_not_ends_the_server(library: Path, word: str, error: str) -> None:
    with pytest.raises(NotesError, match=error), started(library, Options(splice=(word,))):
        pass
