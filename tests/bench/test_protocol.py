"""The protocol's hypotheses: texts and seeds, intervals, made-up models with known answers, and the command."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bench.experiments.agent import PLACES
from bench.experiments.cases import SYSTEM, error, joined, segments_of
from bench.experiments.intervals import Part, equivalent, figure, ratio, slope
from bench.experiments.keeping import Kept, KeptError
from bench.experiments.methods import ALL
from bench.experiments.table import Row, Table
from bench.experiments.texts import First
from bench.protocol import __main__ as command
from bench.protocol import paper, report, seeds
from bench.protocol.elsewhere import SOURCES, Source, Told
from bench.protocol.hypotheses import ADDED, HYPOTHESES, Verdict, judge
from bench.protocol.lives import SORTS, Question, live
from bench.protocol.measures import Measure, again, distance, heads, life, lines, mixing, notes, seams, settings
from bench.protocol.measures.lines import places
from bench.protocol.measures.thinking import Reasoned
from bench.protocol.measures.weights import write_as, write_random
from bench.protocol.report import PAGE, as_json, document, merged, overall, page, write
from bench.protocol.rows import ROWS
from bench.protocol.seeds import CommitError, frozen, named
from bench.protocol.texts import KINDS, Next, Policies
from bench.reversed_model import REVERSED
from notes_cli import config
from notes_cli.engine.decision import Decision
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import floats
from notes_cli.errors import UnsupportedError
from notes_cli.measure.probe import AlikeError, Column, Mixes
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from training.tiny import words, world

COMMIT = "0123456789" * 4
DOCS = seeds.ROOT / "docs"
ABOUT = {"model": "m", "weights": "w" * 64, "settings": "s", "commit": COMMIT, "sources": "x"}


# Seeds and texts.


def test_the_commit_is_that_of_the_page(tmp_path: Path) -> None:
    """The last one that changed it, not the last one; none is guessed."""

    def git(*arguments: str) -> str:
        asked = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()

    with pytest.raises(CommitError, match=r"no checkout that git can read.*--commit"):
        frozen(tmp_path)
    git("init", "-q")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/protocol.md").write_text("bars")
    git("add", ".")
    git("commit", "-qm", "freeze")
    wanted = git("rev-parse", "HEAD")
    git("commit", "-qm", "later", "--allow-empty")
    assert frozen(tmp_path) == wanted != git("rev-parse", "HEAD")
    (tmp_path / "docs/protocol.md").write_text("other bars")
    with pytest.raises(CommitError, match="changes that are in no commit"):
        frozen(tmp_path)
    (tmp_path / "docs/results").mkdir()
    (tmp_path / "docs/results/protocol-seed-2.json").write_text(json.dumps({"about": {"commit": COMMIT}}))
    assert frozen(tmp_path) == COMMIT  # figures that are kept have texts of that one, whatever the page has got since
    assert named(wanted) == wanted
    for wrong in (wanted[:12], wanted.upper().replace("0", "G"), ""):
        with pytest.raises(CommitError, match="full hash"):
            named(wrong)


def test_a_seed_is_as_the_page_says() -> None:
    """Of commit, experiment and case, with a blank between them."""
    import hashlib
    import random

    wanted = random.Random(hashlib.sha256(f"{COMMIT} lines 7".encode()).hexdigest()).random()
    assert seeds.rng_of(COMMIT, "lines", 7).random() == wanted
    others = {
        seeds.rng_of(*each).random() for each in ((COMMIT, "lines", 8), (COMMIT, "line", 7), ("f" * 40, "lines", 7))
    }
    assert len(others | {wanted}) == 4


def test_texts_are_those_of_the_protocol() -> None:
    """Case by case from any number on; kinds in turn; right answers differ; fields above, or below."""
    held, known = (dict(Next(COMMIT, name).cases("above", 12)) for name in ("held-out", "known"))
    assert dict(Next(COMMIT, "held-out", begin=9).cases("above", 12)) == {n: held[n] for n in range(9, 13)}
    assert dict(Next("f" * 40, "known").cases("above", 12)) != known != dict(Next(COMMIT, "known").cases("below", 12))
    for number, case in (*held.items(), *known.items()):
        assert case.kind == KINDS[(number - 1) % 4] and len(case.skills) == (number - 1) % 3 + 1
        assert case.answer != case.answer_new and {case.answer, case.answer_new} <= set(case.choices)
        for below, one in ((False, case), (True, case.below)):
            text = one.skills[one.target].text
            field, rule = text.index(f"{case.field}: {case.old}"), text.index(case.rule.lines()[0])
            assert (field > rule) == below
    for case in held.values():
        named = [case.field, case.rule.topic, *case.choices]
        assert all(words.is_held_out(word) and word not in world.POOL for word in named)
    assert {case.field for case in known.values()} <= set(world.POOL)
    long = [case for _, case in Next(COMMIT, "held-out", several=lambda word: len(word) > 5).cases("above", 6)]
    assert all(len(word) > 5 for case in long for word in (*case.draft.values, case.rule.topic, *case.choices))
    short = [case for _, case in Next(COMMIT, "known", fits=lambda text: len(text) < 500).cases("above", 12)]
    assert all(len(joined(case)) < 500 for case in short)


def test_a_tenth_of_limits_is_near() -> None:
    """Dates of one month, amounts less than ten apart: about a tenth of the old values."""
    near = found = 0
    for _, case in Next(COMMIT, "known").policies("near", 800, skills=(1,)):
        if case.kind != "table":
            found += 1
            limit = case.rule.limit
            near += case.old[:7] == limit[:7] if case.kind == "date" else abs(int(case.old) - int(limit)) < 10
    assert found == 400 and 0.06 < near / found < 0.15


# Intervals.


def rows_of(clusters: Sequence[Sequence[int]], column: str = "same") -> Table:
    return Table({"case": case, column: value} for case, values in enumerate(clusters, 1) for value in values)


def test_a_share_without_variation_has_wilsons_interval() -> None:
    """Over clusters, however many questions each has: of 20 of 20 it begins at 0.8389, of 0 of 20 it ends at 0.1611."""
    for value, wanted in ((1, (0.8389, 1.0)), (0, (0.0, 0.1611))):
        found = figure([Part(rows_of([[value] * 7] * 20), "same")])
        assert (found.low, found.high) == pytest.approx(wanted, abs=1e-4) and found.n == 140 and found.clusters == 20


def test_memories_are_resampled_and_not_questions() -> None:
    """Ten alike questions of a memory are worth one: the interval is that of ten times fewer."""
    many = figure([Part(rows_of([[1]] * 50 + [[0]] * 50), "same")])
    few = figure([Part(rows_of([[1] * 10] * 5 + [[0] * 10] * 5), "same")])
    assert many.value == few.value == 0.5 and many.n == few.n == 100
    assert (many.low, many.high) == pytest.approx((0.402, 0.598), abs=0.012)  # 1.96 * sqrt(0.25 / 100)
    assert (few.low, few.high) == pytest.approx((0.2, 0.8), abs=0.01)  # binomial, of ten


def test_a_difference_is_of_pairs() -> None:
    """What varies from case to case and is the same in both is no uncertainty of their difference."""
    rows = Table({"case": n, "a": n % 2, "b": n % 2, "c": 1 - n % 2} for n in range(1, 301))
    same = figure([Part(rows, "a"), Part(rows, "b", -1)])
    assert same.value == 0 and same.high == -same.low < 0.02
    other = figure([Part(rows, "a"), Part(rows, "c", -1)])
    assert other.value == 0 and other.high > 0.1
    assert figure([Part(Table([]), "a")]).n == 0


def test_a_ratio_is_that_of_the_means() -> None:
    """Not the mean of the ratios, which a whole near 0 would make anything; what varies in both alike is no
    uncertainty."""
    rows = Table({"case": n, "part": n * 0.25, "whole": n * 1.0, "other": 1.0} for n in range(1, 61))
    same = ratio(Part(rows, "part"), Part(rows, "whole"))
    assert (same.value, same.low, same.high, same.n) == (0.25, 0.25, 0.25, 60)
    found = ratio(Part(rows, "other"), Part(rows, "whole"))
    assert found.value == pytest.approx(1 / 30.5) and found.low < found.value - 0.003 < found.value + 0.003 < found.high
    assert ratio(Part(Table([]), "part"), Part(Table([]), "whole")).n == 0


def test_equivalence_takes_cases() -> None:
    """Of 300 alike it is proven within 0.02; of 60 it is not, and not where a twentieth is worse."""

    def pairs(cases: int, worse: int) -> list[Part]:
        rows = Table({"case": n, "a": n > worse, "b": 1} for n in range(1, cases + 1))
        return [Part(rows, "a"), Part(rows, "b", -1)]

    assert equivalent(pairs(300, 0), 0.02)
    assert not equivalent(pairs(60, 0), 0.02) and not equivalent(pairs(300, 15), 0.02)


def test_a_slope() -> None:
    """A fall in every memory is one, noise of either sign is none, and a level line is level."""

    def turns(step: float, noise: float) -> list[Table]:
        return [
            Table({"case": n, "cosine": 1 + step * turn + noise * (-1) ** (n + turn // 2)} for n in range(1, 13))
            for turn in range(28)
        ]

    fall = slope(turns(-0.01, 0.0), "cosine")
    assert fall.value == pytest.approx(-0.01) and fall.high < 0
    level = slope(turns(0.0, 0.0), "cosine")
    assert (level.value, level.low, level.high) == (0, 0, 0)
    noise = slope(turns(0.0, 0.1), "cosine")
    assert noise.low <= 0 <= noise.high


def test_a_ratio_of_sums() -> None:
    """What was taken in all, whatever each memory's own ratio; resampled together, so what is the same share of every
    one is known exactly; nothing without something to compare with."""
    under = Table({"case": n, "x": 10 if n % 2 else 100} for n in range(1, 21))
    over = Table({"case": n, "x": 1 if n % 2 else 90} for n in range(1, 21))
    found = ratio(Part(over, "x"), Part(under, "x"))
    assert found.value == pytest.approx(91 / 110) and found.n == found.clusters == 20
    assert 0.6 < found.low < found.value < found.high < 0.9
    half = ratio(Part(Table({"case": row["case"], "x": float(row["x"]) / 2} for row in under), "x"), Part(under, "x"))
    assert (half.low, half.value, half.high) == (0.5, 0.5, 0.5)
    nothing = Table({"case": 1, "x": 0} for _ in over)
    assert ratio(Part(over, "x"), Part(Table([]), "x")).n == ratio(Part(over, "x"), Part(nothing, "x")).n == 0


# Made-up models: which rows must be fresh for them to act on the new value is known.


class Made(Mixes):
    """A token a character. `rests` is where a decision rests, as the characters of the text."""

    def __init__(self, case: Policies, rests: Sequence[tuple[int, int]]) -> None:
        text = joined(case)
        start = f"\n{text}".index(f"\n{case.field}: {case.old}") + len(f"{case.field}: ")
        inside = range(start, start + len(case.old))
        self.columns = [Column((i, i + 1), (i, i + 1), i in inside) for i in range(len(text))]
        self.first, self._text, self._rests = start, text, rests

    def characters(self) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(self._text))]

    def recovery(self, fresh: Sequence[bool]) -> float:
        return float(all(all(fresh[a:b]) for a, b in self._rests))


def field_of(case: Policies) -> list[tuple[int, int]]:
    """The characters of the asked field's value."""
    start = f"\n{joined(case)}".index(f"\n{case.field}: {case.old}") + len(f"{case.field}: ")
    return [(start, start + len(case.old))]


