"""Corrections in a conversation: where they are stated, which texts get them, and which errata end."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from notes_cli.runtime.place import Corrections, Policy, place
from notes_cli.text.erratum import known_fields, read_errata
from notes_cli.text.messages import ErratumPart, Message, SkillPart, TextPart, asking, user_message


class Field(NamedTuple):
    name: str
    value: str
    start: int = 0
    end: int = 0


class Skill(NamedTuple):
    name: str
    fields: tuple[Field, ...]
    text: str = ""


RETURNS = Skill("returns", (Field("date", "June"), Field("tier", "gold")))
FEES = Skill("fees", (Field("date", "May"),))
BOTH = RETURNS, FEES


def shown(messages: tuple[Message, ...]) -> list[str]:
    """Each message as its role and parts: a skill's name, an erratum's field and value, or a text."""
    texts = []
    for message in messages:
        words = [message.role]
        for part in message.parts:
            if isinstance(part, SkillPart):
                words.append(part.name)
            elif isinstance(part, ErratumPart):
                words.append(
                    f"{part.key}={part.value}" if part.key else f"({part.sentence.removeprefix('Correction: ')})"
                )
            elif isinstance(part, TextPart):
                words.append(part.text)
        texts.append(" ".join(words))
    return texts


EDITS = frozenset({"returns", "fees"})
CASES = {  # where the skills are, policy, errata: the messages
    "in the text, stated after the skills": (
        *("early", Policy(EDITS), ["fees.date=July", "Be kind."]),
        ["system returns fees fees.date=July", "user (Be kind.) Q"],
    ),
    "stated only, before the question": (
        *("early", Policy(), ["fees.date=July", "tier=silver"]),
        ["system returns fees", "user fees.date=July returns.tier=silver Q"],
    ),
    "in the text only": ("early", Policy(EDITS, states=False), ["tier=silver"], ["system returns fees", "user Q"]),
    "skills in the question's message": (
        *("late", Policy(EDITS), ["Be kind.", "tier=silver"]),
        ["user returns fees (Be kind.) returns.tier=silver Q"],
    ),
    "the last value of a field counts": (
        *("early", Policy(), ["tier=silver", "tier=basic"]),
        ["system returns fees", "user returns.tier=basic Q"],
    ),
    "a text with an image is left": (
        *("early", Policy({"fees"}), ["tier=silver", "fees.date=July"]),
        ["system returns fees fees.date=July", "user returns.tier=silver Q"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_erratum_of_a_first_question(case: str) -> None:
    where, policy, errata, expected = CASES[case]
    messages = asking("Q", skills=["returns", "fees"], place=where).messages
    placed, corrections = place(messages, BOTH, read_errata(errata, known_fields(*BOTH)), policy=policy)
    assert shown(placed) == expected
    assert corrections.in_place <= corrections.values.keys()
    assert {key.partition(".")[0] for key in corrections.in_place} <= {*policy.edits}
    assert bool(corrections.stated) == (policy.states and bool(corrections.values)) and not corrections.pending


def later(*errata: str, before: Corrections, skills: tuple[Skill, ...] = (RETURNS,), **how: object) -> list[str]:
    """The messages of a second question after an erratum of the first; the last one may have a new copy of a skill."""
    copy = [SkillPart(str(how["copy"]))] if "copy" in how else []
    first = Message("user", (ErratumPart("It is July.", "returns.date", "July"), TextPart("Q1")))
    last = Message("tool", (TextPart("R"),)) if "result" in how else Message("user", (*copy, TextPart("Q2")))
    messages = (Message("system", (SkillPart("returns"),)), first, Message("assistant", (TextPart("A"),)), last)
    placed, _ = place(messages, skills, read_errata(errata, known_fields(*skills)), before, Policy(cuts=True))
    return [text.removeprefix("user ") for text in (shown(placed)[1], shown(placed)[3])]


def test_errata_of_earlier_turns() -> None:
    """One whose field gets another value is removed; a pending one is stated by a question, not by a result."""
    july = Corrections({"returns.date": "July"}, stated=frozenset({"returns.date"}))
    assert later(before=july) == ["returns.date=July Q1", "Q2"]
    assert later("date=May", before=july) == ["Q1", "returns.date=May Q2"]
    assert later("tier=x", before=july) == ["returns.date=July Q1", "returns.tier=x Q2"]
    edited = july.given("returns.date", "May", in_place=True, states=False)
    assert later(before=edited) == ["Q1", "Q2"], "the text has the new value"
    pending = july.given("returns.date", "May", in_place=False, states=True)
    assert later("tier=x", before=pending) == ["Q1", "returns.date=May returns.tier=x Q2"]
    assert later("date=June", before=pending) == ["Q1", "returns.date=June Q2"]
    assert later(before=pending, result=True) == ["returns.date=July Q1", "tool R"]


def test_a_new_copy_repeats_what_it_would_overrule() -> None:
    """The errata of its fields follow it, unless its text has the values."""
    july = Corrections({"returns.date": "July"}, stated=frozenset({"returns.date"}))
    assert later(before=july, copy="returns") == ["Q1", "returns returns.date=July Q2"]
    back = Corrections({"returns.date": "June"}, stated=frozenset({"returns.date"}))
    assert later(before=back, copy="returns") == ["Q1", "returns Q2"]


def test_a_pending_erratum_names_its_skill_once_another_has_the_field() -> None:
    pending = Corrections().given("returns.date", "July", in_place=False, states=True)
    messages = (user_message("Q", skills=["fees"]),)
    (placed,), _ = place(messages, BOTH, (), pending)
    (erratum,) = [part for part in placed.parts if isinstance(part, ErratumPart)]
    assert "date of returns is now July" in erratum.sentence
