"""Each experiment on a case or two of the reversed model: what it leaves, what it says, what it draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.experiments import EXPERIMENTS, agent, blocks, calibration, toggles
from bench.experiments.cases import error, reread, segments_of
from bench.experiments.frame import Bar, Summary
from bench.experiments.methods import ALL, HOISTED
from bench.experiments.report import keep, load
from bench.experiments.table import Row, Table
from bench.experiments.texts import First
from bench.reversed_model import REVERSED, REVERSED_NAME
from notes_cli.engine.decision import Decision, decide
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import Segment, Tokens, floats
from notes_cli.library.profiles import Profile
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

SEED = 7


@pytest.fixture(scope="module")
def looks_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with pytest.MonkeyPatch.context() as patch:  # this is opened before a test has its own NOTES_HOME
        patch.setenv("NOTES_HOME", str(tmp_path_factory.mktemp("home")))
        workspace = Workspace(REVERSED, ContextOptions(n_threads=1))
    with workspace:
        yield workspace


def run(workspace: Workspace, name: str, folder: Path, cases: int = 1) -> tuple[Table, Summary]:
    """Measured, written, read, summed up and drawn."""
    experiment = EXPERIMENTS[name]
    keep(
        folder,
        {"experiment": name, "model": REVERSED_NAME, "refused": ""},
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


def test_decisions(looks_up: Workspace, tmp_path: Path) -> None:
    """A splice decides as the recompute, the stale cache acts on the old value, an erratum on the new one."""
    table, summary = run(looks_up, "decisions", tmp_path, 3)
    assert len(table) == 3 * 2 * 6 and len(summary.bars) == 12
    direct = table.where(way="direct")
    assert direct.where(prompt="recompute").mean("cosine") == pytest.approx(1)
    assert direct.where(prompt="spliced").mean("same") == 1 and direct.where(prompt="spliced").mean("right_new") == 0
    assert direct.where(prompt="erratum").mean("right_new") > 0.5


def test_landscape(looks_up: Workspace, tmp_path: Path) -> None:
    """Every method has a row a way; the recompute is its own reference, stale is not, and costs are told apart."""
    table, summary = run(looks_up, "landscape", tmp_path, 2)
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


def test_transplanted(looks_up: Workspace, tmp_path: Path) -> None:
    """Next to the landscape's figures if they are there, without them if not."""
    table, summary = run(looks_up, "transplanted", tmp_path)
    assert "not run" in summary.tables[0]
    other = EXPERIMENTS["transplanted"].summarise(table, {"landscape": table})
    assert "not run" not in other.tables[0] and "largest difference is 0.000" in other.shows[0]


def test_probes(looks_up: Workspace, tmp_path: Path) -> None:
    """Nothing fresh recovers nothing, everything all of it, from either end."""
    table, _ = run(looks_up, "probes", tmp_path, 2)
    for probe in ("first", "last"):
        assert table.where(probe=probe, share=0).mean("recovery") == pytest.approx(0, abs=1e-3)
        assert table.where(probe=probe, share=1).mean("recovery") == pytest.approx(1, abs=1e-3)


def test_seams(looks_up: Workspace, tmp_path: Path) -> None:
    """The control without rotation is further from the recompute."""
    table, _ = run(looks_up, "seams", tmp_path, 4)
    assert table.where(rotated=1).mean("cosine") > table.where(rotated=0).mean("cosine")


def test_placement(looks_up: Workspace, tmp_path: Path) -> None:
    """Both places, with and without turns before; the prompts are those of other places."""
    table, _ = run(looks_up, "placement", tmp_path)
    assert len(table) == 6 and table.mean("cosine") > 0.95
    assert table.where(place="early").mean("cosine") != table.where(place="late").mean("cosine")


