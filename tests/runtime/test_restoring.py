"""Tests models whose rows cannot move: a skill is restored bit for bit at its original place, and decoded elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import Segment, Stored, Tokens
from notes_cli.errors import DamagedError
from notes_cli.explanations import why
from notes_cli.library.container import open_segment, open_stored, write_segment
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import UNTRUSTED, compile_skill
from notes_cli.runtime.generate import decide
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum
from notes_cli.text.skill import Skill

from ..conftest import MakeWorkspace

WHOLE = ["lfm2", "mamba", "gpt2"]  # a hybrid, a recurrent one, one with learned positions
ERRATUM = Erratum("date", "2026-07-01", "date=2026-07-01")
BARE = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"  # begins with the content: no left context


@pytest.fixture(params=WHOLE)
def workspace(request: pytest.FixtureRequest, make_workspace: MakeWorkspace) -> Workspace:
    return make_workspace(request.param)


@pytest.fixture
def segment(workspace: Workspace, skill: Skill) -> Segment:
    return compile_skill(workspace, skill)


def recomputed(workspace: Workspace, tokens: Tokens, *steps: int) -> NDArray[np.float32]:
    """Logits after the tokens, decoded up to each of `steps` and to the end: rounding depends on the batches."""
    workspace.context.clear()  # in the same cells: rounding goes by these, too
    seq = workspace.sequence()
    for part in np.split(tokens, steps):
        seq.append(part)
        seq.flush()
    return seq.logits()


def steps(segment: Segment) -> tuple[int, int]:
    """Return where a compile and the question after it begin to decode."""
    return segment.base, segment.base + len(segment)


@pytest.mark.parametrize("errata", [[], [ERRATUM]])
@pytest.mark.patches("speed")
def test_restored_at_the_start_bit_for_bit(workspace: Workspace, segment: Segment, errata: list[Erratum]) -> None:
    """Nothing up to the end of the skill is decoded, and the logits equal those of decoding it all."""
    seq = assemble(workspace, Prompt("Why?", [segment], errata))
    found = seq.logits()
    assert seq.count("spliced") == segment.base + len(segment) and seq.count("seam") == 0
    assert [piece.how for piece in seq.pieces] == ["spliced", "spliced", *["decoded"] * (1 + 2 * len(errata))]
    assert seq.pieces[1].reason is Reason.RESTORED
    np.testing.assert_array_equal(found, recomputed(workspace, seq.tokens, *steps(segment)))


def test_restored_from_its_file_or_not_at_all(workspace: Workspace, segment: Segment, tmp_path: Path) -> None:
    """Rows and states read from the file are the same; a wrong byte in any of them restores nothing."""
    wanted = assemble(workspace, Prompt("Why?", [segment])).logits()
    write_segment(tmp_path / "a.gguf", segment)
    found = assemble(workspace, Prompt("Why?", [open_stored(tmp_path / "a.gguf")])).logits()
    np.testing.assert_array_equal(found, wanted)
    whole, layers = (tmp_path / "a.gguf").read_bytes(), open_stored(tmp_path / "a.gguf").layers
    assert isinstance(layers, Stored)
    for place in [one for each in layers.tensors for one in (each.k, each.v) if one.end]:
        (tmp_path / "a.gguf").write_bytes(whole[: place.end - 1] + b"x" + whole[place.end :])
        seq = workspace.sequence()
        seq.append(segment.context)
        with pytest.raises(DamagedError):
            seq.restore(open_stored(tmp_path / "a.gguf"))
        assert workspace.context.length(seq.seq_id) == 0
        seq.close()


@pytest.mark.parametrize("part", ["attention", "state"])
def test_every_part_that_is_restored_counts(make_workspace: MakeWorkspace, skill: Skill, part: str) -> None:
    """The control: without the rows or the states of a hybrid, the same restore gives other logits."""
    workspace = make_workspace("lfm2")
    segment = compile_skill(workspace, skill)
    layers = [
        replace(rows, k=np.zeros_like(rows.k), v=np.zeros_like(rows.v)) if rows.part == part else rows
        for rows in segment.layers
    ]
    found = assemble(workspace, Prompt("?", [replace(segment, layers=tuple(layers))])).logits()
    wanted = assemble(workspace, Prompt("?", [segment])).logits()
    assert float(((found - wanted) ** 2).sum() / (wanted**2).sum()) > 1e-6


@pytest.mark.patches("speed", "recurrent")
def test_decoded_anew_behind_another_text(workspace: Workspace, segment: Segment) -> None:
    """After a system text the skill is decoded; the reason has the difference and its consequence."""
    seq = assemble(workspace, Prompt("Why?", [segment], [ERRATUM], "Be kind."))
    found = seq.logits()
    assert seq.count("spliced") == 0
    refusal = UNTRUSTED if workspace.model.recurrent else workspace.context.supports("splice")
    assert refusal and why(seq.pieces[1]) == (
        f"decoded: preceded by a different context than at compile time; {refusal}"
    )
    np.testing.assert_array_equal(found, recomputed(workspace, seq.tokens))


@pytest.mark.parametrize("bos", [False, True])
def test_without_a_left_context(make_workspace: MakeWorkspace, skill: Skill, tmp_path: Path, bos: bool) -> None:
    """A template that begins with the skill: a segment is still stored whole, on disk too, and is restored."""
    workspace = make_workspace("lfm2", template=BARE, bos=bos)
    segment = compile_skill(workspace, skill)
    write_segment(tmp_path / "a.gguf", segment)
    segment = open_segment(tmp_path / "a.gguf")
    assert segment.prefix_only and segment.base == bos
    seq = assemble(workspace, Prompt("Why?", [segment]))
    found = seq.logits()
    assert seq.count("spliced") == len(segment) + bos
    np.testing.assert_array_equal(found, recomputed(workspace, seq.tokens, *steps(segment)))


@pytest.mark.patches("speed")
def test_choices_leave_the_notebook_as_it_was(workspace: Workspace, segment: Segment) -> None:
    """Answers are scored ahead and removed: scores equal those of a recompute, and later logits do not change."""
    prompt = Prompt("Why?", [segment], [ERRATUM])
    choices = ["yes", "no", "not sure"]
    with assemble(workspace, prompt, splice=False) as full:
        wanted = decide(full, choices).probabilities
    seq = assemble(workspace, prompt)
    assert decide(seq, choices).probabilities == pytest.approx(wanted, rel=0.05, abs=0.01)
    assert workspace.context.length(seq.seq_id) == len(seq)
    seq.append([65, 66])
    found = seq.logits()
    np.testing.assert_array_equal(found, recomputed(workspace, seq.tokens, *steps(segment), len(seq) - 2))


def test_nothing_of_a_failed_restore_stays(make_workspace: MakeWorkspace, skill: Skill) -> None:
    """A state with NaN is refused, and the sequence decodes as before."""
    workspace = make_workspace("mamba")
    segment = compile_skill(workspace, skill)
    broken = [replace(rows, v=np.full_like(rows.v, np.nan)) for rows in segment.layers]
    with pytest.raises(Exception, match="NaN or infinity"):
        assemble(workspace, Prompt("Why?", [replace(segment, layers=tuple(broken))]))
    seq = assemble(workspace, Prompt("Why?", [segment]), splice=False)
    found = seq.logits()
    np.testing.assert_array_equal(found, recomputed(make_workspace("mamba"), seq.tokens))


def test_rows_that_can_move_now(make_workspace: MakeWorkspace, skill: Skill, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled before an architecture was verified: compile reports it, and it is valid until then."""
    workspace = make_workspace("gpt2")
    path = compile_to_library(workspace, skill).path
    segment = workspace.open(path)
    monkeypatch.setattr(Context, "supports", lambda _, what: "it has no state" if what == "carry" else None)
    seq = assemble(workspace, Prompt("Why?", [segment], system="Be kind."))
    seq.flush()
    assert "if it is compiled again" in why(seq.pieces[1]) and seq.count("spliced") == 0
    assert compile_to_library(workspace, skill).reasons == ("its rows can be moved now",)
    assert not workspace.open(path).prefix_only