def looks_up(case: Policies) -> list[tuple[int, int]]:
    """A model that looks the field up when it is asked."""
    return field_of(case)


def takes_notes(case: Policies) -> list[tuple[int, int]]:
    """A model that notes at the asked rule's lines what follows from a field before them; else it looks it up."""
    noted = places(case, case.rule)
    return noted if noted[0][0] > field_of(case)[0][0] else field_of(case)


def measured(monkeypatch: pytest.MonkeyPatch, model: object, cases: int) -> dict[str, Table]:
    """What the probes find of a made-up model, of which a tenth of the cases decides alike."""
    number = 0

    def mixes_of(workspace: object, case: Policies) -> Iterator[Mixes]:
        nonlocal number
        number += 1
        if number % 10:
            yield Made(case, model(case))  # type: ignore[operator]

    for module in (notes, lines):
        monkeypatch.setattr(module, "mixes_of", mixes_of)
    monkeypatch.setattr(Made, "notebook", None, raising=False)
    monkeypatch.setattr(mixing, "decide", lambda *_: Decision("a", {"a": 0.51, "b": 0.49}))
    texts = Next(COMMIT, "known")
    probes = {"above": notes.above, "below": notes.below, "lines": lines.measure}
    return {name: Table(probe(None, cases, texts)) for name, probe in probes.items()}  # type: ignore[arg-type]


def test_a_field_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note in the row of the line's end is after the value, and in the field's line."""

    def at_the_end(case: Policies) -> list[tuple[int, int]]:
        end = f"{joined(case)}\n".index("\n", field_of(case)[0][1])
        return [(end, end + 1)] if end < len(joined(case)) else field_of(case)

    rows = [row for row in measured(monkeypatch, at_the_end, 60)["below"] if not row["excluded"]]
    assert all(row["line"] and not row["after_line"] for row in rows)
    ended = [row["after"] for row in rows]
    assert any(ended) and not all(ended) and all(row["field"] != row["after"] for row in rows)


def verdicts(tables: dict[str, Table]) -> dict[str, Verdict]:
    return {name: judge(HYPOTHESES[name], "known", tables) for name in ("H4", "H5", "H6", "H7", "H8")}


def test_the_note_index_of_a_model_that_looks_up_is_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 wherever fields are, and the rule's lines are nothing to it; the intervals are Wilson's."""
    found = verdicts(measured(monkeypatch, looks_up, 230))
    assert [found[name].checks[0].figure.value for name in found] == [1, 0, -1, -1, 0]
    assert {name: one.says for name, one in found.items()} == {
        "H4": "fails",
        "H5": "fails",
        "H6": "fails",
        "H7": "holds",
        "H8": "fails",
    }
    assert found["H4"].cases == 230 and found["H4"].excluded == 23 and found["H4"].n == 207
    share = found["H4"].checks[0].figure
    assert (share.low, share.high) == pytest.approx((207 / (207 + 1.96**2), 1), abs=1e-4)


def test_a_model_that_takes_notes_reaches_every_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """+1 with fields above, -1 with fields below, at the asked rule's lines only; near ties are told apart."""
    found = verdicts(measured(monkeypatch, takes_notes, 230))
    assert [found[name].checks[0].figure.value for name in found] == [0, 1, 1, -1, 1]
    assert {one.says for one in found.values()} == {"holds"} and found["H8"].checks[1].figure.value == 0
    assert found["H6"].checks[0].near == (207, 1.0)
    few = verdicts(measured(monkeypatch, takes_notes, 20))
    assert few["H6"].says == "too few cases: 18 of 200"


def decisions(same: int, cases: int) -> Table:
    """Rows of a decider that is as the corrected text in the first `same` cases."""
    return Table(
        {
            "case": n,
            "kind": "table",
            "way": way,
            "form": form,
            "right": n <= same,
            "same": n <= same,
            "near": n == 1,
            "cosine": 1.0,
            "kl": 0.0,
            "margin": 0.5,
        }
        for n in range(1, cases + 1)
        for way in ("direct", "reasoned")
        for form in ("text", "corrected", "erratum")
    )


def test_a_decider_that_is_known() -> None:
    """285 of 300 are 0.95, which holds; 284 do not."""
    for same, says in ((285, "holds"), (284, "fails")):
        for name in ("H1", "H13"):
            verdict = judge(HYPOTHESES[name], "known", {"decisions": decisions(same, 300)})
            found = verdict.checks[0]
            assert verdict.says == says and found.figure.value == pytest.approx(same / 300)
            half = 1.96 * (same / 300 * (1 - same / 300) / 300) ** 0.5
            assert found.figure.low == pytest.approx(same / 300 - half, abs=0.006)
            assert found.near == (1, 1.0)
    assert judge(HYPOTHESES["H2"], "held-out", {"decisions": decisions(270, 300)}).says == "holds"
    assert judge(HYPOTHESES["H2"], "held-out", {"decisions": decisions(270, 299)}).says.startswith("too few")


