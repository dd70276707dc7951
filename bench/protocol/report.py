"""What is said of hypotheses: lines for a terminal, a JSON of one model, and the page of all training seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.experiments.frame import grid
from bench.experiments.keeping import KeptError
from bench.protocol import paper
from bench.protocol.hypotheses import ADDED, APART, HYPOTHESES, Check, Verdict

SEEDS = (1, 2, 3)  # of training: a hypothesis holds if it holds for each
BESIDE = {"reversed": "The reversed model, an ablation", "random": "Random weights"}  # these decide nothing
PAGE = "results.md"  # in docs/
PICTURE = "results/protocol.svg"
HEAD = f"""# What the protocol asked, and what was found

Written by `python -m bench.protocol`; do not edit. [The hypotheses, their bars and the
seeds]({paper.to("protocol.md", PAGE)}) were fixed before. In brackets: 95% intervals, by resampling memories;
`near ties`: cases whose two most probable outcomes are within 0.1 nat in the reference, which are in the main figures,
too. What the page leaves open was settled in `bench/protocol/__init__.py`, before the model was trained.
[What another training makes of the same finding]({paper.to("results-reversed.md", PAGE)}) has a page of its own."""

Found = Mapping[str, Any]  # what `as_json` makes of a verdict


def as_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data, without NaN."""
    return {
        "hypothesis": verdict.hypothesis.name,
        "what": verdict.hypothesis.what,
        "words": verdict.words,
        "says": verdict.says,
        "cases": verdict.cases,
        "excluded": verdict.excluded,
        "checks": [_check(check) for check in verdict.checks],
    }


def _check(check: Check) -> dict[str, Any]:
    found, (ties, value) = check.figure, check.near
    numbers = {"value": found.value, "low": found.low, "high": found.high}
    return {
        "what": check.what,
        **{name: None if math.isnan(number) else number for name, number in numbers.items()},
        "n": found.n,
        "clusters": found.clusters,
        "bar": bar(check.relation, check.bound),
        "met": check.met if check.relation else None,
        "near": {"n": ties, "value": None if math.isnan(value) else value},
    }


def bar(relation: str, bound: float) -> str:
    """A bar for people; empty where there is none."""
    named = {"within": "within ±{}", "inside": "interval within ±{}", "rises": "no downward trend"}
    return named.get(relation, f"{relation} {{}}" if relation else "").format(f"{bound:g}")


def lines(found: Found) -> Iterator[str]:
    """A verdict in lines: first what it says, then its figures."""
    left_out = f", {found['excluded']} of them left out: both values decide alike" if found["excluded"] else ""
    yield f"{found['hypothesis']} {found['what']}, {found['words']} words: {found['says'].upper()}"
    yield f"    {found['cases']} cases{left_out}"
    for check in found["checks"]:
        mark = {True: "met", False: "MISSED", None: ""}[check["met"]] if check["n"] else "not measured"
        bound = f"   {check['bar']}: {mark}" if check["bar"] else ""
        yield f"    {check['what']}: {paper.number(check)}, n {check['n']}{_ties(check)}{bound}"


def _ties(check: Found) -> str:
    near = check["near"]
    return f", near ties {near['n']}: {paper.short(near['value'])}" if near["n"] else ""


def document(about: Mapping[str, Any], found: Sequence[Found]) -> dict[str, Any]:
    """One model's verdicts, with what they are of."""
    return {"about": dict(about), "verdicts": list(found)}


def write(path: Path, data: Found) -> None:
    """A document as JSON."""
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> Found:
    """A document that was written."""
    found: Found = json.loads(path.read_text(encoding="utf-8"))
    return found


def merged(path: Path, about: Mapping[str, Any], found: Sequence[Found]) -> list[Found]:
    """The verdicts, and those that the file has already of others, in the order of the page; none if it is not of the
    same."""
    was = read(path) if path.is_file() else document({}, [])
    known = was["verdicts"] if was["about"] == dict(about) else []
    every = {(one["hypothesis"], one["words"]): one for one in (*known, *found)}
    order = list(HYPOTHESES)
    return sorted(every.values(), key=lambda one: order.index(one["hypothesis"]))


def files(docs: Path) -> dict[int | str, Path]:
    """Where what was measured of each model is kept: of a training seed, what was added later apart from the rest."""
    names: dict[int | str, str] = {seed: f"seed-{seed}" for seed in SEEDS}
    names |= {later(seed): f"added-seed-{seed}" for seed in SEEDS} | {name: name for name in BESIDE}
    return {which: docs / "results" / f"protocol-{name}.json" for which, name in names.items()}


def later(seed: int) -> str:
    """What the document of a training seed is called that has the hypotheses of ADDED."""
    return f"added, seed {seed}"


def by_seed(documents: Mapping[int | str, Found]) -> paper.Verdicts:
    """The verdicts of each training seed that was measured, by hypothesis and words; those that were added last."""
    data = {
        seed: [documents[which] for which in (seed, later(seed)) if which in documents]
        for seed in SEEDS
        if seed in documents
    }
    return {
        seed: {(v["hypothesis"], v["words"]): v for one in those for v in one["verdicts"]}
        for seed, those in data.items()
    }


