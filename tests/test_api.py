"""The Python API: it returns the results of the modules below."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from samples import SAMPLES

import notes_cli as notes
from notes_cli import api
from notes_cli.errors import NotesError, SessionError, SkillError
from notes_cli.runtime.recompile import Compiled
from notes_cli.runtime.request import Callbacks, Request
from notes_cli.text.messages import Conversation, Message, SkillPart, TextPart
from notes_cli.text.skill import Skill
from tests.events import on

from .conftest import MakeModel

PACKAGE = Path(notes.__file__).parent
CHOICES = ["accepted", "refused"]
QUESTION = "May I return this?"


@pytest.fixture
def model(make_model: MakeModel, home: Path) -> Iterator[notes.Model]:
    """Random weights, and the folders of NOTES_HOME."""
    with notes.open(make_model(), notes.ContextOptions(n_ctx=1024, n_threads=1)) as opened:
        yield opened


def test_a_closed_session_is_not_used(model: notes.Model, skill: Skill) -> None:
    """Another process may have changed it: nothing is answered, written or read. Nor is it kept in memory; the others
    end with the model."""
    segment = model.compile(skill)
    with model.session("mine") as old:
        old.ask(QUESTION, splice=[segment], max_tokens=2)
        going = old.stream("And then?", max_tokens=8)
        next(going)
    with model.session("mine") as now:
        now.ask("And now?", max_tokens=2)
        turns = now.turns
    uses = [
        *(lambda: old.ask("Again?"), lambda: next(old.stream("Again?")), lambda: old.edit("date", "2026-07-01")),
        *(old.undo, old.compact, lambda: old.forget(1), lambda: old.fork("other"), lambda: old.turns),
    ]
    for use in uses:
        with pytest.raises(SessionError, match="session mine is closed"):
            use()  # type: ignore[no-untyped-call]
    with pytest.raises(NotesError):
        list(going)
    assert old.name == "mine"
    with model.session("mine") as now:
        assert now.turns == turns == 2
        now.fork("other").close()
        assert not now._forks
    gone = []
    for _ in range(3):
        with model.session("mine") as session:
            gone.append(weakref.ref(session))
    del session
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    last = model.session("mine")
    fork = last.fork("third")
    model.close()
    for one in (last, fork):
        with pytest.raises(SessionError, match="is closed"):
            _ = one.turns


def test_threads_wait_for_each_other(home: Path) -> None:
    """Each gets its own answer, asked or streamed; streams of two threads interleave."""
    with notes.open() as model:
        segment = model.compile(SAMPLES / "returns")
        dates = {"2026-07-01": "refused", "2026-05-02": "accepted"}

        def ask(date: str) -> list[str]:
            how: api.Asking = {"splice": [segment], "errata": {"date": date}}
            said = [str(model.ask(QUESTION, **how)), "".join(model.stream(f"{QUESTION} Think first.", **how))]
            with model.session(date) as session:
                return [*said, str(session.ask(QUESTION, **how))]

        with ThreadPoolExecutor(2) as pool:
            for date, (one, thought, kept) in zip(dates, pool.map(ask, dates), strict=True):
                assert (one, kept) == (dates[date], dates[date])
                assert thought == f"The date is {date}. So the return is {dates[date]}."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_waits_for_no_thread_and_writes_into_no_session(model: notes.Model, skill: Skill) -> None:
    """Threads that computed are not in it, nor is the lock of a session."""
    segment = model.compile(skill)
    computing, done = threading.Event(), threading.Event()

    def compute() -> None:
        with model.workspace.lock:
            computing.set()
            done.wait(60)

    with model.session("mine") as session:
        session.ask(QUESTION, splice=[segment], max_tokens=1)
        thread = threading.Thread(target=compute)
        thread.start()
        computing.wait(60)
        child = os.fork()
        if not child:
            try:
                model.explain(QUESTION)
                session.ask("And now?", max_tokens=1)
            except SessionError as error:
                os._exit(0 if "held by the process" in str(error) else 2)
            os._exit(3)
        for _ in range(2400):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
        done.set()
        thread.join()
        assert ended and status == 0 and session.turns == 1


def test_importing_loads_nothing() -> None:
    """Neither llama.cpp nor numpy, nor anything of ours, nor asyncio; each name is there when it is asked for."""
    script = "import sys, notes_cli; print(sorted(name for name in sys.modules if name[:5] in ('notes', 'numpy')))"
    script += "; notes_cli.Model; print('asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["['notes_cli']", "False"]
    assert all(getattr(notes, name) for name in notes.__all__) and notes.open is api.open
    with pytest.raises(AttributeError, match="nothing"):
        notes.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_compile(model: notes.Model, skill: Skill, tmp_path: Path) -> None:
    """Returns the segment, new or up to date, of a text, a Skill or a folder; warnings are notices."""
    segment = model.compile(skill)
    assert (segment.name, segment.text) == (skill.name, skill.text)
    done = model.bring_up_to_date(skill)
    assert done == Compiled(model.workspace.library.path("returns", segment.identity), len(segment), ())
    again = model.segment("returns")
    assert again.tokens.tolist() == segment.tokens.tolist() and len(again.layers) == len(segment.layers)
    (tmp_path / "text.txt").write_text("date: 1\n\nSee section 2.\n\ndate: 1\n")
    found = model.bring_up_to_date(tmp_path / "text.txt", name="other", blocks=2, output=tmp_path / "x.gguf")
    assert found.path == tmp_path / "x.gguf" and found.blocks == 2
    with pytest.raises(SkillError, match=r"none\.txt"):
        model.compile(tmp_path / "none.txt")


def test_what_no_skill_is_compiled_as(model: notes.Model, skill: Skill) -> None:
    """Refused before writing: the segment in the library still opens. Nor can a request have results of tools without
    the session that has the calls, or a field with = in its name."""
    segment = model.compile(skill)
    with pytest.raises(SessionError, match="results of tools go with a session"):
        model.ask("", results=[("get", "x")])
    (found,) = model.ask_many([Request("", results=[("get", "x")])])
    assert isinstance(found, SessionError)
    with pytest.raises(NotesError, match="no field is called so"):
        model.ask(QUESTION, splice=[segment], errata={"date=x": "2026-07-01"})
    wrongs: list[dict[str, Any]] = [{"kv": kv} for kv in ("q4_0", "q8_0/f16", "")]
    for how in (*wrongs, {"blocks": 0}, {"blocks": -3}, {"blocks": True}):
        with pytest.raises(NotesError, match=r"rows cannot be kept as|a skill is compiled in 1 block or more"):
            model.compile(skill, **how)
    assert model.segment("returns").kv == "f16" and model.bring_up_to_date(skill).reasons == ()


def test_texts_by_their_paths(model: notes.Model, tmp_path: Path) -> None:
    """A Path equals its str, alone and in a batch; one in place of a list is an error."""
    path = tmp_path / "note.txt"
    path.write_text("Answer in one word, and be brief about it.")
    answers = [
        str(model.ask(QUESTION, splice=[given], decode=[str(path)], max_tokens=3)) for given in (path, str(path))
    ]
    assert answers[0] == answers[1]
    assert [str(one) for one in model.ask_many([QUESTION], splice=[path], max_tokens=3)]
    for how in ({"splice": str(path)}, {"images": str(path)}, {"errata": "date=2026-07-01"}, {"choices": "yes,no"}):
        with pytest.raises(NotesError, match="and not a list"):
            model.ask(QUESTION, **how)  # type: ignore[arg-type]
    for wrong in (lambda: next(model.ask_many(QUESTION)), lambda: model.verify("returns")):
        with pytest.raises(NotesError, match="and not a list"):
            wrong()
    for how in ({"max_tokens": -1}, {"seam": -1}, {"max_think": -2}):
        with pytest.raises(NotesError, match="must be a number of tokens"):
            model.ask(QUESTION, **how)  # type: ignore[arg-type]
    with pytest.raises(NotesError, match="0 questions at once"):
        next(model.ask_many([QUESTION], parallel=0))


def test_errata_and_lists_in_any_form(model: notes.Model, skill: Skill) -> None:
    """Texts, mappings and generators have the same meaning, for one question and for many."""
    segment = model.compile(skill)
    wanted = model.ask(QUESTION, splice=["returns"], errata=["date=2026-07-01"], max_tokens=3)
    assert wanted.counts.erratum
    forms: list[Any] = [{"date": "2026-07-01"}, (one for one in ["date=2026-07-01"])]
    for errata in forms:
        found = model.ask(QUESTION, splice=iter([segment]), errata=errata, max_tokens=3)  # type: ignore[arg-type]
        assert (found.counts, found.text) == (wanted.counts, wanted.text)
    how: dict[str, Any] = {"splice": iter([segment]), "errata": iter(["date=2026-07-01"]), "max_tokens": 3}
    assert [str(one) for one in model.ask_many([QUESTION] * 3, **how)] == [str(wanted)] * 3
    [_, corrected] = model.verify([segment], questions=[QUESTION], errata=iter(["date=2026-07-01"])).cases  # type: ignore[arg-type]
    assert corrected.errata == ("date=2026-07-01",)
    assert model.workspace.context.used == 0
    for name in ("dat", "shipping fee"):  # several words, too: a value of a field is one value
        for wrong in ({name: "2026-07-01"}, {name: "2"}):
            with pytest.raises(NotesError, match=f"no spliced skill has a field '{name}'"):
                model.ask(Request(QUESTION, splice=["returns"], errata=wrong))  # type: ignore[arg-type]


def test_stream_is_the_answer(model: notes.Model, skill: Skill) -> None:
    """Yields the answer's text and returns the Answer; a choice comes whole; callbacks are called as usual."""
    segment = model.compile(skill)
    wanted = model.ask("Why?", splice=[segment], max_tokens=12)
    events: list[Any] = []
    stream = model.stream("Why?", splice=[segment], max_tokens=12, callbacks=Callbacks(events.append))
    texts = []
    with pytest.raises(StopIteration) as done:
        while True:
            texts.append(next(stream))
    assert "".join(texts).strip() == wanted.text == done.value.value.text and len(texts) > 3
    assert [event.text for event in events if isinstance(event, (notes.Text, notes.Answer))] == [*texts, wanted.text]
    assert list(model.stream("Why?", splice=[segment], choices=CHOICES)) == [
        model.ask("Why?", splice=[segment], choices=CHOICES).text
    ]