def test_blocks(looks_up: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as are asked for, and an edit costs about a block."""
    monkeypatch.setattr(blocks, "DECISIONS", 1)
    monkeypatch.setattr(blocks, "SIZES", (1, 16))
    table, _ = run(looks_up, "blocks", tmp_path)
    assert [row["blocks"] for row in table] == [row["asked_for"] for row in table] == [1, 16, 1, 16]
    one, many = (table.where(layout="together", asked_for=size).mean("recompiled") for size in (1, 16))
    assert one == table.mean("tokens") and many < one / 8


def test_toggles(looks_up: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compacted notebook grows by less a turn, and both decide as a full prefill of their tokens."""
    monkeypatch.setattr(toggles, "TURNS", 4)
    table, summary = run(looks_up, "toggles", tmp_path)
    errata, compacted = (toggles.by_turn(table, cache, "tokens") for cache in toggles.CACHES)
    assert errata[0] == compacted[0] and errata[3] - errata[0] > 1.5 * (compacted[3] - compacted[0])
    assert table.mean("cosine") > 0.99 and table.mean("same") == 1
    assert bar(summary, "compacted: agreement").met


def test_agent(looks_up: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every agent has a row a decision, the one by calibration, too; the baseline decodes all, the prefix cache what
    follows an edit, which is less where that is late, and the others little, the field's the least."""
    monkeypatch.setattr(agent, "INSTANCES", 2)
    monkeypatch.setattr(agent, "by_calibration", lambda workspace: "selective@16")
    table, summary = run(looks_up, "agent", tmp_path)
    assert len(table) == 2 * 6 * 3 and table.where(agent=agent.BASELINE).mean("same") == 1
    assert [table.where(instance=n).unique("place") for n in (1, 2)] == [["early"], ["late"]]
    cost = {str(name): table.where(agent=name).total("decoded") for name in table.unique("agent")}
    assert cost["field"] < cost["erratum"] < cost["field+erratum"] < cost[agent.BASELINE] / 10
    assert cost["field"] < cost["selective@16"] < cost[agent.PREFIX] < cost[agent.BASELINE]
    prefix, base = table.where(agent=agent.PREFIX), table.where(agent=agent.BASELINE)
    assert prefix.where(decision=1).numbers("decoded") == base.where(decision=1).numbers("decoded")
    early, late = (agent.edits(prefix.where(place=place)).total("decoded") for place in agent.PLACES)
    assert late < early / 2 and prefix.mean("same") == 1 and min(prefix.numbers("cosine")) > 0.9999
    assert bar(summary, "tokens decoded").met and "(field)" in bar(summary, "decides as").what
    told = next(line for line in summary.tables[1].splitlines() if line.startswith("| late | erratum |"))
    edited = agent.edits(table.where(place="late"))
    assert f"{edited.where(agent='erratum').total('decoded') / late:.3f} (" in told
    assert sum("of the prefix cache's, **cheaper**" in line for line in summary.shows) == 2
    assert any("fewer after 0 of 4 edits" in line for line in summary.shows)


def test_what_is_dearer_than_a_prefix_cache_is_called_so() -> None:
    """By the whole interval; what is cheaper in one domain and dearer in another is neither."""

    def said(*decoded: int) -> str:
        rows: list[Row] = [
            {"case": case, "agent": name, "decoded": count}
            for case, own in enumerate(decoded, 1)
            for name, count in ((agent.PREFIX, 50), ("erratum", own))
        ]
        return agent._compared(agent.beside(Table(rows), "erratum", "decoded"))

    assert said(20, 30) == "0.500 (0.400 to 0.600) of the prefix cache's, **cheaper**"
    assert said(60, 70) == "1.300 (1.200 to 1.400) of the prefix cache's, **dearer**"
    assert said(40, 70).endswith("**neither cheaper nor dearer**")


def instance_of(workspace: Workspace, place: str) -> tuple[list[Segment], agent.Instance]:
    """A memory with the edited skill in that place, and what is asked of it."""
    texts = First(SEED)
    ((_, rng),) = texts.rngs("agent", 1)
    drafts = texts.memory(rng, agent.MEMORY)
    instance = agent.make_instance(texts, rng, drafts)
    segments = segments_of(workspace, [draft.skill for draft in drafts])
    return agent.placed(segments, instance.rule.field, place), instance


@pytest.mark.parametrize(("place", "where"), [("early", 0), ("late", -1)])
def test_a_prefix_cache_reads_what_a_prefill_reads(
    looks_up: Workspace, monkeypatch: pytest.MonkeyPatch, place: str, where: int
) -> None:
    """The same tokens, the same rows, and nothing decoded of what is the same from the start. While a prompt is
    prefilled nothing else is in the cache, which would make it slower."""
    memory, instance = instance_of(looks_up, place)
    assert instance.rule.field in [span.name for span in memory[where].fields] and len(memory) == 4
    read: dict[str, list[tuple[list[int], NDArray[np.float32]]]] = {}

    def decide_(notebook: Notebook, choices: Sequence[str]) -> Decision:
        rows = looks_up.context.read(notebook.sequence, 0, len(notebook), base=0)
        read[name].append((notebook.tokens.tolist(), np.stack([floats(row.v) for row in rows])))
        return decide(notebook, choices)

    used = []

    def assemble_(workspace: Workspace, prompt: Prompt, *, splice: bool, dry: bool = False) -> Notebook:
        used.append((name, workspace.context.used))
        return assemble(workspace, prompt, splice=splice, dry=dry)

    monkeypatch.setattr(agent, "decide", decide_)
    monkeypatch.setattr(agent, "assemble", assemble_)
    turns = {}
    for name, agent_ in (("all", agent.prefilling), ("kept", agent.caching)):
        read[name] = []
        turns[name] = agent_(looks_up, memory, instance)
    assert [count for name, count in used if name == "all"] == [0] * 3 and looks_up.context.used == 0
    assert [count for name, count in used if name == "kept"] == [0, *(len(tokens) for tokens, _ in read["kept"][:2])]
    before: list[int] = []
    for turn, (tokens, rows), (wanted, prefilled) in zip(turns["kept"], read["kept"], read["all"], strict=True):
        assert tokens == wanted and error(rows, prefilled) < 1e-5
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, tokens, strict=False))
        assert turn.decoded == len(tokens) - len(list(same))
        before = tokens
    assert [turn.decoded for turn in turns["all"]] == [len(tokens) for tokens, _ in read["all"]]


