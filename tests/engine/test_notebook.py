"""The notebook: its ledger of tokens and pieces always says what is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import nmse

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.pieces import Reason
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import EngineError

from ..refused import refused

LEFT = np.arange(10, 18, dtype=np.int32)
SKILL = np.arange(60, 100, dtype=np.int32)
ASK = np.array([72, 105, 63], np.int32)


@pytest.fixture(scope="module")
def context(make_model: Callable[..., Path]) -> Iterator[Context]:
    """One context for all tests here; each empties it."""
    with Model(make_model("llama")) as model, Context(model, ContextOptions(n_ctx=512, n_threads=1)) as made:
        yield made


@pytest.fixture
def notebook(context: Context, segment: Segment) -> Notebook:
    """An empty one."""
    return Notebook(context)


@pytest.fixture
def segment(context: Context) -> Segment:
    """SKILL compiled after LEFT; the context is empty again."""
    context.clear()
    context.append({0: np.concatenate([LEFT, SKILL])})
    rows = context.read(0, len(LEFT), len(SKILL), base=len(LEFT))
    context.clear()
    return Segment("s", "", "", SKILL, len(LEFT), LEFT, (), context.identity("w"), rows)


class Script:
    """A sampler that says what it was told to; with the real one, what stops an answer would be luck."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def next(self, context: Context, index: int = -1) -> int:
        return self.tokens.pop(0)

    def likeliest(self, context: Context) -> int:
        return self.tokens[0]


def test_pieces_cover_the_tokens(notebook: Notebook, segment: Segment) -> None:
    """Positions follow each other; seam and rest of a splice are two pieces; counts are by how."""
    notebook.append([1, 2, 3])
    notebook.append([])
    notebook.splice(segment, seam=4)
    notebook.append(ASK, "question")
    assert [(p.kind, p.how, p.position, p.tokens) for p in notebook.pieces] == [
        ("text", "decoded", 0, 3),
        ("splice", "seam", 3, 4),
        ("splice", "spliced", 7, 36),
        ("question", "decoded", 43, 3),
    ]
    assert (notebook.count("decoded"), notebook.count("seam"), notebook.count("spliced")) == (6, 4, 36)
    assert notebook.tokens.tolist() == [1, 2, 3, *SKILL, *ASK]
    notebook.logits()
    assert notebook.context.length(0) == len(notebook) == 46


@pytest.mark.parametrize(("seam", "pieces"), [(0, ["spliced"]), (40, ["seam"]), (10**9, ["seam"])])
def test_a_seam_of_nothing_or_of_all(notebook: Notebook, segment: Segment, seam: int, pieces: list[str]) -> None:
    """Without a seam no token of the skill is decoded; one as long as the skill decodes it all."""
    notebook.splice(segment, seam=seam)
    assert [piece.how for piece in notebook.pieces] == pieces
    assert len(notebook) == len(SKILL)


def test_a_splice_where_it_was_compiled_is_exact(notebook: Notebook, segment: Segment) -> None:
    """After its own left context the spliced skill gives the logits of a full prefill, to rounding."""
    notebook.append(LEFT)
    notebook.splice(segment)
    notebook.append(ASK)
    spliced = notebook.logits()
    notebook.context.clear()
    prefilled = Notebook(notebook.context)
    prefilled.append([*LEFT, *SKILL, *ASK])
    np.testing.assert_allclose(spliced, prefilled.logits(), atol=0.05 * float(np.abs(spliced).max()))
    assert notebook.pieces[1].reason is Reason.UNMOVED


def rows_of(notebook: Notebook) -> list[np.ndarray]:
    """K and V of all layers."""
    found = notebook.context.read(notebook.sequence, 0, len(notebook), base=0)
    return [part for layer in found for part in (layer.k, layer.v)]


