"""Tests that bad clients harm no others: they vanish, stall, flood or send garbage, and their answers fail."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from bench import clients
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.errors import EngineError, NotesError
from notes_cli.runtime.prefix_cache import CachedPrefix
from notes_cli.runtime.request import Answer
from notes_cli.serve import event_stream
from notes_cli.serve.answer_tasks import JobEvent, ServerJob
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.prepare import Options
from notes_cli.serve.refusals import Guard, Refused
from notes_cli.serve.scheduler import LONG as LONG_WORKS
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.serve.segment_cache import _cut

from .conftest import NO_TLS, QUESTION, Json, Served, reply_text, started

ASK = [{"role": "user", "content": QUESTION}]
LONG: Json = {"prompt": [5, 6, 7], "max_tokens": 1500}


def wait(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def connected(served: Served, length: int, path: str = "/v1/chat/completions") -> socket.socket:
    """A connection that has sent the head of a request."""
    found = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
    found.sendall(f"{head}\r\n\r\n".encode())
    return found


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "ends", lambda self, token: False)


def held(served: Served) -> tuple[int, int, int]:
    """Return the leased sequences, the idle prefixes, and the requests."""
    resting = served.at_context(lambda: len(list(served.scheduler.prefixes.idle_prefixes())))
    return served.at_context(lambda: served.scheduler.workspace.context.n_leased), resting, served.scheduler.load


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_answer(served: Served, endless: None, stream: bool) -> None:
    """At the next step: decoding stops, and its sequence is closed or idle."""
    body = json.dumps({**LONG, "stream": stream}).encode()
    with connected(served, len(body), "/v1/completions") as client:
        client.sendall(body)
        wait(lambda: served.scheduler.load == 1)
        before = served.scheduler.metrics.steps
        wait(lambda: served.scheduler.metrics.steps > before + 20)
    wait(lambda: served.scheduler.load == 0)
    steps = served.scheduler.metrics.steps
    assert steps < before + 500, "it must not have come to its end"
    sequences, resting, load = held(served)
    assert sequences == resting and load == 0 and served.scheduler.metrics.steps - steps < 3
    assert reply_text(served.chat(ASK, max_tokens=1, notes={"splice": ["returns"]})) == "accepted"


def test_answers_go_on_while_a_long_prompt_is_read(library: Path, endless: None) -> None:
    """All running answers get a token between two chunks of a prefill."""
    with started(library, Options(chunk=16), context=ContextOptions(n_threads=1)) as served:
        tokens: list[int] = []
        steps: list[int] = []

        def answer() -> None:
            with served.client.completions.create(model="", prompt="x", max_tokens=400, stream=True) as chunks:
                for _ in chunks:
                    tokens.append(served.scheduler.metrics.steps)
                    if len(steps) == 2:
                        return

        one = threading.Thread(target=answer)
        one.start()
        wait(lambda: len(tokens) > 5)
        steps.append(served.scheduler.metrics.steps)
        reply = served.http.post("/v1/completions", json={"prompt": [5, 6, 7] * 150, "max_tokens": 1})
        steps.append(served.scheduler.metrics.steps)
        one.join()
        assert reply.status_code == 200 and steps[1] - steps[0] >= 450 // 18
        meanwhile = sum(steps[0] < step < steps[1] for step in tokens)
        assert meanwhile >= 10, "they must not have waited"


def test_a_request_that_fails_harms_no_other(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of NaN, a failing template, an internal error: each fails only its own request."""
    real = Context.logits
    bad: set[int] = set()

    def logits(self: Context, index: int = -1) -> np.ndarray:
        found = real(self, index)
        if bad:
            bad.clear()
            raise EngineError("these logits are not numbers")
        return found

    monkeypatch.setattr(Context, "logits", logits)
    bad.add(1)
    assert served.chat(ASK, 500, notes={"cache_salt": "bad"})["code"] == "engine_error"
    assert reply_text(served.ask(splice=["returns"])) == "accepted"
    error = served.chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b" * 200_000}], 400)
    assert error["code"] == "context_length_exceeded"

    def fault(*_: object, **__: object) -> None:
        raise ZeroDivisionError("our own")

    with monkeypatch.context() as patch:
        patch.setattr("notes_cli.serve.answer_tasks.generate_task", fault)
        assert "ZeroDivisionError" in served.chat(ASK, 500)["message"]
    with monkeypatch.context() as patch:
        patch.setattr("notes_cli.serve.prepare.prepare_request", fault)
        assert "ZeroDivisionError" in served.chat(ASK, 500)["message"]
    assert reply_text(served.ask(splice=["returns"])) == "accepted"
    sequences, resting, load = held(served)
    assert sequences == resting and load == 0


