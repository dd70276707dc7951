"""`notes ask --session`, `notes chat`, `notes edit` and `notes session`, as users meet them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli import output
from notes_cli.commands import session
from notes_cli.commands.request import AnswerPrinter
from notes_cli.config import paths
from notes_cli.engine.pieces import Reason
from notes_cli.library import safe_files
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import Entry, State, Turn, serialize
from notes_cli.text.messages import Message, TextPart, user_message

from ..limits import small_files
from ..sessions.snapshots import forge
from . import conftest
from .conftest import TEXT, Notes, command_line, ctrl_c, snapshot

BEGIN = ("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 3)
GO_ON = ("ask", "And then?", "--session", "mine", "-n", 3)


@pytest.fixture
def begun(notes: Notes, compiled: Path, home: Path) -> Path:
    """A session of one turn with a skill; its folder."""
    assert notes(*BEGIN).code == 0
    return home / "sessions" / "mine"


def test_turns_go_on(notes: Notes, begun: Path) -> None:
    """The second turn reads its own words only, and its answer is that of one conversation."""
    before = notes("session", "show", "mine", "--json").json
    result = notes(*GO_ON, "--json").json
    assert result["session"] == "mine" and result["tokens"]["answer"] == 3
    assert result["tokens"]["spliced"] == before["tokens"]
    assert result["tokens"]["decoded"] == result["tokens"]["total"] - before["tokens"] < 60
    after = notes("session", "show", "mine", "--json").json
    assert (after["turns"], after["tokens"]) == (2, result["tokens"]["total"] + 3)
    assert [piece["kind"] for piece in after["pieces"]] == ["text", "splice", *["question", "answer"] * 2]
    assert after["pieces"][-1]["text"].strip() == result["answer"]
    chosen = notes("ask", "Sure?", "--session", "mine", "--choices", "yes,no", "--json").json
    last = notes("session", "show", "mine", "--json").json["pieces"][-1]
    assert (last["kind"], last["text"]) == ("answer", chosen["choice"])


def test_an_edit_says_what_it_computed_and_what_it_moved(notes: Notes, begun: Path) -> None:
    """A longer value moves what follows; a session is found by its name in capitals, too."""
    tokens = notes("session", "show", "Mine", "--json").json["tokens"]
    outcome = notes("edit", "MINE", "--field", "tier=platinum")
    found = re.match(r"tier=platinum: (\d+) rows recomputed, (\d+) moved; an erratum", outcome.out)
    assert found and 0 < int(found[1]) < 12 and 12 < int(found[2]) < tokens, outcome
    assert " moved" not in notes("edit", "mine", "--field", "date=2026-06-02").out
    assert notes("ask", "Why?", "--session", "Monday", "-n", 1).code == 0
    assert notes("session", "ls", "-q").out == "mine\nmonday\n"


def test_a_text_that_was_edited_since(notes: Notes, begun: Path, skill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line on stderr, with -q too, and in the JSON: for a question, for a turn also after it was compiled again, and
    for what sessions keep when the skill is removed, which a terminal asks about."""
    assert notes(*GO_ON, "-q").err == "" and notes(*GO_ON, "--json").json["warnings"] == []
    skill.write_text(TEXT.replace("gold", "basic"))
    question = ("ask", "Why?", "--splice", "returns", "-n", 1)
    edited, kept = "returns: the text has changed", "session mine keeps the text of returns as it was before an edit"
    for again in ((), ("compile", skill)):
        asked = [] if again else [(question, edited)]
        assert not again or notes(*again).code == 0
        for command, line in (*asked, (GO_ON, kept)):
            assert notes(*command, "-q").err.startswith(f"warning: {line}")
            (warning,) = notes(*command, "--json").json["warnings"]
            assert warning.startswith(line)
    assert notes(*question, "-q").err == ""
    monkeypatch.setattr(conftest._Pipe, "isatty", lambda self: self is sys.stdin)
    refused = notes("rm", "returns", stdin="n\n")
    assert refused.code == 1 and "warning: session mine keeps the text of returns. To remove it there" in refused.err
    assert notes("rm", "returns", stdin="y\n").code == 0


