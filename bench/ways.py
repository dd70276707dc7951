"""Count prompts whose logits are the same bits whichever way they are asked.

    python -m bench.ways MODEL SKILL FIELD [--asked 200] [--shared]

Each prompt is asked by an erratum, by a field's new value, in a batch of its own, as a session's first turn, and as a
chat of `notes serve`, which runs in a thread of the same process. The server has the context to itself: what it kept of
earlier prompts is dropped before each request. With --shared it stays there, as on a server in use.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

import notes_cli as notes
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sequence import KVSequence
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.app import Options, Service
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.serve.server import listen, serve

QUESTIONS = ["What does it say?", "Who is asked first, and why is that so?", "What changes, and from when on?"]
SYSTEMS = [None, "Answer in one word."]


@contextmanager
def served(model: Path, home: Path) -> Iterator[tuple[httpx.Client, DecodeThread]]:
    """A client of a `notes serve` with this library, and its scheduler."""
    scheduler = DecodeThread(lambda: Workspace(model, ContextOptions(), paths=notes.Paths.under(home)))
    service = Service(scheduler, Options())
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=lambda: serve(service, listening, lambda: None, drain=5))
        thread.start()
        scheduler.ready.result(60)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                yield client, scheduler
        finally:
            service.end()
            thread.join(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("skill", type=Path)
    parser.add_argument("field")
    parser.add_argument("--asked", type=int, default=200)
    parser.add_argument("--shared", action="store_true", help="keep earlier prompts of the server in its context")
    given = parser.parse_args()
    seen: dict[tuple[int, ...], dict[str, bytes]] = {}
    way = ""
    ask = KVSequence.try_logits

    def asked(sequence: KVSequence) -> object:
        logits = ask(sequence)
        if logits is not None and sequence.count("spliced"):
            seen.setdefault(tuple(sequence.tokens.tolist()), {}).setdefault(way, logits.tobytes())
        return logits

    KVSequence.try_logits = asked  # type: ignore[method-assign,assignment]
    with (
        tempfile.TemporaryDirectory() as home,
        notes.open(given.model, paths=notes.Paths.under(Path(home))) as model,
        ExitStack() as stack,
    ):
        model.compile(given.skill, name="skill")
        client, scheduler = stack.enter_context(served(model.workspace.model.path, Path(home)))
        for number in range(given.asked):
            value, method = f"Pine {number}", notes.Method("field+erratum")
            question, system = QUESTIONS[number % len(QUESTIONS)], SYSTEMS[number % len(SYSTEMS)]
            how = {"splice": ["skill"], "system": system, "max_tokens": 1}
            by_erratum = notes.Request(question, errata=[f"{given.field}={value}"], method=method, **how)  # type: ignore[arg-type]
            by_field = notes.Request(question, fields={given.field: value}, method=method, **how)  # type: ignore[arg-type]
            way = "erratum"
            model.ask(by_erratum)
            way = "field"
            model.ask(by_field)
            way = "batch"
            list(model.ask_many([by_erratum]))
            way = "session"
            with model.session(f"s{number}") as session:
                session.ask(by_field)
            way = "server"
            messages = [{"role": "system", "content": system}] if system else []
            words = {"splice": ["skill"], "errata": [f"{given.field}={value}"], "cache_salt": str(number)}
            body = {"messages": [*messages, {"role": "user", "content": question}], "max_tokens": 1, "notes": words}
            if not given.shared:
                scheduler.call(scheduler.prefixes.close).result()
            client.post("/v1/chat/completions", json={**body, "temperature": 0}).raise_for_status()
    every = [bits for bits in seen.values() if len(bits) == 5]  # prompts, and those with a token of the answer
    same = sum(len(set(bits.values())) == 1 for bits in every)
    for bits in every:
        if len(set(bits.values())) > 1:
            print(
                "differ:", *(" ".join(way for way in bits if bits[way] == one) for one in {*bits.values()}), sep="\n  "
            )
    print(f"{given.asked} requests: {same} of {len(every)} sets of logits are the same in all five ways")
    return int(same < len(every) or len(every) < given.asked)


if __name__ == "__main__":
    raise SystemExit(main())
