"""Accuracy on held-out decisions, in PyTorch (checkpoint) or in llama.cpp (the file)."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training import world
from training.world import REPLY, SYSTEM, USER

HERE = Path(__file__).resolve().parent
GGUF = HERE / "notes-reversed-q8_0.gguf"
CONDITIONS = ("plain", "erratum", "corrected")
Logits = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""Token ids -> logits after every token."""


def pieces(case: world.Case, condition: str, cue: str, preamble: str = "") -> list[str]:
    """The prompt of a case as pieces that are tokenised apart."""
    skills = list(case.skills)
    if condition == "corrected":
        skills[case.target] = case.corrected
    said = [SYSTEM + preamble]
    for i, skill in enumerate(skills):
        said += ["\n\n"] * bool(i) + [skill.text]
    if condition == "erratum":
        form = next(iter(world.wordings().values()))
        said.append("\n\n" + form.format(field=case.field, value=case.new))
    return [*said, USER + case.question + cue + REPLY]


def expected(case: world.Case, condition: str) -> str:
    """The right outcome (of the old value, unless the prompt states the new one)."""
    return case.answer_new if condition in ("erratum", "corrected") else case.answer


class Reader:
    """A model that scores tokens: a tokenizer and logits."""

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        logits: Logits,
        end: int,
    ) -> None:
        self.encode, self.decode, self.logits, self.end = encode, decode, logits, end

    def ids(self, parts: Sequence[str]) -> list[int]:
        """Token ids, piece by piece."""
        return [i for part in parts for i in self.encode(part)]

    def choose(self, prompt: list[int], choices: Sequence[str]) -> str:
        """The choice with the best log-probability of all its tokens."""
        best = ("", -np.inf)
        for choice in choices:
            answer = list(self.encode(choice))
            rows = self.logits(prompt + answer)[len(prompt) - 1 : -1].astype(np.float64)
            top = rows.max(-1, keepdims=True)
            logp = rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))
            score = float(sum(logp[n, i] for n, i in enumerate(answer)))
            best = max(best, (choice, score), key=lambda pair: pair[1])
        return best[0]

    def generate(self, prompt: list[int], most: int = 48) -> str:
        """Greedy answer."""
        said: list[int] = []
        while len(said) < most:
            token = int(self.logits(prompt + said)[-1].argmax())
            if token == self.end:
                break
            said.append(token)
        return self.decode(said)


def torch_reader(work: Path) -> Reader:
    """The checkpoint."""
    import torch

    from training import model, tokenizer

    found = torch.load(work / "tiny.pt")
    net = model.Tiny(model.Shape(**found["shape"]))
    net.load_state_dict(found["state"])
    encoder = tokenizer.load(work / "tokenizer.json")

    def logits(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(net(torch.tensor([list(ids)]))[0].numpy())

    return Reader(encoder.short, lambda ids: encoder.tokenizer.decode(list(ids)), logits, tokenizer.END)


def llama_reader(path: Path) -> Reader:
    """The GGUF file in llama.cpp (f16 cache). Shared prefixes are kept between calls."""
    from notes_cli.engine.context import Context
    from notes_cli.engine.model import Model
    from notes_cli.engine.options import ContextOptions

    model = Model(path, gpu_layers=0)
    context = Context(model, ContextOptions(n_ctx=2048, n_threads=1))
    end = int(model.metadata("tokenizer.ggml.eos_token_id") or -1)
    state: list[int] = []
    rows: list[npt.NDArray[np.float32]] = []  # by token of `state`

    def logits(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        same = 0
        while same < min(len(ids), len(state)) and ids[same] == state[same]:
            same += 1
        same = min(same, len(ids) - 1)
        context.truncate(0, same)
        context.append({0: np.array(ids[same:], np.int32)}, "all")
        rows[same:] = [context.logits(index) for index in range(len(ids) - same)]
        state[:] = ids
        return np.array(rows)

    return Reader(lambda piece: model.tokenize(piece, special=True), model.text, logits, end)


def measure(reader: Reader, cases: Sequence[world.Case]) -> dict[tuple[str, ...], list[bool]]:
    """Right or wrong, by (how, condition, kind, number of skills)."""
    found: dict[tuple[str, ...], list[bool]] = defaultdict(list)
    for case in cases:
        for condition in CONDITIONS:
            right = expected(case, condition)
            plain = reader.ids(pieces(case, condition, ""))
            cued = reader.ids(pieces(case, condition, world.REASON_CUE))
            hits = {
                "direct": reader.generate(plain, 4) == right,
                "choice": reader.choose(plain, case.choices) == right,
                "reason": world.decision(reader.generate(cued), case.choices) == right,
            }
            for how, hit in hits.items():
                found[(how, condition, case.kind, str(len(case.skills)))].append(hit)
    return found


def table(found: dict[tuple[str, ...], list[bool]]) -> str:
    """The measurements as Markdown."""
    lines = [
        "| how | condition | all | table | date | amount | 1 skill | 2 skills | 3 skills |",
        "| --- " * 9 + "|",
    ]
    for how in ("direct", "choice", "reason"):
        for condition in CONDITIONS:
            cells = []
            for column in ("", "table", "date", "amount", "1", "2", "3"):
                hits = [h for k, v in found.items() if k[:2] == (how, condition) and column in ("", *k[2:]) for h in v]
                cells.append(f"{sum(hits) / len(hits):.3f}" if hits else "-")
            lines.append(f"| {how} | {condition} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=360)
    parser.add_argument("--seed", type=int, default=20260614)
    parser.add_argument("--gguf", type=Path, default=GGUF)
    parser.add_argument("--work", type=Path, help="evaluate the checkpoint in this folder with PyTorch instead")
    args = parser.parse_args()
    reader = torch_reader(args.work) if args.work else llama_reader(args.gguf)
    print(table(measure(reader, world.held_out(args.cases, args.seed))))


if __name__ == "__main__":
    main()
