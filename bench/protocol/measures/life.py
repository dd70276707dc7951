"""Long conversations: sessions that were compiled alone, spliced one after the other, against the recompute of all.

What is asked is asked after the last session; texts are those of bench/protocol/lives.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.experiments.cases import SYSTEM, near_tie, skill_of
from bench.experiments.table import Row
from bench.protocol.lives import Life, Question, live
from bench.protocol.measures.beside import beside
from bench.protocol.measures.greedy import ANSWER
from bench.protocol.texts import Next
from notes_cli.engine.decision import Decision, decide
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.workspace import Workspace
from training.tiny.measure import said

# Splice, and rotate what is spliced: without that, a row says nothing of its session's place (the control).
WAYS = {"recompute": (False, True), "spliced": (True, True), "unrotated": (True, False)}
SESSIONS = (5, 10, 30)  # the last is what is judged; the others tell how much of a loss is the length's

Asked = tuple[str, NDArray[np.float32], Decision]  # the greedy answer, logits, and which of the choices


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    """A row a question, of a life of each length."""
    for number, rng in texts.rngs("life", cases):
        for sessions in SESSIONS:
            life = live(texts, rng, sessions)
            prompt = prompt_of(workspace, life)
            found = [asked(workspace, prompt, life.questions, *way) for way in WAYS.values()]
            tokens = sum(map(len, prompt.segments))
            for question, *answers in zip(life.questions, *found, strict=True):
                row: Row = {"case": number, "sessions": sessions, "tokens": tokens}
                yield row | compared(question, *answers)


def prompt_of(workspace: Workspace, life: Life) -> Prompt:
    """All sessions in their order, nothing asked yet."""
    texts = enumerate(life.sessions, 1)
    return Prompt("", [compile_skill(workspace, skill_of(text, f"session-{n}")) for n, text in texts], system=SYSTEM)


def asked(
    workspace: Workspace, prompt: Prompt, questions: Sequence[Question], splice: bool, rotate: bool
) -> list[Asked]:
    """Each question after the same rows, without those before it. Raise UnsupportedError for a life that is longer
    than the model can read, and where a session cannot be spliced."""
    every = [parts_of(workspace, replace(prompt, question=question.text)) for question in questions]
    stem, ends = every[0].stem, [parts.tokens[-1] for parts in every]
    room = max(map(len, ends)) + ANSWER
    if workspace.longest is not None and stem.count + room > workspace.longest:
        raise UnsupportedError(f"a life takes {stem.count + room} tokens, and the model reads {workspace.longest}")
    found = []
    with assemble(workspace, prompt, splice=splice, rotate=rotate, strict=True, room=room, parts=stem) as notebook:
        notebook.flush()  # the first question finds rows like those that the others find
        length = len(notebook)
        for question, end in zip(questions, ends, strict=True):
            notebook.append(end, "question")
            logits, decision = notebook.logits(), decide(notebook, question.choices)
            found.append((said(workspace, notebook, ANSWER), logits, decision))
            notebook.truncate(length)
    return found


def compared(question: Question, recompute: Asked, spliced: Asked, unrotated: Asked) -> Row:
    """The row of a question: what is right and the same, and whether an answer was right before a later session
    changed it."""
    (reference, wanted, sure), (chosen, logits, decision) = recompute, spliced
    changed = bool(question.before)
    return {
        "sort": question.sort,
        "kind": question.kind,
        "right": chosen == question.answer,
        "recompute_right": reference == question.answer,
        "old": chosen == question.before if changed else "",
        "recompute_old": reference == question.before if changed else "",
        "same": chosen == reference,
        "unrotated_right": unrotated[0] == question.answer,
        "unrotated_same": unrotated[0] == reference,
        "choice_same": decision.choice == sure.choice,
        "near": near_tie(sure),
        **beside(logits, wanted, decision),
    }
