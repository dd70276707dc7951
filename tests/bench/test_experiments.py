"""Each experiment on a case or two of the shipped model: what it leaves, what it says, what it draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bench.experiments import EXPERIMENTS, agent, blocks, toggles
from bench.experiments.frame import Bar, Summary
from bench.experiments.methods import ALL, HOISTED
from bench.experiments.report import keep, load
from bench.experiments.table import Table
from bench.experiments.texts import First
from notes_cli import config
from notes_cli.engine.context import ContextOptions
from notes_cli.runtime.workspace import Workspace

SEED = 7


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with pytest.MonkeyPatch.context() as patch:  # this is opened before a test has its own NOTES_HOME
        patch.setenv("NOTES_HOME", str(tmp_path_factory.mktemp("home")))
        workspace = Workspace(config.shipped_model(), ContextOptions(n_threads=1))
    with workspace:
        yield workspace


def run(workspace: Workspace, name: str, folder: Path, cases: int = 1) -> tuple[Table, Summary]:
    """Measured, written, read, summed up and drawn."""
    experiment = EXPERIMENTS[name]
    keep(
        folder,
        {"experiment": name, "model": "notes-tiny", "refused": ""},
        list(experiment.measure(workspace, cases, First(SEED))),
    )
    table = load(folder)[name]
    figure = Figure()
    experiment.draw(table, figure)
    figure.savefig(folder / "x.svg")
    summary = experiment.summarise(table, {name: table})
    for each in summary.tables:
        lines = each.splitlines()
        assert len({line.count("|") for line in lines}) == 1 and "nan" not in each
    assert len(table.unique("case")) == cases
    return table, summary


def bar(summary: Summary, words: str) -> Bar:
    return next(bar for bar in summary.bars if words in bar.what)


def test_decisions(shipped: Workspace, tmp_path: Path) -> None:
    """A splice decides as the recompute, the stale cache acts on the old value, an erratum on the new one."""
    table, summary = run(shipped, "decisions", tmp_path, 3)
    assert len(table) == 3 * 2 * 6 and len(summary.bars) == 12
    direct = table.where(way="direct")
    assert direct.where(prompt="recompute").mean("cosine") == pytest.approx(1)
    assert direct.where(prompt="spliced").mean("same") == 1 and direct.where(prompt="spliced").mean("right_new") == 0
    assert direct.where(prompt="erratum").mean("right_new") > 0.5


def test_landscape(shipped: Workspace, tmp_path: Path) -> None:
    """Every method has a row a way; the recompute is its own reference, stale is not, and costs are told apart."""
    table, summary = run(shipped, "landscape", tmp_path, 2)
    assert len(table) == 2 * len(ALL) and not any(table.unique("refused"))
    of = {name: table.where(method=name) for name in ALL}
    assert of["recompute"].mean("direct_same") == of["recompute"].mean("reasoned_same") == 1
    assert of["recompute"].mean("error") == 0
    assert of["stale"].mean("direct_right") == 0
    assert of["suffix"].mean("direct_same") == of[HOISTED].mean("direct_same") == 1
    assert of["selective@16"].mean("decoded") == of["field"].mean("decoded") + 16
    assert of["selective@16"].mean("ranking") == 0 < of["selective@16, ranked when edited"].mean("ranking")
    assert of[HOISTED].mean("decoded") < of["suffix"].mean("decoded") < of["recompute"].mean("decoded")
    assert bar(summary, "suffix decides").met and bar(summary, "suffix: largest error").value < 1e-3


def test_transplanted(shipped: Workspace, tmp_path: Path) -> None:
    """Next to the landscape's figures if they are there, without them if not."""
    table, summary = run(shipped, "transplanted", tmp_path)
    assert "not run" in summary.tables[0]
    other = EXPERIMENTS["transplanted"].summarise(table, {"landscape": table})
    assert "not run" not in other.tables[0] and "largest difference is 0.000" in other.shows[0]


def test_probes(shipped: Workspace, tmp_path: Path) -> None:
    """Nothing fresh recovers nothing, everything all of it, from either end."""
    table, _ = run(shipped, "probes", tmp_path, 2)
    for probe in ("first", "last"):
        assert table.where(probe=probe, share=0).mean("recovery") == pytest.approx(0, abs=1e-3)
        assert table.where(probe=probe, share=1).mean("recovery") == pytest.approx(1, abs=1e-3)


def test_seams(shipped: Workspace, tmp_path: Path) -> None:
    """The control without rotation is further from the recompute."""
    table, _ = run(shipped, "seams", tmp_path, 4)
    assert table.where(rotated=1).mean("cosine") > table.where(rotated=0).mean("cosine")


def test_placement(shipped: Workspace, tmp_path: Path) -> None:
    """Both places, with and without turns before; the prompts are those of other places."""
    table, _ = run(shipped, "placement", tmp_path)
    assert len(table) == 6 and table.mean("cosine") > 0.95
    assert table.where(place="early").mean("cosine") != table.where(place="late").mean("cosine")


def test_blocks(shipped: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as are asked for, and an edit costs about a block."""
    monkeypatch.setattr(blocks, "DECISIONS", 1)
    monkeypatch.setattr(blocks, "SIZES", (1, 16))
    table, _ = run(shipped, "blocks", tmp_path)
    assert [row["blocks"] for row in table] == [row["asked_for"] for row in table] == [1, 16, 1, 16]
    one, many = (table.where(layout="together", asked_for=size).mean("recompiled") for size in (1, 16))
    assert one == table.mean("tokens") and many < one / 8


def test_toggles(shipped: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compacted notebook grows by less a turn, and both decide as a full prefill of their tokens."""
    monkeypatch.setattr(toggles, "TURNS", 4)
    table, summary = run(shipped, "toggles", tmp_path)
    errata, compacted = (toggles.by_turn(table, cache, "tokens") for cache in toggles.CACHES)
    assert errata[0] == compacted[0] and errata[3] - errata[0] > 1.5 * (compacted[3] - compacted[0])
    assert table.mean("cosine") > 0.99 and table.mean("same") == 1
    assert bar(summary, "compacted: agreement").met


def test_agent(shipped: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every agent has a row a decision; the baseline decodes all, the others little of it, the field's the least."""
    monkeypatch.setattr(agent, "INSTANCES", 1)
    table, summary = run(shipped, "agent", tmp_path)
    assert len(table) == 4 * 3 and table.where(agent=agent.BASELINE).mean("same") == 1
    cost = {str(name): table.where(agent=name).total("decoded") for name in table.unique("agent")}
    assert cost["field"] < cost["erratum"] < cost["field+erratum"] < cost[agent.BASELINE] / 10
    assert bar(summary, "tokens decoded").met
