"""Prompts in which values have changed: no answer may come from an old value.

A case is a story: a text with rules and values, which is compiled, or was learned from an earlier prompt; then prompts
in which it is edited, quoted, repeated, moved or cut. Each prompt is answered with what the server reuses, and with
`exact`. Its decision is one of an old value if only the first answer is the one that a former value gives, and if it
changes when another value is put in place of the former one, in all that came before the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.faults.frame import ACCEPTED, Kind, chance, check
from bench.in_process import Json, events_of, wait_until_idle
from notes_cli.config import Paths, shipped_model
from notes_cli.engine.limits import ContextOptions
from notes_cli.library.models import SMOLLM2
from notes_cli.runtime.prefix_cache import Reuse
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.request import Prefilled, Text
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.prepare import Options
from notes_cli.serve.scheduler import DecodeThread
from notes_cli.text.skill import parse_skill
from training import policies
from training.tiny import world

NAME = "policy"
PROMPTS = 4  # of a story
CONTEXT = 8192
WAYS: tuple[Reuse, ...] = ("compiled", "learned")  # by which the text is known before it is changed
SURE = 0.8  # probability of the exact answer's first token; a decision nearer to a tie is not judged
LEVEL = world.Level(
    skills=(1, 3), rules=(1, 3), fillers=(0, 3), heading=1.0, kinds=("table", "date", "amount"), near=0.0, sample=1.0
)
DAYS = ("Monday", "Tuesday", "Friday")


class Story:
    """The text with its first values, and with those of now."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        names = world.Names(rng, False, LEVEL)
        self.drafts = [world.make_draft(rng, names, LEVEL) for _ in range(rng.randint(*LEVEL.skills))]
        self.sentences = rng.random() < 0.3  # values in sentences, not in fields
        self.rules = [(number, rule) for number, draft in enumerate(self.drafts) for rule in draft.rules]
        self.values = [dict(draft.values) for draft in self.drafts]
        self.former: list[dict[str, set[str]]] = [{name: set() for name in draft.values} for draft in self.drafts]

    def change(self) -> None:
        """Change a value that decides."""
        number, rule = self.rng.choice(self.rules)
        old = self.values[number][rule.field]
        self.former[number][rule.field].add(old)
        self.values[number][rule.field] = world.make_value(
            self.rng, world.Names(self.rng, False, LEVEL), rule.kind, rule, LEVEL, old
        )

    def parts(self, values: list[dict[str, str]]) -> list[tuple[str, str]]:
        """The head and the rules of each draft."""
        heads = ["\n".join(self.line(*pair) for pair in each.items()) for each in values]
        return [(f"{d.heading}\n\n{head}", "\n".join(d.lines)) for d, head in zip(self.drafts, heads, strict=True)]

    def line(self, name: str, value: str) -> str:
        return f"The {name} is {value}." if self.sentences else f"{name}: {value}"

    def text(self, values: list[dict[str, str]]) -> str:
        return "\n\n".join(part for both in self.parts(values) for part in both)


def other_value(rule: policies.Rule, value: str) -> str:
    """A value with another outcome, or with none."""
    if rule.kind == "table":
        return "violet"
    low, high = ("2020-01-01", "2039-01-01") if rule.kind == "date" else ("1", "999")
    return high if rule.outcome(low) == rule.outcome(value) else low


def system(text: str, question: str) -> list[Json]:
    return [{"role": "system", "content": text}, {"role": "user", "content": question}]


def below(story: Story, old: str, new: str, question: str) -> list[Json]:
    return system(f"{story.rng.choice(policies.FILLERS)}\n\n{old}", question)


def changed(story: Story, old: str, new: str, question: str) -> list[Json]:
    return system(new, question)


def changed_below(story: Story, old: str, new: str, question: str) -> list[Json]:
    return system(f"You work for {policies.make_org(story.rng, False)}.\n{new}", question)


