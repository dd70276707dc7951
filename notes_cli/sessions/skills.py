"""Skills of a session: from segments to what the ledger knows of them, and back."""

from __future__ import annotations

import numpy as np

from notes_cli.editing.change import Change
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.patches import align
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, SessionError
from notes_cli.sessions.live import Live
from notes_cli.sessions.state import SkillText


def from_segment(segment: Segment, changed: Change | None, notebook: Notebook) -> SkillText:
    """A skill that has come into the notebook, with its new values."""
    position = next(p.position for p in notebook.pieces if p.kind == "splice" and p.name == segment.name)
    influence = {name: [round(float(part), 6) for part in row] for name, row in segment.influence.items()}
    skill = SkillText(segment.name, position, segment.text, len(segment), segment.fields, influence)
    return amended(skill, changed) if changed else skill


def amended(skill: SkillText, changed: Change) -> SkillText:
    """The skill with its new values. Of other tokens in the place of old ones no influence is known."""
    influence = {}
    for name, row in skill.influence.items():
        moved = [0.0] * len(changed.tokens)
        for part in align(changed.patches, len(row)):
            if not part.patch:
                moved[slice(*part.after)] = row[slice(*part.before)]
        influence[name] = moved
    return SkillText(skill.name, skill.position, changed.text, len(changed.tokens), changed.spans, influence)


def as_segment(live: Live, skill: SkillText) -> Segment:
    """The skill as a segment without rows, compiled where it is: what a change is found in.

    Raise SessionError where the notebook has another text there.
    """
    first, last = skill.position, skill.position + skill.tokens
    spelt, text = live.spelt(first, last), skill.text.encode()
    if spelt not in (text, b" " + text):  # SentencePiece puts a blank before it
        name = live.stored.name
        raise SessionError(
            f"the ledger of session {name} is damaged: {skill.name} is not at its position", Help.UNDO(name=name)
        )
    tokens, context = (np.array(live.state.tokens[slice(*span)], np.int32) for span in ((first, last), (0, first)))
    influence = {name: np.array(row, np.float32) for name, row in skill.influence.items()}
    return Segment(
        *(skill.name, "", skill.text, tokens, first, context, skill.fields, live.workspace.identity, ()),
        influence=influence,
    )
