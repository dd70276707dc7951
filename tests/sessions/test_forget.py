"""Forgetting: remaining tokens equal those of a session without the removed parts, and no trace is left in files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from notes_cli.config import paths
from notes_cli.editing.methods import ERRATUM, Method
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import NotesError, SessionError, UnsupportedError
from notes_cli.library.container import open_segment
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import ReplyGenerator
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.archive import load, save
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.messages import Conversation, Message, TextPart, user_message
from notes_cli.text.prompt import build
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace
from ..text.test_tools import SOURCES
from ..thinkers import OPENED, UNAWARE, Scripted
from .snapshots import snapshot
from .test_session import rows, same

QWEN = SOURCES["Qwen-Qwen3-0.6B"]
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
Open = Callable[..., Workspace]
Talk = Sequence[tuple[str, str]]  # prompt and answer. A tool result begins with its name and a colon


@pytest.fixture
def make(make_workspace: MakeWorkspace) -> Open:
    """A workspace on a tiny model with a chat template."""
    usual = {"template": QWEN, "added": MARKS, "cache": "f32", "n_ctx": 2048}
    return lambda kind="llama", **settings: make_workspace(kind, **usual | settings)


@contextmanager
def held(workspace: Workspace, name: str = "mine") -> Iterator[Session]:
    with Sessions(paths().sessions).locked(name, new=True) as stored, Session(workspace, stored) as session:
        yield session


def say(
    session: Session, comes: str, answer: str, skills: Sequence[Skill] = (), system: str | None = "Be kind."
) -> None:
    """A turn with a given answer in place of a generated one."""
    workspace = session.workspace
    segments = [compile_skill(workspace, skill) for skill in skills]
    if session.empty:
        prompt = Prompt(comes, segments, system=system)
        sequence = assemble(workspace, prompt)
        session.begin(prompt, sequence)
    elif comes.startswith("look_up:"):
        sequence = session.append_results([("look_up", comes.removeprefix("look_up:"))])
    else:
        sequence = session.follow(comes, segments=segments)
    write(workspace, sequence, answer)
    session.keep()


def write(workspace: Workspace, sequence: KVSequence, answer: str) -> None:
    sequence.append(workspace.model.tokenize(answer, special=True), "answer")


def grown(
    workspace: Workspace, name: str, talk: Talk, skills: Sequence[Skill] = (), system: str | None = "Be kind."
) -> SessionFolder:
    with held(workspace, name) as session:
        for number, (comes, answer) in enumerate(talk):
            say(session, comes, answer, () if number else skills, system)
        return session.stored


def rounds(count: int) -> list[tuple[str, str]]:
    """Rounds of a question, a tool call, its result, and an answer."""
    call = '<tool_call>\n{{"name": "look_up", "arguments": {{"key": "{}"}}}}\n</tool_call>'
    parts = [
        [(f"What is {n}?", call.format(n)), (f"look_up:{n} is worth {n * 37}.", f"It is {n * 37}.")]
        for n in range(count)
    ]
    return [part for pair in parts for part in pair]


TALK = [(f"Why {number}?", f"Because {number}.") for number in range(5)]


@pytest.mark.parametrize("template", [OPENED, UNAWARE, QWEN], ids=["opened", "unaware", "qwen"])
def test_a_thought_that_is_gone_was_never_there(make: Open, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any reasoning markers, the tokens are those of the template for an answer without reasoning."""
    workspace = make(template=template)
    with held(workspace) as session:
        prompt = Prompt("Why?", think=True)
        sequence = assemble(workspace, prompt)
        session.begin(prompt, sequence)
        script = Scripted(workspace.model, "Let me see.</think>")
        monkeypatch.setattr("notes_cli.runtime.generate.Sampler", script)
        run(ReplyGenerator(workspace, max_think=40).reason(sequence))
        write(workspace, sequence, "Because.")
        session.keep()
        say(session, "And then?", "Nothing.")
        assert any(entry.thought for entry in session.state.entries)
        done = session.forget(["thought:1"], "suffix")
        assert done.removed > 10 and not any(entry.thought for entry in session.state.entries)
        found = session.state.tokens
    expected: list[int] = []
    messages = (user_message("Why?"), Message("assistant", (TextPart("Because."),)), user_message("And then?"))
    thinks = workspace.thinking_template.earlier
    for chunk in build(thinks, Conversation(messages[:1])):
        expected += [int(token) for token in workspace.tokenize(chunk)]
    expected += [int(token) for token in workspace.model.tokenize("Because.")]
    assert found[: len(expected)] == expected
    text = workspace.model.text(found)
    assert "Let me see" not in text and "Because." in text and "Nothing." in text


