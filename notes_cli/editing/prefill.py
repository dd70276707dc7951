"""Prefilling parts of a text apart, each preceded by the same left context and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import LayerRows, Tokens
from notes_cli.errors import Progress

# Opens an empty notebook to compute so many rows in, beside those that are in use, and gives it back afterwards.
Scratch = Callable[[int], AbstractContextManager[Notebook]]


def prefill(
    notebook: Notebook, left: Tokens, parts: Sequence[Tokens], dtype: str, progress: Progress | None = None
) -> Iterator[tuple[LayerRows, ...]]:
    """Rows of each part, K rotated to the positions after `left`. `progress` counts the tokens of all parts.

    The notebook is a scratch one: what it holds is dropped. More than one part needs a memory that can go back.
    """
    total, done = sum(map(len, parts)), 0

    def told(count: int, _: int) -> None:
        if progress:
            progress(done + count, total)

    notebook.truncate(0)
    notebook.append(left)
    notebook.flush()
    for number, tokens in enumerate(parts):
        if number:
            notebook.truncate(len(left))
        notebook.append(tokens)
        notebook.flush(told)
        done += len(tokens)
        # All of them: a recurrent state can be read with no fewer.
        rows = notebook.context.read(notebook.sequence, 0, len(notebook), base=0, dtype=dtype)
        yield tuple(layer if layer.part == "state" else layer.cut(slice(len(left), None)) for layer in rows)
