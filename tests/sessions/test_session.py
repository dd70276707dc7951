"""Open sessions: restored from disk they continue without a difference, and never with wrong K/V."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import notes_cli as notes
from notes_cli.config import paths
from notes_cli.editing.methods import ERRATUM, SUFFIX, Method
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, SessionError, SkillError, UnsupportedError
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.sessions.session_kv import CHUNK
from notes_cli.sessions.state import serialize
from notes_cli.text.erratum import known_fields, read_errata
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace
from ..limits import few_descriptors
from .snapshots import forge, snapshot

WHOLE = ["lfm2", "mamba", "gpt2"]
Open = Callable[..., Workspace]


@pytest.fixture
def make(make_workspace: MakeWorkspace) -> Open:
    """A workspace on a tiny model, with room for one open session."""
    return lambda kind="llama", cache="f16", **settings: make_workspace(kind, cache=cache, **settings)


@contextmanager
def held(workspace: Workspace, name: str = "mine") -> Iterator[Session]:
    with Sessions(paths().sessions).locked(name, new=True) as stored:
        yield Session(workspace, stored)


def turn(session: Session, skill: Skill, question: str, *errata: str, limit: int = 3, **how: Any) -> None:
    """A turn with a greedy answer; the first splices the skill after a system text. `how`: a method, segments."""
    if session.empty:
        segment = compile_skill(session.workspace, skill)
        prompt = Prompt(question, [segment], read_errata(errata, known_fields(segment)), system="Be kind.")
        sequence = assemble(session.workspace, prompt, room=limit)
        session.begin(prompt, sequence)
    else:
        sequence = session.follow(question, errata, room=limit, **how)
    with Sampler(SamplerOptions()) as sampler:
        list(sequence.generate(sampler, limit))
    session.keep()


def begin(session: Session, *skills: Skill | Segment, answer: str = "yes") -> None:
    """A first turn with a given answer, whose splice is exact."""
    segments = [compile_skill(session.workspace, one) if isinstance(one, Skill) else one for one in skills]
    prompt = Prompt("Why?", segments)
    session.begin(prompt, assemble(session.workspace, prompt))
    session.keep(answer)


def rows(sequence: KVSequence) -> list[NDArray[np.float32]]:
    """All K and V of the sequence, as f32."""
    read = sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype="f32")
    return [part for layer in read for part in (layer.k, layer.v)]


def same(one: list[NDArray[np.float32]], other: list[NDArray[np.float32]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def logits(session: Session) -> NDArray[np.float32]:
    """Logits after one more token."""
    sequence = session.sequence
    sequence.append([65])
    return sequence.logits()


@pytest.mark.parametrize(
    ("kind", "cache"),
    [*((kind, "f16") for kind in ("gemma3", *WHOLE)), *(("qwen3", cache) for cache in ("bf16", "q8_0", "q4_0"))],
)
def test_rows_come_back_bit_for_bit(make: Open, skill: Skill, kind: str, cache: str) -> None:
    """For every kind of model and cache: K, V, states and tokens of two turns are restored bit-identical."""
    workspace, other = make(kind, cache), make(kind, cache)
    with held(workspace) as session:
        turn(session, skill, "Why?")
        turn(session, skill, "And then?", "date=2026-07-01")
        before, tokens = rows(session.sequence), session.sequence.tokens
    with held(other) as session:
        assert same(rows(session.sequence), before)
        assert session.sequence.tokens.tolist() == tokens.tolist() == session.state.tokens
        assert session.sequence.count("spliced") == len(tokens) and session.state.turns == 2


def test_rows_are_not_moved_for_ever(make: Open, skill: Skill) -> None:
    """Each move rounds the keys again: beyond the limit of their type, an edit is refused, or becomes an erratum."""
    with held(make("qwen3", "q4_0")) as session:
        turn(session, skill, "Why?")
        for value in ("the first of July", "2026-07-02"):
            session.edit("date", value, Method.parse("field"))
        with pytest.raises(UnsupportedError, match="were moved 2 times, and each time rounds the keys of a q4_0 cache"):
            session.edit("date", "the third of July", Method.parse("field"))
        session.edit("date", "2026-07-04", Method.parse("field"))  # of the same length: nothing moves
        session.edit("date", "the fifth of July", Method.parse("suffix"))


def test_a_skill_whose_text_is_not_at_its_position(make: Open, skill: Skill) -> None:
    """Refused: an edit would overwrite other tokens."""
    with held(make()) as session:
        turn(session, skill, "Why?")
    forge(
        session.stored,
        lambda state: replace(state, skills=(replace(state.skills[0], text=state.skills[0].text + "!"),)),
    )
    with held(make()) as session, pytest.raises(SessionError, match="returns is not at its position"):
        session.edit("date", "2026-07-01", Method.parse("field"))


def test_an_edit_of_the_text_supersedes_errata(make: Open, skill: Skill, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn or compaction removes them; where K/V cannot be moved, the edit reports the contradiction."""
    with held(make()) as session:
        turn(session, skill, "Why?", "date=2026-07-01")
        assert not session.edit("date", "2026-08-01", Method.parse("field")).contradicted
        turn(session, skill, "And then?")
        assert not session.state.corrections.stated and session.state.fields["date"] == "2026-08-01"
    with held(make(), "other") as session, monkeypatch.context() as patched:
        patched.setattr("notes_cli.sessions.edits.can_cut", lambda kv: False)
        turn(session, skill, "Why?", "date=2026-07-01")
        done = session.edit("date", "2026-08-01", Method.parse("field"))
        assert done.contradicted and session.state.edits_and_cuts[-1] == replace(done, name="returns.date")
        assert session.compact().names == ("date",)
        assert not session.state.corrections.stated and session.state.fields["date"] == "2026-08-01"
        assert not session.edit("date", "2026-08-02", Method.parse("field")).contradicted


