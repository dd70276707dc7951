"""What single attention heads read and write (H21 of docs/protocol.md): `python -m training.tiny.heads FILE.gguf`.

Two prompts of a case differ in one field's value and decide differently (bench/protocol/measures/mixing.py); fields are
above the rules. The stale one is run with head outputs of the fresh one put into it: a head's part of what the output
projection of its layer gets. All that follows in the same rows and in later ones is computed again from that, later
layers' attention too. Recovery is the protocol's, by log p(new outcome) - log p(old outcome) of the first token that
tells the two apart; pieces that both begin with are part of the question.

* **read**: put in at the question's rows, from the end of the skills on; all rows of the skills are stale. All heads
  together recover exactly 1, since a question's row is its token and what heads brought to it.
* **write**: put in at the rows of the skills after the field; the field's own rows are stale, and the question's are
  computed from what that leaves. All heads together make exactly the mix of H5, whatever that recovers.
* **direct**: as `write`, but all other heads of these rows keep their stale outputs, so that a head counts for what it
  puts into the rows itself. Where heads work one after the other, each of them `write`s all of it, and the last alone
  does so directly.

Weights are those of the file, computed with in f32. Which heads are the top 4 is told by cases of their own, with other
texts ("heads ranked"), by mean recovery alone. Rows are kept where `python -m bench.protocol FILE` finds them. Every
case is checked: nothing put in changes nothing, and `read` by all heads is the fresh run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.experiments.keeping import KeptError
from bench.experiments.table import Row
from bench.protocol import report
from bench.protocol.__main__ import KEPT, Run
from bench.protocol.hypotheses import HYPOTHESES, judge
from bench.protocol.measures import MEASURES, Measure, heads
from bench.protocol.measures.mixing import began, excluded, mixes_of
from bench.protocol.seeds import CommitError, frozen, named
from bench.protocol.texts import WORDS, Next
from bench.resumed import check, goes_on
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.measure.compare import cosine
from notes_cli.measure.probe import Mixes
from notes_cli.runtime.workspace import Workspace
from training import model
from training.tiny.weights import OtherModelError, load

ALIKE = 0.01  # nats that may be between two computations of the same
COSINE = 0.98  # of logits at the end of the stale prompt, least: the engine rounds what it multiplies to 8 bits
AT_ONCE = 8  # branches: they are what takes memory


class WrongError(Exception):
    """A check of the measurement itself failed: no figure of it would mean anything."""


class Recorded(model.View):
    """One plain text. Keeps the head outputs of every layer, (tokens, heads * head) each."""

    def __init__(self, length: int) -> None:
        super().__init__(torch.tensor([length]), length, 0, 0)
        self.outputs: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (1, tokens, heads, head)."""
        out = super().attend(q, k, v)
        self.outputs.append(out[0])
        return out


