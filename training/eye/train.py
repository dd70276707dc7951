"""Train the tiny vision model from scratch: tokenizer, eye, conversations, GGUF. One command, fixed seeds.

First the eye, by a reader of its rows that is thrown away afterwards; then both, the reader beside them for a while.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.eye import export, model, pictures, words
from training.eye.lessons import SUBJECTS, Batch, Teacher
from training.eye.pictures import Picture
from training.model import size
from training.tokenizer import Encoder

FINAL = Path(__file__).resolve().parents[2] / "notes_cli" / "models"
_COLOURS, _SHAPES = (*pictures.COLOURS, None), (*pictures.SHAPES, None)


EYE_STEPS, STEPS, RATE = 600, 3000, 2e-3
TOKENS, TURNS = 4800, 6  # of a batch, of a conversation


class Reader(nn.Module):
    """Reads off each row of a picture where it is and what its part of the picture shows: teaches the eye to put that
    into every row, and is not kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scene = nn.Linear(width, 4 + len(_COLOURS) + len(_SHAPES))
        self.receipt = nn.Linear(width, 3 + 20)

    def forward(self, rows: dict[str, Tensor], shown: dict[str, list[Picture]]) -> Tensor:
        """The loss."""
        losses = []
        for kind, seen in rows.items():
            high, wide = shown[kind][0].grid
            if kind == "receipt":
                part = torch.arange(high).repeat_interleave(wide) * 3 // high  # the day, the line, the total
                written = [(one.day, one.day, one.total) for one in shown[kind]]
                digits = torch.tensor([[[int(digit) for digit in number] for number in some] for some in written])
                place, tens, ones = self.receipt(seen).split([3, 10, 10], -1)
                numbers = part != 1
                found = [(place, part.expand(len(seen), -1))]
                for number, guess in enumerate((tens, ones)):
                    found.append((guess[:, numbers], digits[:, part, number][:, numbers]))
            else:
                rows_, columns = (torch.arange(size) * 2 // size for size in (high, wide))
                part = (2 * rows_[:, None] + columns).flatten()
                things = [[thing or (None, None) for thing in one.things] for one in shown[kind]]
                colour = torch.tensor([[_COLOURS.index(c) for c, _ in one] for one in things])[:, part]
                shape = torch.tensor([[_SHAPES.index(s) for _, s in one] for one in things])[:, part]
                guesses = self.scene(seen).split([4, len(_COLOURS), len(_SHAPES)], -1)
                found = list(zip(guesses, (part.expand(len(seen), -1), colour, shape), strict=True))
            losses += [F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in found]
        return torch.stack(losses).mean()


class Guide(nn.Module):
    """Says early what an answer needs on its way, and is not kept. A picture that is compiled on its own knows neither
    its number nor what is before it, so an answer takes three steps, each read off the stream where it shall be done:

    * after the first block, the closing mark of a picture knows all that it shows;
    * after the second, the token after the closing mark knows that, too, and which of its kind the picture is; and the
      place where an answer is said knows the question;
    * so that a question about the second receipt needs only look for a token that says it is about that.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        contents = 4 * (len(_COLOURS) + len(_SHAPES)) + 40
        self.width = width
        self.end = nn.Linear(width, contents)
        self.after = nn.Linear(width, contents + 6)
        self.ask = nn.Linear(width, len(SUBJECTS) + 4)

    def _contents(self, guess: Tensor, shown: list[Picture]) -> Tensor:
        """The loss of saying what pictures of both kinds show."""
        losses = []
        for kind in pictures.SIZES:
            index = [n for n, picture in enumerate(shown) if picture.kind == kind]
            if not index:
                continue
            some = [shown[n] for n in index]
            scene, numbers = guess[index].split([4 * (len(_COLOURS) + len(_SHAPES)), 40], -1)
            if kind == "receipt":
                pairs = [(numbers.view(-1, 4, 10), torch.tensor([[int(d) for d in p.day + p.total] for p in some]))]
            else:
                colours, shapes = scene.view(len(some), 4, -1).split([len(_COLOURS), len(_SHAPES)], -1)
                things = [[thing or (None, None) for thing in p.things] for p in some]
                pairs = [
                    (colours, torch.tensor([[_COLOURS.index(c) for c, _ in one] for one in things])),
                    (shapes, torch.tensor([[_SHAPES.index(s) for _, s in one] for one in things])),
                ]
            losses += [F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in pairs]
        return torch.stack(losses).mean()

    def forward(self, after: list[Tensor], batch: Batch) -> Tensor:
        """The loss. `after`: the stream after each block."""
        first, second = (F.rms_norm(one, (self.width,)).flatten(0, 1) for one in after[:2])
        end = self._contents(self.end(first[[at for at, _, _ in batch.ends]]), [one for _, one, _ in batch.ends])
        guess = self.after(second[[at for at, _, _ in batch.after]])
        copied = self._contents(guess[:, :-6], [one for _, one, _ in batch.after])
        which = torch.tensor([n + 3 * (one.kind == "receipt") for _, one, n in batch.after])
        counted = F.cross_entropy(guess[:, -6:], which)
        at, subject, order = batch.asks.unbind(1)
        subjects, orders = self.ask(second[at]).split([len(SUBJECTS), 4], -1)
        asked = F.cross_entropy(subjects, subject) + F.cross_entropy(orders, order)
        return end + copied + counted + 0.5 * asked


def looked_at(rng: random.Random, count: int) -> Iterator[tuple[dict[str, Tensor], dict[str, list[Picture]]]]:
    """Pictures alone, half of each kind."""
    while True:
        shown = {kind: [pictures.make(rng, kind, False) for _ in range(count // 2)] for kind in pictures.SIZES}
        drawn = {kind: [torch.from_numpy(pictures.draw(p, rng)) for p in some] for kind, some in shown.items()}
        yield {kind: torch.stack(some) for kind, some in drawn.items()}, shown


def stream(net: model.ImageEncoding, batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The decoder's stream after each block, and the rows of the pictures by kind."""
    x = F.embedding(batch.ids, net.decoder.embed).flatten(0, 1)
    rows = {kind: net.vision(pixels) for kind, pixels in batch.pixels.items()}
    where = torch.cat([batch.rows[kind] for kind in rows])
    x = x.index_copy(0, where, torch.cat([seen.flatten(0, 1) for seen in rows.values()]))
    x = x.view(*batch.ids.shape, -1)
    return net.decoder(x, batch.at, batch.sees), rows


def rate_at(step: int, steps: int) -> float:
    """Up at once, then down as a cosine."""
    return RATE * min(1.0, (step + 1) / 60) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))


