"""Tests reasoning: separated from the answer, ended at limits, followed by decisions, mostly with scripted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from samples import SAMPLES

from notes_cli import config
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import EngineError
from notes_cli.runtime import generate as room
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import (
    ANSWER_RESERVE,
    Decision,
    ReasoningTrace,
    Reply,
    ReplyGenerator,
    Say,
    decide,
    decide_after_reasoning,
    ignore_text,
)
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.grammar import gbnf_grammar
from notes_cli.text.reasoning import Reasoning
from notes_cli.text.skill import load_skill
from notes_cli.text.tools import Calls, form_of

from ..conftest import MakeWorkspace
from ..text.wild import WILD
from ..thinkers import HARMONY, OPENED, PLAIN, RESPONSE, SWITCH, UNAWARE, Scripted

Script = Callable[[Workspace, str], None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return lambda workspace, text: monkeypatch.setattr(room, "Sampler", Scripted(workspace.model, text))


@pytest.fixture(scope="module")
def shipped() -> Iterator[Workspace]:
    with Workspace(config.shipped_model(), ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        yield workspace


def run_thinking(workspace: Workspace, sequence: KVSequence, limit: int, say: Say = ignore_text) -> ReasoningTrace:
    return run(ReplyGenerator(workspace, max_think=limit, on_reasoning=say).reason(sequence))


def run_replying(
    workspace: Workspace, sequence: KVSequence, limit: int, thought: ReasoningTrace | None = None, **how: Any
) -> Reply:
    return run(ReplyGenerator(workspace, max_tokens=limit, **how).reply(sequence, thought))


def run_deciding(*given: Any) -> Decision:
    return run(decide_after_reasoning(*given))


def spoken(speaker: ReplyGenerator, sequence: KVSequence, request: Callable[[int], dict[int, float]]) -> Reply:
    """Return the output if tokens at some places get other logits: `wish` has them, by token."""
    real = sequence.try_logits

    def changed() -> Any:
        logits = real()
        if logits is not None:
            logits = logits.copy()
            for token, value in request(len(sequence)).items():
                logits[token] = value
        return logits

    sequence.try_logits = changed  # type: ignore[method-assign]
    try:
        return run(speaker.reply(sequence))
    finally:
        del sequence.try_logits


def shown(sequence: KVSequence) -> str:
    model = sequence.context.model
    return b"".join(model.token_bytes(int(token), special=True) for token in sequence.tokens).decode()


@pytest.mark.parametrize(
    ("template", "chain", "answer", "between"),
    [
        (SWITCH, "Let me see.</think>\n\n", "Yes.", "<think>\nLet me see.</think>\n\nYes."),
        (SWITCH, "Let me see.</think>", "Yes.", "<think>\nLet me see.</think>\n\nYes."),
        (OPENED, "\nA < b.\n</think>\n\n", "No.", "<think>\n\nA < b.\n</think>\n\nNo."),
        (UNAWARE, "é</think>", "Ja.", "<think>\né</think>\n\nJa."),
        (
            HARMONY,
            "Simple.<|end|>",
            "Yes.",
            "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ),
        (RESPONSE, "Hm.</think>", "Yes.</response> And more.", "<think>Hm.</think>\n<response>Yes.</response>"),
    ],
)
def test_the_answer_is_told_from_the_chain(
    make_workspace: MakeWorkspace, script: Script, template: str, chain: str, answer: str, between: str
) -> None:
    """For every kind of marks, here plain text split into bytes: neither contains a mark, both are streamed."""
    workspace = make_workspace(template=template)
    sequence = assemble(workspace, Prompt("Why?", think=True), room=200)
    prompt = len(sequence)
    thoughts: list[str] = []
    words: list[str] = []
    script(workspace, chain)
    thought = run_thinking(workspace, sequence, 100, thoughts.append)
    start = len(sequence)
    assert thought.finished and thought.tokens == start - prompt
    script(workspace, answer)
    found = run_replying(workspace, sequence, 100, thought=thought, on_text=words.append)
    assert found.text == answer.split("</response>")[0] == "".join(words)
    assert thought.text == chain.split("</")[0].split("<|")[0].strip() == "".join(thoughts).strip()
    assert found.tokens == len(sequence) - start and found.thought is thought
    assert shown(sequence).endswith(between)


@pytest.mark.parametrize(("template", "limit"), [(OPENED, 0), (SWITCH, 5), (HARMONY, 0), (RESPONSE, 5)])
def test_a_mark_at_the_limit(make_workspace: MakeWorkspace, script: Script, template: str, limit: int) -> None:
    """Endless reasoning is ended, at once with a limit of zero, and the answer can begin."""
    workspace = make_workspace(template=template)
    sequence = assemble(workspace, Prompt("Why?", think=True), room=200)
    before = shown(sequence)
    script(workspace, "abcdefgh" * 50)
    thought = run_thinking(workspace, sequence, limit)
    assert (thought.text, thought.finished) == ("abcdefgh"[:limit], False)
    assert shown(sequence) == before + thought.text + workspace.reasoning.closing
    assert len(sequence.logits()) == workspace.model.n_vocab


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", "gpt2"])
def test_an_end_token_ends_the_chain(make_workspace: MakeWorkspace, script: Script, kind: str) -> None:
    """If the model stops without its mark, it is inserted, and the reasoning counts as complete, in any cache."""
    workspace = make_workspace(kind, template=SWITCH)
    sequence = assemble(workspace, Prompt("Why?", think=True), room=200)
    script(workspace, "Done </thi")
    thought = run_thinking(workspace, sequence, 50)
    assert (thought.text, thought.finished) == ("Done </thi", True)
    assert shown(sequence).endswith("<think>\nDone </thi</think>\n\n")
    assert run_deciding(workspace, sequence, ["a", "b"], thought) == decide(sequence, ["a", "b"])


@pytest.mark.parametrize(
    ("close", "answer", "rest", "between"),
    [
        ("<|im_start|>", "B", "", "A<|im_start|>\nB"),  # matched though it prints as nothing
        ("<", " B", "|im_start|>", "A<|im_start|> B"),  # the rest of the token is part of the answer
    ],
)
def test_a_mark_in_a_special_token(
    make_workspace: MakeWorkspace, script: Script, close: str, answer: str, rest: str, between: str
) -> None:
    """Its text is seen, as it is part of the marks; other special tokens stay hidden."""
    workspace = make_workspace(template=PLAIN)
    workspace.__dict__["reasoning"] = Reasoning(open="<|im_start|>", close=close, answer="\n")
    sequence = assemble(workspace, Prompt("Why?", think=True), room=200)
    script(workspace, "A<|im_start|>")
    thought = run_thinking(workspace, sequence, 50)
    assert (thought.text, thought.rest, thought.finished) == ("A", rest, True)
    script(workspace, answer)
    assert run_replying(workspace, sequence, 50, thought=thought).text == rest + answer
    assert shown(sequence).endswith(f"<|im_start|>{between}")


def test_a_chain_nobody_asked_for_is_no_answer(make_workspace: MakeWorkspace, script: Script) -> None:
    """Without --think a model may begin reasoning itself: it is not emitted, and has its own limit."""
    workspace = make_workspace(template=UNAWARE)
    for text, chain, answer, whole in (
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", True),
        ("<think></think>Yes.", "", "Yes.", True),
        ("<think>0123456789abcdefghijklm", "0123456789abcdefghij", "klm", False),
    ):
        sequence = assemble(workspace, Prompt("Why?"), room=200)
        said: list[str] = []
        script(workspace, text)
        found = run_replying(workspace, sequence, 100, max_think=20, on_text=said.append)
        assert (found.text, "".join(said)) == (answer, answer)
        assert found.thought and (found.thought.text, found.thought.finished) == (chain, whole)
    sequence = assemble(workspace, Prompt("Why?"), room=200)
    script(workspace, "Use <think> for it.")
    found = run_replying(workspace, sequence, 100)
    assert (found.text, found.thought) == ("Use <think> for it.", None)


def test_without_marks_a_cue_asks_and_another_brings_the_answer(make_workspace: MakeWorkspace, script: Script) -> None:
    workspace = make_workspace(template=PLAIN)
    sequence = assemble(workspace, Prompt("Why?", think=True), room=200)
    assert "Why?\n\nThink step by step" in shown(sequence)
    assert "Think" not in shown(assemble(workspace, Prompt("Why?")))
    sequence = assemble(workspace, Prompt("Why?", think=True), room=200)
    script(workspace, "First this, then that.")
    thought = run_thinking(workspace, sequence, 100)
    assert (thought.text, thought.finished) == ("First this, then that.", True)
    assert shown(sequence).endswith("assistant\nFirst this, then that.\n\nAnswer:")
    script(workspace, " 42")
    assert run_replying(workspace, sequence, 100, thought=thought).text == "42"


def test_a_small_context_keeps_room_for_the_answer(make_workspace: MakeWorkspace, script: Script) -> None:
    """Reasoning ends before the context does; if not even its end fits, that is reported."""
    workspace = make_workspace(template=SWITCH, n_ctx=256, fixed_size=True)
    sequence = assemble(workspace, Prompt("Why?", think=True))
    script(workspace, "a" * 1000)
    thought = run_thinking(workspace, sequence, 1000)
    assert not thought.finished and len(thought.text) > 50
    assert len(sequence) <= sequence.context.n_ctx - ANSWER_RESERVE + len(workspace.reasoning.closing)
    sequence.close()
    empty = len(assemble(workspace, Prompt("x", think=True)))
    sequence = assemble(workspace, Prompt("x" * (sequence.context.n_ctx - empty - 5), think=True))
    with pytest.raises(EngineError, match="context is too small"):
        run_thinking(workspace, sequence, 1000)


def test_a_full_shared_context(make_workspace: MakeWorkspace, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared cells may be used up before the limit: the reasoning counts as cut, though shorter than allowed."""
    workspace = make_workspace(template=SWITCH)
    sequence = assemble(workspace, Prompt("Why?", think=True), room=200)
    extend = sequence.extend

    def full(tokens: list[int]) -> None:
        if len(sequence) > before + 5:
            raise EngineError("the context is full")
        extend(tokens)

    before = len(sequence)
    monkeypatch.setattr(sequence, "extend", full)
    script(workspace, "a" * 1000)
    thought = run_thinking(workspace, sequence, 100)
    assert (thought.text, thought.finished, thought.stopped) == ("a" * 6, False, "context")


