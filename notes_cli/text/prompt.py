"""The order of a prompt: system text, spliced skills, errata, question, each a piece that is tokenised apart.

    system opening | skill | "\\n\\n" | skill | "\\n\\n" erratum | user opening, question, assistant opening

Placed late, skills and errata stand in the user message of the question instead, right before it.

It knows neither tokens nor K/V: a splice is only named. The form is exact, for the model that ships with
notes was trained on it, and because a recompute must see the very tokens of a splice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from notes_cli.errors import NotesError
from notes_cli.text.template import ChatTemplate, marker

Kind = Literal["text", "splice", "erratum", "question"]
PLACES = ("early", "late")
BETWEEN = "\n\n"  # stands between the parts of one message


class Run(NamedTuple):
    """A stretch of text. Only in the template's own words (`special`) are special tokens read as such."""

    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. A splice has a name and no runs: its tokens come from a segment."""

    kind: Kind
    runs: tuple[Run, ...] = ()
    name: str = ""

    @property
    def text(self) -> str:
        """All runs in one, for people and for comparisons."""
        return "".join(run.text for run in self.runs)


def build(
    template: ChatTemplate,
    *,
    question: str,
    system: str | None = None,
    skills: Sequence[str] = (),
    errata: Sequence[str] = (),
    turns: Sequence[tuple[str, str]] = (),
    place: str = "early",
) -> list[Piece]:
    """The pieces of a prompt, up to where the model's answer begins.

    `skills` are names; `errata` are sentences that stand after all skills; `turns` are earlier (question,
    answer) pairs of the same conversation, which come before `question`. Texts are stripped, but for the
    answers: they are what the model said, a leading blank too. `place`: early, in the system message, or
    late, in the user message of `question`. Raise NotesError for another place, and ModelError if the
    model's template leaves none.
    """
    if place not in PLACES:
        raise NotesError(f"no place {place!r}. Choose {' or '.join(PLACES)}")
    given, nothing = (skills, errata), ((), ())
    early, late = (nothing, given) if place == "late" else (given, nothing)
    if turns:
        (first, answer), *later = turns
        past = template.earlier
        pieces = build(past, question=first, system=system, skills=early[0], errata=early[1])
        for asked, replied in later:
            pieces += [*_text(Run(answer, False)), *next_turn(past, asked)]
            answer = replied
        last = next_turn(template, question, skills=late[0], errata=late[1])
        return [*pieces, *_text(Run(answer, False)), *last]

    said = _text(Run(system.strip(), False)) if system and system.strip() else []
    head, body = _parts(said, *early), _parts([], *late)  # of the system message, of the user message
    if not head:
        opening, closing = template.cut([_message("user", 0)], [marker(0)])
        return _asked(template, opening, body, question, closing)
    opening, middle, closing = template.cut([_message("system", 0), _message("user", 1)], [marker(0), marker(1)])
    ask = _asked(template, middle, body, question, closing)
    return _joined([*_text(Run(opening, True)), *head, *ask])


def next_turn(
    template: ChatTemplate, question: str, errata: Sequence[str] = (), skills: Sequence[str] = ()
) -> list[Piece]:
    """The pieces after the model's answer: its end, skills and errata at the head of the user message, the
    question.

    Raise ModelError as `build` does.
    """
    contents = [marker(i) for i in range(4)]
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    *_, opening, closing = template.cut(messages, contents)
    return _asked(template, opening, _parts([], skills, errata), question, closing)


def left_context(template: ChatTemplate) -> str:
    """What stands before a skill that comes first in the system message: the text to compile it behind."""
    return template.cut([_message("system", 0), _message("user", 1)], [marker(0), marker(1)])[0]


def _parts(before: list[Piece], skills: Sequence[str], errata: Sequence[str]) -> list[Piece]:
    """What stands in a message already, then skills and errata, with empty lines between."""
    parts = [*before]
    for name in skills:
        parts += [*(_text(Run(BETWEEN, False)) if parts else []), Piece("splice", name=name)]
    for said in errata:
        parts.append(Piece("erratum", _runs(Run((BETWEEN if parts else "") + said.strip(), False))))
    return parts


def _asked(template: ChatTemplate, opening: str, parts: Sequence[Piece], question: str, closing: str) -> list[Piece]:
    """The user message: its parts, then the question."""
    asked = question.strip()
    if not asked.endswith(template.cue.strip()):  # some say it themselves
        asked += template.cue
    if not parts:
        return [Piece("question", _runs(Run(opening, True), Run(asked, False), Run(closing, True)))]
    ask = Piece("question", _runs(Run(BETWEEN + asked, False), Run(closing, True)))
    return [*_text(Run(opening, True)), *parts, ask]


def generation_prompt(template: ChatTemplate) -> str:
    """What stands between a question and the answer."""
    return template.cut([_message("user", 0)], [marker(0)])[1]


def _message(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": marker(number)}


def _runs(*runs: Run) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.text)


def _text(run: Run) -> list[Piece]:
    """A text piece; none for an empty text."""
    return [Piece("text", (run,))] if run.text else []


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with neighbouring texts made one: what is not cut by a splice is tokenised together."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind == "text":
            runs = [*joined[-1].runs]
            for run in piece.runs:
                if runs[-1].special == run.special:
                    runs[-1] = Run(runs[-1].text + run.text, run.special)
                else:
                    runs.append(run)
            joined[-1] = Piece("text", tuple(runs))
        else:
            joined.append(piece)
    return joined