DEEP = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 200_000}}
JSON = "application/json"
GARBAGE: list[tuple[int, bytes, dict[str, str]]] = [
    (400, b"{", {}),
    (400, b"[]", {}),
    (400, b"[" * 100_000, {}),
    (400, b'{"messages": NaN}', {}),
    (400, b'{"messages": "\\ud800"}', {}),
    (400, b"\xff\xfe\x00", {}),
    (400, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}', {}),
    (400, json.dumps({"messages": [{"role": "assistant", "tool_calls": [DEEP]}, *ASK]}).encode(), {}),
    (415, b"{}", {"Content-Type": "text/plain"}),
    (415, b"{}", {"Content-Encoding": "gzip"}),
    (413, b" " * (17 << 20), {}),
]


def test_garbage_is_refused(served: Served) -> None:
    for status, content, headers in GARBAGE:
        given = {"Content-Type": JSON, **headers}
        reply = served.http.post("/v1/chat/completions", content=content, headers=given)
        assert reply.status_code == status, (content[:99], reply.text)
        assert reply.json()["error"]["message"] and "fault" not in reply.text


@pytest.mark.parametrize("length", [(16 << 20) + 1, 99_999_999_999])
def test_a_body_that_is_too_large_is_not_waited_for(served: Served, length: int) -> None:
    """By its Content-Length: 413 before any of it is read, and the connection ends."""
    with connected(served, length) as client:
        reply = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()  # until the server closes it
    assert reply.startswith("HTTP/1.1 413 ") and "larger than 16,777,216 bytes" in reply


@pytest.mark.parametrize(
    ("content", "place", "half"),
    [
        (rb'{"messages": [{"role": "user", "content": "a \ud800 b"}]}', "messages[0].content", r"\ud800"),
        (rb'{"messages": [{"role": "\udfff"}]}', "messages[0].role", r"\udfff"),
        (rb'{"tools": [{"function": {"name": "\udc00x"}}]}', "tools[0].function.name", r"\udc00"),
        (rb'{"tools": [{"function": {"parameters": {"\ud83d": 1}}}]}', "a key of tools[0].function.parameters", "d83d"),
        (rb'{"\ud83d": 1}', "a key holds", "d83d"),
        (rb'"\ud83d\u0041"', "the body holds", "d83d"),
        (b'{"messages": [{"content": "\xed\xa0\x80"}]}', "messages[0].content", r"\ud800"),
        (rb'{"a": ["\ud83d\ude00", ["\ud83d\ud83d"]]}', "a[1][0]", "d83d"),
    ],
)
def test_half_a_character_has_a_place(served: Served, content: bytes, place: str, half: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/notes/explain"):
        reply = served.http.post(path, content=content, headers={"Content-Type": "application/json"})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "invalid_json")
        assert place in error["message"] and half in error["message"] and "codec" not in error["message"]


def test_what_there_is_instead(served: Served) -> None:
    """The error lists the existing paths, or the allowed methods; of bytes that are no text the first one."""
    kind = {"Content-Type": "application/json"}
    reply = served.http.post("/tokenize", content=b'{"content": "\xff"}', headers=kind)
    assert reply.json()["error"]["message"] == "the body is not UTF-8: byte 0xff at position 13"
    for path in ("/v1/chat/completion", "/", "/v2/models", "/v1/rerank"):
        reply = served.http.post(path, json={})
        error = reply.json()["error"]["message"]
        if path == "/":
            assert reply.status_code == 405 and error == "/ does not take POST. It takes GET, HEAD"
            continue
        assert reply.status_code == 404 and error.startswith(f"there is no '{path}' here. There are /health, ")
        assert "/v1/chat/completions, /v1/completions" in error and "/v1/notes/own" not in error
    reply = served.http.get("/v1/chat/completions")
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == "/v1/chat/completions does not take GET. It takes POST"