def test_the_default_method_of_the_model(make: Open, skill: Skill, monkeypatch: pytest.MonkeyPatch) -> None:
    """By config.yaml, suffix near the end or for a recompute; where the model cannot, an erratum with the reason."""

    def profile(method: str, why: str) -> None:
        monkeypatch.setattr("notes_cli.runtime.resolve.default_method", lambda _: (Method.parse(method), why))

    with held(make()) as session:
        turn(session, skill, "Why?")
        done = session.edit("date", "2026-07-01")
        assert done.how == "field+erratum" and done.detail == "field+erratum: the default"
        profile("field+erratum", "field+erratum: 9 of 9")
        done = session.edit("tier", "basic")
        assert (done.how, done.detail) == ("field+erratum", "field+erratum: 9 of 9") and done.rewritten > 0
        assert session.state.pending["tier"] == "Correction: the tier is now basic. This replaces the earlier tier."
        profile("stale", "stale: 9 of 9")
        assert session.edit("tier", "gold").detail == "stale: 9 of 9; erratum instead: it is not for a session"
        profile("recompute", "recompute: no method is trustworthy on this model")
        done = session.edit("date", "2026-07-02")
        assert (done.how, done.detail) == ("suffix", "recompute: no method is trustworthy on this model")
        session.edit("date", "2026-07-03", Method.parse("erratum"))
        done = session.edit("date", "2026-07-02")  # as it is in the text
        assert done.how == "erratum" and "the text has date=2026-07-02 already" in done.detail
    with held(make("lfm2"), "other") as session:
        turn(session, skill, "Why?")
        profile("field", "field: 9 of 9")
        done = session.edit("date", "2026-07-01")
        assert done.how == "erratum" and "field is not possible" in done.detail
        profile("recompute", "recompute: none")
        done = session.edit("date", "2026-07-02")
        before_skill = session.state.span("returns")[0]
        assert done.how == "suffix" and done.rewritten == len(session.state.tokens) - before_skill < 100
    with held(make("gpt2"), "learned") as session:
        turn(session, skill, "Why?")
        profile("field", "field: 9 of 9")
        assert session.edit("date", "2026-07-01").how == "field"
        done = session.edit("date", "July 1")
        assert done.how == "erratum" and "field is not possible" in done.detail
    with held(make(), "short") as session:
        begin(session, parse_skill("a: b", source="-", default="s"))
        monkeypatch.setattr("notes_cli.runtime.resolve.NEAR", 64)
        assert session.edit("a", "c").detail.startswith("suffix: no more than 64 tokens follow the change")


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_a_session_grows_beyond_its_context(make: Open, skill: Skill, kind: str) -> None:
    """A turn that needs a larger context gets one with all K/V, which is restored in several chunks."""
    workspace = make(kind, n_ctx=256)
    with held(workspace) as session:
        turn(session, skill, "Why?", limit=2)
        before = rows(session.sequence)
        turn(session, skill, "x" * 700, limit=2)
        assert workspace.context.n_ctx > 256
        after = rows(session.sequence)
        assert same([part[: len(before[0])] for part in after], before)
    with held(make(kind)) as session:
        assert same(rows(session.sequence), after) and len(after[0]) > CHUNK


