"""The GPU check for people: a line for each part, the invariants that do not hold, and the tables of docs/devices.md.

python -m bench.gpu.report FILE gpu       stores it as docs/results/gpu.json, and writes the tables; the same for vulkan
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.real.report import corrections_table, fidelity_table, marked
from bench.zoo_model import AMPLIFIED

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "devices.md"
KERNEL = 5e-4  # NMSE that test-backend-ops allows a backend's matrix product and flash attention
OPERATIONS = ("splice", "restore", "rewrite", "carry")


def line(part: str, found: dict[str, Any]) -> str:
    """One line while the check runs."""
    if "failed" in found:
        return f"{part}: FAILED after {found['seconds']} s: {found['failed']}"
    return f"{part}: {found['seconds']} s {SUMMARIES.get(part, json.dumps)(found['result'])}"


def broken(found: dict[str, Any]) -> list[str]:
    """Parts that failed and invariants that do not hold, a line each."""
    lines = [f"{part}: {one['failed']}" for part, one in found.items() if "failed" in one]
    gpu = bool(found.get("device", {}).get("result", {}).get("gpus"))
    for one in _result(found, "rows"):
        if one.get("different") or ("different" in one and not one["copies"] and gpu):
            lines.append(f"rows: {one}")
    for one in _result(found, "operations"):
        if _beyond(one, gpu) and not _too_coarse(one):
            lines.append(f"operations: {one}")
    logits = [(one, _wrong(one)) for one in _result(found, "logits")]
    return lines + [f"logits: {one['model']} {one['column']}: {wrong}" for one, wrong in logits if wrong]


def _result(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = found.get(part, {}).get("result", [])
    return result


def _beyond(one: dict[str, Any], gpu: bool) -> bool:
    """True if an error is beyond the bound of a kernel and not the model's own, if a wrong position would not be, or if
    the rows were copied in other calls than one for K and one for V of each layer."""
    if "refused" in one:
        return False
    bound = max(KERNEL, AMPLIFIED * one["decoding"])
    missed = "control" in one and one["control"] <= bound
    return one["error"] > bound or missed or (gpu and one.get("copies") != one.get("expected"))


def _too_coarse(one: dict[str, Any]) -> bool:
    """True if decoding alone with a 4-bit cache is so far from the CPU's that a wrong position would be within the
    bound, and the error is below that of a wrong position."""
    control = one.get("control", 0.0)
    return one["column"].startswith("q4_0") and one["error"] < control <= AMPLIFIED * one["decoding"]


def _wrong(one: dict[str, Any]) -> str:
    """The operations whose error is above the bound of the CPU and above the device's own noise."""
    noise = one.get("noise") or {}
    limits = {key: max(AMPLIFIED * noise[key], 1e-12) for key in noise}
    names = [name for name in OPERATIONS if one.get(name) in ("wrong", "crash")]
    if noise:
        names = [name for name in names if any(one["errors"][name][key] > limits[key] for key in limits)]
    return ", ".join(f"{name} {one['errors'].get(name)} (noise {noise or None})" for name in names)


def _rows_summary(rows: list[dict[str, Any]]) -> str:
    compared = [one for one in rows if "different" in one]
    same = sum(not one["different"] for one in compared)
    return f"{same} of {len(compared)} caches hold the same bits as the host's, {len(rows) - len(compared)} refused"


def _logits_summary(lines: list[dict[str, Any]]) -> str:
    words = [one[name] for one in lines for name in OPERATIONS if one.get(name)]
    beyond = [one for one in lines if "wrong" in [one.get(name) for name in OPERATIONS]]
    within = sum(not _wrong(one) for one in beyond)
    missed = sum(bool(one.get("missed")) for one in lines)
    return (
        f"{words.count('exact')} within the CPU's bounds, {words.count('wrong')} beyond them (in {within} of "
        f"{len(beyond)} contexts within the device's own rounding), {words.count('crash')} crashes, "
        f"{words.count('refused')} refused; {missed} controls missed"
    )


