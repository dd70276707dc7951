"""The GPU check for people: a line for each part, the invariants that do not hold, and the tables of docs/devices.md.

python -m bench.gpu.report build/gpu/gpu.json      stores it as docs/results/gpu.json, and writes the tables
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.real.report import corrections_table, fidelity_table, marked
from bench.zoo_model import AMPLIFIED

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "docs" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "devices.md"
OPERATIONS = ("splice", "restore", "rewrite", "carry")


def line(part: str, found: dict[str, Any]) -> str:
    """One line while the check runs."""
    if "failed" in found:
        return f"{part}: FAILED after {found['seconds']} s: {found['failed']}"
    return f"{part}: {found['seconds']} s {SUMMARIES[part](found['result'])}"


def broken(found: dict[str, Any]) -> list[str]:
    """Parts that failed and invariants that do not hold, a line each."""
    lines = [f"{part}: {one['failed']}" for part, one in found.items() if "failed" in one]
    for one in _result(found, "rows"):
        if one.get("different") or ("different" in one and not one["copies"] and _gpu(found)):
            lines.append(f"rows: {one}")
    lines += [
        f"logits: {one['model']} {one['column']}: {_wrong(one)}" for one in _result(found, "logits") if _wrong(one)
    ]
    return lines


def _result(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = found.get(part, {}).get("result", [])
    return result


def _gpu(found: dict[str, Any]) -> bool:
    return "CUDA" in json.dumps(found.get("device", {}))


def _wrong(one: dict[str, Any]) -> str:
    """The operations whose error is above the bound of the CPU and above the device's own noise."""
    noise = one.get("noise")
    names = [name for name in OPERATIONS if one.get(name) in ("wrong", "crash")]
    if noise:
        names = [
            name
            for name in names
            if any(one["errors"][name][key] > max(AMPLIFIED * noise[key], 1e-12) for key in ("first", "rows", "logits"))
        ]
    return ", ".join(f"{name} {one['errors'].get(name)} (noise {noise})" for name in names)


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


def _splices_summary(lines: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{one['tokens']} tokens: prefill {one['prefill']:.3f} s, splice {one['memory'] * 1e3:.1f} ms" for one in lines
    )


SUMMARIES: dict[str, Any] = {
    "device": json.dumps,
    "rows": _rows_summary,
    "logits": _logits_summary,
    "splices": _splices_summary,
    "first": json.dumps,
    "fidelity": json.dumps,
    "noise": json.dumps,
    "corrections": json.dumps,
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
    return "\n".join(
        [
            "| compared | |",
            "| --- | --- |",
            f"| rows read back, 11 models and 7 kinds of cache | {found['rows']['summary']} |",
            f"| splice, restore, rewrite and carry beside decoding, the same models | {found['logits']['summary']} |",
        ]
    )


def compact(found: dict[str, Any]) -> dict[str, Any]:
    """The results as they are stored: rows and logits as their summary."""
    short = dict(found)
    for part in ("rows", "logits"):
        short[part] = {"summary": SUMMARIES[part](_result(found, part)), "seconds": found[part]["seconds"]}
    return short


def write(found: dict[str, Any]) -> None:
    """Store the figures, and write the tables between the page's markers."""
    stored = compact(found)
    STORE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(stored), encoding="utf-8")


def page(stored: dict[str, Any]) -> str:
    """The page with the tables of the stored results."""
    tables = {
        "invariants": invariants_table(stored),
        "splices": splices_table(_result(stored, "splices")),
        "first": first_table(_result(stored, "first")),
        "fidelity": fidelity_table([*_result(stored, "noise"), *_result(stored, "fidelity")]),
        "corrections": corrections_table(stored["corrections"]["result"]),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = marked(text, name, table, "gpu")
    return text


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
