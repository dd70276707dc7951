"""The same decisions and the same note index with other caches, and with weights of other types.

Each setting is a row of the case. The first one is as the model was given, and the others are compared with it, too.
Each has a context of its own. Weights in other types are made by llama.cpp of those that the file has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiments.cases import SYSTEM, near_tie, segments_of
from bench.experiments.table import Row
from bench.protocol.measures.beside import beside
from bench.protocol.measures.greedy import answer, room
from bench.protocol.measures.mixing import acts, began, excluded, mixes_of
from bench.protocol.measures.splice import last
from bench.protocol.measures.weights import KINDS, write_as
from bench.protocol.texts import Next, Policies
from notes_cli.engine.decision import decide
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

CACHES = ("f16", "q8_0", "q4_0")  # of K and V

Settings = Mapping[str, Workspace]
Opened = Callable[[Workspace], AbstractContextManager[Settings]]


@contextmanager
def caches(workspace: Workspace) -> Iterator[Settings]:
    """The model with each cache."""
    with ExitStack() as opened:
        yield {
            kind: opened.enter_context(
                Workspace(workspace.model.path, replace(workspace.options, type_k=kind, type_v=kind))
            )
            for kind in CACHES
        }


@contextmanager
def weights(workspace: Workspace) -> Iterator[Settings]:
    """The model, and its weights in each type that they do not have."""
    found = {workspace.model.quantization.lower(): workspace}
    with TemporaryDirectory() as folder, ExitStack() as opened:
        for kind in KINDS:
            if kind in found:
                continue
            path = write_as(workspace.model.path, Path(folder, f"{kind}.gguf"), kind)
            found[kind] = opened.enter_context(Workspace(path, workspace.options))
        yield found


def decisions(name: str, opened: Opened) -> Callable[[Workspace, int, Next], Iterator[Row]]:
    """What measures decisions about skills that are spliced after others, beside their recompute. `name`: of what its
    texts are drawn for."""

    def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
        with opened(workspace) as settings:
            for number, case in texts.policies(name, cases, skills=(2, 3)):
                given = ""
                for setting, there in settings.items():
                    row = _decided(there, case)
                    recompute = str(row.pop("recompute"))
                    given = given or recompute
                    as_given = recompute == given
                    yield {"case": number, "kind": case.kind, "setting": setting, "as_given": as_given, **row}

    return measure


def _decided(workspace: Workspace, case: Policies) -> Row:
    segments = last(segments_of(workspace, case.skills), case.target)
    prompt = Prompt(case.question, segments, system=SYSTEM)
    found = {}
    for splice in (False, True):
        with assemble(workspace, prompt, splice=splice, strict=True, room=room(prompt)) as notebook:
            logits, decision = notebook.logits(), decide(notebook, case.choices)
            found[splice] = answer(workspace, notebook, prompt, case), logits, decision
    (recompute, wanted, sure), (chosen, logits, decision) = found[False], found[True]
    return {
        "recompute": recompute,
        "right": chosen == case.answer,
        "recompute_right": recompute == case.answer,
        "same": chosen == recompute,
        "near": near_tie(sure),
        **beside(logits, wanted, decision),
    }


def notes(name: str, opened: Opened) -> Callable[[Workspace, int, Next], Iterator[Row]]:
    """What measures where the decision rests, with fields above the rules. A case in which the model as it was given
    decides alike is left out of all settings; where another one does, that is told, and it has no recovery."""

    def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
        with opened(workspace) as settings:
            for number, case in texts.cases(name, cases):
                found = {setting: _probed(there, number, case) for setting, there in settings.items()}
                given, *_ = found.values()
                for setting, row in found.items():
                    yield {**(excluded(number, case) if given["alike"] else row), "setting": setting}

    return measure


def _probed(workspace: Workspace, number: int, case: Policies) -> Row:
    row: Row = {"case": number, "kind": case.kind, "alike": True, "near": ""}
    row |= dict.fromkeys(("field", "after", "field_recovery", "after_recovery"), "")
    for mixes in mixes_of(workspace, case):
        field, after = mixes.field_only(), mixes.after_only()
        row |= {**began(number, case, mixes), "alike": False}
        row |= {"field": acts(field), "after": acts(after), "field_recovery": field, "after_recovery": after}
    return row
