"""Tests that batched questions get the same answers as single ones, in order, in shared cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from samples import SAMPLES

from notes_cli import config
from notes_cli.editing.methods import ERRATUM, Method
from notes_cli.engine.context import Context
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError
from notes_cli.runtime.answering import IDLE, WAITING, ask, ask_many
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.request import UNLIMITED, Answer, Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, load_skill, parse_skill

from ..conftest import MakeWorkspace

QUESTIONS = ["Why?", "And how many of them, if any?", "Où ça, 日本?", "When", "What is the tier of this one here?"]


@pytest.fixture(scope="module")
def shipped() -> Iterator[Workspace]:
    with Workspace(config.shipped_model(), ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def returns(shipped: Workspace) -> Segment:
    return compile_skill(shipped, load_skill(SAMPLES / "returns"))


def comparable(answer: Answer | NotesError) -> Any:
    """Return the part of an answer that must not depend on the batch."""
    if isinstance(answer, NotesError):
        return str(answer)
    counts, probabilities = replace(answer.counts, shared=0), {}
    if answer.decision:
        probabilities = {name: pytest.approx(one, abs=2e-2) for name, one in answer.decision.probabilities.items()}
    thought = answer.thought.text if answer.thought else None
    pieces = [(piece.kind, piece.name, piece.position, piece.tokens, piece.how) for piece in answer.pieces]
    return answer.text, answer.choice, answer.tokens, answer.stopped, thought, counts, pieces, probabilities


def alone(workspace: Workspace, requests: Sequence[Request]) -> list[Any]:
    found = []
    for request in requests:
        try:
            found.append(comparable(ask(workspace, request)))
        except NotesError as error:
            found.append(str(error))
    return found


def together(workspace: Workspace, requests: Sequence[Request | NotesError], parallel: int = 8) -> list[Any]:
    """Return the outcomes, after checking their order and that the context is empty."""
    used, held = workspace.context.used, workspace.context.n_leased
    outcomes = list(ask_many(workspace, requests, parallel))
    assert [number for number, _ in outcomes] == list(range(len(requests)))
    assert (workspace.context.used, workspace.context.n_leased) == (used, held)
    return [comparable(outcome) for _, outcome in outcomes]


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *((kind, "f16") for kind in ("llama", "qwen3", "gemma3", "phi3", "lfm2", "mamba", "gpt2")),
        *(("qwen3", cache) for cache in ("q8_0", "f32")),
    ],
)
@pytest.mark.parametrize("parallel", [1, 3, 64])
def test_answered_as_alone(make_workspace: MakeWorkspace, skill: Skill, kind: str, cache: str, parallel: int) -> None:
    """Spliced, restored or recurrent, greedy and sampled, generated and chosen, with too few cells at first."""
    workspace = make_workspace(kind, n_ctx=512, cache=cache, name="tiny")  # llama.cpp knows "phi3" in a name
    spliced = [compile_skill(workspace, skill)]
    drawn = SamplerOptions(temperature=1.0, seed=7)
    requests = [
        Request(question, spliced, max_tokens=5 + number, sampling=drawn if number % 3 == 2 else SamplerOptions())
        for number, question in enumerate(QUESTIONS)
    ]
    requests += [Request(question, spliced, choices=["yes", "no", "not sure"]) for question in QUESTIONS]
    assert alone(workspace, requests) == together(workspace, requests, parallel)


def test_reading_is_the_same_as_alone(shipped: Workspace, returns: Segment) -> None:
    """Meaningful answers: direct, after reasoning, corrected, amended, with other system texts."""
    asked = Request("May I return this?", [returns])
    shipping = replace(asked, question="What is the shipping?", choices=["free", "reduced", "full"])
    requests = [asked, replace(asked, think=True), replace(asked, errata=["date=2026-07-01"]), shipping]
    requests += [replace(one, choices=["accepted", "refused"]) for one in requests[:3]]
    requests += [replace(shipping, fields={"tier": "basic"}), replace(shipping, system="Be brief.")]
    requests += [replace(shipping, recompute=True), replace(asked, think=True, max_think=0)]
    requests += [replace(asked, think=True, max_think=5), replace(asked, place="late"), Request("May I return this?")]
    found = together(shipped, 3 * requests, 16)
    assert found == 3 * alone(shipped, requests)
    assert [one[0] for one in found[:5]] == ["accepted", "accepted", "refused", "free", "accepted"]


@pytest.mark.parametrize("method", ["recompute", "suffix"])
def test_a_short_skill_that_is_decoded_is_shared(make_workspace: MakeWorkspace, method: str) -> None:
    """Also where so few tokens are pending that alone the question would be decoded with them."""
    workspace = make_workspace()
    segment = compile_skill(workspace, parse_skill("tier: gold\ndate: today", source="-", default="short"))
    asked = Request("Why?", [segment], fields={"tier": "basic"}, method=Method.parse(method), max_tokens=4)
    requests = [replace(asked, question=question) for question in QUESTIONS]
    assert alone(workspace, requests) == together(workspace, requests)


def test_a_prefix_within_a_decoded_text(shipped: Workspace, returns: Segment) -> None:
    """The second prompt begins with the first one's prefix, and has few more tokens before its question."""
    asked = Request("May I return this?", [returns], decode=["returns"], place="late", max_tokens=4)
    corrected = {"date": "2026-07-01", "amount": "130"}
    requests = [asked, replace(asked, fields=corrected, method=ERRATUM)]
    assert alone(shipped, requests) == together(shipped, requests, 1)


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    append = Context.append

    def counted(self: Context, tokens: Any, *given: Any) -> None:
        found.extend(int(token) for part in tokens.values() for token in part)
        append(self, tokens, *given)

    monkeypatch.setattr(Context, "append", counted)
    return found


