"""The ways of asking: how each keeps an earlier prompt, and how it is asked. All llama.cpp programs are stock."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.processes import Reply, Server, llama_server, notes_serve, post, stream, watched
from bench.race.workloads import ANSWER, FOLDER, Prompt, Work, texts, with_texts
from bench.serving.stock import stock

NOTES = str(Path(sys.executable).with_name("notes"))  # as a user starts it
CHUNK = 64  # of --cache-reuse


@dataclass(frozen=True)
class Setting:
    """Settings that all peers share."""

    name: str
    model: Path
    threads: int

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def environment(self) -> dict[str, str]:
        found = {"NOTES_MODEL": self.model, "NOTES_THREADS": self.threads, "NOTES_HOME": self.folder / "home"}
        return {name: str(value) for name, value in found.items()}


@dataclass(frozen=True)
class Run:
    """One prompt, answered. Seconds; `processor` of all processes that took part; `memory`: bytes of the one with the
    model."""

    first: float
    whole: float
    processor: float
    memory: int
    text: str


Runs = Iterator[Run]


@dataclass(frozen=True)
class Peer:
    """A way of asking. `as_whose`: the peer that decodes all tokens with the same library, to compare answers with."""

    name: str
    title: str
    run: Callable[[Setting, Work], Runs]
    as_whose: str
    works: tuple[str, ...] = ("alone", "moved", "orders", "field")
    running: bool = False  # it has the model loaded before it is asked


def _process(setting: Setting, command: list[str]) -> Run:
    ended = watched(command, setting.folder / f"{Path(command[0]).name}.log", setting.environment)
    text = ended.out.removesuffix("[end of text]\n\n").strip().removesuffix("[end of text]").strip()
    return Run(ended.first, ended.whole, ended.processor, ended.memory, text)


def _asked(server: Server, reply: Reply, before: float) -> Run:
    """`before`: the server's processor time before it was asked."""
    return Run(reply.first, reply.whole, server.processor - before, server.memory, reply.text)


# notes


def _compile(setting: Setting, work: Work) -> None:
    for name, path in texts(work.skills).items():
        command = [NOTES, "compile", str(path), "--name", name, "-t", str(setting.threads)]
        watched(command, setting.folder / "compile.log", setting.environment)


def ask(setting: Setting, work: Work, *more: str, erratum: bool = False) -> Runs:
    """`notes ask`, a process a question. `erratum`: other tokens than those of the other peers."""
    _compile(setting, work)
    for prompt in work.asked:
        command = [NOTES, "ask", prompt.question, "-n", str(ANSWER), "--server", "off", *more]
        command += [word for name in prompt.splice for word in ("--splice", name)]
        command += ["-s", prompt.system] if prompt.system else []
        if prompt.date:
            value = f"date={prompt.date}"
            command += ["--erratum", value] if erratum else ["--field", value, "--method", "field"]
        yield _process(setting, command)


def serve(setting: Setting, work: Work) -> Runs:
    """`notes serve` asked over HTTP, as the running llama-server is; the first question is asked before."""
    _compile(setting, work)
    home, log = setting.folder / "home", setting.folder / "serve.log"
    with notes_serve(setting.model, home, log, "-t", str(setting.threads)) as server:
        for prompt in work.every:
            messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
            messages.append({"role": "user", "content": prompt.question})
            notes = {"splice": prompt.splice, "errata": {"date": prompt.date} if prompt.date else {}}
            before, body = server.processor, {"messages": messages, "max_tokens": ANSWER, "notes": notes}
            run = _asked(server, stream(f"{server.url}/v1/chat/completions", body), before)
            if prompt is not work.seen:
                yield run


def session(setting: Setting, work: Work, method: str) -> Runs:
    """A conversation by the Python API in one process, which writes its prompts to a file for the other peers."""
    _compile(setting, work)
    shutil.rmtree(setting.folder / "home" / "sessions", ignore_errors=True)
    given = {
        "model": str(setting.model),
        "threads": setting.threads,
        "answer": ANSWER,
        "method": method,
        "splice": work.asked[0].splice,
        "turns": [[one.question, one.date] for one in work.asked],
        "prompts": str(_prompts(setting, work, method)),
    }
    path = setting.folder / "session.json"
    path.write_text(json.dumps(given))
    command = [sys.executable, "-m", "bench.race.session", str(path)]
    ended = watched(command, setting.folder / "session.log", setting.environment)
    for line in ended.out.splitlines():
        found = json.loads(line)
        yield Run(found["first"], found["whole"], found["processor"], ended.memory, found["text"].strip())


def _prompts(setting: Setting, work: Work, method: str = "field") -> Path:
    return setting.folder / f"turns-{work.size}-{method}.json"


def _known(setting: Setting, work: Work) -> Work:
    """The workload with the texts of its prompts."""
    if work.name != "turns":
        return work
    if not _prompts(setting, work).exists():
        list(session(setting, work, "field"))
    return with_texts(work, _prompts(setting, work))


