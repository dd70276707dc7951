"""What is measured for the hypotheses: rows from texts, a module each. Reused ones are of bench/experiments.

A row has `case`, which is its cluster; `near` where the reference is a near tie; and `excluded` where a probe needs
two values that decide differently, and these do not: then nothing else is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.experiments import agent, blocks, landscape, placement, transplanted
from bench.experiments.table import Row
from bench.protocol.measures import (
    again,
    controls,
    decisions,
    distance,
    heads,
    life,
    lines,
    notes,
    seams,
    selective,
    settings,
    splice,
    thinking,
    toggled,
)
from bench.protocol.measures import versions as two
from bench.protocol.texts import Next
from notes_cli.runtime.workspace import Workspace


@dataclass(frozen=True)
class Measure:
    """Rows of cases, and how many of those are needed that are not left out. Without `rows` another command, `by`,
    measures them, and they are only read."""

    rows: Callable[[Workspace, int, Next], Iterator[Row]] | None
    cases: int
    by: str = ""


MEASURES = {
    "decisions": Measure(decisions.measure, 300),
    "splice": Measure(splice.measure, 300),
    "above": Measure(notes.above, 200),
    "below": Measure(notes.below, 200),
    "lines": Measure(lines.measure, 200),
    "thinking": Measure(thinking.measure, 200),
    "selective": Measure(selective.measure, 200),
    "versions": Measure(two.measure, 200),
    "controls": Measure(controls.measure, 200),
    "again": Measure(again.measure, 200),
    "toggled": Measure(toggled.measure, 12),
    "ordinary": Measure(landscape.measure, 300),
    "transplanted": Measure(transplanted.measure, 300),
    "blocks": Measure(blocks.measure, 20),
    "agent": Measure(agent.measure, 10),
    "placement": Measure(placement.measure, 200),
    "distance": Measure(distance.measure, 200),
    "caches": Measure(settings.decisions("caches", settings.caches), 200),
    "caches notes": Measure(settings.notes("caches notes", settings.caches), 200),
    "weights": Measure(settings.decisions("weights", settings.weights), 200),
    "weights notes": Measure(settings.notes("weights notes", settings.weights), 200),
    "life": Measure(life.measure, 200),
    "seams": Measure(seams.measure, 200),
    heads.MEASURED: Measure(None, 60, heads.BY),
}
