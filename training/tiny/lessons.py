"""Batches to train on: texts, and for each text branches of question and answer turns that do not see each other."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training import policies
from training.policies import REPLY, SYSTEM, USER
from training.tiny import world
from training.tokenizer import END, Encoder

KINDS = tuple(
    ["none"]
    + [f"{how} {kind}" for how in ("direct", "changed", "reason", "rethink") for kind in world.KINDS]
    + ["what if", "recall", "recall changed", "cannot", "compare", "rest"]
)
KIND = {name: i for i, name in enumerate(KINDS)}
PLAIN = 0.1
# Errata in which the value comes right after "is", "is now" or ":", and the field before it. What is said otherwise no
# layer of the start finds, and they do not learn to: it would only teach that errata are not to be relied on.
SAYS = re.compile(r"\{field\}(?: is(?: now)?|:) \{value\}")
WORDINGS, MORE_WORDINGS = (
    tuple(form for form in forms if SAYS.search(form))
    for forms in (policies.wordings().values(), (*policies.EXTRA_WORDINGS, *policies.OLD_WORDINGS))
)


@dataclass(frozen=True)
class Mix:
    """How often a branch does what."""

    reason: float = 0.1
    recall: float = 0.1
    cannot: float = 0.0
    compare: float = 0.0
    suppose: float = 0.25  # of thoughts: about a value that only the question has
    errata: float = 0.5
    default: float = 0.8  # errata in the default wording
    longest: int = 92


@dataclass
class Branch:
    """Token ids after the text, and how much predicting each of them counts, and as what."""

    ids: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float = 0.0, kind: int = 0, rest: float = -1.0) -> None:
        """Append tokens. With `rest`, those after the first one count so much and as the rest of a word."""
        if self.ids and self.ids[-1] == END and ids[0] == END:
            ids = ids[1:]
        for i, one in enumerate(ids):
            later = i > 0 and rest >= 0
            self.ids.append(one)
            self.weight.append(rest if later else weight)
            self.kind.append(KIND["rest"] if later else kind)


@dataclass
class Batch:
    """Arrays of one step: B texts, K branches each."""

    prefix: npt.NDArray[np.int64]  # B, P
    prefix_len: npt.NDArray[np.int64]  # B
    branch: npt.NDArray[np.int64]  # B, K, L
    weight: npt.NDArray[np.float32]  # B, K, L: of predicting the token that is here
    kind: npt.NDArray[np.int64]


class Teacher:
    """Draws texts and branches."""

    def __init__(self, encoder: Encoder, seed: str) -> None:
        self.encoder = encoder
        self.rng = random.Random(seed)

    def erratum(self, name: str, old: str, new: str, mix: Mix) -> str:
        """A correction in one of the wordings."""
        rng, pick = self.rng, self.rng.random()
        if pick < mix.default:
            form = WORDINGS[0]
        elif pick < mix.default + 0.7 * (1 - mix.default):
            form = rng.choice(WORDINGS)
        else:
            form = rng.choice(MORE_WORDINGS)
        return form.format(field=name, value=new, old=old)

    def another(
        self, drafts: Sequence[world.Draft], values: dict[str, str], wanted: policies.Rule, level: world.Level
    ) -> tuple[str, str]:
        """A field, mostly the one of the wanted rule, and a value other than its own."""
        rng = self.rng
        name = wanted.field if rng.random() < 0.8 else rng.choice(list(values))
        about = [r for d in drafts for r in d.rules if r.field == name]
        rule = rng.choice(about) if about else None
        if wanted.field == name:
            rule = wanted
        kind = next(d.kinds[name] for d in drafts if name in d.kinds)
        names = world.Names(rng, False, level)
        old = new = values[name]
        # Half of the changes about limits leave the answer: else "the other one" is right without reading the limit.
        flip = kind == "table" or rng.random() < 0.5
        for _ in range(8):
            new = world.make_value(rng, names, kind, rule, level, old)
            if rule is None or (rule.outcome(new) != rule.outcome(old)) == flip:
                break
        return name, new

    def change(
        self, drafts: Sequence[world.Draft], values: dict[str, str], wanted: policies.Rule, level: world.Level, mix: Mix
    ) -> str:
        """Change a field in `values`, and return its erratum."""
        name, new = self.another(drafts, values, wanted, level)
        old, values[name] = values[name], new
        return self.erratum(name, old, new, mix)

    def branch(self, drafts: Sequence[world.Draft], level: world.Level, mix: Mix) -> Branch:
        """Turns until the length is used up: errata, mostly one, and a question."""
        rng, enc = self.rng, self.encoder.short
        rules = [r for d in drafts for r in d.rules]
        values = {k: v for d in drafts for k, v in d.values.items()}
        before = dict(values)
        out = Branch()
        while True:
            rule = rng.choice(rules)
            opening = USER
            if rng.random() < (mix.errata if not out.ids else 0.5 * mix.errata):
                count = 1 if rng.random() < 0.8 else 2
                errata = [self.change(drafts, values, rule, level, mix) for _ in range(count)]
                if not out.ids and rng.random() < 0.8:
                    for text in errata:
                        out.add(enc("\n\n" + text))
                else:
                    out.add(enc(USER + "\n\n".join(errata)))
                    opening = "\n\n"
                    if rng.random() < 0.2:
                        out.add(enc(REPLY))
                        out.add(enc("Noted."), PLAIN)
                        out.add(enc("<|im_end|>"), PLAIN)
                        opening = USER
            self.turn(out, drafts, rule, values, before, mix, level, opening)
            if len(out.ids) > mix.longest - 22:
                return out

    def turn(
        self,
        out: Branch,
        drafts: Sequence[world.Draft],
        rule: policies.Rule,
        values: dict[str, str],
        before: dict[str, str],
        mix: Mix,
        level: world.Level,
        opening: str,
    ) -> None:
        """One question and its answer."""
        rng, enc = self.rng, self.encoder.short
        pick = rng.random()
        shares = (mix.recall, mix.cannot, mix.compare, mix.reason)
        case = next((i for i in range(4) if pick < sum(shares[: i + 1])), 4)
        changed = values[rule.field] != before[rule.field]

        def put(question: str) -> None:
            out.add(enc(opening + question + REPLY))

        if case == 0:
            name = rng.choice(list(values)) if rng.random() < 0.5 else rule.field
            put(rng.choice(policies.RECALL).format(field=name))
            again = values[name] != before[name]
            out.add(enc(values[name]), 0.7, KIND["recall changed" if again else "recall"], rest=0.3)
        elif case == 1:
            names = world.Names(rng, False, level, set(values) | {rule.topic})
            if rng.random() < 0.5:
                put(rng.choice(world.TAILED).format(topic=names.draw()))
            else:
                put(rng.choice(world.ODD).format(word=names.draw()))
            out.add(enc(world.CANNOT), 1.0, KIND["cannot"], rest=PLAIN)
        elif case == 2:
            kind = rng.choice(("date", "amount"))
            limit = policies.make_date(rng) if kind == "date" else world.make_amount(rng)
            made = policies.Rule(kind, "", "", limit=limit)
            given = world.near_to(rng, kind, limit, rng.random() < level.near)
            put(f"Is {given} {made.relation} {limit}?")
            out.add(enc("yes" if made.holds(given) else "no"), 1.0, KIND["compare"])
        elif case == 3:
            question, named = world.ask(rng, rule), KIND[("rethink " if changed else "reason ") + rule.kind]
            if rng.random() < mix.suppose:
                # Notes and errata know nothing of this value: the thought alone says what follows from it.
                name, value = self.another(drafts, values, rule, level)
                values, named = {**values, name: value}, KIND["what if"]
                question = world.WHAT_IF.format(field=name, value=value) + " " + question
            put(question + rng.choice(policies.REASON_CUES))
            for text, counts in world.thought(rule, values[rule.field]):
                out.add(enc(text), 1.0 if counts else PLAIN, named if counts else 0, rest=0.3 if counts else PLAIN)
        else:
            value, named = values[rule.field], KIND[("changed " if changed else "direct ") + rule.kind]
            put(world.ask(rng, rule))
            out.add(enc(rule.outcome(value)), 1.5, named, rest=0.3)
        out.add(enc("<|im_end|>"), PLAIN)

    def prefix(self, drafts: Sequence[world.Draft], level: world.Level) -> list[int]:
        """The system message up to the end of the skills, perhaps with an older version of the first before it."""
        rng = self.rng
        opening = SYSTEM
        if rng.random() < level.preamble:
            opening += rng.choice(policies.PREAMBLES).format(org=policies.make_org(rng, False)) + "\n\n"
        texts = [d.text() for d in drafts]
        if rng.random() < level.versions:
            old = drafts[0]
            values = dict(old.values)
            for rule in old.rules:
                values[rule.field] = world.make_value(rng, world.Names(rng, False, level), rule.kind, rule, level)
            texts.insert(0, old.text(values))
        ids = list(self.encoder.short(opening))
        for i, text in enumerate(texts):
            ids += self.encoder.short("\n\n") if i else ()
            ids += self.encoder.encode(text)
        return ids

    def batch(self, size: int, branches: int, level: world.Level, mix: Mix, longest: int) -> Batch:
        """Draw one batch. A text longer than `longest` tokens is drawn again."""
        texts: list[list[int]] = []
        sets: list[list[Branch]] = []
        while len(texts) < size:
            drafts = world.make_drafts(self.rng, level)
            ids = self.prefix(drafts, level)
            if len(ids) > longest:
                continue
            mine: list[Branch] = []
            while len(mine) < branches:
                one = self.branch(drafts, level, mix)
                if len(one.ids) <= mix.longest:
                    mine.append(one)
            texts.append(ids)
            sets.append(mine)
        width, length = max(map(len, texts)), max(len(b.ids) for row in sets for b in row)
        prefix = np.zeros((size, width), np.int64)
        branch = np.zeros((size, branches, length), np.int64)
        weight = np.zeros((size, branches, length), np.float32)
        kind = np.zeros((size, branches, length), np.int64)
        for b, ids in enumerate(texts):
            prefix[b, : len(ids)] = ids
            for k, one in enumerate(sets[b]):
                n = len(one.ids)
                branch[b, k, :n], weight[b, k, :n], kind[b, k, :n] = one.ids, one.weight, one.kind
        return Batch(prefix, np.array([len(t) for t in texts]), branch, weight, kind)
