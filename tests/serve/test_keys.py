"""Tests that clients with different API keys reuse nothing of each other, and those with one key as without keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from notes_cli.serve.prepare import Options

from .conftest import Json, Served, started

ONE, TWO = "key one", "key two"
TEXT = "The patient in bed nine is allergic to penicillin, and takes no aspirin after meals. " * 4
TALK = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Why?"}]
NOTES: Json = {"match": False}


@pytest.fixture
def keyed(library: Path) -> Iterator[Served]:
    with started(library, Options(keys=(ONE, TWO), token="of this machine")) as served:
        yield served


def post(served: Served, path: str, body: Json, key: str, status: int = 200) -> Json:
    reply = served.http.post(path, json={"max_tokens": 1, **body}, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == status, reply.text
    found: Json = reply.json()
    return found


def cached(reply: Json) -> int:
    usage: Json = reply["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


WAYS: list[tuple[str, Json]] = [
    ("/v1/chat/completions", {"messages": TALK, "notes": NOTES}),
    ("/v1/completions", {"prompt": TEXT, "notes": NOTES}),
    ("/v1/decisions", {"input": TEXT, "questions": [{"type": "predicate", "instructions": "Is it so?"}] * 2}),
]


@pytest.mark.parametrize(("path", "body"), WAYS, ids=["chat", "completions", "decisions"])
def test_a_guess_of_the_others_text_finds_nothing(keyed: Served, path: str, body: Json) -> None:
    """Neither its prefix nor parts of it; nor with a salt that tries to be the other's. The same key finds it."""
    limit: Json = {} if path != "/v1/decisions" else {"max_tokens": None}
    first = cached(post(keyed, path, {**body, **limit}, ONE))
    others = [TWO, keyed.service.options.token]
    assert [cached(post(keyed, path, {**body, **limit}, other)) for other in others] == [first, first]
    digest = hashlib.sha256(ONE.encode()).hexdigest()
    for salt in (digest, ONE, f"\0{digest}"):
        forged = {**body, "notes": {**body.get("notes", {}), "cache_salt": salt}}
        assert cached(post(keyed, path, {**forged, **limit}, TWO)) <= first
    assert cached(post(keyed, path, {**body, **limit}, ONE)) > first + 50


def test_an_evicted_prompt_is_restored_for_its_key(keyed: Served) -> None:
    body = {"prompt": TEXT}
    post(keyed, "/v1/completions", body, ONE)
    keyed.at_context(lambda: keyed.scheduler.prefixes.evict_beyond(0))
    assert not cached(post(keyed, "/v1/completions", body, TWO))
    assert cached(post(keyed, "/v1/completions", body, ONE)) > 50


def test_a_response_is_known_to_its_key(keyed: Served) -> None:
    said = post(keyed, "/v1/responses", {"input": TEXT, "max_tokens": None}, ONE)
    goes_on: Json = {"input": "And?", "previous_response_id": said["id"], "max_tokens": None}
    unknown = post(keyed, "/v1/responses", {**goes_on, "previous_response_id": "resp_0"}, TWO, 404)["error"]
    refused = post(keyed, "/v1/responses", goes_on, TWO, 404)["error"]
    assert refused == {**unknown, "message": unknown["message"].replace("resp_0", said["id"])}
    assert post(keyed, "/v1/responses", goes_on, ONE)["usage"]["input_tokens"] > said["usage"]["input_tokens"]


def test_a_conversation_is_remembered_for_its_key(keyed: Served) -> None:
    """A correction of the first turn stays where it is, for the key that sent it; else it is before the question."""
    question: Json = {"role": "user", "content": "May I return this?"}
    notes: Json = {"splice": ["returns"], "errata": {"date": "2026-07-01"}, "explain": True}

    def ask(talk: list[Json], key: str) -> tuple[str, list[str]]:
        body: Json = {"messages": talk, "notes": notes, "max_tokens": 20}
        reply = post(keyed, "/v1/chat/completions", body, key)
        kinds = [piece["kind"] for piece in reply["notes"]["pieces"]]
        return reply["choices"][0]["message"]["content"], kinds

    answer, first = ask([question], ONE)
    talk = [question, {"role": "assistant", "content": answer}, question]
    late, again = ask(talk, TWO)[1], ask(talk, ONE)[1]
    assert first.index("erratum") == again.index("erratum") < late.index("erratum")


@pytest.mark.parametrize("keys", [(), (ONE,), (ONE, ONE)])
def test_one_key_separates_nobody(library: Path, keys: tuple[str, ...]) -> None:
    """Not the token of this machine's user either."""
    with started(library, Options(keys=keys, token="of this machine")) as served:
        for path, body in WAYS[:2]:
            post(served, path, body, ONE)
            other = "of this machine" if keys else ""
            assert cached(post(served, path, body, other or "any")) > 50
        assert httpx.get(f"{served.url}/v1/models").status_code == (401 if keys else 200)
