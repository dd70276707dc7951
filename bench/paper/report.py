"""The report: figures of the experiments beside the author's records, and what the gate leaves out.

A decision says something about a cache only if the model decides rightly with a full prefill. The author's gate: a row
of decisions counts where a full prefill is right in 0.80 of them (and of eight at least). Cosines and counts of tokens
need no gate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.real.report import marked

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "docs" / "results" / "paper.json"
PAGE = ROOT / "docs" / "paper.md"
FINDINGS = ROOT / "docs" / "findings.md"
HEAD = Path(__file__).with_name("page.md")
GATE, FEWEST = 0.80, 8  # share of right full prefills, and of how many at least
Result = dict[str, Any]
Row = list[Any]  # figure, number of decisions; right ones of a full prefill, of how many, where it is gated

TITLES = {  # row -> its title
    "mechanism.changed": "only the field's K/V is new: share of the way to the new decision",
    "mechanism.after": "only the K/V after the field is new",
    "mechanism.downstream": "the field's K/V and all after it are new",
    "mechanism.injected": "K/V of the opposite conclusion injected: the decision follows it",
    "trigger.changed": "field constant, a value of the rule flipped: only that value's K/V",
    "trigger.after": "field constant, a value of the rule flipped: only the K/V after it",
    "lookup.changed": "a value that is only looked up: only its K/V is new",
    "lookup.after": "a value that is only looked up: only the K/V after it",
    "positions.top": "K/V of the 8 positions of the highest effect",
    "positions.random": "K/V of 8 random positions",
    "gated.full": "gated by a field, new value: right after a full prefill",
    "gated.field": "gated, field in place",
    "gated.erratum": "gated, erratum alone",
    "gated.both": "gated, field and erratum",
    "compose.field": "spliced cache, field in place: share of the way to the new decision",
    "compose.erratum": "spliced cache, erratum alone: share of the way",
    "compose.both": "spliced cache, field and erratum: share of the way",
    "compose.agree": "spliced cache: same decision as an ordinary cache, corrected in each way",
    "facts.early.agree": "facts, passage early: same verdict as a full prefill",
    "facts.late.agree": "facts, passage late: same verdict",
    "tools.agree": "tool calls: same tool as after a full prefill",
    "tools.right": "tool calls: tool and argument right, spliced",
    "agent.agree": "agent: same decision as with a prefill of every turn",
    "agent.right": "agent: right",
    "agent.saved": "agent: tokens of a prefill of every turn / tokens decoded",
    "turns.errata.agree": "28 turns, errata: same decision as a full prefill",
    "turns.errata.cosine": "28 turns, errata: cosine of the logits",
    "turns.both.agree": "28 turns, field and errata: same decision",
    "turns.both.cosine": "28 turns, field and errata: cosine",
    "e2.late.agree": "E2, memory after the conversation: same decision",
    "e2.late.cosine": "E2, memory after the conversation: cosine",
    "e2.late.not rotated.cosine": "E2, memory after the conversation, not rotated: cosine",
    "e3.full": "E3, memory edited: right after a full prefill",
    "e3.field": "E3, field in place",
    "e3.erratum": "E3, erratum alone",
    "e3.both": "E3, field and erratum",
    "e4.1.cosine": "E4, memory in one block: cosine",
    "e4.16.cosine": "E4, memory in 16 blocks: cosine",
    "e4.16.agree": "E4, memory in 16 blocks: same decision",
    "e5.agree": "E5, 12 turns: same decision as a full prefill",
    "e5.cosine": "E5, 12 turns: cosine",
    "e5.prefill": "E5: tokens of a full prefill / tokens decoded",
    "e5.end": "E5: tokens with a prefix cache, memory at the end / tokens decoded",
    "e5.front": "E5: tokens with a prefix cache, memory at the front / tokens decoded",
}
EDITS = ("full", "stale", "field", "erratum", "both")
SHORT = (  # rows of docs/findings.md
    "mechanism.changed",
    "mechanism.after",
    "trigger.changed",
    "trigger.after",
    "lookup.changed",
    "gated.full",
    "gated.field",
    "gated.erratum",
    "gated.both",
    "agent.agree",
    "turns.errata.cosine",
    "e2.late.cosine",
)
RECORDS = (  # columns of the table of his models
    ("mechanism.changed", "field only"),
    ("trigger.after", "after a flipped rule value"),
    ("gated.full", "gated: prefill"),
    ("gated.field", "field"),
    ("gated.erratum", "erratum"),
    ("facts.late.agree", "facts"),
    ("tools.agree", "tools"),
    ("agent.agree", "agent: same"),
    ("agent.right", "right"),
    ("turns.errata.cosine", "28 turns"),
    ("e2.late.agree", "E2"),
    ("e3.erratum", "E3: erratum"),
)


def rows(found: dict[str, Result]) -> dict[str, Any]:
    """The rows of a model, by their keys in TITLES; its experiments' `counts`, and those that do not fit (`left`)."""
    cells: dict[str, list[Result]] = {}
    left: dict[str, str] = {}
    for key, result in found.items():
        name = key.partition("/")[0]
        if "left_out" in result:
            left[name] = result["left_out"]
        else:
            cells.setdefault(name, []).append(result)
    if edited := cells.get("gated", []) + cells.get("compose", []):
        cells["mechanism"] = [one.get("mechanism", {"right": one["right"]}) for one in edited]
    summed: dict[str, Row] = {}
    for name, results in cells.items():
        summed |= {key: row for key, row in SUMS[name](name, results).items() if key in TITLES}
    counts = {name: len(results) for name, results in cells.items()}
    return {"counts": counts, "left": left, "rows": {key: summed[key] for key in TITLES if key in summed}}


