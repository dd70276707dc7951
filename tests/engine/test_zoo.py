"""Tests of all architectures of the zoo in one kind of context, of some in two more (`make zoo` runs all kinds)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


# A shape of rows each, for the other kinds: a graph that differs in one of them has another digest (native/graphs.py),
# and who accepts that runs `make zoo`.
SHAPES = ("llama", "gemma3", "phi3", "chatglm", "bloom", "qwen2vl", "qwen35", "mamba", "granitehybrid")
SHAPES = (
    *(f"{name}-dense" for name in SHAPES),
    *(f"{name}-moe" for name in ("deepseek2", "deepseek32", "gpt-oss")),
)
MEASURE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from bench.zoo_model import measure
for path in map(Path, sys.argv[2:]):
    for verdict in measure(path, sys.argv[1]):
        print(json.dumps({"model": path.stem, **asdict(verdict)}), flush=True)
"""


@pytest.fixture(scope="module")
def lines() -> dict[str, list[zoo.Line]]:
    paths = sorted(MODELS.glob("*.gguf"))
    if not paths:
        pytest.fail(f"there are no models in {MODELS}. Run: make test")

    def measured(job: tuple[list[str], list[Path]]) -> list[zoo.Line]:
        columns, share = job
        command = [sys.executable, "-c", MEASURE, f"^({'|'.join(columns)})$", *map(str, share)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=MODELS.parents[2])
        assert done.returncode == 0, f"after {done.stdout[-200:]}: {done.stderr[-500:]}"
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    usual, *others = COLUMNS.values()
    cores = os.cpu_count() or 1
    jobs = [(others, [path for path in paths if path.stem in SHAPES])]
    jobs += [([usual], paths[core::cores]) for core in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        found = [line for part in pool.map(measured, jobs) for line in part]
    return {kind: [line for line in found if line["column"] == column] for kind, column in COLUMNS.items()}


def names(lines: Iterable[zoo.Line], operation: str, word: str) -> set[str]:
    return {line["model"] for line in lines if line[operation] == word}


@pytest.mark.parametrize("kind", COLUMNS)
def test_nothing_is_wrong(lines: dict[str, list[zoo.Line]], kind: str) -> None:
    every = 128 + len(zoo_more.ARCHITECTURES) + len(zoo_more.RECURRENT)
    assert len(lines[kind]) == (every if kind == "ordinary" else len(SHAPES))
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


@pytest.mark.patches("fixes", "recurrent")  # CogVLM needs the one, states that are carried the other
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
    exact = names(lines["ordinary"], "splice", "exact").intersection(SHAPES)
    assert names(lines["V transposed, streams"], "splice", "exact") == exact
