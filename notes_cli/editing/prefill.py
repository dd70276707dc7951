"""Prefilling parts of a text apart, each behind the same left context and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from notes_cli.engine.context import Context
from notes_cli.engine.notebook import Notebook, Progress
from notes_cli.engine.segment import LayerRows, Tokens


def prefill(
    context: Context, left: Tokens, parts: Sequence[Tokens], dtype: str, progress: Progress | None = None
) -> Iterator[tuple[LayerRows, ...]]:
    """Rows of each part, K rotated to the positions behind `left`. `progress` counts the tokens of all parts.

    Uses sequence 0 of the context, which is empty afterwards. More than one part needs a memory that can go back.
    """
    total, done = sum(map(len, parts)), 0

    def told(count: int, _: int) -> None:
        if progress:
            progress(done + count, total)

    context.clear()
    notebook = Notebook(context)
    notebook.append(left)
    notebook.flush()
    for number, tokens in enumerate(parts):
        if number:
            notebook.truncate(len(left))
        notebook.append(tokens)
        notebook.flush(told)
        done += len(tokens)
        rows = context.read(0, 0, len(notebook), base=0, dtype=dtype)  # a recurrent state can only be read with all
        yield tuple(layer if layer.part == "state" else layer.cut(slice(len(left), None)) for layer in rows)
    context.clear()
