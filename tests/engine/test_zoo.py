"""Tests of all architectures of the zoo in three kinds of context (`make zoo` runs all kinds)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench import zoo, zoo_more

MODELS = Path(__file__).parents[2] / "build" / "zoo" / "models"
COLUMNS = {
    "ordinary": "f16 plain on one",
    "V transposed, streams": "f16 yarn off streams",
    "quantized, unified": "q8_0 linear on unified",
}


@pytest.fixture(scope="module")
def lines() -> dict[str, list[zoo.Line]]:
    paths = sorted(MODELS.glob("*.gguf"))
    if not paths:
        pytest.fail(f"there are no models in {MODELS}. Run: make test")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [
            line
            for part in pool.map(lambda p: zoo.measure(p, f"^({'|'.join(COLUMNS.values())})$"), paths)
            for line in part
        ]
    assert [line for line in found if line["column"] not in COLUMNS.values()] == [], "a model crashed"
    return {kind: [line for line in found if line["column"] == column] for kind, column in COLUMNS.items()}


def names(lines: Iterable[zoo.Line], operation: str, word: str) -> set[str]:
    return {line["model"] for line in lines if line[operation] == word}


@pytest.mark.parametrize("kind", COLUMNS)
def test_nothing_is_wrong(lines: dict[str, list[zoo.Line]], kind: str) -> None:
    assert len(lines[kind]) == 128 + len(zoo_more.ARCHITECTURES) + len(zoo_more.RECURRENT)
    for operation in zoo.OPERATIONS:
        assert names(lines[kind], operation, "wrong") == set()
    assert all(line["why"] for line in lines[kind] if "exact" not in (line["splice"], line["carry"]))


@pytest.mark.parametrize("kind", COLUMNS)
def test_controls_are_caught(lines: dict[str, list[zoo.Line]], kind: str) -> None:
    """No rotation, a distance off by one and the magnitude twice are each called wrong by the same comparison."""
    assert {line["model"]: line["missed"] for line in lines[kind] if line["missed"]} == {}
    tried = {control for line in lines[kind] for control in line["errors"]}
    assert {"no rotation", "distance off by one"} <= tried
    assert ("magnitude twice" in tried) == ("yarn" in COLUMNS[kind])


def test_how_many(lines: dict[str, list[zoo.Line]]) -> None:
    """97 of llama.cpp's 128 can be spliced, and all of ours; all but five can be restored."""
    ordinary = lines["ordinary"]
    ours = {f"{arch}-dense" for arch in zoo_more.ARCHITECTURES}
    assert len(names(ordinary, "splice", "exact") - ours) == 97
    assert ours <= names(ordinary, "splice", "exact")
    assert len(names(ordinary, "carry", "exact")) == 19 + len(zoo_more.RECURRENT)  # hybrids, and recurrent layers alone
    assert names(ordinary, "carry", "refused") == {"deepseek4-moe"}  # its memory is of another kind
    assert names(ordinary, "restore", "refused") == {
        *("deepseek4-moe", "dream-dense", "llada-dense", "llada-moe-moe", "rnd1-moe")
    }


def test_yarn_is_exact_where_plain_is(lines: dict[str, list[zoo.Line]]) -> None:
    """YaRN changes frequencies and magnitude, not the supported operations."""
    assert names(lines["V transposed, streams"], "splice", "exact") == names(lines["ordinary"], "splice", "exact")
