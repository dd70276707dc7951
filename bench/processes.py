"""Processes that are measured: one that answers and ends, and servers, with their time, memory and first byte."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

# Settings of developers that users do not have: their modules are compiled once, and output goes as it does elsewhere.
ODD = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
LONG = 3600.0  # seconds for a request


@dataclass(frozen=True)
class Ended:
    """A process that has ended. Seconds since it was started; `processor` is user and system time of all threads."""

    out: str
    first: float  # until the first byte that is no blank; all of it where there was none
    whole: float
    processor: float
    memory: int  # bytes that were resident at most


def watched(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a process to its end, with stderr in `log`. Raises SystemExit if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        started, first, out = time.perf_counter(), 0.0, b""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, **streams, env=_environment(environment or {}))
        assert process.stdout
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            out += chunk
            first = first or (time.perf_counter() - started if out.strip() else 0.0)
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        whole = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        output = log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{' '.join(command[:3])} has failed with status {process.returncode}\n{output}")
    used = usage.ru_utime + usage.ru_stime
    return Ended(out.decode(errors="replace"), first or whole, whole, used, usage.ru_maxrss << 10)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in ODD}, **more}


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    url: str
    pid: int

    @property
    def processor(self) -> float:
        """Seconds of user and system time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    @property
    def memory(self) -> int:
        """Bytes that were resident at most."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) << 10 if found else 0


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str], listens: str) -> Iterator[Server]:
    """Run a server in the block, with output in `log`, and yield its address, which matches `listens`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=_environment(environment))
    try:
        while not (match := re.search(listens, log.read_text(errors="replace"))):
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} has ended\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.01)
        _ready(match[1])
        yield Server(match[1], process.pid)
        if process.poll() is not None:
            raise SystemExit(f"{command[0]} has crashed\n{log.read_text(errors='replace')[-2000:]}")
    finally:
        process.kill()  # some are in a long prefill whose client has gone
        process.wait()


def _ready(url: str) -> None:
    for _ in range(6000):
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.01)
    raise SystemExit(f"{url} does not get ready")


@contextmanager
def llama_server(program: Path, model: Path, log: Path, *options: str) -> Iterator[Server]:
    """Run llama.cpp's server in the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--offline", *options]
    with running(command, log, {}, r"listening on (http://\S+)") as server:
        yield server


@contextmanager
def notes_serve(model: Path, home: Path, log: Path, *options: str) -> Iterator[Server]:
    """Run `notes serve` in the block."""
    command = [sys.executable, "-m", "notes_cli", "serve", "--port", "0", "-m", str(model), *options]
    with running(command, log, {"NOTES_HOME": str(home)}, r"serving \S+ on (http://\S+)") as server:
        yield server


@dataclass(frozen=True)
class Reply:
    """A streamed answer: seconds until its first text and its end, and the token counts of the last event."""

    first: float
    whole: float
    text: str
    usage: dict[str, Any]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an answer. Raises SystemExit if it is refused."""
    reply = httpx.post(url, json=body, timeout=LONG, trust_env=False)
    if reply.status_code != 200:
        raise SystemExit(f"{url}: status {reply.status_code}: {reply.text[:400]}")
    found: dict[str, Any] = reply.json()
    return found


def stream(url: str, body: dict[str, Any], started: float | None = None) -> Reply:
    """Ask by OpenAI's endpoints or llama-server's own. Raises SystemExit if it is refused. `started`: of the time."""
    started, first, text = started or time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    body = {**body, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", url, json=body, timeout=LONG, trust_env=False) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{url}: {reply.read().decode()[:400]}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                deltas = [choice["delta"].get("content") or "" for choice in event.get("choices") or ()]
                text += event.get("content") or "".join(deltas)
                first = first or (time.perf_counter() - started if text else 0.0)
                usage = event.get("usage") or usage
    whole = time.perf_counter() - started
    return Reply(first or whole, whole, text.strip(), usage)
