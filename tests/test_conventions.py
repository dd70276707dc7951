"""docs/conventions.md: each row names existing tests, or a reason why it is not met."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def wrong(document: str, known: set[str]) -> list[str]:
    """Return rows without tests, with unknown tests, or without a reason."""
    found = []
    for line in document.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or cells[0] in ("convention", "request") or set(cells[0]) == {"-"}:
            continue
        named = re.findall(r"`(test_\w+)`", cells[2])
        found += [f"{cells[0]}: there is no {name}" for name in named if name not in known]
        if cells[1].startswith("not met"):
            found += [f"{cells[0]}: no reason"] if len(cells[1]) < len("not met: a reason") else []
        elif not named:
            found.append(f"{cells[0]}: no test")
    return found


def test_each_row_is_met_with_its_tests_or_says_why_not() -> None:
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    document = (ROOT / "docs" / "conventions.md").read_text(encoding="utf-8")
    assert wrong(document, known) == []
    assert len(re.findall(r"^\| (?!-|convention|request)", document, re.M)) == 35 + 20


def test_rows_that_are_wrong_are_found() -> None:
    """The control."""
    rows = "| a | met | `test_a` |\n| b | met | |\n| c | met | `test_c` |"
    rows += "\n| d | not met | |\n| e | not met: too early | |"
    assert wrong(rows, {"test_a"}) == ["b: no test", "c: there is no test_c", "d: no reason"]
