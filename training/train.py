"""Train the reversed model from scratch: tokenizer, curriculum, checkpoint, GGUF. One command, fixed seeds."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import export, model, tokenizer, world
from training.lessons import KINDS, Batch, Mix, Teacher

HERE = Path(__file__).resolve().parent
FINAL = HERE / "notes-reversed-q8_0.gguf"
EASY = world.Level(skills=(1, 1), rules=(1, 1), rows=(2, 4), spare=(0, 1), fillers=(0, 0), preamble=0.2, far=False)
BOTH = ("date", "amount")
ALL = ("table", *BOTH)
BOTH = ("date", "amount")
ALL = ("table", *BOTH)
LAST = Mix(reason=0.12, recall=0.06, given=0.12, field=0.03, compare=0.05)
DATES = Mix(reason=0.35, recall=0.12, given=0.08, field=0.0, compare=0.05)
LATE = Mix(reason=0.2, recall=0.08, given=0.16, field=0.07, compare=0.08)


@dataclass(frozen=True)
class Stage:
    """One level of the curriculum."""

    level: world.Level
    mix: Mix
    kinds: Sequence[str] = ALL
    loose: bool = False
    pass_at: float = 0.88  # the level is left when the decisions are right this often
    patience: int = 450  # steps after which the level is left anyway
    easier: float = 0.15  # share of steps that repeat an easier level
    easiest: int = 0
    condition: float = 0.2  # weight of the early word on a comparison


SINGLE = replace(EASY, rules=(1, 3), rows=(2, 5), spare=(0, 2), fillers=(0, 2))
STAGES: tuple[Stage, ...] = (
    # Any field decides any topic: look-ups are learned as such.
    Stage(
        replace(EASY, spare=(0, 0), rows=(3, 5)),
        Mix(reason=0.3, errata=0.1, given=0.3, recall=0.15, compare=0),
        ("table",),
        True,
    ),
    Stage(EASY, Mix(reason=0.3, errata=0.3, given=0.2, recall=0.15, compare=0), ("table",), True),
    Stage(EASY, Mix(reason=0.3, errata=0.3, given=0.15, recall=0.1, compare=0.15), (*BOTH, *BOTH, "table"), True),
    Stage(replace(EASY, rules=(1, 2), rows=(2, 5), fillers=(0, 1)), Mix(), ALL, True, patience=250),
    Stage(SINGLE, LATE, ALL, True, patience=180, easier=0.3),
    # The world as it is: a topic has its field.
    Stage(replace(SINGLE, rules=(1, 1)), LATE, (*BOTH, *BOTH, "table"), patience=200, easier=0),
    Stage(SINGLE, LATE, patience=50, easier=0.2, easiest=5),
    # Comparisons mostly at a distance, and said aloud in the middle of the model.
    Stage(replace(SINGLE, far=True), LATE, (*ALL, *BOTH), patience=250, easier=0, condition=1.0),
    Stage(
        replace(world.FULL, skills=(1, 2)),
        LATE,
        (*ALL, *BOTH),
        patience=250,
        easier=0.3,
        easiest=7,
        condition=1.0,
    ),
    Stage(world.FULL, LATE, patience=100, easier=0.3, easiest=7, condition=1.0),
    Stage(world.FULL, LAST, (*ALL, "date"), patience=494, pass_at=2.0, easier=0.3, easiest=7, condition=1.0),
    # Dates take longest; half of the steps repeat the full mixture.
    Stage(
        replace(world.FULL, skills=(1, 1)),
        DATES,
        ("date", *ALL, "date", "date"),
        easier=0.5,
        easiest=8,
        condition=1.0,
    ),
)


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on."""

    steps: int = 3100
    texts: int = 6
    branches: int = 8
    rate: float = 1.2e-3
    first_rate: float = 2e-3  # while the circuits form
    first_steps: int = 250
    warm: int = 150
    decay_from: int = 1044
    turn: int = 1500  # from here straight down
    again: int = 2500  # from here a second time, for the dates
    seed: int = 1

    def rate_at(self, step: int) -> float:
        """Learning rate: warm-up, a plateau, a slow decay, then twice straight down."""
        if step >= self.again:
            return 4e-4 * (self.steps - step) / (self.steps - self.again)
        if step > self.turn:
            return self.rate_at(self.turn) * (2700 - step) / (2700 - self.turn)
        top = self.first_rate if step < self.first_steps else self.rate
        return top * min(1.0, (step + 1) / self.warm, (2900 - step) / (2900 - self.decay_from))


