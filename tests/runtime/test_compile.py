"""Tests compiling: the segment holds the skill's own rows, as decoded after its left context, or rounded once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.engine.segment import STORED_TYPES, Prefill, Segment
from notes_cli.errors import SegmentError, SkillError, TakenError, UnsupportedError
from notes_cli.library.container import open_segment, peek, small, write_segment
from notes_cli.library.segment_files import checkpoint_path
from notes_cli.runtime import compile as compiling_module
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import MOVES, compile_skill, plan
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library, stale
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, load_skill, parse_skill

from ..conftest import MakeWorkspace
from ..engine.reference import nmse
from ..refused import refused


def test_a_plan_is_the_segment_without_rows(workspace: Workspace, skill: Skill) -> None:
    """A dry run divides into blocks as the compile does; a single block is none."""
    planned, compiled = plan(workspace, skill), compile_skill(workspace, skill)
    assert planned.layers == () and planned.tokens.tolist() == compiled.tokens.tolist()
    for part in ("name", "description", "text", "base", "fields", "identity"):
        assert getattr(planned, part) == getattr(compiled, part)
    parts = of(*PARTS)
    for blocks in ("headings", 2, 5):
        assert plan(workspace, parts, blocks).blocks == compile_skill(workspace, parts, blocks=blocks).blocks
    assert plan(workspace, parts, 1).blocks == plan(workspace, parts).blocks == ()
    with pytest.raises(SkillError, match="s: there are no headings"):
        plan(workspace, of("No headings."), "headings")


def test_progress_counts_to_the_end(make_workspace: MakeWorkspace) -> None:
    """A physical batch at a time, after two small ones: speed and remaining time are visible early."""
    workspace = make_workspace(n_ubatch=128)
    seen: list[tuple[int, int]] = []
    long = Skill("long", "", "word " * 100, (), "-")
    compile_skill(workspace, long, lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {500} and [done for done, _ in seen] == [32, 128, 256, 384, 500]


# ---- blocks


PARTS = ("# One\n\ndate: 2026-06-01\n\n", "# Two\n\nThe second part.\n\n", "# Three\n\nBefore the date.")


def of(*parts: str) -> Skill:
    return parse_skill("".join(parts), source="s", default="s")


def rows_near(one: Segment, other: Segment) -> bool:
    """Return True if rows differ by no more than the rounding of f16."""
    pairs = [(a, b) for x, y in zip(one.layers, other.layers, strict=True) for a, b in ((x.k, y.k), (x.v, y.v))]
    return all(np.allclose(a, b, atol=0.01) for a, b in pairs)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "smollm3"])
def test_blocks_are_compiled_apart_and_moved(make_workspace: MakeWorkspace, kind: str) -> None:
    """The tokens are those of the whole; each block has its rows as a separate text, K rotated to its place."""
    workspace = make_workspace(kind)
    skill = of(*PARTS)
    whole, cut = compile_skill(workspace, skill), compile_skill(workspace, skill, blocks="headings")
    assert cut.tokens.tolist() == whole.tokens.tolist() and cut.fields == whole.fields and whole.blocks == ()
    assert cut.blocks == (0, len(PARTS[0]), len(PARTS[0] + PARTS[1]))  # a byte a token
    for (first, last), text in zip(cut.spans, PARTS, strict=True):
        alone = compile_skill(workspace, Skill("part", "", text, (), "-"))
        workspace.context.clear()
        workspace.context.append({0: workspace.left_context})
        workspace.context.splice(0, cut.base + first, alone.tokens, alone.layers, alone.base)
        moved = workspace.context.read(0, cut.base + first, last - first, base=cut.base + first)
        part = cut.slice(first, last)
        assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(part.layers, moved, strict=True))
    assert rows_near(cut.slice(*cut.spans[0]), whole.slice(*cut.spans[0]))
    assert not rows_near(cut.slice(*cut.spans[2]), whole.slice(*cut.spans[2]))


def test_only_changed_blocks_are_prefilled(workspace: Workspace) -> None:
    """Unchanged blocks are taken from the existing file, also at another place: near to those of a full compile."""
    seen: list[tuple[int, int]] = []

    def compiled(skill: Skill, **more: bool) -> tuple[int, int]:
        seen.clear()
        found = compile_to_library(
            workspace, skill, blocks="headings", progress=lambda done, total: seen.append((done, total)), **more
        )
        segment = open_segment(found.path)
        assert segment.text == skill.text and rows_near(segment, compile_skill(workspace, skill, blocks="headings"))
        return found.fresh, found.blocks

    assert compiled(of(*PARTS)) == (3, 3) and seen[-1] == (len("".join(PARTS)), len("".join(PARTS)))
    second = "# Two\n\nThe second part is longer.\n\n"
    assert compiled(of(PARTS[0], second, PARTS[2])) == (1, 3) and seen[-1] == (len(second), len(second))
    assert compiled(of(PARTS[0], second, PARTS[2])) == (0, 3) and not seen
    assert compiled(of(second, PARTS[0], PARTS[2])) == (0, 3) and not seen  # other places, the same parts
    assert compiled(of(second, PARTS[0], PARTS[2]), force=True) == (3, 3)
    again = compile_to_library(workspace, of(second, *PARTS[1:]))  # as `ask --splice FILE` does
    assert again.blocks == 3, "it stays in blocks"


def test_blocks_of_another_file_are_not_taken(make_workspace: MakeWorkspace, tmp_path: Path) -> None:
    target = tmp_path / "s.gguf"
    bare = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    for workspace in (make_workspace(), make_workspace("qwen2"), make_workspace("qwen2", template=bare)):
        found = compile_to_library(workspace, of(*PARTS), blocks="headings", output=target)
        assert (found.fresh, found.blocks) == (3, 3)
        assert rows_near(open_segment(target), compile_skill(workspace, of(*PARTS), blocks="headings"))


@pytest.mark.parametrize(("kind", "says"), [("lfm2", "recurrent"), ("gpt2", "learned"), ("mistral3", "stretch|scaled")])
def test_blocks_need_rows_that_can_be_moved(make_workspace: MakeWorkspace, kind: str, says: str) -> None:
    """Refused with the reason before anything is computed: where rows cannot move, or not so far."""
    workspace = make_workspace(kind)
    skill = of("word " * 80 + "\n\n" + "word " * 80)
    for action in (compile_skill, plan):
        with pytest.raises(UnsupportedError, match=rf"cannot be compiled in blocks: .*({says})"):
            action(workspace, skill, blocks=2)
    assert compile_to_library(workspace, skill).reasons


def test_blocks_that_moved_often_are_computed_anew(workspace: Workspace) -> None:
    """Each move rounds once more: after a number of moves the rows are prefilled again, and the count restarts."""
    fresh = []
    for step in range(MOVES + 2):
        skill = of("# One\n\n" + "x" * (step + 1) + "\n\n", *PARTS[1:])
        found = compile_to_library(workspace, skill, blocks="headings")
        fresh.append(found.fresh)
        moves = open_segment(found.path).moves
        assert moves == ((0, step, step) if step <= MOVES else (0, 0, 0))
        assert rows_near(open_segment(found.path), compile_skill(workspace, skill, blocks="headings"))
    assert fresh == [3, *[1] * MOVES, 3]


# ---- whose a name is


def written(path: Path, text: str) -> Skill:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return load_skill(path)


STDIN, UNKNOWN = "this one is from standard input", "from an unknown place"
# The source that a segment records, that of another text of its name, and why that does not take its place, if so.
SOURCES = [
    *(("-", "-", STDIN), ("", "-", STDIN), ("", "a.txt", UNKNOWN), ("", "b.txt", UNKNOWN), ("a.txt", "a.txt", "")),
    *(
        ("a.txt", "b.txt", "a.txt.* this one is from .*b.txt"),
        ("a.txt", "-", STDIN),
        ("-", "a.txt", "from standard input"),
    ),
]


@pytest.mark.parametrize("where", ["library", "output", "another model"])
@pytest.mark.parametrize(("source", "other", "refusal"), SOURCES)
def test_a_text_takes_the_place_of_another(
    make_workspace: MakeWorkspace, tmp_path: Path, where: str, source: str, other: str, refusal: str
) -> None:
    """Only of one of its own source, if that is known, for any model; the same text is up to date, and any is replaced
    by force."""
    workspace = make_workspace()
    how: Any = {"output": tmp_path / "out.gguf"} if where == "output" else {}
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("date: 0")
    first, second = (
        Skill("returns", "", f"date: {number}", (), str(tmp_path / one) if ".txt" in one else "-")
        for number, one in enumerate((source, other))
    )
    path = compile_to_library(workspace, first, **how).path
    if not source:
        write_segment(path, replace(open_segment(path), source="", stamp=()))
    assert peek(path).source == (first.source if source else "")
    there = make_workspace("qwen2") if where == "another model" else workspace
    if refusal:
        with refused(TakenError, rf"(?=.*{refusal})" + ("" if how else r".*--name NAME.*--force")):
            compile_to_library(there, second, **how)
        assert open_segment(path).text == "date: 0"
    if there is not workspace:
        assert compile_to_library(there, second, force=bool(refusal)).path != path
        return
    assert compile_to_library(workspace, replace(first, source=second.source), **how).reasons == ()
    assert compile_to_library(workspace, second, force=bool(refusal), **how).reasons
    assert (open_segment(path).text, peek(path).source) == ("date: 1", second.source)


def test_an_output_is_no_file_of_ours(workspace: Workspace, skill: Skill, tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(SegmentError, match="not a sound segment"):
        compile_to_library(workspace, skill, output=tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_text() == "mine"


def test_the_same_file_by_another_path(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, by way of .., by a link to its folder or to itself: one source, also where it is not UTF-8."""
    mine = tmp_path / "a" / "returns.txt"
    path = compile_to_library(workspace, written(mine, "date: 1")).path
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "returns.txt").symlink_to(mine)
    monkeypatch.chdir(tmp_path)
    named = ("a/returns.txt", "./a/../a/returns.txt", "link/returns.txt", "returns.txt")
    for number, name in enumerate(named):
        mine.write_text(f"date: 1{number}")
        assert compile_to_library(workspace, load_skill(name)).reasons == ("the text has changed",), name
    assert open_segment(path).text == "date: 13"
    odd = Path(os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9.txt"))
    path = compile_to_library(workspace, written(odd, "date: 1")).path
    assert peek(path).source.endswith("caf\\xe9.txt")
    assert compile_to_library(workspace, written(odd, "date: 2")).reasons == ("the text has changed",)


def test_a_moved_text_is_no_surprise(workspace: Workspace, tmp_path: Path) -> None:
    """The same text at another path is up to date, and belongs to the new path once the old file is gone."""
    old, new = tmp_path / "old" / "returns.txt", tmp_path / "new" / "returns.txt"
    path = compile_to_library(workspace, written(old, "date: 1")).path
    assert compile_to_library(workspace, written(new, "date: 1")).reasons == ()  # a copy: it stays the old one's
    with pytest.raises(TakenError):
        compile_to_library(workspace, written(new, "date: 2"))
    old.unlink()
    before = open_segment(path)
    assert compile_to_library(workspace, written(new, "date: 1")).reasons == ()
    assert peek(path).source == str(new) and open_segment(path).tokens.tolist() == before.tokens.tolist()
    assert compile_to_library(workspace, written(new, "date: 2")).reasons == ("the text has changed",)


TEXT = "".join(f"Rule {number} is said here.\n" for number in range(20))


def text_of(words: str) -> Skill:
    return Skill("rules", "", words, (), "rules.txt")


def same_rows(one: Segment, other: Segment, count: int) -> bool:
    """Return True if the first tokens have the same rows, bit for bit."""
    pairs = zip(one.layers, other.layers, strict=True)
    return all(np.array_equal(a.k[:count], b.k[:count]) and np.array_equal(a.v[:count], b.v[:count]) for a, b in pairs)


def test_a_change_near_the_end_decodes_the_end(make_workspace: MakeWorkspace) -> None:
    """The first tokens keep their rows, bit for bit; the others equal those of a full compile."""
    workspace = make_workspace(n_ctx=4096)
    path = compile_to_library(workspace, text_of(TEXT)).path
    before = open_segment(path)
    changed = text_of(TEXT.replace("Rule 18", "Rule 99"))
    done = compile_to_library(workspace, changed)
    kept = done.tokens - done.decoded
    assert 0.8 * done.tokens < kept < done.tokens
    after, whole = open_segment(path), compile_skill(workspace, changed)
    assert same_rows(before, after, kept) and after.tokens.tolist() == whole.tokens.tolist()
    for found, row in zip(after.layers, whole.layers, strict=True):
        np.testing.assert_allclose(found.k, row.k, atol=0.01)
        np.testing.assert_allclose(found.v, row.v, atol=0.01)


def test_rows_after_another_left_context_are_not_taken(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace(n_ctx=4096)
    known = compile_skill(workspace, text_of(TEXT))
    other, elsewhere = replace(known, context=known.context[::-1].copy()), replace(known, backend="")
    for found, count in ((known, len(known)), (other, 0), (elsewhere, 0)):
        assert compiling_module.shared_prefix_length(workspace.context, known, found) == count


def stop(done: int, total: int) -> None:
    if done > 0.7 * total:
        raise KeyboardInterrupt


@pytest.fixture
def interrupted(make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> tuple[Workspace, Path]:
    """Return a workspace after a compile was interrupted near its end, and the path of its file."""
    monkeypatch.setattr(compiling_module, "KEEP", 0.0)
    monkeypatch.setattr(compiling_module, "COST", 0.0)
    workspace = make_workspace(n_ctx=4096, n_ubatch=128)

    with pytest.raises(KeyboardInterrupt):
        compile_to_library(workspace, text_of(TEXT), progress=stop)
    return workspace, workspace.library.path("rules", workspace.identity)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_an_interrupted_compile_goes_on(interrupted: tuple[Workspace, Path], kv: str) -> None:
    """The checkpoint, whose rows are not rounded, is used as it is; the rest is decoded, nothing is left over, the rows
    are those of one that was not interrupted, and the times add up."""
    workspace, path = interrupted
    assert not path.exists() and not workspace.library.names()
    part = open_segment(checkpoint_path(path))
    done = compile_to_library(workspace, text_of(TEXT), kv=kv)
    assert part.kv == "f16" and len(part) > 200 and done.decoded == done.tokens - len(part)
    uninterrupted = compile_skill(workspace, text_of(TEXT), kv=kv)
    assert bits(open_segment(path)) == bits(uninterrupted) and not checkpoint_path(path).exists()
    whole = open_segment(path).prefill
    assert part.prefill and whole and done.seconds is not None and done.seconds > 0
    assert (part.prefill.tokens, whole.tokens) == (len(part), done.tokens)
    assert whole.seconds == pytest.approx(part.prefill.seconds + done.seconds, abs=1e-5)


def test_what_is_taken_over_brings_its_share_of_the_time(workspace: Workspace) -> None:
    """A change near the end: otherwise three tokens would stand for all. Times with other threads are unknown."""
    path = compile_to_library(workspace, text_of(TEXT)).path
    write_segment(path, replace(open_segment(path), prefill=Prefill(100.0, len(open_segment(path)), 1)))
    compile_to_library(workspace, text_of(f"{TEXT} One more."))
    found = open_segment(path).prefill
    assert found and found.tokens == len(open_segment(path)) and 80 < found.seconds < 101
    write_segment(path, replace(open_segment(path), prefill=Prefill(100.0, len(open_segment(path)), 7)))
    compile_to_library(workspace, text_of(f"{TEXT} Two more."))
    assert open_segment(path).prefill is None
    compile_to_library(workspace, text_of(f"{TEXT} Two more."), force=True)
    assert open_segment(path).prefill is not None


def test_what_is_no_file_of_ours_is_not_gone_on_with(interrupted: tuple[Workspace, Path]) -> None:
    """A checkpoint only saves time, so nothing fails, and nothing waits for it."""
    workspace, path = interrupted
    part = checkpoint_path(path)
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    moved = part.rename(part.with_name("moved"))
    for make in (
        part.mkdir,
        lambda: os.mkfifo(part),
        lambda: part.symlink_to(moved),
        lambda: part.symlink_to(part),
        part.touch,
        lambda: part.write_bytes(data),
    ):
        make()
        done = compile_to_library(workspace, text_of(TEXT))
        assert done.decoded == done.tokens and open_segment(path).text == TEXT
        path.unlink()
        if part.is_dir():
            part.rmdir()
        part.unlink(missing_ok=True)


def test_nothing_is_kept_beside_an_output(interrupted: tuple[Workspace, Path], tmp_path: Path) -> None:
    """It would stay in a user's folder, and in a shared one another user may have written it."""
    workspace, path = interrupted
    output = tmp_path / "out" / "rules.gguf"
    part = checkpoint_path(path)
    checkpoint_path(output).parent.mkdir(parents=True)
    checkpoint_path(output).write_bytes(part.read_bytes())

    with pytest.raises(KeyboardInterrupt):
        compile_to_library(workspace, text_of(TEXT[:-1]), progress=stop, output=output)
    assert checkpoint_path(output).read_bytes() == part.read_bytes()
    done = compile_to_library(workspace, text_of(TEXT), output=output)
    assert done.decoded == done.tokens


# Several compiles in a row: their common prefix is decoded once.

SKILLS = [
    parse_skill(f"date: 2026-06-0{number}\n\n" + "All is well. " * 7 * number, source=f"{name}.txt", default=name)
    for number, name in enumerate(("one", "two", "three"), 1)
]


def files(workspace: Workspace, skills: list[Skill] = SKILLS, **how: Any) -> list[list[bytes]]:
    paths = [compile_to_library(workspace, skill, force=True, **how).path for skill in skills]
    return [[part.tobytes() for layer in open_segment(path).layers for part in (layer.k, layer.v)] for path in paths]


@pytest.mark.parametrize(("kind", "blocks"), [("llama", 2), ("gemma3", 1), ("smollm3", 2), ("lfm2", 1)])
def test_rows_are_those_of_a_compile_by_itself(make_workspace: MakeWorkspace, kind: str, blocks: int) -> None:
    alone = [files(make_workspace(kind, n_ctx=256), [skill], blocks=blocks)[0] for skill in SKILLS]
    workspace = make_workspace(kind, n_ctx=256)
    with workspace.compiling():
        assert files(workspace, blocks=blocks) == alone
        assert files(workspace, SKILLS[::-1], blocks=blocks) == alone[::-1]
        assert workspace.context.n_leased <= 1
    assert workspace.context.n_leased == workspace.context.used == 0


def test_tokens_and_calls_are_counted(make_workspace: MakeWorkspace, decoded: list[int]) -> None:
    """Each skill in its own call, and the left context once. The control: three times, separately."""
    workspace = make_workspace()
    left, own = len(workspace.left_context), [len(workspace.tokens_of(skill)) for skill in SKILLS]
    workspace.measure_rotation()
    decoded.clear()
    files(workspace)
    assert decoded == [left, own[0], left, own[1], left, own[2]]
    decoded.clear()
    with workspace.compiling():
        files(workspace)
    assert decoded == [left, *own]


def test_other_work_between_them(workspace: Workspace) -> None:
    alone = files(workspace)
    with workspace.compiling():
        files(workspace, SKILLS[:1])
        workspace.context.clear()
        assert files(workspace) == alone
        with workspace.sequence() as sequence:
            sequence.append([1, 2, 3])
            sequence.flush()
            assert workspace.context.used == len(workspace.left_context) + 3
            assert files(workspace, SKILLS[1:2])[0] == alone[1]
            assert sequence.intact
    assert workspace.context.used == 0


def test_the_context_is_as_large_as_for_one_alone(make_workspace: MakeWorkspace) -> None:
    """The prefix kept for the next compile needs no cells: a larger context may rotate keys otherwise (LongRoPE)."""
    workspace = make_workspace(n_ctx=256)
    room = 256 - len(workspace.left_context)
    full = next(
        skill
        for skill in (parse_skill("a " * 90 + "b" * more, source="full.txt", default="full") for more in range(90))
        if len(workspace.tokens_of(skill)) == room
    )
    alone = files(workspace, [full])
    with workspace.compiling():
        files(workspace, SKILLS[:1])
        assert files(workspace, [full]) == alone and workspace.options.n_ctx == 256


def test_one_that_fails_leaves_the_others(make_workspace: MakeWorkspace) -> None:
    """After an interrupt in the second, the first exists, the third is not started, and the next run continues."""
    workspace = make_workspace(n_ubatch=32)
    with pytest.raises(KeyboardInterrupt), workspace.compiling():
        compile_to_library(workspace, SKILLS[0])
        compile_to_library(workspace, SKILLS[1], progress=stop)
    assert workspace.context.n_leased == 0
    with workspace.compiling():
        done = [compile_to_library(workspace, skill) for skill in SKILLS]
    assert [bool(one.reasons) for one in done] == [False, True, True]


RULES = "date: 2026-06-01\n" + "".join(f"Rule {number} is said here.\n" for number in range(12))
SMALL = [kv for kv in STORED_TYPES if kv != "f16"]


def rules_of(words: str) -> Skill:
    return parse_skill(words, source="rules.txt", default="rules")


def bits(segment: Segment) -> list[bytes]:
    return [part.tobytes() for layer in segment.layers for part in (layer.k, layer.v)]


@pytest.mark.parametrize("kv", SMALL)
def test_rows_are_those_of_f16_rounded(workspace: Workspace, kv: str) -> None:
    """Only the stored type differs. Shrinking a file needs no prefill, the reverse a full one."""
    skill = rules_of(RULES)
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


@pytest.mark.parametrize(("kv", "blocks"), [*zip(SMALL, (None, 3), strict=True)])
def test_rounded_rows_are_no_source(workspace: Workspace, kv: str, blocks: int | None) -> None:
    """The rows of a changed text equal those of a fresh compile. The control: an f16 file's are used."""
    changed = rules_of(RULES.replace("Rule 11", "Rule 99"))
    for before, after in ((kv, kv), (kv, "f16"), ("f16", kv)):
        workspace.library.path("rules", workspace.identity).unlink(missing_ok=True)
        compile_to_library(workspace, rules_of(RULES), kv=before, blocks=blocks)
        done = compile_to_library(workspace, changed, kv=after)
        assert (done.decoded == done.tokens) == (before != "f16"), (before, after)
        if before != "f16":
            fresh = compile_skill(workspace, changed, blocks=blocks, kv=after)
            assert bits(open_segment(done.path)) == bits(fresh)


def test_rows_whose_rounding_is_seen_are_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and the existing file stays. Logits are compared: other rows would fail."""
    skill = rules_of(RULES)
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
        plan(workspace, rules_of(RULES), kv="q8_0")
    workspace = make_workspace("mamba")
    with pytest.raises(UnsupportedError, match="cannot be kept as f16/q8_0: it has none"):
        plan(workspace, rules_of(RULES), kv="f16/q8_0")


def test_rows_that_cannot_be_moved(make_workspace: MakeWorkspace) -> None:
    """They are restored with their left context and the state, which is not rounded."""
    workspace = make_workspace("lfm2")
    exact = compile_skill(workspace, rules_of(RULES))
    kept = compile_skill(workspace, rules_of(RULES), kv="q8_0")
    assert kept.prefix_only and kept.nbytes < exact.nbytes
    for one, other in zip(kept.layers, exact.layers, strict=True):
        assert one.part != "state" or (one.k.tobytes(), one.v.tobytes()) == (other.k.tobytes(), other.v.tobytes())
    logits = []
    for segment in (exact, kept):
        sequence = assemble(workspace, Prompt("Why?", [segment]))
        assert any(piece.how == "spliced" for piece in sequence.pieces)
        logits.append(sequence.logits())
        sequence.close()
    assert nmse(*logits) < 0.02


def test_each_change_that_needs_a_new_compile_is_named(workspace: Workspace, skill: Skill, tmp_path: Path) -> None:
    """By itself; nothing if the file is up to date."""
    path, segment = tmp_path / "returns.gguf", compile_skill(workspace, skill)
    same: dict[str, Any] = {}
    for changed, required, words in (
        (same, same, ()),
        ({"text": "other", "fields": ()}, same, ("the text has changed",)),
        ({"fields": ()}, same, ("the fields have changed",)),
        ({"description": "other"}, same, ("the description has changed",)),
        ({"identity": replace(segment.identity, kv_type="f32/f32")}, same, ("f32/f32",)),
        (same, {"blocks": 2}, ("it was compiled in one block",)),
        (same, {"kv": "q8_0"}, ("its rows are kept as f16, not as q8_0",)),
    ):
        write_segment(path, replace(segment, **changed))
        found = stale(workspace, skill, path, **required)
        assert len(found) == len(words) and all(word in reason for word, reason in zip(words, found, strict=True)), (
            found
        )
    write_segment(path, segment)
    for name, value, words in (
        ("left_context", segment.context[:0], "after a different left context"),
        ("tokens_of", lambda *_: segment.tokens[:-1], "gives different tokens now"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workspace, name, value)
            (reason,) = stale(workspace, skill, path)
            assert words in reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("notes_cli.runtime.recompile.prefix_only", lambda _: True)
        assert stale(workspace, skill, path) == ["its rows cannot be moved any more"]
