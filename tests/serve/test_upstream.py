"""Tests `notes serve --upstream`: in front of a small server of the test, and of `notes serve` itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from samples import SAMPLES

from notes_cli.errors import NotesError
from notes_cli.library.store import Library
from notes_cli.serve import upstream
from notes_cli.serve.prepare import Options
from notes_cli.serve.server import listen, serve
from notes_cli.serve.skill_texts import Placer, SkillTexts
from notes_cli.serve.upstream import Target, Upstream
from notes_cli.text.skill import load_skill

from .conftest import NO_TLS, Json, Served

RETURNS, SUPPORT = load_skill(SAMPLES / "returns"), load_skill(SAMPLES / "support")
TODAY = RETURNS.text.replace(RETURNS.values["date"], "2027-02-03")
NOW = "Correction: the date is now 2027-02-03. This replaces the earlier date."
QUESTION = {"role": "user", "content": "May I return this?"}
USAGE = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 90}}
Answer = Callable[[BaseHTTPRequestHandler, Json], object]


@dataclass
class Fake:
    """A server that keeps the requests that it gets, and answers each by a function."""

    url: str = ""
    seen: list[tuple[str, dict[str, str], Json]] = field(default_factory=list)
    answer: Answer = lambda request, body: reply(request, {"choices": [], "usage": USAGE})

    @property
    def messages(self) -> list[Json]:
        found: list[Json] = self.seen[-1][2]["messages"]
        return found


def reply(request: BaseHTTPRequestHandler, body: Json, status: int = 200) -> None:
    data = json.dumps(body).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)


def stream(request: BaseHTTPRequestHandler, *events: Json | str) -> None:
    """Send events, and leave the stream open."""
    request.send_response(200)
    request.send_header("Content-Type", "text/event-stream")
    request.end_headers()
    for event in events:
        request.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())


@contextmanager
def in_front_of(url: str, home: Path, *texts: Path, **options: Any) -> Iterator[tuple[Upstream, httpx.Client]]:
    """Run a server in front of another one for the duration of the block."""
    skills = SkillTexts(Library(home / "library"), [str(text) for text in texts], options.pop("splice", ()))
    placer = Placer(skills, options.get("errata", ()))
    service = Upstream(Target.parse(url, options.pop("key", "")), placer, Options(**options))
    with ExitStack() as stack:
        listening = stack.enter_context(listen("127.0.0.1", 0))
        run = threading.Thread(target=serve, args=(service, listening, lambda: None, 5))
        run.start()
        port = listening.getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=NO_TLS) as http:
                yield service, http
        finally:
            service.end()
            run.join(30)
            assert not run.is_alive()


@pytest.fixture
def fake() -> Iterator[Fake]:
    found = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found.seen.append((self.path, dict(self.headers), json.loads(data) if data else {}))
            found.answer(self, found.seen[-1][2])

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def front(fake: Fake, tmp_path: Path) -> Iterator[tuple[Upstream, httpx.Client]]:
    with in_front_of(fake.url, tmp_path, SAMPLES / "returns", SAMPLES / "support", key="its-key") as found:
        yield found


@pytest.fixture
def http(front: tuple[Upstream, httpx.Client]) -> httpx.Client:
    return front[1]


def ask(http: httpx.Client, *messages: Json, status: int = 200, **more: Any) -> Json:
    found = http.post("/v1/chat/completions", json={"messages": [*messages], **more})
    assert found.status_code == status, found.text
    body: Json = found.json()
    return body if status == 200 else body["error"]


def contents(fake: Fake) -> list[str]:
    return [message["content"] for message in fake.messages]


@pytest.mark.parametrize("how", [{"notes": {"splice": ["support", "returns"]}}, {"model": "m@support+Returns"}])
def test_skills_are_the_same_bytes_at_the_beginning(fake: Fake, http: httpx.Client, how: Json) -> None:
    """Before a system message that may change, in any order of their names, and with another value at the end."""
    ask(http, {"role": "system", "content": "It is Monday."}, QUESTION, notes={"splice": ["returns", "support"]})
    [system, question] = contents(fake)
    assert system == f"{RETURNS.text}\n\n{SUPPORT.text}\n\nIt is Monday." and question == QUESTION["content"]
    ask(http, QUESTION, **how)
    assert contents(fake) == [f"{RETURNS.text}\n\n{SUPPORT.text}", QUESTION["content"]]
    assert "notes" not in fake.seen[-1][2] and fake.seen[-1][2].get("model", "m") == "m"
    changed = {"splice": ["returns"], "errata": {"date": "2027-02-03"}, "fields": {"tier": "basic"}}
    ask(http, QUESTION, notes=changed)
    assert contents(fake)[0] == RETURNS.text
    assert contents(fake)[1].startswith(f"{NOW}\n\nCorrection: the tier is now basic.")
    ask(http, QUESTION, notes={"splice": ["returns"], "errata": {"date": RETURNS.values["date"]}})
    assert contents(fake)[1].startswith("Correction: the date is now 2026-05-01.")  # as elsewhere: it was asked for


def test_a_changed_field_in_a_known_text_becomes_an_erratum(fake: Fake, http: httpx.Client) -> None:
    """The text keeps its bytes, whole or as a part, where nothing but values of fields differs."""
    for system in (TODAY, TODAY.replace("\n", " \r\n"), [{"type": "text", "text": f"Be kind.\n\n{TODAY}\nBe brief."}]):
        ask(http, {"role": "system", "content": system}, QUESTION)
        text = fake.messages[0]["content"]
        assert RETURNS.text in (text if isinstance(text, str) else text[0]["text"])
        assert fake.messages[1]["content"] == f"{NOW}\n\n{QUESTION['content']}"
    assert text[0]["text"] == f"Be kind.\n\n{RETURNS.text}\nBe brief."


def test_any_other_text_stays_as_it_is(fake: Fake, http: httpx.Client) -> None:
    """With another difference, within a line, with a long value, from the user, or with copies that differ."""
    assert RETURNS.text != TODAY
    wrong = (TODAY.replace("refused", "accepted"), f"x{TODAY}", TODAY.replace("2027-02-03", "9" * 99))
    for messages in (
        *([{"role": "system", "content": text}, QUESTION] for text in (*wrong, f"{TODAY}\n\n{RETURNS.text}")),
        [{"role": "user", "content": f"Correct this:\n{TODAY}"}],
        [{"role": "system", "content": TODAY}, {"role": "user", "content": RETURNS.text}],
    ):
        ask(http, *messages)
        assert fake.messages == messages
    ask(http, {"role": "system", "content": TODAY}, QUESTION, notes={"match": False})
    assert fake.messages[0]["content"] == TODAY


def test_later_turns_begin_with_the_same_bytes(fake: Fake, http: httpx.Client) -> None:
    """An erratum stays at its place while it holds; tool calls have it once; no other conversation gets it."""
    system, answer = {"role": "system", "content": TODAY}, {"role": "assistant", "content": "No."}
    ask(http, system, QUESTION)
    first = fake.messages
    result = {"role": "tool", "tool_call_id": "1", "content": "{}"}
    ask(http, system, QUESTION, {"role": "assistant", "content": None, "tool_calls": []}, result)
    assert fake.messages[:2] == first and fake.messages[3] == result
    talk = [system, QUESTION, {"role": "assistant", "content": None, "tool_calls": []}, result]
    assert http.post("/v1/notes/errata", json={"field": "tier", "value": "basic"}).status_code == 200
    ask(http, *talk, notes={"errata": ["Be brief."]})
    assert fake.messages[:2] == first and fake.messages[3]["content"] == "Correction: Be brief.\n\n{}"
    ask(http, *talk, {"role": "assistant", "content": "Yes."}, QUESTION, notes={"errata": ["Be brief."]})
    assert fake.messages[5]["content"].startswith("Correction: the tier is now basic.")
    assert http.post("/v1/notes/errata", json={"field": "tier", "value": RETURNS.values["tier"]}).status_code == 200
    ask(http, system, QUESTION, answer, QUESTION, notes={"errata": ["Be brief."]})
    assert fake.messages[:2] == first and fake.messages[3]["content"].startswith("Correction: Be brief.\n\n")
    assert NOW not in fake.messages[3]["content"]
    other = {"role": "system", "content": TODAY.replace("2027-02-03", "2027-02-04")}
    ask(http, other, QUESTION, answer, QUESTION)
    assert fake.messages[:3] == [{"role": "system", "content": RETURNS.text}, QUESTION, answer]
    assert fake.messages[3]["content"].startswith(NOW.replace("-03", "-04"))
    ask(http, {"role": "system", "content": RETURNS.text}, QUESTION, answer, QUESTION)
    assert fake.messages[1:] == [QUESTION, answer, QUESTION]


def test_a_global_erratum_and_a_new_text(fake: Fake, tmp_path: Path) -> None:
    """Both reach the next request; an invalid file leaves the text as it was."""
    file = tmp_path / "hours.md"
    file.write_text(
        "# Hours\n\nplan: basic\n\n- If the plan is basic then the support is slow, otherwise it is fast.\n"
    )
    with in_front_of(fake.url, tmp_path / "home", file) as (_, http):
        found = http.post("/v1/notes/errata", json={"field": "plan", "value": "gold"}).json()
        assert found["errata"] == [{"skill": "hours", "field": "plan", "was": "basic", "value": "gold"}]
        assert http.get("/v1/notes").json()["skills"][0]["standing"] == {"plan": "gold"}
        ask(http, QUESTION, notes={"splice": ["hours"]})
        assert "the plan is now gold" in contents(fake)[1] and "plan: basic" in contents(fake)[0]
        file.write_text("The shop is always open.")
        ask(http, QUESTION, notes={"splice": ["hours"]})
        assert contents(fake) == ["The shop is always open.", QUESTION["content"]]
        assert http.get("/v1/notes/hours").json()["text"] == contents(fake)[0]
        file.write_bytes(b"\xff\xfe\xfd")
        ask(http, QUESTION, notes={"splice": ["hours"]})
        assert contents(fake)[0] == "The shop is always open."


def test_skills_and_errata_of_the_options(fake: Fake, tmp_path: Path) -> None:
    """For requests that name no skill; those with errata of their own keep these. A text may be named in two ways."""
    splice = ["support", str(SAMPLES / "returns")]
    options: Any = {"splice": splice, "errata": ("date=2027-02-03",)}
    with in_front_of(fake.url, tmp_path, SAMPLES / "returns", SAMPLES / "support", **options) as (_, http):
        ask(http, QUESTION)
        assert contents(fake) == [f"{RETURNS.text}\n\n{SUPPORT.text}", f"{NOW}\n\n{QUESTION['content']}"]
        ask(http, QUESTION, notes={"errata": []})
        assert contents(fake)[1] == QUESTION["content"]
        for own in ({"notes": {"splice": []}}, {"model": "m@support"}):
            ask(http, QUESTION, **own)
            assert NOW not in str(contents(fake)) and RETURNS.text not in str(contents(fake))
    with pytest.raises(NotesError, match="no skill 'nothing'"):
        SkillTexts(Library(tmp_path / "library"), splice=["nothing"])


def test_replies_are_passed_on_with_their_usage(fake: Fake, front: tuple[Upstream, httpx.Client]) -> None:
    service, http = front
    assert ask(http, QUESTION) == {"choices": [], "usage": USAGE}
    given = {"splice": ["returns"], "errata": {"date": "2027-02-03"}, "explain": True}
    notes = ask(http, QUESTION, notes=given)["notes"]
    assert notes["pieces"] == [{"kind": "splice", "name": "returns", "how": "text"}, {"kind": "erratum", "text": NOW}]
    fake.answer = lambda request, body: reply(request, {"choices": [], "usage": {"prompt_tokens": 7}})
    ask(http, QUESTION)
    text = http.get("/metrics").text
    for how, tokens in (("live", 180), ("decoded", 20), ("unreported", 7)):
        assert f'notes_prompt_tokens_total{{how="{how}"}} {tokens}.0' in text
    assert 'notes_requests_total{outcome="answered"} 3.0' in text and service.scheduler.load == 0


def test_a_stream_is_passed_on_as_it_arrives(fake: Fake, front: tuple[Upstream, httpx.Client]) -> None:
    """Each event before the next is sent; the usage only to clients that asked for it, and always to the metrics."""
    got, chunk = threading.Event(), {"id": "1", "object": "chat.completion.chunk", "choices": [{"index": 0}]}

    def answer(request: BaseHTTPRequestHandler, body: Json) -> None:
        assert body["stream_options"] == {"include_usage": True}
        stream(request, chunk)
        assert got.wait(20)
        for event in (json.dumps({"id": "1", "choices": [], "usage": USAGE}), "[DONE]"):
            request.wfile.write(f"data: {event}\n\n".encode())

    fake.answer = answer
    body: Json = {"messages": [QUESTION], "stream": True, "notes": {"splice": ["returns"], "explain": True}}
    for usage in (None, USAGE):
        got.clear()
        events = []
        with front[1].stream("POST", "/v1/chat/completions", json=body) as found:
            for line in found.iter_lines():
                events += [line[6:]] if line.startswith("data: ") else []
                got.set()
        assert json.loads(events[0]) == chunk and events[-1] == "[DONE]"
        assert json.loads(events[-2])["notes"]["pieces"][0]["name"] == "returns" and json.loads(events[-2])["id"] == "1"
        assert [json.loads(event).get("usage") for event in events[1:-2]] == ([usage] if usage else [])
        body["stream_options"] = {"include_usage": True}
    assert front[0].metrics.live == 180 and front[0].metrics.outcomes == {"answered": 2}


def test_a_client_that_goes_ends_the_answer(fake: Fake, front: tuple[Upstream, httpx.Client]) -> None:
    closed, begun = threading.Semaphore(0), threading.Semaphore(0)

    def answer(request: BaseHTTPRequestHandler, body: Json) -> None:
        if body["stream"]:
            stream(request, {"choices": []})
        begun.release()
        assert request.connection.recv(1) == b""
        closed.release()

    fake.answer = answer
    for streamed in (True, False):
        body = {"messages": [QUESTION], "stream": streamed}
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=httpx.Timeout(20, read=0.5), verify=NO_TLS) as http:
            http.post(f"{front[1].base_url}/v1/chat/completions", json=body)
        assert begun.acquire(timeout=20) and closed.acquire(timeout=20)
    front[1].get("/health")
    assert front[0].scheduler.load == 0 and front[0].metrics.outcomes["gone"] == 2


def test_errors_of_the_other_server(fake: Fake, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusals are passed on; its faults, its silence and the refusal of its key are one line."""
    bad = {"error": {"message": "no such thing", "code": "x"}}
    fake.answer = lambda request, body: reply(request, bad, 422)
    assert ask(http, QUESTION, status=422) == bad["error"]
    for status in (401, 500, 302):
        fake.answer = lambda request, body, status=status: reply(request, bad, status)  # type: ignore[misc]
        error = ask(http, QUESTION, status=502)
        assert str(status) in error["message"] and ("no such thing" in error["message"]) == (status != 401)
        assert "its-key" not in str(error) and ("NOTES_UPSTREAM_KEY" in error["message"]) == (status == 401)

    def broken(request: BaseHTTPRequestHandler, body: Json) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b'f\r\ndata: {"a":1}\n\n\r\n')

    fake.answer = broken
    lines = http.post("/v1/chat/completions", json={"messages": [QUESTION], "stream": True}).text.split("\n\n")
    assert lines[0] == 'data: {"a":1}' and json.loads(lines[1][6:])["error"]["code"] == "upstream_error"
    monkeypatch.setattr(upstream, "SILENT", 0.2)
    waiting = threading.Event()
    fake.answer = lambda request, body: waiting.wait(20)
    assert ask(http, QUESTION, status=504)["code"] == "upstream_timeout"
    waiting.set()


