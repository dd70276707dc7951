"""Twelve turns with a user's memory, an edit in three of them, against a prefill of every turn.

Counts the decoded tokens, and the answers that are those of a prefill: `python -m bench.real.memory`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
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


def prefilled(session: notes.Session, tokens: list[int], limit: int) -> str:
    """Return the greedy answer after a prefill of these tokens."""
    with session.workspace.sequence() as sequence, Sampler(SamplerOptions()) as sampler:
        sequence.append(tokens)
        ids = list(sequence.generate(sampler, limit))
    model = session.workspace.model
    return b"".join(map(model.token_bytes, ids)).decode(errors="replace").strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    limit = 24
    name, home = parser.parse_args().model, tempfile.TemporaryDirectory()
    with home as folder, notes.open(name, paths=Paths.under(Path(folder)), n_ctx=4096) as model:
        path = Path(folder, "profile.md")
        path.write_text(PROFILE)
        model.compile(path)
        total, whole, equal = 0, 0, 0
        with model.session("twelve") as session:
            for turn in range(1, 13):
                key, value = EDITS.get(turn, ("", ""))
                asked = list(FACTS)[turn % len(FACTS)]
                with counting() as counts:
                    if key:
                        session.edit(key, value)
                    answer = session.ask(f"What is my {asked.lower()}?", memory=path, max_tokens=limit)
                decoded, prompt = sum(counts) - answer.tokens, answer.counts.total
                total, whole = total + decoded, whole + prompt
                tokens = session._live.state.tokens[:prompt]
                equal += prefilled(session, tokens, limit) == answer.text.strip()
                edit = f", {key}={value}" if key else ""
                print(f"turn {turn:2}: {decoded:4} decoded of {prompt:4}{edit}: {answer.text!r:.60}")
    print(f"{total} tokens decoded, {whole} by a prefill of every turn; {equal} of 12 answers are those of the prefill")


if __name__ == "__main__":
    main()