def check(documents: Mapping[int | str, Found]) -> None:
    """Raise KeptError where documents are of other texts or settings, for a model that is in two of them, and for what
    was added later of another model than its seed is of."""
    added = {seed: documents[later(seed)] for seed in SEEDS if later(seed) in documents}
    first = {which: one for which, one in documents.items() if which not in map(later, SEEDS)}
    for name in ("commit", "settings", "sources"):
        # What is added later is measured by what there is then.
        several = [*first.values(), *(added.values() if name != "sources" else ())]
        if len({one["about"][name] for one in several}) > 1:
            of = ", ".join(map(str, documents))
            raise KeptError(
                f"training seeds {of} were measured with different {name}: measure all alike, or remove the "
                "protocol-seed-N.json of those that were not"
            )
    if len({one["about"]["weights"] for one in first.values()}) < len(first):
        raise KeptError("two training seeds have the same weights: one of --seed-of-training was wrong")
    for seed, one in added.items():
        if seed not in first or first[seed]["about"]["weights"] != one["about"]["weights"]:
            raise KeptError(f"what was added for training seed {seed} is of another model than its other figures")


def page(documents: Mapping[int | str, Found], docs: Path, drawn: bool = False) -> str:
    """The page, of one document for each training seed that was measured, what was added later, and each model beside
    them. `docs`: the folder that has what other benches have stored; `drawn`: there is a picture. Raise KeptError for
    what does not belong together."""
    check(documents)
    data = {seed: documents[seed] for seed in SEEDS if seed in documents}
    others = {title: documents[name] for name, title in BESIDE.items() if name in documents}
    verdicts = by_seed(documents)
    so = {name: overall(each.words, name, verdicts) for name, each in HYPOTHESES.items()}
    shown = [f"![Which rows decide, and the note index]({paper.to(PICTURE, PAGE)})"] if drawn else []
    parts = [
        HEAD,
        paper.finding(verdicts),
        *shown,
        *(_of(f"Training seed {seed}", one["about"]) for seed, one in data.items()),
    ]
    for seed in data:
        if later(seed) in documents:
            names = " and ".join(dict.fromkeys(v["hypothesis"] for v in documents[later(seed)]["verdicts"]))
            parts.append(_of(f"{names} of training seed {seed}, added later", documents[later(seed)]["about"]))
    parts += [_of(title, one["about"]) for title, one in others.items()]
    missing = [str(seed) for seed in SEEDS if seed not in data]
    if missing:
        parts.append(f"Not measured yet: training seed {', '.join(missing)}. What fails is decided, what holds is not.")
    parts += [paper.table(verdicts, so, PAGE, docs), "## The hypotheses"]
    rows = []
    for each in HYPOTHESES.values():
        told = [
            "; ".join(f"{words}: {_says(verdicts[seed].get((each.name, words)))}" for words in each.words)
            for seed in data
        ]
        rows.append(" | ".join((each.name, each.what, *told, so[each.name])))
    for name, (what, by, at) in APART.items():
        told = f"of other models: [a page of its own]({paper.to(at, PAGE)})"
        rows.append(" | ".join((name, what, *(told for _ in data), f"`{by}`")))
    parts.append(grid(" | ".join(("", "hypothesis", *(f"seed {seed}" for seed in data), "in all")), rows))
    for seed, found in verdicts.items():
        parts.append(f"## Training seed {seed}")
        parts += map(_section, found.values())
    for title, one in others.items():
        parts.append(f"## {title}\n\nNo hypothesis is of this model: its figures are there to compare.")
        parts += map(_section, one["verdicts"])
    return "\n\n".join(parts) + "\n"


def overall(words: Sequence[str], name: str, verdicts: Mapping[int, Mapping[tuple[str, str], Found]]) -> str:
    """Over all training seeds and words: a hypothesis fails if it fails for one, and holds if it holds for each. What
    was added later is of the seeds that have it."""
    of = [seed for seed in SEEDS if name not in ADDED or any(one == name for one, _ in verdicts.get(seed, {}))]
    said = [
        _says(verdicts[seed].get((name, each)) if seed in verdicts else None).partition(":")[0]
        for seed in of
        for each in words
    ]
    if "fails" in said:
        return "**fails**"
    alone = f", seed {', '.join(map(str, of))} alone" if 0 < len(of) < len(SEEDS) else ""
    return f"{said[0]}{alone}" if len(set(said)) == 1 else "undecided" if said else "not measured"


def _says(found: Found | None) -> str:
    return found["says"] if found else "not measured"


def _of(title: str, about: Found) -> str:
    return (
        f"{title}: `{about['model']}` (SHA-256 {about['weights'][:16]}), {about['settings']}; "
        f"texts of commit {about['commit']}."
    )


def _section(found: Found) -> str:
    rows = []
    for check in found["checks"]:
        near = check["near"]
        ties = f"{near['n']}: {paper.short(near['value'])}" if near["n"] else "0"
        met = {True: "met", False: "**missed**", None: ""}[check["met"]]
        rows.append(" | ".join((check["what"], paper.number(check), str(check["n"]), ties, check["bar"], met)))
    title = f"### {found['hypothesis']}: {found['what']}, {found['words']} words: {found['says']}"
    counted = f"{found['cases']} cases, {found['excluded']} left out."
    return "\n\n".join((title, counted, grid("| figure | n | near ties | bar | ", rows)))