def test_a_content_that_is_no_text_is_refused(fake: Fake, http: httpx.Client) -> None:
    notes = {"splice": ["returns"], "errata": {"date": "2027-02-03"}}
    contents: list[object] = [5, True, {"text": "x"}]
    for content in contents:
        for role in ("system", "user"):
            error = ask(http, QUESTION, {"role": role, "content": content}, status=400, notes=notes)
            assert error["param"] == "messages[1].content" and not fake.seen


def test_a_body_that_is_nested_too_deeply(http: httpx.Client) -> None:
    statuses = set()
    for depth in (10, 250, 500, 900, 980, 3000):
        body = f'{{"messages": [{{"role": "user", "content": {"[" * depth}{"]" * depth}}}]}}'
        found = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        statuses.add(found.status_code)
    assert statuses == {200, 400} and http.get("/health").status_code == 200


def test_odd_replies(fake: Fake, http: httpx.Client) -> None:
    """Half a character, a huge count, a folded header, the quoted key: a valid reply without the key."""
    status = 0

    def answer(request: BaseHTTPRequestHandler, body: Json) -> None:
        counts = json.dumps({"prompt_tokens": 10**400, "completion_tokens": 10**400})
        data = b'{"error": {"message": "\\ud83d its-key"}, "usage": ' + counts.encode() + b"}"
        request.send_response(status)
        request.send_header("Content-Type", "application/json;\r\n charset=utf-8")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    fake.answer = answer
    notes = {"splice": ["returns"], "explain": True}
    for status in (200, 400, 500):
        found = http.post("/v1/chat/completions", json={"messages": [QUESTION], "notes": notes})
        assert found.status_code == (502 if status == 500 else status)
        assert ("its-key" in found.text) == (status == 200) == ("notes" in found.json())
        assert status == 500 or found.headers["content-type"] == "application/json; charset=utf-8"
    assert http.get("/metrics").status_code == 200