@pytest.fixture
def guarded(library: Path) -> Iterator[Served]:
    with started(library, Options(keys=("one", "schlüssel"), origins=("https://a.example",))) as found:
        yield found


def test_only_who_has_a_key_may_ask(guarded: Served) -> None:
    """Any of the keys, in UTF-8; health needs none; other origins are refused unless they are listed."""

    def status(**headers: str) -> int:
        sent = {name.replace("_", "-"): text.encode() for name, text in headers.items()}
        return guarded.http.get("/v1/models", headers=sent).status_code

    assert guarded.http.get("/health").status_code == 200 and status() == 401
    right = "Bearer one"
    for known in ({"Authorization": right}, {"Authorization": "Bearer schlüssel"}, {"x_api_key": "schlüssel"}):
        assert status(**known) == 200
    assert status(x_api_key="schlüssel", Authorization="Bearer three") == 200
    for wrong in ("Bearer three", "Bearer", "one", "Basic one", "Bearer on\u00e9"):
        assert status(Authorization=wrong) == 401
    for wrong in ("three", "Bearer schlüssel", ""):
        assert status(x_api_key=wrong) == 401
    assert status(Authorization=right, Origin="https://evil.example") == 403
    for name in ("host.docker.internal", "evil.example"):  # such a page has no key
        assert (status(Authorization=right, Host=name), status(Host=name)) == (200, 401)
        assert status(Authorization=right, Host=name, Origin="https://b.example") == 403
    for key, wanted in (({"Authorization": right}, 200), ({}, 401)):  # a listed origin can read a refusal
        named = guarded.http.get("/v1/models", headers={**key, "Origin": "https://a.example"})
        assert named.status_code == wanted and named.headers["access-control-allow-origin"] == "https://a.example"
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert guarded.http.options("/v1/chat/completions", headers=preflight).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.2"])
def test_no_other_name_leads_here(host: str) -> None:
    """A site may point its name to any local address: the Host header reveals it."""
    guard = Guard(nobody, (), host, (), ())

    def status(name: str) -> int | None:
        found = guard._refusal(Headers({"host": name, "authorization": "Bearer one"}), "/v1/models", "GET")
        return found and found.status

    assert status("evil.example") == status("evil.example:8080") == status("127.0.0.1.evil.example") == 403
    for ours in ("localhost:8080", "LOCALHOST", "192.168.1.5:8080", "[::1]:8080", f"{host}:1"):
        assert status(ours) is None
    assert (status("box:8080"), status("box.local")) == ((None, None) if host == "0.0.0.0" else (403, 403))
    guard = Guard(nobody, ("one",), host, (), ())  # a page without a key learns nothing
    assert status("box.example") is None
    refused = guard._refusal(Headers({"host": "box.example"}), "/v1/models", "GET")
    assert refused and refused.status == 401


NO_HOSTS = """
127.0.0.1:80@evil.com evil.com@127.0.0.1 user:pass@localhost localhost@ @localhost
:80 localhost: localhost:0 localhost:65536 localhost:99999999 localhost:-1 localhost:+1
localhost:8o localhost:80:80 localhost:٣ localhost/ localhost/x localhost# a?b
localhost. 127.0.0.1. localhost.. .localhost a..b localhost,evil.com
[::1 ::1] ::1 [localhost] [127.0.0.1] [] [::1]x [::1]: [::1]:0 [::1]@x x[::1] [[::1]]
[::1%25lo] http://localhost localhost\\evil.com l\u043ecalhost %6cocalhost
"""


def test_what_is_no_host() -> None:
    """Only a name or an address, with a valid port, on any interface."""
    for where, keys in (("127.0.0.1", ()), ("0.0.0.0", ()), ("0.0.0.0", ("one",))):
        guard = Guard(nobody, keys, where, (), ())
        for host in ("", "localhost: 80", "local host", "localhost\t", *NO_HOSTS.split()):
            headers = Headers(raw=[(b"host", host.encode()), (b"authorization", b"Bearer one")])
            found = guard._refusal(headers, "/v1/models", "GET")
            assert found and found.status == 400 and "is not a name or an address" in str(found), (where, keys, host)