def test_selective_must_not_fall() -> None:
    """Rising by 0.3 in all is not enough where it falls on the way."""

    def table(*shares: float) -> dict[str, Table]:
        ks = ("k1", "k4", "k16", "k64")
        return {
            "selective": Table(
                {"case": n, **{k: n <= 200 * share for k, share in zip(ks, shares, strict=True)}} for n in range(1, 201)
            )
        }

    assert judge(HYPOTHESES["H10"], "known", table(0.1, 0.2, 0.2, 0.4)).says == "holds"
    assert judge(HYPOTHESES["H10"], "known", table(0.1, 0.5, 0.4, 0.9)).says == "fails"
    assert judge(HYPOTHESES["H10"], "known", table(0.1, 0.1, 0.2, 0.39)).says == "fails"


BESIDE = {"cosine": 1.0, "kl": 0.0, "margin": 0.5, "near": False}


def first(n: int, count: int) -> bool:
    return n <= count


def spliced(same: int, lost: int) -> dict[str, Table]:
    """300 pairs, of which so many agree, and so many lose the right answer."""
    ways = ("direct", "reasoned")
    return {
        "splice": Table(
            {
                "case": n,
                "way": way,
                "same": first(n, same),
                "choice_same": True,
                "right": n > lost,
                "recompute_right": True,
                **BESIDE,
            }
            for n in range(1, 301)
            for way in ways
        )
    }


def versions(rotated: int, unrotated: int) -> dict[str, Table]:
    beside = {f"{name}_{what}": 1.0 for name in ("rotated", "unrotated") for what in ("cosine", "kl", "margin")}
    return {
        "versions": Table(
            {"case": n, "right": True, "rotated": first(n, rotated), "unrotated": first(n, unrotated), **beside}
            for n in range(1, 201)
        )
    }


def controls(other: int, random: int) -> dict[str, Table]:
    beside = {f"{name}_{what}": 1.0 for name in ("other", "random", "own") for what in ("cosine", "kl", "margin")}
    return {
        "controls": Table(
            {"case": n, "other": first(n, other), "random": first(n, random), "own": True, **beside}
            for n in range(1, 201)
        )
    }


def said_again(nothing: int, again: int) -> dict[str, Table]:
    return {"again": Table({"case": n, "nothing": first(n, nothing), "again": first(n, again)} for n in range(1, 201))}


def toggled(fall: float, lowest: float) -> dict[str, Table]:
    return {
        "toggled": Table(
            {
                "case": n,
                "cache": cache,
                "turn": turn,
                "same": True,
                **BESIDE,
                "cosine": lowest if (n, turn) == (5, 9) and cache == "compacted" else 0.9999 - fall * turn,
            }
            for n in range(1, 13)
            for cache in ("errata", "compacted")
            for turn in range(1, 29)
        )
    }


def edits(field: int) -> dict[str, Table]:
    """Of 300, in so many `field` decides as the recompute where the skill is transplanted, and in 150 where not."""

    def rows(count: int) -> Table:
        return Table(
            {
                "case": n,
                "method": name,
                "direct_same": first(n, count if name == "field" else 150),
                "reasoned_same": True,
                **BESIDE,
            }
            for n in range(1, 301)
            for name in ALL
        )

    return {"transplanted": rows(field), "ordinary": rows(150)}


def in_blocks(together: int, split: int) -> dict[str, Table]:
    count = {"together": together, "split": split}
    return {
        "blocks": Table(
            {
                "case": (n + 2) // 3,
                "layout": layout,
                "asked_for": size,
                "same": first(n, count[layout]),
                "recompiled": 1600 // size if layout == "together" else 800,
                **BESIDE,
            }
            for n in range(1, 61)
            for layout in count
            for size in (1, 2, 4, 8, 16)
        )
    }


def seams_of(left: float) -> dict[str, Table]:
    """Of 200, those without a seam are at a distance of 0.1, the others at so much of that."""
    return {
        "seams": Table(
            {"case": n, "seam": seam, "same": first(n, 180 + 5 * seam), "choice_same": True, "right": True}
            | {"recompute_right": True, "distance": 0.1 * left if seam else 0.1, **BESIDE}
            for n in range(1, 201)
            for seam in seams.SEAMS
        )
    }


def test_what_a_seam_and_blocks_save() -> None:
    """Of sums, against no seam and one block; decisions beside; both are reported."""
    repaired = judge(HYPOTHESES["R6"], "known", seams_of(0.25))
    found = {check.what: check.figure for check in repaired.checks}
    assert repaired.says == "reported" and repaired.n == 200
    assert found["seam of 1: distance that is left (1 - cosine), of that with 0"].value == pytest.approx(0.25)
    assert found["seam of 4: decides as recomputed"].value == 1
    assert found["seam of 1 less 0: decides as recomputed"].value == pytest.approx(0.025)
    edited = judge(HYPOTHESES["R7"], "known", in_blocks(57, 51))
    found = {check.what: check.figure for check in edited.checks}
    assert edited.says == "reported" and edited.n == 60
    for size in (2, 4, 8, 16):
        assert found[f"together, S = {size}: tokens decoded, of those with S = 1"].value == pytest.approx(1 / size)
        assert found[f"split, S = {size}: tokens decoded, of those with S = 1"].value == 1
    assert found["together, S = 16: as the recompute"].value == 0.95


def agents(same: int) -> dict[str, Table]:
    """Of 300, in so many an agent decides as the baseline. The prefix cache decodes less where edits are late."""
    took = {"prefill every turn": (700, 700), "prefix cache": (600, 100), "erratum": (30, 30)}
    return {
        "agent": Table(
            {
                "case": (n + 29) // 30,
                "agent": name,
                "calibrated": "erratum",
                "place": PLACES[n % 2],
                "decision": n % 3 + 1,
                "decoded": took[name][n % 2] if n % 3 else 700 if name != "erratum" else 40,
                "seconds": took[name][n % 2] / 1000,
                "same": first(n, same),
                "right": True,
                **BESIDE,
            }
            for n in range(1, 301)
            for name in took
        )
    }


def test_an_agent_beside_a_prefix_cache() -> None:
    """Early and late apart, after an edit and in all, without a bar; and the method that a calibration chose."""
    found = {check.what: check for check in judge(HYPOTHESES["H18"], "known", agents(294)).checks}
    assert [check.what for check in found.values() if check.relation] == ["erratum: as the baseline"]
    assert found["auto, erratum by calibration: as the baseline"].figure.value == 0.98
    told = {
        "tokens decoded after an edit, of the prefix cache's, edits early in the memory": (0.05, 100),
        "tokens decoded after an edit, of the prefix cache's, edits late in the memory": (0.3, 100),
        "tokens decoded in all, of the prefix cache's, edits late in the memory": (100 / 900, 150),
        "time to the first token after an edit, of the prefix cache's, edits early in the memory": (0.05, 100),
        "tokens decoded, of the baseline's": (100 / 2100, 300),
    }
    for what, (value, n) in told.items():
        check = found[f"erratum: {what}"]
        assert check.figure.value == pytest.approx(value) and check.figure.n == n
    assert not any(what.startswith("prefix cache: tokens") for what in found)


