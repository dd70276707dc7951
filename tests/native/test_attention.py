"""Tests of flash attention on the CPU (native/patches/speed) against attention in NumPy's float64."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
import pytest

from .ggml import BF16, F16, F32, Q4_0, Q8_0, Array, Operation, rounded

pytestmark = pytest.mark.patches("speed")


@dataclass(frozen=True)
class Case:
    """Shapes and options of an attention."""

    queries: int = 1
    rows: int = 300  # of K and V
    groups: int = 2  # heads of K and V
    heads: int = 2  # that share each of them
    streams: int = 1
    key: int = 64
    value: int = 64
    kind: int = F16  # of K and V
    values: int | None = None  # of V, if another
    # none, causal, window, apart (a sequence for five queries), heads (one for each head), blind (some see nothing)
    mask: str = "causal"
    bias: float = 0.0  # ALiBi
    softcap: float = 0.0
    sinks: bool = False
    permuted: bool = True  # rows of all heads next to each other, as in a K/V cache
    threads: int = 2


def kind_of_v(case: Case) -> int:
    return case.kind if case.values is None else case.values


def computed(case: Case, q: Array, k: Array, v: Array, mask: Array | None, sinks: Array | None) -> Array:
    """ggml's, [streams, queries, all heads, value]. Arrays are [streams, heads, rows, width]."""
    with Operation() as operation:
        put, base = operation.put, operation.base
        out = base.ggml_flash_attn_ext(
            *(operation.context, put(q, F32, permuted=case.permuted)),
            *(put(k, case.kind, permuted=case.permuted), put(v, kind_of_v(case), permuted=case.permuted)),
            *(None if mask is None else put(mask, F16), case.key**-0.5, case.bias, case.softcap),
        )
        if sinks is not None:
            base.ggml_flash_attn_ext_add_sinks(out, put(sinks[None, None, None], F32))
        shape = case.streams, case.queries, case.groups * case.heads, case.value
        return operation.compute(out, shape, case.threads).astype(np.float64)


def expected(case: Case, q: Array, k: Array, v: Array, mask: Array | None, sinks: Array | None) -> Array:
    """The same in float64."""
    heads = case.groups * case.heads
    scores = np.einsum("shqd,shrd->shqr", q, k.repeat(case.heads, 1)) * case.key**-0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if mask is not None:
        scores = scores + slopes(heads, case.bias)[None, :, None, None] * mask[:, :, : case.queries]
    extra = (
        np.full((*scores.shape[:3], 1), -np.inf)
        if sinks is None
        else np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    )
    scores = np.concatenate([scores, extra], -1)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)[..., :-1]
    return np.einsum("shqr,shrd->sqhd", weights, v.repeat(case.heads, 1))


def slopes(heads: int, bias: float) -> Array:
    """Slopes of ALiBi, one per head."""
    if not bias:
        return np.ones(heads)
    even = 1 << int(np.floor(np.log2(heads)))
    first, second = 2 ** (-bias / even), 2 ** (-bias / 2 / even)
    return np.array([first ** (h + 1) if h < even else second ** (2 * (h - even) + 1) for h in range(heads)])