def test_a_probe_without_a_host(served: Served) -> None:
    """Load balancers check /health in HTTP/1.0, in which Host may be absent."""
    where, _, port = served.url.removeprefix("http://").partition(":")
    with socket.create_connection((where, int(port)), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 OK\r\n" in client.recv(1000)


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that is never reached."""


def test_curl_needs_no_content_type(served: Served) -> None:
    """`curl -d` sends JSON as a form; so can pages of other sites, but browsers add headers."""
    url = f"{served.url}/v1/chat/completions"
    sent = json.dumps({"messages": ASK, "notes": {"splice": ["returns"]}})
    found = subprocess.run(["curl", "-s", url, "-d", sent], capture_output=True, text=True, timeout=60).stdout
    assert reply_text(json.loads(found)) == "accepted"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    own = {"Origin": served.url}  # our own page sends JSON as JSON
    for browser in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Mode": "no-cors"}, {"Referer": "http://a/"}, own):
        reply = served.http.post(url, content=sent, headers={**form, **browser})
        assert reply.status_code == 415 and "Content-Type: application/json" in reply.json()["error"]["message"]
    encoded = served.http.post(url, content="%7B%22messages%22%3A1%7D=", headers=form)  # as from an HTML form
    assert encoded.status_code == 400 and "JSON" in encoded.json()["error"]["message"]


def test_no_page_may_ask_unless_it_is_named(served: Served) -> None:
    for origin in ("https://a.example", "null", "http://["):
        for method in ("GET", "POST"):
            reply = served.http.request(method, "/v1/models", headers={"Origin": origin})
            assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers


def test_metrics_count_what_was_done(served: Served) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    served.ask(splice=["returns"])
    reply = served.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(reply.text) for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert found["notes_requests_total", "answered"] >= 1 and found["notes_cells_used",] > 100
    how = [found["notes_prompt_tokens_total", one] for one in ("decoded", "spliced", "live")]
    assert sum(how) > 0 and found["notes_first_token_seconds_count",] >= 1


@pytest.mark.parametrize("outcome", ["answered", "failed"])
def test_who_leaves_at_the_last_step_is_counted_once(served: Served, outcome: str) -> None:
    """By its outcome, even if its client has disconnected."""
    over, before = threading.Event(), Counter(served.scheduler.metrics.outcomes)
    jobs: list[ServerJob] = []

    def tell(said: JobEvent) -> None:
        if said is None or isinstance(said, NotesError):
            over.set()
        elif isinstance(said, Answer):
            jobs[0].cancel()
            if outcome == "failed":
                raise NotesError("after the last word")

    asked = parse_chat({"messages": ASK, "max_tokens": 1})
    served.at_context(lambda: jobs.append(served.scheduler.submit(asked, tell)))
    assert over.wait(10)
    assert Counter(served.scheduler.metrics.outcomes) - before == {outcome: 1}


def test_it_drains(library: Path, endless: None) -> None:
    """At the end, health reports it to load balancers, new requests are refused, and running ones finish."""
    with started(library, context=ContextOptions(n_threads=1), drain=100) as served:
        words: list[str] = []

        def answer() -> None:
            with served.client.completions.create(model="", prompt="x", max_tokens=300, stream=True) as chunks:
                words.extend(chunk.choices[0].text for chunk in chunks if chunk.choices)

        body = json.dumps({"messages": ASK, "max_tokens": 1}).encode()
        with httpx.Client(base_url=served.url, verify=NO_TLS) as other, ExitStack() as opened:
            assert other.get("/health").json() == {"status": "ok"}
            one = threading.Thread(target=answer)
            one.start()
            wait(lambda: len(words) > 5)
            client = opened.enter_context(connected(served, len(body)))
            served.service.end()
            wait(lambda: served.service.draining)
            health = other.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            late = other.post("/v1/chat/completions", json={"messages": ASK})
            assert late.status_code == 503 and late.headers["retry-after"]
            assert late.headers["connection"] == "close"
            client.sendall(body)
            found = client.makefile("rb").read()
            assert found.startswith(b"HTTP/1.1 503") and b"draining" in found, "its body came too late"
            assert "notes_requests_running" in other.get("/metrics").text
        one.join()
        assert len(words) >= 290


def test_pings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments keep an idle connection open, and OpenAI's client ignores them."""
    monkeypatch.setattr(event_stream, "PING", 0.05)
    release = threading.Event()
    future = served.scheduler.call(release.wait)
    timer = threading.Timer(0.4, release.set)
    timer.start()
    extra = {"notes": {"splice": ["returns"]}}
    stream = served.client.chat.completions.create(model="tiny", messages=ASK, stream=True, extra_body=extra)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "accepted"
    assert future.result(5)


def test_a_scheduler_that_fails_ends_the_server(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests get an error, and the server ends with the exception."""

    def fail(self: DecodeThread) -> None:
        raise ZeroDivisionError("our own")

    with pytest.raises(AssertionError, match="ZeroDivisionError"), started(library) as served:
        monkeypatch.setattr(DecodeThread, "_serve", fail)
        assert served.chat(ASK, 503)["code"] == "shutting_down"


def test_a_refusal_repeats_no_long_value(served: Served) -> None:
    refusal = served.chat(ASK, 400, notes={"splice": ["returns"], "errata": {"x" * 5000: "1"}})
    assert 1000 < len(refusal["message"]) < 1010


# Requests that must be refused, and small ones that must work.


def test_the_name_of_a_skill_opens_no_file(served: Served, tmp_path: Path) -> None:
    """It is not even checked: a pipe would block, and the answer would reveal which files exist."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path / "nothing"):
        said = served.chat(ASK, 404, notes={"splice": [str(path)]})["message"]
        assert said == f"no compiled skill {str(path)[:80]!r}. List the library to see what there is"
    for name in ("~nosuchuser/a", "a" * 400):
        assert served.chat(ASK, 404, notes={"splice": [name]})["code"] == "skill_not_found"


def test_long_works_are_limited(served: Served) -> None:
    """Waiting compiles hold their texts: too many get 429."""
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(30)

    works = [served.scheduler.call(work, long=True) for _ in range(LONG_WORKS)]
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


def test_several_answers_keep_their_sequences(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come and go during a prefill leave its sequences alone: not every context can be made again."""
    monkeypatch.setattr("notes_cli.serve.scheduler.IDLE", 1)
    options = ContextOptions(n_ctx=4096, n_threads=1, n_ubatch=1)
    with started(library, Options(parallel=4, chunk=1), context=options) as served:
        context = served.scheduler.workspace.context
        there = served.at_context(lambda: context.n_free + context.n_leased)
        long = {"prompt": [5, 6, 7] * 150, "n": 3, "max_tokens": 2, "temperature": 1}
        found: list[int] = []
        ask = lambda: found.append(served.http.post("/v1/completions", json=long).status_code)  # noqa: E731
        several = threading.Thread(target=ask)
        several.start()
        wait(lambda: served.scheduler.load == 1)
        for number in range(6):
            brief = {"prompt": [20 + number, 9], "max_tokens": 1}
            assert served.http.post("/v1/completions", json=brief).status_code == 200
        assert served.scheduler.load == 1, "the long prompt is still being read"
        several.join()
        assert found == [200]
        assert served.at_context(lambda: context.n_free + context.n_leased) == there == 5


# Clients that vanish, stall, repeat and send garbage: a slice of bench/clients.py.

CONTEXT = ContextOptions(n_ctx=2048, n_threads=1, type_k="f32", type_v="f32")


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(clients, "QUESTIONS", clients.QUESTIONS[::3])
    with started(tmp_path, Options(parallel=8, queue=8), context=CONTEXT, fixed_size=True) as found:
        clients.prepare(found.url)
        yield found


def test_misbehaving_clients_leave_nothing_behind(crowded: Served) -> None:
    outcome = asyncio.run(clients.campaign(crowded.url, 50, seed=5, parallel=12))
    assert outcome.wrong == [] and outcome.right > 12 and len(outcome.kinds) == 7


def test_a_leak_is_found(crowded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the campaign reports one sequence that is not returned."""
    prefixes, kept = crowded.scheduler.prefixes, list[CachedPrefix]()
    rest = prefixes.set_idle

    def lose(one: CachedPrefix) -> None:
        if kept or crowded.scheduler.metrics.outcomes["answered"] < 14:
            rest(one)
        else:
            prefixes.entries.remove(one)
            one.idle = True  # so that the end of its job does not close it
            kept.append(one)

    monkeypatch.setattr(prefixes, "set_idle", lose)
    outcome = asyncio.run(clients.campaign(crowded.url, 12, seed=5, parallel=4))
    assert any("sequences" in one for one in outcome.wrong), outcome.wrong
