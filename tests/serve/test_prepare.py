"""Tests that requests are parsed and prepared while others decode, and refused early if they cannot fit."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError
from notes_cli.runtime.request import Answer, Text
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve import conversations, parsing, prepare, refusals, scheduler
from notes_cli.serve.answer_tasks import JobEvent, ServerJob
from notes_cli.serve.conversations import ConversationState, prefix_digests
from notes_cli.serve.parsing import ChatRequest, parse_chat
from notes_cli.serve.prepare import Options, PreparedRequest, check_size, prepare_request
from notes_cli.serve.refusals import Refused, read_json
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.sessions.folder import Sessions
from notes_cli.text.messages import TextPart
from notes_cli.text.schema import schema_grammar

from .conftest import QUESTION, Json, Served, started
from .test_robust import connected, wait

ASK: Json = {"role": "user", "content": QUESTION}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS: list[Json] = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(5000)]
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_others_are_answered_while_a_request_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow schema is parsed outside the event loop."""
    began, goes_on = threading.Event(), threading.Event()

    def slow(schema: Any) -> str:
        began.set()
        assert goes_on.wait(30)
        return schema_grammar(schema)

    monkeypatch.setattr(parsing, "schema_grammar", slow)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(served.chat, [ASK], max_tokens=4, json_schema=SCHEMA)
        assert began.wait(30)
        try:
            assert served.http.get("/health").json() == {"status": "ok"}
            assert served.ask()["choices"]
        finally:
            goes_on.set()
        assert waiting.result()["choices"]


