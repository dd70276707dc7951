"""`notes bench`: measurements, output, lengths left out, and refusals. No test asserts a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from notes_cli.config import shipped_model
from notes_cli.engine import limits
from notes_cli.measure.speed import Length, Times

from ..tiny import write_model
from .conftest import run_here

SHORT = ("bench", "-m", shipped_model(), "--runs", 2, "-t", 1)
WORK = ("splice", "question", "prefill")


def test_the_document() -> None:
    """Each length has all measures and their ratios; bytes are those of the rows; progress is not in it."""
    outcome = run_here(*SHORT, "--tokens", "96,32", "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert found["version"] == 1 and found["threads"] == 1 and found["left_out"] == []
    assert [one["tokens"] for one in found["lengths"]] == [32, 96]
    short, long = found["lengths"]
    assert long["cache_bytes"] == 3 * short["cache_bytes"] == long["file_bytes"] > 0
    for one in found["lengths"]:
        for name in WORK:
            spread = one[name]
            assert spread["runs"] == 2 and 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert one["prefill_over_splice"] > 0 and one["write"] > 0
    assert "prefilling" not in outcome.err


def test_the_table_and_the_quantized_cache() -> None:
    """A column a length, a line a measure; rows of a smaller type are fewer bytes in the cache than in the file."""
    outcome = run_here(*SHORT, "--tokens", "32", "-ctk", "q8_0", "-ctv", "q8_0")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].endswith(": 1 thread, K/V q8_0/q8_0, flash attention auto") and lines[2].split() == ["32", "tokens"]
    starts = ("prefill / splice", "prefill", "splice", "question of 16", "compiling pays", "K/V in the cache")
    assert all(line.startswith(start) for line, start in zip(lines[3:], starts, strict=True))
    document = run_here(*SHORT, "--tokens", "32", "-ctk", "q8_0", "-ctv", "q8_0", "--json").json
    assert document["lengths"][0]["cache_bytes"] < document["lengths"][0]["file_bytes"]


def test_from_which_question_a_compile_pays() -> None:
    """The first for which a compile and splices take less than prefills; never where a splice takes as long."""
    prefill, splice, question = Times((1.0,)), Times((0.1,)), Times((0.3,))
    assert Length(8, 1, 1, prefill, 0.2, splice, question).pays_from == 2  # 1.2 + 2 x 0.1 < 2 x 1
    assert Length(8, 1, 1, prefill, 3.5, splice, question).pays_from == 6  # 4.5 + 5 x 0.1 is as long as 5 x 1
    assert Length(8, 1, 1, prefill, 0.0, prefill, question).pays_from is None


def test_lengths_that_cannot_be_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the trained length, the context or the memory: a line and a JSON entry each; others are measured."""
    outcome = run_here(*SHORT, "--tokens", "32,4090", "--json")
    assert outcome.code == 0 and outcome.err.count("4,090 tokens are left out") == 1
    (left,) = outcome.json["left_out"]
    assert left["tokens"] == 4090 and "with 80 around them" in left["why"] and "4,096" in left["why"]
    outcome = run_here(*SHORT, "--tokens", "32,500", "-c", 256)
    assert outcome.code == 0 and "do not fit 256" in outcome.err
    monkeypatch.setattr(limits, "available_memory", lambda: 40_000_000)
    outcome = run_here(*SHORT, "--tokens", "32,2000", "--json")
    assert outcome.code == 0 and "of memory, and 40.0 MB are available" in outcome.err
    assert [one["tokens"] for one in outcome.json["lengths"]] == [32]


def test_what_cannot_be_measured_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No length that fits, a model whose rows cannot move, a folder that cannot be written in."""
    outcome = run_here(*SHORT, "--tokens", "5000")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.splitlines()[-1].startswith("notes: 5,000 tokens cannot")
    model = write_model(tmp_path / "gpt2.gguf", "gpt2")
    outcome = run_here("bench", "-m", model, "--tokens", "8", "--json")
    assert outcome.code == 1 and "there is no splice to measure" in json.loads(outcome.out)["error"]["message"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NOTES_HOME", str(tmp_path / "file" / "home"))
    outcome = run_here(*SHORT, "--tokens", "8")
    assert outcome.code == 1 and outcome.err.splitlines()[-1].startswith("notes: ")


def test_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error; leftovers of a killed run are removed, files of a running one are not."""
    monkeypatch.setenv("NOTES_HOME", str(tmp_path))
    killed, running = tmp_path / "bench-killed", tmp_path / "bench-running"
    for folder in (killed, running):
        folder.mkdir()
    os.utime(killed, (0, 0))
    assert run_here(*SHORT, "--tokens", "32").code == 0
    monkeypatch.setattr("notes_cli.measure.speed._time_splice", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_here(*SHORT, "--tokens", "32")
    left = [path for path in tmp_path.rglob("*") if "bench" in path.name or path.suffix == ".notes"]
    assert left == [running]