def test_nothing_is_decoded_twice(make_workspace: MakeWorkspace, skill: Skill, monkeypatch: pytest.MonkeyPatch) -> None:
    """The left context and the skill exist once, and the rest is decoded with each question; peak cells match."""
    workspace = make_workspace()
    segment = compile_skill(workspace, skill)
    requests = [Request(f"Why {number:02}?", [segment], system="Be kind.", max_tokens=1) for number in range(20)]
    single = ask(workspace, requests[0])
    tokens, placed, peak = decoded(monkeypatch), [], []
    splice, used = Context.splice, Context.used
    monkeypatch.setattr(Context, "splice", lambda *given, **more: (placed.append(1), splice(*given, **more)))
    append = Context.append

    def watched(self: Context, *given: Any) -> None:
        append(self, *given)
        peak.append(used.fget(self))  # type: ignore[attr-defined]

    monkeypatch.setattr(Context, "append", watched)
    answers = [answer for _, answer in ask_many(workspace, requests, 20)]
    [skill_at] = [piece for piece in single.pieces if piece.how == "spliced"]
    shared = skill_at.position + skill_at.tokens
    question = single.counts.total - shared
    assert all(isinstance(one, Answer) and one.counts.shared == shared for one in answers)
    assert all(isinstance(one, Answer) and one.counts.spliced == len(segment) - 1 for one in answers)
    assert placed == [1]
    # A limit of one token: it is chosen from the logits of the question and not decoded, unless it ends there.
    asked = sum(one.tokens for one in answers if isinstance(one, Answer))
    assert len(tokens) - (shared - single.counts.spliced) - 20 * question in range(asked + 1)
    assert max(peak) in range(shared + 20 * question, shared + 20 * (question + 1) + 1)


@pytest.mark.parametrize("size", [256, 512])
def test_a_small_context_takes_fewer_at_once(make_workspace: MakeWorkspace, skill: Skill, size: int) -> None:
    """With a fixed size nothing fails that would not alone, and the size does not change."""
    workspace = make_workspace(n_ctx=size, fixed_size=True)
    spliced = [compile_skill(workspace, skill)]
    requests = [
        replace(Request(question, spliced, max_tokens=6), choices=["yes", "no"] if number % 2 else None, system=system)
        for number, question in enumerate(QUESTIONS)
        for system in (None, "Be kind.")
    ]
    assert alone(workspace, requests) == together(workspace, requests, 16)
    assert workspace.context.options.n_ctx == size


def test_endless_answers_end_with_their_room(make_workspace: MakeWorkspace) -> None:
    """Without a limit no answer takes another's cells, or exceeds the trained context."""
    workspace = make_workspace(n_ctx=256, trained=700)
    requests = [Request(question, max_tokens=UNLIMITED) for question in QUESTIONS]
    answers = [answer for _, answer in ask_many(workspace, requests, 3)]
    for answer in answers:
        assert isinstance(answer, Answer)
        assert answer.stopped == "end" or answer.counts.total + answer.tokens == 700


def test_a_larger_context_that_rotates_otherwise_is_left_alone(make_workspace: MakeWorkspace, skill: Skill) -> None:
    """LongRoPE: below the limit there are not enough cells for all, so that fewer run at once."""
    workspace = make_workspace("phi3", n_ctx=4096, name="tiny")
    spliced = [compile_skill(workspace, skill)]
    requests = [Request(question, spliced, max_tokens=1000, choices=["yes", "no"]) for question in QUESTIONS]
    requests += [Request(question, spliced, max_tokens=1800) for question in QUESTIONS[:3]]
    identity = workspace.identity
    requests[-3:] = [replace(one, sampling=SamplerOptions(temperature=1.0, seed=1)) for one in requests[-3:]]
    answers = [answer for _, answer in ask_many(workspace, requests, 16)]
    assert all(isinstance(answer, Answer) for answer in answers)
    assert workspace.identity == identity


def test_prefixes_are_few(make_workspace: MakeWorkspace, skill: Skill) -> None:
    workspace = make_workspace()
    segment = compile_skill(workspace, skill)
    requests = [Request("Why?", [segment], system=f"Be {number}.", max_tokens=2) for number in range(3 * IDLE)]
    assert alone(workspace, requests) == together(workspace, requests, 2)


def test_input_is_read_as_it_is_needed(make_workspace: MakeWorkspace) -> None:
    """No more requests are read than run at a time, and a slow one holds back only so many."""
    workspace = make_workspace()
    read: list[int] = []

    def requests() -> Iterator[Request]:
        for number in range(1000):
            read.append(number)
            yield Request("Why?", max_tokens=200 if number == 0 else 1)

    outcomes = ask_many(workspace, requests(), 2)
    assert read == []
    assert next(outcomes)[0] == 0
    assert len(read) <= 2 * WAITING + 2
    outcomes.close()  # type: ignore[attr-defined]
    assert workspace.context.n_leased == 0
