"""What is reported: tables that come back from CSV as they were, bars, the page, and how the command ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from bench.experiments import EXPERIMENTS
from bench.experiments.__main__ import main
from bench.experiments.frame import Bar, Summary, grid, interval, ratio, share
from bench.experiments.report import results
from bench.experiments.table import Row, Table, read_table, write_table
from bench.experiments.texts import Texts
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.workspace import Workspace


def fake(bound: float = 0.5, refused: str = "") -> SimpleNamespace:
    """An experiment that finds one half."""

    def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
        if refused:
            raise UnsupportedError(refused)
        yield from ({"case": case, "same": case % 2 == 1} for case in range(1, cases + 1))

    def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
        rows = [f"all | {share(table.mean('same'))}"]
        return Summary("A coin.", (grid("what | same", rows),), (Bar("same", table.mean("same"), ">=", bound),), ())

    def draw(table: Table, figure: Figure) -> None:
        figure.subplots().plot(table.numbers("same"))

    return SimpleNamespace(TITLE="A coin", CASES=4, measure=measure, summarise=summarise, draw=draw)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    """Two experiments in place of the real ones."""
    found = {"coin": fake(), "other": fake(0.75)}
    for name in list(EXPERIMENTS):
        monkeypatch.delitem(EXPERIMENTS, name)
    for name, experiment in found.items():
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    return found


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
    assert main(["coin", "--cases", "5", "--write", str(tmp_path)]) == 0
    page = (tmp_path / "results-reversed.md").read_text()
    assert page == results(tmp_path / "results") and "| all | 0.600 |" in page and "| all | 0.500 |" in page
    out, err = capsys.readouterr()
    assert "0.600" in out and "coin: 5 cases" in err


def test_a_model_that_is_refused(
    only: dict[str, SimpleNamespace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The page says why, without a picture, and an old picture goes."""
    main(["coin", "--write", str(tmp_path)])
    monkeypatch.setitem(EXPERIMENTS, "coin", fake(refused="its rows cannot be moved"))
    assert main(["coin", "--write", str(tmp_path)]) == 1
    page = (tmp_path / "results-reversed.md").read_text()
    assert "This model was refused: its rows cannot be moved." in page and "svg" not in page
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["about.csv"]


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is none, a folder that is none, a model that is none."""
    for arguments, said in (
        (["nonsense"], "no experiment 'nonsense'"),
        (["--write", str(tmp_path / "no")], "no such folder"),
        (["--cases", "0"], "at least"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf" in capsys.readouterr().err