def test_what_tools_have_returned(make: Open) -> None:
    """The message of a result stays, empty; a turn with results is removed only with the call."""
    workspace = make()
    grown(workspace, "mine", rounds(3))
    empty = [(comes if comes != "look_up:1 is worth 37." else "look_up:", answer) for comes, answer in rounds(3)]
    never = grown(workspace, "empty", empty).state
    expected = never.tokens
    with held(workspace) as session:
        for names in (["4"], ["3"], ["1", "2", "3"]):
            with pytest.raises(SessionError, match=r"turn 4 has the results of the tools that turn 3 called"):
                session.forget(names)
        done = session.forget(["tool:4"])
        assert session.state.tokens == expected and done.removed == len("1 is worth 37.")
        assert "1 is worth" not in "".join(entry.text for entry in session.state.entries)
        assert session.state.questions == never.questions
        with pytest.raises(SessionError, match="nothing of it is left"):
            session.forget(["tool:4"])
        with pytest.raises(SessionError, match="does not call a tool 'fly'"):
            session.ask(request_with(("fly", "x")))
        session.forget(["tool:2"], "suffix")
        assert not [path for path in session.stored.folder.iterdir() if b"0 is worth" in path.read_bytes()]


def test_results_are_those_of_the_calls(make: Open) -> None:
    """One result per call, in order; a name elsewhere in an answer is not a call."""
    calls = (f'<tool_call>\n{{"name": "{tool}", "arguments": {{}}}}\n</tool_call>' for tool in ("look_up", "get_date"))
    with held(make()) as session:
        say(session, "What, and when?", "\n".join(calls))
        for wrong in (["get_date", "look_up"], ["look_up"], ["look_up"] * 2, ["look_up", "get_date", "look_up"]):
            with pytest.raises(SessionError, match="a result for each of its calls, in their order"):
                session.ask(request_with(*((tool, "x") for tool in wrong)))
        session.ask(request_with(("look_up", "x"), ("get_date", "y")))
        say(session, "And?", "I will not call get_date.")
        with pytest.raises(SessionError, match="does not call get_date"):
            session.ask(request_with(("get_date", "y")))


def request_with(*results: tuple[str, str]) -> Request:
    return Request("", results=results, max_tokens=1, max_think=1)


def test_nothing_is_left_in_the_files(make: Open, skill: Skill) -> None:
    """After suffix no file has texts or tokens of the removed parts, and the session is as usable as before."""
    workspace = make(cache="f16")
    talk = [
        ("Hello?", "Yes."),
        ("My code is XYZZY-1.", "Noted XYZZY-1."),
        ("And XYZZY-2?", "That, too."),
        ("Good?", "Good."),
    ]
    grown(workspace, "mine", talk, [skill])
    with held(workspace) as session:
        say(session, "XYZZY-3", "No.")
        session.undo()
        session.forget(["2"])
        assert secrets(workspace, session.stored.folder) and session.state.traces
        session.forget(["2"], "suffix")
        folder = session.stored.folder
        assert not secrets(workspace, folder) and len([*folder.glob("*.gguf")]) == 1
        with pytest.raises(SessionError, match=r"nothing to undo .* is gone"):
            session.undo()
        say(session, "Who?", "You.")
        session.edit("date", "2026-07-01", ERRATUM)
        say(session, "When?", "Now.")
        session.edit("date", "2026-07-02", ERRATUM)
        assert session.compact().names == ("date",)
        say(session, "When now?", "Later.")
        session.compact()
        session.undo()
        session.edit("date", "July 3", Method.parse("field"))
        session.forget(["4"])
        tokens, values = session.state.tokens, session.state.fields
    with held(workspace) as session:
        assert session.sequence.tokens.tolist() == tokens
        out = io.BytesIO()
        save(session.stored, out)
        out.seek(0)
        came = load(Sessions(paths().sessions), out, "it", "came")
        assert came.state.tokens == tokens and came.state.fields == values
        for _ in range(7):
            session.undo()
        with pytest.raises(SessionError, match="nothing to undo"):
            session.undo()
        assert session.state.questions == ["Hello?", "Good?"]


def secrets(workspace: Workspace, folder: Path) -> list[Path]:
    """The files that contain the secret, as text or as tokens."""
    found = []
    for path in folder.iterdir():
        tokens = workspace.model.text(open_segment(path).tokens) if path.suffix == ".gguf" else ""
        if b"XYZZY" in path.read_bytes() or "XYZZY" in tokens:
            found.append(path)
    return found


def test_rows_are_moved_as_they_are(make: Open) -> None:
    """V is bit-identical, and K rotated by the distance: a cut computes nothing. Undone, all are as they were."""
    workspace = make()
    grown(workspace, "mine", TALK)
    with held(workspace) as session:
        old = session.sequence.context.read(session.sequence.seq_id, 0, len(session.sequence), base=0, dtype="f32")
        was, state = rows(session.sequence), session.state
        plan = session.forget(["2"], dry=True)
        assert session.state.turns == 5
        session.forget(["2"])
        new = session.sequence.context.read(session.sequence.seq_id, 0, len(session.sequence), base=0, dtype="f32")
        kept = plan.tokens - plan.moved
        for before, after in zip(old, new, strict=True):
            assert np.array_equal(after.v[:kept], before.v[:kept]) and np.array_equal(after.k[:kept], before.k[:kept])
            assert np.array_equal(after.v[kept:], before.v[kept + plan.removed :])
            # `base` 0 is where each stretch begins: K rows are rotated to their positions.
            assert not np.allclose(after.k[kept:], before.k[kept + plan.removed :], atol=1e-3)
            turned = np.linalg.norm(after.k[kept:], axis=1), np.linalg.norm(before.k[kept + plan.removed :], axis=1)
            assert np.allclose(*turned, rtol=1e-4)
        session.forget(["1", "3"])
        assert len(session.state.traces) == 2
        session.undo()
        assert session.undo()["op"] == "forget"
        assert session.state == state and same(rows(session.sequence), was)


