"""How much of a decision single attention heads read, and write: what is made of log-odds once heads were patched.

The patching itself takes PyTorch: training/tiny/heads.py has what is patched, and where. A head is named by its layer
and its number in the layer, both from 0: "6.2". Heads are ranked by their mean recovery alone over cases of their own
(RANKING), so no heads are chosen by the cases that tell what the chosen ones do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.experiments.table import Row, Table

WAYS = {
    "read": "read",
    "write": "write",
    "direct": "write directly (other heads stale)",
}
MEASURED, RANKING = "heads", "heads ranked"  # experiments, each with texts of its own
TOP = 4
ENOUGH = 0.8  # of what all heads recover together
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)  # of heads that are put in together, beside all of them
BY = "python -m training.tiny.heads"


class NoCasesError(Exception):
    """There is nothing to rank heads by; what to do is said."""


def alone(way: str, recoveries: Mapping[str, float]) -> Row:
    """Columns of a case by which heads are ranked: what each head recovers alone."""
    return {f"{way} {name}": value for name, value in recoveries.items()}


def ranked(rows: Table, way: str) -> list[str]:
    """Names of all heads, that with the highest mean recovery alone first. Raise NoCasesError if all cases are left
    out."""
    used = Table(row for row in rows if not row["excluded"])
    if not len(used):
        raise NoCasesError("both values decided alike in all cases, so heads cannot be ranked: take more by --cases")
    columns = [name for name in used.rows[0] if name.startswith(f"{way} ")]
    return [name.removeprefix(f"{way} ") for name in sorted(columns, key=used.mean, reverse=True)]


def counts(heads: int) -> list[int]:
    """How many of the first of so many heads are put in together; all of them last."""
    return [*(count for count in COUNTS if count < heads), heads]


def together(way: str, order: Sequence[str], recoveries: Mapping[str, float], curve: Sequence[float]) -> Row:
    """Columns of a measured case. `recoveries`: of each head alone. `curve`: of as many of `order` as `counts` says.

    `WAY K`: what the first K recover together. `WAY alone`, `WAY alone, all`: the sum of what the top 4, and all,
    recover alone. `WAY needed`: the first K that recovers ENOUGH of what all do.
    """
    if sorted(recoveries) != sorted(order):
        raise ValueError(f"ranked heads {', '.join(order)}, but measured {', '.join(recoveries)}")
    found = dict(zip(counts(len(order)), curve, strict=True))
    every = found[len(order)]
    enough = next((count for count, value in found.items() if value >= ENOUGH * every), len(order))
    return {
        f"{way} heads": " ".join(order),
        **{f"{way} {count}": value for count, value in found.items()},
        f"{way} alone": sum(recoveries[name] for name in order[:TOP]),
        f"{way} alone, all": sum(recoveries.values()),
        f"{way} needed": enough,
    }
