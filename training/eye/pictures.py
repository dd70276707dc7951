"""The small world that the tiny vision model sees: scenes of shapes, receipts with digits, questions and answers.

Numpy only. Everything random comes from a `random.Random` that the caller seeds. Training and held-out pictures never
show the same (see `Picture.held_out`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (210, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 210),
    "yellow": (235, 205, 40),
    "purple": (150, 50, 170),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = ("zero", "one", "two", "three", "four")
FILLERS = (
    "You work for Harbor Books.",
    "Be brief.",
    "Answer in one word.",
    "The shop is open on weekdays.",
    "Orders are sent from the harbor.",
    "Look at the picture with care.",
    "A receipt has a day and a total.",
    "Books are kept for a week.",
)
FONT = {  # five columns and seven rows a digit
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
CELL = 12  # pixels of a row of the model, each way
SIZES = {"picture": (48, 48), "receipt": (60, 36)}  # height and width
VOID = "void"

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Picture:
    """What a picture shows: `things` of a scene, a (colour, shape) or None for each of PLACES; else two numbers."""

    kind: str  # "picture" or "receipt"
    things: tuple[tuple[str, str] | None, ...] = ()
    day: str = ""
    total: str = ""

    @property
    def held_out(self) -> bool:
        """Whether it is for measuring only."""
        return zlib.crc32(repr((self.things, self.day, self.total)).encode()) % 8 == 0

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the model that it takes."""
        height, width = SIZES[self.kind]
        return height // CELL, width // CELL


class Asked(NamedTuple):
    """A question, and the right answer."""

    question: str
    answer: str


def make(rng: random.Random, kind: str, held_out: bool) -> Picture:
    """A picture of that kind, for training or held out."""
    while True:
        if kind == "receipt":
            picture = Picture(kind, day=f"{rng.randrange(1, 31):02d}", total=f"{rng.randrange(10, 100)}")
        else:
            count = rng.choice((1, 2, 2, 3, 3, 4, 4))
            shown = set(rng.sample(range(4), count))
            things = [(rng.choice([*COLOURS]), rng.choice(SHAPES)) if at in shown else None for at in range(4)]
            picture = Picture(kind, things=tuple(things))
        if picture.held_out == held_out:
            return picture


def draw(picture: Picture, rng: random.Random) -> Pixels:
    """The pixels of a picture, [height, width, 3]; sizes and places vary."""
    height, width = SIZES[picture.kind]
    paper = rng.randrange(225, 256)
    pixels = np.full((height, width, 3), (paper, paper, rng.randrange(215, 256)), np.uint8)
    if picture.kind == "receipt":
        ink = rng.randrange(0, 60)
        for number, top in ((picture.day, 5), (picture.total, 39)):
            x, y = 7 + rng.randrange(-3, 4), top + rng.randrange(-2, 3)
            for place, digit in enumerate(number):
                pixels[y : y + 14, x + 12 * place : x + 12 * place + 10][_digit(digit)] = ink
        pixels[29 + rng.randrange(-1, 2), 4:-4] = 120
    for at, thing in enumerate(picture.things):
        if thing:
            size = rng.randrange(7, 10)
            y, x = (12 + 24 * place + rng.randrange(-2, 3) for place in divmod(at, 2))
            pixels[_mask(thing[1], size, y, x)] = COLOURS[thing[0]]
    return pixels


@cache
def _digit(digit: str) -> NDArray[np.bool_]:
    rows = [[mark == "1" for mark in row] for row in FONT[digit].split()]
    return np.kron(np.array(rows, bool), np.ones((2, 2), bool)).astype(bool)


@cache
def _mask(shape: str, size: int, y: int, x: int) -> NDArray[np.bool_]:
    """Where a shape of that half size is, its middle at row y and column x."""
    rows, columns = np.mgrid[:48, :48]
    down, right = rows - y, columns - x
    inside = (abs(down) <= size) & (abs(right) <= size)
    if shape == "circle":
        return np.asarray(down**2 + right**2 <= size**2)
    if shape == "triangle":
        return np.asarray(inside & (2 * abs(right) <= down + size))
    if shape == "cross":
        return np.asarray(inside & ((abs(down) <= 2) | (abs(right) <= 2)))
    return np.asarray(inside)


def questions(picture: Picture, which: str = "") -> list[Asked]:
    """All that can be asked about a picture. `which`: words that tell it from another of its kind."""
    where = f" {which}" if which else ""
    if picture.kind == "receipt":
        return [Asked(f"What is the {name}{where}?", getattr(picture, name)) for name in ("day", "total")]
    found = []
    things = [thing for thing in picture.things if thing]
    for place, thing in zip(PLACES, picture.things, strict=True):
        colour, shape = thing or ("nothing", "nothing")
        found.append(Asked(f"What shape is at the {place}{where}?", shape))
        found.append(Asked(f"What colour is at the {place}{where}?", colour))
    for colour, shape in things:
        if [other[1] for other in things].count(shape) == 1:
            found.append(Asked(f"What colour is the {shape}{where}?", colour))
        if [other[0] for other in things].count(colour) == 1:
            found.append(Asked(f"What shape is {colour}{where}?", shape))
    return [*found, Asked(f"How many shapes are there{where}?", NUMBERS[len(things)])]


def subjects() -> list[str]:
    """All questions that there are, about a picture that is the only one of its kind."""
    full = Picture("picture", tuple(zip(COLOURS, SHAPES, strict=False)))
    colours = [f"What shape is {colour}?" for colour in COLOURS]
    asked = [one.question for one in (*questions(full), *questions(Picture("receipt")))]
    return list(dict.fromkeys(asked + colours))


ORDER = ("first", "second", "third")


def labels(pictures: Sequence[Picture]) -> list[str]:
    """The words that tell each picture from the others; none where it is the only one of its kind."""
    kinds = [picture.kind for picture in pictures]
    preposition = {"picture": "in", "receipt": "on"}
    return [
        f"{preposition[kind]} the {ORDER[kinds[:index].count(kind)]} {kind}" if kinds.count(kind) > 1 else ""
        for index, kind in enumerate(kinds)
    ]


def erratum(rng: random.Random, pictures: Sequence[Picture], index: int) -> tuple[str, dict[str, str]]:
    """A correction of one of the pictures, and what its questions are answered by now: by their beginning, "" any."""
    picture, label = pictures[index], labels(pictures)[index]
    name = label.partition(" the ")[2] or picture.kind
    if picture.kind == "picture" or rng.random() < 0.5:
        return f"the {name} is void.", {"": VOID}
    field, where = rng.choice(("day", "total")), f" {label}" if label else ""
    value = f"{rng.randrange(10, 31)}"
    return f"the {field}{where} is {value}.", {f"What is the {field}": value}