def _row(figures: Iterable[float], right: Iterable[bool] = ()) -> Row:
    """Their mean; `right`: of the full prefills that the row rests on, where it is about decisions."""
    values, gate = list(figures), list(right)
    mean = round(fmean(values), 4) if values else None
    return [mean, len(values), sum(gate), len(gate)] if gate else [mean, len(values)]


def _all(results: Sequence[Result], key: str = "right") -> list[Any]:
    return [flag for result in results for flag in result[key]]


def _gated(name: str, results: Sequence[Result]) -> dict[str, Row]:
    right = _all(results)
    return {f"{name}.{way}": _row((one["prefilled"][way] > 0 for one in results), right) for way in EDITS}


def _composed(name: str, results: Sequence[Result]) -> dict[str, Row]:
    right, decided = _all(results), [one["spliced"] for one in results if all(one["right"])]
    decided = [one for one in decided if one["full"] != one["stale"]]
    found = {
        f"{name}.{way}": _row(((one[way] - one["stale"]) / (one["full"] - one["stale"]) for one in decided), right)
        for way in EDITS[2:]
    }
    same = [(one["prefilled"][way] > 0) == (one["spliced"][way] > 0) for one in results for way in EDITS]
    return found | {f"{name}.agree": _row(same, right)}


def _mixed(name: str, results: Sequence[Result]) -> dict[str, Row]:
    """Of the pairs whose both sides a full prefill decides rightly."""
    right, decided = _all(results), [one for one in results if all(one["right"])]
    keys = [key for key in ("changed", "after", "downstream", "top", "random") if decided and key in decided[0]]
    found = {f"{name}.{key}": _row((one[key] for one in decided), right) for key in keys}
    if "changed" in keys:
        found[f"{name}.injected"] = _row(_all(decided, "injected"), right)
    return found or {f"{name}.{'top' if name == 'positions' else 'changed'}": _row([], right)}


def _facts(name: str, results: Sequence[Result]) -> dict[str, Row]:
    places = {place: [one[place] for one in results] for place in ("early", "late")}
    return {f"{name}.{place}.agree": _row((one["agree"] for one in part), _all(part)) for place, part in places.items()}


def _tools(name: str, results: Sequence[Result]) -> dict[str, Row]:
    right = _all(results)
    ways = (("agree", "agree"), ("right", "spliced"))
    return {f"{name}.{key}": _row((one[flag] for one in results), right) for key, flag in ways}


def _agent(name: str, results: Sequence[Result]) -> dict[str, Row]:
    right = _all(results)
    saved = sum(one["prefilled"] for one in results) / sum(one["decoded"] for one in results)
    return {
        f"{name}.agree": _row(_all(results, "agree"), right),
        f"{name}.right": _row(_all(results, "spliced"), right),
        f"{name}.saved": [round(saved, 2), len(right)],
    }


def _turns(name: str, results: Sequence[Result]) -> dict[str, Row]:
    found = {}
    for way in ("errata", "both"):
        part = [one[way] for one in results]
        found[f"{name}.{way}.agree"] = _row(_all(part, "agree"), _all(part))
        found[f"{name}.{way}.cosine"] = _row(_all(part, "cosine"))
    return found


def _compared(key: str, part: Sequence[Result], right: Sequence[bool]) -> dict[str, Row]:
    """The rows of caches that were compared with a full prefill."""
    return {
        f"{key}.agree": _row((one["agree"] for one in part), right),
        f"{key}.cosine": _row(one["cosine"] for one in part),
    }