# ---- rows that may be moved, but not everywhere


@pytest.mark.patches("speed")
def test_where_this_move_is_refused_the_skill_is_decoded(make_workspace: MakeWorkspace, skill: Skill) -> None:
    """Within a range of positions rows move; across its end the skill is decoded, exactly, with the reason."""
    workspace = make_workspace("mistral3")
    segment = compile_skill(workspace, skill)
    assert assemble(workspace, Prompt("Why?", [segment], system="x" * 20)).count("spliced") == len(segment) - 1
    for length in (220, 300):  # into the next stretch, and beyond
        seq = assemble(workspace, Prompt("Why?", [segment], system="x" * length))
        found = seq.logits()
        assert seq.count("spliced") == 0
        reason = "decoded: rows cannot be moved from one stretch of 256 positions to another: "
        assert why(seq.pieces[1]).startswith(reason)
        np.testing.assert_array_equal(found, recomputed(workspace, seq.tokens))


# ---- caches of other types


@pytest.mark.parametrize(
    ("kind", "types"), [("lfm2", ("q8_0", "f16")), ("gemma3", ("q4_0", "q4_0")), ("qwen3", ("bf16", "bf16"))]
)
def test_one_segment_serves_every_cache_but_f32(
    make_model: Callable[..., Path], make_workspace: MakeWorkspace, skill: Skill, kind: str, types: tuple[str, str]
) -> None:
    """Compiled with any of these types it is the same file of f16 rows; splicing them errs no more than decoding."""
    path = make_model(kind, heads=2)
    options = ContextOptions(n_ctx=512, n_threads=1, type_k=types[0], type_v=types[1])
    plain = make_workspace(kind, heads=2)
    first = compile_to_library(plain, skill)
    segment = plain.open(first.path)
    prompt = Prompt("Why?", [segment])
    exact = assemble(plain, prompt, splice=False).logits()
    with Workspace(path, options) as workspace:
        assert compile_to_library(workspace, skill).path == first.path
        assert compile_to_library(workspace, skill).reasons == ()
        again = compile_skill(workspace, skill)
        for one, other in zip(again.layers, segment.layers, strict=True):
            np.testing.assert_array_equal(one.k, other.k)
            np.testing.assert_array_equal(one.v, other.v)
        decoded = assemble(workspace, prompt, splice=False).logits()
        found = assemble(workspace, prompt).logits()
    scale = float((exact**2).sum())
    own, mine = (float(((logits - exact) ** 2).sum()) / scale for logits in (decoded, found))
    assert mine <= 1.5 * own + 1e-6