# llama.cpp


def _server(setting: Setting, work: Work, *more: str) -> AbstractContextManager[Server]:
    options = ["-np", "1", "-c", str(work.context), "-t", str(setting.threads), "-fa", "off", "--no-warmup", *more]
    return llama_server(stock(), setting.model, setting.folder / "llama-server.log", *options)


def _complete(server: Server, prompt: Prompt, started: float | None = None) -> Run:
    before = 0.0 if started else server.processor
    body = {"prompt": prompt.text, "n_predict": ANSWER, "cache_prompt": True, "id_slot": 0}
    return _asked(server, stream(f"{server.url}/completion", body, started), before)


def server(setting: Setting, work: Work, *more: str) -> Runs:
    """llama-server that has answered before: the prefix that prompts share is there."""
    work = _known(setting, work)
    with _server(setting, work, *more) as running:
        for prompt in work.every:
            run = _complete(running, prompt)
            if prompt is not work.seen:
                yield run


def server_slots(setting: Setting, work: Work) -> Runs:
    """llama-server started for each question, with the slot restored that was saved after the first."""
    assert work.seen
    slots, kept = setting.folder / "slots", {"filename": f"{work.name}-{work.size}.bin"}
    slots.mkdir(parents=True, exist_ok=True)
    with _server(setting, work, "--slot-save-path", str(slots)) as running:
        _complete(running, work.seen)
        post(f"{running.url}/slots/0?action=save", kept)
    for prompt in work.asked:
        started = time.perf_counter()
        with _server(setting, work, "--slot-save-path", str(slots)) as running:
            post(f"{running.url}/slots/0?action=restore", kept)
            yield _complete(running, prompt, started)
    (slots / kept["filename"]).unlink()


def completion(setting: Setting, work: Work, keep: bool = False) -> Runs:
    """llama-completion. `keep`: with the file that the first prompt, or the turn before, has written."""
    work = _known(setting, work)
    path, kept = setting.folder / "prompt.txt", setting.folder / f"prompt-{work.name}-{work.size}.bin"
    kept.unlink(missing_ok=True)
    for prompt in work.every if keep else work.asked:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(prompt.text + "\n")  # of which it drops the last line break
        command = [
            str(stock("llama-completion")),
            "-m",
            str(setting.model),
            "-f",
            str(path),
            "-t",
            str(setting.threads),
        ]
        command += ["-no-cnv", "--simple-io", "--no-escape", "--no-display-prompt", "--no-warmup", "-fa", "off"]
        command += ["--temp", "0", "-c", str(work.context), "-n", str(ANSWER), "-b", "2048"]
        command += ["--prompt-cache", str(kept)] if keep else []
        command += ["--prompt-cache-ro"] if keep and work.seen not in (None, prompt) else []
        run = _process(setting, command)
        if prompt is not work.seen:
            yield run
    kept.unlink(missing_ok=True)


def recomputed(setting: Setting, work: Work, erratum: bool = False) -> Runs:
    return ask(setting, work, "--recompute", erratum=erratum)


OURS, THEIRS = "notes-recompute", "completion"
ERRATUM, SUFFIX = "notes-erratum-recompute", "notes-session-recompute"
STILL, FIELD, TURNS = ("alone", "moved", "orders"), ("field",), ("turns",)
ALL = (*STILL, *FIELD, *TURNS)
PEERS = {
    one.name: one
    for one in (
        Peer("notes", "`notes ask`", ask, OURS),
        Peer("notes-erratum", "`notes ask --erratum`", partial(ask, erratum=True), ERRATUM, FIELD),
        Peer("slots", "llama-server, started, slot restored", server_slots, THEIRS),
        Peer("prompt-cache", "`llama-completion --prompt-cache`", partial(completion, keep=True), THEIRS, ALL),
        Peer(OURS, "`notes ask --recompute`", recomputed, OURS),
        Peer(ERRATUM, "`notes ask --recompute --erratum`", partial(recomputed, erratum=True), ERRATUM, FIELD),
        Peer(THEIRS, "`llama-completion`", completion, THEIRS, ALL),
        Peer("notes-serve", "`notes serve`", serve, OURS, STILL, running=True),
        Peer("notes-serve-erratum", "`notes serve`, erratum", serve, ERRATUM, FIELD, running=True),
        Peer("notes-session", "notes, a session", partial(session, method="field"), SUFFIX, TURNS, running=True),
        Peer(SUFFIX, "notes, a session, `suffix`", partial(session, method="suffix"), SUFFIX, TURNS, running=True),
        Peer("server", "llama-server", server, THEIRS, ALL, running=True),
        Peer(
            "reuse",
            f"`llama-server --cache-reuse {CHUNK}`",
            lambda setting, work: server(setting, work, "--cache-reuse", str(CHUNK)),
            *(THEIRS, ALL, True),
        ),
    )
}
