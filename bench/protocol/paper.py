"""The paper's table, row by row, beside the figures of the hypotheses that measure them, and what is found in short."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bench.experiments.frame import grid
from bench.protocol.measures.heads import TOP, WAYS

Found = Mapping[str, Any]  # a verdict as plain data
Verdicts = Mapping[int, Mapping[tuple[str, str], Found]]  # of each training seed, by hypothesis and words


@dataclass(frozen=True)
class Shown:
    """Figures of one hypothesis: what the row calls each, and which check it is."""

    hypothesis: str
    checks: Mapping[str, str]
    barred: bool = True  # the hypothesis' verdict is of what the row claims; else its figures are only reported


@dataclass(frozen=True)
class Row:
    """A row of the paper's table. What is not measured says why, and `where` is the page of docs/ to look at."""

    section: str
    what: str
    found: str
    shown: tuple[Shown, ...] = ()
    why: str = ""
    where: str = ""


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
        why="R4 is not built: it takes trainings of other sizes",
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
        why="the protocol compares training seeds; `notes calibrate` measures a model",
        where="models.md",
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
        why="the protocol measures decisions, not time",
        where="race.md",
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
        why="the protocol has no hypothesis of it; `make experiments ONLY=seams` measures it",
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
        why="the protocol measures decisions, not time",
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
        why="the protocol measures decisions, not time",
        where="race.md",
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
        why="the subject has one kind of attention",
        where="architectures.md",
    ),
    Row(
        _CACHES,
        "MLA",
        "the latent is copied, only the small decoupled-RoPE part is rotated",
        why="the subject has no latent cache",
        where="architectures.md",
    ),
    Row(
        _CACHES,
        "M-RoPE",
        "only the temporal channels are rotated; images move near-lossless (four models)",
        why="the subject sees no images",
        where="images.md",
    ),
    Row(
        _CACHES,
        "sliding windows and hybrids",
        "errata work; moving old rows is partial",
        why="the subject has neither",
        where="architectures.md",
    ),
    Row(
        _CACHES,
        "pure recurrent state",
        "out of scope for splicing; the erratum works",
        why="the subject has none",
        where="recurrent.md",
    ),
    Row(
        _SERVING,
        "vLLM with errata, to 16 requests/s and unthrottled",
        "prefix cache hit in 98.5% against 1%, throughput to 14.5 times, p90 TTFT 53 to 398 times lower",
        why="the protocol serves nobody",
        where="serving.md",
    ),
)


def to(page: str, at: str) -> str:
    """The path of a page of docs/ from the page `at`, both relative to docs/."""
    return os.path.relpath(page, os.path.dirname(at) or ".").replace(os.sep, "/")


def table(verdicts: Verdicts, overall: Mapping[str, str], at: str) -> str:
    """Every row, by section. `overall`: what is said of each hypothesis in all; `at`: where the page will be."""
    parts = [
        "## The paper's table\n\nA row for each of the paper's. Figures are of words that training never saw, with 95% "
        "intervals; those of known words are after `known`, with their intervals in the sections below. What holds or "
        "fails is the hypothesis, by its bar, for every training seed and both sorts of words; what has no bar is "
        "reported."
    ]
    seeds = list(verdicts)
    head = " | ".join(("the paper's row", "it found", *(f"ours, seed {seed}" for seed in seeds), "so"))
    for section, rows in groupby(ROWS, key=lambda row: row.section):
        cells = [
            " | ".join((row.what, row.found, *(_cell(row, verdicts[seed]) for seed in seeds), _so(row, overall, at)))
            for row in rows
        ]
        parts += [f"### {section}", grid(head, cells)]
    return "\n\n".join(parts)


def _cell(row: Row, found: Mapping[tuple[str, str], Found]) -> str:
    told = [
        f"{label}: {_both(found, shown.hypothesis, what)}"
        for shown in row.shown
        for label, what in shown.checks.items()
    ]
    return "<br>".join(told) or "not measured"


def _so(row: Row, overall: Mapping[str, str], at: str) -> str:
    if not row.shown:
        return f"not measured: {row.why}" + (f" ([{row.where}]({to(row.where, at)}))" if row.where else "")
    said = []
    for shown in row.shown:
        verdict = overall[shown.hypothesis] if shown.barred else "reported, no bar"
        said.append(f"{shown.hypothesis} {verdict}")
    return "; ".join(dict.fromkeys(said))


def _both(found: Mapping[tuple[str, str], Found], hypothesis: str, what: str) -> str:
    unseen, known = (check_of(found.get((hypothesis, words)), what) for words in ("held-out", "known"))
    told = [number(unseen)] if unseen else []
    if known:
        told.append(f"known {short(known['value'])}" if unseen else f"known {number(known)}")
    return ", ".join(told) or "not measured"


def check_of(found: Found | None, what: str) -> Found | None:
    """The check of that name, if it has a figure."""
    checks = [check for check in found["checks"] if check["what"] == what] if found else []
    return checks[0] if checks and checks[0]["value"] is not None else None


def number(check: Found) -> str:
    """A figure with its interval."""
    if check["value"] is None:
        return "not measured"
    between = "" if check["low"] is None else f" ({short(check['low'])} to {short(check['high'])})"
    return short(check["value"]) + between


def short(value: float) -> str:
    """Three digits after the point; of what would be 0 that way, three that count."""
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value + 0.0:.3f}"


def finding(verdicts: Verdicts) -> str:
    """Two or three sentences, which say what the figures do; of words that training never saw, a figure a seed."""

    def checks(name: str) -> list[Found]:
        every = [check_of(verdicts[seed].get((name, "held-out")), HEADLINE[name]) for seed in verdicts]
        return [check for check in every if check]

    field, after, above, below, thought = (checks(name) for name in ("H4", "H5", "H6", "H7", "H9"))
    told = []
    if field and after and above:
        rests = {1: "what was written after the field", -1: "the field's own rows", 0: "neither of them for sure"}
        told.append(
            f"Fields above the rules: with only the field's rows fresh the new value decides in {_all(field)}, with "
            f"only what follows fresh in {_all(after)}: note index {_all(above)}. So a decision rests more on "
            f"{rests[_sign(above)]}{_against(_sign(above))}."
        )
    if below:
        turned = {
            -1: "negative, as it must be where no rule is after the field to note at",
            1: "positive: its sign has not turned, so the control fails",
            0: "of no sure sign, so the control has not come out",
        }
        told.append(f"Fields below the rules: note index {_all(below)}, {turned[_sign(below)]}.")
    if thought:
        told.append(f"After a chain of thought the field's rows alone bring the new value in {_all(thought)}.")
    of = "With words that training never saw, a figure for each training seed:\n\n"
    return of + " ".join(told) if told else "Where a decision rests has not been measured yet."


HEADLINE = {
    "H4": f"field's rows fresh: {_NEW}",
    "H5": f"rows after it fresh: {_NEW}",
    "H6": "note index",
    "H7": "note index",
    "H9": f"field's rows fresh: {_NEW}",
}


def _all(checks: list[Found]) -> str:
    return ", ".join(map(number, checks))


def _sign(checks: list[Found]) -> int:
    """Of a figure: 1 or -1 if every seed's whole interval is on that side of 0, else 0."""
    if all(check["low"] is not None and check["low"] > 0 for check in checks):
        return 1
    return -1 if all(check["high"] is not None and check["high"] < 0 for check in checks) else 0


def _against(sign: int) -> str:
    return {1: ", as the paper says", -1: ", the reverse of what the paper says", 0: ""}[sign]
