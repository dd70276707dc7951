"""Both servers, each started afresh and warm: the policy with its first date is read, in all sequences."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.processes import running
from bench.serving.stock import stock
from bench.serving.texts import FIRST, SKILL, Asked, Json, body, policy

FOLDER = Path(__file__).resolve().parents[2] / "build" / "serving"
PARALLEL = 4  # sequences that are answered at a time
CELLS = 4096  # of each of them
LONG = 900.0  # seconds for a prefill
WARM = 0.95  # of a prompt is there already when a server is warm


@dataclass(frozen=True)
class System:
    """A way of serving the policy with its date of today."""

    name: str
    title: str
    way: str  # of stating the date (texts.WAYS)
    reuse: int | None = None  # llama-server's --cache-reuse; None: it is ours


SYSTEMS = {
    one.name: one
    for one in (
        System("unedited", "llama-server, policy unedited", "said", 0),
        System("ours", "notes serve, erratum", "erratum"),
        System("edited", "llama-server, policy edited", "edited", 0),
        System("reuse", "`llama-server --cache-reuse 256`, policy edited", "edited", 256),
    )
}


@dataclass(frozen=True)
class Setting:
    """Settings that both servers share."""

    model: Path
    threads: int
    flash: str  # llama-server's -fa, on or off; ours has its default


@contextmanager
def server(system: System, setting: Setting) -> Iterator[str]:
    """The address of a warm server."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _ours(setting) if system.reuse is None else _stock(setting, system.reuse) as url:
        question = Asked("What is the return?", FIRST)
        for expected in (0.0, WARM):  # the first round may have to read, the second must not
            with ThreadPoolExecutor(PARALLEL) as pool:
                shares = list(pool.map(lambda _: _warm(url, system, question), range(PARALLEL)))
            if min(shares) < expected:
                raise SystemExit(f"{system.title}: not warm, {min(shares):.2f} of the prompt was there")
        yield url


def _warm(url: str, system: System, question: Asked) -> float:
    """Ask a question of the first day; how much of its prompt was there."""
    asked = {**body(question, system.way, 4), "stream": False}
    del asked["stream_options"]
    usage = _post(f"{url}/v1/chat/completions", asked)["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


@contextmanager
def _ours(setting: Setting) -> Iterator[str]:
    command = [sys.executable, "-m", "notes_cli", "serve", "--port", "0", "--parallel", str(PARALLEL)]
    command += ["-m", str(setting.model), "-t", str(setting.threads)]
    home = FOLDER / f"home-{hashlib.sha256(policy().encode()).hexdigest()[:16]}"  # it is compiled there once
    with _running(command, {"NOTES_HOME": str(home)}, r"serving \S+ on (http://\S+)") as url:
        text = {"name": SKILL, "text": policy()}
        with httpx.stream("POST", f"{url}/v1/notes/compile", json=text, timeout=LONG) as told:
            told.raise_for_status()
            if '"skill"' not in (found := told.read().decode()):
                raise SystemExit(f"the policy could not be compiled: {found[-400:]}")
        yield url


@contextmanager
def _stock(setting: Setting, reuse: int) -> Iterator[str]:
    """Its slots are filled from a file (an endpoint of its own), so that the policy is read only once."""
    slots = FOLDER / "slots"
    slots.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(stock()), "-m", str(setting.model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(PARALLEL), "-c", str(PARALLEL * CELLS), "-t", str(setting.threads), "--offline"]
    command += ["-fa", setting.flash, "--cache-reuse", str(reuse), "--slot-save-path", str(slots)]
    key = hashlib.sha256(f"{setting}{setting.model.stat()}{policy()}".encode()).hexdigest()[:16]
    kept = slots / f"{key}.bin"
    with _running(command, {}, r"listening on (http://\S+)") as url:
        if not kept.exists():
            asked = {**body(Asked("What is the return?", FIRST), "edited", 1), "stream": False, "id_slot": 0}
            del asked["stream_options"]
            _post(f"{url}/v1/chat/completions", asked)
            _post(f"{url}/slots/0?action=save", {"filename": kept.name})
        for slot in range(PARALLEL):
            _post(f"{url}/slots/{slot}?action=restore", {"filename": kept.name})
        yield url


def _post(url: str, given: Json) -> Json:
    reply = httpx.post(url, json=given, timeout=LONG)
    if reply.status_code != 200:
        raise SystemExit(f"{url}: status {reply.status_code}: {reply.text[:400]}")
    found: Json = reply.json()
    return found


@contextmanager
def _running(command: list[str], environment: dict[str, str], listens: str) -> Iterator[str]:
    """The address of a server, for as long as this is used."""
    with running(command, FOLDER / f"{Path(command[0]).name}.log", environment, listens) as server:
        yield server.url
