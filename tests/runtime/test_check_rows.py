"""Tests comparing the rows of a segment with a recompute: wrong ones are named, right ones never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo

from bench.faults.broken_rows import KINDS, PLACES, mutant
from bench.faults.forgeries import TEXTS, missed
from notes_cli.config import shipped_model
from notes_cli.engine.context import Context
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import LayerRows, Segment
from notes_cli.errors import EngineError
from notes_cli.library.container import open_segment, write_segment
from notes_cli.runtime import check_rows as module
from notes_cli.runtime.check_rows import TOLERANCE, check_rows
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import parse_skill

from ..conftest import MakeWorkspace

SKILL = parse_skill(TEXTS[0], source="returns.txt", default="returns")
Open = Callable[..., Workspace]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("zoo")

    def find(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if name == "notes-tiny":
            return shipped_model()
        return path if path.exists() else zoo.texted(name, path)

    return find


@pytest.fixture
def opened(model_file: Callable[[str], Path]) -> Open:

    def make(name: str, **options: object) -> Workspace:
        given = {"n_ctx": 1024, "n_threads": 1, **options}
        return Workspace(model_file(name), ContextOptions(**given))  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    "model",
    ["notes-tiny", "qwen3moe-moe", "gemma3-dense", "deepseek2-moe", "gptneox-dense", "jamba-dense", "hrm_text-dense"],
)
def test_broken_rows_are_named(opened: Open, tmp_path: Path, model: str) -> None:
    """Every kind, in single layers and in all: exactly the broken tensors are named, and none of the intact segment."""
    path, seen = tmp_path / "a.gguf", 0
    with opened(model) as workspace:
        segment = compile_skill(workspace, SKILL)
        assert check_rows(workspace, segment).right
        for number, (kind, place) in enumerate((kind, place) for kind in KINDS for place in PLACES):
            found = mutant(workspace, segment, kind, place, ("K", "V", "KV")[number % 3], number)
            found = found or mutant(workspace, segment, kind, place, "K", number)
            if found is not None:
                write_segment(path, found.segment)
                assert not missed(check_rows(workspace, open_segment(path)), found), str(found)
                seen += 1
    assert seen >= 20


@pytest.mark.parametrize("model", ["notes-tiny", "hrm_text-dense", "minicpm3-dense", "falcon-h1-dense"])
@pytest.mark.parametrize("flash", ["on", "off"])
def test_another_order_of_the_same_computation_is_right(opened: Open, model: str, flash: str) -> None:
    """Other micro-batches, threads and flash attention than in the check; and rows spliced at other positions."""
    with opened(model, flash_attention="off", n_ubatch=33, n_threads=2) as workspace:
        segment = compile_skill(workspace, SKILL)
    with opened(model, flash_attention=flash) as workspace:
        check = check_rows(workspace, segment, (segment.base, 200, 601))
        assert check.right and check.tokens == len(segment), check.reason
        assert bool(check.unchecked) is segment.prefix_only


@pytest.mark.parametrize("model", ["notes-tiny", "hrm_text-dense"])
def test_blocks_are_computed_as_they_are_compiled(opened: Open, model: str) -> None:
    """Each after the left context alone and then moved: decoded in place, its rows would differ by more."""
    with opened(model, n_ubatch=50) as workspace:
        segment = compile_skill(workspace, parse_skill(TEXTS[1], source="x", default="x"), blocks=2)
    with opened(model) as workspace:
        check = check_rows(workspace, segment, (segment.base, 300))
        assert len(segment.blocks) == 2 and check.right, check.reason
        found = mutant(workspace, segment, "keys one position off", "last", "K", 1)
        assert found and not missed(check_rows(workspace, found.segment), found)


@pytest.mark.parametrize("cache", [("q8_0", "q8_0"), ("q4_0", "f16"), ("f32", "f32")])
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_quantized_rows_are_right(opened: Open, cache: tuple[str, str], kv: str) -> None:
    """Rounding in the file or in the cache is no error, at any place."""
    with opened("notes-tiny", type_k=cache[0], type_v=cache[1]) as workspace:
        segment = compile_skill(workspace, SKILL, kv=kv)
        check = check_rows(workspace, segment, (segment.base, 300))
        assert check.right and not check.unchecked, check.reason


def test_a_wrong_rotation_is_found_where_it_is_used(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the library are right; keys that a splice does not rotate, or rotates too far, are not."""
    segment = compile_skill(workspace, SKILL)
    splice = Context.splice
    for turned in ("not at all", "by one too many"):

        def wrong(
            context: Context,
            seq_id: int,
            position: int,
            tokens: object,
            layers: object,
            base: int,
            turned: str = turned,
            **more: object,
        ) -> None:
            if position != base:
                base = position if turned == "not at all" else base - 1
            splice(context, seq_id, position, tokens, layers, base, **more)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(Context, "splice", wrong)
            check = check_rows(workspace, segment, (segment.base, 500))
        assert {(one.tensor, one.position) for one in check.wrong} == {("K", 500)}
    assert check_rows(workspace, segment, (segment.base, 500)).right


