"""The notebook: its ledger of tokens and pieces always says what is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import nmse

from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import WAITING, Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.pieces import Reason
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import EngineError, UnsupportedError

from ..refused import refused
from .conftest import LoadZoo

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


def assembled(context: Context, segment: Segment, *, later: bool, seam: int = 2) -> Notebook:
    """A text and the segment twice, each behind other tokens than it was compiled after."""
    notebook = Notebook(context)
    notebook.append([1, 2, 3])
    notebook.splice(segment, seam=seam, later=later)
    notebook.append([4, 5])
    notebook.splice(segment, seam=seam, later=later)
    return notebook


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hooks that computed."""
    calls: list[str] = []
    hook = native._hook

    def counting(name: str, arguments: tuple[Any, ...]) -> Any:
        if name in ("notes_append", "notes_rewrite"):
            calls.append(name)
        return hook(name, arguments)

    monkeypatch.setattr(native, "_hook", counting)
    return calls


@pytest.mark.parametrize("asked", [ASK, np.arange(20, 80, dtype=np.int32)])
def test_what_precedes_a_splice_is_decoded_with_what_follows(
    context: Context, segment: Segment, counted: list[str], asked: np.ndarray
) -> None:
    """In one pass: rows and logits are those of decoding it first, and so is what can be told of the pieces."""
    first, waiting = (assembled(context, segment, later=later) for later in (False, True))
    for notebook in (first, waiting):
        counted.clear()
        notebook.append(asked, "question")
        notebook.logits()
    assert counted == ["notes_rewrite"]
    assert waiting.pieces == first.pieces and len(waiting) == len(first) == context.length(waiting.sequence)
    assert close(rows_of(waiting), rows_of(first))
    assert close([waiting.logits()], [first.logits()])
    wrong = Notebook(context)  # the control: what precedes the skill is seen
    wrong.append([3, 2, 1])
    wrong.splice(segment, seam=2)
    wrong.append([5, 4])
    wrong.splice(segment, seam=2)
    wrong.append(asked)
    assert not close([wrong.logits()], [first.logits()])


@pytest.mark.parametrize(
    "use",
    [
        lambda book: book.flush(),
        lambda book: book.share().close(),
        lambda book: book.read(0, 2, "f16"),
        lambda book: book.set_aside(len(book) - 1),
        lambda book: book.truncate(len(book) - 1),
        lambda book: book.lookahead([7, 8]),
        lambda book: book.rewrite([20], np.array([9], np.int32)),
    ],
)
def test_rows_that_wait_are_there_for_whoever_needs_them(
    context: Context, segment: Segment, use: Callable[[Notebook], object]
) -> None:
    """Nothing that looks at rows finds vacant ones."""
    first, waiting = (assembled(context, segment, later=later) for later in (False, True))
    for notebook in (first, waiting):
        use(notebook)
        notebook.append(ASK)
        notebook.logits()
    assert waiting.tokens.tolist() == first.tokens.tolist()
    assert close(rows_of(waiting), rows_of(first))
    assert close([waiting.logits()], [first.logits()])


def test_cut_off_before_it_was_decoded(context: Context, segment: Segment) -> None:
    """What waited and is cut off is never decoded, and other tokens take its place."""
    notebook = assembled(context, segment, later=True)
    notebook.truncate(0)
    notebook.append([*LEFT, *ASK])
    plain = Notebook(context)
    plain.append([*LEFT, *ASK])
    assert close([notebook.logits()], [plain.logits()])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineError])
def test_stopped_while_all_of_it_is_decoded(
    context: Context, segment: Segment, monkeypatch: pytest.MonkeyPatch, when: str, error: type[BaseException]
) -> None:
    """No row that is none stays, what was to be decoded still is, and the next time it is right."""
    first, waiting = (assembled(context, segment, later=later) for later in (False, True))
    for notebook in (first, waiting):
        notebook.append(ASK)
    rewrite = context.rewrite

    def stopped(*given: Any) -> None:
        if when == "after":
            rewrite(*given)
        raise error("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(context, "rewrite", stopped)
        with pytest.raises(error):
            waiting.logits()
    assert waiting.pending == list(ASK) and waiting.intact
    assert context.length(waiting.sequence) == len(waiting) - len(ASK)
    assert close([waiting.logits()], [first.logits()])
    assert close(rows_of(waiting), rows_of(first))


def test_many_tokens_do_not_wait(notebook: Notebook, segment: Segment, counted: list[str]) -> None:
    """They take as long by themselves, and a text after the skill may be shorter than they are."""
    notebook.append(np.arange(100, 101 + WAITING))
    notebook.splice(segment, later=True)
    assert counted == ["notes_append"] and not notebook.vacant


def test_without_room_they_are_decoded_by_themselves(context: Context, segment: Segment, counted: list[str]) -> None:
    """One pass takes one cell more than the tokens do."""
    waiting = assembled(context, segment, later=True)
    waiting.append(np.arange(waiting.room) % 200)
    waiting.logits()
    assert counted[0] == "notes_rewrite" and set(counted[1:]) == {"notes_append"}
    assert context.length(waiting.sequence) == len(waiting)


def test_what_waits_takes_its_room_once(context: Context, segment: Segment) -> None:
    """Rows before those of a splice are below its end already: they need cells, and no more positions."""
    decoded, waiting = Notebook(context), assembled(context, segment, later=True)
    decoded.append(waiting.tokens)
    assert waiting.vacant and waiting.room == context.n_ctx - len(waiting)
    decoded.close()
    waiting.append(np.arange(waiting.room) % 200)
    assert np.isfinite(waiting.logits()).all() and len(waiting) == context.n_ctx
    with pytest.raises(EngineError, match="too small"):
        waiting.append([1])


@pytest.mark.parametrize("name", ["qwen2vl-dense", "qwen3-dense"])
def test_a_context_does_not_grow_while_rows_wait(load_zoo: LoadZoo, name: str) -> None:
    """It cannot keep what is not there yet; nothing is lost by that, with positions on three axes or one."""
    with Context(load_zoo(name), ContextOptions(n_ctx=256, n_threads=1)) as context:
        with Notebook(context) as alone:
            alone.append([*LEFT, *range(40, 80)])
            alone.flush()
            rows, _ = alone.read(len(LEFT), len(alone), "f16")
            segment = Segment(
                *("s", "", "", alone.tokens[len(LEFT) :], len(LEFT), np.array(LEFT, np.int32), ()),
                *(context.identity("0"), rows),
            )
        waiting = Notebook(context)
        waiting.append(LEFT)
        waiting.flush()
        waiting.append([9, 10, 11])
        waiting.splice(segment, later=True)
        with pytest.raises(UnsupportedError, match="cannot be made larger"):
            Notebook(context)
        assert waiting.intact and waiting.vacant
        waiting.append(ASK)
        assert np.isfinite(waiting.logits()).all()


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
