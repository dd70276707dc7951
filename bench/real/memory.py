"""Twelve turns with a user's memory, an edit in three of them, against a prefill of every turn.

Counts the decoded tokens and the seconds of one thread to the first token, beside a prefill of every turn and a cache
of the last prompt, and the answers that are those of a prefill: `python -m bench.real.memory`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import notes_cli as notes
from notes_cli.config import Paths
from notes_cli.engine.context import Context
from notes_cli.engine.sampler import Sampler, SamplerOptions

FACTS = {"Diet": "vegan", "City": "Bern", "Phone": "555-0101", "Color": "green", "Budget": "300 euro"}
HABITS = ("walks to work", "reads history", "cooks on Sundays", "likes short answers", "plays chess", "sleeps early")
PROFILE = "\n".join(f"{key}: {value}" for key, value in FACTS.items()) + "\n\n"
PROFILE += "\n".join(
    f"The user {habit}, and has done so for {years} years." for years, habit in enumerate(HABITS * 4, 2)
)
EDITS = {4: ("City", "Oslo"), 7: ("Diet", "kosher"), 10: ("City", "Bern")}  # by turn


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the tokens that are decoded, appended or in place."""
    counts, append, rewrite = list[int](), Context.append, Context.rewrite

    def counted_append(self: Context, tokens: Any, *rest: Any, **more: Any) -> Any:
        counts.append(sum(map(len, tokens.values())))
        return append(self, tokens, *rest, **more)

    def counted_rewrite(self: Context, seq: int, at: Any, tokens: Any) -> Any:
        counts.append(len(tokens))
        return rewrite(self, seq, at, tokens)

    with patch.object(Context, "append", counted_append), patch.object(Context, "rewrite", counted_rewrite):
        yield counts


def prefilled(session: notes.Session, tokens: Sequence[int], limit: int) -> tuple[str, float]:
    """Return the greedy answer after a prefill of these tokens, and the seconds until its first token."""
    begun = time.process_time()
    with session.workspace.sequence() as sequence, Sampler(SamplerOptions()) as sampler:
        sequence.append(tokens)
        sequence.logits()
        first = time.process_time() - begun
        ids = list(sequence.generate(sampler, limit))
    model = session.workspace.model
    return b"".join(map(model.token_bytes, ids)).decode(errors="replace").strip(), first


def decoded_by_prefix_cache(before: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the number of tokens that differ from the last prompt with its answer, from the first such one."""
    pairs = zip(before, tokens, strict=False)
    return len(tokens) - next((at for at, (one, other) in enumerate(pairs) if one != other), len(before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    limit = 24
    name, home = parser.parse_args().model, tempfile.TemporaryDirectory()
    paths = Paths.under(Path(home.name))
    with home as folder, notes.open(name, paths=paths, n_ctx=4096, n_threads=1) as model:
        path = Path(folder, "profile.md")
        path.write_text(PROFILE)
        model.compile(path)
        ways = ("moved", "prefilled", "cached, memory last", "cached, memory first")
        decoded, seconds, equal = dict.fromkeys(ways, 0), dict.fromkeys(ways[:2], 0.0), 0
        last: Sequence[int] = []
        first: Sequence[int] = []  # the same with the memory first
        with model.session("twelve") as session:
            for turn in range(1, 13):
                key, value = EDITS.get(turn, ("", ""))
                asked = list(FACTS)[turn % len(FACTS)]
                begun, times = time.process_time(), list[float]()
                with counting() as counts:
                    if key:
                        session.edit(key, value)
                    timed = notes.Callbacks(
                        on_text=lambda _, begun=begun, times=times: times.append(time.process_time() - begun)
                    )
                    answer = session.ask(f"What is my {asked.lower()}?", memory=path, max_tokens=limit, callbacks=timed)
                whole, prompt = session._live.state.tokens, answer.counts.total
                [skill] = session._live.state.skills
                start, end = skill.position, skill.position + skill.tokens
                moved = [*whole[start:end], *whole[:start], *whole[end:]]
                text, needed = prefilled(session, whole[:prompt], limit)
                equal += text == answer.text.strip()
                seconds["moved"] += times[0]
                seconds["prefilled"] += needed
                count = {
                    "moved": sum(counts) - answer.tokens,
                    "prefilled": prompt,
                    "cached, memory last": decoded_by_prefix_cache(last, whole[:prompt]),
                    "cached, memory first": decoded_by_prefix_cache(first, moved[:prompt]),
                }
                decoded = {way: decoded[way] + count[way] for way in ways}
                last, first = whole, moved
                edit = f", {key}={value}" if key else ""
                print(
                    f"turn {turn:2}: {count}, {times[0]:.2f} and {needed:.2f} s{edit}: {answer.text!r:.60}", flush=True
                )
    print(f"tokens decoded: {decoded}; seconds to the first tokens: {seconds}; {equal} of 12 answers as prefilled")


if __name__ == "__main__":
    main()