def test_corrections_that_were_said_are_said_again(make: Open, skill: Skill) -> None:
    """An erratum in a removed turn is repeated before the next question unless a later one supersedes it."""
    workspace = make()
    with held(workspace) as session:
        say(session, "Hello?", "Yes.", [skill])
        for number, day in enumerate(("2026-07-01", "2026-07-02"), 1):
            session.edit("date", day, ERRATUM)
            say(session, f"When {number}?", "Then.")
        session.edit("tier", "silver", ERRATUM)
        say(session, "Which?", "That.")
        assert session.forget(["2"]).repeated == () and not session.state.pending
        session.undo()
        assert session.forget(["3", "4"]).repeated == ("date", "tier")
        assert ["2026-07-02" in text for text in session.state.pending.values()] == [True, False]
        assert session.state.fields["date"] == "2026-07-02" and not session.state.corrections.stated
        say(session, "And?", "So.")
        errata = [entry.name for entry in session.state.entries if entry.kind == "erratum" and entry.turn == 3]
        assert errata == ["date", "tier"] and not session.state.pending


def test_a_skill_goes_with_its_turn_unless_something_speaks_of_it(make: Open, skill: Skill) -> None:
    """Others get their short names back; an erratum of it in a remaining turn prevents it."""
    workspace = make()
    other = parse_skill("date: monday\nOpen then.", source="hours.txt", default="hours")
    with held(workspace) as session:
        say(session, "Hello?", "Yes.", [skill])
        say(session, "Open?", "Yes.", [other])
        session.edit("returns.date", "2026-07-01", ERRATUM)
        say(session, "When?", "Then.")
        assert session.forget(["2"]).skills == ("hours",)
        assert session.state.fields == {"date": "2026-07-01", "tier": "gold"} and session.state.corrections.stated == {
            "returns.date"
        }
        assert [skill.name for skill in session.state.skills] == ["returns"]
        session.undo()
        session.edit("hours.date", "friday", ERRATUM)
        say(session, "Now?", "No.")
        with pytest.raises(SessionError, match=r"turn 4 corrects hours\.date of a skill that would be gone \(hours\)"):
            session.forget(["2"])
        session.forget(["2", "4"], "suffix")
        assert session.state.fields == {"date": "2026-07-01", "tier": "gold"} and not session.state.pending
        session.edit("date", "2026-08-01", Method.parse("field"))


def test_what_cannot_be_forgotten(make: Open, skill: Skill) -> None:
    """One line has the reason; the session is unchanged. (More of them: tests/messages.yaml.)"""
    workspace = make()
    grown(workspace, "mine", TALK, [skill])
    with held(workspace) as session:
        before = snapshot(session.stored.folder)
        for names, why in (
            (["4-6"], "there is no turn 6"),
            (["5-4"], "ends before it begins"),
            (["1-5"], "nothing would be left of session mine"),
            (["thought:2"], "there is no chain of thought in turn 2"),
            (["tool:1-5"], "there is no result of a tool in turn 1-5"),
        ):
            with pytest.raises(SessionError, match=why) as caught:
                session.forget(names)
            assert "\n" not in str(caught.value)
        with pytest.raises(NotesError, match="no method 'stale' of forgetting"):
            session.forget(["1"], "stale")
        assert snapshot(session.stored.folder) == before


@pytest.mark.parametrize("kind", ["lfm2", "gpt2"])
def test_models_whose_rows_cannot_be_moved(make: Open, kind: str) -> None:
    """A cut is refused with the reason; suffix equals a session that never had the part."""
    workspace = make(kind, n_ctx=1024)
    grown(workspace, "mine", TALK[:3])
    expected = grown(workspace, "never", [TALK[0], TALK[2]]).state.tokens
    with held(workspace) as session:
        with pytest.raises(UnsupportedError, match="turn 2 cannot be forgotten by cut"):
            session.forget(["2"])
        assert session.state.turns == 3
        session.forget(["2"], "suffix")
        assert session.state.tokens == expected
    with held(workspace) as session, held(workspace, "never") as other:
        ours, theirs = (np.array(each.follow("Why?").logits()) for each in (session, other))
        assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()


def test_a_cache_that_rounds_is_moved_a_few_times(make: Open) -> None:
    """Each move rounds the keys again, so their number is limited; suffix has no limit."""
    workspace = make("qwen3", cache="q8_0")
    grown(workspace, "mine", [*TALK, *TALK])
    with held(workspace) as session:
        for _ in range(4):
            session.forget(["2"])
        with pytest.raises(UnsupportedError, match="moved 4 times, and each time rounds the keys of a q8_0 cache"):
            session.forget(["2"])
        session.forget(["2"], "suffix")
        assert session.state.turns == 5