def lives(lost: Sequence[int], gained: int = 0) -> dict[str, Table]:
    """200 of each length. Of those of 30 sessions so many answers of each of the first are lost by a splice, and as
    many gained in the last; those of 5 and 10 lose everything."""

    def row(case: int, sessions: int, number: int, sort: str) -> Row:
        short = sessions < 30
        worse = short or number < sum(lost[case - 1 : case])
        found = {"right": not worse, "recompute_right": short or case <= 200 - gained, "unrotated_right": False}
        found |= {"same": True, "choice_same": True, "unrotated_same": False, "tokens": 900, **BESIDE}
        return {"case": case, "sessions": sessions, "sort": sort, "old": "", "recompute_old": "", **found}

    sorts = [sort for sort, count in SORTS.items() for _ in range(count)]
    return {
        "life": Table(
            row(case, sessions, number, sort)
            for case in range(1, 201)
            for sessions in life.SESSIONS
            for number, sort in enumerate(sorts)
        )
    }


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("H3", spliced(295, 0), [spliced(293, 0), spliced(300, 5)]),
        ("H11", versions(200, 140), [versions(200, 141), versions(100, 200)]),
        ("H12", controls(120, 120), [controls(121, 0), controls(0, 121)]),
        ("H14", said_again(40, 50), [said_again(40, 51), said_again(51, 40)]),
        ("H15", toggled(0.0, 0.99), [toggled(0.0, 0.989), toggled(1e-4, 0.9999)]),
        ("H16", edits(165), [edits(166), edits(134)]),
        ("H17", in_blocks(57, 51), [in_blocks(56, 40), in_blocks(60, 55)]),
        ("H18", agents(294), [agents(293)]),
        # Of 2,000 answers 30 are lost, by 30 lives or by three of them; 60 are; 60 are gained.
        ("R5", lives([1] * 30), [lives([10] * 3), lives([1] * 60), lives([], 6)]),
    ],
)
def test_a_bar_is_where_the_page_has_it(name: str, good: dict[str, Table], bad: list[dict[str, Table]]) -> None:
    """At the bar it holds, and one case further it fails."""
    assert judge(HYPOTHESES[name], "known", good).says == "holds"
    assert [judge(HYPOTHESES[name], "known", tables).says for tables in bad] == ["fails"] * len(bad)


# Lives.


def in_text(sessions: Sequence[str], name: str) -> list[tuple[int, str]]:
    """Where a field is said, and its values, read from the texts."""
    return [(n, value) for n, text in enumerate(sessions) for value in re.findall(f"(?m)^{name}: (.+)$", text)]


def follows(text: str, topic: str, value: str) -> str:
    """What the rules of a session say of a topic where their field has this value, read from the text."""
    for line in text.splitlines():
        if found := re.fullmatch(rf"- If the \S+ is (\S+) then the {topic} is (\S+)\.", line):
            if found[1] == value:
                return found[2]
        elif found := re.fullmatch(
            rf"- If the \S+ is (before|over) (\S+) then the {topic} is (\S+), otherwise the {topic} is (\S+)\.", line
        ):
            holds = value < found[2] if found[1] == "before" else int(value) > int(found[2])
            return found[3] if holds else found[4]
    raise AssertionError(f"nothing says what {topic} is if its field is {value}")


@pytest.mark.parametrize("name", ["held-out", "known"])
@pytest.mark.parametrize("count", life.SESSIONS)
def test_a_life_is_as_the_page_says(name: str, count: int) -> None:
    """Facts in their thirds, the last word of what was changed, rules with their fields and what overrules these: all
    of it read from the texts again."""
    texts = Next(COMMIT, name)
    for _, rng in texts.rngs("life", 6):
        one = live(texts, rng, count)
        assert len(one.sessions) == count and [question.sort for question in one.questions] == [
            sort for sort, many in SORTS.items() for _ in range(many)
        ]
        for number, text in enumerate(one.sessions, 1):
            assert re.match(rf"# Session {number}, \d{{4}}-\d\d-\d\d\n\n\S+: \S+(\n|$)", text)
        days = [text.split()[3] for text in one.sessions]
        assert days == sorted(set(days))
        for question in one.questions:
            assert question.answer in question.choices and len(set(question.choices)) >= 2
            if question.sort in ("rule", "overruled"):
                (rule,) = [
                    (n, line)
                    for n, text in enumerate(one.sessions)
                    for line in re.findall(r"- If the (\S+) is [^\n]*the (\S+) is", text)
                    if re.search(rf"\b{line[1]}\b", question.text)
                ][:1]
                at, (field, topic) = rule
                (first_at, old), *later = in_text(one.sessions, field)
                assert first_at == at and len(later) == (question.sort == "overruled")
                new = later[-1][1] if later else old
                assert follows(one.sessions[at], topic, new) == question.answer
                before = follows(one.sessions[at], topic, old) if later else ""
                assert before == question.before != question.answer
                continue
            said = [in_text(one.sessions, word) for word in re.findall(r"\w+", question.text)]
            (found,) = [each for each in said if each]
            assert found[-1][1] == question.answer and [n for n, _ in found] == sorted({n for n, _ in found})
            if question.sort == "changed":
                assert len(found) == 2 and found[0][1] == question.before != question.answer
            else:
                third = ("early", "middle", "late").index(question.sort)
                assert len(found) == 1 and count * third // 3 <= found[0][0] < count * (third + 1) // 3


def test_questions_do_not_see_each_other() -> None:
    """Each is answered as in a prompt of its own, spliced and decoded; sessions compiled alone are not the recompute,
    and rows that were not turned are further from it; too long a life is refused."""
    texts = Next(COMMIT, "known")
    with Workspace(config.shipped_model(), ContextOptions(n_threads=1)) as workspace:
        ((_, rng),) = texts.rngs("life", 1)
        one = live(texts, rng, 5)
        prompt = life.prompt_of(workspace, one)
        assert [workspace.model.text(segment.tokens) for segment in prompt.segments] == list(one.sessions)
        found = {name: life.asked(workspace, prompt, one.questions, *way) for name, way in life.WAYS.items()}
        for name, (splice, rotate) in life.WAYS.items():
            for question, (answer, logits, decision) in zip(one.questions, found[name], strict=True):
                alone = replace(prompt, question=question.text)
                with assemble(workspace, alone, splice=splice, rotate=rotate, room=life.ANSWER) as notebook:
                    assert error(logits, notebook.logits()) < 1e-4
                    assert settings.decide(notebook, question.choices).choice == decision.choice
                    assert life.said(workspace, notebook, life.ANSWER) == answer
        off = {
            name: np.mean([error(a[1], b[1]) for a, b in zip(found[name], found["recompute"], strict=True)])
            for name in ("spliced", "unrotated")
        }
        assert 1e-4 < off["spliced"] < off["unrotated"]
        workspace.longest = 200
        with pytest.raises(UnsupportedError, match=r"a life takes \d+ tokens, and the model reads 200"):
            life.asked(workspace, prompt, one.questions, True, True)


def test_what_was_right_before_is_told_apart() -> None:
    """Of answers to what a later session changed; nothing of the others."""

    def answered(text: str) -> life.Asked:
        return text, np.ones(3, np.float32), Decision("new", {"new": 0.6, "old": 0.4})

    changed = Question("overruled", "table", "?", ("new", "old"), "new", "old")
    row = life.compared(changed, answered("new"), answered("old"), answered("none"))
    assert (row["recompute_right"], row["right"], row["unrotated_right"]) == (True, False, False)
    assert (row["recompute_old"], row["old"], row["same"], row["unrotated_same"]) == (False, True, False, False)
    row = life.compared(replace(changed, before=""), answered("new"), answered("new"), answered("new"))
    assert (row["recompute_old"], row["old"]) == ("", "") and row["same"] and row["right"]


# What is reported without a bar.


@contextmanager
def far(size: int = 4096) -> Iterator[tuple[Workspace, Policies, Prompt]]:
    """The model that ships in a large context, with a case and its prompt."""
    options = ContextOptions(n_ctx=size, n_threads=1)
    with Workspace(config.shipped_model(), options, beyond_trained=True) as workspace:
        ((_, case),) = Next(COMMIT, "known").policies("distance", 1, skills=(1,))
        yield workspace, case, Prompt(case.question, segments_of(workspace, case.skills), system=SYSTEM)


