"""The field and the K tokens after it on which it has the highest effect, computed again: selective@K, K by K."""

from __future__ import annotations

from collections.abc import Iterator

from bench.experiments.table import Row
from bench.protocol.measures.mixing import acts, began, excluded, mixes_of
from bench.protocol.texts import Next
from notes_cli.runtime.workspace import Workspace

KS = (1, 4, 16, 64)


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.cases("selective", cases):
        row = excluded(number, case)
        for mixes in mixes_of(workspace, case):
            row = began(number, case, mixes)
            for k in KS:
                recovery = mixes.by_method(f"selective@{k}")
                row |= {f"k{k}": acts(recovery), f"k{k}_recovery": recovery}
        yield row
