"""`notes bench`: time prefill against splice on this machine, and find after how many questions a compile pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import Number, json_option, model_options, open_model
from notes_cli.commands.remedies import print_callbacks
from notes_cli.commands.terminal import Command, option
from notes_cli.explanations import attributes

if TYPE_CHECKING:
    from collections.abc import Callable

    from notes_cli.measure.speed import Length, Speed, Times


def lengths(value: Any) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return value
    return tuple(int(Number(1).convert(word.strip(), None, None)) for word in str(value).split(","))


@click.command(cls=Command)
@option(
    "--tokens N,...",
    "Lengths of the skills. One that there is no memory for is left out.",
    type=lengths,
    default="1024,4096",
)
@option("--runs", "How often each is measured.", type=Number(2, 1000), default=5)
@json_option
@model_options
def command(tokens: tuple[int, ...], runs: int, json_: bool, **model: Any) -> None:
    """Measure how fast a splice is here, beside a prefill of the same tokens.

    For each length: a prefill, a splice from the file to the cache with every byte checked, a question after it to its
    first token, and from which question on it pays to compile. They take turns, so that a busy machine slows them
    alike. Figures are medians, with the shortest and the longest; the ratio is the median of those of each turn. The
    file is in the page cache. Prefills of a length that take more than a minute in all are not repeated as often.

    \b
    Examples:
      notes bench
      notes bench --tokens 256,1024
      notes bench -m notes-tiny -fa off --json
    """
    from notes_cli.measure.speed import Benching

    with open_model(**model) as opened:
        speed = opened.bench(Benching(tokens, runs), callbacks=print_callbacks())
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
        "left_out": [{"tokens": tokens, "why": why} for tokens, why in speed.left_out.items()],
    }
