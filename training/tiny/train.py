"""Train the model that ships: `python -m training.tiny.train [--seed N] [--steps N] [--threads 1]`.

Never trained on mixed, edited or spliced caches; no mask hides a field from what follows it; only tokens of texts and
answers are learned, nothing of inner layers; no gaps in positions.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import export, model
from training.tiny import tokenizer, world
from training.tiny.lessons import KINDS, Batch, Mix, Teacher
from training.tiny.marks import Marks
from training.tiny.start import start
from training.tokenizer import Encoder

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum. It is left when decisions are right often enough, or after `patience` steps."""

    name: str
    level: world.Level
    mix: Mix
    pass_at: float = 0.95
    least: int = 100
    patience: int = 600
    longest: int = 240


EVERY = ("table", "date", "amount")
FIXED = 4  # embeddings and so many layers stay as they started: what compares numbers is blunted by any rate
FIRST = world.Level(rules=(1, 2), rows=(2, 3), kinds=EVERY, shared=0.0, below=0.12, versions=0.2, sample=0.2, plain=0.1)
LARGER = replace(FIRST, whole=0.3, rules=(1, 3), rows=(2, 4), spare=(0, 2))
ALL = replace(LARGER, skills=(1, 3), rows=(2, 5), fillers=(0, 2), heading=0.6, preamble=0.5, near=0.3, shared=0.1)
ALL = replace(ALL, alike=0.2, versions=0.3)
STAGES: tuple[Stage, ...] = (
    Stage("words of one token", FIRST, Mix(reason=0.15, compare=0.03), 0.85, patience=300),
    Stage(
        "words of several",
        replace(FIRST, whole=0.5, near=0.15),
        Mix(0.2, cannot=0.03, compare=0.03),
        0.88,
        patience=300,
    ),
    Stage("more rules", replace(LARGER, near=0.2, shared=0.1), Mix(0.25, cannot=0.04, compare=0.04), 0.9, patience=400),
    Stage(
        "two skills",
        replace(LARGER, skills=(1, 2), fillers=(0, 1), near=0.25, shared=0.1),
        *(Mix(0.25, cannot=0.05, compare=0.04), 0.92),
        patience=500,
        longest=300,
    ),
    Stage("all", ALL, Mix(0.25, cannot=0.06, compare=0.05), 2.0, longest=450),
)
# Beside the last stage: a few texts as long as a memory of four skills.
LONG = replace(STAGES[-1], level=replace(ALL, skills=(3, 4), rules=(2, 3), fillers=(2, 5)), longest=900)


@dataclass(frozen=True)
class Plan:
    """What a run depends on besides the stages."""

    steps: int = 4500
    texts: int = 8
    branches: int = 6
    first_rate: float = 1e-3  # of layers 5 to 7, which learn alone at first to say what the others find:
    first_steps: int = 500  # an answer that is all wrong tears down the start's circuits before anything uses them
    ramp: int = 600  # steps in which layer 4 comes to learn, too
    gentle: float = 0.3  # how fast layer 4 learns, compared with those; what is before it stays as it started
    rate: float = 4e-4
    warm: int = 60
    cool: float = 0.5  # of all steps: straight down to nothing
    text_weight: float = 0.02
    earlier: float = 0.15  # share of steps that repeat an earlier stage
    long: float = 0.12  # share of the steps of the last stage that are about long texts, half as many
    seed: int = 1

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        top = self.first_rate if step < self.first_steps else self.rate
        return top * min(1.0, (step + 1) / self.warm, (self.steps - step) / (self.cool * self.steps))

    def gentle_rate_at(self, step: int) -> float:
        """That of layer 4."""
        return self.rate_at(step) * self.gentle * min(1.0, max(0.0, (step - self.first_steps) / self.ramp))


class Accuracy:
    """Running accuracy of each kind of answer."""

    def __init__(self) -> None:
        self.value: dict[str, float] = {}

    def take(self, kind: Tensor, right: Tensor) -> None:
        """Take in which tokens of a batch were right, each of a kind by its number; number 0 does not count."""
        for number, name in enumerate(KINDS):
            if number and len(chosen := right[kind == number]):
                value = chosen.float().mean().item()
                self.value[name] = 0.95 * self.value.get(name, value) + 0.05 * value

    def mean(self, *prefixes: str) -> float:
        """Mean over kinds that begin with one of the prefixes."""
        found = [v for k, v in self.value.items() if k.startswith(prefixes)]
        return sum(found) / len(found) if found else 0.0


def stream(net: model.Tiny, batch: Batch) -> Tensor:
    """The stream after the last layer, (texts, P + K * L, width): a text, then its branches, which do not see each
    other."""
    prefix, branch, lens = (torch.from_numpy(one) for one in (batch.prefix, batch.branch, batch.prefix_len))
    (B, K, L), P = branch.shape, prefix.shape[1]
    ids = torch.cat([prefix, branch.view(B, K * L)], 1)
    inside = torch.arange(P).expand(B, P)
    at = torch.cat([inside, (lens[:, None, None] + torch.arange(L)).expand(B, K, L).reshape(B, K * L)], 1)
    sees = torch.ones(P + K * L, P + K * L, dtype=torch.bool).tril().repeat(B, 1, 1)
    sees[:, P:, :P] = (inside < lens[:, None])[:, None]
    sees[:, P:, P:] &= torch.block_diag(*[torch.ones(L, L)] * K).bool()
    return net(ids, at, sees[:, None])


