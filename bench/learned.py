"""Compare answers over blocks that the server learned by itself with those of a full prefill, on SmolLM2.

    python -m bench.learned [--write docs/results/learned.json]   half an hour on two cores

The texts in skills/ are system texts under a line with a date. One question on the first day, then idle time, in which
the text is learned; then all questions of bench/real/tasks.yaml on another day, and copies of sentences. Likewise sets
of tools: on another day they are the same, or one has come or left. No idle work is done between those questions.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import in_process
from bench.in_process import Json, serving, smollm2, wait_until_idle
from bench.real.tasks import SKILLS, load_tasks
from notes_cli.runtime.request import Counts
from notes_cli.serve.prepare import Options
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.text.skill import load_skill

CONTEXT = 8192


def ask(server: DecodeThread, text: str, day: int, question: str, **more: Any) -> tuple[str, Counts]:
    """Return the answer or the name of the called tool, and the counts of the prompt. `text`: of the system."""
    system = f"Today's date is 2026-11-{day}.\n\n{text}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    request = {"messages": messages, "max_tokens": 40, "temperature": 0, **more}
    answer, prefilled = in_process.ask(server, request)
    return answer.calls[0].name if answer.calls else answer.text, prefilled.counts


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
    for tasks in load_tasks():
        text = load_skill(SKILLS / tasks.skill).text
        with TemporaryDirectory() as home, serving(model, home, Options(reuse="learned"), CONTEXT) as server:
            ask(server, text, 27, tasks.questions[0].ask)
            wait_until_idle(server)
            server.idle_work = None
            answers: dict[str, list[str]] = {way: [] for way in WAYS}
            wanted = copies(text)
            asked = [*(one.ask for one in tasks.questions), *(instruction for instruction, _ in wanted)]
            for number, question in enumerate(asked):
                for way, notes in WAYS.items():
                    answer, counts = ask(server, text, 28, question, notes=notes)
                    answers[way].append(answer)
                    rows[way]["decoded"] += counts.decoded if not number else 0
                    rows[way]["tokens"] += counts.total if not number else 0
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
    "album": ("pictures in photo albums", "a picture of Ruth", "photos of the trip", "a photo album", "my pictures"),
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


ALL = sorted(SUBJECTS)  # in the order of the prompt
SETS = {  # learned, then asked with
    "the same tools": (ALL[1:], ALL[1:]),
    "one comes": (ALL[1:], ALL),
    "one leaves": (ALL, ALL[1:]),
}


def measure_tools(model: Path, first: list[str], then: list[str]) -> dict[str, Any]:
    """Return how often the right tool is called, and the same as after a prefill, with the tools of `then` after those
    of `first` were learned."""
    called: dict[str, list[str]] = {way: [] for way in WAYS}
    counts: dict[str, Counts] = {}
    with TemporaryDirectory() as home, serving(model, home, Options(reuse="learned"), CONTEXT) as server:
        ask(server, "You help.", 27, "Hello.", tools=list(map(tool, first)), tool_choice="required")
        wait_until_idle(server)
        server.idle_work = None
        for subject in then:
            for form, word in product(("Find", "I need"), SUBJECTS[subject][1:]):
                for way, notes in WAYS.items():
                    more = {"tools": list(map(tool, then)), "tool_choice": "required", "notes": notes}
                    name, count = ask(server, "You help.", 28, f"{form} {word} in Bramford.", **more)
                    called[way].append(name)
                    counts.setdefault(way, count)
    wanted = [f"find_{one}" for one in then for _ in range(8)]
    rows: dict[str, Any] = {"asked": len(wanted), "same": sum(map(str.__eq__, *called.values()))}
    for way, names in called.items():
        right = sum(map(str.__eq__, names, wanted))
        rows[way] = {"right": right, "decoded": counts[way].decoded, "tokens": counts[way].total}
    print("tools", json.dumps(rows), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the counts as JSON")
    given = parser.parse_args()
    model = smollm2()
    tools = {change: measure_tools(model, *sets) for change, sets in SETS.items()}
    rows = {"tools": tools, "texts": measure(model)}
    if given.write:
        given.write.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