@pytest.fixture
def returns(shipped: Workspace) -> Prompt:
    return Prompt("May I return this?", [compile_skill(shipped, load_skill(SAMPLES / "returns"))], think=True)


def test_the_shipped_model_ends_its_chain_with_the_answer(shipped: Workspace, returns: Prompt) -> None:
    """That is the answer: nothing more is generated, and choices are decided where they are named. Others are weighed
    at the end of the sequence, also if the answer follows the reasoning."""
    sequence = assemble(shipped, returns, room=300)
    thought = run_thinking(shipped, sequence, 200)
    assert thought.text.endswith("So the return is accepted.") and thought.finished
    tokens, pieces = sequence.tokens.tolist(), list(sequence.pieces)
    found = run_replying(shipped, sequence, 50, thought=thought)
    assert (found.text, found.tokens) == ("accepted", 0)
    wanted = sequence.logits()
    decision = run_deciding(shipped, sequence, ["refused", "accepted", "reviewed"], thought)
    assert decision.choice == "accepted" and decision.probabilities["accepted"] > 0.9
    assert run_deciding(shipped, sequence, ["yes", "no"], thought) == decide(sequence, ["yes", "no"])
    thought = ReasoningTrace("Well.", 1, True)
    assert run_deciding(shipped, sequence, ["accepted", "no"], thought) == decide(sequence, ["accepted", "no"])
    assert (sequence.tokens.tolist(), sequence.pieces) == (tokens, pieces)  # as it was
    np.testing.assert_allclose(sequence.logits(), wanted, atol=0.02 * float(np.abs(wanted).max()))
    for limit in (0, 6):  # cut short, it ends with the model's own last words, and is marked as cut
        sequence = assemble(shipped, returns, room=300)
        thought = run_thinking(shipped, sequence, limit)
        assert not thought.finished and thought.answer in ("accepted", "refused")
        assert run_deciding(shipped, sequence, ["accepted", "refused"], thought).choice == thought.answer


