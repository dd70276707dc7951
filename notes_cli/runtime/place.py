"""Places corrections in a conversation: where each is stated, which values the texts of skills get, which errata end.

Ask, sessions, the server and its proxy of another server share these rules:

* An erratum follows the skills of the system message if its skill is there, gets the value in its text, and nothing was
  answered yet; any other comes in the last message, after its skills and before its question.
* Of several values of a field the last counts. Pending errata come first. A skill with a new copy in the last message
  overrules the errata before it, so those that still differ from its text are repeated.
* An erratum whose field has another value by now, or that is stated again later, is superseded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from notes_cli.text.erratum import Erratum, Fielded, Known, known_fields, word
from notes_cli.text.messages import ErratumPart, Message, Part, SkillPart


@dataclass(frozen=True, slots=True)
class Corrections:
    """The corrections of a conversation, by `skill.field`."""

    values: Mapping[str, str] = field(default_factory=dict)  # the latest of each field that was given one
    in_place: frozenset[str] = frozenset()  # fields whose value belongs into the text of the skill, too
    stated: frozenset[str] = frozenset()  # fields with an erratum in the messages
    pending: tuple[str, ...] = ()  # fields whose value is stated before the next question

    def given(self, key: str, value: str, *, in_place: bool, states: bool) -> Corrections:
        """Return them with a new value of a field, which the next question states, or only its text has."""
        return replace(
            self,
            values={**self.values, key: value},
            in_place=self.in_place | {key} if in_place else self.in_place - {key},
            pending=(*(name for name in self.pending if name != key), *([key] if states else [])),
        )

    def without(self, keys: Collection[str]) -> Corrections:
        """Return them without these fields."""
        return Corrections(
            {key: value for key, value in self.values.items() if key not in keys},
            self.in_place.difference(keys),
            self.stated.difference(keys),
            tuple(key for key in self.pending if key not in keys),
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """How new values are brought in."""

    edits: Collection[str] = ()  # names of the skills whose texts get them
    states: bool = True  # an erratum states each
    cuts: bool = False  # superseded errata are removed from earlier messages
    wording: str | None = None


def values_in(skills: Iterable[Fielded]) -> dict[str, str]:
    """Return the values in the texts of skills, by `skill.field`."""
    return {f"{skill.name}.{span.name}": span.value for skill in skills for span in skill.fields}


def skill_of(key: str) -> str:
    """Return the skill of a `skill.field`: names of skills have no dot."""
    return key.partition(".")[0]


def place(
    messages: Sequence[Message],
    skills: Sequence[Fielded],
    errata: Iterable[Erratum] = (),
    before: Corrections = Corrections(),
    policy: Policy = Policy(),
    known: Known | None = None,
) -> tuple[tuple[Message, ...], Corrections]:
    """Return the messages with the errata of the last one, and the corrections from then on.

    `messages`: all of the conversation, the question last, or results of tools, after which pending errata go on to
    wait. `skills`: all that the messages have; of one with a new copy in the last message the text of that copy.
    `errata`: new ones in order, of fields (read_errata) or free text. A question outside a session has no `before`.
    `known`: the fields of the skills.
    """
    known = known_fields(*skills) if known is None else known
    texts = values_in(skills)
    last = messages[-1]
    copied = _skills_of(last)
    given = [(key_of(known, erratum), erratum) for erratum in errata]
    values = {**before.values, **{key: erratum.value or "" for key, erratum in given if key}}
    waiting = () if last.role == "tool" else before.pending
    repeated = [
        key for key in before.values if key in before.stated and skill_of(key) in copied and values[key] != texts[key]
    ]
    due = [(key, erratum_of(known, key, values[key])) for key in dict.fromkeys((*waiting, *repeated)) if key in texts]
    due += given if policy.states else [(key, erratum) for key, erratum in given if not key]
    last_of = {key: number for number, (key, _) in enumerate(due)}
    due = [(key, erratum) for number, (key, erratum) in enumerate(due) if not key or last_of[key] == number]

    new = {key for key, _ in given if key}
    edited = {
        key for key in (*new, *values) if skill_of(key) in policy.edits and (key in new or skill_of(key) in copied)
    }
    in_place = (before.in_place - new) | edited
    answered = any(message.role == "assistant" for message in messages)
    early = set() if answered or messages[0].role != "system" else _skills_of(messages[0])
    after, others = list[ErratumPart](), list[ErratumPart]()
    by_name = {skill.name: skill for skill in skills}
    for key, erratum in due:
        skill = by_name[skill_of(key)] if key else next(iter(skills), None)
        part = ErratumPart(word(erratum, policy.wording, skill), key, values.get(key, ""))
        (after if key in edited and skill_of(key) in early else others).append(part)
    stated = {key for key, _ in due if key}
    placed = [*messages]
    if after:
        placed[0] = with_errata(placed[0], after)
    if others:
        placed[-1] = with_errata(placed[-1], others)
    pending = tuple(key for key in before.pending if key not in stated)
    corrections = Corrections(values, frozenset(in_place), before.stated | stated, pending)
    cuts = policy.cuts and last.role == "user"
    return without_superseded(placed, corrections) if cuts else tuple(placed), corrections


def without_superseded(messages: Sequence[Message], corrections: Corrections) -> tuple[Message, ...]:
    """Return the messages without superseded errata."""
    left, later = list[Message](), {*corrections.pending}
    for message in reversed(messages):
        parts = list[Part]()
        for part in reversed(message.parts):
            if not isinstance(part, ErratumPart) or not is_superseded(part, corrections.values, later):
                parts.append(part)
            if isinstance(part, ErratumPart):
                later.add(part.key)
        left.append(message if len(parts) == len(message.parts) else replace(message, parts=tuple(parts[::-1])))
    return tuple(left[::-1])


def is_superseded(part: ErratumPart, values: Mapping[str, str], later: Collection[str] = ()) -> bool:
    """Return True if the erratum's field has another value by now, or is stated again. Free text never is."""
    return bool(part.key) and (part.key in later or values.get(part.key) != part.value)


def _skills_of(message: Message) -> set[str]:
    return {part.name for part in message.parts if isinstance(part, SkillPart)}


def key_of(known: Known, erratum: Erratum) -> str:
    """Return the erratum's `skill.field`; empty for free text."""
    if erratum.field is None or erratum.value is None:
        return ""
    reference = known.find(erratum.key)[0]
    return f"{reference.skill}.{reference.field}"


def erratum_of(known: Known, key: str, value: str) -> Erratum:
    return known.find(key)[0].erratum(value)


def with_errata(message: Message, errata: Sequence[ErratumPart]) -> Message:
    """Add errata after the last skill of a message and the errata that follow it; without a skill at its beginning."""
    at = max((number for number, part in enumerate(message.parts, 1) if isinstance(part, SkillPart)), default=0)
    while at < len(message.parts) and isinstance(message.parts[at], ErratumPart):
        at += 1
    return replace(message, parts=(*message.parts[:at], *errata, *message.parts[at:]))
