"""Train the hybrid from scratch: tokenizer, curriculum, checkpoint, GGUF. One command, fixed seeds, one thread.

python -m training.hybrid.train
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from training import tokenizer, world
from training.hybrid import export, model
from training.hybrid.cases import LEVEL
from training.hybrid.lessons import Readings
from training.hybrid.start import start
from training.lessons import KINDS, Mix
from training.train import Hints, Marks, Stage, settle, step_loss

HERE = Path(__file__).resolve().parent
FINAL = HERE / "notes-hybrid-q8_0.gguf"
ONE = replace(LEVEL, skills=(1, 1), rules=(1, 1), rows=(2, 3), spare=(0, 2), fillers=(0, 0), preamble=0.3)
MIX = Mix(reason=0.0, recall=1.0, given=0.0, field=0.0, compare=0.0, errata=0.3, length=40, longest=48)
STAGES: tuple[Stage, ...] = (
    Stage(ONE, replace(MIX, errata=0.0), ("table",), pass_at=0.8, patience=300),
    Stage(replace(LEVEL, skills=(1, 1)), MIX, ("table",), pass_at=0.8, patience=200),
    Stage(LEVEL, replace(MIX, errata=0.4), ("table",), pass_at=2.0, easier=0.1),
)


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on."""

    steps: int = 500
    fades: int = 800  # where the rate would be 0
    texts: int = 4
    branches: int = 6
    rate: float = 2e-3
    warm: int = 100
    decay_from: int = 300
    share: float = 0.4  # of texts of two skills, those of which the second redefines
    seed: int = 1

    def rate_at(self, step: int) -> float:
        """Learning rate: warm-up, a plateau, straight down, of which the run leaves the end out."""
        return self.rate * min(1.0, (step + 1) / self.warm, (self.fades - step) / (self.fades - self.decay_from))


def build(encoder: tokenizer.Encoder, shape: model.Shape, seed: int) -> model.Hybrid:
    """The model before training."""
    torch.manual_seed(seed)
    net = model.Hybrid(shape)
    words = {w.strip().lower() for w in tokenizer.world_words()}
    forms = [
        [f for f in (w, " " + w, w.capitalize(), " " + w.capitalize()) if len(encoder.encode(f)) == 1]
        for w in sorted(words)
    ]
    said = [value for values in world.WORD_FIELDS.values() for value in values]
    kept = sorted({encoder.word(lead + word) for word in said for lead in ("", " ")})
    families = [sorted({encoder.word(f) for f in some}) for some in forms if len(some) > 1]
    start(net, families, kept, encoder.word("-"), seed)
    return net


def train(
    plan: Plan, shape: model.Shape, encoder: tokenizer.Encoder, say: Callable[[str], None], out: Path
) -> model.Hybrid:
    """Run the plan."""
    net = build(encoder, shape, plan.seed)
    unread = Hints(shape)  # of direct answers, which are not asked for here
    say(f"{model.size(net)} parameters {asdict(shape)} {asdict(plan)}")
    teacher = Readings(encoder, f"lessons {plan.seed}")
    teacher.share = plan.share
    opt = torch.optim.AdamW(net.parameters(), lr=plan.rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    marks, level, began, tokens, since = Marks(), 0, time.time(), 0, 0
    for step in range(plan.steps):
        for group in opt.param_groups:
            group["lr"] = plan.rate_at(step)
        easier = level and teacher.rng.random() < STAGES[level].easier
        use = teacher.rng.randrange(STAGES[level].easiest, level) if easier else level
        stage = STAGES[use]
        batch = teacher.batch(plan.texts, plan.branches, stage.level, stage.mix, stage.kinds, stage.loose, gaps=0.0)
        loss, kind, right, _ = step_loss(net, unread, batch, 0.0)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        tokens += batch.prefix.size + batch.branch.size
        if use == level:
            marks.take(KINDS, kind, right)
        since += 1
        passed = marks.mean("recall") > STAGES[level].pass_at
        if level + 1 < len(STAGES) and since > 100 and (passed or since >= STAGES[level].patience):
            level, since = level + 1, 0
            marks.value.clear()
            say(f"step {step} level {level}")
        if step % 25 == 24:
            say(
                f"step {step + 1} level {level} loss {loss.item():.3f} norm {norm.item():.2f} "
                f"rate {plan.rate_at(step):.5f} {tokens / 1e6:.2f}M tokens {time.time() - began:.0f}s {marks}"
            )
        if step % 250 == 249:
            torch.save({"shape": asdict(net.shape), "state": net.state_dict()}, out / "hybrid.pt")
    torch.save({"shape": asdict(net.shape), "state": net.state_dict()}, out / "hybrid.pt")
    return net


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="the checkpoint goes here")
    parser.add_argument("--gguf", type=Path, default=FINAL, help="the exported model")
    parser.add_argument("--log", type=Path, default=HERE / "train.log")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--rate", type=float, default=Plan.rate)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    settle(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    with args.log.open("w", encoding="utf-8", buffering=1) as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")

        made = tokenizer.train()
        encoder = tokenizer.Encoder(made)
        shape = model.Shape(vocab=-(-made.get_vocab_size() // 32) * 32)
        net = train(Plan(steps=args.steps, rate=args.rate), shape, encoder, say, args.work)
        export.write(net, made, args.gguf)
        say(f"wrote {args.gguf.name}, {args.gguf.stat().st_size} bytes")


if __name__ == "__main__":
    main()