@pytest.mark.parametrize(("kind", "template"), [("llama", SWITCH), ("llama", UNAWARE), ("mamba", UNAWARE)])
def test_a_chain_that_nobody_asked_for_is_not_held(make_workspace: MakeWorkspace, template: str, kind: str) -> None:
    """Only the answer is constrained by the grammar. Not so for recurrent states, which cannot be rolled back."""
    workspace = make_workspace(kind, template=template, added=("<think>", "</think>"))
    mark = int(workspace.model.tokenize("<think>", special=True)[0])
    for thinks in (True, False):
        with assemble(workspace, Prompt("Why?")) as sequence:
            speaker = ReplyGenerator(
                workspace, max_tokens=20, max_think=4, grammar=gbnf_grammar('root ::= "yes" | "no"')
            )
            begins = len(sequence) if thinks else -1
            reply = spoken(speaker, sequence, lambda at, begins=begins: {mark: 99.0 if at == begins else -99.0})
            assert reply.text in ("yes", "no") and reply.stopped == "end"
            assert (reply.thought is not None) == thinks
            written = b"".join(workspace.model.token_bytes(int(one), special=True) for one in sequence.tokens)
            assert written.endswith(("</think>\n\n" if thinks else "").encode() + reply.text.encode())


def test_a_mark_that_ends_within_a_token(make_workspace: MakeWorkspace) -> None:
    """A model whose mark is plain text ends it in one token with the following text: still reasoning."""
    workspace = make_workspace("llama", template=OPENED, added=("ink>", "ink>\n"))
    marks = [int(one) for one in workspace.model.tokenize("<think>", special=True)]
    (merged,) = (int(one) for one in workspace.model.tokenize("ink>\n", special=True))
    assert len(marks) > 1 and workspace.model.token_bytes(marks[-1], special=True) == b"ink>"
    with assemble(workspace, Prompt("Why?"), room=200) as sequence:
        wanted = dict(enumerate([*marks[:-1], merged], len(sequence)))
        speaker = ReplyGenerator(workspace, max_tokens=20, max_think=4, grammar=gbnf_grammar('root ::= "yes" | "no"'))
        reply = spoken(speaker, sequence, lambda at: {wanted[at]: 99.0} if at in wanted else {})
        assert reply.thought is not None and reply.text in ("yes", "no")


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("calls", [True, False, None])
def test_channels_with_tools_and_a_grammar(make_workspace: MakeWorkspace, thinks: bool, calls: bool | None) -> None:
    """A call may follow a chain that was not asked for; an answer has the grammar. `calls` None: it must be a call."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    workspace = make_workspace("llama", template=HARMONY, added=marks)
    (source,) = (path.read_text(encoding="utf-8") for path in WILD if path.stem == "openai-gpt-oss-120b")
    form = form_of(source)
    assert form is not None
    chain = "<|channel|>analysis<|message|>Hm.<|end|>" if thinks else ""
    call = "<|start|>assistant" * thinks + '<|channel|>commentary to=functions.get_time <|message|>{"city": "Rome"}'
    wanted = chain + (call if calls else "<|start|>assistant" * thinks + "<|channel|>final<|message|>")
    ids = [int(token) for token in workspace.model.tokenize(wanted, special=True)]
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    with assemble(workspace, Prompt("Why?"), room=200) as sequence:
        # As a template with tools leaves it, which opens no answer.
        opening = workspace.model.tokenize(workspace.template.reply, special=True)
        sequence.truncate(len(sequence) - len(opening))
        start = len(sequence)
        tools = None if calls is None else Calls(form, [tool])
        grammar = gbnf_grammar('root ::= "yes" | "no"')
        end = workspace.model.end_tokens[0]
        speaker = ReplyGenerator(workspace, max_tokens=100, max_think=50, grammar=grammar, calls=tools, opened=False)
        reply = spoken(speaker, sequence, lambda at: {(ids[at - start] if at - start < len(ids) else end): 99.0})
        written = shown(sequence)[len(shown(sequence)) - len(wanted) - len(reply.text) * (not calls) :]
    assert (reply.thought is not None) == thinks
    if calls:
        assert reply.text == call and written == wanted
    else:
        assert reply.text in ("yes", "no") and written == wanted + reply.text


def test_an_answer_that_ends_like_the_beginning_of_a_stop(make_workspace: MakeWorkspace, script: Script) -> None:
    """Text that might have been a stop string is emitted at the end."""
    workspace = make_workspace(template=UNAWARE)
    sequence = assemble(workspace, Prompt("Why?"), room=200)
    said: list[str] = []
    script(workspace, "It is AN")
    found = run_replying(workspace, sequence, 100, stops=("AND",), on_text=said.append)
    assert found.text == "".join(said) == "It is AN"
