"""`notes probe`: what it prints, the heat under the text, the picture, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from samples import SAMPLES

from notes_cli.commands.heat import Style, heat_of, print_heat, rows_of
from notes_cli.config import shipped_model

from .conftest import Notes, Outcome, run_apart, run_here

PROBE = ("probe", SAMPLES / "returns", "-m", shipped_model(), "--field", "date=2026-07-01")
ASK = ("--question", "May I return this?", "--choices", "accepted,refused", "--window", 16)
BLOCKS = Style()


def shown(text: str, spans: list[tuple[int, int, float]], marks: list[tuple[int, int]], width: int = 80) -> list[str]:
    """Rows of text and, after a |, their heat."""
    rows = rows_of(text, spans, marks, width, BLOCKS)
    return ["".join(cell.text for cell in row) + "|" + heat_of(row, BLOCKS) for row in rows]


def test_the_numbers_and_the_text() -> None:
    """Recoveries first, then the verdict, then the text with the field in brackets and its heat under it."""
    outcome = run_here(*PROBE, *ASK)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == "returns, date: 2026-05-01 becomes 2026-07-01"
    assert lines[1] == 'May I return this?  "accepted" becomes "refused"'
    own, behind = (next(line.split() for line in lines if line.startswith(start)) for start in ("the field", "all"))
    assert own[3:] == ["5", own[4], "field", own[6]] and abs(float(own[4])) < 0.1
    assert behind[-2] == "92" and 0.9 < float(behind[-1]) < 1.1
    assert "It rests on rows after the field" in outcome.out
    field, rule = lines.index("date: [2026-05-01]"), next(i for i, line in enumerate(lines) if "If the date" in line)
    assert lines[field + 1] == "tier: gold"
    assert lines[rule + 1][lines[rule].index("refused")] == "█" and lines[rule + 1].startswith(" " * 20)
    assert lines[rule + 2] == "- If the tier is gold then the shipping is free."
    assert "\x1b" not in outcome.out


def test_digits_where_blocks_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII terminal gets the same heat in digits, and no question marks."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    outcome = run_apart(*PROBE, *ASK)
    assert outcome.code == 0 and outcome.out.isascii() and "1 to 9" in outcome.out
    lines = outcome.out.splitlines()
    rule = next(i for i, line in enumerate(lines) if "If the date" in line)
    assert re.fullmatch(r"[ 1-9]+", lines[rule + 1])


def test_colour_is_only_added(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With colour asked for, the same characters with bold on top; NO_COLOR leaves none of it yellow."""
    print_heat("tier: gold", [(6, 10, 1)], [])
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_heat("tier: gold", [(6, 10, 1)], [])
    colour = capsys.readouterr().out
    assert plain == "tier: gold\n      ████\n" and "\x1b[1;33m      ████\x1b[0m" in colour
    monkeypatch.setenv("NO_COLOR", "1")
    print_heat("tier: gold", [(6, 10, 1)], [])
    assert "33m" not in capsys.readouterr().out


def test_heat() -> None:
    """A height is rounded to its level, the highest of several counts, none and less than none is a blank."""
    spans = [(0, 1, 1.0), (1, 2, 0.5), (2, 3, 0.07), (3, 4, 0.05), (4, 5, -1.0), (5, 6, 3.0), (5, 6, 0.1)]
    assert shown("abcdefg", spans, []) == ["abcdefg|█▄▁  █"]


def test_marks_keep_the_heat_in_its_place() -> None:
    """Brackets shift text and heat alike, at the very end, too."""
    assert shown("a: bc\nd: e", [(3, 5, 1), (9, 10, 1)], [(3, 5), (9, 10)]) == ["a: [bc]|    ██", "d: [e]|    █"]


def test_line_breaks_show_their_heat() -> None:
    """A line break matters to models: one with heat is shown, one without is not."""
    assert shown("a\nb\nc", [(1, 2, 1), (3, 4, 0.01)], []) == ["a⏎| █", "b|", "c|"]


def test_wide_and_hostile_characters() -> None:
    """A character of two columns has two of heat; what would move the cursor is shown as a dot."""
    assert shown("日本\tx\x1b[2J", [(1, 2, 1), (3, 5, 1)], []) == ["日本 x.[2J|  ██ ██"]


def test_long_lines_are_cut_at_blanks() -> None:
    """Heat stays under its text; a word longer than a row is cut where it must be."""
    assert shown("one two threefourfive", [(8, 21, 1)], [], width=8) == [
        "one two |",
        "threefou|████████",
        "rfive|█████",
    ]
    assert shown("日本", [], [], width=1)[0] == "日|"


def test_lines_without_effect_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a long text; a short one is shown whole."""
    text = "\n".join(["date: x", *(f"line {i}" for i in range(40)), "end"])
    print_heat(text, [(len(text) - 3, len(text), 0.5)], [(6, 7)])
    assert capsys.readouterr().out.splitlines() == ["date: [x]", "… 40 lines without effect", "end", "▄▄▄"]
    print_heat("\n".join("abc"), [], [])
    assert capsys.readouterr().out == "a\nb\nc\n"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(tmp_path: Path, ending: str) -> None:
    """A picture of the wanted kind beside the report, also where dollars and hostile characters are in the text."""
    skill = tmp_path / "odd.txt"
    skill.write_text("tier: gold\n\n- If the tier is gold then the fee is $5 $_{x}.\n- Else 日本 \x07 \ud7ff <b>&.\n")
    path = tmp_path / f"out.{ending}"
    outcome = run_here("probe", skill, *PROBE[2:4], "--field", "tier=silver", "--plot", path)
    assert (outcome.code, outcome.err.count("\n")) == (0, 1), outcome.err
    assert "silver" in outcome.out
    if ending == "png":
        assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
    else:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def refused(outcome: Outcome, code: int) -> str:
    """One line on stderr, nothing on stdout."""
    assert (outcome.code, outcome.out) == (code, "") and outcome.err.startswith("notes: ")
    assert outcome.err.count("\n") == 1
    return outcome.err


def test_plot_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ending, a folder that is not there, no matplotlib."""
    assert "--plot writes .png or .svg, not 'out.pdf'" in refused(run_here(*PROBE, "--plot", "out.pdf"), 2)
    missing = tmp_path / "no" / "out.png"
    assert f"there is no folder {missing.parent}" in refused(run_here(*PROBE, "--plot", missing), 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused(run_here(*PROBE, "--plot", tmp_path / "out.png"), 1)
    assert said == "notes: --plot needs matplotlib. Install it: pip install matplotlib\n"


def test_a_picture_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    """The report is printed all the same; exit 1."""
    (tmp_path / "out.png").mkdir()
    outcome = run_here(*PROBE, *ASK, "--plot", tmp_path / "out.png")
    assert outcome.code == 1 and "Is a directory" in outcome.err and "recovery" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--field", "colour=x"), 1, "no field 'colour'"),
        (("--field", "date="), 1, "has no value"),
        (("--field", "date=2026-06-01"), 1, "date is 2026-06-01 already"),
        (("--field", "tier=basic", "--choices", "a,a"), 2, "two or more different answers"),
        (("--field", "tier=basic", "--choices", "a,b"), 1, "decides the same with tier=gold and tier=basic"),
        (("--field", "tier", "--window", 0), 2, "from 1 to"),
        ((), 2, "--field"),
    ],
)
def test_refusals(notes: Notes, compiled: Path, arguments: tuple[object, ...], code: int, message: str) -> None:
    """One line that says what, which value and what to do."""
    assert message in refused(notes("probe", "returns", *arguments), code)
