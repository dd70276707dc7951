"""Sessions at work: put back from disk they go on as if they had never stopped, and nothing is silently wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.engine.context import ContextOptions
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.errors import NotesError, UnsupportedError
from notes_cli.library.sessions import SessionError, Sessions, Stored
from notes_cli.text.skill import Skill, parse_skill
from notes_cli.work.compiling import compile_skill
from notes_cli.work.prompting import Prompt, lay, parse_errata
from notes_cli.work.session import CHUNK, Session
from notes_cli.work.workspace import Workspace

WHOLE = ["lfm2", "mamba", "gpt2"]
Open = Callable[..., Workspace]


@pytest.fixture
def make(make_model: Callable[..., Path]) -> Iterator[Open]:
    """A workspace on a tiny model, in which one session can be at work."""
    opened: list[Workspace] = []

    def make(kind: str = "llama", cache: str = "f16", n_ctx: int = 1024, **settings: object) -> Workspace:
        options = ContextOptions(n_ctx=n_ctx, n_threads=1, type_k=cache, type_v=cache)
        opened.append(Workspace(make_model(kind, **settings), options))
        return opened[-1]

    yield make
    for workspace in opened:
        workspace.close()


@contextmanager
def held(workspace: Workspace, name: str = "mine") -> Iterator[Session]:
    with Sessions(paths().sessions).locked(name, new=True) as stored:
        yield Session(workspace, stored)


def turn(session: Session, skill: Skill, question: str, *errata: str, limit: int = 3) -> None:
    """A turn with a greedy answer; the first splices the skill behind a system text."""
    if session.empty:
        segment = compile_skill(session.workspace, skill)
        prompt = Prompt(question, [segment], parse_errata(errata, [segment]), system="Be kind.")
        notebook = lay(session.workspace, prompt, room=limit)
        session.begin(prompt, notebook)
    else:
        notebook = session.follow(question, errata, room=limit)
    with Sampler(SamplerOptions()) as sampler:
        list(notebook.generate(sampler, limit))
    session.keep()


def rows(notebook: Notebook) -> list[NDArray[np.float32]]:
    """All K and V of the notebook, as f32."""
    read = notebook.context.read(notebook.sequence, 0, len(notebook), base=0, dtype="f32")
    return [part for layer in read for part in (layer.k, layer.v)]


def same(one: list[NDArray[np.float32]], other: list[NDArray[np.float32]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Normalised mean squared error."""
    return float(np.sum((found - wanted) ** 2) / np.sum(wanted**2))


def logits(session: Session) -> NDArray[np.float32]:
    """After one more token."""
    notebook = session.notebook
    notebook.append([65])
    return notebook.logits()


@pytest.mark.parametrize(
    ("kind", "cache"),
    [*((kind, "f16") for kind in ("llama", "qwen3", "gemma3", "mistral3", *WHOLE))]
    + [("qwen3", cache) for cache in ("f32", "bf16", "q8_0", "q4_0")],
)
def test_rows_come_back_bit_for_bit(make: Open, skill: Skill, kind: str, cache: str) -> None:
    """Of every kind of model and cache: K, V, states and tokens of two turns are those that were there."""
    workspace, other = make(kind, cache), make(kind, cache)
    with held(workspace) as session:
        turn(session, skill, "Why?")
        turn(session, skill, "And then?", "date=2026-07-01")
        before, tokens = rows(session.notebook), session.notebook.tokens
    with held(other) as session:
        assert same(rows(session.notebook), before)
        assert session.notebook.tokens.tolist() == tokens.tolist() == session.state.tokens
        assert session.notebook.count("spliced") == len(tokens) and session.state.turns == 2


def run(script: list[tuple[str, ...]], skill: Skill, name: str, open_: Callable[[str], Session]) -> Session:
    """Do what the script says; a fork goes on under its own name. Returns the session that it ends with."""
    for op, *words in script:
        session = open_(name)
        if op == "turn":
            turn(session, skill, *words, limit=2)
        elif op == "edit":
            session.edit("date", words[0], Method.parse(words[1]))
        elif op == "undo":
            session.undo()
        else:
            Sessions(paths().sessions).fork(name, name + op)
            name += op
    return open_(name)


