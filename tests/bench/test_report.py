"""What is reported: tables that come back from CSV as they were, bars, the page, and how the command ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from bench.experiments import EXPERIMENTS, __main__, calibration, run
from bench.experiments.__main__ import main
from bench.experiments.frame import Bar, Summary, grid, interval, ratio, share
from bench.experiments.report import results
from bench.experiments.table import Row, Table, read_table, write_table
from bench.experiments.texts import Texts
from bench.reversed_model import REVERSED
from notes_cli.engine.identity import Identity
from notes_cli.errors import UnsupportedError
from notes_cli.library.profiles import Measured, Profile
from notes_cli.runtime.workspace import Workspace


def fake(bound: float = 0.5, refused: str = "") -> SimpleNamespace:
    """An experiment that finds one half."""

    def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
        if refused:
            raise UnsupportedError(refused)
        for case, _ in texts.rngs("coin", cases):
            asked.append(case)
            yield {"case": case, "same": case % 2 == 1}

    def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
        rows = [f"all | {share(table.mean('same'))}"]
        return Summary("A coin.", (grid("what | same", rows),), (Bar("same", table.mean("same"), ">=", bound),), ())

    def draw(table: Table, figure: Figure) -> None:
        figure.subplots().plot(table.numbers("same"))

    asked: list[int] = []
    return SimpleNamespace(TITLE="A coin", CASES=4, measure=measure, summarise=summarise, draw=draw, asked=asked)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, SimpleNamespace]:
    """Two experiments in place of the real ones, of which nothing is kept yet."""
    found = {"coin": fake(), "other": fake(0.75)}
    for name in list(EXPERIMENTS):
        monkeypatch.delitem(EXPERIMENTS, name)
    for name, experiment in found.items():
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    monkeypatch.setattr(__main__, "KEPT", tmp_path / "kept")
    return found


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that takes no time."""
    found = Measured("method", "recompute", "direct", 40, 40, 40, 1.0, 10, 1.0)
    ways = dict.fromkeys(("direct", "reasoned"), "erratum")
    identity = Identity("mine", "llama", "Q8_0", "f" * 64, "r", "norm", "f16/f16", "")
    profile = Profile(identity, "f16/f16", 40, dict.fromkeys(ways, 40), ways, "now", 1, "early", [found])
    monkeypatch.setattr(__main__, "profile_of", lambda *_: profile)
    monkeypatch.setattr(calibration, "seconds", lambda _: 7200.0)


def test_a_table_comes_back(tmp_path: Path) -> None:
    """Whole numbers, fractions, truths as 0 and 1, texts with commas, and what is empty."""
    rows: list[Row] = [
        {"case": 1, "way": "a, b", "same": True, "cosine": 0.25},
        {"case": 2, "way": "", "same": 0, "cosine": ""},
    ]
    write_table(tmp_path / "x.csv", rows)
    found = read_table(tmp_path / "x.csv")
    assert found.rows == [
        {"case": 1, "way": "a, b", "same": 1, "cosine": 0.25},
        {"case": 2, "way": "", "same": 0, "cosine": ""},
    ]
    assert found.mean("same") == 0.5 and found.numbers("cosine") == [0.25] and found.unique("case") == [1, 2]
    assert math.isnan(found.where(case=2).mean("cosine"))


@pytest.mark.parametrize(
    ("value", "relation", "met"),
    [
        (0.98, ">=", True),
        (0.979, ">=", False),
        (0.98, "<=", True),
        (0.98, "<", False),
        (math.nan, ">=", False),
        (math.nan, "<=", False),
    ],
)
def test_a_bar(value: float, relation: str, met: bool) -> None:
    """Met at the bound where it says so, and never by what could not be measured."""
    assert Bar("", value, relation, 0.98).met is met


