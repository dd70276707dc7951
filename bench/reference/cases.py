"""The cases: texts of the author's experiments with a field that changes, and their tokens.

A case's context is `head`, a chunk that can be transplanted, and `rest`. The chunk holds the field, as editkv writes
one: "label: value".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.real.tasks import FACTS, load_facts
from notes_cli.engine.model import Model
from notes_cli.text.messages import marker
from notes_cli.text.template import ChatTemplate

ERRATUM = "[STATE UPDATE] {} has changed to {}; this overrides any earlier value AND any earlier conclusion."
LATE = "Query received; performing lookup.\n\n[TOOL RESULT]\n"  # before the passage in every other fact
FILLERS = 18  # lines of no importance, as the author has them
PADS = (" x", " a", " -", ".")
Span = tuple[int, int]  # tokens [first, last)
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Case:
    """A context, its field's old and new value, and a request with the answers between which it decides."""

    group: str
    name: str
    head: str
    opening: str  # the chunk before the field
    label: str
    old: str
    new: str
    closing: str  # the chunk after the field
    rest: str
    ask: str
    erratum: str
    answers: tuple[str, ...] = ()

    def context(self, value: str) -> str:
        return f"{self.head}{self.opening}{self.label}: {value}{self.closing}{self.rest}"


@dataclass(frozen=True)
class CaseTokens:
    """Token ids of a case. `chunk`, `field` and `new_field` are tokens of the old, the old and the new context."""

    old: list[int]
    new: list[int]
    chunk: Span
    field: Span
    new_field: Span
    ask: list[int]
    erratum: list[int]  # with the request
    full: list[int]  # new context and request, tokenized together

    @property
    def value(self) -> list[int]:
        """Tokens of the new value."""
        return self.new[slice(*self.new_field)]


def load(tasks: Path, model: Model, facts: int = FACTS) -> list[Case]:
    """The gated tasks, compose-then-edit and so many facts of a file with the author's tasks."""
    data = json.loads(tasks.read_text(encoding="utf-8"))
    template = ChatTemplate(model.chat_template or "", model.special_text("bos"), model.special_text("eos"))
    opens, closes = template.cut([{"role": "user", "content": marker(0)}], [marker(0)])
    chat = [
        *(_compose_then_edit(one) for one in data["compose_edit"]["INSTANCES"]),
        *_facts(tasks, data["facts"], facts),
    ]
    gated = [_gated(name, one) for name, one in data["gated"]["tasks"].items()]
    return gated + [replace(one, head=opens + one.head, ask=one.ask + closes) for one in chat]


def _gated(name: str, task: dict[str, Any]) -> Case:
    notes = "\n".join(
        f"NOTE {number}. Standard operating note; no special handling required." for number in range(1, FILLERS + 1)
    )
    return Case(
        "gated tasks",
        name,
        head=f"{task['role']}\n\n",
        opening="SESSION CONTEXT\n",
        label=task["field"],
        old=task["vold"],
        new=task["vnew"],
        closing=f"\nchannel: api\nagent_id: agent-3\n\n\n{task['rule']}\n{notes}",
        rest="\n\n",
        ask=f"TASK\n{task['request']}\nGive your decision as exactly one word.\nDecision:",
        erratum=ERRATUM.format(task["field"], task["vnew"]),
        answers=(task["correct"], task["stale"]),
    )


def _compose_then_edit(one: dict[str, Any]) -> Case:
    filler = "\n".join(
        f"- Standard guideline {number}: log the interaction and follow SOP for routine matters."
        for number in range(1, FILLERS + 1)
    )
    return Case(
        "compose-then-edit",
        one["name"],
        head=f"{one['sys']}\n\n",
        opening=f"# SKILL: {one['skill_name']}\n",
        label="CURRENT STATE",
        old=f"{one['field']} = {one['Told']}",
        new=f"{one['field']} = {one['Tnew']}",
        closing=f".\nRULE: {one['rule']}\n{filler}\nEnd of {one['skill_name']}.",
        rest="\n\n",
        ask=one["task"],
        erratum=ERRATUM.format(one["field"], one["Tnew"]),
        answers=(one["act_new"], one["act_old"]),
    )


def _facts(tasks: Path, data: dict[str, Any], count: int) -> list[Case]:
    """Facts with the author's early and late placement in turn. The value asked for changes to the next of its list."""
    cases = []
    for number, fact in enumerate(load_facts(tasks, count)):
        (answer,) = fact.question.accept
        opening, _, sentence = fact.passage.partition("\n")
        label, _, text = sentence.partition(": ")
        before, _, closing = text.partition(answer)
        pool = next(words for words in data.values() if answer in words and isinstance(words, list))
        new = pool[(pool.index(answer) + 1) % len(pool)]
        cases.append(
            Case(
                "facts",
                f"fact {number}",
                head=f"{data['SYS']}\n\n{LATE if number % 2 else ''}",
                opening=f"{opening}\n",
                label=label,
                old=before + answer,
                new=before + new,
                closing=closing,
                rest="\n\n",
                ask=fact.question.ask,
                erratum=ERRATUM.format(f"{label}: {answer}", new),
            )
        )
    return cases


def tokens_of(case: Case, model: Model) -> CaseTokens:
    """Tokenize a case. Raises ValueError where its chunk or its field has no tokens of its own."""

    def tokenize(text: str) -> list[int]:
        return encode(model, text)

    old, new = tokenize(case.context(case.old)), tokenize(case.context(case.new))
    start = f"{case.head}{case.opening}{case.label}: "
    field, new_field = (span(model, ids, start, value) for ids, value in ((old, case.old), (new, case.new)))
    chunk = span(model, old, case.head, f"{case.opening}{case.label}: {case.old}{case.closing}")
    if old[: field[0]] != new[: new_field[0]] or old[field[1] :] != new[new_field[1] :]:
        raise ValueError(f"{case.name}: the values share tokens with the text around them")
    suffix = f"\n{case.erratum}\n{case.ask}"
    full = tokenize(case.context(case.new) + case.ask)
    return CaseTokens(old, new, chunk, field, new_field, tokenize(case.ask), tokenize(suffix), full)


def encode(model: Model, text: str) -> list[int]:
    """Token ids with control tokens parsed, as a Hugging Face tokenizer parses them."""
    return [int(token) for token in model.tokenize(text, special=True)]


def span(model: Model, ids: Sequence[int], before: str, inside: str) -> Span:
    """The tokens of a part of a text: from the first that overlaps it to the last that begins in it."""
    start, end = len(before.encode()), len((before + inside).encode())
    at, starts, ends = 0, [], []
    for token in ids:
        starts.append(at)
        at += len(model.token_bytes(token, special=True))
        ends.append(at)
    first = next(index for index, last in enumerate(ends) if last > start)
    return first, next((index for index, begin in enumerate(starts) if begin >= end), len(ids))


def padded(case: Case, tokenize: Tokenize) -> Case:
    """The case with the shorter value lengthened by letters or dashes until both contexts have as many tokens: editkv
    replaces a value only by one as long. Raises ValueError if none of them does."""

    def difference(one: Case) -> int:
        return len(tokenize(one.context(one.old))) - len(tokenize(one.context(one.new)))

    shorter = "new" if difference(case) > 0 else "old"
    for pad in ("", *(pad * count for pad in PADS for count in range(1, 16))):
        longer = replace(case, **{shorter: getattr(case, shorter) + pad})
        if not difference(longer):
            return longer
    raise ValueError(f"{case.name}: its values cannot be made equally long")