def test_messages_in_place_of_a_question_and_stops(model: notes.Model, skill: Skill) -> None:
    """The same messages give the same prompt and answer; a stop ends it, and neither goes with a session."""
    segment, roles = model.compile(skill), ("system", "user")
    parts = (TextPart("Be brief."), SkillPart(segment.name)), (TextPart("Why?"),)
    talk = Conversation(tuple(map(Message, roles, parts)))
    wanted = model.ask("Why?", splice=[segment], system="Be brief.", max_tokens=12)
    found = model.ask("", splice=[segment], conversation=talk, max_tokens=12)
    assert (found.text, found.counts) == (wanted.text, wanted.counts)
    assert model.ask("", splice=[segment], max_tokens=12).counts != wanted.counts
    stop = wanted.text[len(wanted.text) // 2 :][:3]
    cut = model.ask("", splice=[segment], conversation=talk, max_tokens=12, stops=[stop])
    assert (cut.text, cut.stop) == (wanted.text.partition(stop)[0].strip(), stop)
    for options in ({"conversation": talk}, {"stops": [stop]}):
        with model.session("mine") as session, pytest.raises(SessionError, match="do not go with a session"):
            session.ask("Why?", **options)  # type: ignore[arg-type]


def test_a_stream_that_is_closed_gives_back_its_sequence(model: notes.Model, skill: Skill) -> None:
    """Closed before its first text, after it, and by an error in a callback; other questions are unaffected."""
    segment = model.compile(skill)
    wanted, context = model.ask("Why?", splice=[segment], max_tokens=8).text, model.workspace.context
    assert context.used == 0
    model.stream("Why?", splice=[segment]).close()
    stream = model.stream("Why?", splice=[segment], max_tokens=8)
    first = next(stream)
    assert context.used > len(segment)
    assert model.ask("Why?", splice=[segment], max_tokens=8).text == wanted  # besides the waiting one
    stream.close()
    assert context.used == 0
    stream = model.stream("Why?", splice=[segment], max_tokens=8)
    assert next(stream) == first and "".join([first, *stream]).strip() == wanted
    assert context.used == 0

    def fails(text: notes.Text) -> None:
        raise SkillError(f"refused {text.text!r}")

    with pytest.raises(SkillError, match="refused"):
        list(model.stream("Why?", splice=[segment], callbacks=on(notes.Text, fails)))
    assert context.used == 0


def test_many_questions(model: notes.Model, skill: Skill) -> None:
    """Each is answered as by itself, in order; errors are in their places, and closing gives all back."""
    segment, context = model.compile(skill), model.workspace.context
    questions = ["Why?", SkillError("no question"), Request("Who?", choices=CHOICES), Request("When?", seam=10_000)]
    found = list(model.ask_many(questions, splice=[segment], max_tokens=6, parallel=2))
    assert isinstance(found[0], notes.Answer) and isinstance(found[2], notes.Answer)
    assert found[0].text == model.ask("Why?", splice=[segment], max_tokens=6).text
    assert found[2].choice == model.ask("Who?", splice=[segment], choices=CHOICES).choice
    assert found[1] is questions[1] and isinstance(found[3], NotesError) and "seam of 10000" in found[3].what
    assert context.used == 0
    outcomes = model.ask_many(["Why?"] * 20, splice=[segment], max_tokens=6, parallel=4)
    next(outcomes)
    assert context.used > 0
    del outcomes
    assert context.used == 0


def test_sessions(model: notes.Model, skill: Skill) -> None:
    """Turns, edits, forks and undo are saved; closing the model or a session closes those that depend on it."""
    model.compile(skill)
    with pytest.raises(SessionError, match="no session"):
        model.session("mine", new=False)
    with model.session("mine") as session:
        session.ask("Why?", splice=["returns"], choices=CHOICES)
        (edit,) = session.edit("date", "2026-07-01")
        assert (edit.name, edit.text, edit.how) == ("date", "date=2026-07-01", "field+erratum")
        fork = session.fork("other")
        fork.ask("And then?", choices=CHOICES)
        assert (session.name, fork.turns, session.turns) == ("mine", 2, 1)
        assert session.undo()["op"] == "edit" and session.fields["date"] == "2026-06-01"
        assert session.verify(["Why?"], CHOICES).passed
        assert session.tokens == session.entries[-1].position + session.entries[-1].tokens
    assert model.sessions.names() == ["mine", "other"]
    left = model.session("other")  # the fork was closed with the one it was made of
    assert left.turns == 2 and left.fields["date"] == "2026-07-01"
    with pytest.raises(NotesError, match="belong to its first turn"):
        left.ask("Why?", system="Be kind.")
    model.close()
    left.close()  # once more does nothing
