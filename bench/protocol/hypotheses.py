"""The hypotheses and bars of docs/protocol.md, judged by the rows of what was measured. The page is what counts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.experiments import agent, blocks
from bench.experiments.intervals import NOTHING, Figure, Part, figure, ratio, slope
from bench.experiments.methods import ALL, HALVES
from bench.experiments.table import Table
from bench.experiments.toggles import CACHES
from bench.protocol.lives import SORTS
from bench.protocol.measures import heads
from bench.protocol.measures.distance import POSITIONS, WAYS
from bench.protocol.measures.life import SESSIONS
from bench.protocol.measures.seams import SEAMS
from bench.protocol.measures.selective import KS
from bench.protocol.texts import WORDS

MARGIN = 0.02  # of the decisions: what is less apart is equivalent
COSINE = 0.99
METHODS = tuple(name for name in ALL if name != HALVES)
BLEND = "blend 15%"
SPLITS = (2, 4, 8, 16)

Tables = Mapping[str, Table]


@dataclass(frozen=True)
class Check:
    """A figure beside its bar; without a relation it is only reported. `near`: how many near ties, and their value.

    Relations: `>=` and `<=` of the value; `within` a bound of 0, the value; `inside`, its whole interval; `rises`: the
    interval of a slope is not all below 0. `spare`: it may be of fewer cases than its hypothesis asks.
    """

    what: str
    figure: Figure
    relation: str = ""
    bound: float = 0.0
    near: tuple[int, float] = (0, math.nan)
    spare: bool = False

    @property
    def met(self) -> bool:
        """Whether the bar is reached; what could not be measured reaches nothing."""
        found = self.figure
        if self.relation in ("", "within", "inside", "rises"):
            inside = -self.bound < found.low and found.high < self.bound
            near = abs(found.value) <= self.bound
            return {"": True, "within": near, "inside": inside, "rises": found.high >= 0}[self.relation]
        return bool({">=": operator.ge, "<=": operator.le}[self.relation](found.value, self.bound))


@dataclass(frozen=True)
class Hypothesis:
    """`measures`: what its rows are of. `n`: the fewest observations that each figure with a bar must have."""

    name: str
    what: str
    measures: tuple[str, ...]
    n: int
    checks: Callable[[Tables], Iterator[Check]]
    words: tuple[str, ...] = WORDS


@dataclass(frozen=True)
class Verdict:
    """Of a hypothesis, with words of one sort. `excluded`: cases that were left out, of `cases`."""

    hypothesis: Hypothesis
    words: str
    checks: tuple[Check, ...]
    cases: int
    excluded: int

    @property
    def n(self) -> int:
        """The fewest observations of a figure that counts."""
        barred = [check for check in self.checks if check.relation] or [each for each in self.checks if not each.spare]
        return min(check.figure.n for check in barred)

    @property
    def says(self) -> str:
        """holds, fails, reported (there is no bar), too few cases to say so, or not measured at all."""
        if not self.cases:
            return "not measured"
        if self.n < self.hypothesis.n:
            return f"too few cases: {self.n} of {self.hypothesis.n}"
        if not any(check.relation for check in self.checks):
            return "reported"
        return "holds" if all(check.met for check in self.checks) else "fails"


def judge(hypothesis: Hypothesis, words: str, tables: Tables) -> Verdict:
    """`tables`: of all its measures."""
    mine = [tables[name] for name in hypothesis.measures]
    left_out = sum(len(_excluded(table).unique("case")) for table in mine)
    kept = {name: Table(row for row in tables[name] if not row.get("excluded")) for name in hypothesis.measures}
    return Verdict(hypothesis, words, tuple(hypothesis.checks(kept)), max(map(_cases, mine)), left_out)


def _excluded(table: Table) -> Table:
    return Table(row for row in table if row.get("excluded"))


def _cases(table: Table) -> int:
    return len(table.unique("case"))


def _check(what: str, parts: Sequence[Part], relation: str = "", bound: float = 0.0, **options: float) -> Check:
    shares = bool(options.pop("shares", True))
    near = [Table(row for row in part.rows if row.get("near") not in ("", None, False, 0)) for part in parts]
    ties = min(len(rows) for rows in near)
    weights = [part.weight for part in parts]
    means = [rows.mean(part.column) for rows, part in zip(near, parts, strict=True)]
    value = math.fsum(mean * weight for mean, weight in zip(means, weights, strict=True)) if ties else math.nan
    return Check(what, figure(parts, shares=shares, **options), relation, bound, (ties, value))


def _share(what: str, rows: Table, column: str, relation: str = "", bound: float = 0.0) -> Check:
    return _check(what, [Part(rows, column)], relation, bound)


def _less(what: str, more: Part, less: Part, relation: str = "", bound: float = 0.0, **options: float) -> Check:
    return _check(what, [more, Part(less.rows, less.column, -less.weight)], relation, bound, **options)


def _mean(what: str, rows: Table, column: str) -> Check:
    return _check(what, [Part(rows, column)], shares=False)


def _ratio(what: str, rows: Table, part: str, whole: str) -> Check:
    near = Table(row for row in rows if row["near"])
    value = ratio(Part(near, part), Part(near, whole)).value
    return Check(what, ratio(Part(rows, part), Part(rows, whole)), near=(len(near), value))


def _beside(rows: Table, of: str = "", name: str = "") -> Iterator[Check]:
    """What is told beside an agreement; `of`: how its columns begin."""
    for column in ("cosine", "kl", "margin"):
        yield _mean(f"{name}{': ' if name else ''}{column}, mean", rows, of + column)


# A function each, in the order of the page.


def _right(bound: float) -> Callable[[Tables], Iterator[Check]]:
    def checks(tables: Tables) -> Iterator[Check]:
        rows = tables["decisions"]
        direct, reasoned = (rows.where(way=way) for way in ("direct", "reasoned"))
        yield _share("right, direct", direct.where(form="text"), "right", ">=", bound)
        yield _share("right, reasoned", reasoned.where(form="text"), "right", ">=", bound)
        yield _share("right after an erratum", direct.where(form="erratum"), "right", ">=", bound)
        yield _share("right after an erratum, reasoned", reasoned.where(form="erratum"), "right")
        yield _share("right of the corrected text", direct.where(form="corrected"), "right")
        for kind in ("table", "date", "amount"):
            yield _share(f"right, direct: {kind}", direct.where(form="text", kind=kind), "right")

    return checks


def _spliced(tables: Tables) -> Iterator[Check]:
    direct, reasoned = (tables["splice"].where(way=way) for way in ("direct", "reasoned"))
    yield _share("decides as recomputed", direct, "same", ">=", 0.98)
    apart = Part(direct, "right"), Part(direct, "recompute_right")
    yield _less("right, spliced less recomputed (90%)", *apart, "inside", MARGIN, level=0.90)
    yield _share("decides as recomputed, reasoned", reasoned, "same")
    yield _share("choice as recomputed", direct, "choice_same")
    yield from _beside(direct)


def _field(tables: Tables) -> Iterator[Check]:
    yield _share("field's rows fresh: acts on the new value", tables["above"], "field", "<=", 0.30)
    yield _mean("recovery, mean", tables["above"], "field_recovery")


def _after(tables: Tables) -> Iterator[Check]:
    yield _share("rows after it fresh: acts on the new value", tables["above"], "after", ">=", 0.90)
    yield _mean("recovery, mean", tables["above"], "after_recovery")


def _index(name: str, relation: str, bound: float) -> Callable[[Tables], Iterator[Check]]:
    def checks(tables: Tables) -> Iterator[Check]:
        rows = tables[name]
        yield _less("note index", Part(rows, "after"), Part(rows, "field"), relation, bound)
        for kind in ("table", "date", "amount"):
            part = rows.where(kind=kind)
            yield _less(f"note index: {kind}", Part(part, "after"), Part(part, "field"))
        yield _less("note index, by the field's whole line", Part(rows, "after_line"), Part(rows, "line"))

    return checks


def _lines(tables: Tables) -> Iterator[Check]:
    yield _share("asked rule's lines fresh: acts on the new value", tables["lines"], "own", ">=", 0.8)
    yield _share("another rule's lines fresh", tables["lines"], "other", "<=", 0.1)


def _thinking(tables: Tables) -> Iterator[Check]:
    yield _share("field's rows fresh: acts on the new value", tables["thinking"], "field", ">=", 0.9)
    yield _share("rows after it fresh", tables["thinking"], "after")


def _selective(tables: Tables) -> Iterator[Check]:
    rows = tables["selective"]
    for k in KS:
        yield _share(f"K = {k}: acts on the new value", rows, f"k{k}")
    for less, more in pairwise(KS):
        yield _less(f"K = {more} less K = {less}", Part(rows, f"k{more}"), Part(rows, f"k{less}"), ">=", 0.0)
    yield _less("K = 64 less K = 1", Part(rows, "k64"), Part(rows, "k1"), ">=", 0.3)


def _versions(tables: Tables) -> Iterator[Check]:
    rows = tables["versions"]
    parts = Part(rows, "rotated"), Part(rows, "unrotated")
    yield _less("as the recompute, rotated less not rotated", *parts, ">=", 0.30)
    for name in ("rotated", "unrotated"):
        yield _share(f"as the recompute, {name}", rows, name)
        yield from _beside(rows, f"{name}_", name)
    yield _share("recompute right", rows, "right")


def _controls(tables: Tables) -> Iterator[Check]:
    yield _share("another skill's rows: as the recompute", tables["controls"], "other", "<=", 0.6)
    yield _share("random rows: as the recompute", tables["controls"], "random", "<=", 0.6)
    yield _share("its own rows", tables["controls"], "own")
    for of, name in (("other_", "another skill's"), ("random_", "random"), ("own_", "its own")):
        yield from _beside(tables["controls"], of, name)


def _erratum(tables: Tables) -> Iterator[Check]:
    direct, reasoned = (tables["decisions"].where(form="erratum", way=way) for way in ("direct", "reasoned"))
    yield _share("as a prefill of the corrected text", direct, "same", ">=", 0.95)
    yield _share("the same, reasoned", reasoned, "same")
    yield from _beside(direct)


def _again(tables: Tables) -> Iterator[Check]:
    rows = tables["again"]
    yield _less("re-evaluate less nothing", Part(rows, "again"), Part(rows, "nothing"), "within", 0.05)
    for name in ("nothing", "again"):
        yield _share(f"{name} said: acts on the new value", rows, name)


def _toggled(tables: Tables) -> Iterator[Check]:
    for cache in CACHES:
        rows = tables["toggled"].where(cache=cache)
        turns = [rows.where(turn=turn) for turn in rows.unique("turn")]
        for column, name in (("same", "agreement"), ("cosine", "cosine")):
            trend = slope(turns, column)
            count = len(rows)
            told = Figure(trend.value, trend.low, trend.high, count, trend.clusters)
            yield Check(f"{cache}: {name}, change a turn", told, "rises")
        low = min(rows.numbers("cosine"), default=math.nan)
        told = Figure(low, math.nan, math.nan, len(rows), _cases(rows))
        yield Check(f"{cache}: lowest cosine of all turns", told, ">=", COSINE)
        yield _share(f"{cache}: as the prefill", rows, "same")
        yield from _beside(rows, name=cache)


def _transplanted(tables: Tables) -> Iterator[Check]:
    for way in ("direct", "reasoned"):
        for name in METHODS:
            here, there = (tables[each].where(method=name) for each in ("transplanted", "ordinary"))
            column = f"{way}_same"
            parts = Part(here, column), Part(there, column)
            yield _less(f"{name}: transplanted less ordinary, {way}", *parts, "within" if way == "direct" else "", 0.05)
    for name in METHODS:
        yield _share(
            f"{name}, transplanted: as the recompute", tables["transplanted"].where(method=name), "direct_same"
        )
        yield from _beside(tables["transplanted"].where(method=name), name=f"{name}, transplanted")


def _blocks(tables: Tables) -> Iterator[Check]:
    rows = tables["blocks"]
    for size in SPLITS:
        part = rows.where(asked_for=size, layout="together")
        yield _share(f"together, S = {size}: as the recompute", part, "same", ">=", 0.95)
    most = {layout: Part(rows.where(asked_for=SPLITS[-1], layout=layout), "same") for layout in ("together", "split")}
    yield _less("S = 16: together less split", most["together"], most["split"], ">=", 0.1)
    for size in SPLITS:
        yield _share(f"split, S = {size}: as the recompute", rows.where(asked_for=size, layout="split"), "same")
    for layout, each in most.items():
        yield from _beside(each.rows, name=f"{layout}, S = 16")


def _agent(tables: Tables) -> Iterator[Check]:
    rows = tables["agent"]
    yield _share("erratum: as the baseline", rows.where(agent="erratum"), "same", ">=", 0.98)
    for name in rows.unique("calibrated"):
        part = rows.where(agent=name, calibrated=name)
        yield _share(f"auto, {name} by calibration: as the baseline", part, "same")
        yield _share(f"auto, {name} by calibration: right", part, "right")
    for name in rows.unique("agent"):
        if name != "erratum":
            yield _share(f"{name}: as the baseline", rows.where(agent=name), "same")
        yield _share(f"{name}: right", rows.where(agent=name), "right")
        yield from _beside(rows.where(agent=name), name=str(name))
    for name in rows.unique("agent"):
        if name not in (agent.BASELINE, agent.PREFIX):
            yield from _dear(rows, str(name))


def _dear(rows: Table, name: str) -> Iterator[Check]:
    """What an agent takes, of what reading the text again takes."""
    for column, what in (("decoded", "tokens decoded"), ("seconds", "time to the first token")):
        said = f"{name}: {what}, of the baseline's"
        yield Check(said, agent.beside(rows, name, column, agent.BASELINE))
        for place in agent.PLACES:
            part = rows.where(place=place)
            for which, each in (("after an edit", agent.edits(part)), ("in all", part)):
                said = f"{name}: {what} {which}, of the prefix cache's, edits {place} in the memory"
                yield Check(said, agent.beside(each, name, column))


def _placed(tables: Tables) -> Iterator[Check]:
    rows = tables["placement"].where(turns=0)
    early, late = (rows.where(place=place) for place in ("early", "late"))
    yield _less("right, late less early", Part(late, "right"), Part(early, "right"))
    for place, part in (("late", late), ("early", early)):
        yield _share(f"right, {place}", part, "right")
        yield _share(f"as the recompute, {place}", part, "same")
        yield from _beside(part, name=place)


def _blend(tables: Tables) -> Iterator[Check]:
    rows = tables["ordinary"].where(method=BLEND)
    yield _share("as the recompute", rows, "direct_same")
    yield _share("right by the new value", rows, "direct_right")
    yield _share("as the recompute, reasoned", rows, "reasoned_same")
    yield from _beside(rows)


def _distance(tables: Tables) -> Iterator[Check]:
    for position in POSITIONS:
        rows = tables["distance"].where(position=position)
        yield _share(f"{position:,}: recompute right", rows.where(way=WAYS[0]), "recompute_right")
        for way in WAYS:
            part, name = rows.where(way=way), f"{position:,}, {way}"
            yield _share(f"{name}: as the recompute", part, "same")
            yield _share(f"{name}: right", part, "right")
            yield from _beside(part, name=name)
            yield _mean(f"{name}: squared error of the logits, mean", part, "error")


def _settings(name: str) -> Callable[[Tables], Iterator[Check]]:
    def checks(tables: Tables) -> Iterator[Check]:
        settings = tables[name].unique("setting")
        for setting in settings:
            rows, mixes = (tables[each].where(setting=setting) for each in (name, f"{name} notes"))
            yield _share(f"{setting}: recompute right", rows, "recompute_right")
            yield _share(f"{setting}: spliced, right", rows, "right")
            yield _share(f"{setting}: spliced decides as recomputed", rows, "same")
            yield from _beside(rows, name=f"{setting}, spliced")
            told = [_less(f"{setting}: note index", Part(mixes, "after"), Part(mixes, "field"))]
            told.append(_share(f"{setting}: field's rows fresh: acts on the new value", mixes, "field"))
            told.append(_share(f"{setting}: rows after it fresh: acts on the new value", mixes, "after"))
            if setting == settings[0]:
                yield from told
                continue
            # One that reads nothing any more has no case whose values it tells apart, and is reported all the same.
            yield from (replace(check, spare=True) for check in told)
            yield _share(f"{setting}: decides alike whatever the value", mixes, "alike")
            yield _share(f"{setting}: recompute decides as that of {settings[0]}", rows, "as_given")

    return checks


def _lives(tables: Tables) -> Iterator[Check]:
    for sessions in reversed(SESSIONS):  # what has the bar first
        rows, name = tables["life"].where(sessions=sessions), f"{sessions} sessions"
        apart = Part(rows, "right"), Part(rows, "recompute_right")
        judged = sessions == SESSIONS[-1]
        yield _less(
            *(f"{name}: right, spliced less recomputed (90%)", *apart, "inside" if judged else "", MARGIN), level=0.90
        )
        yield _share(f"{name}: recompute right", rows, "recompute_right")
        yield _share(f"{name}: spliced, right", rows, "right")
        yield _share(f"{name}: answers as recomputed", rows, "same")
        yield _share(f"{name}: choice as recomputed", rows, "choice_same")
        yield _share(f"{name}: not rotated, right", rows, "unrotated_right")
        yield _share(f"{name}: not rotated, answers as recomputed", rows, "unrotated_same")
        yield from _beside(rows, name=name)
        yield _mean(f"{name}: tokens, mean", rows, "tokens")
        for sort in SORTS:
            part = rows.where(sort=sort)
            yield from (replace(check, spare=True) for check in _sort(f"{name}, {sort}", part))


def _sort(name: str, rows: Table) -> Iterator[Check]:
    yield _less(f"{name}: right, spliced less recomputed", Part(rows, "right"), Part(rows, "recompute_right"))
    for column, what in (
        ("recompute_right", "recompute right"),
        ("right", "spliced, right"),
        ("same", "as recomputed"),
    ):
        yield _share(f"{name}: {what}", rows, column)
    if rows.numbers("old"):
        yield _share(f"{name}: recompute says what was right before", rows, "recompute_old")
        yield _share(f"{name}: spliced says what was right before", rows, "old")


def _seams(tables: Tables) -> Iterator[Check]:
    parts = {seam: tables["seams"].where(seam=seam) for seam in SEAMS}
    yield _share("recompute right", parts[SEAMS[0]], "recompute_right")
    for seam, rows in parts.items():
        yield _share(f"seam of {seam}: decides as recomputed", rows, "same")
        yield _share(f"seam of {seam}: right", rows, "right")
        yield _share(f"seam of {seam}: choice as recomputed", rows, "choice_same")
        yield from _beside(rows, name=f"seam of {seam}")
    none, *some = SEAMS
    for seam in some:
        name = f"seam of {seam} less {none}: decides as recomputed"
        yield _less(name, Part(parts[seam], "same"), Part(parts[none], "same"))
        left = ratio(Part(parts[seam], "distance"), Part(parts[none], "distance"))
        yield Check(f"seam of {seam}: distance that is left (1 - cosine), of that with {none}", left)


def _edited_blocks(tables: Tables) -> Iterator[Check]:
    for layout in blocks.LAYOUTS:
        rows = tables["blocks"].where(layout=layout)
        whole = Part(rows.where(asked_for=1), "recompiled")
        for size in blocks.SIZES:
            part, name = rows.where(asked_for=size), f"{layout}, S = {size}"
            yield _mean(f"{name}: tokens decoded by an edit, mean", part, "recompiled")
            if size > 1:
                yield Check(f"{name}: tokens decoded, of those with S = 1", ratio(Part(part, "recompiled"), whole))
            yield _share(f"{name}: as the recompute", part, "same")


def _heads(tables: Tables) -> Iterator[Check]:
    rows = tables["heads"]
    for way, does in heads.WAYS.items():
        name = f"{does}: share of the top {heads.TOP}"
        if not len(rows):
            yield Check(name, NOTHING)
            continue
        names = str(rows.rows[0][f"{way} heads"]).split()
        every, alone = f"{way} {len(names)}", f"{way} alone, all"
        yield _ratio(name, rows, f"{way} {heads.TOP}", every)
        yield _mean(f"{does}: all {len(names)} together, recovery", rows, every)
        for count in (each for each in (1, 2, heads.TOP, 8, 16) if each < len(names)):
            which = f" ({', '.join(names[:count])})" if count <= heads.TOP else ""
            yield _mean(f"{does}: first {count}{which} together, recovery", rows, f"{way} {count}")
        yield _mean(f"{does}: heads needed for {heads.ENOUGH:g} of what all recover", rows, f"{way} needed")
        yield _mean(f"{does}: sum of what each recovers alone", rows, alone)
        yield _ratio(f"{does}: share of the top {heads.TOP} in that sum", rows, f"{way} alone", alone)
    if len(rows):
        yield _mean("rows after the field fresh, in the engine: recovery", rows, "engine")
        yield _share("log-odds in PyTorch have the signs of the engine's decisions", rows, "as the engine")
        yield _mean("cosine of its logits and the engine's", rows, "cosine")


def _scale(tables: Tables) -> Iterator[Check]:
    direct, reasoned = (tables["decisions"].where(way=way) for way in ("direct", "reasoned"))
    yield _share("right, direct", direct.where(form="text"), "right")
    yield _share("right, reasoned", reasoned.where(form="text"), "right")
    yield _share("right after an erratum", direct.where(form="erratum"), "right")
    above, below, thinking = (tables[name] for name in ("above", "below", "thinking"))
    yield _share("field's rows fresh", above, "field")
    yield _share("rows after it fresh", above, "after")
    yield _less("note index", Part(above, "after"), Part(above, "field"))
    # Who never read fields below the rules mostly decides alike there, whatever they say: few cases are left.
    for what, after, field in (
        ("note index, fields below", "after", "field"),
        ("note index, fields below, by the field's whole line", "after_line", "line"),
    ):
        yield replace(_less(what, Part(below, after), Part(below, field)), spare=True)
    yield _share("after a chain of thought: field's rows fresh", thinking, "field")
    yield _share("after a chain of thought: rows after it fresh", thinking, "after")


HYPOTHESES = {
    each.name: each
    for each in (
        Hypothesis("H1", "decisions right", ("decisions",), 300, _right(0.95), ("known",)),
        Hypothesis("H2", "decisions right", ("decisions",), 300, _right(0.90), ("held-out",)),
        Hypothesis("H3", "spliced after other text and other skills", ("splice",), 300, _spliced),
        Hypothesis("H4", "fields above: only the field's rows fresh", ("above",), 200, _field),
        Hypothesis("H5", "fields above: only the rows after the field fresh", ("above",), 200, _after),
        Hypothesis("H6", "fields above: note index", ("above",), 200, _index("above", ">=", 0.6)),
        Hypothesis("H7", "fields below the rules: note index", ("below",), 200, _index("below", "<=", -0.6)),
        Hypothesis("H8", "the asked rule's lines fresh, or another's", ("lines",), 200, _lines),
        Hypothesis("H9", "after a chain of thought: only the field fresh", ("thinking",), 200, _thinking),
        Hypothesis("H10", "selective@K", ("selective",), 200, _selective),
        Hypothesis("H11", "two versions of a policy, the last one spliced", ("versions",), 200, _versions),
        Hypothesis("H12", "rows of another skill, random rows", ("controls",), 200, _controls),
        Hypothesis("H13", "erratum against a prefill of the corrected text", ("decisions",), 300, _erratum),
        Hypothesis("H14", '"re-evaluate" after a corrected field', ("again",), 200, _again),
        Hypothesis("H15", "a field toggled 28 turns", ("toggled",), 12 * 28, _toggled),
        Hypothesis("H16", "edits in a transplanted skill", ("transplanted", "ordinary"), 300, _transplanted),
        Hypothesis("H17", "blocks to S = 16", ("blocks",), 60, _blocks),
        Hypothesis("H18", "the agent by its default method, an erratum", ("agent",), 300, _agent),
        Hypothesis("H19", "early or late", ("placement",), 200, _placed),
        Hypothesis("H20", "partial recompute of the 15% that deviate most", ("ordinary",), 200, _blend),
        Hypothesis("H21", f"what {heads.TOP} heads read, and write ({heads.BY} FILE)", ("heads",), 60, _heads),
        # What the page's table has no number for: reported, without a bar.
        Hypothesis("R1", "a splice at position 10^2 to 10^5, and other batches", ("distance",), 200, _distance),
        Hypothesis("R2", "f16, q8_0 and q4_0 caches", ("caches", "caches notes"), 200, _settings("caches")),
        Hypothesis("R3", "q8_0, f32 and q4_0 weights", ("weights", "weights notes"), 200, _settings("weights")),
        # The page states a margin, so this one has a bar; n counts questions.
        Hypothesis("R5", "a life of 30 sessions, spliced one by one", ("life",), 200 * sum(SORTS.values()), _lives),
        # Added after the first figures, for rows of the paper's table that nothing above measures.
        Hypothesis("R6", "seam repair: 0, 1 and 4 tokens of a skill decoded again", ("seams",), 200, _seams),
        Hypothesis("R7", "an edit of one of S blocks", ("blocks",), 60, _edited_blocks),
    )
}
# These are kept apart from the others, whose figures are of what measured them then; and why a seed may have none.
ADDED = dict.fromkeys(("R6", "R7"), "the file of this model is not kept")
# Of other models, by a command and on a page of its own.
SCALE = Hypothesis(
    *("R4", "models of about 1, 4 and 10 million parameters", ("decisions", "above", "below", "thinking"), 200),
    *(_scale, ("known",)),
)
APART = {SCALE.name: (SCALE.what, "python -m bench.ablations", "results-ablations.md")}
