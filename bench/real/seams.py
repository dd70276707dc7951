"""Measures spliced passages of the author's facts by number of boundary tokens, place, and context of compilation.

Each answer is compared with that after a full prefill of the same tokens. Two controls show how much that comparison
varies: `exact`, and a full prefill after a system text in other words.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.real.run import answers
from bench.real.tasks import Fact
from bench.results import Result, Results
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.messages import marker
from notes_cli.text.skill import parse_skill

SYSTEM = "You answer questions about the texts that follow. Answer briefly."
REWORDED = "Answer questions about the following texts. Be brief."
NEUTRAL = "You are a helpful assistant."
SEAMS = (0, 1, 4, 16)
LEFTS = ("opening", "text", "chat")
PLACES = ("early", "late")
SOME, FEW = 4, 8  # every fourth group of facts in other contexts and after another system text; with `exact`
GROUP = 4  # facts, one of each kind of passage


def lefts(workspace: Workspace) -> dict[str, Tokens]:
    """Return contexts to compile in: the system message's opening (as `notes` does), that and a text, and a message of
    the user after a system message."""
    opening, tokenize = workspace.left_context, workspace.model.tokenize
    mark = marker(0)
    messages = [{"role": "system", "content": NEUTRAL}, {"role": "user", "content": mark}]
    chat = tokenize(workspace.template.cut(messages, [mark])[0], special=True)
    text = np.concatenate([opening, tokenize(f"{NEUTRAL}\n\n")])
    return {"opening": opening, "text": text, "chat": workspace.with_bos(chat)}


def measure(workspace: Workspace, given: Sequence[Fact], results: Results) -> list[dict[str, Any]]:
    """Measure the facts that have no result yet. Returns a row for each place and way."""
    contexts = lefts(workspace)
    for number, fact in enumerate(given):
        if str(number) not in results.found:
            results.add(str(number), _fact(workspace, fact, number, contexts))
            print(f"{time.strftime('%H:%M:%S')} fact {number} of {len(given)}", file=sys.stderr, flush=True)
    return rows([results.found[str(number)] for number in range(len(given))])


def _fact(workspace: Workspace, fact: Fact, number: int, contexts: dict[str, Tokens]) -> Result:
    """Return, by place and way, whether the answer is right, and its text."""
    some, few = (number // GROUP % every == 0 for every in (SOME, FEW))
    kinds = LEFTS if some else LEFTS[:1]
    segments = {left: _compile(workspace, fact, contexts[left]) for left in kinds}

    def ask(place: str, left: str = "opening", system: str = SYSTEM, **how: Any) -> list[Any]:
        prompt = Prompt(fact.question.ask, [segments[left]], system=system, place=place)
        (outcome,) = answers(workspace, [prompt], **how)
        return [fact.question.right(outcome.text), outcome.text]

    found: Result = {}
    for place in PLACES:
        found[place] = {"full": ask(place, splice=False)}
        found[place] |= {f"opening {seam}": ask(place, seam=seam) for seam in SEAMS}
        found[place] |= {f"{left} 1": ask(place, left) for left in kinds[1:]}
        found[place] |= {"exact": ask(place, exact=True)} if few else {}
    if some:
        found["early"]["reworded"] = ask("early", system=REWORDED, splice=False)
    return found


def _compile(workspace: Workspace, fact: Fact, left: Tokens) -> Segment:
    usual = workspace.left_context
    workspace.left_context = left
    try:
        return compile_skill(workspace, parse_skill(fact.passage, source="passage", default="passage"))
    finally:
        workspace.left_context = usual


def rows(found: Sequence[Result]) -> list[dict[str, Any]]:
    """Count the answers of each place and way that are right, that are right or wrong as the full prefill's, and that
    are the same text."""
    counted = []
    for place in PLACES:
        for way in found[0][place]:
            pairs = [(one[place][way], one[place]["full"]) for one in found if way in one[place]]
            counted.append(
                {
                    "place": place,
                    "way": way,
                    "asked": len(pairs),
                    "right": sum(one[0] for one, _ in pairs),
                    "reference_right": sum(full[0] for _, full in pairs),
                    "same_verdict": sum(one[0] == full[0] for one, full in pairs),
                    "same_text": sum(one[1] == full[1] for one, full in pairs),
                }
            )
    return counted
