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
from training.tokenizer import Encoder

SUBJECTS = pictures.subjects()
COMPILED = "<|im_start|>system\n"  # what a picture sees before it when it is compiled on its own


@dataclass
class Lesson:
    """One conversation, as it is written: the lists by token grow together."""

    ids: list[int] = field(default_factory=list)
    at: list[tuple[int, int, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # what to learn to say next, -1: nothing
    own: list[int] = field(default_factory=list)  # number of the picture that the token was compiled with, 0: none
    hidden: list[bool] = field(default_factory=list)  # seen by what was compiled with it, and by nothing else
    branch: list[int] = field(default_factory=list)  # number of the question whose branch it is in, 0: all see it
    shown: list[Picture] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)  # closing marks, with the index of their pictures
    after: list[tuple[int, int]] = field(default_factory=list)  # the tokens right after these
    asks: list[tuple[int, int, int]] = field(default_factory=list)  # where an answer is said: subject, number (0: none)
    next: int = 0  # position
    now: int = 0  # branch
    last: int | None = None  # index of the picture that has just been shown

    def _add(self, token: int, at: tuple[int, int, int], own: int = 0, hidden: bool = False) -> None:
        self.ids.append(token)
        self.at.append(at)
        self.targets.append(-1)
        self.own.append(own)
        self.hidden.append(hidden)
        self.branch.append(self.now)

    def tell(self, ids: Sequence[int], about: tuple[int, int] | None = None) -> None:
        """Text. `about`: it is an answer, to a question of that subject about the picture of that number."""
        for token in ids:
            if about:
                self.targets[-1] = token
                self.asks.append((len(self.ids) - 1, *about))
            if self.last is not None:
                self.after.append((len(self.ids), self.last))
                self.last = None
            self._add(token, (self.next,) * 3)
            self.next += 1

    def show(self, picture: Picture, alone: Sequence[int] | None) -> None:
        """A picture between its two marks.

        `alone`: it was compiled on its own, after these ids. Its opening mark is there twice, then: the one that the
        rows have seen, and the one that is computed where the picture is spliced, which sees all before it.
        """
        self.shown.append(picture)
        own = len(self.shown) if alone else 0
        if alone:
            self._add(words.SEE, (self.next,) * 3)
            for back, token in zip(range(len(alone), 0, -1), alone, strict=True):
                self._add(token, (self.next - back,) * 3, own, True)
        self._add(words.SEE, (self.next,) * 3, own, bool(alone))
        self.next += 1
        rows, columns = picture.grid
        for row in range(rows):
            for column in range(columns):
                self._add(words.ROW, (self.next, self.next + row, self.next + column), own)
        self.next += max(rows, columns)
        self.ends.append((len(self.ids), len(self.shown) - 1))
        self._add(words.SEEN, (self.next,) * 3, own)
        self.next += 1
        self.last = len(self.shown) - 1


@dataclass
class Batch:
    """Lessons side by side. Where something is: index into the flat ids."""

    ids: Tensor
    at: Tensor
    sees: Tensor
    targets: Tensor
    pixels: dict[str, Tensor]
    rows: dict[str, Tensor]
    shown: dict[str, list[Picture]]
    ends: list[tuple[int, Picture, int]]  # closing marks: the picture, and which of its kind it is
    after: list[tuple[int, Picture, int]]
    asks: Tensor  # (answers, 3): where, subject, number


class Teacher:
    """Draws lessons."""

    def __init__(self, encoder: Encoder, seed: int) -> None:
        self.encode, self.rng = encoder.short, random.Random(seed)

    def _text(self, told: int) -> list[str]:
        """So many sentences, each on its own or all in a line."""
        said = [self.rng.choice(pictures.FILLERS) for _ in range(told)]
        return [" ".join(said)] if said and self.rng.random() < 0.6 else said

    def lesson(self, turns: int, told: int) -> Lesson:
        """A conversation about one to three pictures after so many sentences, with so many questions."""
        rng, encode = self.rng, self.encode
        lesson = Lesson()
        kinds = [rng.choice(("picture", "receipt"))] * rng.choices((1, 2, 3), (3, 4, 3))[0]
        if rng.random() < 0.5:
            kinds = [rng.choice(("picture", "receipt")) for _ in kinds]
        shown = [pictures.make(rng, kind, False) for kind in kinds]
        alone = encode(COMPILED) if rng.random() < 0.55 else None
        corrected = rng.randrange(len(shown)) if rng.random() < 0.3 else None
        sentence, answers = ("", {}) if corrected is None else pictures.erratum(rng, shown, corrected)
        text: list[str | Picture] = [*self._text(told)]
        early = rng.random() < 0.6  # the pictures are in the system message, too
        pieces = [*text, *shown]
        if early and rng.random() < 0.3:  # some of the text comes after the first picture
            place = rng.randint(0, len(text))
            pieces = [*text[:place], shown[0], *text[place:], *shown[1:]]
        pieces += ["Correction: " + sentence] if sentence else []
        split = len(pieces) if early else len(text)  # where the user's message begins
        if early or text:
            lesson.tell(encode(COMPILED))
        gap = rng.randrange(0, 400) if text and rng.random() < 0.4 else 0  # as if there were more text
        for index, piece in enumerate(pieces):
            if index == split:
                lesson.tell(encode("<|im_end|>\n<|im_start|>user\n" if text else "<|im_start|>user\n"))
            between = "\n\n" if index not in (0, split) else ""
            if isinstance(piece, str):
                lesson.tell(encode(between + piece))
            else:
                lesson.tell(encode(between))
                lesson.show(piece, alone)
            if index == 0 and not lesson.shown:
                lesson.next += gap
        self._ask(lesson, turns, early, corrected, answers)
        return lesson

    def _ask(self, lesson: Lesson, turns: int, early: bool, corrected: int | None, answers: dict[str, str]) -> None:
        """Questions and answers: in most lessons they do not see each other, else one comes after the other."""
        rng, encode, shown = self.rng, self.encode, lesson.shown
        labels = pictures.labels(shown)
        asked = [enumerate_subjects(picture, label) for picture, label in zip(shown, labels, strict=True)]
        branches = rng.random() < 0.7
        begin, last = lesson.next, lesson.last
        for number in range(turns):
            index = rng.randrange(len(shown))
            if corrected is not None and rng.random() < 0.3:
                index = corrected
            subject, one = rng.choice(asked[index])
            answer = one.answer
            if index == corrected:
                answer = next((new for start, new in answers.items() if one.question.startswith(start)), answer)
            if branches:
                lesson.next, lesson.last, lesson.now = begin, last, number + 1
            if not early and (number == 0 or branches):
                lesson.tell(encode("\n\n" + one.question))
            else:
                lesson.tell(encode("<|im_end|>\n<|im_start|>user\n"))
                lesson.tell(encode(one.question))
            lesson.tell(encode("<|im_end|>\n<|im_start|>assistant\n"))
            order = next((n + 1 for n, word in enumerate(pictures.ORDER) if word in labels[index]), 0)
            lesson.tell(encode(answer), (subject, order))
            lesson.targets[-1] = words.END

    def batch(self, tokens: int, turns: int, long: bool) -> Batch:
        """Lessons side by side, about as many as have so many tokens. `long`: after twelve to forty sentences."""
        lessons: list[Lesson] = []
        while not lessons or (len(lessons) + 1) * max(len(one.ids) for one in lessons) <= tokens:
            told = self.rng.randrange(12, 40) if long else self.rng.choice((0, 0, 1, 2, 3, 4, 5, 6))
            lessons.append(self.lesson(turns, told))
        count, n = len(lessons), max(len(lesson.ids) for lesson in lessons)
        ids, targets = np.full((count, n), words.PAD), np.full((count, n), -1)
        at, sees = np.zeros((count, n, 3), np.int64), np.tril(np.ones((count, n, n), bool))
        pixels: dict[str, list[pictures.Pixels]] = {"picture": [], "receipt": []}
        rows: dict[str, list[int]] = {"picture": [], "receipt": []}
        shown: dict[str, list[Picture]] = {"picture": [], "receipt": []}
        ends, after, asks = [], [], []
        for index, lesson in enumerate(lessons):
            length, base = len(lesson.ids), index * n
            ids[index, :length], targets[index, :length], at[index, :length] = lesson.ids, lesson.targets, lesson.at
            own, hidden, branch = (np.array(one) for one in (lesson.own, lesson.hidden, lesson.branch))
            joined = np.where(own[:, None] > 0, own[:, None] == own, ~hidden)
            sees[index, :length, :length] &= joined & ((branch == 0) | (branch[:, None] == branch))
            places = np.flatnonzero(np.array(lesson.ids) == words.ROW) + base
            for picture in lesson.shown:
                size = picture.grid[0] * picture.grid[1]
                rows[picture.kind] += [int(place) for place in places[:size]]
                places = places[size:]
                shown[picture.kind].append(picture)
                pixels[picture.kind].append(pictures.draw(picture, self.rng))
            kinds = [picture.kind for picture in lesson.shown]
            which = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
            ends += [(base + place, lesson.shown[of], which[of]) for place, of in lesson.ends]
            after += [(base + place, lesson.shown[of], which[of]) for place, of in lesson.after]
            asks += [(base + place, subject, order) for place, subject, order in lesson.asks]
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(at),
            torch.from_numpy(sees)[:, None],
            torch.from_numpy(targets),
            {kind: torch.from_numpy(np.stack(some)) for kind, some in pixels.items() if some},
            {kind: torch.tensor(some) for kind, some in rows.items() if some},
            shown,
            ends,
            after,
            torch.tensor(asks),
        )


def enumerate_subjects(picture: Picture, label: str) -> list[tuple[int, pictures.Asked]]:
    """The questions about a picture, each with the number of its subject."""
    plain, labelled = pictures.questions(picture), pictures.questions(picture, label)
    return [(SUBJECTS.index(a.question), b) for a, b in zip(plain, labelled, strict=True)]
