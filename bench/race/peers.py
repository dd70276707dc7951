"""The programs that are compared: how each keeps an earlier prompt, and how it is asked.

All programs of llama.cpp are stock. They run without flash attention, because they are faster so on a CPU.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.processes import LONG, Reply, Server, llama_server, notes_serve, post, stream, watched
from bench.race.workloads import ANSWER, Prompt, Work
from bench.real.tasks import ROOT
from bench.serving.stock import NEWER, PINNED, Release, stock
from notes_cli.runtime.naming import model_file

NOTES = str(Path(sys.executable).with_name("notes"))  # as a user starts it
FOLDER = ROOT / "build" / "race"
HOME = FOLDER / "home"
THREADS = 2  # of every program
CONTEXT = 8192  # tokens
CHUNK = 64  # tokens
REUSE = ("--cache-reuse", str(CHUNK))
CAP = 30.0  # seconds after the first answer of a workload, from when on no further question is asked


@dataclass(frozen=True)
class Run:
    """One answer. Seconds; `processor`: of all processes that took part; `memory`: bytes of the one with the model."""

    first: float
    whole: float
    processor: float
    memory: int
    right: bool


Runs = Iterator[Run]


@dataclass(frozen=True)
class Peer:
    """A program, and the workloads that it is asked."""

    name: str
    title: str
    run: Callable[[Work], Runs]
    running: bool = False  # it has loaded the model before it is asked
    works: Callable[[Work], bool] = lambda work: not work.summed
    cap: float = CAP  # seconds


@cache
def model() -> str:
    """Return the file of SmolLM2."""
    return str(model_file("smollm2"))


def _process(prompt: Prompt, command: list[str]) -> Run:
    environment = {"NOTES_MODEL": model(), "NOTES_THREADS": str(THREADS), "NOTES_HOME": str(HOME)}
    ended = watched(command, FOLDER / f"{Path(command[0]).name}.log", environment)
    return Run(ended.first, ended.whole, ended.processor, ended.memory, prompt.question.right(ended.out))


def _answer(prompt: Prompt, server: Server, reply: Reply, before: float) -> Run:
    """`before`: the server's processor time before it was asked."""
    used = server.processor - before
    return Run(reply.first, reply.whole, used, server.memory, prompt.question.right(reply.text))


def _chat(server: Server, messages: list[dict[str, str]], started: float | None = None, **more: Any) -> Reply:
    body = {"messages": messages, "max_tokens": ANSWER, **more}
    return stream(f"{server.url}/v1/chat/completions", body, started)


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "system", "content": prompt.message}, {"role": "user", "content": prompt.question.ask}]


# notes


def compile_texts(work: Work) -> None:
    """Compile the texts of a workload that are not compiled yet."""
    for text in work.texts:
        path = FOLDER / "texts" / f"{text.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.text, encoding="utf-8")
        command = [NOTES, "compile", str(path), "--name", text.name, "-m", model(), "-t", str(THREADS)]
        watched(command, FOLDER / "compile.log", {"NOTES_HOME": str(HOME)})


def ask(work: Work) -> Runs:
    """Run `notes ask` for each question. A date is corrected by the default method."""
    compile_texts(work)
    for prompt in work.asked:
        command = [NOTES, "ask", prompt.question.ask, "-n", str(ANSWER), "--server", "off"]
        command += [word for text in prompt.texts for word in ("--splice", text.name)]
        command += ["-s", prompt.system] if prompt.system else []
        command += [word for name, value in prompt.changes for word in ("--erratum", f"{name}={value}")]
        yield _process(prompt, command)


def ask_prefilled(work: Work) -> Runs:
    """Run `notes ask` with the whole text as the system message: a full prefill by the same library."""
    for prompt in work.asked:
        command = [NOTES, "ask", prompt.question.ask, "-n", str(ANSWER), "--server", "off", "-s", prompt.message]
        yield _process(prompt, command)


def serve(work: Work) -> Runs:
    """Ask a running `notes serve` over HTTP; a conversation is a session."""
    compile_texts(work)
    shutil.rmtree(HOME / "sessions", ignore_errors=True)
    with _serve() as server:
        if work.seen:
            _ask_serve(server, work, work.seen)
        previous = None
        for prompt in work.asked:
            yield _ask_serve(server, work, prompt, previous)
            previous = prompt


def serve_started(work: Work) -> Runs:
    """Start `notes serve` for each question, as after a restart of the machine."""
    compile_texts(work)
    for prompt in work.asked:
        started = time.perf_counter()
        with _serve() as server:
            yield _ask_serve(server, work, prompt, None, started)


def _serve() -> AbstractContextManager[Server]:
    return notes_serve(Path(model()), HOME, FOLDER / "serve.log", "-t", str(THREADS))


def _ask_serve(
    server: Server, work: Work, prompt: Prompt, previous: Prompt | None = None, started: float | None = None
) -> Run:
    """`previous`: the prompt of the turn before, in a conversation."""
    before = 0.0 if started else server.processor
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages.append({"role": "user", "content": prompt.question.ask})
    names, changes = [text.name for text in prompt.texts], dict(prompt.changes)
    notes: dict[str, Any] = {"session": work.name} if work.conversation else {}
    if work.memory:
        notes["memory"] = names[0]
    elif not (work.conversation and previous):
        notes["splice"] = names
    if work.conversation and previous:
        changes = dict(set(prompt.changes) - set(previous.changes))
    if changes:
        notes["errata"] = changes
    return _answer(prompt, server, _chat(server, messages, started, notes=notes), before)