@pytest.mark.parametrize(
    ("kind", "cache", "method"),
    [
        *(("llama", "f16", method) for method in ("field", "suffix")),
        *(("qwen3", "q8_0", "field"), ("gpt2", "f16", "field+erratum")),
    ],
)
def test_a_long_session_is_edited_in_a_context_that_fits(
    make: Open, skill: Skill, kind: str, cache: str, method: str
) -> None:
    """Restored, ranked and rewritten, it grows as for turns, also if it is full to the last token."""
    with held(make(kind, cache, n_ctx=256)) as session:
        turn(session, skill, "x" * 400, limit=2)
        turn(session, skill, "x" * (-len(session.state.tokens) % 256 + 256 - 59), limit=2)
    with held(make(kind, cache, n_ctx=256)) as session:
        assert len(session.state.tokens) > 512
        value = "2026-07-01" if kind in WHOLE else "2026-07-01 or so"  # their rows cannot be moved for a longer one
        assert session.edit("date", value, Method.parse(method)).how == method
        after = rows(session.sequence)
    with held(make(kind, cache, n_ctx=256)) as session:
        assert same(rows(session.sequence), after)
        turn(session, skill, "So?", limit=2)


@pytest.mark.parametrize("kind", WHOLE)
def test_rows_that_cannot_be_moved_are_kept_by_turn(make: Open, skill: Skill, kind: str) -> None:
    """Each undo is exact, also after a fork and a restart; unsupported operations are refused."""
    with held(make(kind)) as session:
        before = []
        for question in ("Why?", "When?", "Who?"):
            turn(session, skill, question)
            before.append(rows(session.sequence))
        assert len(session.stored.kept()) == 3
        for method in ("field", "field+erratum") if kind != "gpt2" else ("field",):
            with pytest.raises(UnsupportedError, match=r"method erratum or suffix|what follows .*moved"):
                session.edit("date", "July 1", Method.parse(method))
        session.edit("date", "2026-07-01", ERRATUM)
        session.undo()
        session.undo()
        assert same(rows(session.sequence), before[1])
    Sessions(paths().sessions).fork("mine", "other")
    with held(make(kind), "other") as session:
        session.undo()
        assert session.state.turns == 1 and same(rows(session.sequence), before[0])
        assert not session.sequence.count("decoded")
        turn(session, skill, "Where?")


@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
def test_a_state_of_another_text_is_never_used(make: Open, skill: Skill, kind: str) -> None:
    """Neither that of a session whose turn has the same tokens, nor one that no file has."""
    for name, question in (("other", "How?"), ("mine", "Why?")):
        with held(make(kind), name) as session:
            turn(session, skill, question)
            session.follow("And then?")
            session.keep("yes")
    sessions = Sessions(paths().sessions)
    mine, other = sessions.find("mine"), sessions.find("other")
    assert mine.snapshot and len(mine.state.states) == 4 and mine.state.states[-1] == len(mine.state.tokens)
    forge(mine, lambda state: replace(state, states=(7, *state.states[2:])))
    with held(make(kind)) as session, pytest.raises(SessionError, match="not those of its tokens"):
        session.forget(["1"])
    files = {**mine.files, "0002.gguf": other.files["0002.gguf"]}
    mine.path(2).write_bytes(serialize(replace(mine.snapshot, files=files)))
    (mine.folder / "0002.gguf").write_bytes((other.folder / "0002.gguf").read_bytes())
    with held(make(kind)) as session, pytest.raises(SessionError, match=r"0002\.gguf has the recurrent states of "):
        _ = session.sequence


@pytest.mark.parametrize("name", ["0001.gguf", "0002.gguf"])
def test_damaged_rows_are_never_used(make: Open, skill: Skill, name: str) -> None:
    """Missing, damaged or of another turn: one line with the remedy."""
    with held(make()) as session:
        turn(session, skill, "Why?")
        turn(session, skill, "And then?")
        path = session.stored.folder / name
        other = session.stored.folder / ("0001.gguf" if name == "0002.gguf" else "0002.gguf")
    sound = path.read_bytes()
    for data in (sound[:-40] + b"\x01" + sound[-39:], b"", other.read_bytes(), None):
        path.unlink() if data is None else path.write_bytes(data)
        with held(make()) as session, pytest.raises(SessionError) as found:
            _ = session.sequence
        assert "\n" not in str(found.value) and "mine" in str(found.value)


