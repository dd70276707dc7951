"""Heat under a text: lines of block characters whose height at a character says how much it matters.

Legible without colour: a terminal that can show colour gets bold and yellow on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from notes_cli import output

Span = tuple[int, int, float]  # characters [start, end) and their height, 0 to 1

LONG = 30  # a text of more rows is shown without those that have no heat
PIPE = 100  # columns where there is no terminal to ask


@dataclass(frozen=True, slots=True)
class Style:
    """How heat is drawn: levels of rising height (none is a blank), a line break that has heat, and what is left out.

    What is shown of the text itself is the text's business.
    """

    levels: str = "▁▂▃▄▅▆▇█"
    end: str = "⏎"
    dots: str = "…"

    @classmethod
    def of_stdout(cls) -> Style:
        """The best that the encoding of stdout can show."""
        style = cls()
        return style if output.shows(style.levels + style.end + style.dots) else cls("123456789", "$", "...")


@dataclass(frozen=True, slots=True)
class Cell:
    """A character as it is shown, its columns on the screen, and its level: 0 is no heat."""

    text: str
    width: int = 1
    level: int = 0


def rows_of(
    text: str, spans: Sequence[Span], marks: Sequence[tuple[int, int]], width: int, style: Style
) -> list[list[Cell]]:
    """The text cut into rows of at most `width` columns, at blanks where it can be, each mark in [brackets]."""
    levels = _levels(len(text), spans, len(style.levels))
    starts, ends = {start for start, _ in marks}, {end for _, end in marks}
    rows: list[list[Cell]] = [[]]
    for i, char in enumerate([*text, ""]):
        rows[-1] += [Cell("]")] * (i in ends) + [Cell("[")] * (i in starts)
        if char == "\n":
            rows[-1] += [Cell(style.end, level=levels[i])] * (levels[i] > 0)
            rows.append([])
        elif char:
            rows[-1].append(_cell(char, levels[i]))
    return [part for row in rows for part in _wrapped(row, width)]


def _levels(length: int, spans: Sequence[Span], steps: int) -> list[int]:
    """The level of each of so many characters: the highest of the spans that cover it."""
    levels = [0] * length
    for start, end, height in spans:
        level = round(min(1.0, max(0.0, height)) * steps)
        levels[start:end] = [max(level, other) for other in levels[start:end]]
    return levels


def _cell(char: str, level: int) -> Cell:
    from rich.cells import cell_len

    # A control character would move the cursor, or worse.
    char = " " if char == "\t" else char if char.isprintable() else "."
    return Cell(char, cell_len(char), level)


def _wrapped(row: list[Cell], width: int) -> Iterator[list[Cell]]:
    while sum(cell.width for cell in row) > width:
        cut = columns = 0
        while columns + row[cut].width <= width:
            columns += row[cut].width
            cut += 1
        blank = max((i + 1 for i in range(cut) if row[i].text == " "), default=cut)
        yield row[: max(1, blank)]
        row = row[max(1, blank) :]
    yield row


def heat_of(row: Sequence[Cell], style: Style) -> str:
    """The line under a row, without the blanks at its end."""
    return "".join((" " + style.levels)[cell.level] * cell.width for cell in row).rstrip()


def print_heat(text: str, spans: Sequence[Span], marks: Sequence[tuple[int, int]]) -> None:
    """Print a text with its heat on stdout; what is marked, characters [start, end), is put in brackets."""
    style = Style.of_stdout()
    rows = rows_of(text, spans, marks, output.width(PIPE), style)
    few = len(rows) <= LONG
    for keep, group in groupby(rows, lambda row: few or any(cell.level or cell.text == "[" for cell in row)):
        lines = list(group)
        if not keep and len(lines) > 1:
            output.styled([(f"{style.dots} {len(lines)} lines without effect", "dim")])
            continue
        for row in lines:
            output.styled((cell.text, "bold" if cell.level else "") for cell in row)
            heat = heat_of(row, style)
            if heat:
                output.styled([(heat, "bold yellow")])
