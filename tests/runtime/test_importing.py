"""Tests importing segments: rows that this model computes are accepted, others refused or compiled from their text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine.segment import LayerRows, Prefill
from notes_cli.errors import DamagedError, SegmentError, TakenError
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.library.store import export
from notes_cli.runtime.check_rows import TOLERANCE
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.recompile import compile_to_library, import_segment
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import parse_skill

from ..conftest import MakeWorkspace
from ..refused import refused

TEXT = "# Returns\n\ndate: 2026-06-01\ntier: gold\n\n" + "Returns before 2026-06-15 are accepted. " * 4
SKILL = parse_skill(TEXT, source="returns.txt", default="returns")


@pytest.fixture
def shared(workspace: Workspace, tmp_path: Path) -> Path:
    write_segment(tmp_path / "own.gguf", compile_skill(workspace, SKILL))
    export(tmp_path / "own.gguf", tmp_path / "shared.gguf")
    return tmp_path / "shared.gguf"


def altered(path: Path, change: Callable[[LayerRows], LayerRows], layer: int = -1) -> Path:
    """Return the same file with other rows in one layer, and right checksums."""
    segment = open_segment(path)
    layers = list(segment.layers)
    layers[layer] = change(layers[layer])
    write_segment(path, replace(segment, layers=tuple(layers)))
    return path


@pytest.mark.parametrize("trust", [False, True])
def test_the_time_of_another_machine_is_not_believed(workspace: Workspace, tmp_path: Path, trust: bool) -> None:
    """It is neither imported nor exported; in a foreign file it counts as unknown, and a compile here measures it."""
    copied = tmp_path / "copied.gguf"
    write_segment(copied, replace(compile_skill(workspace, SKILL), prefill=Prefill(100.0, 10, 1)))
    export(copied, tmp_path / "exported.gguf")
    assert peek(copied).prefill and peek(tmp_path / "exported.gguf").prefill is None
    assert workspace.open(copied).prefill is None
    done = import_segment(workspace, copied, trust=trust)
    assert done.how == "rows" and peek(done.path).prefill is None and workspace.open(done.path).prefill is None
    compile_to_library(workspace, SKILL, force=True)
    found = workspace.open(done.path).prefill
    assert found and found.seconds < 100 and (found.tokens, found.threads) == (done.tokens, 1)


def test_what_this_model_computes_is_taken_over(workspace: Workspace, shared: Path) -> None:
    """All rows are compared, and stored as in the file; a second import computes and writes nothing."""
    done = import_segment(workspace, shared)
    assert (done.how, done.checked, done.reasons) == ("rows", done.tokens, ()) and done.farthest < TOLERANCE / 10
    there, own = open_segment(shared), open_segment(done.path)
    assert all(
        np.array_equal(a.k, b.k) and np.array_equal(a.v, b.v) for a, b in zip(there.layers, own.layers, strict=True)
    )
    assert own.source == "" and own.fields == there.fields
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
        (flipped, 1, "layer 1, K, token 7: off by 2, where rounding explains 0.02. Somebody forged it"),
        (lambda rows: replace(rows, k=np.full_like(rows.k, np.nan)), -1, "tokens 0 to [0-9]+: no numbers, or infinite"),
    ],
)
def test_forged_rows_are_refused(
    workspace: Workspace, shared: Path, change: Callable[[LayerRows], LayerRows], layer: int, says: str
) -> None:
    """With right checksums, a right header and other rows nothing is imported; with trust it is."""
    altered(shared, change, layer)
    with refused(SegmentError, says):
        import_segment(workspace, shared)
    assert not workspace.library.entries()
    assert change is not swapped or import_segment(workspace, shared, trust=True).how == "rows"


def test_a_text_that_is_not_that_of_the_tokens_is_compiled(workspace: Workspace, shared: Path) -> None:
    """The readable text of the file is imported, whatever its tokens are."""
    segment = open_segment(shared)
    write_segment(shared, replace(segment, text=segment.text.replace("gold", "iron"), fields=()))
    done = import_segment(workspace, shared)
    assert (done.how, done.reasons) == ("text", ("its text gives other tokens here",))
    assert "tier: iron" in peek(done.path).text


def test_another_model_compiles_the_text(make_workspace: MakeWorkspace, shared: Path) -> None:
    other = make_workspace("qwen2")
    done = import_segment(other, shared)
    assert done.how == "text" and "for architecture llama, this model is qwen2" in done.reasons[0]
    assert open_segment(done.path).text == SKILL.text


def test_rows_of_a_recurrent_model_are_checked(make_workspace: MakeWorkspace, tmp_path: Path) -> None:
    workspace = make_workspace("mamba")
    write_segment(tmp_path / "a.gguf", compile_skill(workspace, SKILL))
    assert import_segment(workspace, tmp_path / "a.gguf", name="honest").how == "rows"
    altered(tmp_path / "a.gguf", lambda rows: replace(rows, v=rows.v * np.float16(1.1)), layer=0)
    with refused(SegmentError, "layer 0, state of the recurrence: off by 0.1"):
        import_segment(workspace, tmp_path / "a.gguf", name="forged")


def test_blocks_are_checked_each_after_the_left_context(workspace: Workspace, tmp_path: Path) -> None:
    """A segment in blocks is valid without attention between them; as a single text it would not be."""
    segment = compile_skill(workspace, parse_skill(TEXT.replace(". ", ".\n"), source="x", default="x"), blocks=3)
    assert len(segment.blocks) == 3
    write_segment(tmp_path / "whole.gguf", replace(segment, blocks=(), moves=()))
    with refused(SegmentError, "does not hold what this model computes"):
        import_segment(workspace, tmp_path / "whole.gguf")
    write_segment(tmp_path / "blocks.gguf", segment)
    assert import_segment(workspace, tmp_path / "blocks.gguf").how == "rows"


def test_the_influence_of_fields_is_taken_on_trust_only(workspace: Workspace, tmp_path: Path) -> None:
    """It decides which tokens an edit recomputes, and is not verified."""
    segment = compile_skill(workspace, SKILL, measure=lambda done, of: None)
    write_segment(tmp_path / "a.gguf", segment)
    done = import_segment(workspace, tmp_path / "a.gguf")
    assert done.dropped and not open_segment(done.path).influence
    done = import_segment(workspace, tmp_path / "a.gguf", name="other", trust=True)
    assert not done.dropped and set(open_segment(done.path).influence) == {"date", "tier"}


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
