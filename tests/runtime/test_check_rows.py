"""Tests comparing rows with a recompute, also on import: wrong ones are named and refused, right ones never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from tiny import write_model

from bench.faults.broken_rows import KINDS, PLACES, mutant
from bench.faults.forgeries import TEXTS, missed, requantize
from notes_cli.config import shipped_model
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import LayerRows, Prefill, Segment
from notes_cli.errors import DamagedError, EngineError, SegmentError, TakenError
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.library.store import export
from notes_cli.runtime import check_rows as module
from notes_cli.runtime.check_rows import TOLERANCE, check_rows
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.recompile import compile_to_library, import_segment
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import parse_skill

from ..conftest import MakeWorkspace
from ..refused import refused

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
    ("model", "turn"), [("notes-tiny", 0), ("qwen3moe-moe", 1), ("deepseek2-moe", 2), ("jamba-dense", 3)]
)
def test_broken_rows_are_named(opened: Open, tmp_path: Path, model: str, turn: int) -> None:
    """Every kind, each in one place: exactly the broken tensors are named, and none of the intact segment. (All places
    and architectures: `make faults`.)"""
    path, seen = tmp_path / "a.gguf", 0
    with opened(model) as workspace:
        segment = compile_skill(workspace, SKILL)
        assert check_rows(workspace, segment).right
        for number, kind in enumerate(KINDS):
            place = PLACES[(number + turn) % len(PLACES)]
            found = mutant(workspace, segment, kind, place, ("K", "V", "KV")[number % 3], number)
            found = found or mutant(workspace, segment, kind, place, "K", number)
            if found is not None:
                write_segment(path, found.segment)
                assert not missed(check_rows(workspace, open_segment(path)), found), str(found)
                seen += 1
    assert seen >= 5


@pytest.mark.parametrize(
    ("model", "flash"),
    [("notes-tiny", "on"), ("notes-tiny", "off"), ("minicpm3-dense", "on"), ("falcon-h1-dense", "on")],
)
def test_another_order_of_the_same_computation_is_right(opened: Open, model: str, flash: str) -> None:
    """Other micro-batches, threads and flash attention than in the check."""
    with opened(model, flash_attention="off", n_ubatch=33, n_threads=2) as workspace:
        segment = compile_skill(workspace, SKILL)
    with opened(model, flash_attention=flash) as workspace:
        check = check_rows(workspace, segment)
        assert check.right and check.tokens == len(segment) and not check.unchecked, check.reason


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k")
    requantize(write_model(folder / "f32.gguf", embd=256, layers=8), folder / "q.gguf", "Q6_K")
    return folder / "q.gguf"


@pytest.mark.parametrize(
    "compiled", [{"n_ubatch": 64}, {"n_ubatch": 1}, {"n_ubatch": 64, "n_threads": 3}, {"flash_attention": "off"}]
)
def test_intact_rows_are_equal_bit_for_bit(k_quants: Path, compiled: dict[str, Any]) -> None:
    """Of K-quants, in other micro-batches (the last has few tokens), with other threads, without flash attention,
    and after a checkpoint within a micro-batch. Without the micro-batches that a segment has, they differ."""
    plain = {"n_ctx": 1024, "n_threads": 1, "flash_attention": "on"}
    skill = parse_skill("".join(chr(97 + i * i % 23) for i in range(64 + 5)), source="x", default="x")
    longer = replace(skill, text=skill.text * 3)
    with Workspace(k_quants, ContextOptions(**{**plain, **compiled})) as workspace:
        segment = compile_skill(workspace, skill)
        resumed = compile_skill(workspace, longer, known=segment)
    assert sum(batch.rows for batch in resumed.batches) == resumed.base + len(resumed)
    with Workspace(k_quants, ContextOptions(**plain)) as workspace:
        assert [check_rows(workspace, one).farthest for one in (segment, resumed)] == [0, 0]
        if "flash_attention" not in compiled:
            unknown = [replace(one, batches=()) for one in (segment, resumed)]
            assert max(check_rows(workspace, one).farthest for one in unknown) > 0


def test_a_wrong_channel_is_named(workspace: Workspace) -> None:
    """In all layers, in which it moves no row by as much as the bar."""
    segment = compile_skill(workspace, SKILL)
    layers = [replace(rows, k=rows.k.copy(), v=rows.v.copy()) for rows in segment.layers]
    for rows in layers:
        for part in (rows.k, rows.v):
            part[:, np.argmax(np.abs(part).mean(axis=0))] *= np.float16(1.04)
    check = check_rows(workspace, replace(segment, layers=tuple(layers)))
    assert len(check.wrong) == 2 * len(layers) and "channel" in check.reason, check.reason


def test_blocks_are_computed_as_they_are_compiled(opened: Open) -> None:
    """Each after the left context alone and then moved: decoded in place, its rows would differ by more."""
    with opened("notes-tiny", n_ubatch=50) as workspace:
        segment = compile_skill(workspace, parse_skill(TEXTS[1], source="x", default="x"), blocks=2)
    with opened("notes-tiny") as workspace:
        check = check_rows(workspace, segment)
        assert len(segment.blocks) == 2 and check.right, check.reason
        assert not check_rows(workspace, replace(segment, blocks=(), moves=())).right  # as a single text
        found = mutant(workspace, segment, "keys one position off", "last", "K", 1)
        assert found and not missed(check_rows(workspace, found.segment), found)


@pytest.mark.parametrize(
    ("cache", "kv"), [(("q8_0", "q8_0"), "q8_0"), (("q4_0", "f16"), "f16"), (("f32", "f32"), "q8_0")]
)
def test_quantized_rows_are_right(opened: Open, cache: tuple[str, str], kv: str) -> None:
    """Rounding in the file or in the cache is no error."""
    with opened("notes-tiny", type_k=cache[0], type_v=cache[1]) as workspace:
        check = check_rows(workspace, compile_skill(workspace, SKILL, kv=kv))
        assert check.right and not check.unchecked, check.reason


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
            if sequence.context.options.flash_attention != "off":  # type: ignore[attr-defined]
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
    """Return the segment with other rows in one layer."""
    layers = list(segment.layers)
    layers[layer] = change(layers[layer])
    return replace(segment, layers=tuple(layers))


def noisy(rows: LayerRows, part: float, seed: int) -> LayerRows:
    chance = np.random.default_rng(seed)

    def moved(old: np.ndarray) -> np.ndarray:
        size = np.sqrt((old.astype(np.float32) ** 2).mean(axis=0, keepdims=True))
        return (old + part * size * chance.standard_normal(old.shape)).astype(old.dtype)

    return replace(rows, k=moved(rows.k), v=moved(rows.v))


TEXT = "# Returns\n\ndate: 2026-06-01\ntier: gold\n\n" + "Returns before 2026-06-15 are accepted. " * 4
RETURNS = parse_skill(TEXT, source="returns.txt", default="returns")


@pytest.fixture
def shared(workspace: Workspace, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A segment of another user, with this type of rows."""
    write_segment(tmp_path / "own.gguf", compile_skill(workspace, RETURNS, kv=getattr(request, "param", "f16")))
    export(tmp_path / "own.gguf", tmp_path / "shared.gguf")
    return tmp_path / "shared.gguf"


