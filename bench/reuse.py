"""Count the tokens that are decoded after an agent's prompt changes, by where its tools are and by what may be reused.

    python -m bench.reuse [--write docs]   five minutes; also writes the table of docs/serving.md

Prompts have the size and the order of those of coding agents: a system text in sections with a date, a git status and
rules of the project, tools, and a conversation with tool results, made of sentences of the sample skills. The tools are
before the system text, in its middle, or sent apart (in the template's general form). The model has random weights in
two layers and SmolLM2's vocabulary, as only tokens are counted. Each change is one of the first request.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from bench.in_process import Json, ask, serving, smollm2, wait_until_idle
from bench.marked import grid, put_between
from bench.random_model import MODEL, Shape, random_model
from bench.real.tasks import SKILLS
from notes_cli.runtime.compile import skill_of
from notes_cli.runtime.prefix_cache import Reuse
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.serve.prepare import Options
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.text.skill import Skill, load_skill
from notes_cli.text.tools import ToolSet, in_order

SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1, head=32, feed_forward=128)
CONTEXT = 40_960
Way = Literal["nothing", "compiled", "learned"]  # that may be reused, beyond equal prefixes
WAYS: tuple[Way, ...] = get_args(Way)
BEGIN, END = "<!-- make reuse: begin -->", "<!-- make reuse: end -->"
SAMPLES = ("store-handbook", "api-reference", "style-guide")
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

    def request(self, reuse: Reuse) -> Json:
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
    choose = Random(1)
    sentences = [part for name in SAMPLES for part in re.split(r"(?<=[.!?])\s+", load_skill(SKILLS / name).text)]

    def text(size: int) -> str:
        parts: list[str] = []
        while sum(map(len, parts)) < size:
            parts.append(" ".join(choose.choices(sentences, k=5)))
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


def decoded(server: DecodeThread, request: Json) -> tuple[int, int]:
    """Answer a request; return the decoded tokens of its prompt, and all of them."""
    _, prefilled = ask(server, request)
    return prefilled.counts.decoded, prefilled.counts.total


def counts(model: Path, agent: Agent, way: Way) -> Iterator[tuple[str, int, int]]:
    """Yield each change, the decoded tokens of the prompt after it, and all of its tokens. `way`: how much is reused,
    "learned" after idle time, or "compiled": the system text, in blocks by its headings, and the tools are compiled."""
    reuse: Reuse = "compiled" if way == "nothing" else way
    options = Options(reuse="learned" if way == "learned" else "compiled")
    with TemporaryDirectory() as home, serving(model, home, options, CONTEXT) as server:

        def compile_texts() -> None:
            compile_to_library(server.workspace, Skill("system", "", agent.system, (), "-"), blocks="headings")
            tools = ToolSet("tools", in_order(agent.tools), "-")
            compile_to_library(server.workspace, skill_of(server.workspace, tools))

        if way == "compiled":
            server.compute(compile_texts)
        yield "first request", *decoded(server, agent.request(reuse))
        if way == "learned":
            wait_until_idle(server)
        server.idle_work = None  # each change is one of the first request
        first = list(server.prefixes.entries)
        for change, function in CHANGES.items():
            yield change, *decoded(server, function(agent).request(reuse))
            for cached in [one for one in server.prefixes.entries if one not in first]:
                server.compute(partial(server.prefixes.drop, cached))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the table into docs and its results")
    given = parser.parse_args()
    model = random_model(MODEL.with_name("reuse.gguf"), SHAPE, tokenizer=smollm2())
    table: dict[str, dict[str, list[int]]] = {}
    for place in ("first", "middle", "last"):
        for way in WAYS:
            for change, count, total in counts(model, an_agent(place), way):
                table.setdefault(change, {}).setdefault("tokens", []).append(total)
                table[change].setdefault(way, []).append(count)
    rows = [
        " | ".join([change, *(" / ".join(f"{count:,}" for count in row[way]) for way in WAYS)])
        for change, row in table.items()
    ]
    text = grid(" | ".join(["change", "prefix", *WAYS[1:]]), rows)
    print(text)
    if given.write:
        (given.write / "results" / "reuse.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        put_between(given.write / "serving.md", BEGIN, END, f"\n{text}\n")


if __name__ == "__main__":
    main()