def test_a_moved_prompt_is_where_it_is_said_to_be() -> None:
    """Its skill's rows are those of the recompute there, and not if they are not turned; what is decided at its end
    leaves it as it was."""
    with far(21_000) as (workspace, case, prompt):
        with assemble(workspace, prompt, splice=False) as notebook:
            tokens, before = notebook.tokens, distance.skill_at(notebook)
            near = notebook.logits()
        skill, found = prompt.segments[0], {}
        for name, options in (("recompute", {"splice": False}), ("spliced", {}), ("unrotated", {"rotate": False})):
            with distance.moved(workspace, prompt, tokens, 20_000 - before, **options) as notebook:
                logits = notebook.logits()
                assert notebook.position(before) == 20_000 and list(notebook.tokens) == list(tokens)
                assert workspace.context.length(notebook.sequence) == 20_000 - before + len(tokens)
                first = workspace.context.read(notebook.sequence, 20_000, len(skill), base=20_000)[0]
                found[name] = floats(first.k)[1:], logits
                settings.decide(notebook, case.choices)
                assert workspace.context.length(notebook.sequence) == 20_000 - before + len(tokens)
        wanted, logits = found["recompute"]
        assert error(logits, near) < 1e-2  # distances between tokens are those of the prompt at 0
        assert error(found["spliced"][0], wanted) < 1e-4 < 0.1 < error(found["unrotated"][0], wanted)
        with distance.in_batches(workspace, tokens, 20_000 - before, 16) as notebook:
            assert error(notebook.logits(), logits) < 1e-3


def test_distances_and_their_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are only turned are as near as other batches are, or nearly; those that are not turned are far; a
    position that the prompt does not fit before is refused."""
    monkeypatch.setattr(distance, "POSITIONS", (100, 20_000))
    with Workspace(config.shipped_model(), ContextOptions(n_threads=1)) as workspace:
        rows = Table(distance.measure(workspace, 1, Next(COMMIT, "known")))
        assert [(row["position"], row["way"]) for row in rows] == [
            (position, way) for position in (100, 20_000) for way in distance.WAYS
        ]
        for position in (100, 20_000):
            of = {str(row["way"]): float(row["error"]) for row in rows.where(position=position)}
            assert of["token by token"] < 1e-3 and of["batches of 16"] < 1e-3
            assert of["turned"] < 1e-2 and of["turned"] < of["unrotated"] / 20
        monkeypatch.setattr(distance, "POSITIONS", (5,))
        with pytest.raises(UnsupportedError, match="none can begin at position 5"):
            list(distance.measure(workspace, 1, Next(COMMIT, "known")))


def test_each_cache_and_each_type_of_weights() -> None:
    """Each setting computes by itself: it has its own type, and other logits; the first is as the model was given."""
    with Workspace(config.shipped_model(), ContextOptions(n_threads=1)) as workspace:
        with settings.caches(workspace) as opened:
            assert [each.options.cache for each in opened.values()] == ["f16/f16", "q8_0/q8_0", "q4_0/q4_0"]
        with settings.weights(workspace) as opened:
            assert {name: each.model.quantization.lower() for name, each in opened.items()} == {
                name: name for name in ("q8_0", "f32", "q4_0")
            }
            assert opened["q8_0"] is workspace
        for name in ("caches", "weights"):
            rows = list(settings.decisions(name, getattr(settings, name))(workspace, 1, Next(COMMIT, "known")))
            assert len({row["cosine"] for row in rows}) == 3 and rows[0]["as_given"]


def test_a_setting_that_decides_alike_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no recovery; where the model as it was given does, the case is left out of all settings."""

    def mixed(setting: str, case: Policies) -> Iterator[Mixes]:
        if setting == "poor" or case.kind == "amount":
            return
        yield Made(case, takes_notes(case))

    monkeypatch.setattr(settings, "mixes_of", mixed)
    monkeypatch.setattr(settings, "began", lambda number, case, _: {"case": number, "kind": case.kind, "near": False})

    @contextmanager
    def opened(_: object) -> Iterator[dict[str, str]]:
        yield {"given": "given", "poor": "poor"}

    rows = Table(settings.notes("caches notes", opened)(None, 8, Next(COMMIT, "known")))  # type: ignore[arg-type]
    left = [row["case"] for row in rows if row.get("excluded")]
    assert left == [4, 4, 8, 8] and len(rows) == 16
    kept = Table(row for row in rows if not row.get("excluded"))
    assert kept.where(setting="given").mean("alike") == 0 and kept.where(setting="poor").mean("alike") == 1
    assert len(kept.where(setting="given").numbers("after")) == 6 and not kept.where(setting="poor").numbers("after")


def in_settings(cases: int) -> dict[str, Table]:
    """Caches, of which the last one reads nothing."""
    names = ("f16", "q8_0", "q4_0")
    rows = [
        {"case": n, "setting": name, "right": name != "q4_0", "recompute_right": True, "same": name != "q4_0"}
        | {"as_given": True, **BESIDE}
        for n in range(1, cases + 1)
        for name in names
    ]
    poor = {"alike": True, "field": "", "after": "", "near": ""}
    mixes = [
        {"case": n, "setting": name}
        | (poor if name == "q4_0" else {"alike": False, "field": False, "after": True, "near": False})
        for n in range(1, cases + 1)
        for name in names
    ]
    return {"caches": Table(rows), "caches notes": Table(mixes)}


def test_what_has_no_bar_is_reported() -> None:
    """With as many cases as the model as it was given needs, though one setting tells no values apart."""
    verdict = judge(HYPOTHESES["R2"], "known", in_settings(200))
    found = {check.what: check.figure for check in verdict.checks}
    assert verdict.says == "reported" and found["q8_0: note index"].value == 1
    assert found["q4_0: note index"].n == 0 and found["q4_0: decides alike whatever the value"].value == 1
    assert found["q4_0: spliced, right"].value == 0 and "f16: decides alike whatever the value" not in found
    assert judge(HYPOTHESES["R2"], "known", in_settings(199)).says == "too few cases: 199 of 200"