def close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return max(nmse(one, other) for one, other in zip(found, expected, strict=True)) < 1e-5


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call decodes."""
    found: list[int] = []
    append = Context.append

    def counted(self: Context, tokens: Any, *given: Any) -> None:
        found.append(sum(map(len, tokens.values())))
        append(self, tokens, *given)

    monkeypatch.setattr(Context, "append", counted)
    return found


def test_a_notebook_is_divided(notebook: Notebook, batches: list[int]) -> None:
    """What comes next goes into a batch of its own, whoever decodes, and the logits are those of the last token."""
    notebook.append(LEFT)
    notebook.divide()
    notebook.append(ASK)
    found = notebook.logits()
    assert batches == [len(LEFT), len(ASK)]
    notebook.truncate(0)
    notebook.append([*LEFT, *ASK])
    assert close([notebook.logits()], [found])
    assert batches[2:] == [len(LEFT) + len(ASK)]


def test_a_part_of_it_is_decoded(notebook: Notebook, batches: list[int]) -> None:
    """Up to where it was divided; without that nothing is."""
    notebook.append(LEFT)
    notebook.flush_divided()
    assert batches == []
    notebook.divide()
    notebook.append(ASK)
    told: list[tuple[int, int]] = []
    notebook.flush_divided(lambda done, total: told.append((done, total)))
    assert batches == [len(LEFT)] and list(notebook.pending) == list(ASK)
    assert told == [(len(LEFT), len(LEFT))]


def test_rows_are_shared_and_the_rest_is_decoded_by_each(notebook: Notebook, batches: list[int]) -> None:
    """Two that go on from one: the same tokens, pieces and logits, and what was decoded is not decoded again."""
    notebook.append(LEFT)
    notebook.flush()
    notebook.append([1, 2], "erratum")
    with notebook.share_rows() as first, notebook.share_rows() as second:
        for other in (first, second):
            assert other.tokens.tolist() == notebook.tokens.tolist() and other.pieces == notebook.pieces
            other.append(ASK)
        assert np.array_equal(first.logits(), second.logits())
        assert batches == [len(LEFT), 2 + len(ASK), 2 + len(ASK)]
    notebook.append(ASK)
    assert np.array_equal(notebook.logits(), first_logits(notebook))


def first_logits(notebook: Notebook) -> np.ndarray:
    """Of the same tokens in the same batches."""
    with Notebook(notebook.context) as other:
        other.append(LEFT)
        other.flush()
        other.append(notebook.tokens[len(LEFT) :])
        return other.logits()


def test_one_without_rows_is_shared(notebook: Notebook) -> None:
    """There is nothing to share, and its tokens are those of both."""
    notebook.append(ASK)
    with notebook.share_rows() as other:
        assert np.array_equal(other.logits(), notebook.logits())


def test_a_spliced_row_has_no_logits(notebook: Notebook, segment: Segment) -> None:
    """Logits come from decoding: right after a splice there are none, and the error says what helps."""
    notebook.splice(segment)
    with pytest.raises(EngineError, match="append a token after it"):
        notebook.logits()
    notebook.append(ASK)
    assert np.isfinite(notebook.logits()).all()


def test_lookahead_leaves_it_as_it_was(notebook: Notebook) -> None:
    """Length, tokens, rows and logits are the same afterwards; the logits are those of really appending."""
    notebook.append([*LEFT, *ASK])
    before = notebook.logits()
    rows = notebook.context.read(0, 0, len(notebook), base=0)
    ahead = notebook.lookahead([70, 71, 72])
    assert ahead.shape == (3, notebook.context.model.n_vocab)
    assert notebook.context.length(0) == len(notebook) == 11
    assert (notebook.logits() == before).all()
    after = notebook.context.read(0, 0, len(notebook), base=0)
    assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(rows, after, strict=True))
    for token, expected in zip((70, 71, 72), ahead, strict=True):
        notebook.append([token])
        np.testing.assert_allclose(notebook.logits(), expected, atol=1e-2 * float(np.abs(expected).max()))


def test_generate_after_a_lookahead_goes_on_from_the_notebook(notebook: Notebook) -> None:
    """What was looked at does not become what is said next."""
    with Sampler(SamplerOptions()) as sampler:
        notebook.append([*LEFT, *ASK])
        said = list(notebook.generate(sampler, 6))
        notebook.truncate(len(LEFT) + len(ASK) - 1)
        notebook.append(ASK[-1:])
        best = int(notebook.logits().argmax())
        other = next(t for t in range(60, 120) if int(notebook.lookahead([t])[0].argmax()) != best)
        notebook.lookahead([other])
        assert list(notebook.generate(sampler, 6)) == said
    assert said[0] == best


def test_truncate_goes_back(notebook: Notebook) -> None:
    """Tokens, pieces and rows end at the length; going on gives what it gave before."""
    notebook.append(LEFT)
    notebook.append(ASK, "question")
    first = notebook.logits()
    notebook.append([1, 2, 3], "answer")
    notebook.flush()
    notebook.truncate(10)
    assert [(p.kind, p.tokens) for p in notebook.pieces] == [("text", 8), ("question", 2)]
    assert notebook.context.length(0) == 10 and notebook.tokens.tolist() == [*LEFT, *ASK[:2]]
    notebook.append(ASK[2:])
    np.testing.assert_allclose(notebook.logits(), first, atol=1e-2 * float(np.abs(first).max()))
    for length in (-1, 12):
        with pytest.raises(EngineError, match="cannot go back"):
            notebook.truncate(length)


def test_truncate_of_what_still_waits(notebook: Notebook) -> None:
    """Tokens that have not been decoded are just dropped."""
    notebook.append([*LEFT, *ASK])
    notebook.truncate(5)
    notebook.flush()
    assert notebook.context.length(0) == len(notebook) == 5


def test_a_full_context_is_refused_before_anything_happens(notebook: Notebook, segment: Segment) -> None:
    """Append, splice and lookahead that do not fit: an error with a size that would do; the notebook goes on."""
    notebook.append(np.zeros(500, np.int32))
    notebook.flush()
    for action in (
        lambda: notebook.append(np.zeros(13, np.int32)),
        lambda: notebook.splice(segment),
        lambda: notebook.lookahead([1] * 13),
    ):
        with refused(EngineError, r"do not fit 512\. Give it -c 1024"):
            action()
    assert len(notebook) == notebook.context.length(0) == 500 and len(notebook.pieces) == 1
    notebook.append(ASK)
    assert np.isfinite(notebook.logits()).all()


def test_an_answer_ends_where_the_context_does(notebook: Notebook) -> None:
    """What was said is in the ledger and in the cache, and that it was cut is known. One that could not even begin
    raises."""
    notebook.append(np.zeros(510, np.int32))
    assert list(notebook.generate(Script(65, 66, 67), 3)) == [65, 66]  # type: ignore[arg-type]
    assert notebook.stopped == "context" and len(notebook) == notebook.context.length(0) == 512
    notebook.truncate(511)
    end = notebook.context.model.end_tokens[0]
    assert list(notebook.generate(Script(66, end), 3)) == [66]  # type: ignore[arg-type]
    assert notebook.stopped == "end"  # with the last token that there is room for
    with pytest.raises(EngineError, match="too small"):
        list(notebook.generate(Script(65), 3))  # type: ignore[arg-type]


def test_failed_decoding_keeps_what_waits(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode that fails loses no token: the next try goes on where it stopped."""
    notebook.append(LEFT)
    with monkeypatch.context() as patch:
        patch.setattr(Context, "append", lambda *_: (_ for _ in ()).throw(EngineError("no")))
        with pytest.raises(EngineError):
            notebook.flush()
    assert len(notebook) == 8
    notebook.logits()
    assert notebook.context.length(0) == 8


