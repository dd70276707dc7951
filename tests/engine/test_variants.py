"""Tests of the zoo's models with other metadata, for cases that the zoo's uniform metadata hides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import LoadZoo, nmse

from bench.zoo_model import BASE, TARGET, TOKENS, Case, Errors
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.errors import UnsupportedError

ORDINARY = ("f16", "plain", "off", "one")

PARTIAL = {"rope.dimension_count": 32, "rope.dimension_count_swa": 32}
FACTORS = {f"rope_{kind}.weight": (16,) for kind in ("factors_long", "factors_short", "freqs")}
BASES = {"rope.freq_base": 50000.0, "rope.freq_base_swa": 7000.0}
YARN = {"rope.freq_base": 50000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


def check(model: Model, base: int = BASE, target: int = TARGET, column: tuple[str, str, str, str] = ORDINARY) -> None:
    """Rows compiled at `base` and spliced at `target` are those of decoding there; by a wrong distance they are not."""
    case = Case(model, column)
    wanted = case.decoded(target)
    found = Errors.between(case.placed(case.segment(base), base, target), wanted)
    assert case.right(found, target, None), found
    with case.context() as context:
        rotated = any(layer.rope >= 0 for layer in context.layers)
    if rotated:  # by four: some models move by blocks of them only
        wrong = Errors.between(case.placed(case.segment(base), base + 4, target), wanted)
        assert not case.right(wrong, target, None), wrong


def bases(model: Model) -> list[float]:
    """The base that each layer is rotated with, 0 if it is not."""
    with Case(model, ORDINARY).context() as context:
        return [layer.freq_base for layer in context.layers if layer.part == "attention"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((f"{name}-dense", {}) for name in ("gptneox", "phi2", "chatglm", "stablelm", "nemotron", "glm4", "qwen")),
        *((f"{name}-moe", {}) for name in ("glm4moe", "minimax-m2", "minimax-m3", "mimo2", "laguna")),
        *((f"{name}-dense", {}) for name in ("plamo3", "gemma3")),
        ("phi3-dense", {"shapes": FACTORS}),
        # here the rotated part is at the end of a head
        ("minicpm3-dense", {"shapes": {**FACTORS, "attn_kv_a_mqa.weight": (544, 256), "attn_kv_b.weight": (448, 512)}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_part_of_each_head_rotated(load_zoo: LoadZoo, name: str, changes: dict[str, Any]) -> None:
    model = load_zoo(name, PARTIAL, **changes)
    with Case(model, ORDINARY).context() as context:
        assert {layer.n_rot for layer in context.layers if layer.part == "attention"} == {32}
    check(model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((f"{name}-dense", [7000, 50000]) for name in ("gemma2", "gemma3", "plamo3")),
        *((name, [7000, 50000]) for name in ("gpt-oss-moe", "afmoe-moe")),
        *((name, [50000, 7000]) for name in ("mimo2-moe", "spark2_5-dense", "laguna-moe", "dots3note-moe")),
        # the base of the full layers in those of the window, too
        *((name, [50000, 50000]) for name in ("granite_swa-dense", "olmo2-dense", "mellum-moe")),
        # the layers of the window alone are rotated; by their own base, or by the other one
        *((name, [0, 7000]) for name in ("maple-moe", "muse-glimmer-dense", "smallthinker-moe")),
        *((name, [50000, 0]) for name in ("cohere2-dense", "exaone-moe-moe")),
        ("cohere2moe-moe", [50000, 50000]),  # the first layer, which is dense, has a window and no experts
        ("llama4-moe", [7000, 50000, 7000, 0]),
        ("deepseek2-moe", [50000, 50000]),
        # regardless of its file
        pytest.param("cogvlm-dense", [10000, 10000], marks=pytest.mark.patches("fixes")),
    ],
)
def test_bases(load_zoo: LoadZoo, name: str, expected: list[float]) -> None:
    """Layers of the window and full ones are turned by the base that their graph uses."""
    model = load_zoo(name, BASES)
    assert bases(model) == expected
    check(model)


@pytest.mark.parametrize(
    "name",
    [
        *("granite_swa-dense", "mellum-moe", "olmo2-dense", "gpt-oss-moe", "laguna-moe", "dots3note-moe"),
        *("gemma3-dense", "minimax-m3-moe", "mistral3-dense", "mistral4-moe"),
    ],
)
def test_yarn_of_the_file(load_zoo: LoadZoo, name: str) -> None:
    """YaRN in the file, with a window whose layers do without it or not."""
    check(load_zoo(name, YARN))


SECTIONS = [([16, 16, 16, 16], 16, 16), ([16, 24, 24, 0], 0, 6), ([24, 20, 20, 0], 0, 2)]


@pytest.mark.parametrize(
    ("name", "sections", "still", "interleaved"),
    [
        *((name, *one) for name in ("qwen2vl-dense", "qwen3vl-dense") for one in SECTIONS),
        *((name, *SECTIONS[0]) for name in ("qwen3vlmoe-moe", "glm4-dense")),
        *((name, *SECTIONS[1]) for name in ("glm4moe-moe", "paddleocr-moe")),
    ],
)
def test_sections(load_zoo: LoadZoo, name: str, sections: list[int], still: int, interleaved: int) -> None:
    """Text under M-RoPE: pairs of the fourth axis, or of none, do not turn; all others do."""
    model = load_zoo(name, {"rope.dimension_sections": sections})
    with Case(model, ORDINARY).context() as context:
        assert (context.frequencies(0) == 0).sum() == (interleaved if "qwen3vl" in name else still)
    check(model)


@pytest.mark.parametrize(
    ("name", "layers", "still"),
    [
        ("smollm3-dense", 8, {3, 7}),
        ("afmoe-moe", 8, {3, 7}),
        ("smallthinker-moe", 8, {0, 4}),
        ("cohere2-dense", 8, {1, 3, 5, 7}),
        ("cohere2moe-moe", 4, {2}),
        ("baichuan-dense", 32, set()),  # the 7B
        ("baichuan-dense", 40, set(range(40))),  # the 13B: ALiBi
        ("exaone4-dense", 64, set(range(3, 64, 4))),  # the 32B: a window
    ],
)
def test_layers_without_positions(load_zoo: LoadZoo, name: str, layers: int, still: set[int]) -> None:
    """The graph decides which layers rotate, some only for models with enough layers."""
    model = load_zoo(name, layers=layers)
    assert {layer for layer, base in enumerate(bases(model)) if base == 0} == still
    check(model)


@pytest.mark.parametrize("finetuned", [True, False])
def test_granite_without_positions(load_zoo: LoadZoo, finetuned: bool) -> None:
    model = load_zoo("granite-dense", {"rope.scaling.finetuned": finetuned})
    assert bases(model) == ([10000, 10000] if finetuned else [0, 0])
    check(model)


@pytest.mark.parametrize(
    ("name", "top_k"),
    [*((name, 4) for name in ("deepseek32-moe", "glm-dsa-moe", "hy_v4-moe", "dots3note-moe")), ("deepseek32-moe", 16)],
)
def test_sparse_attention_chooses_the_same_rows(load_zoo: LoadZoo, name: str, top_k: int) -> None:
    """The indexer's keys move with the rows: the few that each token looks at are the same at another position."""
    check(load_zoo(name, {"attention.indexer.top_k": top_k}))


