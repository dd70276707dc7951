"""Tests findings of reviews: requests that must be refused, small ones that must work, and clients' separate errata."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.serve.app import Options
from notes_cli.serve.jobs import Limits
from notes_cli.serve.refusals import Refused
from notes_cli.serve.scheduler import LONG
from notes_cli.serve.segment_cache import _cut

from .conftest import Served, started
from .test_robust import ASK, wait


def test_the_name_of_a_skill_opens_no_file(served: Served, tmp_path: Path) -> None:
    """It is not even checked: a pipe would block, and the answer would reveal which files exist."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path / "nothing"):
        said = served.chat(ASK, 404, notes={"splice": [str(path)]})["message"]
        assert said == f"no compiled skill {str(path)[:80]!r}. List the library to see what there is"
    for name in ("~nosuchuser/a", "a" * 400):
        assert served.chat(ASK, 404, notes={"splice": [name]})["code"] == "skill_not_found"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": int("9" * 400)}, "temperature"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 200_000}}
                        ],
                    },
                    {"role": "user", "content": "Well?"},
                ]
            },
            "context",
        ),
    ],
)
def test_what_python_cannot_hold_is_the_clients_fault(served: Served, given: dict[str, Any], param: str) -> None:
    """An unbounded number or depth is a 400, not a server error."""
    found = served.http.post("/v1/chat/completions", json={"messages": ASK, **given})
    assert found.status_code == 400 and param in found.text


def test_nothing_is_written_where_no_token_is_asked_for(served: Served) -> None:
    """Evaluation tools request no tokens, only the prompt's counts."""
    found = served.http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 0})
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["completion_tokens"] == 0


def test_long_works_are_limited(served: Served) -> None:
    """Waiting compiles hold their texts: too many get 429."""
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(30)

    works = [served.scheduler.call(work, long=True) for _ in range(LONG)]
    assert begun.wait(10)
    with pytest.raises(Refused) as refused:
        served.scheduler.call(work, long=True)
    assert refused.value.status == 429
    release.set()
    for one in works:
        one.result(30)
    served.scheduler.call(work, long=True).result(30)


def test_a_text_that_repeats_a_skill_is_looked_over_once() -> None:
    """A whole paragraph is found after thousands of others, in less than quadratic time."""
    skill = "All goods may be returned within thirty days."
    text = skill * 20_000 + "\n\n" + skill + "\n\nafter"
    assert _cut(text, skill) == [skill * 20_000, "after"]
    assert _cut("\n\n".join([skill] * 20_000), skill) == [""] * 20_001
    assert _cut(skill * 3, skill) == _cut(f"{skill}\n\n\n{skill}.", skill) == []
    assert _cut(f"  \n{skill}\n ", skill) == ["  \n", "\n "] and _cut(f"a {skill}", skill) == []
    assert _cut(f"a\n\n\n{skill}", skill) == [] and _cut(f"a\n\n{skill}\n\nb", skill) == ["a", "b"]


def test_room_that_no_context_has_is_not_waited_for(
    library: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted answer continues with the cells that exist, and later requests are answered."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    options = ContextOptions(n_ctx=1024, n_threads=1)
    model = make_model("llama")
    with started(library, Limits(parallel=4), None, options, model, fixed_size=True) as server:
        done: dict[str, int] = {}

        def ask(name: str, tokens: int, written: int) -> None:
            prompt = [5 + number % 40 for number in range(tokens)]
            done[name] = server.http.post(
                "/v1/completions", json={"prompt": prompt, "max_tokens": written}, timeout=50
            ).status_code

        asked = [threading.Thread(target=ask, args=one) for one in (("a", 4, 60), ("b", 800, 220))]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join(50)
        ask("c", 2, 3)
        assert done["a"] == done["c"] == 200 and done["b"] in (200, 503)


def test_one_model_is_told_of(served: Served) -> None:
    """As the official client requests it, with a skill in its name, too."""
    assert served.client.models.retrieve("tiny@returns").id == "tiny@returns"
    for name, code in (("other", "model_not_found"), ("tiny@nothing", "skill_not_found")):
        found = served.http.get(f"/v1/models/{name}")
        assert found.status_code == 404 and found.json()["error"]["code"] == code


def test_a_key_of_any_letters_opens_and_forms_can_be_off(library: Path) -> None:
    """Headers are bytes: UTF-8 keys are compared as bytes. Other origins can read a refusal."""
    options = Options(keys=("schlüssel",), origins=("https://there.example",), forms=False)
    with started(library, options=options) as server:
        right = {"Authorization": "Bearer schlüssel".encode()}
        assert server.http.get("/v1/models", headers=right).status_code == 200
        held = {"messages": ASK, "grammar": 'root ::= "a"'}
        assert server.http.post("/v1/chat/completions", headers=right, json=held).json()["error"]["code"] == "no_forms"
        refused = server.http.get("/v1/models", headers={"Origin": "https://there.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://there.example"


def test_several_answers_keep_their_sequences(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come and go during a prefill leave its reserved sequences alone: the context need not be made
    again, which not every model allows."""
    monkeypatch.setattr("notes_cli.serve.scheduler.IDLE", 1)
    options = ContextOptions(n_ctx=4096, n_threads=1, n_ubatch=1)
    with started(library, Limits(parallel=4, chunk=1), context=options) as served:
        context = served.scheduler.workspace.context
        there = served.at_context(lambda: context.n_free + context.n_leased)
        long = {"prompt": [5, 6, 7] * 300, "n": 3, "max_tokens": 2, "temperature": 1}
        found: list[int] = []
        several = threading.Thread(
            target=lambda: found.append(served.http.post("/v1/completions", json=long).status_code)
        )
        several.start()
        wait(lambda: served.scheduler.load == 1)
        for number in range(6):
            brief = {"prompt": [20 + number, 9], "max_tokens": 1}
            assert served.http.post("/v1/completions", json=brief).status_code == 200
        assert served.scheduler.load == 1, "the long prompt is still being read"
        several.join()
        assert found == [200]
        assert served.at_context(lambda: context.n_free + context.n_leased) == there == 5
