"""The rows of the paper's table, and what is beside each: checks of hypotheses, or what other benches have stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.experiments.agent import PLACES
from bench.experiments.blocks import SIZES
from bench.protocol.measures.heads import TOP, WAYS
from bench.protocol.measures.seams import SEAMS


@dataclass(frozen=True)
class Shown:
    """Figures of one hypothesis: what the row calls each, and which check it is."""

    hypothesis: str
    checks: Mapping[str, str]
    barred: bool = True  # the hypothesis' verdict is of what the row claims; else its figures are only reported


@dataclass(frozen=True)
class Row:
    """A row of the paper's table. `sources`: of other benches, by their name in elsewhere.py."""

    section: str
    what: str
    found: str
    shown: tuple[Shown, ...] = ()
    sources: str = ""


_FINDING, _EDIT, _COMPOSE = "The finding", "Operation 1: edit", "Operation 2: compose"
_BOTH, _CACHES, _SERVING = "Both together", "Which caches", "Serving"
_NEW = "acts on the new value"
_AS = "as the recompute"


def _edited(name: str) -> Shown:
    label = f"{name}, in a transplanted skill: {_AS}"
    return Shown("H16", {label: f"{name}, transplanted: as the recompute"}, barred=False)


ROWS = (
    Row(
        _FINDING,
        "refresh the field's own K/V only",
        "recovers about 0 of the decision; the field's own K/V drives under 1% of it",
        (Shown("H4", {_NEW: f"field's rows fresh: {_NEW}", "recovery": "recovery, mean"}),),
    ),
    Row(
        _FINDING,
        "recompute everything after the field",
        "recovers it fully",
        (
            Shown("H5", {_NEW: f"rows after it fresh: {_NEW}", "recovery": "recovery, mean"}),
            Shown("H6", {"note index, fields above": "note index"}),
            Shown("H7", {"note index, fields below (control)": "note index"}),
        ),
    ),
    Row(
        _FINDING,
        "recompute only part of what follows",
        "recovery grows with the share recomputed, concentrated in the suffix",
        (
            Shown("H10", {"K = 1": f"K = 1: {_NEW}", "K = 64": f"K = 64: {_NEW}", "apart": "K = 64 less K = 1"}),
            Shown(
                "H8",
                {
                    "the asked rule's lines": f"asked rule's lines fresh: {_NEW}",
                    "another rule's": "another rule's lines fresh",
                },
            ),
        ),
    ),
    Row(
        _FINDING,
        "override wording, once the new value is present",
        'redundant; "re-evaluate" phrasing does not help',
        (
            Shown(
                "H14",
                {
                    "re-evaluate less nothing": "re-evaluate less nothing",
                    "nothing said": f"nothing said: {_NEW}",
                    "re-evaluate": f"again said: {_NEW}",
                },
            ),
        ),
    ),
    Row(
        _FINDING,
        "read heads against write heads",
        "reading is concentrated (top heads about 0.78 of the decision), writing is spread out",
        (Shown("H21", {name: f"{name}: share of the top {TOP}" for name in WAYS.values()}),),
    ),
    Row(_EDIT, "stale: do nothing", "acts on the old value", (_edited("stale"),)),
    Row(
        _EDIT,
        "field only, without a chain of thought",
        "ignored",
        (Shown("H4", {_NEW: f"field's rows fresh: {_NEW}"}), _edited("field")),
    ),
    Row(
        _EDIT,
        "field only, with a chain of thought",
        "recovers (1.00 at 8B, about 1% of the compute)",
        (Shown("H9", {_NEW: f"field's rows fresh: {_NEW}", "rows after it fresh": "rows after it fresh"}),),
    ),
    Row(
        _EDIT,
        "field only, by scale",
        "strengthens with scale",
        sources="scale",
    ),
    Row(
        _EDIT,
        "field + selective@K",
        "depends on the model",
        (_edited("selective@4"), _edited("selective@16"), _edited("selective@64")),
    ),
    Row(
        _EDIT,
        "erratum",
        "robust; the fallback everywhere",
        (Shown("H13", {"as a prefill of the corrected text": "as a prefill of the corrected text"}),),
    ),
    Row(_EDIT, "field + erratum", "full-recompute correctness", (_edited("field+erratum"),)),
    Row(_EDIT, "hoisting: the field at the end of the prompt", "works", (_edited("suffix, field hoisted"),)),
    Row(
        _EDIT,
        "CacheBlend-style partial recompute",
        "fails on this task",
        (Shown("H20", {_AS: "as the recompute", "right": "right by the new value"}),),
    ),
    Row(
        _EDIT,
        "full recompute",
        "the reference",
        (
            Shown("H2", {"right": "right, direct"}),
            Shown("H1", {"right": "right, direct"}),
        ),
    ),
    Row(
        _EDIT,
        "which method is enough",
        "depends on the model",
        sources="methods",
    ),
    Row(
        _EDIT,
        "a field toggled 28 turns, stale + errata against full prefill",
        "agreement has no downward trend, cosine stays at 0.99 and above",
        (
            Shown(
                "H15",
                {
                    "agreement, change a turn": "errata: agreement, change a turn",
                    "lowest cosine": "errata: lowest cosine of all turns",
                    "as the prefill": "errata: as the prefill",
                },
            ),
        ),
    ),
    Row(
        _COMPOSE,
        "a skill prefilled alone, rotated and spliced: logits",
        "cosine 0.90 to 0.999 over twelve models",
        (Shown("H3", {"decides as recomputed": "decides as recomputed", "cosine": "cosine, mean"}),),
    ),
    Row(
        _COMPOSE,
        "its time to first token",
        "quicker, 13.9 times at 32k tokens",
        sources="first token",
    ),
    Row(
        _COMPOSE,
        "without the rotation (control)",
        "collapses",
        (
            Shown(
                "H11",
                {
                    "rotated less not rotated": "as the recompute, rotated less not rotated",
                    "not rotated": "as the recompute, unrotated",
                },
            ),
        ),
    ),
    Row(
        _COMPOSE,
        "seam repair",
        "one token recomputed closes the gap at the start of a chunk (ten models)",
        (
            Shown(
                "R6",
                {
                    **{f"seam of {n}: as recomputed": f"seam of {n}: decides as recomputed" for n in SEAMS},
                    **{f"seam of {n}: cosine": f"seam of {n}: cosine, mean" for n in SEAMS},
                    **{
                        f"seam of {n}: distance left, of that with {SEAMS[0]}": (
                            f"seam of {n}: distance that is left (1 - cosine), of that with {SEAMS[0]}"
                        )
                        for n in SEAMS[1:]
                    },
                },
            ),
        ),
    ),
    Row(
        _COMPOSE,
        "late against early placement of memory",
        "late is better: 0.93 against 0.83",
        (
            Shown(
                "H19",
                {
                    "right, late": "right, late",
                    "right, early": "right, early",
                    "late less early": "right, late less early",
                },
            ),
        ),
    ),
    Row(
        _COMPOSE,
        "memory in S blocks compiled alone",
        "lossless for the decision to S = 16; facts that refer to each other must stay together",
        (
            Shown(
                "H17",
                {
                    "together, S = 16": "together, S = 16: as the recompute",
                    "split, S = 16": "split, S = 16: as the recompute",
                    "apart": "S = 16: together less split",
                },
            ),
        ),
    ),
    Row(
        _COMPOSE,
        "an edit of one of S blocks",
        "S times cheaper",
        (
            Shown(
                "R7",
                {
                    f"S = {size}: tokens decoded, of those with S = 1": (
                        f"together, S = {size}: tokens decoded, of those with S = 1"
                    )
                    for size in SIZES[1:]
                },
            ),
            Shown(
                "H17",
                {f"S = {size}: as the recompute": f"together, S = {size}: as the recompute" for size in SIZES[1:]},
            ),
        ),
    ),
    Row(
        _COMPOSE,
        "real conversations (LoCoMo, 1,540 questions)",
        "equal to full recompute on Qwen3, within 2.7 points on Llama 3.1 8B",
        (
            Shown(
                "R5",
                {
                    "generated lives, no real conversations: right, spliced less recomputed (90%)": (
                        "30 sessions: right, spliced less recomputed (90%)"
                    ),
                    "recompute right": "30 sessions: recompute right",
                },
            ),
        ),
    ),
    Row(
        _BOTH,
        "a field edited inside a transplanted skill",
        "as one edited in an ordinary cache, for every method",
        (
            Shown(
                "H16",
                {
                    f"{name}: transplanted less ordinary": f"{name}: transplanted less ordinary, direct"
                    for name in ("field", "selective@16", "erratum", "field+erratum")
                },
            ),
        ),
    ),
    Row(
        _BOTH,
        "an agent that edits and composes (300 decisions)",
        "decision-identical to recompute",
        (Shown("H18", {"erratum, as the baseline": "erratum: as the baseline"}),),
    ),
    Row(
        _BOTH,
        "the agent's time",
        "to 14.9 times lower latency; time to first token 2.3 to 4.3 times quicker in all",
        (
            Shown(
                "H18",
                {
                    "time to the first token, of the baseline's": "erratum: time to the first token, of the baseline's",
                    "tokens decoded, of the baseline's": "erratum: tokens decoded, of the baseline's",
                    **{
                        f"{what}, of a prefix cache's, edits {place}": (
                            f"erratum: {what} in all, of the prefix cache's, edits {place} in the memory"
                        )
                        for what in ("time to the first token", "tokens decoded")
                        for place in PLACES
                    },
                },
                barred=False,
            ),
        ),
        sources="agent",
    ),
    Row(
        _CACHES,
        "quantized caches",
        "in use as they are",
        (
            Shown(
                "R2",
                {
                    f"{kind}: spliced as recomputed": f"{kind}: spliced decides as recomputed"
                    for kind in ("q8_0", "q4_0")
                },
            ),
        ),
    ),
    Row(
        _CACHES,
        "ordinary and grouped-query caches, MoE",
        "in use as they are",
        (Shown("H3", {"grouped-query, spliced: decides as recomputed": "decides as recomputed"}),),
        sources="ordinary",
    ),
    Row(
        _CACHES,
        "MLA",
        "the latent is copied, only the small decoupled-RoPE part is rotated",
        sources="mla",
    ),
    Row(
        _CACHES,
        "M-RoPE",
        "only the temporal channels are rotated; images move near-lossless (four models)",
        sources="images",
    ),
    Row(
        _CACHES,
        "sliding windows and hybrids",
        "errata work; moving old rows is partial",
        sources="windows",
    ),
    Row(
        _CACHES,
        "pure recurrent state",
        "out of scope for splicing; the erratum works",
        sources="recurrent",
    ),
    Row(
        _SERVING,
        "vLLM with errata, to 16 requests/s and unthrottled",
        "prefix cache hit in 98.5% against 1%, throughput to 14.5 times, p90 TTFT 53 to 398 times lower",
        sources="serving",
    ),
)
