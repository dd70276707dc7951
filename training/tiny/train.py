"""Train the model that ships: `python -m training.tiny.train [--seed N] [--minutes N] [--threads 1] [--resume]`.

It runs on a GPU where torch sees one. It can be stopped at any time: checkpoints (`tiny.pt`, `resume.pt`) and the log
are written every few minutes, and `--resume` goes on. Never trained on mixed, edited or spliced caches; no mask hides
a field from what follows it; only tokens of texts and answers are learned, nothing of inner layers; no gaps in
positions.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
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
STAGES: tuple[Stage, ...] = (
    Stage("words of one token", FIRST, Mix(reason=0.15, compare=0.03), 0.85, patience=300),
    Stage(
        "words of several",
        replace(FIRST, whole=0.5, near=0.15, below=0.12),
        Mix(reason=0.2, cannot=0.03, compare=0.03),
        0.88,
        patience=300,
    ),
    Stage(
        "more rules",
        replace(FIRST, whole=0.3, near=0.2, rules=(1, 3), rows=(2, 4), spare=(0, 2), below=0.12, shared=0.1),
        Mix(reason=0.25, cannot=0.04, compare=0.04),
        0.9,
        patience=400,
    ),
    Stage(
        "two skills",
        replace(
            FIRST,
            skills=(1, 2),
            rules=(1, 3),
            rows=(2, 4),
            spare=(0, 2),
            fillers=(0, 1),
            whole=0.3,
            near=0.25,
            versions=0.2,
            below=0.12,
            shared=0.1,
        ),
        Mix(reason=0.25, cannot=0.05, compare=0.04),
        0.92,
        patience=500,
        longest=300,
    ),
    Stage(
        "all",
        world.Level(
            skills=(1, 3),
            rules=(1, 3),
            rows=(2, 5),
            spare=(0, 2),
            fillers=(0, 2),
            heading=0.6,
            preamble=0.5,
            whole=0.3,
            kinds=EVERY,
            near=0.3,
            shared=0.1,
            alike=0.2,
            versions=0.3,
            below=0.12,
            sample=0.2,
            plain=0.1,
        ),
        Mix(reason=0.25, cannot=0.06, compare=0.05, errata=0.5),
        2.0,
        longest=450,
    ),
)
LONG = replace(  # beside the last stage: a few texts as long as a memory of four skills
    STAGES[-1],
    name="long",
    level=replace(STAGES[-1].level, skills=(3, 4), rules=(2, 3), fillers=(2, 5)),
    longest=900,
)


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


def streams(net: model.Tiny, batch: Batch) -> list[Tensor]:
    """The stream after every layer, (texts, P + K * L, width) each: a text, then its branches."""
    device = net.embed.device
    prefix, branch = torch.from_numpy(batch.prefix).to(device), torch.from_numpy(batch.branch).to(device)
    B, K, L = branch.shape
    P = prefix.shape[1]
    ids = torch.cat([prefix, branch.view(B, K * L)], 1)
    lens = torch.from_numpy(batch.prefix_len).to(device)
    at = torch.cat(
        [
            torch.arange(P, device=device).expand(B, P),
            (lens[:, None, None] + torch.arange(L, device=device)).expand(B, K, L).reshape(B, K * L),
        ],
        1,
    )
    return net.hidden(ids, at, model.View(lens, P, K, L))


def loss_of(net: model.Tiny, batch: Batch, last: Tensor, text_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a batch by the last of its streams; kinds and correctness of the tokens that count."""
    device = net.embed.device
    prefix, branch = torch.from_numpy(batch.prefix).to(device), torch.from_numpy(batch.branch).to(device)
    lens = torch.from_numpy(batch.prefix_len).to(device)
    B, K, L = branch.shape
    P = prefix.shape[1]
    head, tail = last.split([P, K * L], 1)
    tail = tail.view(B, K, L, -1)[:, :, :-1]
    weight, kind = torch.from_numpy(batch.weight).to(device)[:, :, 1:], torch.from_numpy(batch.kind)[:, :, 1:]
    keep = weight > 0
    logits = net.logits(tail[keep]).float()
    target = branch[:, :, 1:][keep]
    w = weight[keep]
    loss = (F.cross_entropy(logits, target, reduction="none") * w).sum() / w.sum()
    if text_weight:
        inside = torch.arange(1, P, device=device)[None] < lens[:, None]
        inside &= (torch.arange(1, P, device=device) % 3 == int(lens[0]) % 3)[None]
        said = net.logits(head[:, :-1][inside]).float()
        loss = loss + text_weight * F.cross_entropy(said, prefix[:, 1:][inside])
    return loss, kind[keep.cpu()], (logits.argmax(-1) == target).cpu()