# llama.cpp


def _server(release: Release, *more: str) -> AbstractContextManager[Server]:
    options = ["-c", str(CONTEXT), "-t", str(THREADS), "-fa", "off", *more]
    return llama_server(stock(release=release), Path(model()), FOLDER / "llama-server.log", *options)


def server(work: Work, release: Release = NEWER, more: Sequence[str] = (), front: bool = False) -> Runs:
    """Ask a running llama-server, which caches prompts. `front`: put a user's memory into the system message."""
    with _server(release, *more) as running:
        if work.seen:
            _chat(running, _messages(work.seen))
        history: list[dict[str, str]] = []
        for prompt in work.asked:
            system, question = _messages(prompt)
            asked = [system, *history, question]
            if work.memory and not front:
                asked = [*history, {"role": "user", "content": f"{prompt.message}\n\n{prompt.question.ask}"}]
            before = running.processor
            reply = _chat(running, asked)
            if work.conversation:
                history += [question, {"role": "assistant", "content": reply.text}]
            yield _answer(prompt, running, reply, before)


def server_slots(work: Work) -> Runs:
    """Start llama-server for each question, and restore the slot that was saved after the first."""
    assert work.seen
    slots, saved = FOLDER / "slots", {"filename": f"{work.name}.bin"}
    slots.mkdir(parents=True, exist_ok=True)
    options = ("-np", "1", "--no-warmup", "--slot-save-path", str(slots))
    with _server(NEWER, *options) as running:
        _chat(running, _messages(work.seen), id_slot=0)
        post(f"{running.url}/slots/0?action=save", saved)
    for prompt in work.asked:
        started = time.perf_counter()
        with _server(NEWER, *options) as running:
            post(f"{running.url}/slots/0?action=restore", saved)
            yield _answer(prompt, running, _chat(running, _messages(prompt), started, id_slot=0), 0.0)
    (slots / saved["filename"]).unlink()


def completion(work: Work, cache: bool = False) -> Runs:
    """Run llama-completion for each question. `cache`: with the prompt cache file that the first prompt wrote."""
    path, kept = FOLDER / "prompt.txt", FOLDER / f"prompt-{work.name}.bin"
    kept.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [str(stock("llama-completion")), "-m", model(), "-f", str(path), "-t", str(THREADS)]
    command += ["-no-cnv", "--simple-io", "--no-escape", "--no-display-prompt", "--no-warmup", "-fa", "off"]
    command += ["--temp", "0", "-c", str(CONTEXT), "-n", str(ANSWER), "-b", "2048"]
    command += ["--prompt-cache", str(kept)] if cache else []
    if cache and work.seen:
        path.write_text(work.seen.rendered + "\n", encoding="utf-8")  # of which it drops the last line break
        _process(work.seen, command)
        command.append("--prompt-cache-ro")
    for prompt in work.asked:
        path.write_text(prompt.rendered + "\n", encoding="utf-8")
        yield _process(prompt, command)
    kept.unlink(missing_ok=True)


# llama-cpp-python


def llama_cpp_python(work: Work) -> Runs:
    """Ask one process with an in-memory cache of states, after it has answered the first prompt."""
    prompts = [*filter(None, [work.seen]), *work.asked]
    given = {"package": str(PINNED.folder / "package"), "model": model(), "threads": THREADS, "context": CONTEXT}
    given |= {"answer": ANSWER, "seconds": LONG if work.summed else CAP, "requests": [*map(_messages, prompts)]}
    path = FOLDER / "llama-cpp-python.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    command = [sys.executable, "-m", "bench.race.llama_cpp_python", str(path)]
    library = str(stock().parent)  # llama-server's: the sdist is that of the binding
    ended = watched(command, FOLDER / "llama-cpp-python.log", {"LLAMA_CPP_LIB_PATH": library})
    for prompt, line in zip(prompts, ended.out.splitlines(), strict=False):
        if prompt is not work.seen:
            first, whole, processor, text = json.loads(line)
            yield Run(first, whole, processor, ended.memory, prompt.question.right(text))


def _kept(work: Work) -> bool:
    """True if the text is the same in every prompt, as programs that restore a saved prompt need."""
    return work.name.startswith("same")


def _any(_: Work) -> bool:
    return True


def _single(work: Work) -> bool:
    return not work.conversation


PEERS = (
    Peer("ask", "`notes ask`", ask),
    Peer("prompt-cache", "`llama-completion --prompt-cache`", partial(completion, cache=True)),
    Peer("serve-started", "`notes serve`, started for each question", serve_started, works=_kept),
    Peer("slots", "llama-server 0.6.0, started, slot restored", server_slots, works=_kept),
    Peer("prefill", "`notes ask` without a skill: full prefill", ask_prefilled, cap=4 * CAP),  # all questions
    Peer("completion", "`llama-completion`: full prefill", completion),
    Peer("serve", "`notes serve`", serve, True, _any),
    Peer("server-0.5.0", "llama-server 0.5.0", partial(server, release=PINNED), True, _single),
    Peer("server-0.6.0", "llama-server 0.6.0", partial(server, release=NEWER), True, _any),
    Peer("reuse", f"`llama-server --cache-reuse {CHUNK}` 0.6.0", partial(server, more=REUSE), True, _any),
    Peer(
        "front",
        "llama-server 0.6.0, memory in the system message",
        partial(server, front=True),
        True,
        lambda w: w.memory,
    ),
    Peer("llama-cpp-python", "llama-cpp-python, `LlamaRAMCache`", llama_cpp_python, True, _single),
)