class Patched(model.View):
    """Branches that go on with one text, each with other head outputs in some of its rows. For one pass."""

    def __init__(self, prefix: int, sets: Tensor, given: Tensor, where: Tensor, held: Tensor | None = None) -> None:
        """After `prefix` tokens, in rows `where` (tokens of a branch; truths): heads of `sets` (branches, layers,
        heads; truths) get the outputs of `given`, all others those of `held`, or their own if there is none. Both are
        (layers, tokens of a branch, heads * head)."""
        super().__init__(torch.tensor([prefix]), prefix, len(sets), len(where))
        self._sets, self._given, self._held = sets, given, held
        self._where = where[None, :, None, None]
        self._layer = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (1, prefix and all branches, heads, head)."""
        text, own = super().attend(q, k, v)[0].split([self.P, self.K * self.L])
        layer, self._layer = self._layer, self._layer + 1
        own = own.view(self.K, self.L, q.shape[2], -1)
        if self._held is not None:
            own = torch.where(self._where, self._held[layer].view_as(own[:1]), own)
        chosen = self._sets[:, layer, None, :, None] & self._where
        own = torch.where(chosen, self._given[layer].view_as(own[:1]), own)
        return torch.cat([text, own.reshape(self.K * self.L, -1)])[None]


@dataclass(frozen=True)
class Pair:
    """Two prompts that decide differently.

    `after`: positions (stale, fresh) of the same tokens, of those of the skills that follow the field. `question`: the
    position in the stale prompt where the skills end. `apart`: the tokens that tell the two outcomes apart, the new one
    first; what both begin with is at the prompts' ends. `logits`: of the engine, where the stale prompt ends without
    that.
    """

    stale: list[int]
    fresh: list[int]
    after: list[tuple[int, int]]
    question: int
    end: int
    apart: tuple[int, int]
    logits: NDArray[np.float32]

    @classmethod
    def of(cls, workspace: Workspace, mixes: Mixes) -> Pair:
        """The prompts of a case, token by token as the engine has them."""
        prompts = []
        for is_fresh in (True, False):
            mixes.recovery([is_fresh] * len(mixes.columns))
            prompts.append([int(token) for token in mixes.notebook.tokens])
        fresh, stale = prompts
        start = next(piece.position for piece in mixes.notebook.pieces if piece.kind == "splice")
        after = [
            (start + column.stale[0], start + column.fresh[0])
            for i, column in enumerate(mixes.columns)
            if i > mixes.first and not column.field
        ]
        end = workspace.model.end_tokens[0]  # "no" against "no one"
        old, new = ([*map(int, workspace.model.tokenize(each)), end] for each in mixes.decisions)
        common = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        return cls(
            stale + old[:common],
            fresh + old[:common],
            after,
            start + len(mixes.stale),
            len(stale),
            (new[common], old[common]),
            mixes.notebook.logits(),
        )

    def rows(self, way: str) -> list[tuple[int, int]]:
        """Positions (stale, fresh) where outputs are put in. Raise WrongError if they are not of the same tokens."""
        shift = len(self.fresh) - len(self.stale)
        rows = [(i, i + shift) for i in range(self.question, len(self.stale))] if way == "read" else self.after
        if any(self.stale[i] != self.fresh[j] for i, j in rows):
            raise WrongError("the two prompts differ in more than the field")
        return rows


class Patching:
    """A pair in PyTorch. `odds` are those of the stale and of the fresh prompt, in nats."""

    @torch.no_grad()
    def __init__(self, net: model.Tiny, pair: Pair) -> None:
        self._net, self._pair = net, pair
        logits, self._stale = self._plain(pair.stale)
        self.cosine = float(cosine(logits[pair.end - 1].numpy(), pair.logits))
        fresh, self._fresh = self._plain(pair.fresh)
        self.odds = self._odds(logits[-1]), self._odds(fresh[-1])

    def _plain(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Logits and head outputs, (tokens, vocabulary) and (layers, tokens, heads * head)."""
        view = Recorded(len(ids))
        last = self._net.hidden(torch.tensor([ids]), torch.arange(len(ids))[None], view)[-1][0]
        return self._net.logits(last), torch.stack(view.outputs)

    def _odds(self, logits: Tensor) -> float:
        new, old = self._pair.apart
        return float(logits[new] - logits[old])

    @torch.no_grad()
    def recoveries(self, way: str, sets: Tensor) -> list[float]:
        """For each of the sets (sets, layers, heads; truths), with fresh outputs of its heads."""
        pair, n = self._pair, len(self._pair.stale)
        rows = pair.rows(way)
        first = rows[0][0]
        given, where = self._stale[:, first:].clone(), torch.zeros(n - first, dtype=torch.bool)
        for i, j in rows:
            where[i - first] = True
            given[:, i - first] = self._fresh[:, j]
        held = self._stale[:, first:] if way == "direct" else None
        found = []
        for part in sets.split(AT_ONCE):
            ids = torch.tensor([pair.stale[:first] + pair.stale[first:] * len(part)])
            at = torch.cat([torch.arange(first), torch.arange(first, n).repeat(len(part))])[None]
            last = self._net.hidden(ids, at, Patched(first, part, given, where, held))[-1][0, first:]
            ends = last.view(len(part), n - first, -1)[:, -1]
            found += [self._recovered(self._odds(logits)) for logits in self._net.logits(ends)]
        return found

    def _recovered(self, odds: float) -> float:
        stale, fresh = self.odds
        return (odds - stale) / (fresh - stale)

    def check(self, way: str, nothing: float, everything: float) -> None:
        """Of a way, the recoveries by no head and by all. Raise WrongError where they cannot be so."""
        bound = ALIKE / (self.odds[1] - self.odds[0])
        if abs(nothing) > bound or (way == "read" and abs(everything - 1) > bound):
            raise WrongError(
                f"{way}: recovery is {nothing:.4f} with nothing put in and {everything:.4f} with all heads: the first "
                f"must be 0, and the second 1 if they read"
            )