def test_an_endless_event_is_broken_off(fake: Fake, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one is passed on whole, also where its end comes in parts."""
    monkeypatch.setattr(upstream, "LONGEST_EVENT", 1 << 20)
    large = "x" * (1 << 19)
    parts: list[bytes] = []

    def answer(request: BaseHTTPRequestHandler, body: Json) -> None:
        stream(request)
        for part in parts:
            request.wfile.write(part)

    fake.answer = answer
    for line in ("\n\n", "\r\n\r\n"):
        ends = [letter.encode() for letter in line]
        parts[:] = [f"data: {large}".encode(), *ends, b"data: [DONE]", *ends]
        found = http.post("/v1/chat/completions", json={"messages": [QUESTION], "stream": True})
        assert found.text == f"data: {large}{line}data: [DONE]{line}"

    parts[:] = [b"x" * 4096] * 300
    found = http.post("/v1/chat/completions", json={"messages": [QUESTION], "stream": True})
    assert found.status_code == 502 and found.json()["error"]["code"] == "upstream_error"


def test_a_server_that_is_down(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    with in_front_of(f"http://127.0.0.1:{port}/v1/", tmp_path) as (_, http):
        error = ask(http, QUESTION, status=502)
        assert error["code"] == "upstream_unreachable" and f"http://127.0.0.1:{port} cannot" in error["message"]
        assert (http.get("/health").status_code, http.get("/health").json()) == (503, {"status": "unreachable"})


@pytest.mark.parametrize(
    ("path", "head", "key", "kind"),
    [
        *(("/v1/messages" + end, "system", "messages", "text") for end in ("", "/count_tokens")),
        ("/v1/responses", "instructions", "input", "input_text"),
    ],
)
def test_skills_in_other_apis(fake: Fake, http: httpx.Client, path: str, head: str, key: str, kind: str) -> None:
    """At the beginning of the system text, with errata at the end; a known text keeps its bytes there, too."""
    part = {"type": kind, "text": "May I?"}

    def sent(**body: Any) -> Json:
        found = http.post(path, json={"model": "m", **body})
        assert found.status_code == 200, found.text
        return fake.seen[-1][2]

    notes = {"splice": ["returns"], "errata": {"date": "2027-02-03"}}
    for system in ({}, {head: "Be brief."}):
        body = sent(**system, **{key: [{"role": "user", "content": [part]}]}, notes=notes)
        assert body[head] == "\n\n".join([RETURNS.text, *system.values()]) and "notes" not in body
        assert body[key] == [{"role": "user", "content": [{"type": kind, "text": NOW}, part]}]
    body = sent(**{head: f"x-anthropic-billing-header: cch=1;\n{TODAY}", key: [{"role": "user", "content": "May I?"}]})
    assert body == {"model": "m", head: RETURNS.text, key: [{"role": "user", "content": f"{NOW}\n\nMay I?"}]}
    plain = {key: [{"role": "user", "content": [part]}, {"role": "assistant", "content": []}]}
    assert sent(**plain) == {"model": "m", **plain} and fake.seen[-1][0] == path
    if key == "input":
        call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
        assert sent(input="May I?", notes=notes)["input"][0]["content"] == f"{NOW}\n\nMay I?"
        developer = {"role": "developer", "content": "Be brief."}
        body = sent(input=[developer, {"role": "user", "content": "May I?"}, call], notes={"splice": ["returns"]})
        assert body["input"][0]["content"] == f"{RETURNS.text}\n\nBe brief." and head not in body
        assert body["input"][2] == call
    else:
        result = {"type": "tool_result", "tool_use_id": "1", "content": "7"}
        body = sent(system=[{"type": "text", "text": TODAY}], messages=[{"role": "user", "content": [result]}])
        assert body["system"] == [{"type": "text", "text": RETURNS.text}]
        assert body["messages"][0]["content"] == [result, {"type": "text", "text": NOW}]
    error = http.post(path, json={key: 5, "notes": notes})
    assert error.status_code == 400 and f"{key} must be a list" in error.text
    wrong = {head: "Hi.", key: [{"role": "user", "content": 5}]}
    assert f"{key}[0].content must be" in http.post(path, json=wrong).text


def test_the_other_server_loads(fake: Fake, http: httpx.Client) -> None:
    """Its model, or it has failed: /health and the answers have its status."""
    for status, named, answered in ((503, "loading", 503), (500, "failed", 502), (404, "ok", 404), (200, "ok", 200)):
        fake.answer = lambda request, body, status=status: reply(request, {}, status)  # type: ignore[misc]
        health = http.get("/health")
        assert health.json() == {"status": named} and health.status_code == (200 if named == "ok" else 503)
        found = http.post("/v1/chat/completions", json={"messages": [QUESTION]})
        assert found.status_code == answered and ("Retry-After" in found.headers) is (status == 503)


def test_keys_and_paths(fake: Fake, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Clients' keys are checked here and go no further; the other server gets its own, and any request but ours."""
    with in_front_of(fake.url, tmp_path, SAMPLES / "returns", key="its-key", keys=("ours",)) as (_, http):
        assert http.get("/v1/models").status_code == 401 and not fake.seen
        http.headers["Authorization"] = "Bearer ours"
        for path in ("/v1/models", "/v1/embeddings?a=b%20c", "/slots", "/api/embed"):
            body = {"model": "m", "input": "x", "n": 1.0}
            (http.post(path, json=body) if "emb" in path else http.get(path)).raise_for_status()
            assert fake.seen[-1][0] == path and fake.seen[-1][1]["Authorization"] == "Bearer its-key"
            assert "ours" not in str(fake.seen) and fake.seen[-1][2] == (body if "emb" in path else {})
        count = len(fake.seen)
        for body in ({"model": "m@returns"}, {"notes": {"splice": ["returns"]}}):
            error = http.post("/v1/completions", json=body).json()["error"]
            assert "/v1/chat/completions" in error["message"]
        assert http.get("/v1/%2e%2e/slots").status_code == http.get("/%2e%2e/slots").status_code == 404
        assert http.post("/v1/notes/compile", json={"name": "x", "text": "y"}).status_code == 404
        for notes in ({"session": "mine"}, {"ask": True}, {"cache_salt": "x"}, {"recompute": True}):
            assert ask(http, QUESTION, status=400, notes=notes)["param"] == f"notes.{next(iter(notes))}"
        assert ask(http, QUESTION, status=404, notes={"splice": ["../x"]})["code"] == "skill_not_found"
        assert ask(http, QUESTION, status=404, model="m@retruns")["code"] == "model_not_found"
        unknown = {"splice": ["returns"], "errata": {"day": "1"}}
        assert "date" in ask(http, QUESTION, status=400, notes=unknown)["message"]
        assert len(fake.seen) == count
    out = "".join(capfd.readouterr())
    assert "its-key" not in out and "its-key" not in repr(Target.parse("http://a", "its-key"))
    for url in ("a", "ftp://a", "http://a:b@c", "http://a?b", "http://:80", "http://a:99999"):
        with pytest.raises(NotesError):
            Target.parse(url)


def test_the_other_servers_prefix_is_kept(served: Served, tmp_path: Path) -> None:
    """`notes serve` behind it: a date that changes in the system message leaves the policy cached."""
    with in_front_of(served.url, tmp_path, SAMPLES / "returns") as (_, http):
        shares = {}
        for url in (served.url, str(http.base_url)):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=httpx.Client(verify=NO_TLS))
            for day in range(10, 13):
                text = TODAY.replace("2027-02-03", f"2027-03-{day}") + "\n\nBe kind. " * 9
                system = {"role": "system", "content": text}
                usage = client.chat.completions.create(model="tiny", messages=[system, QUESTION], max_tokens=1).usage  # type: ignore[list-item]
                assert usage and usage.prompt_tokens_details
                shares[url] = (usage.prompt_tokens_details.cached_tokens or 0) / usage.prompt_tokens
        direct, ours = shares.values()
        assert ours > 0.75 and direct < 0.5  # it finds runs of its compiled texts


def test_a_value_named_by_its_text(fake: Fake, http: httpx.Client) -> None:
    """It is stated with its sentence, in the same place in the next turn."""
    how = {"splice": ["returns"], "errata": ["2026-05-01 => 2027-02-03", "over 500 => over 100"]}
    ask(http, QUESTION, notes=how)
    first = contents(fake)
    assert NOW in first[1] and "Correction: If the amount is over 100 then" in first[1]
    ask(http, QUESTION, {"role": "assistant", "content": "No."}, QUESTION, notes=how)
    assert contents(fake)[:2] == first and contents(fake)[3] == QUESTION["content"]
