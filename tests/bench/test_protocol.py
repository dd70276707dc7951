"""The protocol's hypotheses: texts and seeds, intervals, made-up models with known answers, and the command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest

from bench.experiments.cases import joined
from bench.experiments.table import Row, Table
from bench.experiments.texts import First
from bench.protocol import __main__ as command
from bench.protocol import seeds
from bench.protocol.hypotheses import HYPOTHESES, Verdict, judge
from bench.protocol.intervals import Part, equivalent, figure, slope
from bench.protocol.keeping import Kept, KeptError
from bench.protocol.measures import again, lines, mixing, notes
from bench.protocol.measures.lines import places
from bench.protocol.measures.thinking import Reasoned
from bench.protocol.report import as_json, merged, overall, page, write
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


def test_all_three_seeds_decide(tmp_path: Path) -> None:
    """One that fails is enough to fail, and one that is missing leaves it undecided; what is not built is told."""

    def files(*sames: int) -> dict[int, Path]:
        found = {}
        for seed, same in enumerate(sames, 1):
            verdict = as_json(judge(HYPOTHESES["H1"], "known", {"decisions": decisions(same, 300)}))
            found[seed] = tmp_path / f"{seed}.json"
            write(found[seed], {**ABOUT, "weights": str(seed) * 64}, [verdict])
        return found

    def said(*sames: int) -> str:
        data = {n: json.loads(path.read_text())["verdicts"] for n, path in files(*sames).items()}
        return overall(
            ("known",), "H1", {n: {(v["hypothesis"], v["words"]): v for v in one} for n, one in data.items()}
        )

    assert said(300, 299, 285) == "holds" and said(300, 280, 300) == "**fails**" and said(300, 300) == "undecided"
    text = page(files(300, 300))
    assert "Not measured yet: training seed 3" in text and "H21 | read and write heads" in text
    assert "| right, direct | 1.000 (0.987 to 1.000) | 300 |" in text
    found = files(300, 300)
    write(found[2], {**ABOUT, "weights": "1" * 64}, [])
    with pytest.raises(KeptError, match="same weights"):
        page(found)
    write(found[2], {**ABOUT, "commit": "f" * 40, "weights": "2" * 64}, [])
    with pytest.raises(KeptError, match="different commit"):
        page(found)


def test_verdicts_of_several_runs_come_together(tmp_path: Path) -> None:
    """Later ones take the place of those they repeat; those of other weights go."""
    path = tmp_path / "results.json"

    def verdict(name: str, same: int) -> dict[str, object]:
        return as_json(judge(HYPOTHESES[name], "known", {"decisions": decisions(same, 300)}))

    write(path, ABOUT, merged(path, ABOUT, [verdict("H13", 300), verdict("H1", 200)]))
    found = merged(path, ABOUT, [verdict("H1", 300)])
    assert [(one["hypothesis"], one["says"]) for one in found] == [("H1", "holds"), ("H13", "holds")]
    assert len(merged(path, {**ABOUT, "weights": "x"}, [verdict("H1", 300)])) == 1


# The command.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["H21"], "H21 is not built: read and write heads"),
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
    assert "its own rows: 1.000" in said and "H21 NOT BUILT" in said
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
