"""The protocol's hypotheses: texts and seeds, intervals, made-up models with known answers, and the command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bench.experiments.cases import joined
from bench.experiments.methods import ALL
from bench.experiments.table import Row, Table
from bench.experiments.texts import First
from bench.protocol import __main__ as command
from bench.protocol import seeds
from bench.protocol.hypotheses import HYPOTHESES, Verdict, judge
from bench.protocol.intervals import Part, equivalent, figure, ratio, slope
from bench.protocol.keeping import Kept, KeptError
from bench.protocol.measures import Measure, again, heads, lines, mixing, notes
from bench.protocol.measures.lines import places
from bench.protocol.measures.thinking import Reasoned
from bench.protocol.report import as_json, document, merged, overall, page, write
from bench.protocol.seeds import CommitError, frozen, named
from bench.protocol.texts import KINDS, Next, Policies
from notes_cli import config
from notes_cli.engine.context import ContextOptions
from notes_cli.engine.decision import Decision
from notes_cli.measure.probe import AlikeError, Column, Mixes
from notes_cli.runtime.workspace import Workspace
from training.next import words, world

COMMIT = "0123456789" * 4
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
            {"case": (n + 2) // 3, "layout": layout, "asked_for": size, "same": first(n, count[layout]), **BESIDE}
            for n in range(1, 61)
            for layout in count
            for size in (1, 2, 4, 8, 16)
        )
    }


def agents(same: int) -> dict[str, Table]:
    return {
        "agent": Table(
            {"case": (n + 29) // 30, "agent": name, "same": first(n, same), "right": True, **BESIDE}
            for n in range(1, 301)
            for name in ("prefill every turn", "erratum")
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
    ],
)
def test_a_bar_is_where_the_page_has_it(name: str, good: dict[str, Table], bad: list[dict[str, Table]]) -> None:
    """At the bar it holds, and one case further it fails."""
    assert judge(HYPOTHESES[name], "known", good).says == "holds"
    assert [judge(HYPOTHESES[name], "known", tables).says for tables in bad] == ["fails"] * len(bad)


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
            assert found[f"{does}: share of the top 4 of 12 (2.3, 2.2, 2.1, 2.0)"] == pytest.approx(share)
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
    assert "H21" in said.out and "NOT MEASURED" in said.out and "run python -m training.next.heads" in said.err
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
    assert "read: share of the top 4 of 12 (2.3, 2.2, 2.1, 2.0): 0.700 (0.700 to 0.700), n 3" in said.out
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


def documents(*sames: int) -> dict[int, Mapping[str, Any]]:
    """Of as many training seeds, whose H1 is right in so many of 300."""
    return {
        seed: document({**ABOUT, "weights": str(seed) * 64}, [verdict_of("H1", same)])
        for seed, same in enumerate(sames, 1)
    }


def test_all_three_seeds_decide() -> None:
    """One that fails is enough to fail, and one that is missing leaves it undecided; what is not built is told."""

    def said(*sames: int) -> str:
        found = {seed: {("H1", "known"): one["verdicts"][0]} for seed, one in documents(*sames).items()}
        return overall(("known",), "H1", found)

    assert said(300, 299, 285) == "holds" and said(300, 280, 300) == "**fails**" and said(300, 300) == "undecided"
    text = page(documents(300, 300))
    assert "Not measured yet: training seed 3" in text and "distance | the distance of a splice" in text
    assert "H21 | what 4 heads read, and write (python -m training.next.heads FILE) | held-out: not measured" in text
    assert "| right, direct | 1.000 (0.987 to 1.000) | 300 |" in text


def test_what_does_not_belong_together_is_not_written(tmp_path: Path) -> None:
    """One model under two seeds, or texts of two commits: refused, and what is there stays."""
    command._write(tmp_path, 1, ABOUT, [verdict_of("H1", 300)])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in before} == {"protocol.md", "protocol-seed-1.json"}
    with pytest.raises(KeptError, match="same weights"):
        command._write(tmp_path, 2, ABOUT, [verdict_of("H1", 300)])
    with pytest.raises(KeptError, match="different commit"):
        command._write(tmp_path, 2, {**ABOUT, "weights": "v", "commit": "f" * 40}, [])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    command._write(tmp_path, 2, {**ABOUT, "weights": "v"}, [verdict_of("H1", 200)])
    assert "**fails**" in (tmp_path / "protocol.md").read_text()


def test_verdicts_of_several_runs_come_together(tmp_path: Path) -> None:
    """Later ones take the place of those they repeat; those of other weights go."""
    path = tmp_path / "results.json"
    write(path, document(ABOUT, merged(path, ABOUT, [verdict_of("H13", 300), verdict_of("H1", 200)])))
    found = merged(path, ABOUT, [verdict_of("H1", 300)])
    assert [(one["hypothesis"], one["says"]) for one in found] == [("H1", "holds"), ("H13", "holds")]
    assert len(merged(path, {**ABOUT, "weights": "x"}, [verdict_of("H1", 300)])) == 1


# The command.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["distance"], "no hypothesis 'DISTANCE'"),
        (["H99"], "no hypothesis 'H99'"),
        (["--cases", "0"], "there must be one at least"),
        (["--write", ".", "--cases", "2", "--seed-of-training", "1"], "as many cases as docs/protocol.md asks"),
        (["--write", "."], "--seed-of-training"),
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
    assert "its own rows: 1.000" in said and "distance NOT BUILT" in said
    (folder,) = (tmp_path / "kept").iterdir()
    before = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    assert len(before) == 10
    assert command.main([*given, "--cases", "1"]) == 1
    assert {path.name: path.read_bytes() for path in folder.glob("*.jsonl")} == before
    assert command.main([*given[:1], "H11", *given[6:], "--cases", "2"]) == 1
    grown = (folder / "versions, known.jsonl").read_bytes()
    assert grown.startswith(before["versions, known.jsonl"]) and grown.count(b"\n") == 3
    found = json.loads((folder / "results.json").read_text())
    assert found["about"]["commit"] == COMMIT and found["verdicts"][0]["cases"] == 2


def test_the_shipped_model_looks_up(tmp_path: Path) -> None:
    """In the engine, on texts of its own world: its note index is -1, directly and after a chain of thought; a mix of
    nothing fresh recovers 0, of all 1."""
    with Workspace(config.shipped_model(), ContextOptions(n_threads=1)) as workspace:
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