def test_a_session_of_many_turns_holds_few_descriptors(make: Open, skill: Skill) -> None:
    """Not all files, one per turn, are open at once, and the K/V of each is restored. Without any descriptor left the
    error does not report damage or suggest an undo."""
    with held(make()) as session:
        for _ in range(10):
            turn(session, skill, "?", limit=1)
        before = rows(session.sequence)
    other = make()
    with held(other) as session, few_descriptors(0), pytest.raises(SessionError, match="Too many open") as found:
        _ = session.sequence
    assert "undo" not in str(found.value) and "damaged" not in str(found.value)
    with held(other) as session, few_descriptors(5):
        sequence = session.sequence
    assert len(list(session.stored.folder.glob("*.gguf"))) == 10
    assert same(rows(sequence), before)


def test_edits_that_cannot_be(make: Open, skill: Skill) -> None:
    """A value of two lines, two values, the value of the text. (Names and methods: tests/messages.yaml.)"""
    with held(make()) as session:
        turn(session, skill, "Why?")
        before = snapshot(session.stored.folder)
        with pytest.raises(NotesError, match="more than one line"):
            session.edit("tier", "a\nb", ERRATUM)
        with pytest.raises(SkillError, match="tier is given two new values, 'a' and 'b'"):
            list(session.edits({"date": "x", "tier": "a", "returns.tier": "b"}))
        assert snapshot(session.stored.folder) == before
        session.edit("tier", "basic", ERRATUM)
        with pytest.raises(NotesError, match="the text has tier=gold already"):
            session.edit("tier", "gold", Method.parse("field"))
        session.edit("tier", "gold", ERRATUM)


def test_a_value_is_given_again_only_to_mend_an_edit_in_place(make: Open, skill: Skill) -> None:
    """By suffix or an erratum; neither twice, nor without an edit in place."""
    with held(make()) as session:
        begin(session, skill)
        with pytest.raises(SkillError, match="tier is gold already"):
            session.edit("tier", "gold", SUFFIX)
        session.edit("tier", "basic", Method.parse("field"))
        for method in (None, Method.parse("field")):
            with pytest.raises(SkillError, match=r"tier is basic already, by field.*erratum or suffix"):
                session.edit("tier", "basic", method)
        for mends in (SUFFIX, ERRATUM):
            session.edit("tier", "basic", mends)
            assert [*session.state.pending] == ["tier"] * mends.appends_erratum
            with pytest.raises(SkillError, match=r"tier is basic already\."):
                session.edit("tier", "basic", mends)
            assert session.undo() == {"op": "edit", "what": "tier=basic"}


