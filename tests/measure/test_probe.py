"""Probing: rows of two compiles mixed as asked, and recoveries that say where a decision rests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import SAMPLES

from notes_cli.config import shipped_model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.patches import Patch
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError, SkillError, UnsupportedError
from notes_cli.measure.probe import AlikeError, Column, Mixes, Probe, columns_of, probe
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, load_skill, parse_skill

QUESTION, CHOICES = "May I return this?", ["accepted", "refused"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace on the model that ships: only one that reads decides by what the text says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES_HOME", str(tmp_path_factory.mktemp("home")))
        with Workspace(shipped_model(), ContextOptions(n_ctx=512, n_threads=1)) as opened:
            yield opened


@pytest.fixture(scope="module")
def returns(reader: Workspace) -> Segment:
    return compile_skill(reader, load_skill(SAMPLES / "returns"))


@pytest.fixture
def mixes(reader: Workspace, returns: Segment) -> Mixes:
    return Mixes(reader, returns, "date", "2026-07-01", question=QUESTION, choices=CHOICES)


@pytest.fixture
def longer(reader: Workspace, returns: Segment) -> Mixes:
    """A value of three tokens in place of one, after a system text: everything after it is rotated."""
    return Mixes(reader, returns, "amount", "80000", question="What is the approval?", system="You are helpful.")


@pytest.fixture(scope="module")
def report(reader: Workspace, returns: Segment) -> Probe:
    return probe(Mixes(reader, returns, "date", "2026-07-01", question=QUESTION, choices=CHOICES), window=8)


def test_columns() -> None:
    """One a token; one in all for a value of another length, and what follows it keeps its partner."""
    assert columns_of(3, [Patch(1, 2, (7,))]) == [
        Column((0, 1), (0, 1), False),
        Column((1, 2), (1, 2), True),
        Column((2, 3), (2, 3), False),
    ]
    found = columns_of(6, [Patch(1, 2, (7, 7, 7)), Patch(3, 5, (8,))])
    assert [column.stale for column in found] == [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6)]
    assert [column.fresh for column in found] == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 7)]
    assert [column.field for column in found] == [False, True, False, True, False]


def test_the_two_texts_are_the_ends_of_the_scale(mixes: Mixes) -> None:
    """All stale is 0, all fresh is 1; the decisions are those of the texts, the fresh one's first in its own."""
    count = len(mixes.columns)
    assert mixes.decisions == ("accepted", "refused") and mixes.scores[0] < 0 < mixes.scores[1]
    assert mixes.between(0, 0) == 0 and mixes.between(0, count) == 1
    assert mixes.share_from_field(0) == mixes.share_from_end(0) == 0
    assert mixes.share_from_field(1) == mixes.share_from_end(1) == 1


@pytest.mark.parametrize("which", ["mixes", "longer"])
def test_rows_are_those_of_the_mix(which: str, request: pytest.FixtureRequest) -> None:
    """After any sequence of mixes every column holds the rows of the text it was asked of: V, and K unless moved."""
    mixed: Mixes = request.getfixturevalue(which)
    chance = random.Random(1)
    for _ in range(8):
        fresh = [chance.random() < 0.3 for _ in mixed.columns]
        mixed.recovery(fresh)
        tokens, parts = [], []
        for column, is_fresh in zip(mixed.columns, fresh, strict=True):
            source, (first, last) = (mixed.fresh, column.fresh) if is_fresh else (mixed.stale, column.stale)
            tokens += source.tokens[first:last].tolist()
            parts.append(source.slice(first, last).layers[-1])
        book, start = mixed.notebook, mixed._start
        assert book.tokens[start:].tolist() == [*tokens, *mixed._after]
        found = book.context.read(0, start, len(tokens), base=start)[-1]
        np.testing.assert_array_equal(found.v, np.concatenate([part.v for part in parts]))
        if start == mixed.stale.base and not mixed.change.patches[0].grows:
            np.testing.assert_array_equal(found.k, np.concatenate([part.k for part in parts]))


def test_a_mix_does_not_depend_on_the_one_before(mixes: Mixes) -> None:
    """What is shared with the mix before is kept, and gives what laying all of it gives."""
    first = mixes.field_only()
    mixes.after_only()
    mixes.between(mixes.first + 2, mixes.first + 9)
    assert mixes.field_only() == first
    mixes.by_method("stale")
    assert mixes.field_only() == first


@pytest.mark.parametrize("which", ["mixes", "longer"])
def test_edit_methods_agree_with_patched_rows(which: str, request: pytest.FixtureRequest) -> None:
    """The field recomputed in place is the field's rows patched, and a recompute from it on is the fresh text."""
    mixed: Mixes = request.getfixturevalue(which)
    assert mixed.by_method("field") == pytest.approx(mixed.field_only(), abs=0.02)
    assert mixed.by_method("suffix") == pytest.approx(1, abs=0.02)
    assert mixed.by_method("stale") == pytest.approx(0, abs=0.02)


def test_where_the_shipped_model_decides(report: Probe, returns: Segment) -> None:
    """On the rows after the field, the outcomes' above all; the field's own rows alone change nothing."""
    assert report.after_only > 0.9 and abs(report.field_only) < 0.1
    assert report.field_tokens == 5 < report.reach(0.5) <= report.reach(0.9)
    assert report.best is not None and "refused" in report.best.text and report.best.alone > 0.3
    assert report.windows[0].suffix == report.windows[-1].prefix == 1
    assert report.windows[1].suffix == pytest.approx(report.after_only)
    assert report.windows[0].prefix == report.windows[0].alone == pytest.approx(report.field_only)


