"""What the start knows before any step, part by part: `python -m training.tiny.look [tiny.pt] [--texts 60]`.

For each kind of rule: in how many texts an outcome whose condition holds is told from those whose does not by a clear
margin, alone and after an older version of the policy; in how many layer 4 finds the outcome that a value means,
where an erratum ends and where a field's line below the rules does; and in how many a thought names its field.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from training import model
from training.tiny import tokenizer, world
from training.tiny.train import build, shape_of
from training.tiny.wiring import SINGLE
from training.tokenizer import Encoder
from training.world import REASON_CUE, REPLY, SYSTEM, USER

CLEAR = 0.15  # of a number that is 1 where a condition holds, and less than 0 where it does not
LAYER = 4  # where conditions are concluded


class Look:
    """A net, and what is in its stream after a layer."""

    def __init__(self, net: model.Tiny, encoder: Encoder) -> None:
        self.net, self.encoder = net, encoder

    @torch.no_grad()
    def stream(self, ids: list[int]) -> list[torch.Tensor]:
        """After every layer, (tokens, width) each."""
        at, view = torch.arange(len(ids))[None], model.View(torch.tensor([len(ids)]), len(ids), 0, 0)
        return [layer[0] for layer in self.net.hidden(torch.tensor([ids]), at, view)]

    @torch.no_grad()
    def attention(self, ids: list[int], head: int, position: int) -> torch.Tensor:
        """What a head of the layer weighs each position up to this one with."""
        s, block = self.net.shape, self.net.blocks[LAYER]
        assert isinstance(block, model.Block)
        h = F.rms_norm(self.stream(ids)[LAYER - 1], (s.width,), block.attn_norm, s.eps)[: position + 1]
        angle = torch.arange(position + 1)[:, None, None] * self.net.theta
        key = block.k(h).view(-1, s.kv_heads, s.head)[:, [head * s.kv_heads // s.heads]]
        query = block.q(h[-1:]).view(1, s.heads, s.head)[:, [head]]
        keys = model.rotate(key, angle.cos(), angle.sin())[:, 0]
        asked = model.rotate(query, angle[-1:].cos(), angle[-1:].sin())[0, 0]
        return (keys @ asked * s.head**-0.5).softmax(0)

    def places(self, ids: list[int], text: str) -> list[int]:
        """Where each occurrence of a text ends: the position after it."""
        wanted = self.encoder.encode(text)
        return [i + len(wanted) for i in range(len(ids) - len(wanted) + 1) if ids[i : i + len(wanted)] == wanted]

    def outcomes(self, ids: list[int], case: world.Case, outcome: str) -> list[int]:
        """The positions of the first pieces of an outcome of the asked rule."""
        pieces = len(self.encoder.encode(f" {outcome}"))
        return [end - pieces for end in self.places(ids, f" {case.rule.topic} is {outcome}")]

    def tells(self, case: world.Case, older: bool) -> bool:
        """Whether outcomes that hold are told from those that do not, in the text or the later of two versions."""
        newer = {**case.draft.values, case.rule.field: case.new}
        before = self.encoder.encode(SYSTEM + (case.draft.text(newer) + "\n\n" if older else ""))
        ids = self.encoder.encode(SYSTEM + (case.draft.text(newer) + "\n\n" if older else "") + case.draft.text())
        said = self.stream(ids)[LAYER][:, SINGLE.index("holds") - len(SINGLE)]
        found: dict[bool, list[float]] = {True: [], False: []}
        for outcome in case.rule.choices:
            for place in self.outcomes(ids, case, outcome):
                if place >= len(before) and self.row(ids, case, place) is not None:
                    found[self.row(ids, case, place) is True].append(float(said[place]))
        return bool(found[True] and found[False]) and min(found[True]) - max(found[False]) > CLEAR

    def row(self, ids: list[int], case: world.Case, place: int) -> bool | None:
        """Whether the condition before this outcome holds; None if it is none of the rule's."""
        rows = case.rule.table or ((case.old, case.rule.yes), (case.old, case.rule.no))
        for value, outcome in rows:
            if case.rule.kind == "table":
                tail = f" is {value} then the {case.rule.topic} is {outcome}"
            else:
                tail = f"{' then' if outcome == case.rule.yes else ' otherwise'} the {case.rule.topic} is {outcome}"
            if place + len(self.encoder.encode(f" {outcome}")) in self.places(ids, tail):
                return value == case.old if case.rule.kind == "table" else outcome == case.right[0]
        return None

    def finds(self, case: world.Case, below: bool) -> bool:
        """Whether the outcome that a value means has most of the weight where the value ends."""
        name, old, new = case.rule.field, case.old, case.new
        line, sentence = f"{name}: {old}", f"Correction: the {name} is now {new}."
        text = case.draft.text(below=True) + "\n" if below else f"{case.draft.text()}\n\n{sentence}"
        ids = self.encoder.encode(SYSTEM + text)
        position = self.places(ids, line)[-1] if below else len(ids) - 1
        s = self.net.shape
        head = s.heads // s.kv_heads + (case.rule.kind != "table")
        weights = self.attention(ids, head, position)
        wanted = [place for place in self.outcomes(ids, case, case.right[not below]) if place < len(weights)]
        return max((float(weights[place]) for place in wanted), default=0.0) > 0.5

    @torch.no_grad()
    def names(self, case: world.Case) -> bool:
        """Whether a thought about a topic is likelier to begin with its field than with another one of the text."""
        asked = USER + world.TAILED[0].format(topic=case.rule.topic) + REASON_CUE + REPLY
        ids = [*self.encoder.encode(SYSTEM + case.draft.text() + asked), *self.encoder.encode("The")]
        said = self.net.logits(self.stream(ids)[-1][-1])
        begins = {name: float(said[self.encoder.encode(f" {name}")[0]]) for name in case.draft.values}
        return max(begins, key=begins.__getitem__) == case.rule.field


def figures(look: Look, texts: int) -> Iterator[str]:
    """A line for each kind of rule."""
    for kind in world.KINDS:
        level = world.Level(rules=(1, 2), rows=(2, 3), kinds=(kind,), whole=0.3, below=0.0)
        cases = world.cases(texts, level, "look", held=False)

        def share(found: list[bool]) -> str:
            return f"{sum(found) / len(found):.2f}"

        yield (
            f"{kind:7} told: {share([look.tells(case, False) for case in cases])}, after an older version: "
            f"{share([look.tells(case, True) for case in cases])}; found from an erratum: "
            f"{share([look.finds(case, False) for case in cases])}, from a line below: "
            f"{share([look.finds(case, True) for case in cases])}; a thought's field: "
            f"{share([look.names(case) for case in cases])}  of {len(cases)}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a tiny.pt; the start itself, without one")
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the start")
    args = parser.parse_args()
    torch.set_num_threads(1)
    made = tokenizer.make()
    encoder = Encoder(made)
    if args.checkpoint:
        found = torch.load(args.checkpoint, map_location="cpu")
        net = model.Tiny(model.Shape(**found["shape"]))
        net.load_state_dict(found["state"])
    else:
        net = build(encoder, shape_of(made), args.seed)
    for line in figures(Look(net, encoder), args.texts):
        print(line, flush=True)


if __name__ == "__main__":
    main()
