"""Tests segments stored as q8_0: computed as usual, rounded once at the end, and never a source of a compile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine.segment import STORED_TYPES, Segment
from notes_cli.errors import SegmentError, UnsupportedError
from notes_cli.explanations import why
from notes_cli.library.container import open_segment, peek, small, write_segment
from notes_cli.library.segment_files import checkpoint_path
from notes_cli.runtime import compile as compiling_module
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill, plan
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library, import_segment
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum
from notes_cli.text.skill import Skill

from ..conftest import MakeWorkspace

TEXT = "date: 2026-06-01\n" + "".join(f"Rule {number} is said here.\n" for number in range(12))
SMALL = [kv for kv in STORED_TYPES if kv != "f16"]


def text_of(words: str) -> Skill:
    from notes_cli.text.skill import parse_skill

    return parse_skill(words, source="rules.txt", default="rules")


def bits(segment: Segment) -> list[bytes]:
    return [part.tobytes() for layer in segment.layers for part in (layer.k, layer.v)]


@pytest.mark.parametrize("kv", SMALL)
def test_rows_are_those_of_f16_rounded(workspace: Workspace, kv: str) -> None:
    """Only the stored type differs. Shrinking a file needs no prefill, the reverse a full one."""
    skill = text_of(TEXT)
    first = compile_to_library(workspace, skill)
    exact = open_segment(first.path)
    done = compile_to_library(workspace, skill, kv=kv)
    assert done.reasons == (f"its rows are kept as f16, not as {kv}",) and done.decoded == 0
    kept = open_segment(done.path)
    assert bits(kept) == bits(small(replace(exact, kv=kv))) != bits(exact)
    assert done.path == first.path and done.kv == peek(done.path).kv == kv  # the same skill for the same contexts
    assert compile_to_library(workspace, skill, kv=kv).reasons == ()
    back = compile_to_library(workspace, skill, kv="f16")
    assert back.reasons == (f"its rows are kept as {kv}, not as f16",) and back.decoded == back.tokens
    assert bits(open_segment(back.path)) == bits(exact)


@pytest.mark.parametrize("kv", SMALL)
@pytest.mark.parametrize("blocks", [None, 3])
def test_rounded_rows_are_no_source(workspace: Workspace, kv: str, blocks: int | None) -> None:
    """The rows of a changed text equal those of a fresh compile. The control: an f16 file's are used."""
    changed = text_of(TEXT.replace("Rule 11", "Rule 99"))
    for before, after in ((kv, kv), (kv, "f16"), ("f16", kv)):
        workspace.library.path("rules", workspace.identity).unlink(missing_ok=True)
        compile_to_library(workspace, text_of(TEXT), kv=before, blocks=blocks)
        done = compile_to_library(workspace, changed, kv=after)
        assert (done.decoded == done.tokens) == (before != "f16"), (before, after)
        if before != "f16":
            fresh = compile_skill(workspace, changed, blocks=blocks, kv=after)
            assert bits(open_segment(done.path)) == bits(fresh)


