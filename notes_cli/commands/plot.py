"""Pictures of a probe and of a bench. The only user of matplotlib, which is an extra."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from notes_cli.errors import NotesError
from notes_cli.output import spelt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from notes_cli.measure.probe import Probe
    from notes_cli.measure.speed import Speed, Times

ENDINGS = (".png", ".svg")
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"  # told apart by any eyes, and in print
LABELS = 160  # windows that still have room for their texts


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


def write_plot(path: Path, probe: Probe) -> None:
    """Two panels over the tokens from the field on: patched from or up to each token, and each token alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = len(probe.windows)
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "notes"}):
        warnings.simplefilter("ignore")  # a character that the font does not have is drawn as a box
        figure = Figure(figsize=(min(24.0, max(8.0, 0.16 * count)), 7.2), layout="constrained")
        curves, bars = figure.subplots(2, 1, sharex=True)
        old, new = probe.values
        figure.suptitle(
            f"{probe.skill}, {probe.field}: {spelt(old, 60)} → {spelt(new, 60)}\n{spelt(probe.question, 80)}  "
            f"“{spelt(probe.decisions[0], 40)}” → “{spelt(probe.decisions[1], 40)}”",
            parse_math=False,
        )
        _curves(curves, probe)
        _bars(bars, probe)
        _save(figure, path)


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
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _curves(axes: Axes, probe: Probe) -> None:
    places = range(len(probe.windows))
    suffix, prefix = ([getattr(window, name) for window in probe.windows] for name in ("suffix", "prefix"))
    axes.plot(places, suffix, color=BLUE, marker="o", markersize=3.5, label="new from this token on")
    axes.plot(
        *(places, prefix),
        color=RED,
        linestyle="--",
        marker="s",
        markersize=3,
        label="new from the field up to this token",
    )
    _frame(axes, probe, "recovery")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)


def _bars(axes: Axes, probe: Probe) -> None:
    alone = [window.alone for window in probe.windows]
    colors = [RED if window.field else BLUE for window in probe.windows]
    axes.bar(range(len(alone)), alone, color=colors, width=0.8)
    _frame(axes, probe, "recovery, each alone new")
    if len(alone) <= LABELS:
        texts = [spelt(window.text, 14) for window in probe.windows]
        turn = 90 if max(map(len, texts)) > 2 else 0
        axes.set_xticks(range(len(alone)), texts, rotation=turn, fontsize=8, family="monospace", parse_math=False)
        for label, window in zip(axes.get_xticklabels(), probe.windows, strict=True):
            label.set_color(RED if window.field else "black")
    axes.set_xlim(-0.7, len(alone) - 0.3)
    what = "tokens" if probe.window == 1 else f"windows of {probe.window} tokens"
    axes.set_xlabel(f"{what} from {probe.field} on, its own in red", color=GREY)


def _frame(axes: Axes, probe: Probe, label: str) -> None:
    for height in (0, 1):
        axes.axhline(height, color=GREY, linewidth=0.8, zorder=0)
    axes.set_ylabel(label)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for place, window in enumerate(probe.windows):
        if window.field:
            axes.axvspan(place - 0.5, place + 0.5, color=RED, alpha=0.12, linewidth=0)
