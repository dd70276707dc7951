"""Forgetting: remaining tokens equal those of a session without the removed parts, and no trace is left in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from notes_cli.config import paths
from notes_cli.editing.methods import ERRATUM
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import NotesError, SessionError
from notes_cli.library.container import open_segment
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import ReplyGenerator
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.messages import Conversation, Message, TextPart, user_message
from notes_cli.text.prompt import build
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace
from ..text.test_tools import SOURCES
from ..thinkers import OPENED, UNAWARE, Scripted
from .snapshots import snapshot

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
    """After suffix no file has texts or tokens of the removed parts, also where a kill left files with them."""
    workspace = make(cache="f16")
    talk = [("Hello?", "Yes."), ("My code is XYZZY-1.", "Noted XYZZY-1."), ("And XYZZY-2?", "Too."), ("Good?", "Good.")]
    grown(workspace, "mine", talk, [skill])
    with held(workspace) as session:
        say(session, "XYZZY-3", "No.")
        session.undo()
        session.forget(["2"])
        folder = session.stored.folder
        assert secrets(workspace, folder) and session.state.traces
        kept = snapshot(folder)
        session.forget(["2"], "suffix")
        assert not secrets(workspace, folder) and len([*folder.glob("*.gguf")]) == 1
        with pytest.raises(SessionError, match=r"nothing to undo .* is gone"):
            session.undo()
        for name in kept.keys() - snapshot(folder).keys():
            (folder / name).write_bytes(kept[name])  # as if killed before they were removed
    with held(workspace) as session:
        assert not secrets(workspace, folder)
        say(session, "Who?", "You.")
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


def test_a_skill_goes_with_its_turn_unless_a_later_turn_corrects_it(make: Open, skill: Skill) -> None:
    """Others get their short names back."""
    other = parse_skill("date: monday\nOpen then.", source="hours.txt", default="hours")
    with held(make()) as session:
        say(session, "Hello?", "Yes.", [skill])
        say(session, "Open?", "Yes.", [other])
        session.edit("returns.date", "2026-07-01", ERRATUM)
        say(session, "When?", "Then.")
        left = {"date": "2026-07-01", "tier": "gold"}
        assert session.forget(["2"]).skills == ("hours",) and session.state.fields == left
        session.undo()
        session.edit("hours.date", "friday", ERRATUM)
        say(session, "Now?", "No.")
        with pytest.raises(SessionError, match=r"turn 4 corrects hours\.date of a skill that would be gone \(hours\)"):
            session.forget(["2"])
        session.forget(["2", "4"], "suffix")
        assert session.state.fields == left and not session.state.pending


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
