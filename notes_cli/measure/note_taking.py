"""Determines from a calibration whether a model takes notes during prefill, and reports a profile in Markdown.

The test is that of the paper (arXiv:2606.17107, section 3): the K/V of a field is corrected in place, and nothing after
it is recomputed. A model that looks the field up while it decodes follows the new value; a model that stored
conclusions from the old value in later K/V does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from notes_cli.editing.methods import ERRATUM, FIELD, RECOMPUTE, STALE, SUFFIX
from notes_cli.library.profiles import WAYS, Measured, Profile
from notes_cli.measure.composition import SPLICED
from notes_cli.measure.significance import LEAST, format_count, interval
from notes_cli.measure.verify import ONE_PREFILL

# Columns of the last table of a report: a row per model, to compare several.
ROW = (
    *("model", "weights", "cache", "recompute", "field in place", "after a thought", "erratum", "after a thought"),
    *("skills apart", "read together", "uses", "finding"),
)
METHODS = ("method", "decoded", "cosine", "directly: right", "as recompute", "after a thought: right", "as recompute")
PAIRS = ("two skills", "decoded", "one is needed: right", "both are needed: right")
TITLE = ": does it take notes?"


class Finding(NamedTuple):
    """`kind`: takes notes, looks up, partly; unable: its decisions do not depend on such fields; open: too few
    decisions. `why`: the reason, for display."""

    kind: str
    why: str


def finding(profile: Profile) -> Finding | None:
    """Judge by the decisions after a correction in place, with exact intervals (significance.py). None for a profile
    without them, as for a model whose K/V cannot be recomputed in place.

    Only decisions that the new value changes count: those where stale K/V and a recompute disagree. A method changes as
    many of them as it agrees with the recompute more often. If recomputing everything from the field on does not change
    most of them, the decisions depend on something before the field, and the finding is `unable`."""
    stale, field, suffix = (profile.found("method", str(method)) for method in (STALE, FIELD, SUFFIX))
    if stale is None or field is None or suffix is None:
        return None
    changed = stale.cases - stale.same
    if stale.cases < LEAST:
        return Finding("open", f"{stale.cases} decisions are too few to tell, {LEAST} at least are needed")
    in_place, after = (min(changed, max(0, method.same - stale.same)) for method in (field, suffix))
    (low, high), (least, most) = interval(in_place, changed), interval(after, changed)
    counts = (
        f"of {changed} decisions that the new value of a field turns, correcting the field in place turns {in_place} "
        f"({low:.2f} to {high:.2f}), computing all that follows it again {after} ({least:.2f} to {most:.2f})"
    )
    if least <= 0.5:
        return Finding(
            "unable", f"{counts}: it does not decide by such fields, so this tells nothing about corrections"
        )
    if high < 0.5:
        return Finding("takes notes", f"{counts}: what follows from a field is noted while the text is read")
    if low > 0.5:
        return Finding("looks up", f"{counts}: the field is looked up when the question is asked")
    return Finding("partly", f"{counts}: what follows from a field is noted in part, and looked up in part")


def page(profile: Profile, by: str) -> str:
    """Return a report of a profile in Markdown. `by`: program, version and time of the measurement."""
    identity, verdict = profile.identity, finding(profile)
    model = f"{identity.model} {identity.quantization}"
    parts = [
        f"# {model}{TITLE}",
        f"Measured by {by}, over {profile.cases} decisions, in each of which one field of a text "
        "changes so that another answer is right. "
        f"Architecture {identity.architecture}, cache {profile.cache}, RoPE {identity.rope_text}, weights "
        f"`{identity.weights[:16]}`. In brackets: exact 95% intervals.",
        f"**{verdict.kind.capitalize()}**: {verdict.why}."
        if verdict
        else "Fields cannot be corrected in place on this model.",
        *_reasoned_sentences(profile),
        grid(METHODS, _method_rows(profile)),
        "\n".join(_settings(profile)),
    ]
    pairs = list(_pair_rows(profile))
    if pairs:
        parts.append(grid(PAIRS, pairs))
    parts += ["## In one row, beside other models", grid(ROW, [row(profile)])]
    return "\n\n".join(parts) + "\n"


def is_page(data: bytes) -> bool:
    """Return True if a file is such a report, which may be overwritten."""
    first = data.partition(b"\n")[0]
    return first.startswith(b"# ") and first.endswith(TITLE.encode())


def row(profile: Profile) -> tuple[str, ...]:
    """Return the cells of ROW."""
    verdict = finding(profile)
    counts = [
        _count(profile.found("method", str(method), way))
        for method, way in (
            *((RECOMPUTE, "direct"), (FIELD, "direct"), (FIELD, "reasoned")),
            *((ERRATUM, "direct"), (ERRATUM, "reasoned")),
        )
    ]
    both = [_count(profile.found("composition", name, "two")) for name in (SPLICED, ONE_PREFILL)]
    identity = profile.identity
    used = " / ".join(dict.fromkeys(profile.methods[way] for way in WAYS))
    return (
        *(f"{identity.model} ({identity.architecture})", identity.quantization, profile.cache),
        *counts,
        *both,
        *(used, verdict.kind if verdict else ""),
    )


def _reasoned_sentences(profile: Profile) -> Iterator[str]:
    """Yield sentences on decisions after reasoning, and on errata."""
    field, erratum = (profile.found("method", str(method), "reasoned") for method in (FIELD, ERRATUM))
    direct = profile.found("method", str(ERRATUM))
    if field:
        yield f"After a chain of thought the field corrected in place is followed in {_right(field)}."
    if direct:
        after = f", after a chain of thought in {_right(erratum)}" if erratum else ""
        yield f"An erratum, a short line after the text, is followed in {_right(direct)}{after}."


def _method_rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(row.name for row in profile.measured if row.what == "method"):
        direct, reasoned = (profile.found("method", name, way) for way in WAYS)
        cost = direct or reasoned
        assert cost is not None  # measured in at least one way
        shares = [cell for way in (direct, reasoned) for cell in ((_right(way), str(way.same)) if way else ("", ""))]
        yield (name, f"{cost.decoded:.0f}", f"{cost.cosine:.4f}", *shares)


def _settings(profile: Profile) -> Iterator[str]:
    """Yield the settings that `notes` uses for this model."""
    for way in WAYS:
        yield f"* {way}: `{profile.methods[way]}`: {profile.verdicts[way]}"
    yield f"* wording `{profile.wording}`, seam {profile.seam}, place {profile.place}"
    if profile.carry:
        yield f"* recurrent state: {profile.carry.why}"
    yield f"* several skills: {profile.composition.why if profile.composition else 'not measured'}"


def _pair_rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(row.name for row in profile.measured if row.what == "composition"):
        one, two = (profile.found("composition", name, way) for way in ("one", "two"))
        cost = two or one
        yield (
            name,
            f"{cost.decoded:.0f}" if cost else "",
            *(_right(each) if each else "" for each in (one, two)),
        )


def _right(measured: Measured) -> str:
    return format_count(measured.right, measured.cases)


def _count(measured: Measured | None) -> str:
    return f"{measured.right} of {measured.cases}" if measured else ""


def grid(columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
