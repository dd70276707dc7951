"""What verifying several skills finds: which of them each question needs, and what repairs decisions that differ."""

from __future__ import annotations

from dataclasses import dataclass

RECOMPUTE = "recompute"  # one prefill of all skills


@dataclass(frozen=True, slots=True)
class Question:
    """A question to several skills. `needs`: those without which one prefill of the others decides otherwise; `same`:
    whether the spliced skills decide as one prefill of all."""

    question: str
    needs: tuple[str, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Mended:
    """A repair that was tried, and of each question whether it decides as one prefill. Nothing is in `same` where
    `refused` says why it is not possible."""

    name: str
    same: tuple[bool, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Composed:
    """What came of several skills of a user. Repairs are tried where a decision is not that of one prefill."""

    names: tuple[str, ...]
    questions: tuple[Question, ...]
    tried: tuple[Mended, ...] = ()

    def counts(self, several: bool) -> tuple[int, int]:
        """Of the questions that need several skills, or at most one: how many decide as one prefill, and all."""
        asked = [one for one in self.questions if (len(one.needs) > 1) == several]
        return sum(one.same for one in asked), len(asked)

    @property
    def repair(self) -> str:
        """The cheapest way in which all decide as one prefill; empty where nothing must be repaired."""
        if all(one.same for one in self.questions):
            return ""
        return next((one.name for one in self.tried if one.same and all(one.same)), RECOMPUTE)