@pytest.mark.parametrize("trust", [False, True])
def test_the_time_of_another_machine_is_not_believed(workspace: Workspace, tmp_path: Path, trust: bool) -> None:
    """It is neither imported nor exported; in a foreign file it counts as unknown, and a compile here measures it."""
    copied = tmp_path / "copied.gguf"
    write_segment(copied, replace(compile_skill(workspace, RETURNS), prefill=Prefill(100.0, 10, 1)))
    export(copied, tmp_path / "exported.gguf")
    assert peek(copied).prefill and peek(tmp_path / "exported.gguf").prefill is None
    assert workspace.open(copied).prefill is None
    done = import_segment(workspace, copied, trust=trust)
    assert done.how == "rows" and peek(done.path).prefill is None and workspace.open(done.path).prefill is None
    compile_to_library(workspace, RETURNS, force=True)
    found = workspace.open(done.path).prefill
    assert found and found.seconds < 100 and (found.tokens, found.threads) == (done.tokens, 1)


@pytest.mark.parametrize("shared", ["f16", "q8_0"], indirect=True)
def test_what_this_model_computes_is_taken_over(workspace: Workspace, shared: Path) -> None:
    """All rows are compared, and stored as in the file; a second import computes and writes nothing."""
    done = import_segment(workspace, shared)
    there, own = open_segment(shared), open_segment(done.path)
    assert (done.how, done.checked, done.reasons) == ("rows", done.tokens, ())
    assert done.farthest < (TOLERANCE / 10 if own.kv == "f16" else TOLERANCE)
    assert all(
        np.array_equal(a.k, b.k) and np.array_equal(a.v, b.v) for a, b in zip(there.layers, own.layers, strict=True)
    )
    assert (own.source, own.fields, own.kv) == ("", there.fields, there.kv)
    before = done.path.stat().st_mtime_ns
    assert import_segment(workspace, shared).how == "kept" and done.path.stat().st_mtime_ns == before


