"""The subjects: which sizes there are, and what the lessons of each have that those of the others have not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.tiny.world import Level

EASY = Level(rules=(1, 2), rows=(2, 3), kinds=("table",), shared=0.0, below=0.0, sample=0.2)
FULL = replace(EASY, skills=(1, 2), rules=(1, 3), rows=(2, 4), spare=(0, 2), fillers=(0, 1), heading=0.6, preamble=0.5)


@dataclass(frozen=True)
class Lessons:
    """What the texts and questions have. The defaults are the lessons that all others are compared with."""

    given: float = 0.0  # share of questions "What is the T if the F is V?", whose answer no text notes
    below: float = 0.0  # share of texts whose fields are below their rules
    bound: bool = False  # a topic goes by the same field in all texts
    hints: bool = False  # readers on inner layers say at the answer which field decides, and its value

    @property
    def levels(self) -> tuple[Level, Level]:
        """Texts of the first steps, and of the others."""
        easy, full = (
            replace(level, below=self.below, bound=self.bound, sample=1.0 if self.bound else level.sample)
            for level in (EASY, FULL)
        )
        return easy, full


@dataclass(frozen=True)
class Size:
    """Of the model: 4 heads of 64 over 2 K/V heads. `rate`: the highest learning rate."""

    width: int
    layers: int
    ffn: int
    rate: float


@dataclass(frozen=True)
class Subject:
    """A model to train."""

    what: str
    size: Size
    lessons: Lessons = Lessons()
    steps: int = 600


SMALL = Size(192, 6, 96, 1.5e-3)
SIZES = {
    "1m": Subject("1.6 million parameters", SMALL),
    "4m": Subject("4.0 million parameters", Size(256, 8, 320, 1.2e-3)),
    "10m": Subject("9.6 million parameters", Size(384, 10, 512, 8e-4)),
}
LESSONS = {
    "given": Subject("three tenths of the questions name a value", SMALL, Lessons(given=0.3)),
    "bound": Subject("a topic always goes by the same field", SMALL, Lessons(bound=True)),
    "below": Subject("15% of the texts have their fields below the rules", SMALL, Lessons(below=0.15)),
    "hints": Subject("inner layers are taught field and value at the answer", SMALL, Lessons(hints=True)),
    "given-bound": Subject("the first two", SMALL, Lessons(given=0.3, bound=True)),
    "given-hints": Subject("the first and the fourth", SMALL, Lessons(given=0.3, hints=True)),
    "bound-hints": Subject("the second and the fourth", SMALL, Lessons(bound=True, hints=True)),
    "all": Subject("all four", SMALL, Lessons(given=0.3, bound=True, below=0.15, hints=True)),
    "under": Subject("all texts have their fields below the rules", SMALL, Lessons(below=1.0)),
}
LONGER = {"longer": Subject("1.6 million parameters, twice the steps", SMALL, steps=1200)}  # is it size, or training?
SUBJECTS = {**SIZES, **LONGER, **LESSONS}
