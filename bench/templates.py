"""Conversations with tools in each chat template of llama.cpp: which ones we take, and which ones llama-server takes.

    python -m bench.templates [--server FILE] [--only NAME ...] [--write docs]

For each template in models/templates of llama.cpp's sources, llama-server is started with it and a tiny model, and
renders twelve histories (/apply-template, which decodes nothing). We read the same requests and make their prompts.
Exits 1 where we refuse a history that llama-server takes, with a template that has tools or calls.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.processes import llama_server
from bench.real.report import marked
from bench.serving.stock import stock
from notes_cli.config import shipped_model
from notes_cli.errors import NotesError
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.refusals import Refused
from notes_cli.text.messages import Conversation
from notes_cli.text.prompt import build
from notes_cli.text.template import ChatTemplate

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "build" / "zoo" / "llama.cpp" / "models" / "templates"
Json = dict[str, Any]

# ---- the histories

CODE = 'for x in ["<a>", "b|c"]:\n    print({x: f"{x!r}"})  # 1 < 2 & 3 > 2'
RUN: Json = {"code": CODE, "path": "src/<main>.py", "deep": {"a": [1, None, {"b": "c|d"}]}, "times": 3, "on": True}
TOOLS: list[Json] = [
    {
        "name": "run",
        "description": "Runs <code> in {a} [sandbox] | and prints what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The <code>."},
                "path": {"type": ["string", "null"], "default": None},
                "times": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
                "kind": {"enum": ["fast", "<slow>"]},
                "deep": {"type": "object", "additionalProperties": True},
                "list": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["code"],
            "additionalProperties": False,
        },
    },
    {"name": "now", "description": "The time."},
    {"name": "files", "parameters": {}},
    {"name": "ping", "description": "Pings.", "parameters": {"type": "object", "properties": {}}},
]
ASK: Json = {"role": "user", "content": "Which files are there?"}
MORE: Json = {"role": "user", "content": "And the largest?"}
ANSWER: Json = {"role": "assistant", "content": "There are four."}
SYSTEM: Json = {"role": "system", "content": "You work in a repository."}
MISSING = object()
FIRST, SECOND = "abcdefgh1", "abcdefgh2"


def call(key: object, name: str, arguments: object) -> Json:
    """A call of a tool. MISSING: without an id, or without arguments."""
    function = {"name": name} | ({} if arguments is MISSING else {"arguments": arguments})
    return {"type": "function", "function": function} | ({} if key is MISSING else {"id": key})


def calls(*given: Json, content: object = None) -> Json:
    """The assistant's message with calls. MISSING: without a content."""
    return {"role": "assistant", "tool_calls": [*given]} | ({} if content is MISSING else {"content": content})


def result(key: object, content: object = '{"out": "<a>\\n[1]"}') -> Json:
    """A tool's message."""
    return {"role": "tool", "content": content} | ({} if key is MISSING else {"tool_call_id": key})


def request(*messages: Json, tools: Sequence[Json] = TOOLS, **more: Any) -> Json:
    """A request to /v1/chat/completions."""
    listed = [{"type": "function", "function": tool} for tool in tools]
    return {"messages": [*messages], **({"tools": listed} if listed else {}), **more}


TEXT = json.dumps(RUN)
FOREIGN, OTHER = "call_8f3-x.Y/9", "toolu_01A09q90qw90lq917835lq9"
HISTORIES: dict[str, Json] = {
    "calls, and no tools": request(ASK, calls(call(FIRST, "run", TEXT)), result(FIRST), tools=()),
    "calls in an earlier turn, and no tools": request(
        SYSTEM, ASK, calls(call(FIRST, "run", TEXT)), result(FIRST), ANSWER, MORE, tools=()
    ),
    'tool_choice "none"': request(ASK, calls(call(FIRST, "run", TEXT)), result(FIRST), MORE, tool_choice="none"),
    "arguments {} and null": request(
        ASK,
        *(calls(call(FIRST, "now", "{}")), result(FIRST)),
        *(calls(call(SECOND, "ping", {})), result(SECOND)),
        *(calls(call("abcdefgh3", "now", None)), result("abcdefgh3")),
    ),
    'arguments "" or missing': request(
        ASK, calls(call(FIRST, "now", "")), result(FIRST), calls(call(SECOND, "ping", MISSING)), result(SECOND)
    ),
    "ids of other servers": request(
        ASK, calls(call(FOREIGN, "run", TEXT)), result(FOREIGN), calls(call(OTHER, "run", TEXT)), result(OTHER)
    ),
    "no ids": request(ASK, calls(call(MISSING, "run", TEXT)), result(MISSING)),
    "contents null, missing, in parts": request(
        {"role": "user", "content": [{"type": "text", "text": "Which files"}, {"type": "text", "text": "are there?"}]},
        *(calls(call(FIRST, "run", TEXT), content=MISSING), result(FIRST, None)),
        *(calls(call(SECOND, "run", RUN), content="I look.\n"), result(SECOND, [{"type": "text", "text": "<a>"}])),
    ),
    "parallel calls, results reversed": request(
        ASK, calls(call(FIRST, "run", TEXT), call(SECOND, "now", "{}")), result(SECOND, "noon"), result(FIRST), MORE
    ),
    "a call without its result, a result without its call": request(
        ASK, calls(call(FIRST, "run", TEXT)), MORE, ANSWER, ASK, result(SECOND)
    ),
    "tools without parameters, one required": request(ASK, tools=TOOLS[1:], tool_choice="required"),
    "system, developer, text beside calls, rounds": request(
        SYSTEM,
        {"role": "developer", "content": "Be <brief>."},
        ASK,
        *(calls(call(FIRST, "run", TEXT), content="I'll <look>."), result(FIRST)),
        *(calls(call(SECOND, "now", "{}"), content=""), result(SECOND, "")),
        *(ANSWER, MORE, calls(call("abcdefgh3", "ping", "{}")), result("abcdefgh3", "pong")),
    ),
}


