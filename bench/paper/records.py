"""The author's records, read from a clone of his repository: figures by row of the report and by model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notes_cli.errors import NotesError

Records = dict[str, dict[str, float]]  # row of the report -> model -> figure

# Files of results/, by the beginning of their names, and the way to each figure. Where two files have a figure of a
# model, the later line of this table counts.
FILES = {
    "agent_rigorous_": {"agent.agree": "agreement", "agent.right": "unified_correct"},
    "composable_facts_": {
        "facts.early.agree": "results/early/agreement",
        "facts.late.agree": "results/late/agreement",
    },
    "composable_agentic_": {"tools.agree": "toolcall_agreement", "tools.right": "precompiled_acc"},
    "compose_edit_": {"compose.field": "agg/in_place/composed", "compose.erratum": "agg/erratum/composed"},
    "editkv_horizon_": {"turns.errata.agree": "summary/mean_agree", "turns.errata.cosine": "summary/mean_logit_cos"},
    "mech_diverse_": {
        "gated.full": "by_mode/nonreasoning/summary/oracle/P_correct",
        "gated.field": "by_mode/nonreasoning/summary/field_only/P_correct",
        "gated.erratum": "by_mode/nonreasoning/summary/erratum/P_correct",
    },
    "baseline_table_": {"gated.both": "methods/field+erratum/P_correct"},
    "mech_causal_patch_": {
        "mechanism.changed": "agg/field_only_recovery/mean",
        "mechanism.downstream": "agg/full_downstream_recovery/mean",
    },
    "mechd_general_": {"lookup.changed": "agg/rag_lookup/field_only_recovery/mean"},
    "mechd_xcond_": {
        "trigger.changed": "patch/trigger_only_recovery/mean",
        "trigger.after": "patch/notes_recovery/mean",
    },
    "mechd_specificity_": {"positions.top": "agg/topk/8/mean", "positions.random": "agg/randk/8/mean"},
    "mechd_inject_": {"mechanism.injected": "agg/follows_injected_rate"},
    "mechd_replicate_": {
        "mechanism.changed": "primary/field_only/mean",
        "mechanism.downstream": "primary/full_downstream/mean",
        "trigger.changed": "dissoc/trigger_only/mean",
        "trigger.after": "dissoc/notes/mean",
        "positions.top": "specificity/top_k/mean",
        "positions.random": "specificity/random_k/mean",
        "mechanism.injected": "injection/follow_rate/mean",
    },
}
# mem/results/summary.json: by model, or by "model|placement".
MEMORY = {
    "e2.early.agree": ("e2/seam_doseresponse", "|early", "1/dec_agree"),
    "e2.early.cosine": ("e2/seam_doseresponse", "|early", "1/cos"),
    "e2.late.agree": ("e2/seam_doseresponse", "|late", "1/dec_agree"),
    "e2.late.cosine": ("e2/seam_doseresponse", "|late", "1/cos"),
    "e3.full": ("e3/by_model", "", "full_recompute/correct"),
    "e3.field": ("e3/by_model", "", "in_place/correct"),
    "e3.erratum": ("e3/by_model", "", "erratum/correct"),
    "e4.1.cosine": ("e4/by_model", "", "1/cos"),
    "e4.16.cosine": ("e4/by_model", "", "16/cos"),
    "e4.16.agree": ("e4/by_model", "", "16/dec_agree"),
    "e5.cosine": ("e5/by_model", "", "proposed_cos"),
}
SKIPPED = re.compile(r"_int8|_p6|_full\b")  # other weights, or another schedule, of models that are there


def read_records(clone: Path) -> Records:
    """Read the figures of all his models. Raises NotesError where there are none."""
    found: Records = {}
    try:
        for prefix, rows in FILES.items():
            for path in sorted((clone / "results").glob(f"{prefix}*.json")):
                if SKIPPED.search(path.stem):
                    continue
                data = json.loads(path.read_text(encoding="utf-8"))
                name = next(_named(data))
                for row, way in rows.items():
                    if (figure := _at(data, way)) is not None:
                        found.setdefault(row, {})[_short(name)] = round(float(figure), 3)
        summary = json.loads((clone / "mem" / "results" / "summary.json").read_text(encoding="utf-8"))
        for row, (place, ending, way) in MEMORY.items():
            for name, data in (_at(summary, place) or {}).items():
                if name.endswith(ending) and (figure := _at(data, way)) is not None:
                    found.setdefault(row, {})[_short(name.removesuffix(ending))] = round(float(figure), 3)
    except (OSError, ValueError) as error:
        raise NotesError(f"{clone}: the author's records cannot be read ({error})") from error
    if not found:
        raise NotesError(f"{clone}: it has no results/ of the author")
    return found


def _at(data: Any, way: str) -> Any:
    """Return the value at the path "a/b/c"; None if it is missing."""
    for key in way.split("/"):
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _named(data: dict[str, Any]) -> Iterator[str]:
    yield from (str(part["model"]) for part in (data, *data.values()) if isinstance(part, dict) and "model" in part)


def _short(name: str) -> str:
    """A model's name without its publisher and what all names have."""
    name = name.rsplit("/", 1)[-1].replace("DeepSeek-R1-Distill", "R1").replace("gemma", "Gemma")
    return re.sub(r"Meta-|-Instruct|-it\b|-v0\.3|-bnb-4bit|-FP8|-bf16", "", name).replace("-", " ")