def test_an_interrupted_compile_goes_on_exactly(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is not rounded: the file equals that of an uninterrupted compile."""
    monkeypatch.setattr(compiling_module, "KEEP", 0.0)
    monkeypatch.setattr(compiling_module, "COST", 0.0)
    workspace = Workspace(workspace.model.path, replace(workspace.options, n_ubatch=64))
    with workspace:

        def stop(done: int, total: int) -> None:
            if done > 0.6 * total:
                raise KeyboardInterrupt

        whole = compile_skill(workspace, text_of(TEXT), kv="q8_0")
        with pytest.raises(KeyboardInterrupt):
            compile_to_library(workspace, text_of(TEXT), progress=stop, kv="q8_0")
        path = workspace.library.path("rules", workspace.identity)
        assert peek(checkpoint_path(path)).kv == "f16"
        done = compile_to_library(workspace, text_of(TEXT), kv="q8_0")
        assert 0 < done.decoded < done.tokens and bits(open_segment(path)) == bits(whole)


def test_rows_whose_rounding_is_seen_are_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and the existing file stays. Logits are compared: other rows would fail."""
    skill = text_of(TEXT)
    path = compile_to_library(workspace, skill).path
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(compiling_module, "NEAR", 1.1)
        with pytest.raises(UnsupportedError, match="rules cannot be kept as q8_0"):
            compile_to_library(workspace, skill, kv="q8_0")
    assert path.read_bytes() == before

    def spoilt(segment: Segment) -> Segment:
        return replace(segment, layers=tuple(replace(rows, k=rows.k, v=-rows.v) for rows in segment.layers))

    monkeypatch.setattr(compiling_module, "small", spoilt)
    with pytest.raises(UnsupportedError, match="the logits after it"):
        compile_to_library(workspace, skill, kv="q8_0")


def test_where_rows_cannot_be_kept_so(make_workspace: MakeWorkspace) -> None:
    """Rows of 48 numbers, and those partly rotated: one line, before anything is computed."""
    workspace = make_workspace("mistral", embd=96, kv_heads=2)
    with pytest.raises(UnsupportedError, match="48 numbers, and q8_0"):
        plan(workspace, text_of(TEXT), kv="q8_0")
    workspace = make_workspace("mamba")
    with pytest.raises(UnsupportedError, match="cannot be kept as f16/q8_0: it has none"):
        plan(workspace, text_of(TEXT), kv="f16/q8_0")


def test_rows_that_cannot_be_moved(make_workspace: MakeWorkspace) -> None:
    """They are restored with their left context and the state, which is not rounded."""
    workspace = make_workspace("lfm2")
    exact = compile_skill(workspace, text_of(TEXT))
    kept = compile_skill(workspace, text_of(TEXT), kv="q8_0")
    assert kept.prefix_only and kept.nbytes < exact.nbytes
    for one, other in zip(kept.layers, exact.layers, strict=True):
        assert one.part != "state" or (one.k.tobytes(), one.v.tobytes()) == (other.k.tobytes(), other.v.tobytes())
    logits = []
    for segment in (exact, kept):
        sequence = assemble(workspace, Prompt("Why?", [segment]))
        assert any(piece.how == "spliced" for piece in sequence.pieces)
        logits.append(sequence.logits())
        sequence.close()
    assert _cosine(*logits) > 0.99


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def test_what_comes_after_such_a_splice(workspace: Workspace) -> None:
    """Errata, rewriting and shared prefixes work as after any other; the answer is near that with f16 rows."""
    skill = text_of(TEXT)
    results: dict[str, list[np.ndarray]] = {}
    for kv in ("f16", "q8_0"):
        segment = workspace.open(compile_to_library(workspace, skill, kv=kv).path)
        found = results.setdefault(kv, [])
        for errata in ([], [Erratum("date", "2027-01-02", "")]):
            with assemble(workspace, Prompt("Why?", [segment], system="Be brief.", errata=errata)) as sequence:
                found.append(sequence.logits())
                reasons = [why(piece) for piece in sequence.pieces if piece.how == "spliced"]
                assert all(("kept as q8_0 (" in one) == (kv == "q8_0") for one in reasons) and reasons
                with sequence.share() as other:
                    other.append([5, 6, 7])
                    found.append(other.logits())
                place = len(sequence) - 40
                sequence.rewrite([place, place + 2], np.array([65, 66], np.int32))
                found.append(sequence.logits())
    for one, other in zip(results["f16"], results["q8_0"], strict=True):
        assert not np.array_equal(one, other) and _cosine(one, other) > 0.99


def test_another_takes_it_over_as_it_is(workspace: Workspace, tmp_path: Path) -> None:
    """A sample is recomputed and compared; the imported bytes are equal. A forged one is refused."""
    path = compile_to_library(workspace, text_of(TEXT), kv="q8_0").path
    (tmp_path / "a.gguf").write_bytes(path.read_bytes())
    path.unlink()
    taken = import_segment(workspace, tmp_path / "a.gguf")
    assert taken.how == "rows" and peek(taken.path).kv == "q8_0"
    assert bits(open_segment(taken.path)) == bits(open_segment(tmp_path / "a.gguf"))
    taken.path.unlink()
    forged = open_segment(tmp_path / "a.gguf")
    layers = tuple(replace(rows, v=rows.v[::-1].copy()) for rows in forged.layers)
    write_segment(tmp_path / "b.gguf", replace(forged, layers=layers))
    with pytest.raises(SegmentError, match="does not hold what this model computes"):
        import_segment(workspace, tmp_path / "b.gguf")
