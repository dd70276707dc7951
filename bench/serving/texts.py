"""Texts of the load test: a long policy whose date changes, questions, and the date's form for each system."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from notes_cli.text.erratum import Erratum, word
from training import policies

Json = dict[str, Any]
SKILL, SYSTEM = "returns", "You work for Harbor Books."
FIRST = date(2026, 5, 1)  # the date that the policy has when it is compiled, or prefilled
SECTIONS = 9  # of the policy: 3,964 tokens with the tokenizer of the model that ships
ROWS = 4  # values that a rule has outcomes for
CUE = policies.REASON_CUE
WAYS = ("erratum", "edited", "said")  # by `notes`; in the policy; after the policy, as an erratum would be


@dataclass(frozen=True)
class Asked:
    """A question, on a day."""

    question: str
    day: date


def policy(day: date = FIRST, seed: int = 1, sections: int = SECTIONS) -> str:
    """The policy as of a day, which is in its third line: rules about everything, of one shop after the other."""
    rng = random.Random(seed)
    shops = ["Harbor Books", *(policies.make_org(rng, held=True) for _ in range(sections - 1))]
    fields = {"date": FIRST.isoformat(), "tier": "gold", "amount": "120"}
    for topic in policies.TOPICS:
        field = policies.FIELD_OF[topic]
        fields.setdefault(field, policies.any_value(rng, field))
    fields["date"] = day.isoformat()
    lines = ["# Returns policy of Harbor Books", "", *(f"{name}: {value}" for name, value in fields.items())]
    for shop in shops:
        lines += ["", f"## The rules of {shop}", ""]
        for topic in policies.TOPICS:
            field = policies.FIELD_OF[topic]
            lines += policies.make_rule(rng, policies.kind_of(field), topic, field, ROWS).lines()
    return "\n".join(lines)


def questions(count: int, seed: int, first: int = 1) -> list[Asked]:
    """Return questions, each about its own day from the policy's date + `first` on; distinct up to 148."""
    topics = list(policies.TOPICS)
    plain = [form.format(topic=topic) for topic in topics for form in policies.PLAIN]
    asked = [*(text for topic in topics for text in policies.VERBS[topic]), *plain]
    pool = [text + cue for text in asked for cue in ("", CUE)]
    rng, drawn = random.Random(seed), list[str]()
    while len(drawn) < count:
        drawn += rng.sample(pool, len(pool))
    return [Asked(text, FIRST + timedelta(first + number)) for number, text in enumerate(drawn[:count])]


def body(asked: Asked, way: str, tokens: int) -> Json:
    """The request that asks it, for so many tokens of an answer at most."""
    shared = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens, "temperature": 0}
    new = asked.day.isoformat() if asked.day != FIRST else ""
    system = SYSTEM
    more: Json = {"timings_per_token": True}  # llama-server reports reuse before the end
    if way == "erratum":
        more = {"notes": {"splice": [SKILL], "errata": {"date": new} if new else {}}}
    elif way == "edited":
        system += f"\n\n{policy(asked.day)}"
    else:
        system += f"\n\n{policy()}"
        system += f"\n\n{word(Erratum('date', new, '', ''))}" if new else ""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": asked.question}]
    return {"messages": messages, **shared, **more}