def test_an_interrupt_after_decoding_does_not_decode_twice(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is noticed when llama.cpp returns: the rows are there then, and must not be put there again."""
    append = Context.append

    def interrupted(self: Context, tokens: dict[int, np.ndarray], output: Any) -> None:
        append(self, tokens, output)
        raise KeyboardInterrupt

    notebook.append([*LEFT, *ASK])
    with monkeypatch.context() as patch:
        patch.setattr(Context, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            notebook.flush()
    notebook.append([70])
    found = notebook.logits()
    assert notebook.context.length(0) == len(notebook) == 12
    notebook.context.clear()
    again = Notebook(notebook.context)
    again.append([*LEFT, *ASK, 70])
    np.testing.assert_allclose(found, again.logits(), atol=1e-2 * float(np.abs(found).max()))


def test_generate_stops_before_an_end_token(notebook: Notebook) -> None:
    """The end of turn is neither yielded nor in the notebook; the answer is one piece."""
    end = notebook.context.model.end_tokens[0]
    notebook.append(ASK)
    assert list(notebook.generate(Script(65, 66, end, 67), 10)) == [65, 66]  # type: ignore[arg-type]
    assert notebook.stopped == "end" and notebook.tokens.tolist() == [*ASK, 65, 66]
    assert [(p.kind, p.position, p.tokens) for p in notebook.pieces] == [("text", 0, 3), ("answer", 3, 2)]
    assert notebook.context.length(0) == 5


def test_generate_stops_at_the_limit(notebook: Notebook) -> None:
    """Never a token more than asked for, and none of an empty answer."""
    notebook.append(ASK)
    assert list(notebook.generate(Script(65, 66, 67), 2)) == [65, 66]  # type: ignore[arg-type]
    assert notebook.stopped == "length"
    end = notebook.context.model.end_tokens[0]
    assert list(notebook.generate(Script(end), 2)) == []  # type: ignore[arg-type]
    assert [piece.kind for piece in notebook.pieces] == ["text", "answer"]


def test_rewrite_changes_the_ledger_and_the_rows(notebook: Notebook) -> None:
    """Rewriting the last two tokens equals having written them so from the start."""
    notebook.append([*LEFT, 1, 2])
    notebook.rewrite([8, 9], np.array([72, 105], np.int32))
    notebook.append([63])
    found = notebook.logits()
    notebook.context.clear()
    straight = Notebook(notebook.context)
    straight.append([*LEFT, *ASK])
    assert notebook.tokens.tolist() == straight.tokens.tolist()
    np.testing.assert_allclose(found, straight.logits(), atol=1e-2 * float(np.abs(found).max()))


def test_dry_keeps_the_ledger_and_computes_nothing(notebook: Notebook, segment: Segment) -> None:
    """A dry notebook has the pieces of a real one and leaves the cache empty."""
    dry = Notebook(notebook.context, dry=True)
    for book in (dry, notebook):
        book.append([1, 2, 3])
        book.splice(segment, seam=1)
        book.append(ASK, "question")
        book.flush()
        if book is dry:
            assert notebook.context.length(0) == 0
    assert dry.pieces == notebook.pieces and dry.tokens.tolist() == notebook.tokens.tolist()


def test_rows_of_somebody_else_are_not_taken_for_ours(context: Context) -> None:
    """As many of them in the place of those that were cleared away: the notebook refuses to go on."""
    context.clear()
    book = Notebook(context)
    book.append(LEFT)
    book.flush()
    context.clear()
    other = Notebook(context)
    other.append(LEFT + 1)
    other.flush()
    assert not book.intact and other.intact
    with pytest.raises(EngineError, match="its context was cleared"):
        book.append(ASK)
    with pytest.raises(EngineError, match="closed, or changed by other code"):
        book.logits()
