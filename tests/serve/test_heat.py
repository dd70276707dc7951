"""Heat: a probe over HTTP finds what one alone does, between the answers of others, and leaves nothing over."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from notes_cli import config
from notes_cli.api import Model
from notes_cli.config import Paths
from notes_cli.engine.options import ContextOptions
from notes_cli.measure.picture import as_json
from notes_cli.measure.probing import Probing
from notes_cli.runtime.workspace import Workspace

from .conftest import QUESTION, Json, Served, started, told

ASKED = {"skill": "returns", "field": "date", "value": "2026-07-01", "question": QUESTION}
LONG = {**ASKED, "window": 1}


def heat(served: Served, status: int = 200, **more: Any) -> Json:
    """The picture, or the error."""
    reply = served.http.post("/v1/notes/heat", json={**ASKED, "window": 16, **more})
    assert reply.status_code == status, reply.text
    found: Json = reply.json()
    return found if status == 200 else found["error"]


def taken(served: Served) -> tuple[int, int]:
    """What of the context is free and used, and that nothing is promised to anybody."""
    scheduler = served.scheduler

    def look() -> tuple[int, int]:
        while scheduler.prefixes.evict():
            pass
        assert not scheduler.budget.promised
        return scheduler.workspace.context.free, scheduler.workspace.context.used

    found: tuple[int, int] = served.at_context(look)
    return found


@contextmanager
def streaming(served: Served, asked: Json) -> Iterator[Iterator[Json]]:
    """The events of a probe, as they come."""
    with served.http.stream("POST", "/v1/notes/heat", json={**asked, "stream": True}) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        yield (json.loads(line) for line in lines if line != "[DONE]")


def test_the_picture_is_that_of_the_command(served: Served, library: Path) -> None:
    """The same figures as a probe alone, with the text that they are of."""
    options = ContextOptions(n_threads=1)
    with Model(Workspace(config.shipped_model(), options, paths=Paths.under(library))) as model:
        alone = as_json(model.probe(Probing(**ASKED, window=16)))
        text = model.segment("returns").text
    found = heat(served)
    assert (found["text"], found["version"], found["decision"]) == (text, 1, {"stale": "accepted", "fresh": "refused"})
    assert {key for key in found if key != "text"} == {"version", *alone}
    assert [one["text"] for one in found["windows"]] == [text[one["start"] : one["end"]] for one in found["windows"]]
    for one, other in zip(found["windows"], alone["windows"], strict=True):
        assert [one["alone"], one["suffix"]] == pytest.approx([other["alone"], other["suffix"]], abs=1e-2)
    assert max(abs(one["alone"]) for one in found["windows"]) > 0.5, "no heat anywhere"


def test_progress_then_the_picture(served: Served) -> None:
    """As a stream it tells how far it has come, first of the compile, then of the mixes, and then what was found."""
    with streaming(served, {**ASKED, "window": 16}) as events:
        *progress, picture = list(events)
    steps = [one["step"] for one in progress]
    assert steps == sorted(steps, key=["compiling the new text", "probing"].index) and len(set(steps)) == 2
    done = [one["done"] for one in progress if one["step"] == "probing"]
    assert done == list(range(1, progress[-1]["total"] + 1)) and len(done) > 10
    assert picture["heat"]["field_only"] == pytest.approx(heat(served)["field_only"], abs=1e-2)


def test_others_are_answered_meanwhile(served: Served) -> None:
    """A question that comes during a probe is answered before its end, and as without it; another probe waits."""
    calm = told(served.ask(splice=["returns"], errata={"date": "2026-07-01"}))
    with streaming(served, LONG) as events, streaming(served, {**ASKED, "window": 16}) as others:
        next(events)
        assert told(served.ask(splice=["returns"], errata={"date": "2026-07-01"})) == calm == "refused"
        assert served.at_context(lambda: served.scheduler.budget.promised), "ended before the answer came"
        assert list(events)[-1]["heat"]["skill"] == list(others)[-1]["heat"]["skill"] == "returns"


def test_who_goes_away_ends_it(served: Served) -> None:
    """When its client has gone a probe ends at once, and gives back all it had: as a stream and not."""
    before = taken(served)
    with streaming(served, LONG) as events:
        next(events)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/notes/heat", json=LONG, timeout=httpx.Timeout(10, read=0.1))
    end = time.monotonic() + 10
    while served.at_context(lambda: served.scheduler.budget.promised) and time.monotonic() < end:
        time.sleep(0.02)
    assert taken(served) == before


@pytest.mark.parametrize(
    ("more", "status", "param", "words"),
    [
        ({"skill": "none"}, 404, "notes.splice", "no compiled skill"),
        ({"skill": "skills/returns"}, 404, "notes.splice", "no compiled skill"),
        ({"field": "colour"}, 400, "notes", "no field 'colour'"),
        ({"value": "2026-05-01"}, 400, None, "date is 2026-05-01 already"),
        ({"value": "2026-02-01"}, 400, None, "decides the same"),
        ({"field": ""}, 400, "field", "field is missing"),
        ({"choices": ["accepted"]}, 400, "choices", "two strings or more"),
        ({"window": 0}, 400, "window", "a whole number"),
        ({"colour": 1}, 400, "colour", "Unknown parameter"),
    ],
)
def test_refusals(served: Served, more: Json, status: int, param: str | None, words: str) -> None:
    """What cannot be probed is refused with the reason, in a stream as its last event, and takes no room."""
    before = taken(served)
    error = heat(served, status, **more)
    assert words in error["message"] and error["param"] == param
    reply = served.http.post("/v1/notes/heat", json={**ASKED, "window": 16, "stream": True, **more})
    if reply.status_code == 200:
        reply_error = json.loads(reply.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    else:
        reply_error = reply.json()["error"]
    assert reply_error == error
    assert taken(served) == before


def test_no_room(library: Path) -> None:
    """In a context that is too small for it a probe is refused, and questions are answered."""
    with started(library, context=ContextOptions(n_ctx=512, n_threads=1), fixed_size=True) as served:
        assert heat(served, 503)["code"] == "no_room"
        assert told(served.ask(splice=["returns"])) == "accepted"
