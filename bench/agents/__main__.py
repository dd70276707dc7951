"""Install real clients, run each against `notes serve`, and record their requests.

    python -m bench.agents [NAME ...] [--record]      needs npm and a package index; downloads a gigabyte

The clients are those of clients.yaml, each in its default mode. The server has a model of two random layers with
SmolLM2's vocabulary and a long context: prompts of agents have 20,000 tokens, and only counts that every request is
accepted and every reply understood. `--record` writes the requests to tests/serve/requests, and
tests/serve/test_agent.py replays them. Texts of the clients are left out, and all but a few tools: structure, names
and schemas are kept.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from bench.processes import notes_serve
from bench.random_model import Shape, random_model
from notes_cli.library.models import SMOLLM2

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "build" / "agents"
RECORDED = ROOT / "tests" / "serve" / "requests"
SHAPE = Shape(layers=2, width=256, heads=4, kv_heads=2, head=64, feed_forward=512, context=131072)
PROMPT = "Which colour has the sky? Answer with one word."
SECONDS = 600  # for a client
WORDS = re.compile(r"[\w.:/#$@+-]{0,40}")  # names, types, patterns of ids: kept; other texts are replaced
UNIQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SCHEMA_WORDS = ("pattern", "format", "$schema", "$ref", "const", "enum")  # kept in schemas
REPEATED = 2  # requests of one form that are recorded of a client
TOOLS = 4  # tools of a request that are recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    clients = yaml.safe_load((HERE / "clients.yaml").read_text())
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *clients], help=", ".join(clients))
    parser.add_argument("--record", action="store_true", help="write their requests to tests/serve/requests")
    given = parser.parse_args()
    model = random_model(INSTALLED / "agents.gguf", SHAPE, tokenizer=SMOLLM2.find(INSTALLED), brief=True)
    failed = False
    with tempfile.TemporaryDirectory() as home:
        options = ("--alias", "local", "--max-tokens", "64")
        with notes_serve(model, Path(home), INSTALLED / "serve.log", *options) as server, recorder(server.url) as proxy:
            for name in given.names or clients:
                proxy.requests.clear()
                status, output = run(name, clients[name], proxy.url)
                refused = [f"{path} {code}" for path, code, _ in proxy.requests if code >= 400]
                failed |= bool(status or refused)
                result = ", ".join(refused) or "all accepted"
                print(f"{name:14} exit {status}, {len(proxy.requests)} requests, {result}")
                if status or refused:
                    print(output[-2000:])
                elif given.record:
                    record(name, proxy.requests)
    sys.exit(failed)


class Recorder(ThreadingHTTPServer):
    """A proxy in front of a server, which keeps path, status and body of each POST request."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.upstream = urlsplit(upstream).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, int, Any]] = []


class _Forward(BaseHTTPRequestHandler):
    server: Recorder

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=SECONDS)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        upstream.request(self.command, self.path, body, headers)
        reply = upstream.getresponse()
        if self.command == "POST":
            self.server.requests.append((urlsplit(self.path).path, reply.status, json.loads(body or b"null")))
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        while chunk := reply.read1(1 << 16):
            self.wfile.write(chunk)
            self.wfile.flush()

    do_GET = do_POST = do_HEAD = do_DELETE = forward

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def recorder(upstream: str) -> Iterator[Recorder]:
    """Run a recording proxy in the block."""
    with Recorder(upstream) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()


def run(name: str, client: Mapping[str, Any], base: str) -> tuple[int, str]:
    """Install a client and let it ask a question; return its exit status and output."""
    programs = install(name, client)
    with tempfile.TemporaryDirectory() as home:
        values = {"base": base, "model": "local", "home": home, "here": str(HERE), "prompt": PROMPT}
        project = Path(home, "project")
        project.mkdir()
        for path, text in client.get("files", {}).items():
            file = Path(home, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(**values))
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": home, "CODEX_HOME": f"{home}/.codex"}
        environment |= {"NODE_PATH": str(programs.parent)}
        environment |= {key: value.format(**values) for key, value in client.get("env", {}).items()}
        command = [word.format(**values) for word in client["run"]]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run(command, cwd=project, env=environment, **streams, timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            return 124, (error.output or b"").decode(errors="replace")
        return done.returncode, done.stdout.decode(errors="replace")


def install(name: str, client: Mapping[str, Any]) -> Path:
    """Install a client's packages in a folder of its own unless they are there; return the folder of its programs."""
    folder = INSTALLED / name
    ready = folder / ".ready"
    programs = folder / "node_modules" / ".bin" if "npm" in client else folder / "bin"
    if not ready.exists():
        if "npm" in client:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text("{}")
            _quiet("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client["npm"])
        else:
            _quiet(sys.executable, "-m", "venv", str(folder))
            _quiet(str(programs / "python"), "-m", "pip", "install", "-q", *client["pip"])
        ready.touch()
    return programs


def _quiet(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")


def record(name: str, requests: Sequence[tuple[str, int, Any]]) -> None:
    """Write a client's requests without its texts; of those with the same form, the first ones."""
    RECORDED.mkdir(exist_ok=True)
    kept: dict[tuple[str, str], list[Any]] = {}
    for path, _, body in requests:
        form = path, json.dumps(sorted(body))
        if "tools" in body:
            body["tools"] = body["tools"][:TOOLS]
        kept.setdefault(form, []).append({"path": path, "body": without_texts(body)})
    lines = [json.dumps(one) for found in kept.values() for one in found[:REPEATED]]
    (RECORDED / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def without_texts(value: Any, key: str = "") -> Any:
    """Replace texts by others of a few words; names, types, numbers and what constrains a schema are kept."""
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if not (name == "description" and isinstance(one, str))}
        return {name: without_texts(one, name) for name, one in kept.items()}
    if isinstance(value, list):
        return [without_texts(one, key) for one in value]
    if not isinstance(value, str) or key in SCHEMA_WORDS:
        return value
    value = UNIQUE.sub("id", value)
    if WORDS.fullmatch(value):
        return value
    if key == "arguments":
        return json.dumps(without_texts(json.loads(value)))
    return f"A text of {len(value)} characters."


if __name__ == "__main__":
    main()
