"""`notes bench`: time prefill against splice on this machine, and find after how many questions a compile pays.

The plot needs matplotlib, an optional dependency.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import Number, check_place, json_option, model_options, open_model
from notes_cli.commands.remedies import print_callbacks
from notes_cli.commands.terminal import GroupedCommand
from notes_cli.errors import NotesError
from notes_cli.explanations import attributes

if TYPE_CHECKING:
    from collections.abc import Callable

    from notes_cli.measure.speed import Length, Speed, Times


def lengths(value: Any) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return value
    return tuple(int(Number(1).convert(word.strip(), None, None)) for word in str(value).split(","))


@click.command(cls=GroupedCommand)
@click.option(
    "--tokens",
    type=lengths,
    default="1024,4096",
    metavar="N,...",
    help="Lengths of the skills. One that there is no memory for is left out.",
)
@click.option("--runs", type=Number(2, 1000), default=5, help="How often each is measured.")
@click.option("--question", type=Number(1), default=16, help="Tokens of the question.")
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw a picture: .png or .svg.")
@model_options
def command(tokens: tuple[int, ...], runs: int, question: int, json_: bool, plot: Path | None, **model: Any) -> None:
    """Measure how fast a splice is here, beside a prefill of the same tokens.

    For each length: a prefill, a splice from the file to the cache with every byte checked, a question after it to its
    first token, and from which question on it pays to compile. They take turns, so that a busy machine slows them
    alike. Figures are medians, with the shortest and the longest; the ratio is the median of those of each turn. The
    file is in the page cache. Prefills of a length that take more than a minute in all are not repeated as often.

    \b
    Examples:
      notes bench
      notes bench -m model.gguf --tokens 1024,4096,16384 --plot speed.svg
      notes bench -m model.gguf -fa off --json
    """
    from notes_cli.measure.speed import Benching

    if plot:
        check_plot(plot)
    with open_model(quiet=json_, **model) as opened:
        speed = opened.bench(Benching(tokens, runs, question), callbacks=print_callbacks(json_))
    try:
        if plot:
            write_speed(plot, speed)
    finally:  # print the measurements even if the plot fails
        if json_:
            output.as_json({"version": 1, **_as_json(speed)})
        else:
            _print(speed)


def _print(speed: Speed) -> None:
    threads = output.counted(speed.threads, "thread")
    output.result(f"{speed.model}: {threads}, K/V {speed.cache}, flash attention {speed.flash_attention}\n")
    lines: list[tuple[str, Callable[[Length], str]]] = [
        ("prefill / splice", lambda length: f"{length.prefill.over(length.splice):,.0f}"),
        ("prefill", lambda length: _times(length.prefill)),
        ("splice from the file", lambda length: _times(length.splice)),
        (f"question of {speed.wanted.question} tokens after it", lambda length: _times(length.question)),
        ("compiling pays from question", lambda length: f"{length.pays_from or 'never'}"),
        ("K/V in the cache", lambda length: output.human_size(length.cached)),
    ]
    columns = ("", *(f"{length.tokens:,} tokens" for length in speed.lengths))
    output.table(columns, [(label, *map(cell, speed.lengths)) for label, cell in lines], right=columns[1:])


def _times(times: Times) -> str:
    if times.median < 1:
        return f"{1000 * times.median:.1f} ms ({1000 * times.low:.1f} to {1000 * times.high:.1f})"
    return f"{times.median:.1f} s ({times.low:.1f} to {times.high:.1f})"


def _as_json(speed: Speed) -> dict[str, Any]:
    def spread(times: Times) -> dict[str, Any]:
        return {**attributes(times, "median", "low", "high"), "runs": len(times.seconds)}

    lengths = [
        {
            "tokens": length.tokens,
            "cache_bytes": length.cached,
            "file_bytes": length.stored,
            **{name: spread(getattr(length, name)) for name in ("prefill", "splice", "question")},
            "write": length.write,
            "prefill_over_splice": length.prefill.over(length.splice),
            "pays_from": length.pays_from,
        }
        for length in speed.lengths
    ]
    return {
        **attributes(speed, "model", "threads", "flash_attention", "cache"),
        "question": speed.wanted.question,
        "lengths": lengths,
        "left_out": [attributes(length, "tokens", "why") for length in speed.left_out],
    }


ENDINGS = (".png", ".svg")
BLUE, RED = "#0072B2", "#D55E00"  # safe for colour-blind readers and in print


def check_plot(path: Path) -> None:
    """Raise errors before measuring: UsageError for another suffix, NotesError without matplotlib or a folder."""
    check_place(path, "--plot", ENDINGS)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NotesError("--plot needs matplotlib", "Install it: pip install matplotlib") from None


def write_speed(path: Path, speed: Speed) -> None:
    """Plot total seconds by number of questions for each length: prefilled each time, or compiled once and spliced."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "notes"}):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        axes = figure.subplots()
        most = max([10, *(2 * length.pays_from for length in speed.lengths if length.pays_from)])
        for length, line in zip(speed.lengths, cycle(("-", "--", "-.", ":"))):
            question, compiled = length.question.median, length.prefill.median + length.write
            for label, color, first, each in (
                ("prefilled each time", RED, 0.0, length.prefill.median + question),
                ("compiled once, then spliced", BLUE, compiled, length.splice.median + question),
            ):
                label = f"{length.tokens:,} tokens, {label}"
                axes.plot((0, most), (first, first + most * each), color=color, linestyle=line, label=label)
        axes.set(xlim=(0, most), ylim=(0, None), xlabel="questions", ylabel="seconds in all")
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axes.set_title(f"{output.line(speed.model, 60)}, {speed.cache}, {speed.threads} threads", parse_math=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
