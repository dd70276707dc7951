"""The finding as a picture: what decides with which rows fresh, and the note index, a bar for each training seed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.experiments import figures
from bench.protocol.paper import HEADLINE, Verdicts, check_of

SHARES = (
    ("field's rows", "H4", HEADLINE["H4"]),
    ("rows after it", "H5", HEADLINE["H5"]),
    ("asked rule's lines", "H8", "asked rule's lines fresh: acts on the new value"),
    ("another rule's", "H8", "another rule's lines fresh"),
    ("field's rows,\nreasoned", "H9", HEADLINE["H9"]),
)
INDICES = (("fields above", "H6", HEADLINE["H6"]), ("fields below", "H7", HEADLINE["H7"]))
WORDS = "held-out"


def save(path: Path, verdicts: Verdicts) -> bool:
    """Draw what there is, of words that training never saw. False, and no picture, where that is nothing."""
    there = any(check_of(found.get((name, WORDS)), what) for found in verdicts.values() for _, name, what in SHARES)
    if there:
        figures.save(path, partial(draw, verdicts))
    else:
        path.unlink(missing_ok=True)
    return there


def draw(verdicts: Verdicts, figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(left, SHARES, verdicts)
    left.set_xlim(0, 1.05)
    figures.plain(left, x="acts on the new value", title="Only these rows fresh")
    _bars(right, INDICES, verdicts)
    right.set_xlim(-1.05, 1.05)
    right.axvline(0, color=figures.GREY, linewidth=1)
    figures.plain(right, x="note index: after less field", title="Where decisions rest")
    left.legend(frameon=False, fontsize=8, loc="upper right")


def _bars(axes: Axes, rows: tuple[tuple[str, str, str], ...], verdicts: Verdicts) -> None:
    """Lying bars with their intervals; what was not measured has none."""
    height = 0.8 / max(1, len(verdicts))
    for number, (seed, found) in enumerate(verdicts.items()):
        color, shift = figures.COLORS[number], (number - (len(verdicts) - 1) / 2) * height
        label = f"seed {seed}"
        for place, (_, name, what) in enumerate(rows):
            check = check_of(found.get((name, WORDS)), what)
            if check:
                axes.barh(place + shift, check["value"], height, color=color, edgecolor="white", label=label)
                label = ""
                if check["low"] is not None:
                    axes.plot((check["low"], check["high"]), (place + shift,) * 2, color="black", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
