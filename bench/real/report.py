"""The tables of `make real`: Markdown, written between markers into docs/findings.md, and a summary into README.

Figures are kept in docs/results/real.json, by model; tests/bench/test_real.py compares the pages with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.real.measure import interval
from bench.real.tasks import ROOT

STORE = ROOT / "docs" / "results" / "real.json"
SHOWN = "smollm2"  # the model of README, by the beginning of its name
WAYS = {
    "plain": "not spliced, but prefilled in other micro-batches",
    "compiled": "spliced where it was compiled",
    "exact": "the same with `--exact`",
    "q8_0": "spliced there, kept as q8_0",
    "system": "spliced after a system text",
    "another": "spliced after a system text and another skill",
}
METHODS = {
    "nothing": "no correction",
    "erratum": "erratum before the question, alone",
    "field": "field in place",
    "field+erratum": "**field in place, and erratum after the skill (default)**",
    "suffix": "full prefill of the corrected text",
}
Rows = Sequence[dict[str, Any]]


def stored() -> dict[str, Any]:
    """The stored figures, by the name of the model."""
    return json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}


def tables(found: dict[str, Any]) -> str:
    """All tables of one model."""
    return "\n\n".join(f"{part}:\n\n{table(found[part])}" for part, table in TABLES.items() if part in found)


def speed_table(rows: Rows) -> str:
    """A row for each skill."""
    lines = [
        "| skill | tokens | file | first token after a prefill | spliced | |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [f"{row['tokens']:,}", f"{row['bytes'] / 1e6:.0f} MB", f"{row['prefill']:.1f} s"]
        cells += [f"{row['spliced']:.2f} s", f"{row['prefill'] / row['spliced']:.0f} times sooner"]
        lines.append(f"| {row['skill']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fidelity_table(rows: Rows) -> str:
    """Return a row per way, compared with a prefill of the same tokens."""
    lines = [
        "| | right | a full prefill | right where the prefill is | same verdict | same text | cosine | KL |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        n, prefill = row["asked"], row["reference_right"]
        both = (row["right"] + prefill + row["same_verdict"] - n) // 2  # same verdict: both right, or neither
        cells = [_share(row["right"], n), _share(prefill, n), _share(both, prefill)]
        cells += [_share(row[key], n) for key in ("same_verdict", "same_text")]
        cells += [f"{row['cosine']:.4f}", f"{row['kl']:.3f}"]
        lines.append(f"| {WAYS[row['way']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def corrections_table(found: dict[str, Any]) -> str:
    """A row for each method."""
    lines = [
        "| | new value | old value | what follows from it: new / old | other answers: as right / same text |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in found["methods"]:
        follows = f"{row['follows_new']} / {row['follows_old']} of {row['follows_asked']}"
        other = f"{row['other_same_verdict']} / {row['other_same_text']} of {row['other_asked']}"
        cells = [_share(row["new"], row["asked"]), _share(row["old"], row["asked"]), follows, other]
        lines.append(f"| {METHODS[row['method']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary_table(found: dict[str, Any]) -> str:
    """Return the table in README: some counts of the others, without intervals."""
    ways = {row["way"]: row for row in found["fidelity"]}
    methods = {row["method"]: row for row in found["corrections"]["methods"]}
    spliced = {
        "a text where it was compiled": "compiled",
        "after a system text": "system",
        "after a system text and another skill, asked about the last": "another",
    }
    lines = ["| | right | a full prefill of the same text |", "| --- | ---: | ---: |"]
    for name, way in spliced.items():
        lines.append(f"| {name} | {ways[way]['right']} of {ways[way]['asked']} | {ways[way]['reference_right']} |")
    default, prefill = methods["field+erratum"], methods["suffix"]
    corrected = {
        "a corrected value": ("new", "asked"),
        "what follows from a corrected value": ("follows_new", "follows_asked"),
        "something else in a corrected text: as before": ("other_same_verdict", "other_asked"),
    }
    for name, (right, asked) in corrected.items():
        lines.append(f"| {name} | {default[right]} of {default[asked]} | {prefill[right]} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Any], str]] = {
    "speed": speed_table,
    "fidelity": fidelity_table,
    "facts": fidelity_table,
    "corrections": corrections_table,
}


def _share(part: int, whole: int) -> str:
    """A share with its 95% interval."""
    low, high = interval(part, whole)
    return f"{part} of {whole} ({low:.2f} to {high:.2f})"


def marked(text: str, name: str, table: str, bench: str = "real") -> str:
    """The page with the table between its markers `<!-- real: name -->` and `<!-- end -->`."""
    pattern = rf"(<!-- {bench}: {name} -->\n).*?(\n?<!-- end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{table}\n<!-- end -->", text, flags=re.S)


def pages(results: dict[str, Any]) -> dict[Path, str]:
    """The pages that show figures, with the tables that were measured."""
    found: dict[str, Any] = next((one for name, one in results.items() if name.lower().startswith(SHOWN)), {})
    pages = {}
    for path in (ROOT / "README.md", ROOT / "docs" / "findings.md", ROOT / "docs" / "trust.md"):
        text = path.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            if name in found:
                text = marked(text, name, table(found[name]))
        if found:
            text = marked(text, "summary", summary_table(found))
        pages[path] = text
    return pages


def write(model: str, part: str, found: Any) -> None:
    """Keep the figures of one part, and write the pages that show them."""
    results = stored()
    results.setdefault(model, {})[part] = found
    STORE.parent.mkdir(parents=True, exist_ok=True)
    STORE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for path, text in pages(results).items():
        path.write_text(text, encoding="utf-8")
