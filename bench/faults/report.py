"""docs/reliability.md: the table of the campaign is between two marks; all else is written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.faults.frame import Row
from bench.marked import put_between

BEGIN, END = "<!-- make faults: begin -->", "<!-- make faults: end -->"
KEPT = "results/faults.json"  # the rows, in a file next to the document


def write(path: Path, rows: Sequence[Row], about: Mapping[str, tuple[str, str]]) -> None:
    """Put the rows in place of those of the same kind; keep the others. `about`: title and failures of each kind."""
    kept = path.parent / KEPT
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    all_rows = {row.kind: row for row in (*(Row(**row) for row in known), *rows)}
    ordered = [all_rows[kind] for kind in about if kind in all_rows]
    kept.write_text(json.dumps([asdict(row) for row in ordered], indent=1) + "\n", encoding="utf-8")
    put_between(path, BEGIN, END, f"\n\n{table(ordered, about)}\n\n")


def table(rows: Sequence[Row], about: Mapping[str, tuple[str, str]]) -> str:
    """Return the table, and below it the method and the failures of each kind."""
    lines = [
        "| kind | seed | cases | accepted, sound | refused | crashes | hangs | wrong | losses | minutes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        numbers = (row.cases, row.accepted, row.refused, row.crashes, row.hangs, row.wrong, row.losses)
        cells = " | ".join(f"{number:,}" for number in numbers)
        lines.append(f"| {row.kind} | {row.seed} | {cells} | {row.seconds / 60:.1f} |")
    total = sum(row.cases for row in rows)
    bad = [sum(getattr(row, name) for row in rows) for name in ("crashes", "hangs", "wrong", "losses")]
    lines.append(f"| *all* | | {total:,} | | | {' | '.join(f'{number:,}' for number in bad)} | |")
    for row in rows:
        title, fails = about[row.kind]
        notes = f" {row.notes[0].upper()}{row.notes[1:]}." if row.notes else ""
        lines += ["", f"**{row.kind}**: {title} A failure is {fails}{notes}"]
        lines += [f"- {failure}" for failure in row.failures]
    return "\n".join(lines)


def sentence(row: Row) -> str:
    """One row for people who wait."""
    found = f"{row.crashes} crashes, {row.hangs} hangs, {row.wrong} wrong, {row.losses} losses"
    return (
        f"{row.kind:<14}{row.cases:>8,} cases: {row.accepted:,} accepted, {row.refused:,} refused; {found} "
        f"({row.seconds:.0f} s)"
    )
