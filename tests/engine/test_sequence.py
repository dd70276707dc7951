"""Tests of KVSequence: tokens and pieces agree with the cache, decisions with log-probabilities by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from reference import nmse

from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, skill_batches
from notes_cli.errors import EngineError, NotesError
from notes_cli.runtime.generate import decide, log_softmax

from ..conftest import MakeModel

LEFT = np.arange(10, 18, dtype=np.int32)
SKILL = np.arange(60, 100, dtype=np.int32)
ASK = np.array([72, 105, 63], np.int32)


@pytest.fixture(scope="module")
def context(make_model: MakeModel) -> Iterator[Context]:
    """One context for all tests here; each empties it."""
    with Model(make_model("llama")) as model, Context(model, ContextOptions(n_ctx=512, n_threads=1)) as made:
        yield made


@pytest.fixture
def sequence(context: Context, segment: Segment) -> KVSequence:
    return KVSequence(context)


@pytest.fixture
def segment(context: Context) -> Segment:
    """SKILL compiled after LEFT; the context is empty again."""
    context.clear()
    context.append({0: np.concatenate([LEFT, SKILL])})
    rows = context.read(0, len(LEFT), len(SKILL), base=len(LEFT))
    context.clear()
    return Segment("s", "", "", SKILL, len(LEFT), LEFT, (), context.identity("w"), rows)


class Script:
    """A sampler with fixed tokens; with the real one, the end of an answer would be random."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def next(self, context: Context, index: int = -1) -> int:
        return self.tokens.pop(0)

    def likeliest(self, context: Context) -> int:
        return self.tokens[0]


def test_pieces_cover_the_tokens(sequence: KVSequence, segment: Segment) -> None:
    """Positions follow each other; seam and rest of a splice are two pieces; counts are by how."""
    sequence.append([1, 2, 3])
    sequence.append([])
    sequence.splice(segment, seam=4)
    sequence.append(ASK, "question")
    assert [(p.kind, p.how, p.position, p.tokens) for p in sequence.pieces] == [
        ("text", "decoded", 0, 3),
        ("splice", "seam", 3, 4),
        ("splice", "spliced", 7, 36),
        ("question", "decoded", 43, 3),
    ]
    assert (sequence.count("decoded"), sequence.count("seam"), sequence.count("spliced")) == (6, 4, 36)
    assert sequence.tokens.tolist() == [1, 2, 3, *SKILL, *ASK]
    sequence.logits()
    assert sequence.context.length(0) == len(sequence) == 46


def test_a_seam_of_nothing_or_of_all(sequence: KVSequence, segment: Segment) -> None:
    """Without a seam no token of the skill is decoded; one as long as the skill decodes it all."""
    for seam, how in ((0, "spliced"), (40, "seam"), (10**9, "seam")):
        sequence.truncate(0)
        sequence.splice(segment, seam=seam)
        assert [piece.how for piece in sequence.pieces] == [how] and len(sequence) == len(SKILL)


def test_a_notebook_is_divided(sequence: KVSequence, decoded: list[int]) -> None:
    """The next tokens go into a batch of their own, whatever triggers the decode; the logits are those of the last
    token."""
    decoded.clear()
    sequence.append(LEFT)
    sequence.divide()
    sequence.append(ASK)
    found = sequence.logits()
    assert decoded == [len(LEFT), len(ASK)]
    sequence.truncate(0)
    sequence.append([*LEFT, *ASK])
    assert nmse(sequence.logits(), found) < 1e-5
    assert decoded[2:] == [len(LEFT) + len(ASK)]


def test_a_skill_has_batches_of_its_own(sequence: KVSequence, decoded: list[int]) -> None:
    """Those of its compile: also its first ones are small if it has more than a micro-batch."""
    decoded.clear()
    sequence.append(LEFT)
    sequence.append_skill([7] * 300)
    sequence.append(ASK)
    assert sequence.undivided == len(ASK) and not sequence.divided
    sequence.logits()
    assert decoded == [len(LEFT), 300, len(ASK)] and sequence.divided
    for count, size, wanted in (
        (512, 512, [(3, 3), (512, 512)]),
        (600, 512, [(3, 3), (32, 32), (96, 96), (472, 472)]),
        (300, 64, [(3, 3), (32, 32), (64, 64), (32, 32), (128, 64), (44, 44)]),
        (200, 64, [(3, 3), (192, 64), (8, 8)]),
    ):
        assert [batch[:2] for batch in skill_batches(3, count, size, 1)] == wanted


def test_a_spliced_row_has_no_logits(sequence: KVSequence, segment: Segment) -> None:
    """Logits come from decoding: right after a splice there are none, and the error has a remedy."""
    sequence.splice(segment)
    with pytest.raises(EngineError, match="append a token after it"):
        sequence.logits()
    sequence.append(ASK)
    assert np.isfinite(sequence.logits()).all()


