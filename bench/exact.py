"""Count whether `--exact` answers as a prefill does, on the workloads of bench/race.

    python -m bench.exact [--models shipped random] [--size 1k] [--asked N] [--write docs]

Each prompt is answered four times from the same tokens: decoded whole, decoded in other batches (what rounding alone
does), with `exact`, and spliced as by default. An answer is the same if all of its tokens are. The table also has the
share of the prompts' tokens that was decoded, and of all prompts the largest squared error of the logits over the
square of what a prefill gives. A changed field comes in by `suffix` with exact, in place by default; of a
conversation the first turn is exact. Rows of models that are not measured again stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import notes_cli as notes
from bench.marked import grid, put_between
from bench.race.cells import MODELS
from bench.race.workloads import ANSWER, TITLES, Work, texts, works
from bench.random_model import ROOT
from notes_cli.engine.segment import Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.runtime.answering import prepare
from notes_cli.runtime.request import NO_CALLBACKS

KEPT = ROOT / "docs" / "results" / "exact.json"
PAGE, BEGIN, END = "race.md", "<!-- bench.exact: begin -->", "<!-- bench.exact: end -->"
WAYS = {"batches": "decoded in batches of 100", "exact": "`--exact`", "spliced": "spliced"}  # compared with a prefill
OTHER = 100  # tokens of the other batches
Row = dict[str, Any]
Pairs = dict[str, list[tuple["Found", "Found"]]]  # by way: a prefill, and those compared with it


@dataclass(frozen=True)
class Found:
    """A prompt of so many tokens, of which some were decoded, and its answer; the logits before it, where known."""

    tokens: int
    decoded: int
    answer: tuple[int, ...]
    logits: NDArray[np.float32] | None = None


def answered(sequence: KVSequence) -> Found:
    """Greedy, from the sequence's end on."""
    tokens, decoded, logits = len(sequence), len(sequence) - sequence.count("spliced"), sequence.logits().copy()
    answer: list[int] = []
    while len(answer) < ANSWER:
        answer.append(int(sequence.logits().argmax()))
        sequence.append(answer[-1:])
    return Found(tokens, decoded, tuple(answer), logits)


def in_batches(model: notes.Model, tokens: Tokens) -> Found:
    """The same tokens, decoded OTHER at a time."""
    with model.workspace.sequence() as sequence:
        for first in range(0, len(tokens), OTHER):
            sequence.append(tokens[first : first + OTHER])
            sequence.flush()
        return answered(sequence)


def prompts(model: notes.Model, work: Work) -> Pairs:
    """Each prompt, answered in each way."""
    pairs: Pairs = {way: [] for way in WAYS}
    for prompt in work.asked:
        given: Row = {"splice": prompt.splice, "system": prompt.system or None, "max_tokens": ANSWER}
        given |= {"fields": {"date": prompt.date}} if prompt.date else {}
        found = {}
        for way, how in {"prefill": {"recompute": True}, "exact": {"exact": True}, "spliced": {}}.items():
            method = {"method": notes.Method("suffix" if way == "exact" else "field")} if prompt.date else {}
            plan = prepare(model.workspace, notes.Request(prompt.question, **given, **how, **method), NO_CALLBACKS)
            with plan.sequence as sequence:
                found[way] = answered(sequence)
                tokens = sequence.tokens[: found[way].tokens]
            if way == "prefill":
                found["batches"] = in_batches(model, tokens)
        for way in WAYS:
            pairs[way].append((found["prefill"], found[way]))
    return pairs


def turns(model: notes.Model, work: Work) -> Pairs:
    """Yield the turns of a conversation in each way, and a prefill of its tokens so far."""
    pairs: Pairs = {way: [] for way in WAYS}
    for way in ("exact", "spliced"):
        with model.session(way) as talk:
            for number, turn in enumerate(work.asked):
                edited = 0
                if number:
                    made = talk.edit("date", turn.date, "suffix" if way == "exact" else "field")
                    edited = sum(one.rows for one in made)
                how: Row = {} if number else {"splice": turn.splice, "exact": way == "exact"}
                before = talk._session.sequence.rows if number else 0
                answer = talk.ask(turn.question, max_tokens=ANSWER, **how)
                tokens = talk._session.state.tokens
                end = len(tokens) - answer.tokens
                with model.workspace.sequence() as sequence:
                    sequence.append(tokens[:end])
                    wanted = answered(sequence)
                decoded = edited + end - before if number else end - answer.counts.spliced
                wanted = replace(wanted, answer=wanted.answer[: answer.tokens])
                pairs[way].append((wanted, Found(end, decoded, tuple(tokens[end:]))))
                if way == "exact":
                    other = in_batches(model, np.array(tokens[:end], np.int32))
                    pairs["batches"].append((wanted, replace(other, answer=other.answer[: answer.tokens])))
    return pairs


def measure(name: str, work: Work) -> list[Row]:
    """A row for each way."""
    model_file = MODELS[name][1]()
    with tempfile.TemporaryDirectory() as home:
        paths = notes.Paths.under(Path(home))
        with notes.open(model_file, beyond_trained=True, paths=paths) as model:
            for skill, path in texts(work.skills).items():
                model.compile(path, name=skill)
            pairs = (turns if work.name == "turns" else prompts)(model, work)
    return [
        {
            "model": name,
            "work": work.name,
            "size": work.size,
            "way": way,
            "asked": len(found),
            "same": sum(wanted.answer == one.answer for wanted, one in found),
            "decoded": sum(one.decoded for _, one in found) / sum(one.tokens for _, one in found),
            "error": max((error(wanted, one) for wanted, one in found if one.logits is not None), default=None),
        }
        for way, found in pairs.items()
    ]


def error(wanted: Found, found: Found) -> float:
    """Squared error of the logits over their square."""
    assert wanted.logits is not None and found.logits is not None
    return float(((found.logits - wanted.logits) ** 2).sum() / (wanted.logits**2).sum())


def table(rows: list[Row]) -> str:
    """A line for each workload, with a cell for each way: same answers, share decoded, error of the logits."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        error = "" if row["error"] is None else f", {row['error']:.1e}"
        work = f"{MODELS[row['model']][0]} | {TITLES[row['work']]}, {row['size']}"
        cells.setdefault(work, []).append(f"{row['same']} of {row['asked']}, {row['decoded']:.2f}{error}")
    return grid(f"model | asked | {' | '.join(WAYS.values())}", [" | ".join([work, *of]) for work, of in cells.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["shipped", "random"])
    parser.add_argument("--size", default="1k")
    parser.add_argument("--asked", type=int, help="of each workload so many prompts at most (default: all)")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="put the table into the page there")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else []
    rows = [row for row in kept if row["model"] not in given.models]
    for model in given.models:
        for make in works().values():
            work = make(given.size)
            rows += measure(model, replace(work, asked=work.asked[: given.asked]))
            print("\n".join(table(rows[-len(WAYS) :]).splitlines()[2:]), flush=True)
    if given.write:
        KEPT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        put_between(given.write / PAGE, BEGIN, END, f"\n\n{table(rows)}\n\n")


if __name__ == "__main__":
    main()