def swapped(rows: LayerRows) -> LayerRows:
    return replace(rows, v=rows.v[::-1].copy())


def flipped(rows: LayerRows) -> LayerRows:
    """Turn one key of one token: a sample would usually miss it."""
    k = rows.k.copy()
    k[7] = -k[7]
    return replace(rows, k=k)


@pytest.mark.parametrize(
    ("change", "layer", "says"),
    [
        (swapped, 0, "does not hold what this model computes: .* Run: notes compile --from"),
        (swapped, -1, "does not hold what this model computes: .* Run: notes compile --from"),
        (flipped, 1, "layer 1, K, token 7: off by 2, where rounding explains 0.002. Somebody forged it"),
        (lambda rows: replace(rows, k=np.full_like(rows.k, np.nan)), -1, "tokens 0 to [0-9]+: no numbers, or infinite"),
    ],
)
def test_forged_rows_are_refused(
    workspace: Workspace, shared: Path, change: Callable[[LayerRows], LayerRows], layer: int, says: str
) -> None:
    """With right checksums, a right header and other rows nothing is imported; with trust it is."""
    write_segment(shared, broken(open_segment(shared), layer, change))
    with refused(SegmentError, says):
        import_segment(workspace, shared)
    assert not workspace.library.entries()
    assert change is not swapped or import_segment(workspace, shared, trust=True).how == "rows"


def test_where_the_text_gives_other_tokens_it_is_compiled(
    workspace: Workspace, make_workspace: MakeWorkspace, shared: Path
) -> None:
    """By another model, or because it is not that of the tokens: the readable text of the file is imported."""
    done = import_segment(make_workspace("qwen2"), shared, name="other")
    assert done.how == "text" and "for architecture llama, this model is qwen2" in done.reasons[0]
    segment = open_segment(shared)
    assert open_segment(done.path).text == RETURNS.text == segment.text
    write_segment(shared, replace(segment, text=segment.text.replace("gold", "iron"), fields=()))
    done = import_segment(workspace, shared)
    assert (done.how, done.reasons) == ("text", ("its text gives other tokens here",))
    assert "tier: iron" in peek(done.path).text


def test_rows_of_a_recurrent_model_are_checked(make_workspace: MakeWorkspace, tmp_path: Path) -> None:
    workspace = make_workspace("mamba")
    write_segment(tmp_path / "a.gguf", compile_skill(workspace, RETURNS))
    assert import_segment(workspace, tmp_path / "a.gguf", name="honest").how == "rows"
    forged = broken(open_segment(tmp_path / "a.gguf"), 0, lambda rows: replace(rows, v=rows.v * np.float16(1.1)))
    write_segment(tmp_path / "a.gguf", forged)
    with refused(SegmentError, "layer 0, state of the recurrence: off by 0.1"):
        import_segment(workspace, tmp_path / "a.gguf", name="forged")


def test_a_name_that_another_text_has(workspace: Workspace, shared: Path) -> None:
    first = import_segment(workspace, shared)
    segment = open_segment(shared)
    other = compile_skill(workspace, parse_skill("fee: 12", source="-", default="returns"))
    write_segment(shared, other)
    with refused(TakenError, "has a skill returns already"):
        import_segment(workspace, shared)
    assert open_segment(first.path).text == segment.text
    assert import_segment(workspace, shared, name="fees").name == "fees"
    assert import_segment(workspace, shared, force=True).how == "rows" and peek(first.path).text == "fee: 12"


def test_damage_is_said_before_anything_is_computed(workspace: Workspace, shared: Path) -> None:
    data = bytearray(shared.read_bytes())
    data[-40] ^= 1
    shared.write_bytes(data)
    with refused(DamagedError, "checksum"):
        import_segment(workspace, shared, trust=True)
