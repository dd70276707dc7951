"""The GPU check: its page shows what is stored, and what does not hold is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.gpu import report

NOISE = {"first": 0.0, "rows": 1e-6, "logits": 1e-6}
OPERATIONS = {"error": 4e-4, "decoding": 1e-7, "control": 0.1, "copies": 6, "expected": 6}
DEVICE = {"device": {"result": {"gpus": ["CUDA0: a GPU"]}}}


@pytest.mark.parametrize(("name", "tables"), [("gpu", ["invariants", "splices", "first"]), ("vulkan", ["invariants"])])
def test_the_page_shows_what_is_stored(name: str, tables: list[str]) -> None:
    """Each table of docs/devices.md is that of docs/results/NAME.json."""
    stored = json.loads((report.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = report.page(stored, name)
    assert page == report.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name}: {table} -->\n| " in page for table in tables)


@pytest.mark.parametrize(
    ("part", "line", "holds"),
    [
        ("rows", {"different": 0, "copies": 4}, True),
        ("rows", {"different": 1, "copies": 4}, False),
        ("rows", {"different": 0, "copies": 0}, False),  # the cache was not on the device
        ("rows", {"refused": "no such cache"}, True),
        ("operations", OPERATIONS, True),
        ("operations", {**OPERATIONS, "error": 3e-3}, False),
        ("operations", {**OPERATIONS, "error": 3e-3, "decoding": 1e-3}, True),  # the model amplifies roundings
        ("operations", {**OPERATIONS, "decoding": 0.1}, False),  # a wrong position would not be noticed
        ("operations", {**OPERATIONS, "decoding": 0.1, "column": "q4_0 on all"}, True),
        ("operations", {**OPERATIONS, "decoding": 0.1, "column": "q4_0 on all", "error": 0.2}, False),
        ("operations", {**OPERATIONS, "error": 3e-3, "column": "q4_0 on all"}, False),
        ("operations", {**OPERATIONS, "copies": 7}, False),
        ("operations", {"error": 4e-4, "decoding": 1e-7}, True),  # recurrent: restored
        ("logits", {"splice": "exact", "errors": {}, "noise": NOISE}, True),
        ("logits", {"splice": "wrong", "errors": {"splice": NOISE}, "noise": NOISE}, True),
        ("logits", {"splice": "wrong", "errors": {"splice": {**NOISE, "logits": 1e-5}}, "noise": NOISE}, False),
        ("logits", {"splice": "wrong", "errors": {"splice": {**NOISE, "first": 1e-9}}, "noise": NOISE}, False),
        ("logits", {"splice": "wrong", "errors": {"splice": NOISE}}, False),  # nothing to judge it by
        ("logits", {"splice": "crash", "errors": {}}, False),
    ],
)
def test_what_does_not_hold_is_reported(part: str, line: dict[str, Any], holds: bool) -> None:
    found = {**DEVICE, part: {"result": [{"model": "m", "column": "c"} | line], "seconds": 1.0}}
    assert (report.broken(found) == []) is holds
    assert report.broken({"first": {"failed": "longer than 120 s", "seconds": 120.0}}) == ["first: longer than 120 s"]
