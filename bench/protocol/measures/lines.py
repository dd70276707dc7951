"""Are notes where they are used? Only the lines of the asked rule fresh, against only those of another rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.experiments.cases import joined
from bench.experiments.table import Row
from bench.protocol.measures.mixing import acts, began, excluded, mixes_of
from bench.protocol.seeds import rng_of
from bench.protocol.texts import Next, Policies
from notes_cli.measure.probe import Mixes
from notes_cli.runtime.workspace import Workspace
from training.world import Rule


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.policies("lines", cases, rules=(2, 3)):
        rules = [rule for draft in case.drafts for rule in draft.rules if rule.topic != case.rule.topic]
        other = rng_of(texts.commit, "lines, other", number).choice(rules)
        row = excluded(number, case)
        for mixes in mixes_of(workspace, case):
            own, others = (mixes.recovery(within(mixes, places(case, rule))) for rule in (case.rule, other))
            row = began(number, case, mixes)
            row |= {"own": acts(own), "other": acts(others), "own_recovery": own, "other_recovery": others}
        yield row


def places(case: Policies, rule: Rule) -> list[tuple[int, int]]:
    """Characters [start, end) of the rule's lines in the text of the case."""
    text, found = "\n" + joined(case) + "\n", []
    for line in rule.lines():
        start = text.index(f"\n{line}\n")  # its newline is not there in the text itself, so this is the line's start
        found.append((start, start + len(line)))
    return found


def within(mixes: Mixes, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each column, whether all its characters are in one of the spans."""
    characters = mixes.characters()
    chosen = []
    for column in mixes.columns:
        first, last = column.stale
        start, end = (characters[first][0], characters[last - 1][1]) if last > first else (0, 0)
        chosen.append(any(a <= start < end <= b for a, b in spans))
    return chosen