def _moved(name: str, results: Sequence[Result]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for place in ("early", "late"):
        part = [one[place] for one in results]
        for way, key in (("1", place), ("not rotated", f"{place}.not rotated")):
            found |= _compared(f"{name}.{key}", [one[way] for one in part], _all(part))
    return found


def _memory_edits(name: str, results: Sequence[Result]) -> dict[str, Row]:
    right = _all(results)
    return {f"{name}.{way}": _row((one["ways"][way] for one in results), right) for way in EDITS}


def _blocks(name: str, results: Sequence[Result]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for count in results[0]["blocks"]:
        found |= _compared(f"{name}.{count}", [one["blocks"][count] for one in results], _all(results))
    return found


def _sessions(name: str, results: Sequence[Result]) -> dict[str, Row]:
    right = _all(results)
    found = _compared(name, _all(results, "rows"), right)
    tokens = {key: sum(one["tokens"][key] for one in results) for key in results[0]["tokens"]}
    ratios = {f"{name}.{key}": [round(tokens[key] / tokens["ours"], 2), len(right)] for key in tokens if key != "ours"}
    return found | ratios


SUMS: dict[str, Callable[[str, Sequence[Result]], dict[str, Row]]] = {
    "gated": _gated,
    "compose": _composed,
    "mechanism": _mixed,
    "trigger": _mixed,
    "lookup": _mixed,
    "positions": _mixed,
    "facts": _facts,
    "tools": _tools,
    "agent": _agent,
    "turns": _turns,
    "e2": _moved,
    "e3": _memory_edits,
    "e4": _blocks,
    "e5": _sessions,
}


def passes(row: Row) -> bool:
    """Return True if a row counts: it has no decisions, or a full prefill is right in 0.80 of eight or more."""
    return row[0] is not None and (len(row) == 2 or (row[3] >= FEWEST and row[2] >= GATE * row[3]))


# The page.


def stored() -> dict[str, Any]:
    """The records and figures of docs/paper.md."""
    return json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {"records": {}, "models": {}}


def page(data: dict[str, Any]) -> str:
    """The report of these models."""
    text = HEAD.read_text(encoding="utf-8")
    parts = {"figures": figures(data), "left": left_out(data), "models": his_models(data["records"])}
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    return text


def figures(data: dict[str, Any], only: Sequence[str] = ()) -> str:
    """A line for each row that counts for one of the models, or for each of `only`."""
    models, records = data["models"], data["records"]
    lines = [f"| | the author's records | {' | '.join(models)} |", f"| --- | ---: |{' ---: |' * len(models)}"]
    for key, title in TITLES.items():
        mine = [one["rows"].get(key) for one in models.values()]
        if key in only or (not only and any(row and passes(row) for row in mine)):
            lines.append(f"| {title} | {_range(records.get(key, {}))} | {' | '.join(map(_cell, mine))} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    figure = f"{row[0]:.{4 if 0.99 < row[0] < 1 else 2}f}" if passes(row) else ""
    return f"{figure.replace('-0.00', '0.00')} ({row[1]})" if figure else "gate"


def _range(records: dict[str, float]) -> str:
    """The lowest and the highest of his figures, and the number of models."""
    if not records:
        return ""
    low, high = min(records.values()), max(records.values())
    return f"{low:g} ({len(records)})" if low == high else f"{low:g} to {high:g} ({len(records)})"


def left_out(data: dict[str, Any]) -> str:
    """The experiments that do not count, a line each: why, and their figures all the same."""
    models, reasons = data["models"], dict[str, dict[str, str]]()
    for name, one in models.items():
        missing = dict.fromkeys((key for key in SUMS if key not in {*one["counts"], *one["left"]}), "not run")
        for experiment, reason in (missing | one["left"]).items():
            reasons.setdefault(experiment, {})[name] = reason
        for key, row in one["rows"].items():
            if not passes(row):
                experiment, _, rest = key.partition(".")
                cells = reasons.setdefault(experiment, {})
                cells.setdefault(name, f"right in {row[2]} of {row[3]}")
                part = f"; {rest} {row[0]:.2f}" if row[0] is not None else "; both sides of no pair"
                cells[name] += part if part not in cells[name] else ""
    lines = [f"| experiment | {' | '.join(models)} |", f"| --- |{' --- |' * len(models)}"]
    order = sorted(reasons, key=[*SUMS].index)
    return "\n".join(
        lines + [f"| {key} | {' | '.join(reasons[key].get(name, '') for name in models)} |" for key in order]
    )


def his_models(records: dict[str, dict[str, float]]) -> str:
    """His figures, a line for each model."""
    names = sorted({name for key, _ in RECORDS for name in records.get(key, {})})
    if not names:
        return "Name a clone of his repository (`RECORDS=`) for this table."
    lines = [f"| | {' | '.join(title for _, title in RECORDS)} |", f"| --- |{' ---: |' * len(RECORDS)}"]
    for name in names:
        cells = [f"{figure:g}" if (figure := records.get(key, {}).get(name)) is not None else "" for key, _ in RECORDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(data: dict[str, Any]) -> None:
    """Keep the figures, and write docs/paper.md and the table of docs/findings.md."""
    STORE.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")
    FINDINGS.write_text(findings(data), encoding="utf-8")


def findings(data: dict[str, Any]) -> str:
    """docs/findings.md with its table of these models."""
    return marked(FINDINGS.read_text(encoding="utf-8"), "figures", figures(data, SHORT), "paper")