@pytest.mark.parametrize("change", ["suffix", "cut"])
def test_what_was_not_written_down_is_dropped(
    make: Open, skill: Skill, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk the next turn continues from the state on disk, also with the same tokens."""
    with held(make()) as session:
        turn(session, skill, "Why?")
        turn(session, skill, "And then?")
        failing: list[Callable[[], object]] = [lambda: session.forget([], method="suffix")]
        if change == "cut":
            session.forget(["1"])
        else:
            session.edit("tier", "basic", Method.parse("field"))
            failing = [partial(session.forget, ["2"], method) for method in ("cut", "suffix")]
            failing += [lambda: session.edit("tier", "basic", SUFFIX)]
        before, state = rows(session.sequence), session.state

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        for fails in failing:
            with monkeypatch.context() as patch, pytest.raises(SessionError, match="Nothing was changed"):
                patch.setattr("notes_cli.sessions.folder.replacing", full)
                fails()
            assert same(rows(session.sequence), before) and session.state == state
        turn(session, skill, "And now?")
        after = rows(session.sequence)
    with held(make()) as session:
        assert same(rows(session.sequence), after)


def test_a_turn_is_not_kept_where_the_session_went_on(make: Open, skill: Skill) -> None:
    """A change during the answer wins; the turn is not committed on top of it."""
    with held(make()) as session:
        turn(session, skill, "Why?")

        def forked() -> None:
            with session.fork("other"):
                pass

        for change in (
            lambda: session.edit("tier", "basic", ERRATUM),
            session.undo,
            lambda: turn(session, skill, "?"),
            forked,
        ):
            session.follow("And then?").flush()
            change()
            with pytest.raises(SessionError, match="was continued while this was answered"):
                session.keep("yes")
        session.edit("tier", "basic", ERRATUM)
        session.follow("And then?")
        session.keep("yes")
        assert not session.state.pending and session.state.turns == 3


def test_of_two_turns_at_once_the_later_one_is_kept(make: Open, skill: Skill) -> None:
    """Whichever ends first; the other neither commits nor discards it."""
    for ends in (lambda one: one.close(), lambda one: list(one)):
        with held(make(), f"mine{len(Sessions(paths().sessions).names())}") as session:
            turn(session, skill, "Why?")
            first, second = (session.stream(Request(text, max_tokens=4)) for text in "AB")
            next(first)
            next(second)
            with suppress(NotesError):
                ends(first)
            assert session.state.turns == 1
            list(second)
            assert session.state.questions == ["Why?", "B"]


def test_two_skills_with_one_field(make: Open, skill: Skill) -> None:
    """An edit of one skill neither changes nor mentions the other; `*.date` leaves the one that has the value."""
    other = parse_skill("tier: silver\ndate: 2026-07-01", source="fees.txt", default="fees")
    field = Method.parse("field")
    with held(make()) as session:
        begin(session, skill, other)
        with pytest.raises(SkillError, match=r"returns\.date, fees\.date"):
            session.edit("date", "July 2", field)
        with pytest.raises(SkillError, match=r"fees\.date is 2026-07-01 already"):
            session.edit("fees.date", "2026-07-01")
        assert [edit.name for edit in session.edits({"*.date": "2026-07-01"}, field)] == ["returns.date"]
        for key, value in (("returns.date", "the first of July"), ("fees.date", "July 2"), ("fees.tier", "gold")):
            session.edit(key, value, field)
        assert [part.text.split("date: ")[1].split("\n")[0] for part in session.state.skills] == [
            "the first of July",
            "July 2",
        ]
        session.edit("fees.tier", "silver", ERRATUM)
        turn(session, skill, "And?", "*.date=9 May", "returns.tier=basic")
        stated = {entry.name: entry.text for entry in session.state.entries if entry.kind == "erratum"}
        values = {"returns.date": "9 May", "returns.tier": "basic", "fees.tier": "silver", "fees.date": "9 May"}
        assert session.state.fields == values and stated.keys() == values.keys()
        assert (
            "tier of fees is now silver" in stated["fees.tier"] and "date of fees is now 9 May" in stated["fees.date"]
        )


@pytest.mark.parametrize("kind", ["llama", "mistral3", "gpt2", "lfm2"])
def test_a_skill_in_a_later_turn(make: Open, skill: Skill, kind: str) -> None:
    """Before errata of its fields, spliced if possible, edited, and restored from disk; refused a second time."""
    workspace = make(kind)
    fees = compile_skill(workspace, parse_skill("fee: 5 euros", source="fees.txt", default="fees"))
    with held(workspace) as session:
        turn(session, skill, "Why?")
        turn(session, skill, "How much?", "fee=6 euros", segments=[fees])
        own = [(piece.kind, piece.name, piece.how) for piece in session.state.turn_pieces(2)]
        spliced = ["seam", "spliced"] if kind in ("llama", "mistral3") else ["decoded"]
        assert [how for _, name, how in own if name == "fees"] == spliced
        assert [name for kind, name, _ in own if kind == "erratum"] == ["fees.fee"]
        with pytest.raises(SessionError, match="fees is in session mine already"):
            session.follow("How much?", segments=[fees])
        session.edit("fee", "7 euros", Method.parse("suffix"))
        before = rows(session.sequence)
        assert "fee: 7 euros" in workspace.model.text(session.state.tokens)
    with held(make(kind)) as session:
        assert same(rows(session.sequence), before) and session.compact().names == ("fee",)


def test_a_first_turn_corrects_as_ask_does(home: Path) -> None:
    """Also a skill of a later turn; the session has the compiled value, so that a global erratum still applies."""
    with notes.open() as model:
        skill = model.compile(text="date: 2026-06-01\n\nReturns are accepted.", name="returns")
        fees = model.compile(text="fee: 5 euros\n\nPaid once.", name="fees")
        alone = model.ask("Why?", splice=[skill], errata=["date=2026-07-01"], max_tokens=1)
        with model.session("mine") as session:
            answer = session.ask("Why?", splice=[skill], errata=["date=2026-07-01"], max_tokens=1)
            assert answer.counts == alone.counts and answer.settings == alone.settings
            later = session.ask("Why?", splice=[fees], errata=["fee=7 euros"], max_tokens=1)
            assert str(later.settings.method) == "field+erratum" and later.counts.rewritten > alone.counts.rewritten
            texts = [entry.text for entry in session.entries if entry.kind == "erratum"]
            assert len(texts) == 2 and "fee is now 7 euros" in texts[1]
