"""The ways of asking: how each keeps an earlier prompt, and how it is asked. All llama.cpp programs are stock."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.processes import Ended, Server, running, watched
from bench.race.workloads import ANSWER, FOLDER, Prompt, Work, texts, with_texts
from bench.serving.stock import binding, stock

LONG = 3600.0  # seconds for a prefill
NOTES = (str(Path(sys.executable).with_name("notes")),)  # as a user starts it
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
    def home(self) -> dict[str, str]:
        return {
            "NOTES_HOME": str(self.folder / "home"),
            "NOTES_MODEL": str(self.model),
            "NOTES_THREADS": str(self.threads),
        }


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
    running: bool = False  # before it is asked: it has the model loaded


def _process(setting: Setting, command: list[str], environment: dict[str, str] | None = None) -> Run:
    return _run(watched(command, setting.folder / f"{Path(command[0]).name}.log", environment))


def _run(ended: Ended) -> Run:
    text = ended.out.removesuffix("[end of text]\n\n").strip().removesuffix("[end of text]").strip()
    return Run(ended.first, ended.whole, ended.processor, ended.memory, text)


# notes


def _compiled(setting: Setting, work: Work) -> None:
    for name, path in texts(work.skills).items():
        log = setting.folder / "compile.log"
        watched([*NOTES, "compile", str(path), "--name", name, "-t", str(setting.threads)], log, setting.home)


def _asking(prompt: Prompt, *more: str) -> list[str]:
    command = [*NOTES, "ask", prompt.question, "-n", str(ANSWER), "--server", "off", *more]
    command += [word for name in prompt.splice for word in ("--splice", name)]
    command += ["-s", prompt.system] if prompt.system else []
    return command


def _changed(prompt: Prompt) -> list[str]:
    return ["--field", f"date={prompt.date}", "--method", "field"] if prompt.date else []


def ask(setting: Setting, work: Work) -> Runs:
    """`notes ask`, a process a question."""
    _compiled(setting, work)
    for prompt in work.asked:
        yield _process(setting, _asking(prompt, *_changed(prompt)), setting.home)


def ask_erratum(setting: Setting, work: Work) -> Runs:
    """Ask with the new value after the skill: other tokens than those of the other peers."""
    _compiled(setting, work)
    for prompt in work.asked:
        yield _process(setting, _asking(prompt, "--erratum", f"date={prompt.date}"), setting.home)


def ask_recomputing(setting: Setting, work: Work) -> Runs:
    _compiled(setting, work)
    for prompt in work.asked:
        yield _process(setting, _asking(prompt, "--recompute", *_changed(prompt)), setting.home)


def ask_erratum_recomputing(setting: Setting, work: Work) -> Runs:
    _compiled(setting, work)
    for prompt in work.asked:
        command = _asking(prompt, "--recompute", "--erratum", f"date={prompt.date}")
        yield _process(setting, command, setting.home)


def ask_server(setting: Setting, work: Work) -> Runs:
    """`notes ask` that a `notes serve` answers; the first question is asked before."""
    _compiled(setting, work)
    command = [*NOTES, "serve", "--port", "0", "-t", str(setting.threads)]
    with running(command, setting.folder / "serve.log", setting.home, r"serving \S+ on (http://\S+)") as server:
        assert work.seen
        for prompt in (work.seen, *work.asked):
            before = server.processor
            asked = _asking(prompt, *_changed(prompt))
            asked[asked.index("off")] = server.url
            run = _process(setting, asked, setting.home)
            if prompt is not work.seen:
                used = run.processor + server.processor - before
                yield Run(run.first, run.whole, used, server.memory, run.text)


def serve(setting: Setting, work: Work) -> Runs:
    """`notes serve` asked over HTTP, as the running llama-server is; the first question is asked before."""
    _compiled(setting, work)
    command = [*NOTES, "serve", "--port", "0", "-t", str(setting.threads)]
    with running(command, setting.folder / "serve.log", setting.home, r"serving \S+ on (http://\S+)") as server:
        assert work.seen
        for prompt in (work.seen, *work.asked):
            run = _chat(server, prompt)
            if prompt is not work.seen:
                yield run


def _chat(server: Server, prompt: Prompt) -> Run:
    changed = {"errata": {"date": prompt.date}} if prompt.date else {}
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    body = {"messages": [*messages, {"role": "user", "content": prompt.question}], "max_tokens": ANSWER, "stream": True}
    body |= {"temperature": 0, "notes": {"splice": list(prompt.splice), **changed}}
    started, before, first, text = time.perf_counter(), server.processor, 0.0, ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=LONG) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"notes serve: {reply.read().decode()[:400]}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += "".join(one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"])
                first = first or (time.perf_counter() - started if text else 0.0)
    whole = time.perf_counter() - started
    return Run(first or whole, whole, server.processor - before, server.memory, text.strip())


def python_api(setting: Setting, work: Work) -> Runs:
    _compiled(setting, work)
    for prompt in work.asked:
        wanted = {"date": prompt.date, "splice": prompt.splice, "system": prompt.system, "question": prompt.question}
        yield _process(setting, _inside(setting, "api", **wanted), setting.home)


def _inside(setting: Setting, kind: str, **more: Any) -> list[str]:
    path = setting.folder / "inside.json"  # a prompt is too much for a command line
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model": str(setting.model), "threads": setting.threads, "answer": ANSWER, **more}))
    return [sys.executable, "-m", "bench.race.inside", kind, str(path)]


def talk(setting: Setting, work: Work) -> Runs:
    """Run a conversation with the Python API in one process, and return the prompts for the other peers."""
    return _talk(setting, work, "field", "field")


def talk_recomputing(setting: Setting, work: Work) -> Runs:
    """The same conversation, whose prompts are read again from the change on."""
    return _talk(setting, work, "suffix", "suffix")


def _talk(setting: Setting, work: Work, method: str, name: str) -> Runs:
    _compiled(setting, work)
    turns = [{"question": one.question, "date": one.date} for one in work.asked]
    shutil.rmtree(setting.folder / "home" / "sessions", ignore_errors=True)
    wanted = {"turns": turns, "splice": work.asked[0].splice, "method": method, "name": name}
    command = _inside(setting, "session", prompts=str(_prompt_file(setting, work, name)), **wanted)
    return _lines(watched(command, setting.folder / "talk.log", setting.home))


def _prompt_file(setting: Setting, work: Work, name: str = "field") -> Path:
    return setting.folder / f"turns-{work.size}-{name}.json"


def _lines(ended: Ended) -> Runs:
    for line in ended.out.splitlines():
        found = json.loads(line)
        yield Run(found["first"], found["whole"], found["processor"], ended.memory, found["text"].strip())


def _known(setting: Setting, work: Work) -> Work:
    """With the texts of its prompts."""
    if work.name != "turns":
        return work
    if not _prompt_file(setting, work).exists():
        list(talk(setting, work))
    return with_texts(work, _prompt_file(setting, work))


# llama-server


@contextmanager
def _llama_server(setting: Setting, work: Work, *more: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(stock()), "-m", str(setting.model), "--host", "127.0.0.1", "--port", str(port), "--offline"]
    command += ["-np", "1", "-c", str(_context(work)), "-t", str(setting.threads), "-fa", "off", "--no-warmup", *more]
    with running(command, setting.folder / "llama-server.log", {}, r"listening on (http://\S+)") as server:
        yield server


def _context(work: Work) -> int:
    return -(-(work.longest + 2 * ANSWER) // 256) * 256


def _complete(server: Server, prompt: Prompt, *, started: float, before: float, reuse: bool = True) -> Run:
    """Times count from `started`."""
    body = {"prompt": prompt.text, "n_predict": ANSWER, "temperature": 0, "stream": True, "cache_prompt": reuse}
    first, text = 0.0, ""
    with httpx.stream("POST", f"{server.url}/completion", json={**body, "id_slot": 0}, timeout=LONG) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["content"]
                first = first or (time.perf_counter() - started if text else 0.0)
    whole = time.perf_counter() - started
    return Run(first or whole, whole, server.processor - before, server.memory, text.strip())


def _serving(setting: Setting, work: Work, *more: str) -> Runs:
    work = _known(setting, work)
    with _llama_server(setting, work, *more) as server:
        for prompt in (*((work.seen,) if work.seen else ()), *work.asked):
            run = _complete(server, prompt, started=time.perf_counter(), before=server.processor)
            if prompt is not work.seen:
                yield run


def server_prefix(setting: Setting, work: Work) -> Runs:
    """It runs, and has answered before: the prefix that prompts share is there."""
    return _serving(setting, work)


def server_reuse(setting: Setting, work: Work) -> Runs:
    return _serving(setting, work, "--cache-reuse", str(CHUNK))


def server_slots(setting: Setting, work: Work) -> Runs:
    """Started for each question, with the slot restored that was saved after the first."""
    assert work.seen
    slots = setting.folder / "slots"
    slots.mkdir(parents=True, exist_ok=True)
    kept, more = f"{work.name}-{work.size}.bin", ("--slot-save-path", str(slots))
    with _llama_server(setting, work, *more) as server:
        _complete(server, work.seen, started=0.0, before=0.0)
        _slot(server, "save", kept)
    for prompt in work.asked:
        started = time.perf_counter()
        with _llama_server(setting, work, *more) as server:
            _slot(server, "restore", kept)
            yield _complete(server, prompt, started=started, before=0.0)
    (slots / kept).unlink()


def _slot(server: Server, action: str, name: str) -> None:
    url = f"{server.url}/slots/0?action={action}"
    httpx.post(url, json={"filename": name}, timeout=LONG).raise_for_status()


# llama-completion


def _completing(setting: Setting, prompt: Prompt, work: Work, *more: str) -> list[str]:
    path = setting.folder / "prompt.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(prompt.text + "\n")  # of which it drops the last line break
    command = [str(stock("llama-completion")), "-m", str(setting.model), "-f", str(path), "-no-cnv", "--simple-io"]
    command += [
        "--no-escape",
        "--no-display-prompt",
        "--no-warmup",
        "-t",
        str(setting.threads),
        "-fa",
        "off",
        "--temp",
        "0",
    ]
    return [*command, "-c", str(_context(work)), "-n", str(ANSWER), "-b", "2048", *more]


def completion(setting: Setting, work: Work) -> Runs:
    """Nothing is kept: all tokens are decoded."""
    work = _known(setting, work)
    for prompt in work.asked:
        yield _process(setting, _completing(setting, prompt, work))


def prompt_cache(setting: Setting, work: Work) -> Runs:
    """Ask with the file that the first prompt, or the turn before, has written."""
    work = _known(setting, work)
    kept = setting.folder / f"prompt-{work.name}-{work.size}.bin"
    kept.unlink(missing_ok=True)
    if work.seen:
        _process(setting, _completing(setting, work.seen, work, "--prompt-cache", str(kept)))
    for prompt in work.asked:
        more = ("--prompt-cache-ro",) if work.seen else ()
        yield _process(setting, _completing(setting, prompt, work, "--prompt-cache", str(kept), *more))
    kept.unlink(missing_ok=True)


# llama-cpp-python


def _python(setting: Setting, kind: str, work: Work, **more: Any) -> tuple[list[str], dict[str, str]]:
    path = os.pathsep.join([str(binding()), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "LLAMA_CPP_LIB_PATH": str(stock().parent)}
    return _inside(setting, kind, context=_context(work), **more), environment


def python_state(setting: Setting, work: Work) -> Runs:
    """Ask with a pickle of save_state after the first prompt."""
    assert work.seen
    kept = setting.folder / f"state-{work.name}-{work.size}.pickle"
    kept.unlink(missing_ok=True)
    for prompt in (work.seen, *work.asked):
        run = _process(setting, *_python(setting, "state", work, kept=str(kept), text=prompt.text))
        if prompt is not work.seen:
            yield run
    kept.unlink()


def python_disk(setting: Setting, work: Work) -> Runs:
    """Ask with a LlamaDiskCache of the first prompt, which removes entries that it returns."""
    assert work.seen
    kept, copy = setting.folder / "disk", setting.folder / "disk-copy"
    shutil.rmtree(kept, ignore_errors=True)
    _process(setting, *_python(setting, "disk", work, kept=str(kept), text=work.seen.text))
    for prompt in work.asked:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(kept, copy)
        yield _process(setting, *_python(setting, "disk", work, kept=str(copy), text=prompt.text))
    shutil.rmtree(kept)
    shutil.rmtree(copy)


def python_talk(setting: Setting, work: Work) -> Runs:
    """A conversation in one process: the prefix that prompts share is there."""
    work = _known(setting, work)
    command, environment = _python(setting, "talk", work, prompts=str(_prompt_file(setting, work)))
    return _lines(watched(command, setting.folder / "talk.log", environment))


OURS, THEIRS = "notes-recompute", "completion"
ERRATUM, TALK = "notes-erratum-recompute", "notes-session-recompute"
STILL, FIELD, TURNS = ("alone", "moved", "orders"), ("field",), ("turns",)
ALL = (*STILL, *FIELD, *TURNS)
PEERS = {
    one.name: one
    for one in (
        Peer("notes", "`notes ask`", ask, OURS),
        Peer("notes-erratum", "`notes ask --erratum`", ask_erratum, ERRATUM, FIELD),
        Peer("notes-python", "notes, Python API", python_api, OURS),
        Peer("slots", "llama-server, started, slot restored", server_slots, THEIRS),
        Peer("prompt-cache", "`llama-completion --prompt-cache`", prompt_cache, THEIRS, ALL),
        Peer("python-state", "llama-cpp-python, save_state", python_state, THEIRS),
        Peer("python-disk", "llama-cpp-python, LlamaDiskCache", python_disk, THEIRS),
        Peer(OURS, "`notes ask --recompute`", ask_recomputing, OURS),
        Peer(ERRATUM, "`notes ask --recompute --erratum`", ask_erratum_recomputing, ERRATUM, FIELD),
        Peer(THEIRS, "`llama-completion`", completion, THEIRS, ALL),
        Peer("notes-serve", "`notes serve`", serve, OURS, STILL, running=True),
        Peer("notes-serve-erratum", "`notes serve`, erratum", serve, ERRATUM, FIELD, running=True),
        Peer("notes-server", "`notes ask --server`", ask_server, OURS, running=True),
        Peer("notes-session", "notes, a session", talk, TALK, TURNS, running=True),
        Peer(TALK, "notes, a session, `suffix`", talk_recomputing, TALK, TURNS, running=True),
        Peer("server", "llama-server", server_prefix, THEIRS, ALL, running=True),
        Peer("reuse", f"`llama-server --cache-reuse {CHUNK}`", server_reuse, THEIRS, ALL, running=True),
        Peer("python-talk", "llama-cpp-python", python_talk, THEIRS, TURNS, running=True),
    )
}