class Hints(nn.Module):
    """Readers on the middle layers (training only): they say early what a direct answer needs on its way."""

    LAYERS: ClassVar = {"field": 2, "limit": 3, "value": 4, "condition": 5}

    def __init__(self, shape: model.Shape) -> None:
        super().__init__()
        self.width = shape.width
        eye = 0.1 * torch.eye(shape.width)
        self.field = nn.Parameter(eye[None].clone())
        self.value = nn.Parameter(eye.repeat(3, 1, 1))
        self.limit = nn.Parameter(eye.repeat(3, 1, 1))
        self.condition = nn.Linear(shape.width, 2)

    def forward(
        self, streams: list[Tensor], where: Tensor, hints: Tensor, embed: Tensor, condition: float
    ) -> tuple[Tensor, list[float]]:
        """Loss over the flattened positions `where`, and the accuracy of every reader."""
        losses, right = [], []
        targets = {
            "field": hints[:, 3:4],
            "value": hints[:, 4:7],
            "limit": hints[:, 7:10],
            "condition": hints[:, 10:11],
        }
        for name, layer in self.LAYERS.items():
            x = F.rms_norm(streams[layer].flatten(0, 1)[where], (self.width,))
            target = targets[name]
            keep = target >= 0
            if name == "condition":
                said = self.condition(x)[:, None][keep]
            else:
                said = torch.einsum("nd,kde->nke", x, getattr(self, name))[keep] @ embed.T
            if len(said):
                weight = condition if name == "condition" else 0.2
                losses.append(weight * F.cross_entropy(said, target[keep]) * (0.2 + 0.8 * keep.float().mean()))
                right.append((said.argmax(-1) == target[keep]).float().mean().item())
            else:
                right.append(float("nan"))
        return torch.stack(losses).sum(), right