def loss_of(net: model.Tiny, batch: Batch, text_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a batch; kinds and correctness of the tokens that count."""
    prefix, branch, lens = (torch.from_numpy(one) for one in (batch.prefix, batch.branch, batch.prefix_len))
    (B, K, L), P = branch.shape, prefix.shape[1]
    head, tail = stream(net, batch).split([P, K * L], 1)
    weight, kind = torch.from_numpy(batch.weight)[:, :, 1:], torch.from_numpy(batch.kind)[:, :, 1:]
    keep = weight > 0
    logits = net.logits(tail.view(B, K, L, -1)[:, :, :-1][keep]).float()
    target, w = branch[:, :, 1:][keep], weight[keep]
    loss = (F.cross_entropy(logits, target, reduction="none") * w).sum() / w.sum()
    inside = torch.arange(1, P)[None] < lens[:, None]
    inside &= (torch.arange(1, P) % 3 == int(lens[0]) % 3)[None]
    text = F.cross_entropy(net.logits(head[:, :-1][inside]).float(), prefix[:, 1:][inside])
    return loss + text_weight * text, kind[keep], logits.argmax(-1) == target


def train(plan: Plan, net: model.Tiny, encoder: Encoder) -> None:
    """Run the plan."""
    # Without AVX-512 a processor has no bf16 of its own: a step in it took ten times as long as in f32 with AVX2.
    half = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    teacher = Teacher(encoder, f"next {plan.seed}")
    for param in (net.embed, *net.blocks[:FIXED].parameters()):
        param.requires_grad_(False)
    groups = [
        {"params": [*net.blocks[FIXED].parameters()]},
        {"params": [*net.blocks[FIXED + 1 :].parameters(), net.norm]},
    ]
    opt = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    learning = [param for group in groups for param in group["params"]]
    accuracy, level, since, tokens = Accuracy(), 0, 0, 0
    for block in net.blocks:
        block.compile(dynamic=True)  # a minute, then a third faster
    started = time.time()
    print(f"{model.size(net)} parameters {net.shape} {plan} in {'bf16' if half else 'f32'}", flush=True)
    for step in range(plan.steps):
        for group, rate in zip(opt.param_groups, (plan.gentle_rate_at(step), plan.rate_at(step)), strict=True):
            group["lr"] = rate
        use = teacher.rng.randrange(level) if level and teacher.rng.random() < plan.earlier else level
        long = use == len(STAGES) - 1 and teacher.rng.random() < plan.long
        stage = LONG if long else STAGES[use]
        texts = plan.texts // 2 if long else plan.texts
        batch = teacher.batch(texts, plan.branches, stage.level, stage.mix, stage.longest)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss, kind, right = loss_of(net, batch, plan.text_weight)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        # Each by itself: what compares numbers is steep, and would take all the room there is.
        for param in learning:
            nn.utils.clip_grad_norm_([param], 0.2)
        opt.step()
        tokens += int(batch.prefix_len.sum()) + int((batch.branch > 0).sum())
        if use == level:
            accuracy.take(kind, right)
        since += 1
        if step % 100 == 99:
            found = " ".join(f"{name.replace(' ', '_')}={value:.2f}" for name, value in sorted(accuracy.value.items()))
            taken = f"{tokens / 1e6:.2f}M tokens {time.time() - started:.0f}s"
            print(f"step {step + 1} stage {level} loss {loss.item():.3f} {taken} {found}", flush=True)
        passed = accuracy.mean("direct", "changed", "reason", "rethink", "what if") > STAGES[level].pass_at
        if level < len(STAGES) - 1 and since > STAGES[level].least and (passed or since >= STAGES[level].patience):
            level, since = level + 1, 0
            accuracy.value.clear()
            print(f"step {step + 1} stage {level}: {STAGES[level].name}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, default=HERE / "work" / "tiny.gguf", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    with contextlib.suppress(OSError, AttributeError):  # memory stays with the process: page faults cost a third
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**29)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            libc.mallopt(option, value)
    made = tokenizer.make()
    encoder = Encoder(made)
    torch.manual_seed(args.seed)
    vocabulary = -(-made.get_vocab_size() // 32) * 32
    net = model.Tiny(model.Shape(vocab=vocabulary, width=224, layers=8, ffn=320, rope_base=10_000.0))
    start(net, Marks.of(encoder), args.seed)
    train(Plan(steps=args.steps, seed=args.seed), net, encoder)
    export.write(net, made, args.gguf)
    print(f"wrote {args.gguf.name}, {args.gguf.stat().st_size} bytes")


if __name__ == "__main__":
    main()
