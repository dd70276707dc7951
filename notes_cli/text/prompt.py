"""The order of a prompt: system text, spliced skills, errata, question, each a piece that is tokenised apart.

    system opening | skill | "\\n\\n" | skill | "\\n\\n" erratum | user opening, question, assistant opening

It knows neither tokens nor K/V: a splice is only named. The form is exact, for the model that ships with
notes was trained on it, and because a recompute must see the very tokens of a splice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from notes_cli.text.template import ChatTemplate, marker

Kind = Literal["text", "splice", "erratum", "question"]
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
) -> list[Piece]:
    """The pieces of a prompt, up to where the model's answer begins.

    `skills` are names; `errata` are sentences that stand after all skills; `turns` are earlier (question,
    answer) pairs of the same conversation, which come before `question`. Texts are stripped, but for the
    answers: they are what the model said, a leading blank too. Raise ModelError if the model's template
    leaves no place for them.
    """
    if turns:
        (first, answer), *later = turns
        pieces = build(template, question=first, system=system, skills=skills, errata=errata)
        for asked, replied in later:
            pieces += [*_text(Run(answer, False)), *next_turn(template, asked)]
            answer = replied
        return [*pieces, *_text(Run(answer, False)), *next_turn(template, question)]

    parts: list[Piece] = []  # what stands in the system message
    if system and system.strip():
        parts += _text(Run(system.strip(), False))
    for name in skills:
        parts += [*(_text(Run(BETWEEN, False)) if parts else []), Piece("splice", name=name)]
    for said in errata:
        parts.append(Piece("erratum", _runs(Run((BETWEEN if parts else "") + said.strip(), False))))
    if not parts:
        opening, closing = template.cut([_message("user", 0)], [marker(0)])
        return [
            Piece("question", _runs(Run(opening, True), Run(question.strip(), False), Run(closing, True)))
        ]
    opening, middle, closing = template.cut(
        [_message("system", 0), _message("user", 1)], [marker(0), marker(1)]
    )
    ask = Piece("question", _runs(Run(middle, True), Run(question.strip(), False), Run(closing, True)))
    return _joined([*_text(Run(opening, True)), *parts, ask])


def next_turn(template: ChatTemplate, question: str, errata: Sequence[str] = ()) -> list[Piece]:
    """The pieces after the model's answer: its end, the errata at the head of the user message, the question.

    Raise ModelError as `build` does.
    """
    contents = [marker(i) for i in range(4)]
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    *_, opening, closing = template.cut(messages, contents)
    ask = Run(question.strip(), False)
    if not errata:
        return [Piece("question", _runs(Run(opening, True), ask, Run(closing, True)))]
    pieces = _text(Run(opening, True))
    for number, said in enumerate(errata):
        pieces.append(Piece("erratum", _runs(Run((BETWEEN if number else "") + said.strip(), False))))
    return [*pieces, Piece("question", _runs(Run(BETWEEN + ask.text, False), Run(closing, True)))]


def left_context(template: ChatTemplate) -> str:
    """What stands before a skill that comes first in the system message: the text to compile it behind."""
    return template.cut([_message("system", 0), _message("user", 1)], [marker(0), marker(1)])[0]


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
