"""Tests `exact`: rows are reused only if a prefill would compute the same, so that the answer is that of a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import nmse

from notes_cli.editing.methods import METHODS, Method
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.pieces import Reason
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import NotesError, SessionError, UnsupportedError
from notes_cli.explanations import why
from notes_cli.runtime.answering import ask, ask_many, explain
from notes_cli.runtime.assemble import assemble, assemble_task
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prefix_cache import PrefixCache
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.erratum import Erratum
from notes_cli.text.messages import Conversation, Message, SkillPart, TextPart
from notes_cli.text.skill import Skill

from ..conftest import MakeModel, MakeWorkspace

FEES = Skill("fees", "", "fee: 12\nA fee is paid once.", (), "-")
LATE = Erratum("date", "2026-07-01", "date=2026-07-01")


def logits(workspace: Workspace, prompt: Prompt, **how: bool) -> tuple[KVSequence, NDArray[np.float32]]:
    workspace.context.clear()
    sequence = assemble(workspace, prompt, **how)
    return sequence, sequence.logits()


@pytest.mark.parametrize(
    ("kind", "system", "order"),
    [
        *((kind, None, ("fees", "returns")) for kind in ("llama", "lfm2", "gpt2")),
        *((kind, "Be kind.", ("returns",)) for kind in ("gemma3", "lfm2")),
    ],
)
def test_logits_are_those_of_a_prefill(
    make_workspace: MakeWorkspace, skill: Skill, kind: str, system: str | None, order: Sequence[str]
) -> None:
    """At any place, exact rows give a prefill's logits. Control: a plain splice that moves does not."""
    workspace = make_workspace(kind)
    compiled = {one.name: compile_skill(workspace, one) for one in (skill, FEES)}
    prompt = Prompt("Why?", [compiled[name] for name in order], [LATE], system)
    _, wanted = logits(workspace, prompt, splice=False)
    exact, found = logits(workspace, prompt, exact=True)
    assert nmse(found, wanted) < 1e-5
    first, *rest = (piece for piece in exact.pieces if piece.kind == "splice")
    assert (first.how == "spliced") == (system is None)
    assert all(piece.how == "decoded" and piece.reason is Reason.INEXACT for piece in rest)
    assert not any(piece.refused for piece in exact.pieces)  # no warning, as it was requested
    plain, moved = logits(workspace, prompt)
    if any(piece.moved for piece in plain.pieces):
        assert nmse(moved, wanted) > 1e-4


FIRST, SECOND = (" ".join(f"{name} is word {n}." for n in range(12)) for name in ("This", "That"))


class Turns:
    """Prompts of a conversation, each of which continues the prefix that the one before has left in the cache."""

    def __init__(self, workspace: Workspace, segments: Sequence[Segment] = ()) -> None:
        self.workspace, self.segments, self.prefixes = workspace, segments, PrefixCache()

    def logits(self, *texts: str, exact: bool) -> tuple[NDArray[np.float32], int]:
        """Return the logits after these messages, of user and assistant in turn, and the number of reused tokens. At
        most 20 tokens are generated after them."""
        system = [Message("system", (SkillPart(segment.name),)) for segment in self.segments]
        roles = cycle(("user", "assistant"))
        turns = [Message(role, (TextPart(text),)) for role, text in zip(roles, texts, strict=False)]
        prompt = Prompt("", self.segments, conversation=Conversation((*system, *turns)))
        parts = parts_of(self.workspace, prompt)
        layout = self.prefixes.layout(prompt, parts, 1, exact=exact)
        found, length, _ = self.prefixes.find(layout, "")
        if exact:
            self.prefixes.make_exact(found if length else None)
        begun = self.prefixes.begin(found, length, layout) if found and length else None
        sequence = run(assemble_task(self.workspace, prompt, parts, exact=exact, begun=begun))
        logits = sequence.logits()
        cache = self.prefixes.add(sequence, layout, "")
        list(sequence.generate(Sampler(SamplerOptions(temperature=0)), 20))
        self.prefixes.set_idle(cache)
        self.prefixes.evict_beyond(1)
        return logits, length


@pytest.mark.parametrize(
    ("kind", "spliced", "exact"),
    [("llama", True, True), ("qwen3", False, True), ("gpt2", False, True), ("llama", False, False)],
)
def test_later_turns_have_the_bits_of_a_prefill(
    make_workspace: MakeWorkspace, skill: Skill, kind: str, spliced: bool, exact: bool
) -> None:
    """They continue where a prefill begins a batch, after the same ones. The control continues anywhere."""
    workspace, other = (make_workspace(kind, n_ctx=2048, n_ubatch=32) for _ in range(2))
    segments = [compile_skill(workspace, skill)] if spliced else []
    turns, alone = Turns(workspace, segments), Turns(other, segments)
    equal: list[bool] = []
    for texts in (
        [SECOND[:30]],
        [FIRST],
        [FIRST, "Yes.", SECOND],
        [FIRST, "Yes.", f"{SECOND} Why?"],
        [FIRST, "Yes.", SECOND, "No.", "Why?"],
        [FIRST, "No.", SECOND, "No.", "Why?"],
        [FIRST, "No.", SECOND[:-60] + FIRST[-40:]],
        [FIRST],
        [f"{FIRST} Why?"],
    ):
        (found, reused), (wanted, none) = turns.logits(*texts, exact=exact), alone.logits(*texts, exact=exact)
        alone.prefixes.close()
        assert not none and (reused or len(equal) < 2)
        equal.append(np.array_equal(found, wanted))
    assert all(equal) == exact


