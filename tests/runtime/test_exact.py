"""Tests `exact`: rows are reused only if a prefill would compute the same, so that the answer is that of a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import nmse

from bench.quantized import quantize
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
from notes_cli.runtime.prompt import Prompt, rendered
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


FILES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "Q4_0", "Q4_1")
LONG = replace(FEES, text="A fee is paid once, and never again. " * 9)  # more than the first batches of a skill


@pytest.fixture(scope="module")
def quantized(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of a model whose rows are long enough for K-quants."""
    folder, source = tmp_path_factory.mktemp("quantized"), make_model(embd=256)
    files = {kind: folder / f"{kind}.gguf" for kind in FILES}
    types = {kind: quantize(source, kind, path) for kind, path in files.items()}
    assert "Q4_K" in types["Q4_K_M"]
    return files


def bits(sequence: KVSequence) -> bytes:
    """All K/V of a sequence, and the logits after it."""
    found = sequence.logits().tobytes()
    layers = sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype="f32")
    return b"".join([found, *(part.tobytes() for layer in layers for part in (layer.k, layer.v))])


def test_weights_of_any_type(quantized: dict[str, Path]) -> None:
    """A prefill has the bits of a splice where the skill was compiled, and of an exact prompt elsewhere, as it decodes
    in the same batches. The control decodes all in one, which some products round otherwise."""
    differing = []
    for kind, path in quantized.items():
        options = ContextOptions(n_ctx=1024, n_ubatch=512, n_threads=2, type_k="f32", type_v="f32")
        with Workspace(path, options) as workspace:
            segment = compile_skill(workspace, LONG)
            for system in ("Be kind.", None):
                prompt = Prompt("Why?", [segment], system=system)
                prefill, _ = logits(workspace, prompt, splice=False)
                wanted = bits(prefill)
                for how in ({"exact": True}, {"exact": False})[: 1 if system else 2]:
                    sequence, _ = logits(workspace, prompt, **how)
                    assert bits(sequence) == wanted, (kind, how, system)
                    assert (sequence.count("spliced") == len(segment)) == (system is None)
            workspace.context.clear()
            with workspace.sequence() as whole:
                whole.append(prefill.tokens)
                differing += [] if bits(whole) == wanted else [kind]
    assert "Q4_K_M" in differing


@pytest.mark.parametrize("n_ubatch", [64, 512])
def test_rows_of_other_batches(make_model: MakeModel, n_ubatch: int) -> None:
    """Rows of other micro-batches, of other threads, and of a compile that began in the middle of a batch, are decoded
    by an exact prompt."""
    file, sizes = make_model(), {"n_ctx": 1024, "n_ubatch": 512, "n_threads": 1}

    def reason(segment: Segment, **options: int) -> str:
        with Workspace(file, ContextOptions(**(sizes | options))) as workspace:  # type: ignore[arg-type]
            pieces = explain(workspace, Request("Why?", [segment], exact=True)).pieces
            return next(piece.detail for piece in pieces if piece.kind == "splice")

    with Workspace(file, ContextOptions(**(sizes | {"n_ubatch": n_ubatch}))) as workspace:
        segment = compile_skill(workspace, LONG)
        changed = replace(LONG, text=f"{LONG.text} Ever.")
        anew, whole = compile_skill(workspace, changed, known=segment), compile_skill(workspace, changed)
        again = compile_skill(workspace, replace(changed, text=LONG.text[:200]), known=anew)
    assert reason(segment, n_ubatch=n_ubatch) == reason(whole, n_ubatch=n_ubatch) == ""
    others = (
        reason(segment, n_ubatch=32),
        reason(segment, n_threads=2),
        *(reason(one, n_ubatch=n_ubatch) for one in (anew, again)),
    )
    assert all("other threads, or in other batches" in one for one in others)


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
        prompt = Prompt("", self.segments, conversation=Conversation((*system, *turns)), exact=exact)
        layout = self.prefixes.layout(rendered(self.workspace, prompt))
        found, length, _ = self.prefixes.find(layout, "")
        if exact:
            self.prefixes.make_exact(found if length else None)
        begun = self.prefixes.begin(found, length, layout) if found and length else None
        sequence = run(assemble_task(self.workspace, layout.prompt, begun=begun))
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
    assert all(turns_are_equal(workspace, other, segments, exact=exact)) == exact


def test_later_turns_after_a_skill_that_is_decoded(quantized: dict[str, Path]) -> None:
    """In batches of its own, also where they go on after an earlier prompt."""
    options = ContextOptions(n_ctx=2048, n_ubatch=32, n_threads=1)
    with Workspace(quantized["Q4_K_M"], options) as workspace, Workspace(quantized["Q4_K_M"], options) as other:
        segment = replace(compile_skill(workspace, LONG), backend="")
        assert all(turns_are_equal(workspace, other, [segment], exact=True))


def turns_are_equal(workspace: Workspace, other: Workspace, segments: Sequence[Segment], *, exact: bool) -> list[bool]:
    """Return, for each of some prompts, whether its logits after earlier ones are those of a prefill alone."""
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
    return equal


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
        found = explain(workspace, Request("Why?", [segment], exact=True)).pieces
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
