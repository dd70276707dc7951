"""Train small readers of tables: `python -m training.ablations.train NAME [NAME ...] [--seed N] [--work DIR]`.

All start from training/model.py's look-ups over words of one token, and all of their weights learn. They differ in what
the name says (subjects.py). Texts are drawn from the same seed, and are the same where the lessons are. Only tokens of
texts and answers are learned, and of one subject what readers on inner layers say. Never trained on mixed, edited or
spliced caches; no mask hides a field from what follows it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training import export, model
from training.ablations.subjects import SUBJECTS, Subject
from training.tiny import tokenizer
from training.tiny.lessons import KINDS, Batch, Mix, Teacher
from training.tiny.marks import families
from training.tiny.train import loss_of, streams
from training.tokenizer import Encoder
from training.train import Marks, settle

WORK = Path(__file__).resolve().parents[2] / "build" / "ablations"
BASE = 10_000.0  # of RoPE
PIECES = 200  # few words are not whole here: names of organisations, fillers
TEXTS, BRANCHES = 6, 6
WARM, EASY, COOL = 60, 0.4, 0.4  # steps; of all steps: with easy texts, and with a rate that falls to nothing
AGAIN = 0.15  # share of the later steps with easy texts
MIX = Mix(reason=0.15, recall=0.1, errata=0.3, suppose=0.0, longest=62)
TEXT_WEIGHT, HINT_WEIGHT = 0.02, 0.2


class Readers(nn.Module):
    """They say from inner layers, where an answer begins, which field decides and what its value is."""

    def __init__(self, shape: model.Shape) -> None:
        super().__init__()
        self.layers = {"field": shape.layers // 3, "value": shape.layers // 2}
        self.width = shape.width
        self.reads = nn.ParameterDict({name: nn.Parameter(0.1 * torch.eye(shape.width)) for name in self.layers})

    def forward(self, encoder: Encoder, batch: Batch, found: list[Tensor], embed: Tensor) -> Tensor:
        """Their loss."""
        P, length = batch.prefix.shape[1], batch.branch.shape[2]
        asked = [
            (b, P + k * length + at, encoder.word(" " + name), encoder.word(" " + value))
            for b, row in enumerate(batch.branches)
            for k, branch in enumerate(row)
            for at, name, value in branch.asked
        ]
        where = torch.tensor(asked)
        losses = []
        for column, (name, layer) in enumerate(self.layers.items(), 2):
            x = F.rms_norm(found[layer][where[:, 0], where[:, 1]], (self.width,))
            losses.append(F.cross_entropy(x @ self.reads[name] @ embed.T, where[:, column]))
        return HINT_WEIGHT * torch.stack(losses).sum()


def build(subject: Subject, encoder: Encoder, seed: int) -> model.Tiny:
    """The model before training."""
    torch.manual_seed(seed)
    vocabulary = -(-len(encoder.vocab) // 32) * 32
    size = subject.size
    net = model.Tiny(model.Shape(vocabulary, size.width, size.layers, ffn=size.ffn, rope_base=BASE))
    model.start(net, families(encoder.vocab), (), seed)
    return net


def train(subject: Subject, encoder: Encoder, seed: int, say: Callable[[str], None]) -> model.Tiny:
    """The whole run."""
    net, readers = build(subject, encoder, seed), None
    params = [*net.parameters()]
    if subject.lessons.hints:
        readers = Readers(net.shape)
        params += readers.parameters()
    optimizer = torch.optim.AdamW(params, lr=subject.size.rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    mix, (easy, full) = replace(MIX, given=subject.lessons.given), subject.lessons.levels
    teacher, means, tokens, began = Teacher(encoder, f"ablations {seed}"), Marks(), 0, time.time()
    steps = subject.steps
    say(f"{subject.what}: {model.size(net)} parameters {asdict(net.shape)} {asdict(subject.lessons)}, seed {seed}")
    for step in range(steps):
        simple = step < EASY * steps or teacher.rng.random() < AGAIN
        batch = teacher.batch(TEXTS, BRANCHES, easy if simple else full, mix, 150 if simple else 300)
        found = streams(net, batch)
        loss, kind, right = loss_of(net, batch, found[-1], TEXT_WEIGHT)
        if readers:
            loss = loss + readers(encoder, batch, found, net.embed)
        rate = subject.size.rate * min(1.0, (step + 1) / WARM, (steps - step) / (COOL * steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        tokens += int(batch.prefix_len.sum()) + int((batch.branch > 0).sum())
        means.take(KINDS, kind, right)
        if step % 25 == 24 or step + 1 == steps:
            say(
                f"step {step + 1} loss {loss.item():.3f} norm {norm.item():.1f} rate {rate:.5f} "
                f"{tokens / 1e6:.2f}M tokens {time.time() - began:.0f}s {means}"
            )
    return net


def vocabulary() -> Tokenizer:
    """The tokenizer of all subjects: every word of their texts is one token, and there are no numbers."""
    return tokenizer.make(pieces=PIECES, numbers=())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SUBJECTS, metavar="NAME", help=", ".join(SUBJECTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=WORK, help="models and logs go here (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="(default: as many as the subject has)")
    args = parser.parse_args()
    settle(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    made = vocabulary()
    for name in args.names:
        subject = replace(SUBJECTS[name], steps=args.steps or SUBJECTS[name].steps)
        path = args.work / f"{name}-seed{args.seed}.gguf"
        with path.with_suffix(".log").open("w", encoding="utf-8", buffering=1) as log:

            def say(line: str) -> None:
                print(line, flush=True)
                log.write(line + "\n")

            net = train(subject, Encoder(made), args.seed, say)
            export.write(net, made, path)  # has the name of the model that ships, which is asked to think alike
            say(f"wrote {path.name}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