def train(eye_steps: int, steps: int, net: model.ImageEncoding, encoder: Encoder) -> None:
    """All of it."""
    reader, guide = Reader(net.shape.width), Guide(net.shape.width)
    began = time.time()

    def step(loss: Tensor, optimiser: torch.optim.Optimizer, rate: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = rate * group["part"]
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*net.parameters(), *reader.parameters(), *guide.parameters()], 1.0)
        optimiser.step()

    seeing = {"params": [*net.vision.parameters(), *reader.parameters()], "part": 1.0}
    optimiser = torch.optim.AdamW([seeing], betas=(0.9, 0.98), weight_decay=0.01)
    for number, (pixels, shown) in zip(range(eye_steps), looked_at(random.Random(5), 64), strict=False):
        loss = reader({kind: net.vision(some) for kind, some in pixels.items()}, shown)
        step(loss, optimiser, rate_at(number, eye_steps))
        if number % 50 == 49:
            print(f"eye {number + 1} loss {loss.item():.3f} {time.time() - began:.0f}s", flush=True)
    teacher = Teacher(encoder, 7)
    seeing["part"] = 0.1  # the eye has learned its part
    speaking = {"params": [*net.decoder.parameters(), *guide.parameters()], "part": 1.0}
    optimiser = torch.optim.AdamW([seeing, speaking], betas=(0.9, 0.98), weight_decay=0.01)
    for number in range(steps):
        batch = teacher.batch(TOKENS, TURNS, number % 8 == 7)
        after, rows = stream(net, batch)
        wanted = batch.targets >= 0
        loss = F.cross_entropy(net.decoder.logits(after[-1][wanted]), batch.targets[wanted])  # of the answers
        reading, guiding = reader(rows, batch.shown), guide(after, batch)
        left = max(0.1, 1 - 1.2 * number / steps)
        step(loss + 0.1 * reading + 0.4 * left * guiding, optimiser, rate_at(number, steps))
        if number % 50 == 49:
            print(f"step {number + 1} loss {loss.item():.3f} {time.time() - began:.0f}s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=FINAL, help="the exported files go here")
    parser.add_argument("--eye-steps", type=int, default=EYE_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(1)
    tokenizer = words.train()
    net = model.ImageEncoding(model.Shape(vocab=-(-tokenizer.get_vocab_size() // 32) * 32))
    print(f"{size(net.vision)} numbers in the eye, {size(net.decoder)} in the decoder", flush=True)
    train(args.eye_steps, args.steps, net, Encoder(tokenizer))
    for path in export.write(net, tokenizer, args.models):
        print(f"wrote {path.name}, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