def test_forms_that_are_taken_from_nobody_are_read(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no endpoint: they cost time."""
    for name in ("schema_grammar", "gbnf_grammar"):
        monkeypatch.setattr(parsing, name, lambda *_: pytest.fail("it was read"))
    grammar: Json = {"grammar": 'root ::= "a"'}
    chat, forms = (
        "/v1/chat/completions",
        [
            {"json_schema": SCHEMA},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        ],
    )
    with started(library, Options(forms=False)) as served:
        for path, given in (
            *((chat, {"messages": [ASK], **form}) for form in (grammar, *forms)),
            ("/v1/completions", {"prompt": QUESTION, **grammar}),
            ("/v1/notes/explain", {"messages": [ASK], **grammar}),
        ):
            reply = served.http.post(path, json=given)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_forms")


def test_what_may_fit_is_let_through(served: Served) -> None:
    """No text that fits the context is refused by the check."""
    model, state, draw = served.scheduler.workspace.model, served.scheduler.state, random.Random(3)
    words = [piece.decode() for token in range(model.n_vocab) if (piece := model.token_bytes(token)).isascii()]
    longest = sorted(words, key=len)[-3:]
    signs = [chr(draw.randrange(32, 0x3000)) for _ in range(99)]
    assert state.longest is not None
    for pool in (words, longest, signs, [longest[-1]], ["\n\n"], [" "]):
        text = "".join(draw.choices(pool, k=state.longest + 1))
        while len(model.tokenize(text)) > state.longest:
            text = text[: len(text) * 9 // 10]
        check_size(state, [text], "messages")


def test_blanks_do_not_count(served: Served) -> None:
    """They may have no tokens in a prompt."""
    blank: Any = {"type": "text", "text": " \n"}
    whole = served.chat([ASK], max_tokens=1)["usage"]["prompt_tokens"]
    for messages in (
        [{**ASK, "content": " " * 100_000 + QUESTION}],
        [{"role": "system", "content": ""}] * 5000 + [ASK],
        [{**ASK, "content": [blank] * 5000 + [{"type": "text", "text": QUESTION}]}],
    ):
        assert served.chat(messages, max_tokens=1)["usage"]["prompt_tokens"] == whole


def test_parts_of_a_message() -> None:
    def text(words: str) -> Json:
        return {"type": "text", "text": words}

    head = [{"role": "developer", "content": "A."}, {"role": "system", "content": [text(""), text("B.")]}, ASK]
    one = [{"role": "system", "content": [text("A."), text("B.")]}, ASK]
    assert parse_chat({"messages": head}).messages == parse_chat({"messages": one}).messages
    answer = {"role": "assistant", "content": [text("a"), text("b")]}
    message, _ = parse_chat({"messages": [answer, ASK]}).messages
    assert [part.text for part in message.parts if isinstance(part, TextPart)] == ["ab"]


def test_each_message_is_in_its_place(served: Served) -> None:
    """The prompt is the rendered template; global errata go before the last question, or the message that ends it."""
    late = {"role": "system", "content": "Answer in one word."}
    for talk, question in (
        ([ANSWER, ASK], 1),
        ([{**late, "role": "developer"}, ASK], 1),
        ([ASK, late], 0),
        ([ASK, ANSWER, late, ASK], 3),
        ([ASK, ANSWER, ANSWER, ASK], 3),
        ([ASK, ANSWER, late], 2),
        ([ANSWER, ASK, late], 1),
        ([late, ASK], 1),
    ):
        assert conversations._question(parse_chat({"messages": talk}).messages) == question
        reply = served.chat(talk, max_tokens=1)
        shown = [(one["role"].replace("developer", "system"), one["content"]) for one in talk]
        text = "".join(f"<|im_start|>{said}\n{words}<|im_end|>\n" for said, words in shown) + "<|im_start|>assistant\n"
        tokens = served.at_context(lambda text=text: served.scheduler.workspace.model.tokenize(text, special=True))
        assert reply["usage"]["prompt_tokens"] == len(tokens)


def test_nothing_is_collected_while_json_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And collection is enabled again afterwards, also for invalid JSON."""
    seen: list[bool] = []
    loads = refusals.json.loads
    seeing = lambda *given, **how: seen.append(gc.isenabled()) or loads(*given, **how)  # noqa: E731
    monkeypatch.setattr(refusals.json, "loads", seeing)
    assert read_json(b"[[], {}]") == [[], {}]
    with pytest.raises(parsing.Refused, match="the body is not JSON"):
        read_json(b"[")
    assert seen == [False, False] and gc.isenabled()


SLOW = "Which one is slow?"
SKILL: Json = {"splice": ["returns"]}


class Gate:
    """Stops a preparation thread until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def stop(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.reached.set()
        assert self.goes_on.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    try:
        yield found
    finally:
        found.goes_on.set()


def slow_template(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    real = prepare.rendered_with_tools

    def stopping(workspace: Any, prompt: Any, *given: Any) -> Any:
        if SLOW in str(prompt.conversation.messages[-1].parts):
            gate.stop()
        return real(workspace, prompt, *given)

    monkeypatch.setattr(prepare, "rendered_with_tools", stopping)


def slow_disk(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    real = Workspace.open

    def stopping(self: Workspace, path: Path, word: str = "") -> Segment:
        if not gate.reached.is_set():
            gate.stop()
        return real(self, path, word)

    monkeypatch.setattr(Workspace, "open", stopping)


@pytest.mark.parametrize("slow", [slow_template, slow_disk])
def test_a_running_answer_goes_on_meanwhile(
    library: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, slow: Callable[[pytest.MonkeyPatch, Gate], None]
) -> None:
    """A slow template or disk delays only its own request: others get tokens, and new ones are answered."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    slow(monkeypatch, gate)
    with started(library) as served, ThreadPoolExecutor() as pool:
        tokens: list[int] = []

        def answer() -> None:
            with served.client.completions.create(model="", prompt="x", max_tokens=1500, stream=True) as chunks:
                for _ in chunks:
                    tokens.append(served.scheduler.metrics.steps)
                    if gate.goes_on.is_set():
                        return

        running = pool.submit(answer)
        wait(lambda: len(tokens) > 5, 60)
        waiting = pool.submit(served.chat, [{**ASK, "content": SLOW}], max_tokens=2, notes=SKILL)
        assert gate.reached.wait(60)
        steps = served.scheduler.metrics.steps
        wait(lambda: served.scheduler.metrics.steps >= steps + 20, 60)  # each decodes a token of the running answer
        reply = served.http.post("/v1/completions", json={"prompt": "May", "max_tokens": 3})
        assert reply.json()["usage"]["completion_tokens"] == 3 and not waiting.done()
        gate.goes_on.set()
        assert waiting.result(60)["usage"]["completion_tokens"] == 2
        running.result(60)
    assert gate.threads[0].startswith("prepare")


def test_a_client_that_leaves_during_preparation(library: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """Nothing is decoded for it, it is counted, and its session can be opened again."""
    real = prepare.single_turn

    def stopping(*given: Any, **how: Any) -> Any:
        if not gate.reached.is_set():
            gate.stop()
        return real(*given, **how)

    left, cancel = threading.Event(), ServerJob.cancel

    def leaving(self: ServerJob) -> None:
        cancel(self)
        left.set()

    monkeypatch.setattr(prepare, "single_turn", stopping)
    monkeypatch.setattr(ServerJob, "cancel", leaving)
    with started(library) as served:
        session = {**SKILL, "session": "left"}
        body = json.dumps({"messages": [ASK], "notes": session}).encode()
        with connected(served, len(body)) as client:
            client.sendall(body)
            assert gate.reached.wait(60)
        steps = served.scheduler.metrics.steps
        assert served.scheduler.load == 1
        assert left.wait(60)
        gate.goes_on.set()
        wait(lambda: served.scheduler.load == 0, 60)
        assert served.scheduler.metrics.outcomes == Counter({"gone": 1}) and served.scheduler.metrics.steps == steps
        assert served.ask(session="left", **SKILL)["choices"][0]["message"]["content"] == "accepted"


@contextmanager
def alone(home: Path, options: Options | None = None) -> Iterator[DecodeThread]:
    """A scheduler without HTTP, its model loaded."""

    def opened() -> Workspace:
        return Workspace(config.shipped_model(), ContextOptions(n_threads=1), paths=Paths.under(home))

    with closing(DecodeThread(opened, options or Options())) as found:
        found.start()
        found.ready.result(60)
        yield found


@contextmanager
def ends(one: DecodeThread, gate: Gate) -> Iterator[None]:
    """End the scheduler; it waits for the preparation, which goes on after the block."""
    closing = threading.Thread(target=one.close)
    closing.start()
    wait(lambda: one._closing, 60)
    assert closing.is_alive()
    yield
    gate.goes_on.set()
    closing.join(60)
    assert not closing.is_alive()


def test_a_server_that_ends_meanwhile(library: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """The model stays open during preparation; those requests and waiting ones are refused."""
    slow_template(monkeypatch, gate)
    received: list[JobEvent] = []
    with alone(library) as one:
        asked = parse_chat({"messages": [{**ASK, "content": SLOW}]})
        for _ in range(scheduler.PREPARING + 2):
            one.submit(asked, received.append)
        wait(lambda: len(gate.threads) == scheduler.PREPARING, 60)
        with ends(one, gate):
            assert one.workspace.model.handle
        assert len(received) == scheduler.PREPARING + 2 and one.load == 0
        assert all(isinstance(error, Refused) and error.status == 503 for error in received)
        for late in (lambda: one.submit(asked, received.append), lambda: one.compute(lambda: 5)):
            with pytest.raises(Refused) as refused:
                late()
            assert refused.value.status == 503


def test_preparation_that_waits_for_the_decode_thread(library: Path, gate: Gate) -> None:
    """It gets the result, or is refused at the end of the server, without a deadlock."""
    with alone(library) as one:
        assert one.prepare(lambda: one.compute(threading.current_thread)).result(60).name == "scheduler"

        def stopping() -> int:
            gate.stop()
            return one.compute(lambda: 5)

        waiting = one.prepare(stopping)
        assert gate.reached.wait(60)
        with ends(one, gate):
            pass
        with pytest.raises(Refused, match="ended"):
            waiting.result(60)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_turn_finds_the_one_before(library: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """It is prepared once the state is kept, also if it is sent as soon as an answer ends or is stopped."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    with alone(library) as one:
        over, prepared = threading.Event(), threading.Event()
        jobs: list[ServerJob] = []
        texts: list[str] = []
        found: list[ConversationState | None] = []
        real = prepare_request

        def recorded(state: Any, asked: ChatRequest, **how: Any) -> PreparedRequest:
            if len(asked.messages) > 1:
                found.append(state.conversations.find(asked, prefix_digests(asked))[0])
                prepared.set()
            return real(state, asked, **how)

        monkeypatch.setattr(prepare, "prepare_request", recorded)
        first = {"messages": [ASK], "notes": {"splice": ["returns"]}, "max_tokens": 40}

        def next_turn() -> None:
            answer = {"role": "assistant", "content": "".join(texts)}
            asked = parse_chat({**first, "messages": [ASK, answer, ASK], "max_tokens": 1})
            one.submit(asked, lambda said: over.set() if said is None or isinstance(said, NotesError) else None)
            prepared.wait(0.5)  # blocks the decode thread, which preparation would overtake

        def tell(said: JobEvent) -> None:
            if isinstance(said, Text) and not said.reasoning:
                texts.append(said.text)
            if stopped and texts and not jobs[0].cancelled:
                jobs[0].cancel()
                next_turn()
            elif isinstance(said, Answer) and not stopped:
                next_turn()

        one.call(lambda: jobs.append(one.submit(parse_chat(first), tell))).result(60)
        assert over.wait(60)
        assert len(found) == 1 and found[0] is not None and "returns" in found[0].skills


def test_a_session_is_free_when_the_end_of_its_answer_is_there(library: Path) -> None:
    """Its next turn may be sent at once, and is prepared in another thread."""
    with alone(library) as one:
        free: list[bool] = []
        over = threading.Event()

        def tell(said: JobEvent) -> None:
            if isinstance(said, Answer):
                with Sessions(one.workspace.paths.sessions).locked("ours"):
                    free.append(True)
            elif said is None or isinstance(said, NotesError):
                over.set()

        one.submit(parse_chat({"messages": [ASK], "notes": {**SKILL, "session": "ours"}}), tell)
        assert over.wait(60) and free == [True]
