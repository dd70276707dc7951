"""The plot of a bench, by matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from notes_cli.errors import NotesError
from notes_cli.output import spelt

if TYPE_CHECKING:
    from notes_cli.measure.speed import Speed, Times

ENDINGS = (".png", ".svg")
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"  # told apart by any eyes, and in print


def check_plot(path: Path) -> None:
    """Fail before anything is measured: UsageError for another ending, NotesError without matplotlib or a folder."""
    if path.suffix.lower() not in ENDINGS:
        raise click.UsageError(f"--plot writes {' or '.join(ENDINGS)}, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise NotesError(f"{path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NotesError("--plot needs matplotlib", "Install it: pip install matplotlib") from None


def write_speed(path: Path, speed: Speed) -> None:
    """Seconds over the tokens of a skill, both in powers: medians, with a bar from the shortest to the longest."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with rc_context({"svg.hashsalt": "notes"}):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        axes = figure.subplots()
        counts = [one.tokens for one in speed.lengths]
        lines: tuple[tuple[str, str, str, str, list[Times]], ...] = (
            ("prefill of the same tokens", RED, "s", "-", [one.prefill for one in speed.lengths]),
            (f"question of {speed.wanted.question} tokens", GREEN, "^", "-", [one.question for one in speed.lengths]),
            ("splice from the file", BLUE, "o", "-", [one.splice for one in speed.lengths]),
            ("memcpy of as many bytes", GREY, "D", "--", [one.memcpy for one in speed.lengths]),
        )
        for label, color, mark, line, found in lines:
            medians = [one.median for one in found]
            spread = [[one.median - one.low for one in found], [one.high - one.median for one in found]]
            axes.errorbar(
                *(counts, medians), yerr=spread, color=color, marker=mark, linestyle=line, capsize=3, label=label
            )
        axes.set(xscale="log", yscale="log", xlabel="tokens of the skill", ylabel="seconds")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axes.set_title(f"{spelt(speed.model, 60)}, {speed.cache}, {speed.threads} threads", parse_math=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