def script() -> list[tuple[str, ...]]:
    """50 turns, 20 edits, ten undos and two forks in an order that is the same every time."""
    random_ = random.Random(4)
    methods = ["erratum", "field", "field+erratum", "suffix"]
    # A value of another length moves what stands behind it.
    dates = [f"2026-07-{day:02}" if day % 3 else f"July {day}" for day in range(1, 21)]
    edits = [("edit", date, methods[number % 4]) for number, date in enumerate(dates)]
    later = [*(("turn", f"Q{number}") for number in range(45)), *edits, *[("undo",)] * 10]
    random_.shuffle(later)
    first = [("turn", f"Why {number}?") for number in range(5)]  # so that no undo reaches the beginning
    return [*first, *later[:20], ("a",), *later[20:50], ("b",), *later[50:]]


def test_fifty_turns_killed_between_them_equal_one_process(
    make: Open, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, skill: Skill
) -> None:
    """With 20 edits, ten undos and two forks: the same tokens, rows and logits within the position-exact bound."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # most of the time on a busy disk, and not what is tested
    size, ops = 4096, script()
    live: dict[str, Session] = {}

    def kept(name: str) -> Session:
        """Opened once, and in memory from then on."""
        if name not in live:
            live[name] = Session(make(n_ctx=size), Stored(paths().sessions / name))
        return live[name]

    one = run(ops, skill, "mine", kept)
    wanted, tokens = rows(one.notebook), one.state.tokens
    after = logits(one)

    monkeypatch.setenv("NOTES_HOME", str(tmp_path / "other"))
    opened: list[Workspace] = []

    def reopened(name: str) -> Session:
        """Opened anew each time, with what a kill leaves: half a line, and rows that no line tells of."""
        if opened:
            opened.pop().close()
        stored = Stored(paths().sessions / name)
        if stored.header:
            with stored.ledger.open("ab") as file:
                file.write(b'{"op": "turn", "pieces": [{"kind"')
            stored.next_rows.write_bytes(b"GGUF")
        opened.append(Workspace(make_model("llama"), ContextOptions(n_ctx=size, n_threads=1)))
        return Session(opened[0], Stored(stored.folder))

    many = run(ops, skill, "mine", reopened)
    assert many.state.tokens == tokens and len(tokens) > 1000
    # Not bit for bit: in one process cells lie in another order, and sums are rounded in it.
    assert max(error(a, b) for a, b in zip(rows(many.notebook), wanted, strict=True)) < 1e-5
    assert error(logits(many), after) < 1e-5
    assert many.state.turns > 30 and Sessions(paths().sessions).names() == ["mine", "minea", "mineab"]
    opened.pop().close()


@pytest.mark.parametrize("method", ["erratum", "field", "field+erratum", "selective@3", "suffix"])
@pytest.mark.parametrize("value", ["2026-07-01", "July 1", "the first of July"])
def test_an_undone_edit_leaves_the_very_rows(make: Open, skill: Skill, method: str, value: str) -> None:
    """Whatever the method and the length of the value; and the edit itself changed what it should."""
    workspace = make()
    with held(workspace) as session:
        segment = compile_skill(workspace, skill, measure=lambda done, total: None)
        prompt = Prompt("Why?", [segment])
        session.begin(prompt, lay(workspace, prompt, room=3))
        session.keep("yes")
        turn(session, skill, "And then?")
        before, tokens = rows(session.notebook), session.state.tokens
        session.edit("date", value, Method.parse(method))
        amended = b"".join(map(workspace.model.piece, session.state.tokens))
        assert (f"date: {value}\n".encode() in amended) == Method.parse(method).touches
        assert same(rows(session.notebook), before) == (method == "erratum")
        session.undo()
        assert session.state.tokens == tokens
        assert same(rows(session.notebook), before)
        assert session.state.fields == {"date": "2026-06-01", "tier": "gold"}


def test_suffix_equals_a_recompute(make: Open, skill: Skill) -> None:
    """Also when put back from disk, logits are those of decoding the session's tokens; after `field` they are not."""
    for name, value, right in (("suffix", "the first of July", True), ("field", "2026-07-01", False)):
        workspace = make()
        segment = compile_skill(workspace, skill)
        prompt = Prompt("Why?", [segment])
        with held(workspace, name) as session:
            session.begin(prompt, lay(workspace, prompt))
            session.keep("yes")
            session.edit("date", value, Method(name))
            turn(session, skill, "And then?")
        with held(make(), name) as session:
            tokens = session.state.tokens
            found = logits(session)
        book = workspace.notebook()
        book.append([*tokens, 65])
        wanted = book.logits()
        assert (error(found, wanted) < 1e-5) == right


