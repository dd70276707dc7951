"""The cases: contexts of the author's experiments with a field whose value changes, and their tokens."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.real.tasks import load_facts
from notes_cli.engine.model import Model
from notes_cli.text.messages import marker
from notes_cli.text.template import ChatTemplate

ERRATUM = "[STATE UPDATE] {} has changed to {}; this overrides any earlier value AND any earlier conclusion."
LATE = "Query received; performing lookup.\n\n[TOOL RESULT]\n"  # before the passage of every other fact
NOTE = "NOTE {}. Standard operating note; no special handling required."
GUIDELINE = "- Standard guideline {}: log the interaction and follow SOP for routine matters."
PADS = (" x", " a", " -", ".")
Span = tuple[int, int]  # tokens [first, last)
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Case:
    """A context, made of `head`, a chunk with the field, and `rest`; the field's old and new value; a request, and the
    answers between which it decides. The chunk is transplanted; its field is written as editkv writes one: "label:
    value"."""

    group: str
    name: str
    head: str
    opening: str  # the chunk before the field
    label: str
    old: str
    new: str
    closing: str  # the chunk after the field
    ask: str
    erratum: str
    answers: tuple[str, ...] = ()
    rest: str = "\n\n"

    def chunk(self, value: str) -> str:
        return f"{self.opening}{self.label}: {value}{self.closing}"

    def context(self, value: str) -> str:
        return f"{self.head}{self.chunk(value)}{self.rest}"


@dataclass(frozen=True)
class CaseTokens:
    """Token ids of a case. `chunk` and `field` are tokens of the context with the old value."""

    context: list[int]
    chunk: Span
    field: Span
    value: list[int]  # the new one
    ask: list[int]
    erratum: list[int]  # and the request
    full: list[int]  # new context and request, tokenized together


def load(tasks: Path, model: Model, facts: int) -> list[Case]:
    """The gated tasks, compose-then-edit and so many facts of a file with the author's tasks."""
    data = json.loads(tasks.read_text(encoding="utf-8"))
    template = ChatTemplate(model.chat_template or "", model.special_text("bos"), model.special_text("eos"))
    opens, closes = template.cut([{"role": "user", "content": marker(0)}], [marker(0)])
    cases = [_gated(name, task) for name, task in data["gated"]["tasks"].items()]
    chats = [_compose_then_edit(one) for one in data["compose_edit"]["INSTANCES"]] + _facts(tasks, data["facts"], facts)
    return cases + [replace(one, head=opens + one.head, ask=one.ask + closes) for one in chats]


def _fillers(form: str) -> str:
    return "\n".join(form.format(number) for number in range(1, 19))


def _gated(name: str, task: dict[str, Any]) -> Case:
    return Case(
        "gated tasks",
        name,
        head=f"{task['role']}\n\n",
        opening="SESSION CONTEXT\n",
        label=task["field"],
        old=task["vold"],
        new=task["vnew"],
        closing=f"\nchannel: api\nagent_id: agent-3\n\n\n{task['rule']}\n{_fillers(NOTE)}",
        ask=f"TASK\n{task['request']}\nGive your decision as exactly one word.\nDecision:",
        erratum=ERRATUM.format(task["field"], task["vnew"]),
        answers=(task["correct"], task["stale"]),
    )


def _compose_then_edit(one: dict[str, Any]) -> Case:
    return Case(
        "compose-then-edit",
        one["name"],
        head=f"{one['sys']}\n\n",
        opening=f"# SKILL: {one['skill_name']}\n",
        label="CURRENT STATE",
        old=f"{one['field']} = {one['Told']}",
        new=f"{one['field']} = {one['Tnew']}",
        closing=f".\nRULE: {one['rule']}\n{_fillers(GUIDELINE)}\nEnd of {one['skill_name']}.",
        ask=one["task"],
        erratum=ERRATUM.format(one["field"], one["Tnew"]),
        answers=(one["act_new"], one["act_old"]),
    )


def _facts(tasks: Path, data: dict[str, Any], count: int) -> list[Case]:
    """Facts with the author's early and late placement in turn. The value asked for changes to the next of its list."""
    cases = []
    for number, fact in enumerate(load_facts(tasks, count)):
        (answer,) = fact.question.accept
        title, _, sentence = fact.passage.partition("\n")
        label, _, text = sentence.partition(": ")
        before, _, closing = text.partition(answer)
        pool = next(words for words in data.values() if isinstance(words, list) and answer in words)
        new = pool[(pool.index(answer) + 1) % len(pool)]
        head = f"{data['SYS']}\n\n{LATE if number % 2 else ''}"
        values = before + answer, before + new
        asked = fact.question.ask, ERRATUM.format(f"{label}: {answer}", new)
        cases.append(Case("facts", f"fact {number}", head, f"{title}\n", label, *values, closing, *asked))
    return cases


def tokens_of(case: Case, model: Model) -> CaseTokens:
    """Tokenize a case. Raises ValueError where the field shares a token with the text around it."""
    old, new = encode(model, case.context(case.old)), encode(model, case.context(case.new))
    start = f"{case.head}{case.opening}{case.label}: "
    field, changed = span(model, old, start, case.old), span(model, new, start, case.new)
    if old[: field[0]] != new[: changed[0]] or old[field[1] :] != new[changed[1] :]:
        raise ValueError(f"{case.name}: the field shares a token with the text around it")
    return CaseTokens(
        old,
        span(model, old, case.head, case.chunk(case.old)),
        field,
        new[slice(*changed)],
        encode(model, case.ask),
        encode(model, f"\n{case.erratum}\n{case.ask}"),
        encode(model, case.context(case.new) + case.ask),
    )


def encode(model: Model, text: str) -> list[int]:
    """Token ids with control tokens parsed, as a tokenizer of Hugging Face parses them."""
    return [int(token) for token in model.tokenize(text, special=True)]


def span(model: Model, ids: Sequence[int], before: str, inside: str) -> Span:
    """The tokens of a part of a text: from the first that overlaps it to the last that begins in it."""
    start, end = len(before.encode()), len((before + inside).encode())
    bounds = [0, *accumulate(len(model.token_bytes(token, special=True)) for token in ids)]
    return bisect_right(bounds, start) - 1, bisect_left(bounds, end)


def padded(case: Case, tokenize: Tokenize) -> Case:
    """The case with the shorter value lengthened until both contexts have as many tokens: editkv replaces a value only
    by one as long. Raises ValueError if no padding does it."""

    def grows(one: Case) -> int:
        return len(tokenize(one.context(one.new))) - len(tokenize(one.context(one.old)))

    shorter = "old" if grows(case) > 0 else "new"
    for pad in ("", *(pad * count for pad in PADS for count in range(1, 16))):
        longer = replace(case, **{shorter: getattr(case, shorter) + pad})
        if not grows(longer):
            return longer
    raise ValueError(f"{case.name}: its values cannot be made equally long")