def masked(case: Case, rng: np.random.Generator) -> Array | None:
    """[streams, 1 or heads, queries, rows], 0 or a bias where a query sees a row."""
    if case.mask == "none":
        return None
    heads = case.groups * case.heads if case.mask == "heads" else 1
    rows, at = np.arange(case.rows), np.arange(case.queries)[:, None] + case.rows - case.queries
    mask = np.zeros((case.streams, heads, case.queries, case.rows))
    if case.mask == "heads":
        mask[rng.random(mask.shape) < 0.5] = -np.inf
    elif case.mask == "apart":  # a shared prefix, and rows per sequence
        own = (rows // 20) % max(1, case.queries // 5 + 1)
        mask[..., (rows >= case.rows // 3) & (own != np.arange(case.queries)[:, None] // 5)] = -np.inf
    elif case.mask == "blind":
        mask[:, :, ::3] = -np.inf
    else:
        mask[..., rows > at] = -np.inf
        if case.mask == "window":
            mask[..., rows < at - 40] = -np.inf
    if case.bias:
        mask = np.where(np.isinf(mask), mask, -np.abs(rows - at).astype(float))
    return mask


def given(case: Case) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Random numbers: Q, K, V, a mask, sinks."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    q = rounded(rng.normal(size=(case.streams, case.groups * case.heads, case.queries, case.key)), F32)
    k = rounded(rng.normal(size=(case.streams, case.groups, case.rows, case.key)), case.kind)
    v = rounded(rng.normal(size=(case.streams, case.groups, case.rows, case.value)), kind_of_v(case))
    return q, k, v, masked(case, rng), rng.normal(size=case.groups * case.heads) * 3 if case.sinks else None


def difference(case: Case) -> float:
    """The largest error of any output, in units of V's."""
    numbers = given(case)
    return float(np.abs(computed(case, *numbers) - expected(case, *numbers)).max())


MASKS = ("causal", "none", "window", "apart", "heads", "blind")


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 7, 8, 15, 16, 17, 33, 63, 64, 65, 130])
def test_any_number_of_queries(queries: int) -> None:
    """Beside each number of heads, masks and numbers of rows by turns, so that each pair of them meets."""
    for number, heads in enumerate((1, 2, 3, 5, 8)):
        for mask, rows in zip(MASKS, islice(cycle((130, 513)), number + queries, None), strict=False):
            case = Case(queries=queries, heads=heads, rows=rows, mask=mask)
            assert difference(case) < 2e-5, case


WAYS: list[dict[str, object]] = [
    *({"key": width, "value": width} for width in (8, 40, 72, 80, 96, 128, 256)),
    *({"key": 192, "value": 128}, {"key": 576, "value": 512}, {"key": 36, "value": 20}),
    *({"kind": F32}, {"kind": F32, "key": 40, "value": 40}, {"kind": BF16}, {"kind": Q8_0}, {"kind": Q4_0, "heads": 4}),
    *({"kind": Q8_0, "values": F16}, {"kind": F16, "values": Q4_0}, {"kind": Q8_0, "mask": "apart", "key": 96}),
    *({"softcap": 20.0}, {"sinks": True}, {"sinks": True, "mask": "blind"}, {"sinks": True, "softcap": 5.0}),
    *({"bias": 8.0}, {"bias": 8.0, "groups": 3, "heads": 2}, {"bias": 8.0, "mask": "window"}),
    *({"streams": 3}, {"streams": 2, "sinks": True, "heads": 4}, {"permuted": False}),
    *({"rows": rows} for rows in (1, 15, 16, 63, 64, 65, 1025)),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_models_ask_for(way: dict[str, object]) -> None:
    for queries, threads in ((1, 1), (1, 16), (3, 2), (16, 3), (70, 1), (70, 16)):
        case = replace(Case(queries=queries, threads=threads, mask="none"), **way)  # type: ignore[arg-type]
        case = replace(case, mask="causal") if case.mask == "none" and queries <= case.rows else case
        assert difference(case) < 2e-5, case


@pytest.mark.parametrize("kind", [F16, Q8_0, F32])
@pytest.mark.parametrize("mask", MASKS)
def test_heads_of_a_tile_are_told_apart(mask: str, kind: int) -> None:
    """A tile of few rows holds several heads of K and V, more with fewer threads: the same bits."""
    for queries, heads in ((1, 1), (1, 2), (1, 7), (2, 2), (5, 1), (7, 3), (16, 2)):
        assert difference(Case(queries, groups=3, heads=heads, rows=150, mask=mask, kind=kind, threads=1)) < 2e-5
        case = Case(queries, groups=8, heads=heads, rows=150, mask=mask, kind=kind, threads=1)
        numbers = given(case)
        alone = computed(case, *numbers)
        assert np.abs(alone - expected(case, *numbers)).max() < 2e-5, case
        for threads in (2, 3, 4):
            assert np.array_equal(alone, computed(replace(case, threads=threads), *numbers)), (case, threads)


@pytest.mark.parametrize("number", [6e4, np.nan, np.inf])
@pytest.mark.parametrize("threads", [1, 16])
def test_a_row_that_is_not_seen_may_be_anything(number: float, threads: int) -> None:
    """Cells of other sequences weigh nothing, even if there are no numbers in them; who sees them gets none."""
    rng = np.random.default_rng(0)
    case = Case(queries=20, rows=200, mask="apart", threads=threads)
    q, k = rng.normal(size=(1, 4, 20, 64)), rounded(rng.normal(size=(1, 2, 200, 64)), F16)
    v, mask = rounded(rng.normal(size=(1, 2, 200, 64)), F16), masked(case, rng)
    assert mask is not None
    no_progress = np.isinf(mask[0, 0, 0])
    other_k, other_v = k.copy(), v.copy()
    other_k[:, :, no_progress], other_v[:, :, no_progress] = number, -number
    alone, beside = (computed(case, q, *rows, mask, None) for rows in ((k, v), (other_k, other_v)))
    seeing = (~np.isinf(mask[0, 0]) & no_progress).any(-1)
    assert not seeing[:5].any() and seeing[5:].any()
    assert np.abs(alone[:, ~seeing] - beside[:, ~seeing]).max() < 2e-3  # row by row sums are in f16
    assert np.isfinite(number) or not np.isfinite(beside[:, seeing]).any()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("wrong", ["query", "keys", "overflow"])
def test_a_score_that_is_no_number_is_told(wrong: str, queries: int, threads: int) -> None:
    """Nothing that a row sees has a score, or each is -inf: the result is no number either, and not 0, which would pass
    for one. Other heads are as they are."""
    case = Case(queries=queries, rows=256, heads=1, mask="none", threads=threads)
    q, k, v, mask, sinks = given(case)
    if wrong == "query":
        q[:, 0] = np.nan
    elif wrong == "keys":
        k[:, 0] = np.nan
    else:
        k[:, 0], q[:, 0] = np.inf, -1.0
    found = computed(case, q, k, v, mask, sinks)
    assert np.isnan(found[:, :, 0]).all()
    assert np.isfinite(found[:, :, 1]).all()
