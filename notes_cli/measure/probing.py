"""What is to be probed, opened as for a question, and probed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from notes_cli.engine.segment import Segment
from notes_cli.measure.probe import Mixes, Probe, probe
from notes_cli.runtime.asking import SILENT, Listener
from notes_cli.runtime.corrections import known_fields
from notes_cli.runtime.opening import open_segments
from notes_cli.runtime.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Probing:
    """A decision, and the field of a skill whose value is changed.

    `skill`: the name of a compiled skill, a segment file or a text, or a segment. `value`: the new one, None for one of
    the same kind that is made up. `question`: None for the value of the field. `choices`: None to compare greedy
    answers. `window`: tokens that are probed together, None for as many as keep the number of windows in bounds.
    """

    skill: str | Segment
    field: str
    value: str | None = None
    question: str | None = None
    choices: Sequence[str] | None = None
    system: str | None = None
    window: int | None = None


def probe_skill(workspace: Workspace, wanted: Probing, listener: Listener = SILENT) -> Probe:
    """Probe the decision. Raise what Mixes raises, and NotesError for a skill that there is not."""
    (segment,) = open_segments(workspace, [wanted.skill], listener.notice, watch=listener.watch)
    field = wanted.field.strip()
    if "." in field:
        (reference,) = known_fields(segment).resolve(field, f"{segment.name} does not have")
        field = reference.field
    with listener.watch("compiling the new text") as update:
        mixes = Mixes(
            *(workspace, segment, field, wanted.value),
            question=wanted.question or None,
            choices=wanted.choices,
            system=wanted.system,
            compiling=update,
        )
    with mixes, listener.watch("probing", unit="mixes") as update:
        return probe(mixes, wanted.window, update)
