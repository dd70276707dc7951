"""Tests of carrying a recurrent state through a segment: the result is that of decoding its tokens in place.

In these models a single recurrent layer contributes: its inputs are embeddings, which do not depend on preceding
tokens, so that state and logits after a segment must equal those of a recompute, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import zoo
from reference import nmse, open_context

from bench import zoo_more
from notes_cli.engine import recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows, Tokens, Transition
from notes_cli.errors import EngineError, UnsupportedError

pytestmark = pytest.mark.patches("recurrent")

# The recurrent layer of each model of the zoo, and the tensors that silence attention and a second recurrent layer.
ALONE = {
    "mamba": ("mamba-dense", ("blk.1.ssm_out",)),  # SSM_SCAN, a factor for each element
    "jamba": ("jamba-dense", ("blk.0.attn_output",)),
    "mamba2": ("mamba2-dense", ("blk.1.ssm_out",)),  # SSM_SCAN, a factor for each head
    "granitehybrid": ("granitehybrid-dense", ("blk.0.attn_output",)),
    "nemotron_h": ("nemotron_h-dense", ("blk.0.attn_output",)),
    "nemotron_h_moe": ("nemotron_h_moe-dense", ("blk.0.attn_output",)),
    "plamo2": ("plamo2-dense", ("blk.0.attn_output",)),
    "falcon-h1": ("falcon-h1-dense", ("blk.0.attn_output", "blk.1.attn_output", "blk.1.ssm_out")),
    "qwen35": ("qwen35-dense", ("blk.1.attn_output",)),  # GATED_DELTA_NET
    "qwen35moe": ("qwen35moe-moe", ("blk.1.attn_output",)),
    "qwen3next": ("qwen3next-moe", ("blk.1.attn_output",)),
    "qwen4exp": ("qwen4exp-moe", ("blk.1.attn_output",)),
    "kimi-linear": ("kimi-linear-moe", ("blk.0.attn_output",)),  # the same with a factor for each key
    "kimi-k3": ("kimi-k3-moe", ("blk.0.attn_output",)),
    "glm5-next": ("glm5-next-moe", ("blk.0.attn_output",)),
    "bailingmoe3": ("bailingmoe3-moe", ("blk.0.attn_output",)),
    "minimax-01": ("minimax-01-moe", ("blk.1.attn_output",)),  # no operation of its own
    "lfm2": ("lfm2-dense", ("blk.0.attn_output",)),  # only a convolution
    "lfm2moe": ("lfm2moe-moe", ("blk.0.attn_output",)),
}
BOUNDED = ("kimi-k3", "glm5-next", "bailingmoe3")  # a token forgets so much at most
ALL = [*ALONE, *zoo_more.RECURRENT]
EACH = ["mamba", "mamba2", "qwen35", "kimi-linear", "minimax-01", "lfm2", *zoo_more.RECURRENT]  # one of each operation
BOUND = 1e-10  # normalised mean squared error of logits


def made(name: str, folder: Path, whole: bool) -> Path:
    """Write a model of the zoo as it is, or one in which a single recurrent layer contributes."""
    path = folder / f"{name}{' whole' * whole}.gguf"
    if name not in ALONE:
        zoo_more.write(path, name, *zoo_more.RECURRENT[name](*([] if whole else [1])))
        return path
    source, silent = ALONE[name]
    if whole:
        return zoo.zoo_model(source)
    a = -0.001 if name == "kimi-linear" else -0.01  # a random one forgets in a few tokens
    remembers = {f"blk.{layer}.ssm_a": a for layer in (0, 1)}
    overrides = {"kda.gate_lower_bound": -0.02} if name in BOUNDED else {}
    return zoo.variant(source, path, overrides, fill=dict.fromkeys(silent, 0.0) | remembers)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Model]]:
    folder = tmp_path_factory.mktemp("carry")
    with ExitStack() as loaded:
        yield cache(lambda name, whole=False: loaded.enter_context(Model(made(name, folder, whole))))
    for path in folder.iterdir():
        path.unlink()


@dataclass(frozen=True)
class Compiled:
    """A segment as it was after some left context: its rows from position 0 on, and its transitions."""

    tokens: Tokens
    seam: int
    tail: int
    base: int
    rows: tuple[LayerRows, ...]
    transitions: tuple[Transition, ...]


def text(model: Model, seed: int, count: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, model.n_vocab, count).astype(np.int32)


def decode(context: Context, tokens: Tokens, seq_id: int = 0) -> None:
    if len(tokens):
        context.append({seq_id: tokens}, "none")


def compiled(
    context: Context, left: Tokens, tokens: Tokens, seam: int | None = None, tail: int | None = None
) -> Compiled:
    margins = recurrent.margins(context)
    seam, tail = margins[0] if seam is None else seam, margins[1] if tail is None else tail
    middle = tokens[seam : len(tokens) - tail]
    decode(context, np.concatenate([left, tokens[:seam]]))
    with recurrent.capturing(context, 0) as captured:
        decode(context, middle)
        transitions = captured()
    end = len(left) + len(tokens) - tail
    return Compiled(tokens, seam, tail, len(left), context.read(0, 0, end, base=0, dtype="f32"), transitions)


def carry(context: Context, found: Compiled, seq_id: int = 0) -> None:
    decode(context, found.tokens[: found.seam], seq_id)
    middle = found.tokens[found.seam : len(found.tokens) - found.tail]
    first = found.base + found.seam
    rows = [one if one.part == "state" else one.cut(slice(first, None)) for one in found.rows]
    recurrent.carry(context, seq_id, context.length(seq_id), middle, rows, found.transitions, first)
    decode(context, found.tokens[len(found.tokens) - found.tail :], seq_id)


def after_seam(found: Compiled) -> Compiled:
    """Return the segment without its boundary tokens, which have been decoded."""
    return replace(found, seam=0, tokens=found.tokens[found.seam :], base=found.base + found.seam)


def logits(context: Context) -> np.ndarray:
    """After each token of a question."""
    question = text(context.model, 99, 6)
    context.append({0: question}, "all")
    return np.stack([context.logits(index) for index in range(len(question))])


def decoded(context: Context, tokens: Tokens) -> np.ndarray:
    """The logits after these tokens alone."""
    context.clear()
    decode(context, tokens)
    return logits(context)


def carried(context: Context, left: Tokens, *parts: Compiled) -> np.ndarray:
    """The logits after these segments, carried after `left` alone."""
    context.clear()
    decode(context, left)
    for part in parts:
        carry(context, part)
    return logits(context)


def with_a(transition: Transition, factor: float) -> Transition:
    """A times the identity, or a multiple of it, in place of A."""
    a = np.full_like(transition.a, factor)
    if transition.head:
        identity = np.eye(transition.head, dtype=np.float32).ravel() * factor
        a = np.tile(identity, len(a) // len(identity))
    return replace(transition, a=a)


CONTROLS: dict[str, Callable[[Transition], Transition]] = {
    "the state is not carried": lambda one: with_a(one, 0.0),  # S <- B
    "the segment is ignored": lambda one: replace(with_a(one, 1.0), b=np.zeros_like(one.b)),  # S <- S
    "nothing is forgotten": lambda one: with_a(one, 1.0),  # S <- S + B
}


@pytest.mark.parametrize("name", ALL)
def test_a_segment_carries_the_state_after_any_left_context(load: Callable[..., Model], name: str) -> None:
    """Compiled once, after 5 tokens, it fits an empty sequence, one token and many; the controls do not."""
    model = load(name)
    tokens = text(model, 1, 24)
    with open_context(model) as context:
        found = compiled(context, text(model, 2, 5), tokens)
        for count in (0, 1, 100):
            left = text(model, 3, count)
            wanted = decoded(context, np.concatenate([left, tokens]))
            assert nmse(carried(context, left, found), wanted) < BOUND
        if not any(len(one.b) for one in found.transitions):
            return  # a convolution: there is no state to forget
        for what, control in CONTROLS.items():
            wrong = replace(found, transitions=tuple(map(control, found.transitions)))
            assert nmse(carried(context, left, wrong), wanted) > 1000 * BOUND, what


@pytest.mark.parametrize("name", EACH)
def test_of_any_length_and_over_the_borders_of_batches(load: Callable[..., Model], name: str) -> None:
    """From one token after the seam to hundreds, in micro-batches of 1, 7 and 64."""
    model, left = load(name), text(load(name), 3, 50)
    with open_context(model) as context:
        for count, n_ubatch in ((1, 64), (5, 1), (40, 7), (64, 64), (200, 64)):
            tokens = text(model, count, sum(recurrent.margins(context)) + count)
            with open_context(model, n_ubatch=n_ubatch) as other:
                found = compiled(other, text(model, 2, 3), tokens)
            wanted = decoded(context, np.concatenate([left, tokens]))
            assert nmse(carried(context, left, found), wanted) < BOUND, (count, n_ubatch)


@pytest.mark.parametrize("name", ALL)
def test_whole_models_at_the_compile_context(load: Callable[..., Model], name: str) -> None:
    """With all layers: a segment carried at its own position equals the decoded one, as does a moved one without left
    context; two parts equal the whole, also after another left context, where both are approximations."""
    model = load(name, whole=True)
    left, other, tokens = text(model, 2, 5), text(model, 3, 30), text(model, 1, 40)
    with open_context(model) as context:
        whole = compiled(context, left, tokens)
        seam, tail = whole.seam, whole.tail
        wanted = decoded(context, np.concatenate([left, tokens]))
        assert nmse(carried(context, left, whole), wanted) < BOUND
        context.clear()
        middle = seam + 11
        first = compiled(context, left, tokens[:middle], seam, 0)
        with recurrent.capturing(context, 0) as captured:
            decode(context, tokens[middle : len(tokens) - tail])
            transitions = captured()
        rows = context.read(0, 0, len(left) + len(tokens) - tail, base=0, dtype="f32")
        second = Compiled(tokens[middle:], 0, tail, len(left) + middle, rows, transitions)
        assert nmse(carried(context, other, first, second), carried(context, other, whole)) < BOUND


@pytest.mark.parametrize("name", [name for name in ALL if name not in zoo_more.RECURRENT and "mamba" not in name])
def test_keys_turn_with_their_positions(load: Callable[..., Model], name: str) -> None:
    """A segment compiled at the start and carried to position 40 of an empty sequence equals one decoded there:
    attention layers of hybrids are moved as in other models."""
    model = load(name, whole=True)
    tokens = text(model, 1, 40)
    with open_context(model) as context:
        found = compiled(context, tokens[:0], tokens, max(1, recurrent.margins(context)[0]))
        context.clear()
        context.decode_at(0, 40, tokens)
        wanted = logits(context)
        context.clear()
        context.decode_at(0, 40, tokens[: found.seam])
        carry(context, after_seam(found))
        assert nmse(logits(context), wanted) < 1e-8


def test_who_shares_a_state_keeps_it(load: Callable[..., Model]) -> None:
    """A shared state is carried for one of two sequences; the other continues as before."""
    model = load("qwen35")
    tokens = text(model, 1, 24)
    with open_context(model) as context:
        found = compiled(context, text(model, 2, 5), tokens)
        wanted = decoded(context, text(model, 3, 9))
    with open_context(model, n_sequences=2, unified=True) as context:
        decode(context, text(model, 3, 9))
        with context.share(0, 9) as other:
            carry(context, after_seam(found), other.id)
            assert context.length(other.id) == 9 + len(tokens) - found.seam and context.length(0) == 9
            assert nmse(logits(context), wanted) < BOUND


def test_what_is_no_number_is_refused_and_nothing_has_changed(load: Callable[..., Model]) -> None:
    """NaN in a transition or in rows: the sequence has the state and the rows that it had."""
    model = load("granitehybrid")
    tokens = text(model, 1, 24)
    with open_context(model) as context:
        found = compiled(context, text(model, 2, 5), tokens)
        wanted = decoded(context, np.concatenate([text(model, 3, 9), tokens[: found.seam]]))
        bad = replace(found.transitions[0], b=np.full_like(found.transitions[0].b, np.nan))
        rows = next(one for one in found.rows if one.part == "attention")
        worse = [replace(one, k=np.full_like(rows.k, np.nan)) if one is rows else one for one in found.rows]
        context.clear()
        decode(context, text(model, 3, 9))
        with pytest.raises(EngineError, match="NaN"):
            carry(context, replace(found, transitions=(bad,)))
        with pytest.raises(EngineError, match="NaN"):
            carry(context, replace(after_seam(found), rows=tuple(worse)))
        assert context.length(0) == 9 + found.seam
        assert nmse(logits(context), wanted) < BOUND


def test_what_does_not_fit_is_refused(load: Callable[..., Model]) -> None:
    """Another shape, another position, or nothing captured: one line, and no state."""
    model = load("mamba2")
    tokens = text(model, 1, 24)
    with open_context(model) as context:
        found = compiled(context, text(model, 2, 5), tokens)
        (one, *others) = found.transitions
        with pytest.raises(EngineError, match="cannot go on at 40"):
            recurrent.carry(context, 0, 40, tokens, found.rows, found.transitions, 40)
        for wrong in (replace(one, a=one.a[:1].repeat(3)), replace(one, head=7), replace(one, b=one.b[:-1])):
            with pytest.raises(EngineError, match="does not fit its state"):
                recurrent.carry(context, 0, context.length(0), tokens, found.rows, [wrong, *others], context.length(0))
        with pytest.raises(EngineError, match="no transition of layer 1"):
            recurrent.carry(context, 0, context.length(0), tokens, found.rows, [one], context.length(0))
    captures = pytest.raises(EngineError, match="what was captured")
    with open_context(model) as context, recurrent.capturing(context, 0) as captured, captures:
        captured()


def test_what_is_not_decoded_alone_is_not_captured(load: Callable[..., Model]) -> None:
    """Two sequences in a batch, or rows that were restored: a transition would be that of something else. With
    attention alone there is nothing to carry."""
    model = load("mamba2")
    with open_context(model, n_sequences=2, unified=True) as context, recurrent.capturing(context, 0) as captured:
        context.append({0: text(model, 1, 5), 1: text(model, 2, 5)}, "none")
        with pytest.raises(UnsupportedError, match="several sequences"):
            captured()
    with open_context(model) as context:
        decode(context, text(model, 1, 5))
        rows = context.read(0, 0, 5, base=0, dtype="f32")
        context.clear()
        with recurrent.capturing(context, 0) as captured:
            context.splice(0, 0, text(model, 1, 5), rows, 0)
            decode(context, text(model, 1, 5))
            with pytest.raises(EngineError, match="position 5 was decoded, not 0"):
                captured()
    with Model(zoo.zoo_model("llama-dense")) as model, open_context(model) as context:
        assert "no recurrent layers" in str(context.supports("carry"))
        with pytest.raises(UnsupportedError, match="no recurrent layers"), recurrent.capturing(context, 0):
            pass


def test_a_context_computes_as_before_once_nothing_is_captured(load: Callable[..., Model]) -> None:
    model = load("qwen35")
    tokens = text(model, 1, 64)
    with open_context(model) as context:
        decode(context, tokens)
        decode(context, tokens)
        wanted = logits(context)
    with open_context(model) as context:
        with recurrent.capturing(context, 0):
            decode(context, tokens)
        decode(context, tokens)
        assert np.array_equal(logits(context), wanted)