def test_a_position_without_a_comparison_is_said(make_workspace: MakeWorkspace, opened: Open) -> None:
    """Where the left context does not fit, keys may not move, a window is kept, or a state."""
    with opened("gemma3-dense", swa_full=False) as workspace:
        check = check_rows(workspace, compile_skill(workspace, SKILL), (100,))
    assert check.right and "its sliding window" in check.unchecked[0]
    workspace = make_workspace("mistral3")  # keys stay within 256 positions
    segment = compile_skill(workspace, SKILL)
    check = check_rows(workspace, segment, (0, 5000, 300))
    assert check.right and len(check.unchecked) == 3
    assert [one.split(":")[0] for one in check.unchecked] == ["position 0", "position 5,000", "position 300"]
    workspace = make_workspace("mamba")
    check = check_rows(workspace, compile_skill(workspace, SKILL), (100,))
    assert check.right and "where they were compiled only" in check.unchecked[0]


def test_noise_of_another_device_is_right_a_mutant_is_not(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as far from two prefills as these from each other were computed elsewhere; mutants among them are found."""
    with opened("notes-tiny") as workspace:
        segment = compile_skill(workspace, SKILL)
        elsewhere = replace(
            segment, layers=tuple(noisy(rows, 0.04, number) for number, rows in enumerate(segment.layers))
        )
        assert not check_rows(workspace, elsewhere).right  # more than this machine's noise
        computed = module._prefill_segment

        def apart(workspace: Workspace, sequence: object, segment: Segment, progress: object) -> object:
            found = computed(workspace, sequence, segment, progress)  # type: ignore[arg-type]
            if sequence.context.n_ubatch != module.OTHER_BATCH:  # type: ignore[attr-defined]
                return found
            return replace(found, layers=[noisy(rows, 0.04, number + 100) for number, rows in enumerate(found.layers)])

        monkeypatch.setattr(module, "_prefill_segment", apart)
        assert check_rows(workspace, elsewhere).right
        for kind in ("keys one position off", "one row wrecked", "zeros", "rows shifted by one token"):
            found = mutant(workspace, elsewhere, kind, "middle", "K", 3)
            assert found and not missed(check_rows(workspace, found.segment), found), kind


def test_channels_of_another_size_hide_nothing(workspace: Workspace) -> None:
    """Beside channels a hundred times as large, as in K of some models, the others are compared as well."""
    segment = compile_skill(workspace, SKILL)
    rows = segment.layers[0]
    large = rows.k.astype(np.float32)
    large[:, :2] = 1000
    off = large.copy()
    off[:, 2:] = np.roll(off[:, 2:], 1, axis=1)
    (mine, *_) = module.compare_layers([replace(rows, k=off)], [replace(rows, k=large)])
    assert mine.median > 10 * TOLERANCE
    assert np.median(np.linalg.norm(off - large, axis=1) / np.linalg.norm(large, axis=1)) < TOLERANCE


def test_rows_of_other_shapes_are_refused(workspace: Workspace) -> None:
    segment = compile_skill(workspace, SKILL)
    with pytest.raises(EngineError, match="rows of other layers"):
        check_rows(workspace, replace(segment, layers=tuple(segment.layers[:-1])))
    with pytest.raises(EngineError, match="of shape"):
        check_rows(workspace, broken(segment, 0, lambda rows: replace(rows, k=rows.k[:, :8])))


def broken(segment: Segment, layer: int, change: Callable[[LayerRows], LayerRows]) -> Segment:
    layers = list(segment.layers)
    layers[layer] = change(layers[layer])
    return replace(segment, layers=tuple(layers))


def noisy(rows: LayerRows, part: float, seed: int) -> LayerRows:
    chance = np.random.default_rng(seed)

    def moved(old: np.ndarray) -> np.ndarray:
        size = np.sqrt((old.astype(np.float32) ** 2).mean(axis=0, keepdims=True))
        return (old + part * size * chance.standard_normal(old.shape)).astype(old.dtype)

    return replace(rows, k=moved(rows.k), v=moved(rows.v))