def _operations_summary(lines: list[dict[str, Any]]) -> str:
    found = [one for one in lines if "error" in one]
    compared = [one for one in found if not _too_coarse(one)]
    coarse = len(found) - len(compared)
    within = sum(not _beyond(one, gpu=False) for one in compared)
    error, decoding = (max(one[name] for one in compared) for name in ("error", "decoding"))
    control = min(one["control"] for one in compared if "control" in one)
    unjudged = f", {coarse} with a 4-bit cache too coarse to judge" if coarse else ""
    return (
        f"{within} of {len(compared)} contexts within the kernels' bound, {len(lines) - len(found)} refused{unjudged}; "
        f"NMSE at most {error:.1g}, of decoding alone {decoding:.1g}, of a wrong position at least {control:.1g}"
    )


def _splices_summary(lines: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{one['tokens']} tokens: prefill {one['prefill']:.3f} s, splice {one['memory'] * 1e3:.1f} ms" for one in lines
    )


SUMMARIES: dict[str, Any] = {
    "rows": _rows_summary,
    "logits": _logits_summary,
    "operations": _operations_summary,
    "splices": _splices_summary,
}


def splices_table(lines: list[dict[str, Any]]) -> str:
    """A row for each length and attention kernel."""
    text = [
        "| tokens | flash attention | K/V | prefill | splice, memory | splice, file | cudaMemcpy, pinned | pageable |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in lines:
        times = [one.get(key) for key in ("prefill", "memory", "file", "memcpy_pinned", "memcpy_pageable")]
        cells = [f"{time * 1e3:.1f} ms" if time is not None else "" for time in times]
        text.append(f"| {one['tokens']:,} | {one['flash']} | {one['bytes'] / 1e6:.0f} MB | {' | '.join(cells)} |")
    return "\n".join(text)


def first_table(lines: list[dict[str, Any]]) -> str:
    """A row for each model and case."""
    text = ["| model | request | llama-server | notes serve |", "| --- | --- | ---: | ---: |"]
    names = {
        "new": "the first question (notes has compiled the text)",
        "again": "another question about the same text",
        "moved": "another line before the text",
    }
    for one in lines:
        for case, name in names.items():
            cells = [f"{one[server][case] * 1e3:.0f} ms" for server in ("llama-server", "notes serve")]
            text.append(f"| {one['model']} | {name} | {' | '.join(cells)} |")
    return "\n".join(text)


def invariants_table(found: dict[str, Any]) -> str:
    """How the comparisons came out."""
    names = {
        "rows": f"rows read back, {found['rows']['models']} models and 7 kinds of cache",
        "logits": "splice, restore, rewrite and carry beside decoding, the same models",
        "operations": "all operations beside the CPU, half of the layers on the device and all",
    }
    lines = [f"| {name} | {found[part]['summary']} |" for part, name in names.items() if part in found]
    return "\n".join(["| compared | |", "| --- | --- |", *lines])


def write(found: dict[str, Any], name: str) -> None:
    """Store the figures, and write the tables between the page's markers."""
    stored = dict(found)
    for part in {"rows", "logits", "operations"} & found.keys():  # of comparisons, the summary
        lines, seconds = _result(found, part), found[part]["seconds"]
        models = len({one["model"] for one in lines})
        stored[part] = {"summary": SUMMARIES[part](lines), "models": models, "seconds": seconds}
    (RESULTS / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(stored, name), encoding="utf-8")


def page(stored: dict[str, Any], name: str) -> str:
    """The page with the tables of the stored results of `gpu` or `vulkan`."""
    tables: dict[str, Callable[[], str]] = {
        "rows": lambda: invariants_table(stored),
        "splices": lambda: splices_table(_result(stored, "splices")),
        "first": lambda: first_table(_result(stored, "first")),
        "fidelity": lambda: fidelity_table([*_result(stored, "noise"), *_result(stored, "fidelity")]),
        "corrections": lambda: corrections_table(stored["corrections"]["result"]),
    }
    text = PAGE.read_text(encoding="utf-8")
    for part in tables.keys() & stored.keys():
        text = marked(text, "invariants" if part == "rows" else part, tables[part](), name)
    return text


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2])
