"""How pictures look: colours that any eyes tell apart (Okabe and Ito), marks that a printer does, few lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BLUE, ORANGE, GREEN, PINK, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#666666"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY)
MARKS = ("o", "s", "^", "D", "v")
LINES = ("-", "--", "-.", ":", "-")


def save(path: Path, draw: Callable[[Figure], None]) -> None:
    with rc_context({"svg.hashsalt": "notes", "font.size": 10}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        draw(figure)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def plain(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Labels, and no lines that say nothing."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def curves(axes: Axes, x: Sequence[float], lines: Mapping[str, Sequence[float]]) -> None:
    """One curve a name, told apart by colour, mark and stroke; the marks become smaller, so that equal ones show."""
    for number, (name, y) in enumerate(lines.items()):
        kind = number % len(COLORS)
        axes.plot(
            *(x, y),
            color=COLORS[kind],
            marker=MARKS[kind],
            linestyle=LINES[kind],
            markersize=9 - 1.7 * kind,
            label=name,
        )
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=9)


def logarithmic(axes: Axes) -> None:
    """A logarithmic y, with numbers as people write them."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def bars(axes: Axes, names: Sequence[str], groups: Mapping[str, Sequence[float]]) -> None:
    """Lying bars, the first name at the top, one of each group beside the others."""
    height = 0.8 / len(groups)
    for number, (group, values) in enumerate(groups.items()):
        places = [place + (number - (len(groups) - 1) / 2) * height for place in range(len(names))]
        hatch = ("", "///", "...")[number % 3]
        drawn = axes.barh(places, values, height, color=COLORS[number], label=group, hatch=hatch, edgecolor="white")
        labels = ["refused" if value != value else f"{value:.3f}" for value in values]
        axes.bar_label(drawn, labels, padding=3, fontsize=7.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(groups))