def test_a_prefix_cache_decodes_one_token_at_least(looks_up: Workspace) -> None:
    """What is asked again has logits after it, too, and what is shorter than before has its own."""
    tokens = looks_up.model.tokenize("Refunds are paid within ten days. Is that so?")
    notebook = looks_up.notebook()
    for wanted, decoded in ((tokens, len(tokens)), (tokens, 1), (tokens[:-3], 1)):
        notebook, count = reread(looks_up, notebook, wanted)
        with looks_up.notebook() as alone:
            alone.append(wanted)
            assert count == decoded and error(notebook.logits(), alone.logits()) < 1e-5
    notebook.close()


def test_errata_keep_what_a_prefix_cache_keeps(looks_up: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit by an erratum only adds to the prompt: a prefix cache that is told it decodes what the agent does."""
    memory, instance = instance_of(looks_up, "early")
    read: list[Tokens] = []
    monkeypatch.setattr(
        agent, "decide", lambda notebook, choices: read.append(notebook.tokens) or decide(notebook, choices)
    )
    turns = agent._editing(looks_up, memory, instance, "erratum")
    assert len(turns) == len(read) == 3 and turns[0].decoded < len(read[0]) / 5
    notebook, _ = reread(looks_up, looks_up.notebook(), read[0])
    for before, turn, tokens in zip(turns, turns[1:], read[1:], strict=False):
        notebook, decoded = reread(looks_up, notebook, tokens)
        answer = looks_up.model.tokenize(before.decision.choice)  # written in the turn before
        assert turn.decoded == decoded - len(answer)
    notebook.close()


@pytest.mark.parametrize(
    ("chosen", "followed"), [("field", "field"), ("selective@16", "selective@16"), ("recompute", "suffix")]
)
def test_the_method_by_calibration(
    looks_up: Workspace, monkeypatch: pytest.MonkeyPatch, chosen: str, followed: str
) -> None:
    """As a session follows a profile: what reaches the end is decoded from the change on."""
    profile = SimpleNamespace(methods={"direct": chosen, "reasoned": "stale"})
    monkeypatch.setattr(agent, "profile_of", lambda workspace: profile)
    assert agent.by_calibration(looks_up) == followed


def test_a_model_is_calibrated_once(looks_up: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the same code: what is kept is used; by other code it is calibrated again."""
    measured = []

    def calibrated(workspace: Workspace, cases: Sequence[object], told: object, pairs: Sequence[object]) -> Profile:
        measured.append((len(cases), len(pairs)))
        ways = dict.fromkeys(("direct", "reasoned"), "erratum")
        counts = dict.fromkeys(ways, 40)
        return Profile(workspace.identity, workspace.context.options.cache, 40, counts, ways, "now", 1, "early", ())

    monkeypatch.setattr(calibration, "KEPT", tmp_path)
    monkeypatch.setattr(calibration, "calibrate", calibrated)
    assert calibration.profile_of(looks_up) == calibration.profile_of(looks_up)
    assert measured == [(40, 48)] and calibration.seconds(looks_up) == 0.0
    monkeypatch.setattr(calibration, "digest", lambda _: "other code")
    calibration.profile_of(looks_up)
    assert len(measured) == 2