def test_rope_settings_of_the_first_turn_hold(notes: Notes, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of variables, too, which the second session has and the first one has not; a flag that differs is refused."""
    monkeypatch.setenv("NOTES_ROPE_FREQ_BASE", "20000")
    assert notes("ask", "Why?", "--session", "other", "-n", 1).code == notes(*GO_ON).code == 0
    monkeypatch.delenv("NOTES_ROPE_FREQ_BASE")
    assert notes("ask", "And then?", "--session", "other", "-n", 1).code == 0
    refused = notes("ask", "So?", "--session", "other", "--rope-freq-base", "10000", "-n", 1)
    assert refused.code == 1 and "begun with RoPE norm base 20000" in refused.err


def test_undo_says_what_it_took_back(notes: Notes, begun: Path) -> None:
    for question in ("And now?", "And then?"):
        assert notes("ask", question, *GO_ON[2:]).code == 0
    assert notes("chat", "mine").err.splitlines()[0].endswith(", 3 turns so far; /help")
    assert notes("session", "forget", "mine", "2").code == notes("session", "compact", "mine").code == 0
    assert notes("session", "undo", "mine").out == "undid the compaction\n"  # of no erratum
    assert notes("session", "undo", "mine").out == "undid the cut: turn 2\n"
    for question in ("And then?", "And now?"):
        assert notes("session", "undo", "mine").out == f"undid the turn: {question}\n"
    assert notes("chat", "mine").err.splitlines()[0].endswith(", 1 turn so far; /help")


@pytest.mark.parametrize("way", ["config", "variables"])
def test_settings_are_for_first_turns(
    notes: Notes, begun: Path, home: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A later turn ignores options of first turns and errata of config.yaml and variables: values from edits stay."""
    settings = {"erratum": "date=2026-08-01", "system": "Be brief.", "field": "tier=basic", "decode": "returns"}
    settings |= {"place": "late", "splice": "returns"}
    if way == "config":
        said = "".join(f"  {name}: '{value}'\n" for name, value in settings.items())
        (home / "config.yaml").write_text(f"ask:\n{said}  recompute: true\n")
    else:
        for name, value in {**settings, "recompute": "1"}.items():
            monkeypatch.setenv(f"NOTES_ASK_{name.upper()}", value)
    assert notes("edit", "mine", "--field", "date=2026-07-01", "--method", "erratum").code == 0
    for _ in range(2):
        assert notes(*GO_ON).code == 0
    shown = notes("session", "show", "mine", "--json").json
    errata = [piece["text"] for piece in shown["pieces"] if piece["kind"] == "erratum"]
    assert len(errata) == 1 and "2026-07-01" in errata[0] and shown["fields"]["date"] == "2026-07-01"
    assert notes(*GO_ON, "--erratum", "date=2026-09-01").code == 0
    assert notes("session", "show", "mine", "--json").json["fields"]["date"] == "2026-09-01"


def test_a_first_turn_on_a_full_disk_changes_nothing(notes: Notes, compiled: Path) -> None:
    """As the message promises: doctor finds nothing wrong, and with free space the session begins."""
    ask = ("ask", "Why?", "--splice", "returns", "--session", "new", "-n", 1)
    with small_files(10 << 10):
        outcome = notes(*ask)
    assert outcome.code == 1 and "File too large. Nothing was changed" in outcome.err
    assert notes("doctor").code == 0 and notes("session", "ls", "-q").out == "" and notes(*ask).code == 0


def test_a_session_of_tokens_that_the_model_does_not_have(notes: Notes, begun: Path) -> None:
    """A snapshot is untrusted: 259 tokens exist, and a larger id would crash llama.cpp."""
    for bad in (259, 2**31 - 1):
        forge(SessionFolder(begun), lambda state: replace(state, tokens=[bad, *state.tokens[1:]]))  # noqa: B023
        for arguments in (GO_ON, ("edit", "mine", "--field", "tier=silver")):
            assert f"session mine holds token {bad}" in notes(*arguments).refusal()
    assert notes("session", "undo", "mine").code == 0


def test_a_conversation_with_tools_and_thoughts() -> None:
    """Tool results are their own parts, reasoning is separate from the answer, and forgotten parts are named."""

    def entry(turn: int, kind: str, text: str, reason: Reason = Reason.PLAIN) -> Entry:
        return Entry(kind, "weather" if kind == "result" else "", text, 0, 1, "decoded", turn, reason)

    pieces = [
        *(entry(1, "answer", "Hm.", Reason.THOUGHT), entry(1, "answer", "</think>", Reason.THOUGHT_END)),
        *(
            entry(1, "answer", " It is warm."),
            entry(2, "result", "<result>17</result>"),
            entry(2, "answer", " It is warm."),
        ),
    ]
    turns = [Turn((user_message("?"),)), Turn((Message("tool", (TextPart("17"),), (), "", "weather"),))]
    state = State(tuple(turns), pieces=tuple(pieces))
    assert [*session.parts_of_turn(state, 1)] == [("thought", "Hm."), ("assistant", "It is warm.")]
    assert [*session.parts_of_turn(state, 2)] == [("tool", "weather: 17"), ("assistant", "It is warm.")]


def test_long_lines_are_wrapped_on_a_terminal() -> None:
    """At words, after the label, with the line's indentation."""
    said = "one two three four five six\n    - seven eight nine ten eleven\n\nend"
    assert session._lines("user", said, 30) == [
        *("user        one two three four", "            five six", "                - seven eight"),
        *("                nine ten", "                eleven", "", "            end"),
    ]
    assert len(session._lines("user", said, 0)) == 4


def test_export_and_import(notes: Notes, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One private file, replaced with -f alone, or a pipe; the session continues under any name."""
    monkeypatch.chdir(tmp_path)
    assert notes("session", "export", "mine").out == "mine.notes.tar\n"
    archive = tmp_path / "mine.notes.tar"
    data = archive.read_bytes()
    assert archive.stat().st_mode & 0o777 == 0o600 and notes("session", "export", "mine").code == 1
    assert notes("session", "export", "mine", "-f").code == 0 and archive.read_bytes() == data
    taken = notes("session", "import", archive)
    assert taken.code == 1 and "there is a session mine already" in taken.err
    piped = subprocess.run(command_line("session", "export", "mine", "-"), capture_output=True, check=True).stdout
    assert notes("session", "import", "-", "--name", "third", stdin=piped).out == f"{begun.parent / 'third'}\n"
    shown = [notes("session", "show", name, "--json").json["pieces"] for name in ("mine", "third")]
    assert shown[0] == shown[1]
    answers = [notes("ask", "And then?", "--session", name, "-n", 3).out for name in ("mine", "third")]
    assert answers[0] == answers[1]
    assert notes("session", "import", "-", stdin=piped).code == 2
    assert notes("session", "export", "mine", "-", "--json").code == 2


def test_nothing_that_was_imported_moves_the_cursor(notes: Notes, begun: Path) -> None:
    stored = SessionFolder(begun)
    assert stored.snapshot
    escaped = [replace(piece, text=f"\u001b[2J\u009b{piece.text}") for piece in stored.state.pieces]
    header = replace(stored.header, identity=replace(stored.header.identity, model="\u001b]0;x"))  # type: ignore[union-attr, type-var]
    changed = replace(stored.snapshot, header=header, state=replace(stored.state, pieces=tuple(escaped)))
    stored.path(1).write_bytes(serialize(changed))
    for command in (("session", "show", "mine"), ("session", "ls")):
        out = notes(*command).out
        assert "\\x1b" in out and "\x1b" not in out and "\x9b" not in out


def test_ls_and_rm(notes: Notes, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged session is listed, too; rm removes nothing without a yes on a terminal, or -y."""
    assert notes("session", "fork", "mine", "other").code == 0
    assert notes("session", "ls", "-q").out == "mine\nother\n"
    (begun / "0001.json").write_text("broken\n")
    broken = notes("session", "ls", "--json").json[0]
    assert broken.keys() == {"name", "path", "problem"} and "is damaged" in broken["problem"]
    assert "is damaged" in notes("session", "ls").out
    with monkeypatch.context() as patch:
        patch.setattr(conftest._Pipe, "isatty", lambda self: True)
        for answer, code in (("n\n", 1), ("\n", 1), ("y\n", 0)):
            assert begun.exists()
            outcome = notes("session", "rm", "mine", stdin=answer)
            assert outcome.code == code and "Remove 1 session: mine?" in outcome.err
    assert not begun.exists() and notes("session", "rm", "-y", "other").out == f"{begun.parent / 'other'}\n"


def test_a_session_in_use_by_another_process(notes: Notes, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is locked, rm of several removes none. Ask, edit, chat and undo wait, and say so."""
    assert notes("session", "fork", "mine", "other").code == 0
    with Sessions(paths().sessions).locked("mine"):
        assert "session mine is open already" in notes("session", "rm", "-y", "other", "mine").refusal()
    assert notes("session", "ls", "-q").out == "mine\nother\n"
    monkeypatch.setattr(safe_files, "NOTICE", 0.01)
    for arguments in (GO_ON, ("edit", "mine", "--field", "tier=b"), ("chat", "mine"), ("session", "undo", "mine")):
        held = ExitStack()
        held.enter_context(Sessions(paths().sessions).locked("mine"))
        with monkeypatch.context() as patch:  # another process ends when it is waited for
            patch.setattr(safe_files, "_holder", lambda path, held=held: held.close() or "process 7")
            outcome = notes(*arguments)
        assert outcome.code == 0 and "waiting for process 7, which has session mine open. Ctrl-C ends" in outcome.err


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_turn_has_not_happened(notes: Notes, begun: Path, ending: signal.Signals) -> None:
    """Interrupted or killed during the answer: the session is unchanged and usable."""
    before = snapshot(begun)
    endless = ("ask", "And then?", "--session", "mine", "-n", 100_000, "-c", 110_000, "--beyond-trained")
    process = subprocess.Popen(command_line(*endless), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=-3)
    assert process.stdout and process.stdout.read(1)
    process.send_signal(ending)
    process.communicate()
    assert snapshot(begun) == before
    assert notes(*GO_ON).code == 0 and notes("session", "show", "mine", "--json").json["turns"] == 2


QUESTION = "May I return this?"


@pytest.fixture
def returns(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The skill `returns`, compiled for the model that ships, which answers questions about it."""
    monkeypatch.setenv("NOTES_MODEL", "notes-tiny")
    assert notes("compile", SAMPLES / "returns").code == 0


def test_a_conversation(notes: Notes, returns: None) -> None:
    """Its answers are those of `notes ask --session`, and an erratum comes with the next question only."""
    lines = [QUESTION, "/erratum date=2026-07-01", QUESTION, "/skills", "/show"]
    outcome = notes("chat", "mine", "--splice", "returns", stdin="\n".join(lines))
    assert outcome.code == 0 and "session mine with notes-tiny" in outcome.err
    first, second, skill, *shown = outcome.out.splitlines()
    assert (first, second, skill) == ("accepted", "refused", "* returns")
    assert [line.split()[0] for line in shown if line.strip()] == [
        *("turn", "skill", "user", "assistant"),
        *("turn", "correction", "user", "assistant"),
    ]
    again = ("ask", QUESTION, "--session", "other")
    assert notes(*again, "--splice", "returns").out.strip() == first
    assert notes(*again, "--erratum", "date=2026-07-01").out.strip() == second
    later = notes("chat", "mine", stdin="/undo\n/exit\nnever asked")
    assert "1 turn" not in later.out and f"took back: {QUESTION}" in later.err
    assert notes("session", "show", "mine", "--json").json["turns"] == 1


CUT_AT_12 = "the answer was cut after 12 tokens. Let it have more: -n 24"


def test_ctrl_c_ends_an_answer_of_a_chat(notes: Notes, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn is kept as it is, and the next question is answered; at the prompt it ends the chat."""
    typed, write = iter(["Why?", "And then?"]), AnswerPrinter.answer
    monkeypatch.setattr("notes_cli.commands.chat._interactive", lambda: True)
    monkeypatch.setattr(output, "read_line", lambda prompt: next(typed, None) or signal.raise_signal(signal.SIGINT))

    def interrupted(printer: AnswerPrinter, text: str) -> None:
        write(printer, text)
        if text:
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(AnswerPrinter, "answer", write)

    monkeypatch.setattr(AnswerPrinter, "answer", interrupted)
    with ctrl_c(monkeypatch):
        outcome = notes("chat", "talk", "-n", 12, "--temp", 2, "--seed", 3, "--top-k", 0, "--min-p", 0)
    assert outcome.code == 130 and outcome.err.splitlines()[1:] == [CUT_AT_12, "notes: interrupted"]
    pieces = notes("session", "show", "talk", "--json").json["pieces"]
    first, second = (piece["tokens"] for piece in pieces if piece["kind"] == "answer")
    assert 0 < first < 4 and second == 12


def test_errors_leave_the_conversation_as_it_is(notes: Notes, returns: None) -> None:
    """Each is a line on stderr, and the next question is answered; the exit status is that of a failure."""
    lines = ["/none", "/erratum", "/splice nothing", "/undo", "/show", "What \\", "is it?", QUESTION]
    outcome = notes("chat", "--splice", "returns", "-n", "4", stdin="\n".join(lines))
    assert outcome.code == 1 and outcome.out.splitlines()[-1] == "accepted"
    assert "5 of the lines failed" in outcome.err
    errors = outcome.err.splitlines()[1:]
    for line, words in zip(
        errors, ("no command /none", "needs a correction", "nothing", "", "no turn yet"), strict=False
    ):
        assert words in line
    [session] = notes("session", "ls", "--json").json
    assert session["name"].startswith("chat-") and session["turns"] == 2


def test_a_command_that_fails_later_fails_once(notes: Notes, returns: None) -> None:
    """The next question fails and names the dropped erratum or skill; the question after that is answered. A correction
    without a question is named; a skill that it has is not spliced again; its system text cannot be another one."""
    for name, command in (("one", "/erratum none=1"), ("two", "/splice returns")):
        lines = [QUESTION, command, QUESTION, QUESTION + " \\"]  # the last line ends in the middle
        outcome = notes("chat", name, "--splice", "returns", stdin="\n".join(lines))
        assert outcome.code == 1 and outcome.out.split() == ["accepted", "accepted"]
        assert f"left out from now on: {command.split()[1]}" in outcome.err
    outcome = notes("chat", "three", "--splice", "returns", stdin=f"{QUESTION}\n/erratum date=2026-07-01")
    assert outcome.code == 1 and "no question followed: date=2026-07-01" in outcome.err
    outcome = notes("chat", "three", "--splice", "returns", stdin=QUESTION)
    assert (outcome.code, outcome.out.strip()) == (0, "accepted")
    outcome = notes("chat", "three", "--system", "Be brief.", stdin=QUESTION)
    assert outcome.code == 1 and "session three has begun" in outcome.err


def test_another_chat_template(notes: Notes, returns: None, tmp_path: Path) -> None:
    """The prompt is rendered by the file; one that is no template is refused in a line."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}Answer:")
    options = ("ask", QUESTION, "--json", "-n", 1, "--chat-template-file", file)
    assert notes(*options).json["tokens"]["total"] != notes(*options[:-2]).json["tokens"]["total"]
    pieces = notes(*options, "--explain", "--splice", "returns").json["pieces"]
    assert {piece["kind"] for piece in pieces} == {"text", "splice", "question"}
    file.write_text("{% for %}")
    outcome = notes(*options)
    assert outcome.code == 1 and outcome.err.startswith("notes: the chat template cannot be read")
    outcome = notes(*options[:-1], tmp_path / "none")
    assert outcome.code == 2 and "cannot read" in outcome.err