END = 258  # an end token of the tiny models


@pytest.mark.parametrize(
    ("before", "scripted", "limit", "tokens", "why"),
    [
        (3, (65, 66, END, 67), 10, [65, 66], "end"),
        (3, (65, 66, 67), 2, [65, 66], "length"),
        (3, (END,), 2, [], "end"),
        (510, (65, 66, 67), 3, [65, 66], "context"),
        (511, (66, END), 3, [66], "end"),  # with the last token that there is room for
    ],
)
def test_where_an_answer_ends(
    sequence: KVSequence, before: int, scripted: tuple[int, ...], limit: int, tokens: list[int], why: str
) -> None:
    """Never a token more than asked for; the end is neither yielded nor in the sequence."""
    sequence.append(np.zeros(before, np.int32))
    assert list(sequence.generate(Script(*scripted), limit)) == tokens  # type: ignore[arg-type]
    assert sequence.stopped == why and sequence.tokens.tolist() == [0] * before + tokens
    answer = [("answer", before, len(tokens))] if tokens else []
    assert [(p.kind, p.position, p.tokens) for p in sequence.pieces] == [("text", 0, before), *answer]
    assert sequence.context.length(0) == before + len(tokens)
    if sequence.context.length(0) == 512:
        with pytest.raises(EngineError, match="too small"):
            list(sequence.generate(Script(65), 3))  # type: ignore[arg-type]


PROMPT = "May I return this? Answer:"


@pytest.fixture(scope="module")
def exact(make_model: MakeModel) -> Iterator[Context]:
    """One context of a model in which no answer is certain, for all tests here; f32 for comparisons by hand."""
    with (
        Model(make_model("gemma")) as model,
        Context(model, ContextOptions(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")) as made,
    ):
        yield made


def prompted(exact: Context, *more: int) -> KVSequence:
    """A fresh sequence with the prompt and the tokens after it."""
    exact.clear()
    seq = KVSequence(exact)
    seq.append([*exact.model.tokenize(PROMPT), *more])
    return seq


def by_hand(exact: Context, text: str, ending: bool) -> float:
    """Log-probability of a text after the prompt, one plain append a token; with the end of the answer if asked."""
    total, before = 0.0, []
    for token in map(int, exact.model.tokenize(text)):
        total += float(log_softmax(prompted(exact, *before).logits())[token])
        before.append(token)
    if ending:
        total += float(log_softmax(prompted(exact, *before).logits())[exact.model.end_tokens].max())
    return total


@pytest.mark.parametrize(
    ("choices", "ending"),
    [(["accepted", "refused"], False), (["no", "not sure"], True), (["a", "b", "c", "ab"], True), (["é", "日"], False)],
)
def test_probabilities_are_those_of_plain_appends(exact: Context, choices: list[str], ending: bool) -> None:
    """Softmax over the summed log-probabilities, the better of with and without a blank; prefixes count their end."""
    scores = np.array([max(by_hand(exact, blank + choice, ending) for blank in ("", " ")) for choice in choices])
    expected = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    decision = decide(prompted(exact), choices)
    assert list(decision.probabilities) == choices
    np.testing.assert_allclose(list(decision.probabilities.values()), expected, rtol=1e-3)
    assert decision.choice == choices[int(expected.argmax())]
    ranked = np.sort(expected)
    assert decision.margin == pytest.approx(ranked[-1] - ranked[-2], rel=1e-2, abs=1e-4)


def test_the_notebook_is_usable_afterwards(exact: Context) -> None:
    with Sampler(SamplerOptions()) as sampler:
        undisturbed = list(prompted(exact).generate(sampler, 5))
        seq = prompted(exact)
        before, logits = seq.tokens.tolist(), seq.logits()
        first = decide(seq, ["no", "not sure", "maybe not"])
        assert seq.tokens.tolist() == before and exact.length(0) == len(before)
        assert (seq.logits() == logits).all()
        again = decide(seq, ["no", "not sure", "maybe not"])
        assert again.probabilities == pytest.approx(first.probabilities)
        assert list(seq.generate(sampler, 5)) == undisturbed


def test_choices_that_leave_nothing_to_decide(exact: Context) -> None:
    """Fewer than two different ones, or one longer than the context."""
    seq = prompted(exact)
    for choices in ([], ["yes"], ["yes", "yes"], ["yes", ""]):
        with pytest.raises(NotesError, match="two or more different answers"):
            decide(seq, choices)
    with pytest.raises(NotesError, match="too small"):
        decide(seq, ["x" * 500, "y"])
    assert decide(seq, ["x", "y"]).choice in ("x", "y")