def test_selective_touches_its_field_and_k_more(make: Open, skill: Skill) -> None:
    """Rows outside of the field and the K tokens stay bit-identical; where they are is remembered through edits."""
    workspace = make()
    segment = compile_skill(workspace, skill, measure=lambda done, total: None)
    prompt = Prompt("Why?", [segment])
    with held(workspace) as session:
        session.begin(prompt, lay(workspace, prompt, room=3))
        session.keep("yes")
    for value in ("2026-07-01", "2026-08-22"):
        with held(make()) as session:
            before = rows(session.notebook)
            session.edit("date", value, Method.parse("selective@5"))
            span = next(span for span in session.state.skills[0].fields if span.name == "date")
            after = rows(session.notebook)
            changed = {int(p) for a, b in zip(before, after, strict=True) for p in np.flatnonzero((a != b).any(axis=1))}
            field = set(range(len(segment.context) + span.first, len(segment.context) + span.last))
            assert changed & field and len(changed - field) <= 5 < len(changed)


def test_errata_of_edits_supersede_each_other(make: Open, skill: Skill) -> None:
    """Of 28 changes between two questions the last one is said, once, and an erratum given goes before it."""
    workspace = make()
    with held(workspace) as session:
        turn(session, skill, "Why?")
        for day in range(1, 29):
            session.edit("date", f"2026-08-{day:02}", Method())
        assert list(session.state.pending) == ["date"]
        length = len(session.state.tokens)
        turn(session, skill, "And then?")
        said = [entry.text for entry in session.state.entries if entry.kind == "erratum"]
        assert len(said) == 1 and "2026-08-28" in said[0]
        assert len(session.state.tokens) - length < 200 and not session.state.pending
        session.edit("date", "2026-09-01", Method())
        turn(session, skill, "So?", "date=2026-09-02")
        assert session.state.fields["date"] == "2026-09-02"
        assert "2026-09-01" not in "".join(entry.text for entry in session.state.entries if entry.kind == "erratum")


def test_forks_go_their_own_ways(make: Open, skill: Skill) -> None:
    """What one does leaves the rows of the other as they were."""
    with held(make()) as session:
        turn(session, skill, "Why?")
        before = rows(session.notebook)
    Sessions(paths().sessions).fork("mine", "other")
    with held(make(), "other") as session:
        session.edit("tier", "basic", Method("suffix"))
        turn(session, skill, "And then?")
    with held(make()) as session:
        assert same(rows(session.notebook), before)
        session.undo()
        assert session.empty
    with held(make(), "other") as session:
        assert session.state.turns == 2 and len(rows(session.notebook)[0]) == len(session.state.tokens)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral3"])
def test_a_session_grows_beyond_its_context(make: Open, skill: Skill, kind: str) -> None:
    """A turn that needs a larger context gets one, with all rows in it; they come back in several chunks."""
    workspace = make(kind, n_ctx=256)
    with held(workspace) as session:
        turn(session, skill, "Why?", limit=2)
        before = rows(session.notebook)
        turn(session, skill, "x" * 700, limit=2)
        assert workspace.context.n_ctx > 256
        after = rows(session.notebook)
        assert same([part[: len(before[0])] for part in after], before)
    with held(make(kind)) as session:
        assert same(rows(session.notebook), after) and len(after[0]) > CHUNK


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_sessions_keep_two_turns(make: Open, skill: Skill, kind: str) -> None:
    """One undo is exact, after two the text is decoded anew; a fork works; what a model cannot do is refused."""
    with held(make(kind)) as session:
        for question in ("Why?", "When?"):
            turn(session, skill, question)
        before = rows(session.notebook)
        turn(session, skill, "Who?")
        assert len(session.stored.kept()) == 2
        # Learned positions are no hindrance to a value of the same length.
        methods = ("field", "suffix", "field+erratum") if kind != "gpt2" else ("field",)
        for method in methods:
            with pytest.raises(UnsupportedError, match=r"^(the edit method .*Use erratum|what stands behind .*moved)"):
                session.edit("date", "July 1", Method(method))
        session.edit("date", "2026-07-01", Method())
        session.undo()
        session.undo()
        assert same(rows(session.notebook), before)
        session.undo()
    Sessions(paths().sessions).fork("mine", "other")
    with held(make(kind), "other") as session:
        assert session.state.turns == 1 and session.notebook.count("decoded") == len(session.state.tokens)
        turn(session, skill, "Where?")


