"""Hugging Face on this machine: as much of its HTTP as huggingface_hub asks for when it downloads a file."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..stores import COMMIT


class Hub:
    """Repositories and files of a fake hub, the requests it got, and how it misbehaves."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.status: dict[str, tuple[int, str]] = {}  # of a repository: status, and X-Error-Code
        self.cut: int | None = None  # bytes of a file after which the connection ends, once
        self.url = ""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(head=True)

        def do_GET(self) -> None:
            self.answer(head=False)

        def answer(self, head: bool) -> None:
            path = self.path.split("?")[0].strip("/")
            hub.asked.append(f"{self.command} {path}{' ' + self.headers['Range'] if self.headers['Range'] else ''}")
            repo = "/".join((path.removeprefix("api/models/")).split("/")[:2])
            if repo in hub.status:
                status, code = hub.status[repo]
                return self.send(status, b"no", {"X-Error-Code": code, "X-Error-Message": code})
            if repo not in hub.repos:
                return self.send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            files = hub.repos[repo]
            if path.startswith("api/models/"):
                found = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                return self.send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": found}).encode(), {})
            name = path.split("/resolve/", 1)[1].split("/", 1)[1]
            data = files[name]
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if head:
                return self.send(200, data, headers, body=False)
            begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            return self.send(206 if begin else 200, data[begin:], headers)

        def send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if body and self.command != "HEAD":
                if hub.cut is not None and len(data) > hub.cut:
                    self.wfile.write(data[: hub.cut])
                    self.wfile.flush()
                    hub.cut = None
                    self.connection.close()
                    return
                self.wfile.write(data)

    return Handler


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a port of its own."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
