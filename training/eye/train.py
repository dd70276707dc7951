"""Train the tiny vision model from scratch: tokenizer, eye, conversations, GGUF. One command, fixed seeds.

First the eye, by a reader of its rows that is thrown away afterwards; then both, the reader beside them for a while.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.eye import export, model, pictures, words
from training.eye.lessons import Batch, Teacher
from training.eye.pictures import Picture

HERE = Path(__file__).resolve().parent
FINAL = HERE.parent.parent / "notes_cli" / "models"
_COLOURS, _SHAPES = (*pictures.COLOURS, None), (*pictures.SHAPES, None)


@dataclass(frozen=True)
class Plan:
    """How long, and how fast."""

    eye_steps: int = 600
    steps: int = 2000
    rate: float = 2e-3
    lessons: int = 24
    turns: int = 4


class Reader(nn.Module):
    """Reads off each row of a picture where it is and what its part of the picture shows: teaches the eye to put that
    into every row, and is not kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scene = nn.Linear(width, 4 + len(_COLOURS) + len(_SHAPES))
        self.receipt = nn.Linear(width, 3 + 20)

    def forward(self, rows: dict[str, Tensor], shown: dict[str, list[Picture]]) -> tuple[Tensor, list[float]]:
        """The loss, and for each kind how much was read right, of what is read worst."""
        losses, right = [], []
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
            right.append(min((a.argmax(-1) == b).float().mean().item() for a, b in found))
        return torch.stack(losses).mean(), right


def looked_at(rng: random.Random, count: int) -> Iterator[tuple[dict[str, Tensor], dict[str, list[Picture]]]]:
    """Pictures alone, half of each kind."""
    while True:
        shown = {kind: [pictures.make(rng, kind, False) for _ in range(count // 2)] for kind in pictures.SIZES}
        yield (
            {
                kind: torch.stack([torch.from_numpy(pictures.draw(p, rng)) for p in some])
                for kind, some in shown.items()
            },
            shown,
        )


def stream(net: model.Seeing, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The decoder's last stream, and the rows of the pictures by kind."""
    x = F.embedding(batch.ids, net.decoder.embed).flatten(0, 1)
    rows = {kind: net.eye(pixels) for kind, pixels in batch.pixels.items()}
    where = torch.cat([batch.rows[kind] for kind in rows])
    x = x.index_copy(0, where, torch.cat([seen.flatten(0, 1) for seen in rows.values()]))
    x = x.view(*batch.ids.shape, -1)
    return net.decoder(x, batch.at, batch.sees), rows


def loss_of(net: model.Seeing, batch: Batch) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Cross entropy of what is answered, how much of it is right, and the rows."""
    out, rows = stream(net, batch)
    wanted = batch.targets >= 0
    logits, targets = net.decoder.logits(out[wanted]), batch.targets[wanted]
    right = (logits.argmax(-1) == targets)[targets != words.END].float().mean().item()
    return F.cross_entropy(logits, targets), right, rows


def rate_at(step: int, steps: int, top: float) -> float:
    """Up at once, then down as a cosine."""
    return top * min(1.0, (step + 1) / 60) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))


def train(plan: Plan, net: model.Seeing, encoder: words.Encoder, say: Callable[[str], None], out: Path) -> None:
    """All of it. `out`: the weights, every 200 steps."""
    reader = Reader(net.shape.width)
    began = time.time()
    marks: dict[str, float] = defaultdict(float)

    def mark(name: str, value: float) -> None:
        marks[name] = value if name not in marks else 0.95 * marks[name] + 0.05 * value

    def step(loss: Tensor, optimiser: torch.optim.Optimizer, rate: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*net.parameters(), *reader.parameters()], 1.0)
        optimiser.step()

    optimiser = torch.optim.AdamW([*net.eye.parameters(), *reader.parameters()], betas=(0.9, 0.98), weight_decay=0.01)
    for number, (pixels, shown) in zip(range(plan.eye_steps), looked_at(random.Random(5), 64), strict=False):
        loss, right = reader({kind: net.eye(some) for kind, some in pixels.items()}, shown)
        step(loss, optimiser, rate_at(number, plan.eye_steps, plan.rate))
        mark("scene", right[0])
        mark("receipt", right[1])
        if number % 50 == 49:
            shown_marks = " ".join(f"{name}={value:.3f}" for name, value in marks.items())
            say(f"eye {number + 1} loss {loss.item():.3f} {time.time() - began:.0f}s {shown_marks}")
    torch.save(net.state_dict(), out)
    teacher = Teacher(encoder, 7)
    optimiser = torch.optim.AdamW([*net.parameters(), *reader.parameters()], betas=(0.9, 0.98), weight_decay=0.01)
    marks.clear()
    for number in range(plan.steps):
        most = 1 if number < plan.steps * 2 // 5 else 2 if number < plan.steps * 4 // 5 else 3
        batch = teacher.batch(plan.lessons, most, plan.turns)
        loss, right, rows = loss_of(net, batch)
        reading, read = reader(rows, batch.shown)
        weight = 0.5 * max(0.1, 1 - 2 * number / plan.steps)
        step(loss + weight * reading, optimiser, rate_at(number, plan.steps, plan.rate))
        mark("right", right)
        mark("read", min(read))
        if number % 50 == 49:
            say(
                f"step {number + 1} pictures {most} loss {loss.item():.3f} {time.time() - began:.0f}s "
                + " ".join(f"{name}={value:.3f}" for name, value in marks.items())
            )
        if number % 200 == 199:
            torch.save(net.state_dict(), out)
    torch.save(net.state_dict(), out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="weights and tokenizer go here")
    parser.add_argument("--models", type=Path, default=FINAL, help="the exported files go here")
    parser.add_argument("--log", type=Path, default=HERE / "train.log")
    parser.add_argument("--eye-steps", type=int, default=Plan.eye_steps)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--export", action="store_true", help="write the files from the weights that there are")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(1)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = words.train()
    net = model.Seeing(model.Shape(vocab=-(-tokenizer.get_vocab_size() // 32) * 32))
    weights = args.work / "seeing.pt"
    if args.export:
        net.load_state_dict(torch.load(weights))
        export.write(net, tokenizer, args.models)
        return
    with args.log.open("w", encoding="utf-8", buffering=1) as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")

        say(f"{model.size(net.eye)} numbers in the eye, {model.size(net.decoder)} in the decoder")
        train(Plan(eye_steps=args.eye_steps, steps=args.steps), net, words.Encoder(tokenizer), say, weights)
        for path in export.write(net, tokenizer, args.models):
            say(f"wrote {path.name}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