def test_another_model_or_cache_is_refused(make: Open, skill: Skill) -> None:
    """By what differs, with the model that it was begun with."""
    with held(make()) as session:
        turn(session, skill, "Why?")
    for workspace, message in (
        (make("qwen2"), "was begun for architecture llama, this model is qwen2. Its model: /"),
        (make(seed=1), "was begun with tiny llama"),
        (make(cache="bf16"), "was begun with a f16/f16 K/V cache, this context keeps bf16/bf16"),
    ):
        with pytest.raises(SessionError, match=message), held(workspace):
            pass


@pytest.mark.parametrize("name", ["0001.gguf", "0002.gguf"])
def test_damaged_rows_are_never_used(make: Open, skill: Skill, name: str) -> None:
    """Missing, damaged or another turn's: one line that says how to go on."""
    with held(make()) as session:
        turn(session, skill, "Why?")
        turn(session, skill, "And then?")
        path = session.stored.folder / name
        other = session.stored.folder / ("0001.gguf" if name == "0002.gguf" else "0002.gguf")
    sound = path.read_bytes()
    for data in (sound[:-40] + b"\x01" + sound[-39:], b"", other.read_bytes(), None):
        path.unlink() if data is None else path.write_bytes(data)
        with held(make()) as session, pytest.raises(SessionError) as found:
            _ = session.notebook
        assert "\n" not in str(found.value) and "mine" in str(found.value)


def test_edits_that_cannot_be(make: Open, skill: Skill) -> None:
    """An unknown field, the value it has, a method that is not for sessions, influence that was not measured."""
    with held(make()) as session:
        turn(session, skill, "Why?")
        ledger = session.stored.ledger.read_bytes()
        for name, value, method, message in (
            ("dat", "x", "erratum", "has a field 'dat'. Known fields: date, tier"),
            ("tier", "gold", "field", "tier is gold already"),
            ("tier", "a", "stale", "is not for a session. Choose among erratum, field"),
            ("tier", "a", "selective@4", "compiled without the influence"),
            ("tier", "a\nb", "erratum", "more than one line"),
        ):
            with pytest.raises(NotesError, match=message):
                session.edit(name, value, Method.parse(method))
        assert session.stored.ledger.read_bytes() == ledger
        session.edit("tier", "basic", Method())
        with pytest.raises(NotesError, match="the text says tier=gold as it is"):
            session.edit("tier", "gold", Method("field"))
        session.edit("tier", "gold", Method())


def test_a_failed_turn_leaves_the_session_as_it_was(make: Open, skill: Skill) -> None:
    """A turn that is laid but not kept, as after Ctrl-C, is gone; the next one stands where it would have."""
    with held(make()) as session:
        turn(session, skill, "Why?")
        before = rows(session.notebook)
        session.follow("lost").flush()
        assert same(rows(session.notebook), before)
        turn(session, skill, "And then?")
    with held(make()) as session:
        assert [entry.text for entry in session.state.entries if "lost" in entry.text] == []
        assert len(session.notebook) == len(session.state.tokens)


def test_two_skills_with_one_field(make: Open, skill: Skill) -> None:
    """Both texts are amended in one edit, and the spans of both are where their values stand."""
    workspace = make()
    other = parse_skill("tier: silver\ndate: 2026-06-01", source="fees.txt", default="fees")
    segments = [compile_skill(workspace, skill), compile_skill(workspace, other)]
    prompt = Prompt("Why?", segments)
    with held(workspace) as session:
        session.begin(prompt, lay(workspace, prompt))
        session.keep("yes")
        for value in ("the first of July", "July 2"):
            session.edit("date", value, Method("field"))
            for part in session.state.skills:
                for span in part.fields:
                    ids = session.state.tokens[part.position + span.first : part.position + span.last]
                    assert b"".join(map(workspace.model.piece, ids)).decode().strip() == span.value
    with held(make()) as session:
        assert len(session.notebook) == len(session.state.tokens)