def sets_of(net: model.Tiny, order: Sequence[str] = ()) -> tuple[list[str], Tensor]:
    """Names of all heads; and sets (sets, layers, heads; truths): no head, each alone, and the first of the order,
    as many as heads.counts says; only all of them without one."""
    s = net.shape
    names = [f"{layer}.{head}" for layer in range(s.layers) for head in range(s.heads)]
    single = torch.eye(len(names), dtype=torch.bool)
    places = [names.index(name) for name in order]
    wanted = heads.counts(len(names)) if order else [len(names)]
    several = [single[places[:count] or slice(None)].any(0) for count in wanted]
    every = torch.stack([torch.zeros_like(single[0]), *single, *several])
    return names, every.view(-1, s.layers, s.heads)


def measure(
    net: model.Tiny,
    experiment: str,
    orders: Mapping[str, Sequence[str]],
    workspace: Workspace,
    cases: int,
    texts: Next,
) -> Iterator[Row]:
    """Rows of cases: what each head recovers alone, by which they are ranked; with `orders`, the ranking of each way,
    what the first of them recover together. Raise WrongError where the model is not the one that the engine runs."""
    for number, case in texts.cases(experiment, cases):
        row = excluded(number, case)
        for mixes in mixes_of(workspace, case):
            engine = mixes.after_only()
            begun = began(number, case, mixes)
            patching = Patching(net, Pair.of(workspace, mixes))
            stale, fresh = patching.odds
            if patching.cosine < COSINE:
                raise WrongError(
                    f"case {number}: logits are not those of the engine, their cosine is {patching.cosine}"
                )
            if not stale < fresh:
                continue  # the first token alone decides alike
            row = begun | {"cosine": patching.cosine, "as the engine": stale < 0 < fresh, "engine": engine}
            for way in heads.WAYS:
                names, sets = sets_of(net, orders.get(way, ()))
                nothing, *rest = patching.recoveries(way, sets)
                patching.check(way, nothing, rest[-1])
                alone = dict(zip(names, rest, strict=False))
                several = rest[len(names) :]
                row |= heads.together(way, orders[way], alone, several) if orders else heads.alone(way, alone)
        yield row


@goes_on(NotesError, CommitError, KeptError, OtherModelError, WrongError, heads.NoCasesError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog=heads.BY, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="FILE", help="GGUF to measure, of training/tiny")
    parser.add_argument("--cases", type=int, help="to rank heads by, and as many to measure (default: the protocol's)")
    parser.add_argument("--commit", help="that last changed docs/protocol.md before the first figure (default: git's)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder that rows are kept in (default: %(default)s)")
    given = parser.parse_args(arguments)
    check(parser, given.cases)
    torch.set_num_threads(given.threads)
    commit = named(given.commit) if given.commit else frozen()
    needed = MEASURES[heads.MEASURED].cases
    with Workspace(given.model, ContextOptions(n_ctx=4096, n_threads=given.threads)) as workspace:
        net = load(workspace.model.path)
        run = Run(workspace, commit, given.cases, given.keep, None)
        for words in WORDS:
            rows = partial(measure, net, heads.RANKING, {})
            ranking = run.measured(heads.RANKING, words, Measure(rows, needed))
            orders = {way: heads.ranked(ranking, way) for way in heads.WAYS}
            rows = partial(measure, net, heads.MEASURED, orders)
            table = run.measured(heads.MEASURED, words, Measure(rows, needed), {"ranking": json.dumps(orders)})
            found = report.as_json(judge(HYPOTHESES["H21"], words, {heads.MEASURED: table}))
            print("\n".join(report.lines(found)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
