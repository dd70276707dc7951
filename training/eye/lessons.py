"""Lessons: conversations about one to three pictures, as token ids, positions on three axes, and who sees whom."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from training.eye import pictures, words
from training.eye.pictures import Picture
from training.eye.words import Encoder


@dataclass
class Lesson:
    """One conversation, as it is written: `ids`, `at` and `targets` grow together."""

    ids: list[int] = field(default_factory=list)
    at: list[tuple[int, int, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # what to learn to say next, -1: nothing
    alone: list[int] = field(default_factory=list)  # by row: the number of the picture that it is of, from 1 on
    shown: list[Picture] = field(default_factory=list)
    next: int = 0  # position

    def tell(self, ids: Sequence[int], learn: bool = False) -> None:
        for token in ids:
            if learn:
                self.targets[-1] = token
            self.ids.append(token)
            self.at.append((self.next,) * 3)
            self.targets.append(-1)
            self.alone.append(0)
            self.next += 1

    def show(self, picture: Picture) -> None:
        """A picture between its two marks."""
        self.shown.append(picture)
        first = len(self.ids)
        self.tell([words.SEE])
        rows, columns = picture.grid
        for row in range(rows):
            for column in range(columns):
                self.ids.append(words.ROW)
                self.at.append((self.next, self.next + row, self.next + column))
                self.targets.append(-1)
                self.alone.append(0)
        self.next += max(rows, columns)
        self.tell([words.SEEN])
        self.alone[first:] = [len(self.shown)] * (len(self.ids) - first)


@dataclass
class Batch:
    """Lessons side by side. `rows` says where the rows of each kind of picture go: index into the flat ids."""

    ids: Tensor
    at: Tensor
    sees: Tensor
    targets: Tensor
    pixels: dict[str, Tensor]
    rows: dict[str, Tensor]
    shown: dict[str, list[Picture]]


class Teacher:
    """Draws lessons."""

    def __init__(self, encoder: Encoder, seed: int, held_out: bool = False) -> None:
        self.encode, self.rng, self.held_out = encoder.run, random.Random(seed), held_out

    def lesson(self, most: int, turns: int) -> Lesson:
        """A conversation about at most `most` pictures, with so many questions."""
        rng, encode = self.rng, self.encode
        lesson = Lesson()
        kinds = [rng.choice(("picture", "receipt")) for _ in range(rng.randint(1, most))]
        shown = [pictures.make(rng, kind, self.held_out) for kind in kinds]
        early = rng.random() < 0.6  # in the system message
        told = rng.choices((0, 1, 2, 3), (4, 3, 2, 1))[0]
        corrected = rng.randrange(len(shown)) if rng.random() < 0.3 else None
        sentence, answers = ("", {}) if corrected is None else pictures.erratum(rng, shown, corrected)
        pieces: list[str | Picture] = [rng.choice(pictures.FILLERS) for _ in range(told)]
        if rng.random() < 0.3:
            pieces.insert(rng.randint(0, len(pieces)), shown[0])
            pieces += shown[1:]
        else:
            pieces += shown
        pieces += ["Correction: " + sentence] if sentence else []
        if early or told:
            lesson.tell(encode("<|im_start|>system\n"))
        split = len(pieces) if early else told
        if not early and told:
            pieces = [one for one in pieces if isinstance(one, str) and not one.startswith("C")] + [
                one for one in pieces if not isinstance(one, str) or one.startswith("C")
            ]
        far = rng.random() < 0.3
        for index, piece in enumerate(pieces):
            if index == split:
                lesson.tell(encode("<|im_end|>\n<|im_start|>user\n" if told else "<|im_start|>user\n"))
            between = "\n\n" if index not in (0, split) else ""
            if isinstance(piece, str):
                lesson.tell(encode(between + piece))
            else:
                lesson.tell(encode(between) if between else ())
                if far and not lesson.shown:
                    lesson.next += rng.randrange(0, 300)
                lesson.show(piece)
        asked = [
            (index, one)
            for index, (picture, label) in enumerate(zip(shown, pictures.labels(shown), strict=True))
            for one in pictures.questions(picture, label)
        ]
        receipts = [one for one in asked if shown[one[0]].kind == "receipt"]
        if far and rng.random() < 0.3:
            lesson.next += rng.randrange(0, 100)
        for number in range(turns):
            of = rng.choice(asked)
            if corrected is not None and rng.random() < 0.4:
                of = rng.choice([one for one in asked if one[0] == corrected])
            elif receipts and rng.random() < 0.3:
                of = rng.choice(receipts)
            index, one = of
            answer = one.answer
            if index == corrected:
                answer = next((new for begin, new in answers.items() if one.question.startswith(begin)), answer)
            if number == 0 and not early:
                lesson.tell(encode("\n\n" + one.question))
            else:
                lesson.tell(encode("<|im_end|>\n<|im_start|>user\n"))
                lesson.tell(encode(one.question))
            lesson.tell(encode("<|im_end|>\n<|im_start|>assistant\n"))
            lesson.tell(encode(answer), learn=True)
            lesson.targets[-1] = words.END
        return lesson

    def batch(self, count: int, most: int, turns: int) -> Batch:
        """Lessons side by side. In half of them a picture sees nothing before it, as one compiled on its own."""
        lessons = [self.lesson(most, turns) for _ in range(count)]
        n = max(len(lesson.ids) for lesson in lessons)
        ids, targets = np.full((count, n), words.PAD), np.full((count, n), -1)
        at, sees = np.zeros((count, n, 3), np.int64), np.tril(np.ones((count, n, n), bool))
        pixels: dict[str, list[pictures.Pixels]] = {"picture": [], "receipt": []}
        rows: dict[str, list[int]] = {"picture": [], "receipt": []}
        shown: dict[str, list[Picture]] = {"picture": [], "receipt": []}
        for index, lesson in enumerate(lessons):
            length = len(lesson.ids)
            ids[index, :length], targets[index, :length], at[index, :length] = lesson.ids, lesson.targets, lesson.at
            alone = np.array(lesson.alone)
            if self.rng.random() < 0.5:
                opening = np.arange(length) < min(3, int(np.flatnonzero(alone)[0]))
                for number in range(1, alone.max() + 1):
                    own = alone == number
                    sees[index, :length, :length][own] &= own | opening
            places = np.flatnonzero(np.array(lesson.ids) == words.ROW) + index * n
            for picture in lesson.shown:
                size = picture.grid[0] * picture.grid[1]
                rows[picture.kind] += [int(place) for place in places[:size]]
                places = places[size:]
                shown[picture.kind].append(picture)
                pixels[picture.kind].append(pictures.draw(picture, self.rng))
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(at),
            torch.from_numpy(sees)[:, None],
            torch.from_numpy(targets),
            {kind: torch.from_numpy(np.stack(some)) for kind, some in pixels.items() if some},
            {kind: torch.tensor(some) for kind, some in rows.items() if some},
            shown,
        )