def numbers_of(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    return {
        tensor.name: (tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


def test_weights_of_another_type_are_the_same_numbers(tmp_path: Path) -> None:
    """To the bit where the type holds them, near where it does not; norms stay."""
    own = numbers_of(config.shipped_model())
    exact, same, rough = (
        numbers_of(write_as(config.shipped_model(), tmp_path / k, k)) for k in ("f32", "q8_0", "q4_0")
    )
    assert {kind for kind, _ in exact.values()} == {"F32"} and "Q4_0" in {kind for kind, _ in rough.values()}
    for name, (kind, wanted) in own.items():
        assert np.array_equal(exact[name][1], wanted) and np.array_equal(same[name][1], wanted)
        if rough[name][0] == kind or not wanted.any():
            assert np.array_equal(rough[name][1], wanted)
        else:
            assert 0 < error(rough[name][1], wanted) < 0.05


def test_random_weights_have_the_shape_and_the_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else of the model's: another draw for each seed, the same one again; all that the file says stays."""
    model = config.shipped_model()
    paths = [write_random(model, tmp_path / f"{i}.gguf", seed) for i, seed in enumerate((1, 1, 2))]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    own, found = numbers_of(model), numbers_of(paths[0])
    for name, (kind, wanted) in own.items():
        assert found[name][0] == kind and found[name][1].shape == wanted.shape
        if wanted.ndim > 1 and wanted.any():
            assert abs(np.corrcoef(found[name][1].ravel(), wanted.ravel())[0, 1]) < 0.1
            assert found[name][1].std() == pytest.approx(wanted.std(), rel=0.05)
        else:
            assert np.array_equal(found[name][1], wanted)
    said = [
        {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
        for path in (model, paths[0])
    ]
    assert said[0] == said[1]

    def refuse(*_: object) -> np.ndarray:
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "quantize", refuse)
    with pytest.raises(UnsupportedError, match="is Q8_0, which is read only"):
        write_random(model, tmp_path / "other.gguf", 1)


# Heads that were patched.

HEADS = [f"{layer}.{head}" for layer in range(3) for head in range(4)]


def patched(case: int, alone: Mapping[str, float], order: Sequence[str], near: bool = False) -> Row:
    """The row of a model whose heads add up, and recover no more than 1."""
    row: Row = {"case": case, "excluded": False, "near": near, "engine": 1.0, "as the engine": True, "cosine": 1.0}
    for way in heads.WAYS:
        curve = [min(1.0, sum(alone[name] for name in order[:count])) for count in heads.counts(len(order))]
        row |= heads.together(way, order, alone, curve)
    return row


def amounts(*firsts: float) -> dict[str, float]:
    """What heads recover alone: so much by the last ones, the last of all first, and nothing by the others."""
    return dict.fromkeys(HEADS, 0.0) | dict(zip(reversed(HEADS), firsts, strict=False))


def test_heads_are_ranked_by_their_mean() -> None:
    """Over the cases that are not left out, each way by itself; without any there is no ranking."""
    rows = [
        {"case": 1, "excluded": False, **heads.alone("read", amounts(0.1, 0.9)), **heads.alone("write", amounts(0.5))},
        {"case": 2, "excluded": True, "near": ""},
        {"case": 3, "excluded": False, **heads.alone("read", amounts(0.7, 0.2)), **heads.alone("write", amounts(-1))},
    ]
    read, write = (heads.ranked(Table(rows), way) for way in ("read", "write"))
    assert read[:2] == ["2.2", "2.3"] and write[-1] == "2.3" and sorted(read) == sorted(write) == HEADS
    with pytest.raises(heads.NoCasesError, match="--cases"):
        heads.ranked(Table(rows[1:2]), "read")


def test_shares_of_heads_that_add_up() -> None:
    """The top 4 of a ranking, which is not the cases' own, against all heads together and against their sum."""
    order = heads.ranked(Table([{"case": 0, "excluded": False, **heads.alone("read", amounts(5, 4, 3, 2, 1))}]), "read")
    spread = {name: 1 / len(HEADS) for name in HEADS}
    concentrated = amounts(0.5, 0.2, 0.0, 0.0, 0.3)
    for alone, share, summed, needed in ((spread, 4 / 12, 4 / 12, 12), (concentrated, 0.7, 0.7, 5)):
        verdict = judge(HYPOTHESES["H21"], "known", {"heads": Table(patched(n, alone, order) for n in range(1, 61))})
        found = {check.what: check.figure.value for check in verdict.checks}
        assert verdict.says == "reported" and verdict.n == 60
        for does in heads.WAYS.values():
            assert found[f"{does}: share of the top 4"] == pytest.approx(share)
            assert found[f"{does}: share of the top 4 in that sum"] == pytest.approx(summed)
            assert found[f"{does}: heads needed for 0.8 of what all recover"] == needed
    chain = patched(1, amounts(1, 1, 1), order)  # each alone does all of it
    assert (chain["write 1"], chain["write 12"], chain["write alone, all"]) == (1, 1, 3)
    with pytest.raises(ValueError, match="ranked heads"):
        heads.together("read", order, {"9.9": 1.0}, [1.0])


def test_rows_of_heads_are_read_where_they_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By another command: until then nothing is measured, and how to is said; another ranking is not mixed in."""
    keep = tmp_path / "kept"
    given = [str(config.shipped_model()), "H21", "--commit", COMMIT, "--cases", "3", "--keep", str(keep)]
    assert command.main(given) == 1
    said = capsys.readouterr()
    assert "H21" in said.out and "NOT MEASURED" in said.out and "run python -m training.tiny.heads" in said.err
    order = list(reversed(HEADS))

    def rows(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
        return (patched(n, amounts(0.5, 0.2, 0.0, 0.0, 0.3), order) for n in range(texts.begin, cases + 1))

    def measured(ranking: str) -> Table:
        with Workspace(config.shipped_model(), ContextOptions(n_ctx=4096, n_threads=1)) as workspace:
            run = command.Run(workspace, COMMIT, 3, keep, None)
            return run.measured("heads", "known", Measure(rows, 60), {"ranking": ranking})

    assert len(measured("a")) == 3
    with pytest.raises(KeptError, match="other ranking"):
        measured("b")
    assert command.main(given) == 1
    said = capsys.readouterr()
    assert "read: share of the top 4: 0.700 (0.700 to 0.700), n 3" in said.out
    assert "held-out words: NOT MEASURED" in said.out and "known words: TOO FEW CASES: 3 OF 60" in said.out


# What is kept, and the page.


def test_rows_are_kept_case_by_case(tmp_path: Path) -> None:
    """What was stopped goes on; half a line is measured again; rows of another model are refused."""
    path = tmp_path / "above.jsonl"
    rows: list[Row] = [{"case": n, "same": n % 2 == 0, "excluded": n == 2} for n in (1, 2, 3) for _ in range(2)]
    kept = Kept(path, {"weights": "a"})
    assert kept.next == 1 and list(kept.add(rows)) == [1, 2, 3]
    path.write_bytes(path.read_bytes()[:-9])
    again = Kept(path, {"weights": "a"})
    assert again.next == 3 and again.used() == 1 and again.table.rows == rows[:4]
    assert list(again.add(rows[4:])) == [3] and Kept(path, {"weights": "a"}).table.rows == rows
    with pytest.raises(KeptError, match=r"other weights.*--keep"):
        Kept(path, {"weights": "b"})


def verdict_of(name: str, same: int) -> dict[str, object]:
    return as_json(judge(HYPOTHESES[name], "known", {"decisions": decisions(same, 300)}))


def documents(*sames: int) -> dict[int | str, Mapping[str, Any]]:
    """Of as many training seeds, whose H1 is right in so many of 300."""
    return {
        seed: document({**ABOUT, "weights": str(seed) * 64}, [verdict_of("H1", same)])
        for seed, same in enumerate(sames, 1)
    }


def test_all_three_seeds_decide() -> None:
    """One that fails is enough to fail, and one that is missing leaves it undecided; other models are told apart."""

    def said(*sames: int) -> str:
        found = {seed: {("H1", "known"): one["verdicts"][0]} for seed, one in documents(*sames).items()}
        return overall(("known",), "H1", found)

    assert said(300, 299, 285) == "holds" and said(300, 280, 300) == "**fails**" and said(300, 300) == "undecided"
    text = page(documents(300, 300), DOCS)
    assert "Not measured yet: training seed 3" in text
    assert "R4 | models of about" in text and "`python -m bench.ablations`" in text
    assert "H21 | what 4 heads read, and write (python -m training.tiny.heads FILE) | held-out: not measured" in text
    assert "| right, direct | 1.000 (0.987 to 1.000) | 300 |" in text


def test_models_beside_decide_nothing(tmp_path: Path) -> None:
    """They have sections of their own and no column; of other texts, or one of the seeds again, they are refused."""
    command._write(tmp_path, 1, ABOUT, [verdict_of("H1", 300)])
    command._write(tmp_path, "random", {**ABOUT, "weights": "r", "settings": "s"}, [verdict_of("H1", 0)])
    text = (tmp_path / PAGE).read_text()
    assert "**fails**" not in text and "seed random" not in text
    assert "## Random weights\n\nNo hypothesis is of this model" in text
    assert text.index("right, direct | 1.000") < text.index("## Random weights") < text.index("right, direct | 0.000")
    with pytest.raises(KeptError, match="same weights"):
        command._write(tmp_path, "reversed", ABOUT, [])
    with pytest.raises(KeptError, match="different commit"):
        command._write(tmp_path, "reversed", {**ABOUT, "weights": "v", "commit": "f" * 40}, [])


def test_what_does_not_belong_together_is_not_written(tmp_path: Path) -> None:
    """One model under two seeds, or texts of two commits: refused, and what is there stays."""
    command._write(tmp_path, 1, ABOUT, [verdict_of("H1", 300)])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in before} == {"results.md", "protocol-seed-1.json"}
    with pytest.raises(KeptError, match="same weights"):
        command._write(tmp_path, 2, ABOUT, [verdict_of("H1", 300)])
    with pytest.raises(KeptError, match="different commit"):
        command._write(tmp_path, 2, {**ABOUT, "weights": "v", "commit": "f" * 40}, [])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    command._write(tmp_path, 2, {**ABOUT, "weights": "v"}, [verdict_of("H1", 200)])
    assert "**fails**" in (tmp_path / PAGE).read_text()


def test_verdicts_of_several_runs_come_together(tmp_path: Path) -> None:
    """Later ones take the place of those they repeat; those of other weights go."""
    path = tmp_path / "results.json"
    write(path, document(ABOUT, merged(path, ABOUT, [verdict_of("H13", 300), verdict_of("H1", 200)])))
    found = merged(path, ABOUT, [verdict_of("H1", 300)])
    assert [(one["hypothesis"], one["says"]) for one in found] == [("H1", "holds"), ("H13", "holds")]
    assert len(merged(path, {**ABOUT, "weights": "x"}, [verdict_of("H1", 300)])) == 1


def added_of(seed: int) -> dict[str, object]:
    return {**as_json(judge(HYPOTHESES["R6"], "known", seams_of(0.5))), "words": "held-out", "seed": seed}


def test_what_is_added_later_leaves_all_else_as_it_was(tmp_path: Path) -> None:
    """In a file of its own, by other sources; told of the seeds that have it; of another model or other texts refused;
    and the page can be written again of what is stored."""
    for seed in (1, 2, 3):
        command._write(tmp_path, seed, {**ABOUT, "weights": str(seed)}, [verdict_of("H1", 300)])
    before = {path: path.read_bytes() for path in tmp_path.glob("results/*.json")}
    was = (tmp_path / PAGE).read_text(encoding="utf-8").splitlines()
    about = {**ABOUT, "weights": "1", "sources": "later"}
    command._write(tmp_path, 1, about, [added_of(1)])
    assert {path: path.read_bytes() for path in before} == before
    text = (tmp_path / PAGE).read_text(encoding="utf-8")
    seam = next(row for row in text.splitlines() if row.startswith("| seam repair"))
    assert "distance left, of that with 0: 0.500" in seam and seam.count(f"R6 not measured: {ADDED['R6']}") == 2
    assert seam.endswith("| R6 undecided |")  # known words are missing
    assert "R6 of training seed 1, added later: `m`" in text and "\n### R6: seam repair" in text
    gone = [row for row in was if row not in text.splitlines()]
    assert all(row.startswith(("| seam repair", "| R6 |")) for row in gone) and len(gone) == 2
    command._write(tmp_path, 1, about, [added_of(1), {**added_of(1), "words": "known"}])
    assert "| R6 reported, seed 1 alone |" in (tmp_path / PAGE).read_text(encoding="utf-8")
    (tmp_path / PAGE).unlink()
    assert (
        command.main(["--write", str(tmp_path)]) == 0
        and "distance left, of that with 0: 0.500" in (tmp_path / PAGE).read_text()
    )
    with pytest.raises(KeptError, match="another model than its other figures"):
        command._write(tmp_path, 2, {**about, "weights": "4"}, [added_of(2)])
    with pytest.raises(KeptError, match="different commit"):
        command._write(tmp_path, 2, {**about, "weights": "2", "commit": "f" * 40}, [added_of(2)])


# The paper's table.


def test_rows_of_the_paper_are_of_figures_that_there_are() -> None:
    """Each check that a row names is one of its hypothesis; every row has figures; no source is lost."""
    empty = {name: Table([]) for each in HYPOTHESES.values() for name in each.measures}
    tables = {**empty, **toggled(0.0, 1.0), **in_settings(3), **agents(294), **seams_of(0.5), **in_blocks(57, 51)}
    for row in ROWS:
        assert row.shown or row.sources, row.what
        for shown in row.shown:
            hypothesis = HYPOTHESES[shown.hypothesis]
            checks = {check.what: check for check in hypothesis.checks(tables)}
            assert set(shown.checks.values()) <= set(checks), row.what
            barred = any(check.relation for check in checks.values())
            named = any(checks[what].relation for what in shown.checks.values())
            assert shown.barred == (named or not barred), f"{row.what}: says what no bar of {shown.hypothesis} says"
    assert len({row.what for row in ROWS}) == len(ROWS) == 35
    assert sorted(row.sources for row in ROWS if row.sources) == sorted(SOURCES)


def found_of(tables: dict[str, Table]) -> paper.Verdicts:
    return {1: {(name, "held-out"): as_json(one) for name, one in verdicts(tables).items()}}


def test_the_page_says_what_the_figures_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that takes notes, of one that looks up, and of too few to know; and the table has their figures."""
    notes_taken = found_of(measured(monkeypatch, takes_notes, 230))
    text = paper.finding(notes_taken)
    assert "new value decides in 0.000" in text and "only what follows fresh in 1.000" in text
    assert "what was written after the field, as the paper says" in text and "-1.000 (-1.000 to" in text
    assert "negative, as it must be" in text
    turned = found_of(measured(monkeypatch, looks_up, 230))
    assert "the field's own rows, the reverse of what the paper says" in paper.finding(turned)
    other = {**notes_taken, 2: turned[1]}
    assert "neither of them for sure" in paper.finding(other)
    swapped = {1: {**notes_taken[1], ("H7", "held-out"): notes_taken[1]["H6", "held-out"]}}
    assert "the control fails" in paper.finding(swapped)
    assert paper.finding({}) == "Where a decision rests has not been measured yet."
    so = dict.fromkeys(HYPOTHESES, "holds") | {"H4": "**fails**"}
    rows = paper.table(notes_taken, so, PAGE, DOCS).splitlines()
    first = next(row for row in rows if row.startswith("| refresh the field's own"))
    assert "acts on the new value: 0.000 (0.000 to 0.018)" in first and first.endswith("| H4 **fails** |")
    # A head and a line below it for each table: five sections have one of the models of the seeds, five of others.
    own, others = (sum(bool(row.shown) for row in ROWS), sum(map(len, SOURCES.values())))
    assert sum(row.startswith("| ") for row in rows) == own + others + 2 * 10
    seam = next(row for row in rows if row.startswith("| seam repair"))
    assert seam.split("|")[3].strip() == f"R6 not measured: {ADDED['R6']}"
    heads_row = next(row for row in rows if row.startswith("| read heads"))
    assert heads_row.count("not measured") >= 1 and "0." not in heads_row.split("|")[3]


def test_the_picture_is_of_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drawn and named by the page where there are figures of rows, and gone where there are none."""
    found = verdicts(measured(monkeypatch, takes_notes, 30))
    command._write(tmp_path, 1, ABOUT, [as_json(one) | {"words": "held-out"} for one in found.values()])
    drawn = tmp_path / "results" / "protocol.svg"
    assert "<svg" in drawn.read_text() and "(results/protocol.svg)" in (tmp_path / PAGE).read_text()
    command._write(tmp_path, 1, ABOUT, [verdict_of("H1", 300)])
    assert drawn.exists()  # what the file has of other hypotheses stays
    command._write(tmp_path, 1, {**ABOUT, "weights": "v"}, [verdict_of("H1", 300)])
    assert not drawn.exists() and "protocol.svg" not in (tmp_path / PAGE).read_text()


def test_links_are_of_where_the_page_is() -> None:
    """Beside docs/protocol.md, or a folder below it."""
    assert paper.to("protocol.md", "results/protocol.md") == "../protocol.md"
    assert paper.to("serving.md", "results.md") == "serving.md"


# What other benches have stored.

EVERY = [source for each in SOURCES.values() for source in each]


def named_as(source: Source) -> str:
    return f"{source.file} {source.subject}"


def test_the_page_is_what_is_stored() -> None:
    """All of it, the paper's table with it: no figure of the page is another one than its source has now."""
    stored = command._stored(DOCS)
    wanted = page(stored, DOCS, drawn=(DOCS / report.PICTURE).is_file())
    assert (DOCS / PAGE).read_text(encoding="utf-8") == wanted, "run python -m bench.protocol --write docs"


@pytest.mark.parametrize("source", EVERY, ids=named_as)
def test_a_source_has_what_the_page_shows(source: Source, tmp_path: Path) -> None:
    """Its file, its page and what makes it are there; it gives figures, and without the file none at all."""
    assert (DOCS / source.page).is_file() and source.figures(DOCS)
    assert source.figures(tmp_path) is None and paper._told(source, tmp_path).startswith("not measured: there is no")
    made = source.by.removeprefix("python -m ").removeprefix("make ")
    module = made.replace(".", "/") + ".py"
    targets = re.findall(r"(?m)^([a-z-]+):", (seeds.ROOT / "Makefile").read_text())
    assert (seeds.ROOT / module).is_file() if source.by.startswith("python") else made in targets


@pytest.mark.parametrize("source", EVERY, ids=named_as)
def test_every_figure_goes_with_its_source(source: Source, tmp_path: Path) -> None:
    """With all numbers of the stored file changed none of the page's figures is left as it was: none is typed in."""
    path = tmp_path / source.file
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (DOCS / source.file).read_text(encoding="utf-8")
    path.write_text(changed(text) if path.suffix == ".json" else worse(text), encoding="utf-8")
    before, after = source.figures(DOCS), source.figures(tmp_path)
    assert before and after and len(before) == len(after)
    for was, now in zip(before, after, strict=True):
        assert was.what == now.what and was.value != now.value, was


def changed(text: str) -> str:
    """JSON with other counts of what was the same, other findings and values of checks, and times of ours that are
    twice as long; those that they are compared with stay, as what scales both changes no ratio."""
    twice = r"/notes(-session)?/runs/first$|/(ours|edited)/reused$|/ours/(answers|p90/seconds)$"

    def other(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            of = f"{name}/{value['system']}" if "system" in value else name
            return {key: other(each, f"{of}/{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [other(each, name) for each in value]
        if re.search(r"/same[^/]*$", name):
            return value - 1 if value else 1
        if name.endswith("/checks/value"):
            return None if value is None else value + 1
        return 2 * value if re.search(twice, name) else "other" if name.endswith("/finding") else value

    return json.dumps(other(json.loads(text), ""))


def worse(text: str) -> str:
    """A page of the zoo, or of random scripts, on which nothing is right but by the amplification rule."""
    text = re.sub(r"(?m)^(\| \S+-(?:dense|moe) )(.*)$", lambda row: row[1] + _wrong(row[2]), text)
    text = text.replace("| scripts with a difference | 0 |", "| scripts with a difference | 7 |")
    return re.sub(r"(?m)^(\| no rotation \| \w+) \| (\d+) \| 0 \| 0 \|$", r"\1 | 1 | 0 | \2: all |", text)


def _wrong(cells: str) -> str:
    return re.sub(r"\| (0|\de-\d\d) (?=\|)", "| 7e-01 ", re.sub(r"(exact|refused)(?= \|)", "wrong", cells))


def test_what_is_stored_is_read_right() -> None:
    """Some figures of each sort, against what its own page says of it, or counted by hand."""

    def one(name: str, number: int, begins: str) -> Told:
        (found,) = [told for told in SOURCES[name][number].figures(DOCS) or () if told.what.startswith(begins)]
        return found

    serving = (DOCS / "serving.md").read_text(encoding="utf-8")
    small = serving[serving.index("**The reversed model**") :]
    row = re.search(r"^\| llama-server, policy edited \| (\d.*) \|$", small, re.M)
    assert row
    for load, told in zip((*map("load {}".format, (2, 4, 8, 16)), "all at once"), row[1].split(" | "), strict=True):
        found = one("serving", 0, f"p90 of llama-server's first token, times ours, {load}")
        assert f"{found.value:.0f}" == told and found.low < found.value < found.high  # type: ignore[operator]
    cut = one("serving", 1, "p90 of llama-server's first token, times ours, load 16")
    assert str(cut).endswith("load 16: at least 15.6 (some were cut off), 12 and 12 requests")
    race = (DOCS / "race.md").read_text(encoding="utf-8")
    long = race[race.index("**A skill alone, another question, 32k**") :]
    ours, full = (
        float(re.findall(rf"(?m)^\| `{name}`(?:, all decoded)? \| \d\*? \| ([\d.]+) ", long)[0])
        for name in ("notes ask", "notes ask --recompute")
    )
    assert one("first token", 1, "32k tokens").value == pytest.approx(full / ours, rel=0.02)
    images = one("images", 0, "among other images")
    assert (images.value, images.of) == (0.99, "200 questions") and images.low == pytest.approx(0.964, abs=1e-3)
    assert one("mla", 0, "splice").value == "7 of 7 models, 4 of them by the amplification rule"
    assert one("recurrent", 0, "splice").value == "0 of 6 models, 6 refused"
    assert str(one("serving", 0, "answers")).endswith("(no spread stored), 20 and 20 answers")


# The command.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["distance"], "no hypothesis 'DISTANCE'"),
        (["H99"], "no hypothesis 'H99'"),
        (["--cases", "0"], "there must be one at least"),
        (["--write", ".", "--cases", "2", "--seed-of-training", "1"], "as many cases as docs/protocol.md asks"),
        (["--write", "."], "--seed-of-training"),
        (["--beside", "random", "--seed-of-training", "1"], "not allowed with"),
        (["r4"], "R4 is of other models (models of about 1, 4 and 10 million parameters): python -m bench.ablations"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said, before anything is measured."""
    with pytest.raises(SystemExit) as stop:
        command.main([str(config.shipped_model()), *arguments])
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_a_run_and_its_second_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One case of several measures in the engine; asked for again, nothing is measured again, and more goes on."""
    given = [
        str(config.shipped_model()),
        "H8",
        "H9",
        "H11",
        "H12",
        "H14",
        "--commit",
        COMMIT,
        "--keep",
        str(tmp_path / "kept"),
    ]
    assert command.main([*given, "--cases", "1"]) == 1
    said = capsys.readouterr().out
    assert "H11 two versions of a policy, the last one spliced, held-out words: TOO FEW CASES: 1 OF 200" in said
    assert "its own rows: 1.000" in said
    (folder,) = (tmp_path / "kept").iterdir()
    before = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    assert len(before) == 10
    assert command.main([*given, "--cases", "1"]) == 1
    assert {path.name: path.read_bytes() for path in folder.glob("*.jsonl")} == before
    assert command.main([*given[:1], "H11", *given[6:], "--cases", "2"]) == 1
    grown = (folder / "versions, known.jsonl").read_bytes()
    assert grown.startswith(before["versions, known.jsonl"]) and grown.count(b"\n") == 3
    found = json.loads((folder / "results.json").read_text())
    assert found["about"]["commit"] == COMMIT
    assert {one["cases"] for one in found["verdicts"] if one["hypothesis"] == "H11"} == {2}


def test_random_weights_are_measured(tmp_path: Path) -> None:
    """Of the model's shape, drawn from the commit, kept apart from the model's own rows, and found again."""
    given = [str(config.shipped_model()), "H12", "--commit", COMMIT, "--keep", str(tmp_path), "--cases", "1"]
    assert command.main([*given, "--beside", "random"]) == command.main(given) == 1
    folders = {path.parent.name: json.loads(path.read_text())["about"] for path in tmp_path.rglob("results.json")}
    assert sorted(str(about["training seed"]) for about in folders.values()) == ["None", "random"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    assert command.main([*given, "--beside", "random"]) == 1 and len(folders) == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")} == before


def test_the_reversed_model_looks_up(tmp_path: Path) -> None:
    """In the engine, on texts of its own world: its note index is -1, directly and after a chain of thought; a mix of
    nothing fresh recovers 0, of all 1."""
    with Workspace(REVERSED, ContextOptions(n_threads=1)) as workspace:
        for _, case in First(7).cases("probes", 2):
            for mixes in chain(mixing.mixes_of(workspace, case), [Reasoned(workspace, case)]):
                ends = [mixes.recovery([fresh] * len(mixes.columns)) for fresh in (False, True)]
                assert ends == pytest.approx([0, 1], abs=1e-3)
                assert mixing.acts(mixes.field_only()) and not mixing.acts(mixes.after_only())


def test_alike_cases_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decider whose answers never differ leaves no case, and no figure is made up."""

    def alike(*_: object, **__: object) -> Mixes:
        raise AlikeError("alike")

    monkeypatch.setattr(mixing, "Mixes", alike)
    monkeypatch.setattr(mixing, "memory", lambda *_: None)
    rows = Table(again.measure(None, 5, Next(COMMIT, "known")))  # type: ignore[arg-type]
    verdict = judge(HYPOTHESES["H14"], "known", {"again": rows})
    assert verdict.excluded == verdict.cases == 5 and verdict.says == "too few cases: 0 of 200"
    assert not any(check.met for check in verdict.checks if check.relation)