def test_cells() -> None:
    """Numbers to the right, refused is said, and an interval is Wilson's."""
    assert grid("a | b", ["x | 1", "y | "]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n| y |  |"
    assert share(math.nan) == "refused" and math.isnan(ratio(1, 0))
    half = Table({"same": value} for value in (0, 1) * 50)
    assert interval(half, "same") == "0.500 (0.40 to 0.60)" and interval(Table([]), "same") == "refused"


def test_one_experiment_is_run_again_alone(
    only: dict[str, SimpleNamespace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page keeps what others have left, names the bars that are missed, and the command fails for those it ran."""
    assert main(["--write", str(tmp_path)]) == 1
    both = (tmp_path / "results-reversed.md").read_text()
    assert "1 of 2 bars are met; missed:\n\n* same: 0.5000, should be >= 0.75" in both
    assert both.count("## A coin") == 2 and "![A coin](results/coin.svg)" in both
    assert only["coin"].asked == [1, 2, 3, 4]
    assert main(["coin", "--cases", "5", "--write", str(tmp_path)]) == 0
    assert only["coin"].asked == [1, 2, 3, 4, 5]  # those that are there are not measured again
    page = (tmp_path / "results-reversed.md").read_text()
    assert page == results(tmp_path / "results") and "| all | 0.600 |" in page and "| all | 0.500 |" in page
    assert "0.600" in capsys.readouterr().out


def test_a_model_that_is_refused(
    only: dict[str, SimpleNamespace],
    calibrated: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page says why, without a picture, and an old picture goes; an estimate says it, too."""
    main(["coin", "--write", str(tmp_path)])
    monkeypatch.setitem(EXPERIMENTS, "coin", fake(refused="its rows cannot be moved"))
    assert main(["coin", "--write", str(tmp_path), "--cases", "5"]) == 1
    page = (tmp_path / "results-reversed.md").read_text()
    assert "This model was refused: its rows cannot be moved." in page and "svg" not in page
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["about.csv"]
    assert main(["coin", "--model", str(REVERSED), "--estimate", "--keep", str(tmp_path / "other")]) == 0
    assert "this model is refused: its rows cannot be moved" in capsys.readouterr().err


def test_a_model_of_ones_own(
    only: dict[str, SimpleNamespace],
    calibrated: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it takes is told first, by a case of each experiment that is measured once; what was stopped goes on; the
    report has what the calibration found, with the row, and every experiment. A missed bar is no failure there."""
    command = ["--model", str(REVERSED), "--threads", "1"]
    assert main([*command, "--estimate"]) == 0
    assert all(each.asked == [1] for each in only.values())
    said = capsys.readouterr().err
    assert "MB of weights; a context of 4,096 tokens takes" in said and "about 2 h 0 min" in said
    assert "4 cases, 3 missing" in said and not list(tmp_path.rglob("report.md"))

    def stopped(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
        yield from only["other"].measure(workspace, 2, texts)
        raise KeyboardInterrupt

    monkeypatch.setitem(EXPERIMENTS, "other", SimpleNamespace(**{**vars(only["other"]), "measure": stopped}))
    assert main(command) == 130 and "goes on from here" in capsys.readouterr().err
    monkeypatch.setitem(EXPERIMENTS, "other", only["other"])
    assert main(command) == 0
    assert only["coin"].asked == [1, 2, 3, 4]
    assert only["other"].asked == [1, 2, 2, 3, 4]  # a case that was not finished is measured again
    (path,) = tmp_path.rglob("report.md")
    page = path.read_text()
    assert page.startswith("# mine Q8_0: does it take notes?") and page.count("### A coin") == 2
    assert "| mine (llama) | Q8_0 |" in page and "notes-reversed-q8_0 Q8_0, flash attention auto" in page
    assert (path.parent / "results" / "coin.csv").exists() and (path.parent / "results" / "other.svg").exists()


def test_rows_of_other_code_are_not_mixed(
    only: dict[str, SimpleNamespace], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor those of other settings or texts; what to do is said."""
    assert main(["coin"]) == 0
    assert main(["coin", "--seed", "5"]) == 1 and "rows of other seed" in capsys.readouterr().err
    monkeypatch.setattr(run, "digest", lambda _: "other")
    assert main(["coin"]) == 1 and "rows of other sources" in capsys.readouterr().err


def test_a_span() -> None:
    """Of time, for people."""
    assert [run.span(value) for value in (0.2, 89, 100, 5000, 9000)] == ["0 s", "89 s", "2 min", "83 min", "2 h 30 min"]


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is none, a folder that is none, a model that is none."""
    for arguments, said in (
        (["nonsense"], "no experiment 'nonsense'"),
        (["--write", str(tmp_path / "no")], "no such folder"),
        (["--cases", "0"], "at least"),
        (["--estimate"], "for --model FILE"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf" in capsys.readouterr().err