def test_windows_tile_the_text_from_the_field_on(report: Probe, returns: Segment) -> None:
    """Windows follow each other in tokens and characters up to the end, and none holds both field and other tokens."""
    first, *_, last = report.windows
    span = next(span for span in returns.fields if span.name == "date")
    assert (first.first, first.last, first.field) == (span.first, span.last, True)
    assert (last.last, last.end) == (len(returns), len(returns.text))
    for one, following in zip(report.windows, report.windows[1:], strict=False):
        assert (one.last, one.end) == (following.first, following.start)
        assert not following.field and 1 <= following.last - following.first <= 8
    assert "".join(window.text for window in report.windows) == returns.text[first.start :]
    assert report.field_tokens + report.after_tokens == len(returns) - span.first
    assert report.places == ((span.start, span.end),)


def test_the_default_window(mixes: Mixes, monkeypatch: pytest.MonkeyPatch) -> None:
    """So large that there are hardly more windows than wanted, and progress counts to its end."""
    monkeypatch.setattr("notes_cli.measure.probe.WINDOWS", 16)
    told: list[tuple[int, int]] = []
    found = probe(mixes, progress=lambda done, of: told.append((done, of)))
    assert found.window == 7 and len(found.windows) == 15  # 97 tokens, of them 5 of the field
    assert told == [(done, 3 * 15 + 4) for done in range(1, 3 * 15 + 5)]


def test_answers_without_choices_are_the_greedy_ones(reader: Workspace, returns: Segment) -> None:
    """With a question alone, the two texts' own answers are compared."""
    mixed = Mixes(reader, returns, "tier", "silver", question="What is the shipping?")
    assert mixed.decisions == ("free", "reduced")


def test_without_a_question_the_field_is_asked_for(reader: Workspace, returns: Segment) -> None:
    """Its values are the choices."""
    mixed = Mixes(reader, returns, "tier", "silver")
    assert mixed.question == "What is the tier?" and mixed.decisions == ("gold", "silver")


def test_other_skills_stand_before(reader: Workspace, returns: Segment) -> None:
    """They belong to what all mixes share."""
    support = compile_skill(reader, load_skill(SAMPLES / "support"))
    mixed = Mixes(reader, returns, "tier", "silver", question="What is the shipping?", before=[support])
    assert mixed.decisions == ("free", "reduced") and mixed.after_only() > 0.9
    assert support.tokens.tolist() == mixed.notebook.tokens[len(support.context) :][: len(support)].tolist()


@pytest.mark.parametrize("change", [{"context": np.array([5], np.int32)}, {"blocks": (0, 20)}])
def test_both_texts_are_compiled_alike(reader: Workspace, returns: Segment, change: dict[str, object]) -> None:
    """A segment that was compiled otherwise than the fresh text will be is compiled again; the usual one is not."""
    other = Mixes(reader, replace(returns, **change), "tier", "silver")  # type: ignore[arg-type]
    assert other.stale.context.tolist() == reader.left_context.tolist() and not other.stale.blocks
    assert Mixes(reader, returns, "tier", "silver").stale is returns


def test_alike(reader: Workspace, returns: Segment) -> None:
    """A value that changes no decision is refused with what to do, with choices and without, and takes no room then."""
    free, used = reader.context.free, reader.context.used
    for choices in (CHOICES, None):
        why = "decides the same with date=2026-05-01 and date=2026-02-01: 'accepted'"
        with pytest.raises(AlikeError, match=why) as raised:
            Mixes(reader, returns, "date", "2026-02-01", question=QUESTION, choices=choices)
        assert (reader.context.free, reader.context.used) == (free, used), f"{raised.value} holds room"


def test_refusals(reader: Workspace, returns: Segment) -> None:
    """An unknown field, no value, the value that it has."""
    with pytest.raises(SkillError, match=r"no field 'colour'\. Its fields: date, tier, amount"):
        Mixes(reader, returns, "colour")
    with pytest.raises(SkillError, match="has no value"):
        Mixes(reader, returns, "date", " ")
    with pytest.raises(NotesError, match="date is 2026-05-01 already"):
        Mixes(reader, returns, "date", "2026-05-01")


@pytest.mark.parametrize("kind", ["mamba", "gpt2"])
def test_rows_that_cannot_be_moved(make_workspace: Callable[..., Workspace], skill: Skill, kind: str) -> None:
    """Refused with the reason, before anything is measured."""
    workspace = make_workspace(kind)
    with pytest.raises(UnsupportedError, match=r"returns cannot be probed on .*: \w+"):
        Mixes(workspace, compile_skill(workspace, skill), "date", "2026-07-01")


def test_a_character_of_several_tokens(workspace: Workspace) -> None:
    """One token a byte: both bytes of a letter touch the whole letter."""
    skill = parse_skill("né: x\ntier: gold", source="s", default="s")
    mixed = object.__new__(Mixes)
    mixed._workspace, mixed.stale = workspace, compile_skill(workspace, skill)
    assert mixed.characters()[:5] == [(0, 1), (1, 2), (1, 2), (2, 3), (3, 4)]


def test_on_a_context_of_its_own_size(make_model: Callable[..., Path], returns: Segment) -> None:
    """A prompt that does not fit the context that was asked for is refused, not cut."""
    with (
        Workspace(shipped_model(), ContextOptions(n_ctx=256, n_threads=1), fixed_size=True) as small,
        pytest.raises(NotesError, match="too small"),
    ):
        Mixes(small, returns, "date", "2026-07-01", question="Why? " * 200, choices=CHOICES)