def step_loss(
    net: model.Tiny, hints: Hints, batch: Batch, condition: float, text_weight: float = 0.02
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Loss of a batch; kinds and correctness of its counted tokens; accuracy of the hints."""
    prefix, branch = torch.from_numpy(batch.prefix), torch.from_numpy(batch.branch)
    B, K, L = branch.shape
    P = prefix.shape[1]
    ids = torch.cat([prefix, branch.view(B, K * L)], 1)
    at = torch.cat([torch.from_numpy(batch.prefix_at), torch.from_numpy(batch.branch_at).view(B, K * L)], 1)
    lens = torch.from_numpy(batch.prefix_len)
    streams = net.hidden(ids, at, model.View(lens, P, K, L))
    last = streams[-1]
    head, tail = last.split([P, K * L], 1)
    tail = tail.view(B, K, L, -1)[:, :, :-1]
    weight, kind = torch.from_numpy(batch.weight)[:, :, 1:], torch.from_numpy(batch.kind)[:, :, 1:]
    keep = weight > 0
    logits = net.logits(tail[keep])
    target = branch[:, :, 1:][keep]
    w = weight[keep]
    loss = (F.cross_entropy(logits, target, reduction="none") * w).sum() / w.sum()
    if text_weight:
        inside = torch.arange(1, P)[None] < lens[:, None]
        inside &= (torch.arange(1, P) % 3 == int(lens[0]) % 3)[None]
        loss = loss + text_weight * F.cross_entropy(net.logits(head[:, :-1][inside]), prefix[:, 1:][inside])
    marks: list[float] = []
    if len(batch.hints):
        h = torch.from_numpy(batch.hints)
        extra, marks = hints(streams, h[:, 0] * (P + K * L) + P + h[:, 1] * L + h[:, 2], h, net.embed, condition)
        loss = loss + extra
    return loss, kind[keep], logits.argmax(-1) == target, marks


def save(net: model.Tiny, out: Path) -> None:
    """Write the checkpoint."""
    torch.save({"shape": asdict(net.shape), "state": net.state_dict()}, out / "tiny.pt")


class Marks:
    """Running accuracy per kind."""

    def __init__(self) -> None:
        self.value: dict[str, float] = {}

    def add(self, name: str, value: float, pace: float = 0.05) -> None:
        """Take in one measurement."""
        if value == value:
            self.value[name] = value if name not in self.value else (1 - pace) * self.value[name] + pace * value

    def take(self, kinds: Sequence[str], kind: Tensor, right: Tensor) -> None:
        """Take in which tokens of a batch were right, each of a kind by its number; number 0 does not count."""
        for number, name in enumerate(kinds):
            chosen = right[kind == number]
            if number and len(chosen):
                self.add(name, chosen.float().mean().item())

    def __str__(self) -> str:
        return " ".join(f"{k.replace(' ', '_')}={v:.2f}" for k, v in sorted(self.value.items()))

    def mean(self, *prefixes: str) -> float:
        """Mean over kinds that begin with one of the prefixes."""
        found = [v for k, v in self.value.items() if k.startswith(prefixes)]
        return sum(found) / len(found) if found else 0.0


def build(encoder: tokenizer.Encoder, shape: model.Shape, seed: int) -> model.Tiny:
    """The model before training."""
    torch.manual_seed(seed)
    net = model.Tiny(shape)
    words = {w.strip().lower() for w in tokenizer.world_words()}
    forms = [
        [f for f in (w, " " + w, w.capitalize(), " " + w.capitalize()) if len(encoder.encode(f)) == 1]
        for w in sorted(words)
    ]
    families = [sorted({encoder.word(f) for f in fs}) for fs in forms if len(fs) > 1]
    lines = [[encoder.word(lead + str(n)) for n in range(2024, 2029)] for lead in ("", " ")]
    lines += [
        [encoder.word(f"{n:02d}") for n in range(1, 32)],
        [encoder.word(f" {10 * n}") for n in range(1, 100)],
    ]
    model.start(net, families, lines, seed)
    return net


def train(
    plan: Plan,
    shape: model.Shape,
    encoder: tokenizer.Encoder,
    say: Callable[[str], None],
    out: Path,
    resume: bool = False,
) -> model.Tiny:
    """Run the plan; `resume` goes on from the last checkpoint, with the same result as one run."""
    net = build(encoder, shape, plan.seed)
    hints = Hints(shape)
    say(f"{model.size(net)} parameters {asdict(shape)} {asdict(plan)}")
    teacher = Teacher(encoder, f"lessons {plan.seed}")
    params = [*net.parameters(), *hints.parameters()]
    opt = torch.optim.AdamW(params, lr=plan.rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    marks, level, began, tokens, drawing = Marks(), 0, time.time(), 0, 0.0
    since, first = 0, 0
    if resume:
        found = torch.load(out / "resume.pt", weights_only=False)
        net.load_state_dict(torch.load(out / "tiny.pt")["state"])
        hints.load_state_dict(found["hints"])
        opt.load_state_dict(found["opt"])
        teacher.rng.setstate(found["rng"])
        first, level, since, tokens = found["step"], found["level"], found["since"], found["tokens"]
        marks.value = found["marks"]
    for step in range(first, plan.steps):
        rate = plan.rate_at(step)
        for group in opt.param_groups:
            group["lr"] = rate
        easier = level and teacher.rng.random() < STAGES[level].easier
        use = teacher.rng.randrange(STAGES[level].easiest, level) if easier else level
        began_draw = time.time()
        stage = STAGES[use]
        batch = teacher.batch(plan.texts, plan.branches, stage.level, stage.mix, stage.kinds, stage.loose)
        drawing += time.time() - began_draw
        loss, kind, right, seen = step_loss(net, hints, batch, stage.condition)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        tokens += batch.prefix.size + batch.branch.size
        if use == level:
            marks.take(KINDS, kind, right)
            for name, value in zip(("see field", "see limit", "see value", "see condition"), seen, strict=False):
                marks.add(name, value)
        since += 1
        passed = marks.mean("direct", "reason") > STAGES[level].pass_at
        if level + 1 < len(STAGES) and since > 100 and (passed or since >= STAGES[level].patience):
            level, since = level + 1, 0
            marks.value.clear()
            say(f"step {step} level {level}")
        if step % 50 == 49:
            say(
                f"step {step + 1} level {level} loss {loss.item():.3f} norm {norm.item():.2f} "
                f"rate {rate:.5f} "
                f"{tokens / 1e6:.2f}M tokens {time.time() - began:.0f}s ({drawing:.0f}s drawing) {marks}"
            )
        if step % 250 == 249:
            save(net, out)
            torch.save(
                {
                    "hints": hints.state_dict(),
                    "opt": opt.state_dict(),
                    "rng": teacher.rng.getstate(),
                    "step": step + 1,
                    "level": level,
                    "since": since,
                    "marks": marks.value,
                    "tokens": tokens,
                },
                out / "resume.pt",
            )
    save(net, out)
    return net


def settle(threads: int) -> None:
    """Make the CPU quick: no denormals; memory stays with the process (page faults cost a third)."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 2**29)  # M_TOP_PAD


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="checkpoint and tokenizer go here")
    parser.add_argument("--gguf", type=Path, default=FINAL, help="the exported model")
    parser.add_argument("--log", type=Path, default=HERE / "train.log")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--rate", type=float, default=Plan.rate)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    settle(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    with args.log.open("a" if args.resume else "w", encoding="utf-8", buffering=1) as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")

        made = tokenizer.train()
        made.save(str(args.work / "tokenizer.json"))
        encoder = tokenizer.Encoder(made)
        shape = model.Shape(vocab=-(-made.get_vocab_size() // 32) * 32)
        net = train(Plan(steps=args.steps, rate=args.rate), shape, encoder, say, args.work, args.resume)
        export.write(net, made, args.gguf)
        say(f"wrote {args.gguf.name}, {args.gguf.stat().st_size} bytes")


if __name__ == "__main__":
    main()