@pytest.mark.parametrize("method", sorted(METHODS))
def test_edits_are_exact_or_refused(workspace: Workspace, skill: Skill, method: str) -> None:
    """A method that leaves rows of the old value is refused; any other gives the logits of a prefill of its text."""
    segment, values = compile_skill(workspace, skill), {"date": "2026-07-01"}
    request = Request("Why?", [segment], fields=values, method=Method(method), exact=True, max_tokens=1)
    if not METHODS[method].exact:
        with pytest.raises(NotesError, match="exact rows were asked for"):
            ask(workspace, request)
        return
    prompt = Prompt("Why?", [segment], fields=values, method=Method(method))
    _, wanted = logits(workspace, prompt, splice=False)
    _, found = logits(workspace, prompt, exact=True)
    assert nmse(found, wanted) < 1e-5


def test_auto_takes_an_exact_method(workspace: Workspace, skill: Skill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured method that leaves rows of the old value is replaced by the erratum, with the reason."""
    monkeypatch.setattr("notes_cli.runtime.resolve.method_for", lambda *_, **__: (Method("field"), "measured"))
    request = Request("Why?", [compile_skill(workspace, skill)], fields={"date": "2026-07-01"}, exact=True)
    settings = explain(workspace, request).settings
    assert settings.method == Method() and "exact" in str(settings.why)


@pytest.mark.parametrize(
    ("options", "blocks", "parts", "reason"),
    [
        ({}, 2, {}, "compiled in 2 blocks"),
        ({}, None, {"backend": ""}, "not known"),  # as that of exported and imported K/V
        ({"type_k": "q8_0", "type_v": "q8_0", "flash_attention": "on"}, None, {}, "another type"),
    ],
)
def test_rows_that_a_prefill_would_not_compute(
    make_model: MakeModel, skill: Skill, options: dict[str, str], blocks: int | None, parts: dict[str, str], reason: str
) -> None:
    """Blocks without attention to each other, K/V of another machine or type, are decoded, also in place."""
    with Workspace(make_model("qwen3"), ContextOptions(n_ctx=512, n_threads=1, **options)) as workspace:  # type: ignore[arg-type]
        segment = replace(compile_skill(workspace, skill, blocks=blocks), **parts)
        found = explain(workspace, Request("Why?", [segment], exact=True)).sequence.pieces
        piece = next(one for one in found if one.kind == "splice")
        assert piece.how == "decoded" and reason in why(piece)


@pytest.mark.parametrize(("compiled", "asked"), [("on", "off"), ("off", "on")])
def test_rows_of_other_arithmetic(make_model: MakeModel, skill: Skill, compiled: str, asked: str) -> None:
    """With flash attention switched rows round otherwise: they are decoded, and the logits are those of a prefill."""
    file = make_model("qwen3")
    sizes = {"n_ctx": 512, "n_threads": 1}
    with Workspace(file, ContextOptions(**sizes, flash_attention=compiled)) as workspace:  # type: ignore[arg-type]
        segment = compile_skill(workspace, skill)
    with Workspace(file, ContextOptions(**sizes, flash_attention=asked)) as workspace:  # type: ignore[arg-type]
        prompt = Prompt("Why?", [segment])
        _, wanted = logits(workspace, prompt, splice=False)
        exact, found = logits(workspace, prompt, exact=True)
        [piece] = [one for one in exact.pieces if one.kind == "splice"]
        assert piece.how == "decoded" and np.array_equal(found, wanted)
        assert f"flash attention {compiled}" in why(piece) and f"flash attention {asked}" in why(piece)


def test_strict_refuses_what_is_not_exact(workspace: Workspace, skill: Skill) -> None:
    """With both, a skill is reused as it is, or the question is refused."""
    segment = compile_skill(workspace, skill)
    ask(workspace, Request("Why?", [segment], exact=True, strict=True, max_tokens=1))
    with pytest.raises(UnsupportedError, match="preceded by a different context"):
        ask(workspace, Request("Why?", [segment], system="Be kind.", exact=True, strict=True, max_tokens=1))


def test_many_questions(workspace: Workspace, skill: Skill) -> None:
    """In a batch each question may be exact, and exact ones do not share rows with others."""
    segment = compile_skill(workspace, skill)
    requests = [
        Request(question, [segment], system="Be kind.", exact=exact, max_tokens=2)
        for question in ("Why?", "And when?")
        for exact in (True, False)
    ]
    for number, outcome in ask_many(workspace, requests):
        assert not isinstance(outcome, NotesError)
        assert (outcome.counts.spliced == 0) == requests[number].exact
        assert outcome.pieces == ask(workspace, requests[number]).pieces


def test_a_session_begins_exactly(workspace: Workspace, skill: Skill) -> None:
    """The first turn may be exact, and later ones continue from its rows; requested later it is refused."""
    segment = compile_skill(workspace, skill)
    with Sessions(workspace.paths.sessions).locked("mine", new=True) as stored:
        session = Session(workspace, stored)
        session.ask(Request("Why?", [segment], system="Be kind.", exact=True, max_tokens=1))
        session.ask(Request("And when?", max_tokens=1))
        tokens, found = session.sequence.tokens, session.sequence.logits()
        with pytest.raises(SessionError, match="exact"):
            session.ask(Request("And how?", exact=True, max_tokens=1))
        session.close()
    with workspace.sequence() as sequence:
        sequence.append(tokens)
        assert nmse(found, sequence.logits()) < 1e-5
