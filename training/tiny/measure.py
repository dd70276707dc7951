"""The bars of the subject, in our own engine: `python -m training.tiny.measure FILE.gguf [--cases N] [--seed S]`.

For each kind of rule: right decisions (direct, after a chain of thought, after an erratum; of known and of held-out
words); where a decision rests when fields are above the rules and when below (note index NI: the share of cases that
act on the new value if all rows after the field are of it, less that if only the field's rows are); with a chain of
thought; and whether a spliced skill decides as the recompute, with its keys rotated and not, after an older version.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

from notes_cli.editing.methods import Method
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import parse_skill
from training.policies import REASON_CUE
from training.tiny import world
from training.tiny.mixes import AlikeError, Mixes

SYSTEM = "You are a helpful assistant."
Found = dict[str, list[bool]]


def said(workspace: Workspace, sequence: KVSequence, tokens: int = 72) -> str:
    """The greedy answer."""
    with Sampler(SamplerOptions(temperature=0.0)) as sampler:
        return workspace.model.text(sequence.generate(sampler, tokens)).strip()


def outcome(text: str, choices: Sequence[str]) -> str:
    """The outcome that was named last."""
    found = re.findall(r"(?<!\w)(" + "|".join(map(re.escape, choices)) + r")(?!\w)", text)
    return found[-1] if found else ""


def segment(workspace: Workspace, text: str, name: str) -> Segment:
    return compile_skill(workspace, parse_skill(text, source=name, default=name))


def decisions(workspace: Workspace, case: world.Case, found: Found, tag: str) -> None:
    """Right or wrong, each way."""

    def answer(prompt: Prompt, **how: bool) -> str:
        return said(workspace, assemble(workspace, prompt, room=90, **how))

    text, changed = (case.draft.text({**case.draft.values, case.rule.field: one}) for one in (case.old, case.new))
    own, own_changed = (segment(workspace, one, "own") for one in (text, changed))
    others = [segment(workspace, d.text(), f"other{i}") for i, d in enumerate(case.others)]
    old, new = case.right
    for form, skill, right, values in (
        ("plain", own, old, {}),
        ("corrected", own_changed, new, {}),
        ("erratum", own, new, {case.rule.field: case.new}),
    ):
        method = Method.parse("erratum") if values else Method()
        prompt = Prompt(case.question, [*others, skill], fields=values, method=method)
        found[f"{tag} {form}, direct"].append(answer(prompt, splice=False) == right)
        thought = answer(replace(prompt, question=case.question + REASON_CUE), splice=False)
        found[f"{tag} {form}, reasoned"].append(outcome(thought, case.rule.choices) == right)
    prompt = Prompt(case.question, [*others, own], system=SYSTEM)
    found[f"{tag} spliced as recomputed"].append(answer(prompt) == answer(prompt, splice=False))
    prompt = Prompt(case.question, [segment(workspace, changed, "older"), own], system=SYSTEM)
    reference = answer(prompt, splice=False)
    found[f"{tag} two versions: right"].append(reference == old)
    for rotate in (True, False):
        name = f"{tag} two versions: {'rotated' if rotate else 'not rotated'} as recomputed"
        found[name].append(answer(prompt, rotate=rotate) == reference)


def probes(workspace: Workspace, case: world.Case, found: Found, tag: str) -> None:
    """Decisions of a mix of two compiles, with fields above the rules and below, directly and after a thought."""
    for below in (False, True):
        own = segment(workspace, case.draft.text(below=below), "own")
        where, value = f"{tag} fields {'below' if below else 'above'}", (case.rule.field, case.new)
        try:
            mixes = Mixes(workspace, own, *value, question=case.question, choices=case.rule.choices)
        except AlikeError:
            found[f"{where}: decides the same"].append(True)
            continue
        found[f"{where}: decides the same"].append(False)
        found[f"{where}: field"].append(mixes.field_only() > 0.5)
        found[f"{where}: follow"].append(mixes.after_only() > 0.5)
        try:
            mixes = Mixes(workspace, own, *value, question=case.question + REASON_CUE)
        except AlikeError:
            continue
        for name, mix in (("field", mixes.field_only), ("follow", mixes.after_only)):
            mix()
            right = outcome(said(workspace, mixes.sequence), case.rule.choices) == case.right[1]
            found[f"{where}, thinking: {name}"].append(right)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", default="1")
    args = parser.parse_args()
    with Workspace(args.model, ContextOptions(n_ctx=2048, n_threads=1, flash_attention="off")) as workspace:
        for whole, kind in product((1.0, 0.0), world.KINDS):
            level = world.Level(rules=(1, 2), rows=(2, 3), kinds=(kind,), whole=whole, below=0.0)
            found: Found = defaultdict(list)
            tag = f"{kind}, {'known' if whole else 'held-out'} words,"
            for case in world.cases(args.cases, level, f"measure {args.seed}", held=True):
                decisions(workspace, case, found, tag)
                probes(workspace, case, found, tag)
            for name, hits in found.items():
                print(f"{name:70} {sum(hits) / len(hits):.3f}  of {len(hits)}")
            for at in (f"{tag} fields above", f"{tag} fields below"):
                if found[f"{at}: field"]:
                    field, follow = (mean(found[f"{at}: {name}"]) for name in ("field", "follow"))
                    print(f"{at}: NI {follow - field:+.2f}", flush=True)


if __name__ == "__main__":
    main()
