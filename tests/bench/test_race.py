"""The race: prompts are the same for all, cells are kept and gone on with, answers are compared with the right ones."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.processes import watched
from bench.race import cells, report, workloads
from bench.race.cells import Cell, keep, load
from bench.race.peers import PEERS, Run, Runs, Setting
from bench.race.workloads import Prompt, Work, works

RUN = Run(0.5, 1.0, 0.8, 1_000_000, "yes")
CELL = Cell("shipped", "alone", "1k", PEERS["notes"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workloads, "FOLDER", tmp_path)
    return tmp_path


def test_what_is_new_in_each_workload(folder: Path) -> None:
    """A question alone; a text before the skill; the order of skills; a date in the third line: nothing else differs
    from what was seen."""
    alone, moved, orders, field = (works()[name]("1k") for name in ("alone", "moved", "orders", "field"))
    for work in (alone, moved, orders, field):
        assert work.seen and len({prompt.text for prompt in (work.seen, *work.asked)}) == 1 + len(work.asked)
    (policy,) = alone.skills.values()
    begin = f"<|im_start|>system\n{policy}<|im_end|>\n<|im_start|>user\n"
    assert all(prompt.text.startswith(begin) for prompt in alone.asked)
    assert all(f"{prompt.system}\n\n{policy}" in prompt.text for prompt in moved.asked)
    assert len({prompt.system for prompt in moved.asked}) == len(moved.asked)
    assert len({prompt.splice for prompt in orders.asked}) == 24
    assert all("\n\n".join(orders.skills[name] for name in one.splice) in one.text for one in orders.asked)
    for prompt in field.asked:
        assert policy.replace("date: 2026-05-01", f"date: {prompt.date}") in prompt.text and prompt.date != "2026-05-01"


def test_sizes_are_as_they_are_called(folder: Path) -> None:
    assert 900 < works()["alone"]("1k").asked[0].tokens < 1100 and 3800 < works()["moved"]("4k").asked[0].tokens < 4080


def _peer(runs: list[Run]) -> cells.Peer:
    def run(setting: Setting, work: Work) -> Runs:
        yield from runs

    return replace(PEERS["notes"], run=run)


def test_cells_are_kept_and_gone_on_with(tmp_path: Path) -> None:
    """What is read back is what was written, in the order of the table; what was measured with other settings, or of a
    peer that there is not any more, is not there."""
    path, other = tmp_path / "race.json", Cell("shipped", "alone", "1k", PEERS["completion"])
    assert load(path) == {}
    keep(other, [RUN], path)
    keep(CELL, [RUN, replace(RUN, first=0.12345678)], path)
    found = load(path)
    assert list(found) == [CELL.name, other.name] and found[CELL.name][1] == replace(RUN, first=0.1235)
    data = json.loads(path.read_text())
    assert data["answers"] == ["yes"]  # each is stored once
    data["cells"]["shipped/alone-1k/gone"] = data["cells"][CELL.name]
    path.write_text(json.dumps(data))
    assert list(load(path)) == [CELL.name, other.name]
    data["settings"]["answer"] += 1
    path.write_text(json.dumps(data))
    assert load(path) == {}
    keep(CELL, [RUN], path)
    assert list(load(path)) == [CELL.name]


def test_a_long_cell_is_cut_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt is begun after its time; a conversation goes to its end."""
    prompt = Prompt((), "", tokens=1)
    work = Work("alone", "1k", {}, None, (prompt,) * 3)
    monkeypatch.setattr(cells, "works", lambda: {"alone": lambda _: work, "turns": lambda _: work})
    assert len(cells.measure(replace(CELL, peer=_peer([RUN] * 3)))) == 3
    monkeypatch.setattr(cells, "CAP", -1.0)
    assert len(cells.measure(replace(CELL, peer=_peer([RUN] * 3)))) == 1
    assert len(cells.measure(replace(CELL, work="turns", peer=_peer([RUN] * 3)))) == 3


def test_a_machine_that_stood_still_is_no_figure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not woken for a while was stopped, and so was what it measures."""

    def run(setting: Setting, work: Work) -> Runs:
        time.sleep(0.2)
        yield RUN

    monkeypatch.setattr(cells, "STILL", 1e-6)
    monkeypatch.setattr(cells, "works", lambda: {"alone": lambda _: Work("alone", "1k", {}, None, ())})
    with pytest.raises(SystemExit, match="nothing moved"):
        cells.measure(replace(CELL, peer=replace(PEERS["notes"], run=run)))


def test_cells_are_named() -> None:
    """By a model, a workload of it, or one peer; no other name is taken."""
    assert {cell.model for cell in cells.cells(["shipped"])} == {"shipped"}
    assert [cell.name for cell in cells.cells(["random/alone-1k/notes"])] == ["random/alone-1k/notes"]
    assert {cell.size for cell in cells.cells(["shallow/alone-16k"])} == {"16k"}
    with pytest.raises(SystemExit, match="there is no cell random/alone-1"):
        cells.cells(["random/alone-1"])


def test_answers_are_compared_with_those_of_the_same_library(tmp_path: Path) -> None:
    """Prompt by prompt, as far as both were asked; every peer names one that decodes all tokens, and is asked the same
    workloads."""
    other = replace(RUN, text="no")
    longer, cut = replace(RUN, text="a b c d"), replace(RUN, text="a b c")
    assert report.same_as([longer, cut, replace(RUN, text="")], [cut, longer, longer]) == "2 of 3"
    assert report.same_as([RUN, RUN, RUN], [RUN, other]) == "1 of 2" and report.same_as([RUN], None) == "?"
    for peer in PEERS.values():
        whose = PEERS[peer.as_whose]
        assert whose.as_whose == whose.name and set(peer.works) <= set(whose.works)
        assert ("notes" in peer.name) == ("notes" in whose.name)


def test_the_report_says_what_differs_and_what_is_missing(tmp_path: Path) -> None:
    """Its table is put between the marks; what is beside them stays; a second time gives the same."""
    page = tmp_path / "race.md"
    page.write_text(f"before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nafter\n")
    runs = {"notes": [RUN] * 5, "notes-recompute": [RUN] * 5, "prompt-cache": [replace(RUN, processor=1.6)] * 3}
    found = {f"random/alone-1k/{name}": one for name, one in runs.items()}
    found["random/alone-1k/completion"] = [replace(RUN, text="no")]
    report.write(tmp_path, found)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| `notes ask` | 0.50 s, 1.0, 1 MB, 5 of 5 |  |" in text
    assert "| `llama-completion --prompt-cache` | 0.50 s*, 2.0, 1 MB, 0 of 1 |" in text
    assert "| `notes ask --recompute` | 0.50 s, 1.0, 1 MB, all decoded |" in text
    assert "Not measured yet: of alone-1k slots," in text and "; alone-4k;" in text
    report.write(tmp_path, found)
    assert page.read_text() == text


def test_a_process_is_watched(tmp_path: Path) -> None:
    """Its first byte comes before its end, its memory and its time of the processor are its own; one that fails is
    told of with what it said."""
    code = "import time; print('a', flush=True); time.sleep(0.3); x = bytearray(50 << 20); print('b')"
    ended = watched([sys.executable, "-c", code], tmp_path / "log")
    assert ended.out == "a\nb\n" and ended.first + 0.25 < ended.whole and ended.memory > 50 << 20
    assert 0 < ended.processor < ended.whole + 1
    with pytest.raises(SystemExit, match="status 3\nno such thing"):
        watched(
            [sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"], tmp_path / "log"
        )
