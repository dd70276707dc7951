"""Compares prompts that reuse runs of tokens with full prefills, by their first token's distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.sequence import run
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.prefix_cache import Layout, PrefixCache, Reuse
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


def paragraphs() -> list[str]:
    """Return paragraphs of prose from the documents."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    found = (part.strip() for text in texts for part in text.split("\n\n"))
    return [part for part in found if 200 < len(part) < 900 and part[0].isalpha()]


def with_other_word(text: str) -> str:
    """Replace the word in the middle."""
    words = text.split(" ")
    words[len(words) // 2] = "possibly"
    return " ".join(words)


QUESTIONS = ("What is this text about?", "Is a model needed for this? Answer yes or no.", "Name one limit it states.")
Change = Callable[[list[str], str], list[str]]
TEXT_CHANGES: dict[str, Change] = {
    "a date line above": lambda texts, other: [f"Today is Friday.\n{texts[0]}", *texts[1:]],
    "a word changed": lambda texts, other: [*texts[:1], with_other_word(texts[1]), *texts[2:]],
    "a paragraph removed": lambda texts, other: [*texts[:1], *texts[2:]],
    "a paragraph added": lambda texts, other: [*texts[:1], other, *texts[1:]],
    "the last paragraph removed": lambda texts, other: texts[:-1],
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
    exact_decoded: int
    tokens: int
    exact: bool  # logits of an exact prompt are bit for bit those of the prefill


def report(found: Sequence[Difference]) -> None:
    """Print the differences by change, and of all."""
    print("change|prompts|decoded|cosine, least|KL, mean and most|same first token|exact: decoded|bit-equal")
    for change in (*TEXT_CHANGES, ""):
        group = [one for one in found if change in ("", one.change)]
        if not group:
            continue
        kl = [one.divergence for one in group]
        tokens, near, exactly = (
            sum(counts) for counts in zip(*((one.tokens, one.decoded, one.exact_decoded) for one in group), strict=True)
        )
        same, exact = (sum(values) for values in zip(*((one.same, one.exact) for one in group), strict=True))
        least = min(one.cosine for one in group)
        row = len(group), f"{near / tokens:.0%}|{least:.5f}|{np.mean(kl):.4f}, {max(kl):.4f}"
        print(change or "all", *row, same, f"{exactly / tokens:.0%}", exact, sep="|")


def differences(model: Path, number: int, sizes: tuple[int, int] = (1_800, 8_000)) -> Iterator[Difference]:
    """Yield the differences of so many changed prompts. `sizes`: characters; by default about 500 to 2,000 tokens."""
    draw, prose = random.Random(1), paragraphs()
    with Workspace(model, ContextOptions(n_ctx=8192)) as workspace:
        for index in range(number):
            prefixes = PrefixCache()
            size, texts, question = draw.randrange(*sizes), draw.sample(prose, 3), draw.choice(QUESTIONS)
            while sum(map(len, texts)) < size:
                texts.append(draw.choice(prose))

            def layout(texts: list[str], reuse: Reuse, prefixes: PrefixCache = prefixes, q: str = question) -> Layout:
                prompt = Prompt(q, system="\n\n".join(texts))
                parts, exact = parts_of(workspace, prompt), reuse == "exact"
                return replace(prefixes.layout(prompt, parts, 1, exact=exact), reuse=reuse)

            def logits(wanted: Layout, prefixes: PrefixCache = prefixes) -> tuple[NDArray[np.float64], int]:
                cached, length, _ = prefixes.find(wanted, "")
                if wanted.exact:
                    prefixes.make_exact(cached if length else None)
                planned, runs = prefixes.plan(workspace, wanted, "", cached, length)
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
            near, count = logits(layout(changed, "near"))
            exact, exact_count = logits(layout(changed, "exact"))  # takes the cached sequence over
            prefixes.close()
            cosine = float(full @ near / np.linalg.norm(full) / np.linalg.norm(near))
            ours, theirs = (values - np.logaddexp.reduce(values) for values in (full, near))
            divergence = float((np.exp(ours) * (ours - theirs)).sum())
            same = bool(full.argmax() == near.argmax())
            tokens = len(layout(changed, "exact"))
            equal = np.array_equal(full, exact)
            yield Difference(change, cosine, divergence, same, count, exact_count, tokens, equal)
