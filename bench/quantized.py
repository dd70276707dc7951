"""Find the types of weights with which a spliced skill has the bits of a prefill.

    python -m bench.quantized [--type Q4_K_M]... [--write docs/reliability.md]     (20 minutes on two cores)

llama.cpp quantizes SmolLM2 and models of the zoo (`make zoo`) to each type. SmolLM2 is asked 20 questions of
bench/real/tasks.yaml about the first part of a skill, spliced where it was compiled, and exact; logits and greedy
answers are compared with those of the whole prompt, decoded by `notes`. Models of the zoo get random tokens instead.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

import notes_cli as notes
from bench.marked import grid, put_between
from bench.real.run import Outcome, answers
from bench.real.tasks import SKILLS, load_tasks
from notes_cli.config import Paths
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.text.skill import Skill

ROOT = Path(__file__).resolve().parents[1]
TYPES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4")
ZOO = ("llama-dense", "qwen3-dense", "gemma3-dense", "qwen3moe-moe", "gpt-oss-moe")
QUESTIONS, ELSEWHERE = 20, 5
SKILL, REST = "store-handbook", "## Refunds"  # the part of its text from REST on is left out, for time
SYSTEM = "Answer in one sentence."
BEGIN, END = "<!-- bench.quantized: begin -->", "<!-- bench.quantized: end -->"

Logits = NDArray[np.float32]


def quantize(source: Path, kind: str, path: Path) -> str:
    """Write the model as a type of file of llama.cpp; weights that are quantized already are quantized again. Returns
    the types of its matrices with their numbers, most first. Raises SystemExit where llama.cpp cannot."""
    params = llama.llama_model_quantize_default_params()
    params.allow_requantize = True
    if kind == "MXFP4":  # by itself for experts alone
        override = llama.llama_model_tensor_override * 2
        params.ftype = llama.LLAMA_FTYPE_MOSTLY_MXFP4_MOE
        params.tt_overrides = override((rb"ffn_(up|gate|down)\.weight", gguf.GGMLQuantizationType.MXFP4))
    else:
        params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot make {source.name} {kind}")
    tensors = gguf.GGUFReader(path).tensors
    found = Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1)
    return ", ".join(f"{name} ({count})" for name, count in found.most_common())


def compared(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> str:
    """In how many of the questions the logits are the same to the last bit, and in how many the answers."""
    pairs = list(zip(found, wanted, strict=True))
    equal = sum(np.array_equal(one.logits, other.logits) for one, other in pairs)
    return f"{equal} / {sum(one.text == other.text for one, other in pairs)} of {len(pairs)}"


def ask(path: Path) -> list[str]:
    """Ask the questions: spliced and exact where the skill was compiled, exact after another text; and how far the
    logits are apart if the first prompt is decoded in one batch, the control."""
    questions = next(one for one in load_tasks() if one.skill == SKILL).questions[:QUESTIONS]
    with tempfile.TemporaryDirectory() as home, notes.open(path, paths=Paths.under(Path(home))) as model:
        workspace = model.workspace
        text = (SKILLS / SKILL / "SKILL.md").read_text(encoding="utf-8").partition(REST)[0]
        segment = compile_skill(workspace, Skill(SKILL, "", text, (), "-"))
        prompts = [Prompt(question.ask, [segment]) for question in questions]
        wanted = answers(workspace, prompts, splice=False)
        found = [compared(answers(workspace, prompts, exact=exact), wanted) for exact in (False, True)]
        after = [replace(prompt, system=SYSTEM) for prompt in prompts[:ELSEWHERE]]
        found.append(compared(answers(workspace, after, exact=True), answers(workspace, after, splice=False)))
        tokens = assemble(workspace, prompts[0], splice=False, dry=True).tokens
        workspace.context.clear()
        with workspace.sequence() as sequence:
            sequence.append(tokens)
            apart = float(np.abs(sequence.logits() - wanted[0].logits).max())
    return [*found, f"{apart:.2g}"]


def random_tokens(path: Path) -> tuple[bool, bool]:
    """True if a splice has the bits of decoding its tokens in the same batches; and so has one batch of all."""
    random = np.random.default_rng(1)
    with Model(path) as model, Context(model, ContextOptions(n_ctx=512, n_threads=2)) as context:
        left, skill, question = (random.integers(0, model.n_vocab, count).astype(np.int32) for count in (5, 103, 7))

        def decoded(append: Callable[[KVSequence], object]) -> Logits:
            context.clear()
            with KVSequence(context) as sequence:
                sequence.append(left)
                append(sequence)
                sequence.append(question)
                return sequence.logits().copy()

        with KVSequence(context) as sequence:
            sequence.append(left)
            sequence.flush()
            sequence.append_skill(skill)
            sequence.flush()
            rows = context.read(sequence.seq_id, len(left), len(skill), base=len(left))
        identity = context.identity("")
        segment = Segment("skill", "", "", skill, len(left), left, (), identity, rows)
        wanted = decoded(lambda sequence: sequence.append_skill(skill))
        spliced = decoded(lambda sequence: sequence.splice(segment))
        whole = decoded(lambda sequence: sequence.append(skill))
        return np.array_equal(spliced, wanted), np.array_equal(whole, wanted)


def rows(types: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield a row of each type for SmolLM2, and one for the zoo."""
    with notes.open("smollm2") as model:
        source = model.workspace.model.path
    folder = ROOT / "build" / "quantized"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.gguf"
    for kind in types:
        large = " | ".join((kind, quantize(source, kind, path), *ask(path)))
        matrices, found = dict[str, str](), dict[str, tuple[bool, bool]]()
        for name in ZOO:
            matrices[name] = quantize(ROOT / "build" / "zoo" / "models" / f"{name}.gguf", kind, path)
            found[name] = random_tokens(path)
        small = " | ".join((kind, matrices[ZOO[0]], *(named(found, which) for which in (0, 1))))
        print(time.strftime("%H:%M:%S"), large, small, sep="\n", file=sys.stderr, flush=True)
        path.unlink()
        yield large, small


def named(found: dict[str, tuple[bool, bool]], which: int) -> str:
    """How many of the models are equal, and the names of the others."""
    others = [name for name, equal in found.items() if not equal[which]]
    return f"{len(found) - len(others)} of {len(found)}" + (f" (not {', '.join(others)})" if others else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Find the types of weights whose splices have the bits of a prefill.")
    parser.add_argument("--type", choices=TYPES, action="append", help="one type alone; repeatable")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between this page's marks")
    given = parser.parse_args()
    large, small = zip(*rows(tuple(given.type or TYPES)), strict=True)
    head = "file | its matrices | spliced | `--exact` | `--exact` after another text | apart in one batch"
    zoo = f"file | matrices of {ZOO[0]} | models with equal bits, spliced | in one batch"
    text = f"\n\n{grid(head, large)}\n\n{grid(zoo, small)}\n\n"
    print(text)
    if given.write:
        put_between(given.write, BEGIN, END, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
