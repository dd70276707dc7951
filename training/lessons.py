"""Batches to train on: texts, and for each text several independent branches of question and answer turns.

A branch continues the text alone (it sees no other branch), as if it were a prompt of its own. One text thus
pays for many decisions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from training import world
from training.tokenizer import END, Encoder
from training.world import REPLY, SYSTEM, USER

KINDS = (
    "none",
    "direct table",
    "direct date",
    "direct amount",
    "reason table",
    "reason date",
    "reason amount",
    "recall",
    "given",
    "field",
    "compare",
    "other",
)
KIND = {name: i for i, name in enumerate(KINDS)}
PLAIN_WEIGHT = 0.1
ALL_WORDINGS = tuple(world.wordings().values())


@dataclass
class Mix:
    """How often a branch does what."""

    reason: float = 0.35
    recall: float = 0.08
    given: float = 0.12
    field: float = 0.08
    compare: float = 0.05
    errata: float = 0.6
    length: int = 52
    longest: int = 62


@dataclass
class Branch:
    """Token ids after the text, and what to learn of them."""

    ids: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    hints: list[tuple[int, ...]] = field(default_factory=list)  # position, field, value x 3, limit x 3, condition

    def add(self, ids: Sequence[int], weight: float = 0.0, kind: int = 0) -> None:
        """Append tokens; `weight` and `kind` say how much predicting them counts, and as what."""
        if self.ids and self.ids[-1] == END and ids[0] == END:
            ids = ids[1:]  # the answer's end opens the next turn
        self.ids += ids
        self.weight += [weight] * len(ids)
        self.kind += [kind] * len(ids)


@dataclass
class Batch:
    """Arrays of one training step (B texts, K branches each)."""

    prefix: npt.NDArray[np.int64]  # B, P
    prefix_at: npt.NDArray[np.int64]  # positions
    prefix_len: npt.NDArray[np.int64]  # B
    branch: npt.NDArray[np.int64]  # B, K, L
    branch_at: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]  # B, K, L: of predicting the token here
    kind: npt.NDArray[np.int64]
    hints: npt.NDArray[np.int64]  # N, 3 + 8: b, k, position, field, value x 3, limit x 3, condition


class Teacher:
    """Draws texts and branches."""

    def __init__(self, encoder: Encoder, seed: str) -> None:
        self.encoder = encoder
        self.rng = random.Random(seed)
        self.far = True

    def value_ids(self, kind: str, value: str) -> tuple[int, int, int]:
        """A value as three token ids (year, month, day; or one and padding)."""
        word = self.encoder.word
        if kind == "date":
            year, month, day = value.split("-")
            return word(" " + year), word(month), word(day)
        return word(" " + value), -1, -1

    def erratum(self, name: str, old: str, new: str) -> str:
        """A correction in one of the wordings; the default one half of the time."""
        pick = self.rng.random()
        if pick < 0.45:
            form = ALL_WORDINGS[0]
        elif pick < 0.8:
            form = self.rng.choice(ALL_WORDINGS)
        elif pick < 0.9:
            form = self.rng.choice(world.EXTRA_WORDINGS)
        else:
            form = self.rng.choice(world.OLD_WORDINGS)
        return form.format(field=name, value=new, old=old)

    def change(self, values: dict[str, str], rules: Sequence[world.Rule], wanted: world.Rule | None) -> str:
        """Change a field (of the wanted rule, mostly) in `values` and return the erratum."""
        rng = self.rng
        name = wanted.field if wanted is not None and rng.random() < 0.8 else rng.choice(list(values))
        about = [r for r in rules if r.field == name]
        kind = world.kind_of(name)
        rule = rng.choice(about) if about else None
        old = values[name]
        new = old
        if kind == "table" and about:
            known = [v for v, _ in about[0].table if v != old and all(v in dict(r.table) for r in about)]
            if not known:
                return self.erratum(name, old, old)
            new = rng.choice(known)
        else:
            for _ in range(8):
                new = world.other_value(rng, kind, name, old, rule, self.far)
                if rule is None or rule.outcome(new) != rule.outcome(old) or rng.random() < 0.25:
                    break
        values[name] = new
        return self.erratum(name, old, new)

    def short_branch(self, drafts: Sequence[world.Draft], mix: Mix) -> Branch:
        """A branch that does not make the whole batch wide, mostly."""
        while True:
            branch = self.branch(drafts, mix)
            if len(branch.ids) <= mix.longest:
                return branch

    def branch(self, drafts: Sequence[world.Draft], mix: Mix) -> Branch:
        """One branch: errata, then turns until the length is used up."""
        rng, enc = self.rng, self.encoder.short
        rules = [r for d in drafts for r in d.rules]
        values = {k: v for d in drafts for k, v in d.skill.fields.items()}
        out = Branch()
        first = True
        while True:
            rule = rng.choice(rules)
            errata: list[str] = []
            if rng.random() < mix.errata * (1.0 if first else 0.6):
                errata = [
                    self.change(values, rules, rule) for _ in range(1 if rng.random() < 0.75 else rng.randint(2, 3))
                ]
            behind_skills = first and rng.random() < 0.8
            if errata and behind_skills:
                for text in errata:
                    out.add(enc("\n\n" + text))
            if errata and not behind_skills:
                out.add(enc(USER))
                out.add(enc(errata[0]))
                for text in errata[1:]:
                    out.add(enc("\n\n" + text))
                if rng.random() < 0.15:
                    out.add(enc(REPLY))
                    out.add(enc("Noted."), PLAIN_WEIGHT, KIND["other"])
                    out.add(enc("<|im_end|>"), PLAIN_WEIGHT)
                    self.turn(out, rule, values, rules, mix, USER)
                else:
                    self.turn(out, rule, values, rules, mix, "\n\n")
            else:
                self.turn(out, rule, values, rules, mix, USER)
            first = False
            if len(out.ids) > mix.length - 20 or rng.random() < 0.1:
                return out

    def turn(
        self,
        out: Branch,
        rule: world.Rule,
        values: dict[str, str],
        rules: Sequence[world.Rule],
        mix: Mix,
        opening: str,
    ) -> None:
        """One question and its answer."""
        rng, enc, word = self.rng, self.encoder.short, self.encoder.word

        def put(question: str) -> None:
            out.add(enc(opening + question + REPLY))

        def end() -> None:
            out.add(enc("<|im_end|>"), PLAIN_WEIGHT)

        pick = rng.random()
        shares = (mix.recall, mix.given, mix.field, mix.compare, mix.reason)
        case = next((i for i in range(5) if pick < sum(shares[: i + 1])), 5)
        value = values[rule.field]
        if case == 0:
            name = rng.choice(list(values)) if rng.random() < 0.5 else rule.field
            put(rng.choice(world.RECALL).format(field=name))
            out.add(enc(values[name]), 0.5, KIND["recall"])
            end()
        elif case == 1:
            if rule.kind == "table":
                given = rng.choice(rule.table)[0]
            else:
                given = world.other_value(rng, rule.kind, rule.field, value, rule, self.far)
            put(f"What is the {rule.topic} if the {rule.field} is {given}?")
            self.hint(out, rule, given)
            out.add(enc(rule.outcome(given)), 1.0, KIND["given"])
            end()
        elif case == 2:
            put(f"What decides the {rule.topic}?")
            out.add((word(rule.field),), 0.5, KIND["field"])
            end()
        elif case == 3:
            dates = rng.random() < 0.6
            made = world.Rule(
                "date" if dates else "amount",
                "",
                "",
                limit=world.make_date(rng) if dates else world.make_amount(rng),
            )
            given = world.other_value(rng, made.kind, "", "", made, self.far)
            put(f"Is {given} {made.relation} {made.limit}?")
            out.add((word("yes" if made.holds(given) else "no"),), 1.0, KIND["compare"])
            end()
        elif case == 4:
            put(world.ask(rng, rule) + rng.choice(world.REASON_CUES))
            for text, counts in rule.reason(value):
                out.add(enc(text), 1.0 if counts else PLAIN_WEIGHT, KIND[f"reason {rule.kind}"] if counts else 0)
            end()
        else:
            put(world.ask(rng, rule))
            self.hint(out, rule, value)
            out.add((word(rule.outcome(value)),), 1.5, KIND[f"direct {rule.kind}"])
            end()

    def hint(self, out: Branch, rule: world.Rule, value: str) -> None:
        """What the middle layers should know before the answer: field, value, limit, condition."""
        limit = (-1, -1, -1) if rule.kind == "table" else self.value_ids(rule.kind, rule.limit)
        condition = -1 if rule.kind == "table" else int(rule.holds(value))
        out.hints.append(
            (
                len(out.ids) - 1,
                self.encoder.word(" " + rule.field),
                *self.value_ids(rule.kind, value),
                *limit,
                condition,
            )
        )

    def prefix(self, drafts: Sequence[world.Draft], preamble: float) -> list[int]:
        """The system message up to the end of the skills."""
        rng = self.rng
        opening = SYSTEM
        if rng.random() < preamble:
            opening += rng.choice(world.PREAMBLES).format(org=world.make_org(rng, False)) + "\n\n"
        ids = list(self.encoder.short(opening))
        for i, draft in enumerate(drafts):
            if i:
                ids += self.encoder.short("\n\n")
            ids += self.encoder.encode(draft.skill.text)
        return ids

    def drafts(self, level: world.Level, kinds: Sequence[str], loose: bool) -> list[world.Draft]:
        """The skills of one text."""
        return world.make_drafts(self.rng, level, kinds=kinds, loose=loose)

    def batch(
        self,
        size: int,
        branches: int,
        level: world.Level,
        mix: Mix,
        kinds: Sequence[str] = ("table", "date", "amount"),
        loose: bool = False,
        gaps: float = 0.2,
        longest: int = 560,
    ) -> Batch:
        """Draw one batch; the texts of a batch have the same number of skills, to waste little on padding."""
        rng = self.rng
        self.far = level.far
        count = rng.randint(*level.skills)
        level = replace(level, skills=(count, count))
        texts, starts, sets = [], [], []
        for _ in range(size):
            while True:
                drafts = self.drafts(level, kinds, loose)
                ids = self.prefix(drafts, level.preamble)
                if len(ids) <= longest:
                    break
            texts.append(ids)
            sets.append([self.short_branch(drafts, mix) for _ in range(branches)])
            starts.append((rng.randint(0, 600), rng.randint(0, 600)) if rng.random() < gaps else (0, 0))
        width = max(map(len, texts))
        length = max(len(b.ids) for row in sets for b in row)
        prefix = np.zeros((size, width), np.int64)
        prefix_at = np.zeros((size, width), np.int64)
        branch = np.zeros((size, branches, length), np.int64)
        weight = np.zeros((size, branches, length), np.float32)
        kind = np.zeros((size, branches, length), np.int64)
        branch_at = np.zeros((size, branches, length), np.int64)
        hints: list[tuple[int, ...]] = []
        for b, ids in enumerate(texts):
            prefix[b, : len(ids)] = ids
            # A gap in the positions, as if other text were there.
            cut = rng.randint(1, len(ids))
            prefix_at[b] = np.arange(width) + np.where(np.arange(width) >= cut, starts[b][0], 0)
            branch_at[b] = len(ids) + sum(starts[b]) + np.arange(length)
            for k, one in enumerate(sets[b]):
                n = len(one.ids)
                branch[b, k, :n] = one.ids
                weight[b, k, :n] = one.weight
                kind[b, k, :n] = one.kind
                hints += [(b, k, *h) for h in one.hints]
        return Batch(
            prefix,
            prefix_at,
            np.array([len(t) for t in texts]),
            branch,
            branch_at,
            weight,
            kind,
            np.array(hints or np.zeros((0, 11)), np.int64),
        )
