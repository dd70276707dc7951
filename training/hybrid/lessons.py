"""Texts of the world for the hybrid: rules that are tables, and second skills that redefine a field of the first."""

from __future__ import annotations

from collections.abc import Sequence

from training import world
from training.hybrid.cases import redefining
from training.lessons import Teacher


class Readings(Teacher):
    """Draws texts of which the later skill sometimes redefines what the earlier says."""

    share = 0.0

    def drafts(self, level: world.Level, kinds: Sequence[str], loose: bool) -> list[world.Draft]:
        """The skills of one text; of two, the second redefines a field of the first in `share` of the texts."""
        found = super().drafts(level, kinds, loose)
        if len(found) > 1 and self.rng.random() < self.share:
            rule = self.rng.choice(found[0].rules)
            old = found[0].skill.fields[rule.field]
            value = world.other_value(self.rng, rule.kind, rule.field, old, rule)
            found[1] = redefining(found[0], found[1], rule.field, value)
        return found
