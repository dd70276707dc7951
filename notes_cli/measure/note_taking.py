"""What a calibration says of a model: whether it takes notes while it reads, in words, and as a page for others.

The question is the paper's (arXiv:2606.17107, section 3): a field is corrected in place and nothing after it is
computed again. A model that looks the field up when it is asked follows the new value; one that noted while reading
what follows from the old value does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from notes_cli.editing.methods import ERRATUM, FIELD, RECOMPUTE, STALE, SUFFIX
from notes_cli.library.profiles import WAYS, Measured, Profile
from notes_cli.measure.compare import RECOMPUTE as ONE_PREFILL
from notes_cli.measure.composition import SPLICED
from notes_cli.measure.significance import LEAST, interval, told_of

# Columns of the last table of a report: a row for each model, to compare several.
ROW = (
    *("model", "weights", "cache", "recompute", "field in place", "after a thought", "erratum", "after a thought"),
    *("skills apart", "read together", "uses", "finding"),
)
METHODS = ("method", "decoded", "cosine", "directly: right", "as recompute", "after a thought: right", "as recompute")
PAIRS = ("two skills", "decoded", "one is needed: right", "both are needed: right")
TITLE = ": does it take notes?"


class Finding(NamedTuple):
    """`kind`: takes notes, looks up, partly; unable: it does not decide by such texts at all; open: the decisions are
    too few. `why`: for people."""

    kind: str
    why: str


def finding(profile: Profile) -> Finding | None:
    """What follows from the decisions after a correction in place, by the exact intervals of proof.py. None for a
    profile without them, as of a model whose rows cannot be computed again in place.

    Counted are decisions that the new value turns: those that the rows as they were do not share with a recompute. How
    many of them a method turns is how many more it shares. If not even all rows from the field on, computed again, turn
    most of them, then what comes before them does, and nothing is told of the field."""
    stale, field, suffix = (profile.found("method", str(method)) for method in (STALE, FIELD, SUFFIX))
    if stale is None or field is None or suffix is None:
        return None
    turned = stale.cases - stale.same
    if stale.cases < LEAST:
        return Finding("open", f"{stale.cases} decisions are too few to tell, {LEAST} at least are needed")
    in_place, after = (min(turned, max(0, one.same - stale.same)) for one in (field, suffix))
    (low, high), (least, most) = interval(in_place, turned), interval(after, turned)
    both = (
        f"of {turned} decisions that the new value of a field turns, correcting the field in place turns {in_place} "
        f"({low:.2f} to {high:.2f}), computing all that follows it again {after} ({least:.2f} to {most:.2f})"
    )
    if least <= 0.5:
        return Finding("unable", f"{both}: it does not decide by such fields, so this tells nothing about corrections")
    if high < 0.5:
        return Finding("takes notes", f"{both}: what follows from a field is noted while the text is read")
    if low > 0.5:
        return Finding("looks up", f"{both}: the field is looked up when the question is asked")
    return Finding("partly", f"{both}: what follows from a field is noted in part, and looked up in part")


def page(profile: Profile, by: str) -> str:
    """A profile in Markdown, for people who have neither the model nor the machine. `by`: what measured it, of which
    version, and when."""
    identity, found = profile.identity, finding(profile)
    model = f"{identity.model} {identity.quantization}"
    parts = [
        f"# {model}{TITLE}",
        f"Measured by {by}, over {profile.cases} decisions, in each of which one field of a text "
        "changes so that another answer is right. "
        f"Architecture {identity.architecture}, cache {profile.cache}, RoPE {identity.rope_text}, weights "
        f"`{identity.weights[:16]}`. In brackets: exact 95% intervals.",
        f"**{found.kind.capitalize()}**: {found.why}."
        if found
        else "Fields cannot be corrected in place on this model.",
        *_thought(profile),
        grid(METHODS, _methods(profile)),
        "\n".join(_used(profile)),
    ]
    pairs = list(_pairs(profile))
    if pairs:
        parts.append(grid(PAIRS, pairs))
    parts += ["## In one row, beside other models", grid(ROW, [row(profile)])]
    return "\n\n".join(parts) + "\n"


def is_page(data: bytes) -> bool:
    """Whether a file is such a page: another one may take its place."""
    first = data.partition(b"\n")[0]
    return first.startswith(b"# ") and first.endswith(TITLE.encode())


def row(profile: Profile) -> tuple[str, ...]:
    """The cells of ROW."""
    found = finding(profile)
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
        *(used, found.kind if found else ""),
    )


def _thought(profile: Profile) -> Iterator[str]:
    """What a chain of thought makes of it, and an erratum."""
    field, erratum = (profile.found("method", str(method), "reasoned") for method in (FIELD, ERRATUM))
    said = profile.found("method", str(ERRATUM))
    if field:
        yield f"After a chain of thought the field corrected in place is followed in {_told(field)}."
    if said:
        after = f", after a chain of thought in {_told(erratum)}" if erratum else ""
        yield f"An erratum, a short line after the text, is followed in {_told(said)}{after}."


def _methods(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(one.name for one in profile.measured if one.what == "method"):
        direct, reasoned = (profile.found("method", name, way) for way in WAYS)
        cost = direct or reasoned
        assert cost is not None  # it was measured one way at least
        shares = [cell for one in (direct, reasoned) for cell in ((_told(one), str(one.same)) if one else ("", ""))]
        yield (name, f"{cost.decoded:.0f}", f"{cost.cosine:.4f}", *shares)


def _used(profile: Profile) -> Iterator[str]:
    """What `notes` does with this model from then on."""
    for way in WAYS:
        yield f"* {way}: `{profile.methods[way]}`: {profile.verdicts[way]}"
    yield f"* wording `{profile.wording}`, seam {profile.seam}, place {profile.place}"
    if profile.carry:
        yield f"* recurrent state: {profile.carry.why}"
    yield f"* several skills: {profile.composition.why if profile.composition else 'not measured'}"


def _pairs(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(one.name for one in profile.measured if one.what == "composition"):
        one, two = (profile.found("composition", name, way) for way in ("one", "two"))
        cost = two or one
        yield (name, f"{cost.decoded:.0f}" if cost else "", *(_told(each) if each else "" for each in (one, two)))


def _told(found: Measured) -> str:
    return told_of(found.right, found.cases)


def _count(found: Measured | None) -> str:
    return f"{found.right} of {found.cases}" if found else ""


def grid(columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