@pytest.mark.parametrize("streams", ["one", "streams"])
def test_sparse_attention_by_blocks(load_zoo: LoadZoo, streams: str) -> None:
    """MiniMax M3 chooses among blocks of four positions: rows move by whole blocks, once there is a choice."""
    model, column = load_zoo("minimax-m3-moe", {"attention.indexer.top_k": 2}), ("f16", "plain", "on", streams)
    check(model, 4, 40, column)
    check(model, 3, 43, column)
    case = Case(model, column)
    with case.context() as context:
        for base, target in ((3, 40), (0, 1), (40, 3), (4, 41)):
            assert "multiples of 4" in (context.can_move(base, target, TOKENS) or "")
        assert context.can_move(1, 3, 5) is None  # up to position 7: two blocks, and two may be looked at
        assert "multiples of 4" in (context.can_move(1, 3, 6) or "")
        with pytest.raises(UnsupportedError, match="multiples of 4"):
            context.splice(case.seq_id, 41, case.skill, case.segment(4), 4)


def test_half_a_block_apart_is_wrong(load_zoo: LoadZoo) -> None:
    """The control: decoded whole blocks further on, the logits are the same but for rounding; between them, others."""
    case = Case(load_zoo("minimax-m3-moe", {"attention.indexer.top_k": 2}), ("f32", "plain", "on", "one"))
    here, blocks, between = (case.decoded(position)[1] for position in (4, 40, 42))
    assert nmse(blocks, here) < 5e-6 < nmse(between, here) / 4


@pytest.mark.patches("fixes")
def test_logits_of_the_token_that_was_asked_for(load_zoo: LoadZoo) -> None:
    """CogVLM's graph computed the logits of all tokens, and returned the first one's for the last one's."""
    tokens = np.arange(7, 17, dtype=np.int32)
    with Context(load_zoo("cogvlm-dense"), ContextOptions(n_ctx=64, n_threads=1)) as context:
        context.append({0: tokens}, "all")
        last = context.logits(-1)
        context.truncate(0, 0)
        context.append({0: tokens}, "last")
        np.testing.assert_allclose(context.logits(-1), last, atol=1e-5)