def shape_of(made: Tokenizer) -> model.Shape:
    """The sizes of the subject with this tokenizer."""
    vocabulary = -(-made.get_vocab_size() // 32) * 32
    return model.Shape(vocab=vocabulary, width=224, layers=8, ffn=320, rope_base=10_000.0)


def build(encoder: Encoder, shape: model.Shape, seed: int, note: bool = True) -> model.Tiny:
    """The model before training."""
    torch.manual_seed(seed)
    net = model.Tiny(shape)
    start(net, Marks.of(encoder), seed, note)
    return net


def save(net: model.Tiny, out: Path) -> None:
    """Write the weights, whole or not at all."""
    torch.save({"shape": asdict(net.shape), "state": net.state_dict()}, out / "tiny.part")
    os.replace(out / "tiny.part", out / "tiny.pt")


def train(
    plan: Plan,
    net: model.Tiny,
    encoder: Encoder,
    say: Callable[[str], None],
    out: Path,
    minutes: float,
    resume: bool,
    until: int,
    compiled: bool,
) -> None:
    """Run the plan for so many minutes at most, and up to the stage `until`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net.to(device)
    # Without AVX-512 a processor has no bf16 of its own: a step in it took ten times as long as in f32 with AVX2.
    half = device == "cuda" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    teacher = Teacher(encoder, f"next {plan.seed}")
    for param in (net.embed, *net.blocks[:FIXED].parameters()):
        param.requires_grad_(False)
    groups = [
        {"params": [*net.blocks[FIXED].parameters()]},
        {"params": [*net.blocks[FIXED + 1 :].parameters(), net.norm]},
    ]
    opt = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    learning = [param for group in groups for param in group["params"]]
    accuracy, level, since, tokens, begin, spent = Accuracy(), 0, 0, 0, 0, 0.0
    if resume:
        found = torch.load(out / "resume.pt", weights_only=False, map_location=device)
        net.load_state_dict(torch.load(out / "tiny.pt", map_location=device)["state"])
        opt.load_state_dict(found["opt"])
        teacher.rng.setstate(found["rng"])
        begin, level, since, tokens, spent = (found[k] for k in ("step", "level", "since", "tokens", "spent"))
        accuracy.value = found["accuracy"]
    if compiled:
        for block in net.blocks:
            block.compile(dynamic=True)
    began = saved = time.time()
    say(
        f"{model.size(net)} parameters {asdict(net.shape)} {asdict(plan)} on {device} in {'bf16' if half else 'f32'}, "
        f"from step {begin}"
    )

    def keep(step: int) -> None:
        save(net, out)
        state = {"opt": opt.state_dict(), "rng": teacher.rng.getstate(), "step": step, "level": level, "since": since}
        state |= {"accuracy": accuracy.value, "tokens": tokens, "spent": spent + time.time() - began}
        torch.save(state, out / "resume.part")
        os.replace(out / "resume.part", out / "resume.pt")

    for step in range(begin, plan.steps):
        for group, rate in zip(opt.param_groups, (plan.gentle_rate_at(step), plan.rate_at(step)), strict=True):
            group["lr"] = rate
        use = teacher.rng.randrange(level) if level and teacher.rng.random() < plan.earlier else level
        long = use == len(STAGES) - 1 and teacher.rng.random() < plan.long
        stage = LONG if long else STAGES[use]
        texts = plan.texts // 2 if long else plan.texts
        batch = teacher.batch(texts, plan.branches, stage.level, stage.mix, stage.longest)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            loss, kind, right = loss_of(net, batch, streams(net, batch)[-1], plan.text_weight)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        # Each by itself: what compares numbers is steep, and would take all the room there is.
        norms = torch.stack([nn.utils.clip_grad_norm_([param], 0.2) for param in learning])
        norm = norms.square().sum().sqrt()
        opt.step()
        tokens += int(batch.prefix_len.sum()) + int((batch.branch > 0).sum())
        if use == level:
            accuracy.take(KINDS, kind, right)
        since += 1
        if step % 100 == 99:
            say(
                f"step {step + 1} stage {level} loss {loss.item():.3f} norm {norm.item():.1f} "
                f"rate {plan.rate_at(step):.5f} "
                f"{tokens / 1e6:.2f}M tokens {spent + time.time() - began:.0f}s {accuracy}"
            )
        passed = accuracy.mean("direct", "changed", "reason", "rethink", "what if") > STAGES[level].pass_at
        if level < until and since > STAGES[level].least and (passed or since >= STAGES[level].patience):
            level, since = level + 1, 0
            accuracy.value.clear()
            say(f"step {step + 1} stage {level}: {STAGES[level].name}")
        if time.time() - saved > 180:
            keep(step + 1)
            saved = time.time()
        if time.time() - began > 60 * minutes:
            keep(step + 1)
            return
    keep(plan.steps)


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
    parser.add_argument("--work", type=Path, default=HERE / "work", help="checkpoints and tokenizer go here")
    parser.add_argument("--gguf", type=Path, help="the exported model (default: tiny.gguf in --work)")
    parser.add_argument("--log", type=Path, help="(default: train.log in --work)")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--rate", type=float, default=Plan.rate)
    parser.add_argument("--cool", type=float, default=Plan.cool)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--until", type=int, default=len(STAGES) - 1, help="the last stage of this run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the layers first: a minute, then a third faster",
    )
    parser.add_argument(
        "--no-note", action="store_true", help="a control: the start neither writes a note nor reads one"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--export", action="store_true", help="write the model of the last checkpoint, and no more")
    args = parser.parse_args()
    settle(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    made = tokenizer.make()
    made.save(str(args.work / "tokenizer.json"))
    encoder, gguf = Encoder(made), args.gguf or args.work / "tiny.gguf"
    if args.export:
        found = torch.load(args.work / "tiny.pt", map_location="cpu")
        net = model.Tiny(model.Shape(**found["shape"]))
        net.load_state_dict(found["state"])
        export.write(net, made, gguf)
        return
    plan = Plan(steps=args.steps, rate=args.rate, cool=args.cool, seed=args.seed)
    with (args.log or args.work / "train.log").open("a" if args.resume else "w", encoding="utf-8", buffering=1) as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")

        net = build(encoder, shape_of(made), plan.seed, not args.no_note)
        train(plan, net, encoder, say, args.work, args.minutes, args.resume, args.until, args.compile)
        export.write(net.cpu(), made, gguf)
        say(f"wrote {gguf.name}, {gguf.stat().st_size} bytes")


if __name__ == "__main__":
    main()