def quoted(story: Story, old: str, new: str, question: str) -> list[Json]:
    return system(f"It said before:\n\n{old[: story.rng.randint(20, len(old))]}\n\nToday it says:\n\n{new}", question)


def twice(story: Story, old: str, new: str, question: str) -> list[Json]:
    texts = [old, new]
    story.rng.shuffle(texts)
    return system("\n\n".join(texts), question)


def in_turns(story: Story, old: str, new: str, question: str) -> list[Json]:
    return [
        {"role": "user", "content": f"{old}\n\n{question}"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": f"{new}\n\n{question}"},
    ]


def corrected(story: Story, old: str, new: str, question: str) -> list[Json]:
    """A line in the text takes back a value; the value itself stays."""
    number, rule = story.rng.choice(story.rules)
    now = story.values[number][rule.field]
    line = story.rng.choice(policies.EXTRA_WORDINGS).format(field=rule.field, value=now)
    paragraphs = old.split("\n\n")
    paragraphs.insert(story.rng.randint(1, len(paragraphs)), line)
    return system("\n\n".join(paragraphs), question)


def deleted(story: Story, old: str, new: str, question: str) -> list[Json]:
    lines = story.rng.choice([old, new]).split("\n")
    del lines[story.rng.randrange(len(lines))]
    return system("\n".join(lines), question)


def moved(story: Story, old: str, new: str, question: str) -> list[Json]:
    paragraphs = new.split("\n\n")
    story.rng.shuffle(paragraphs)
    return system("\n\n".join(paragraphs), question)


def apart(story: Story, old: str, new: str, question: str) -> list[Json]:
    """Values in the system message, rules in the user's."""
    parts = story.parts(story.values)
    return system("\n\n".join(head for head, _ in parts), "\n\n".join([*(rules for _, rules in parts), question]))


def respaced(story: Story, old: str, new: str, question: str) -> list[Json]:
    text = story.rng.choice([old, new])
    return system(text.replace("\n", story.rng.choice(["\r\n", "  \n", "\n\n"])), question)


def negated(story: Story, old: str, new: str, question: str) -> list[Json]:
    number, rule = story.rng.choice(story.rules)
    was = story.drafts[number].values[rule.field]
    text = old.replace(was, f"not {was}, but {story.values[number][rule.field]}", 1)
    return system(text, question)


def alike(story: Story, old: str, new: str, question: str) -> list[Json]:
    """Texts for three days that are equal but for one."""
    texts = [new, old, old]
    story.rng.shuffle(texts)
    return system("\n\n".join(f"# {day}\n\n{text}" for day, text in zip(DAYS, texts, strict=True)), question)


EDITS: tuple[Callable[[Story, str, str, str], list[Json]], ...] = (
    *(
        below,
        changed,
        changed_below,
        quoted,
        twice,
        in_turns,
        corrected,
        deleted,
        moved,
        apart,
        respaced,
        negated,
        alike,
    ),
)


class Answers:
    """A server's threads without the server, on one model."""

    def __init__(self, home: Paths, model: Any, reuse: Reuse) -> None:
        def opened() -> Workspace:
            return Workspace(model, ContextOptions(n_ctx=CONTEXT, n_threads=1), paths=home)

        self.decoding = DecodeThread(opened, Options(parallel=4, cache_ram=1 << 28, names=("model",), reuse=reuse))
        self.decoding.start()
        self.workspace = self.decoding.ready.result(60)

    def compile(self, text: str) -> None:
        skill = replace(parse_skill(text, source="-", default=NAME), name=NAME)
        self.decoding.compute(lambda: compile_to_library(self.workspace, skill, force=True))

    def ask(self, messages: list[Json], most: int, **notes: Any) -> tuple[str, float, int]:
        """Return the answer, the probability of its first token, and the tokens with K/V from another context."""
        body = {"messages": messages, "max_tokens": most, "logprobs": True, "temperature": 0, "notes": notes}
        text, sure, reused = "", 0.0, 0
        for event in events_of(self.decoding, body):
            if isinstance(event, Prefilled):
                reused = sum(piece.tokens for piece in event.pieces if piece.how == "spliced")
            if isinstance(event, Text):
                sure = sure or max((2.718281828**token.logprob for token in event.tokens[:1]), default=0.0)
                text += event.text
        return text, sure, reused


class Stale(Kind):
    cases = 700
    patience = 300.0

    def __init__(self, seed: int, model: str = "notes-tiny") -> None:
        super().__init__(seed)
        self.model = model
        self.home = self.folder()
        self.counts = self.home / "counts"
        self.answers: dict[Reuse, Answers] = {}

    def judge(self, number: int) -> str:
        if not self.answers:  # in the process that judges: threads do not survive a fork
            path = shipped_model() if self.model == "notes-tiny" else SMOLLM2.find(self.home)
            homes = {way: Paths.under(self.home / way) for way in WAYS}
            self.answers = {way: Answers(homes[way], path, way) for way in WAYS}
        rng, way, stale = chance(self.seed, number), WAYS[number % len(WAYS)], list[str]()
        story, answers = Story(rng), self.answers[way]
        how = {"reuse": way, "cache_salt": "" if way == "compiled" else f"{number}"}
        old = story.text(story.values)
        before = [system(old, policies.PLAIN[0].format(topic=story.rules[0][1].topic))]  # prompts; the compiled text
        self.show(before, way, how)
        for _ in range(PROMPTS):
            if rng.random() < 0.7:
                story.change()
            new, (place, rule) = story.text(story.values), rng.choice(story.rules)
            edit = rng.choice(EDITS)
            messages = edit(story, old, new, world.ask(rng, rule))
            found, p, reused = answers.ask(messages, 3, **how)
            right, sure, _ = answers.ask(messages, 3, reuse="exact", cache_salt=f"{number} exact")
            with self.counts.open("a") as file:
                file.write(f"{int(sure >= SURE)} {int(reused > 0)} {int(found != right)}\n")
            for value in story.former[place][rule.field] if sure >= SURE and found != right else ():
                if found.startswith(rule.outcome(value)):
                    lines = story.line(rule.field, value), story.line(rule.field, other_value(rule, value))
                    if self.again(before, messages, lines, way, how) != found:
                        stale.append(f"{edit.__name__}: {found!r} (p = {p:.2f}), not {right!r} ({sure:.2f})")
            if way == "learned":
                wait_until_idle(answers.decoding)
            if way != "compiled":
                before.append(messages)
                old = rng.choice([old, new])
        check(not stale, "; ".join(stale))
        return ACCEPTED

    def show(self, before: list[list[Json]], way: Reuse, how: Json) -> None:
        """Compile the text of the first prompt, or ask all prompts."""
        answers = self.answers[way]
        if way == "compiled":
            answers.compile(before[0][0]["content"])
        for prompt in before if way != "compiled" else ():
            answers.ask(prompt, 1, **how)
            if way == "learned":
                wait_until_idle(answers.decoding)

    def again(
        self, before: list[list[Json]], messages: list[Json], lines: tuple[str, str], way: Reuse, how: Json
    ) -> str:
        """Return the answer if one line is replaced by another in all that came before."""
        changed = [[{**one, "content": one["content"].replace(*lines)} for one in prompt] for prompt in before]
        how = {**how, "cache_salt": f"{how['cache_salt']} again" if way != "compiled" else ""}
        self.show(changed, way, how)
        return self.answers[way].ask(messages, 3, **how)[0]

    def notes(self) -> str:
        rows = [[int(one) for one in line.split()] for line in self.counts.read_text().splitlines()]
        judged, reused, differ = (sum(column) for column in zip(*rows, strict=True))
        return (
            f"{len(rows):,} prompts, {judged:,} decisions with a prefill's p of {SURE} or more; {reused:,} prompts "
            f"reused K/V from another context, and {differ:,} answers differ from a prefill's"
        )