# ---- both sides


def ours(source: str, name: str, given: Json) -> str:
    """Why we refuse a request with this template; "" if we take it."""
    try:
        asked = parse_chat(json.loads(json.dumps(given)))
        build(ChatTemplate(source, "<s>", "</s>", name=name), Conversation(asked.messages, asked.tools))
    except (NotesError, Refused) as error:
        return str(error)
    return ""


@dataclass
class Row:
    """A template: whether it has tools or calls, as llama.cpp finds, and why which history is refused."""

    tools: bool = False
    ours: dict[str, str] = field(default_factory=dict)
    theirs: dict[str, str] = field(default_factory=dict)


def row(server: Path, template: Path, histories: Mapping[str, Json] = HISTORIES) -> Row:
    """Return the outcome of both renderers for each history with a template."""
    found = Row()
    source = template.read_text(encoding="utf-8")
    options = ["--jinja", "--chat-template-file", str(template), "-np", "1", "-c", "512", "-t", "1", "--no-warmup"]
    log = ROOT / "build" / "templates" / f"{template.stem}.log"
    with (
        llama_server(server, shipped_model(), log, *options) as started,
        httpx.Client(base_url=started.url, timeout=60) as client,
    ):
        caps = client.get("/props").json()["chat_template_caps"]
        found.tools = caps["supports_tools"] or caps["supports_tool_calls"]
        for name, given in histories.items():
            reply = client.post("/apply-template", json=given)
            if reply.status_code != 200:
                found.theirs[name] = " ".join(reply.json()["error"]["message"].split())[:200]
            if why := ours(source, template.stem, given):
                found.ours[name] = why
    return found


# ---- the report


def table(rows: Mapping[str, Row]) -> str:
    """A line a history: with how many templates each side takes it; those with tools, and all."""
    with_tools = {name: one for name, one in rows.items() if one.tools}
    lines = [
        f"| history, by {len(with_tools)} templates that tell of tools or show calls | llama-server | notes "
        "| only llama-server | only notes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    totals = [0, 0, 0, 0]
    for history in HISTORIES:
        sides = [(history not in one.theirs, history not in one.ours) for one in with_tools.values()]
        counts = [sum(theirs for theirs, _ in sides), sum(own for _, own in sides)]
        counts += [sides.count((True, False)), sides.count((False, True))]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(f"| {history} | {' | '.join(map(str, counts))} |")
    lines.append(f"| all {len(HISTORIES) * len(with_tools)} | {' | '.join(map(str, totals))} |")
    return "\n".join(lines)


def differences(rows: Mapping[str, Row]) -> Iterator[tuple[str, str, str, str]]:
    """Each history that only one side takes: template, history, which side refuses it, and why."""
    for name, one in rows.items():
        for history in HISTORIES:
            if (history in one.ours) != (history in one.theirs):
                side = "notes" if history in one.ours else "llama-server"
                yield name, history, side, {**one.theirs, **one.ours}[history]


def stored(rows: Mapping[str, Row]) -> str:
    """The results as JSON: for each template and side, the number of a history, and the number of why it is refused."""
    histories, why = [*HISTORIES], dict[str, int]()

    def numbers(refused: Mapping[str, str]) -> dict[str, int]:
        return {str(histories.index(name)): why.setdefault(reason, len(why)) for name, reason in refused.items()}

    refused = {name: {"notes": numbers(one.ours), "llama-server": numbers(one.theirs)} for name, one in rows.items()}
    with_tools = sorted(name for name, one in rows.items() if one.tools)
    parts = {"templates": len(rows), "with_tools": with_tools, "histories": histories, "why": [*why]}
    parts["refused"] = refused
    return "{" + ",\n".join(f'"{key}": {json.dumps(part)}' for key, part in parts.items()) + "}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.templates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Path, help="llama-server; built from the same sources if none is named")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="templates")
    parser.add_argument("--write", type=Path, metavar="docs", help="put the results into this folder")
    given = parser.parse_args()
    server = given.server or stock()
    templates = [one for one in sorted(TEMPLATES.glob("*.jinja")) if not given.only or one.stem in given.only]
    rows: dict[str, Row] = {}
    for template in templates:
        print(template.stem, file=sys.stderr, flush=True)
        rows[template.stem] = row(server, template)
    print(table(rows))
    found = [*differences(rows)]
    refused = [one for one in found if one[2] == "notes" and rows[one[0]].tools]
    for one in found:
        print(" | ".join(one))
    if given.write:
        (given.write / "results" / "templates.json").write_text(stored(rows))
        page = given.write / "answers.md"
        page.write_text(marked(page.read_text(), "histories", table(rows), "templates"))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
