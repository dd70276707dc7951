"""The Python API for a newcomer: reprs, misspelt names, and asyncio."""

from __future__ import annotations

import asyncio
import pydoc
import rlcompleter
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import fields
from inspect import Parameter, cleandoc, signature
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from samples import SAMPLES

import notes_cli as notes
from bench import readme
from notes_cli import errors
from notes_cli.engine.interrupts import Cancelled, Stop
from notes_cli.engine.sampler import RANGES
from notes_cli.errors import NotesError, SkillError, TakenError
from tests.events import on

from .conftest import MakeModel

TINY = Path(notes.__file__).parent / "models" / "notes-tiny-q8_0.gguf"
QUESTION = "May I return this?"
CHOICES = ["accepted", "refused"]
ENDLESS = 'root ::= "a" root'  # an answer that ends at max_tokens alone
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[notes.Model]:
    """The tiny model that ships, with folders of its own for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES_HOME", str(tmp_path_factory.mktemp("home")))
        opened = notes.open(TINY, n_ctx=1024, n_threads=1)
    with opened:
        yield opened


@pytest.fixture(scope="module")
def returns(model: notes.Model) -> notes.Segment:
    return model.compile(SAMPLES / "returns")


def test_the_names_of_the_package_are_shown() -> None:
    """By dir, completion and help, which explains each option; imported modules are not shown."""
    names = {name for name in dir(notes) if not name.startswith("__")}
    assert names == set(notes.__all__) and {"open", "Model", "NotesError", "SkillError"} <= names
    completer = rlcompleter.Completer({"notes": notes})
    found = {completer.complete("notes.", number) for number in range(len(dir(notes)) + 5)}
    assert {f"notes.{name}" for name in names} <= {str(one).rstrip("()") for one in found}
    assert "ask_many" in (notes.__doc__ or "") and "class Session" in pydoc.plain(pydoc.render_doc(notes))
    lines = cleandoc(notes.Model.ask.__doc__ or "").splitlines()
    for name, one in signature(notes.Model.ask).parameters.items():
        if name not in ("self", "question", "callbacks"):
            (line,) = [line for line in lines if line.startswith(f"{name}=")]
            assert line.startswith(f"{name}={one.default!r}: ") and len(line.split(": ", 1)[1]) > 10
    assert "max_tokens=256: Tokens" in pydoc.plain(pydoc.render_doc(notes.Model.ask))


def test_signatures_list_every_option() -> None:
    """Of a request and its sampling, but for rare ones, with their defaults, by name."""
    request, sampling = notes.Request("?"), notes.SamplerOptions()
    defaults = {one.name: getattr(of, one.name) for of in (sampling, request) for one in fields(of)} | {
        "sampling": None
    }
    rules = {"question", "allowed", "call_grammar", "must_call"}
    rare = {*RANGES, "bias", "dry_sequence_breakers"} - {
        *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
    }
    for method in (
        *(getattr(notes.Model, name) for name in ("ask", "stream", "ask_many", "explain", "aask", "astream")),
        *(getattr(notes.Session, name) for name in ("ask", "stream", "aask", "astream")),
    ):
        shown = signature(method).parameters
        options = {name: shown[name].default for name in shown.keys() & defaults.keys() - {"question"}}
        assert options == {name: value for name, value in defaults.items() if name not in rare | rules}
        assert not [one for one in shown.values() if one.kind is Parameter.VAR_KEYWORD]


def test_sampling_by_its_options(model: notes.Model, returns: notes.Segment) -> None:
    """Each option alone equals SamplerOptions with it, for one question, for many and for a Request."""
    text = "Tell me about it. Think first."
    how: dict[str, Any] = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 4, "repeat_penalty": 1.1}
    options = notes.SamplerOptions(**how)
    wanted = str(model.ask(text, splice=[returns], sampling=options, max_tokens=12))
    greedy = str(model.ask(text, splice=[returns], max_tokens=12))
    assert str(model.ask(text, splice=[returns], max_tokens=12, **how)) == wanted != greedy
    (many,) = model.ask_many([text], splice=[returns], max_tokens=12, **how)
    (same,) = model.ask_many([notes.Request(text, sampling=options)], splice=[returns], max_tokens=12, sampling=None)
    assert str(many) == str(same) == wanted
    request = notes.Request(text, splice=[returns], sampling=options, max_tokens=12)
    assert str(model.ask(request)) == wanted == str(model.ask(request, seed=4))
    assert str(model.ask(request, temperature=0)) != wanted
    with pytest.raises(NotesError, match="sampling and seed are both given"):
        model.ask(text, sampling=options, seed=3)
    wrongs: list[dict[str, Any]] = [{"temperature": "0.7"}, {"top_k": 1.5}, {"seed": True}, {"min_p": float("nan")}]
    for wrong in wrongs:
        (name,) = wrong
        with pytest.raises(NotesError, match=f"^{name} is .*number"):
            model.ask(text, **wrong)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        *(("max_token", "Did you mean max_tokens"), ("n_predict", "Did you mean max_tokens")),
        *(("temp", "Did you mean temperature"), ("erratum", "Did you mean errata")),
        ("xyz", "Its options: questions?, splice, errata"),
    ],
)
def test_an_unknown_option_names_the_closest(model: notes.Model, word: str, named: str) -> None:
    """In every method that takes options."""
    given: Any = {word: 3}
    for way in (model.ask, model.stream, model.ask_many, model.explain):
        with pytest.raises(TypeError, match=rf"^{way.__name__}\(\) has no option '{word}'\. {named}"):
            way("Why?", **given)  # type: ignore[operator]
    with model.session(word.replace("_", "-")) as session, pytest.raises(TypeError, match=named):
        session.ask("Why?", **given)
    with pytest.raises(TypeError, match=rf"^aask\(\) has no option '{word}'\. {named}"):
        asyncio.run(model.aask("Why?", **given))
    with pytest.raises(TypeError, match=r"^compile\(\) has no option 'nam'. Did you mean name"):
        model.compile("x", nam="y")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("word", "named"),
    [
        *(("gpu_layers", "Did you mean n_gpu_layers"), ("model_path", "Did you mean model")),
        *(("n_thread", "Did you mean n_threads"), ("verbose", "Its options: model, options, n_ctx")),
        ("n_batch", r"options=notes\.ContextOptions\(n_batch="),
        ("flash_attn", r"options=notes\.ContextOptions\(flash_attention="),
    ],
)
def test_open_names_the_closest(word: str, named: str) -> None:
    given: Any = {word: 3}
    with pytest.raises(TypeError, match=rf"^open\(\) has no option '{word}'\. .*{named}"):
        notes.open(**given)


def test_the_context_by_its_numbers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama-cpp-python names them; NOTES_THREADS where no number of threads is given."""
    with notes.open(TINY, n_ctx=512, n_threads=2, n_gpu_layers=0) as model:
        assert model.workspace.context.options.n_ctx == 512 and model.workspace.context.threads == 2
    monkeypatch.setenv("NOTES_THREADS", "3")
    for options, threads in (({}, 3), ({"n_threads": 1}, 1), ({"options": notes.ContextOptions(n_threads=2)}, 2)):
        with notes.open(TINY, **options) as model:  # type: ignore[arg-type]
            assert model.workspace.context.threads == threads
    with pytest.raises(NotesError, match="options and n_ctx are both given"):
        notes.open(TINY, notes.ContextOptions(), n_ctx=512)
    for word in ("many", "0", "513", "-1"):
        monkeypatch.setenv("NOTES_THREADS", word)
        with pytest.raises(NotesError, match=f"NOTES_THREADS is '{word}': it must be a number from 1 to 512"):
            notes.open(TINY)


def test_the_variables_of_the_command_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the context apply in Python, too; arguments override them, and so do options."""
    words = {"CTX_SIZE": "768", "UBATCH_SIZE": "32", "FLASH_ATTN": "on", "GPU_LAYERS": "0"}
    words |= {"CACHE_TYPE_K": "q8_0", "CACHE_TYPE_V": "f32", "MMPROJ": "", "RPC": " "}
    for name, word in words.items():
        monkeypatch.setenv(f"NOTES_{name}", word)
    with notes.open(TINY) as model:
        options = model.workspace.context.options
        assert (options.n_ctx, options.n_ubatch) == (768, 32)
        assert (options.flash_attention, options.type_k, options.type_v) == ("on", "q8_0", "f32")
    with notes.open(TINY, n_ctx=512) as model:
        assert (model.workspace.context.options.n_ctx, model.workspace.context.options.type_k) == (512, "q8_0")
    with notes.open(TINY, notes.ContextOptions(n_ctx=512)) as model:
        assert model.workspace.context.options.type_k == "f16"
    for name, word in (("CTX_SIZE", "-1"), ("UBATCH_SIZE", "1e3"), ("GPU_LAYERS", "-2")):
        with monkeypatch.context() as patch:
            patch.setenv(f"NOTES_{name}", word)
            with pytest.raises(NotesError, match=f"NOTES_{name} is '{word}': it must be a number from"):
                notes.open(TINY)
    monkeypatch.setenv("NOTES_CACHE_TYPE_K", "f8")
    with pytest.raises(NotesError, match="type_k is 'f8': it must be one of"):
        notes.open(TINY).ask("Why?", max_tokens=1)
    monkeypatch.delenv("NOTES_CACHE_TYPE_K")
    monkeypatch.setenv("NOTES_MMPROJ", "/nowhere.gguf")
    with pytest.raises(NotesError, match=r"/nowhere\.gguf"):
        notes.open(TINY).compile(str(SAMPLES / "photo.png"))


def test_a_text_is_compiled_from_a_variable(model: notes.Model, returns: notes.Segment, tmp_path: Path) -> None:
    """It is the skill that a file with it is; a later one takes its place, and never that of a file."""
    text = (SAMPLES / "returns" / "SKILL.md").read_text(encoding="utf-8")
    segment = model.compile(text=text, name="mine")
    assert (segment.name, segment.text, segment.fields) == ("mine", returns.text, returns.fields)
    assert model.bring_up_to_date(text=text, name="mine").reasons == ()
    assert str(model.ask(QUESTION, splice=["mine"])) == "accepted"
    later = model.compile(text=text.replace("2026-05-01", "2026-07-01"), name="mine")
    assert "2026-07-01" in later.text and str(model.ask(QUESTION, splice=["mine"])) == "refused"
    with pytest.raises(TakenError):
        model.compile(text="date: 2026-05-01", name="returns")
    wrongs: list[tuple[dict[str, Any], str]] = [
        *(({}, "nothing is given"), ({"name": "x"}, "nothing is given")),
        ({"text": "A text."}, "a text without a name"),
        ({"source": tmp_path, "text": "A text.", "name": "x"}, "both are given"),
        ({"source": notes.load_skill(str(SAMPLES / "returns")), "text": "A text."}, "both given"),
    ]
    for wrong, says in wrongs:
        with pytest.raises(NotesError, match=says):
            model.compile(**wrong)
    with pytest.raises(SkillError, match="the text of x has no text"):
        model.compile(text=" ", name="x")


def test_what_a_prompt_shows(model: notes.Model, returns: notes.Segment) -> None:
    """One line with the essential facts, whatever the content."""
    answer = model.ask(QUESTION, splice=[returns])
    assert repr(answer) == f"Answer('accepted', 1 token, 115 spliced, {answer.counts.decoded} decoded)"
    assert answer._repr_markdown_() == "accepted"
    assert repr(returns) == "Segment('returns', 115 tokens, fields: date, tier, amount)"
    assert repr(model) == "Model('notes-tiny Q8_0', context of 1024 tokens)"
    with model.session("mine") as session:
        session.ask(QUESTION, splice=[returns])
        assert repr(session) == f"Session('mine', 1 turn, {session.tokens} tokens)"
        (edited,) = session.edit("date", "2026-07-01", "erratum")
        checked = session.verify()
    assert repr(session) == "Session('mine', closed)"
    how: Any = {"questions": [QUESTION], "choices": CHOICES}
    for one in (
        *(edited, checked, notes.Callbacks(), notes.SamplerOptions(), notes.Request(QUESTION, splice=[returns])),
        *(model.explain(QUESTION), notes.load_skill(str(SAMPLES / "returns"))),
        *(model.bring_up_to_date(SAMPLES / "returns"), model.ask(QUESTION, choices=CHOICES)),
        *(
            model.verify([returns], **how),
            model.verify([returns], fields={"date": "2026-07-01"}, methods=["suffix"], **how),
        ),
    ):
        assert "\n" not in repr(one) and "array(" not in repr(one) and " at 0x" not in repr(one)
        assert repr(one).startswith(type(one).__name__)


# asyncio.


def run(work: Callable[[], Awaitable[T]], seconds: float = 60) -> T:
    """Its result, unless it takes too long."""

    async def main() -> T:
        return await asyncio.wait_for(work(), seconds)

    return asyncio.run(main())


def test_answers_are_awaited(model: notes.Model, returns: notes.Segment) -> None:
    """The event loop runs meanwhile; answers come in the order of the calls, equal to those of `ask`."""
    dates = ["2026-07-01", "2026-05-02", "2026-08-01", "2026-05-03"]
    events: list[str] = []

    def record(date: str) -> notes.Callbacks:
        return on(notes.Text, lambda text: events.append(date))

    async def work() -> list[notes.Answer]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        found = await asyncio.gather(
            *(
                model.aask(f"{QUESTION} Think first.", splice=[returns], errata={"date": date}, callbacks=record(date))
                for date in dates
            )
        )
        ticking.cancel()
        assert ticks > 3
        return found

    found = run(work)
    for date, answer in zip(dates, found, strict=True):
        wanted = model.ask(f"{QUESTION} Think first.", splice=[returns], errata={"date": date})
        assert (answer.text, answer.counts) == (wanted.text, wanted.counts)
    assert list(dict.fromkeys(events)) == dates  # and none comes twice:
    assert sum(one != other for one, other in pairwise(events)) == len(dates) - 1
    assert model.workspace.context.used == 0


def test_texts_are_streamed_to_a_loop(model: notes.Model, returns: notes.Segment) -> None:
    """The texts of `stream`; errors are raised where they are awaited, and a model serves several loops."""
    text, answers = f"{QUESTION} Think first.", list[notes.Answer]()
    wanted = list(model.stream(text, splice=[returns]))

    async def pieces() -> list[str]:
        callbacks = on(notes.Answer, answers.append)
        return [piece async for piece in model.astream(text, splice=[returns], callbacks=callbacks)]

    for _ in range(2):
        assert run(pieces) == wanted and len(wanted) > 3
    assert [one.text for one in answers] == ["".join(wanted).strip()] * 2

    async def fails() -> None:
        async for _ in model.astream(text, splice=["nothing"]):
            pass

    for work in (fails, lambda: model.aask(text, splice=["nothing"])):
        with pytest.raises(NotesError, match="nothing"):
            run(work)
    for work in (lambda: model.aask(text, method="nothing"), lambda: model.aask(text, temperature="x")):  # type: ignore[arg-type]
        with pytest.raises(NotesError, match=r"no edit method|no number"):
            run(work)


@pytest.fixture
def large(make_model: MakeModel, home: Path) -> Iterator[notes.Model]:
    """Random weights whose prefill of a long prompt takes seconds."""
    path = make_model("qwen3", embd=512, heads=8, kv_heads=8, layers=4)
    with notes.open(path, n_ctx=2560, n_threads=1) as opened:
        yield opened


def ended(model: notes.Model) -> float:
    """Return the processor time until the thread has finished the cancelled task and freed everything."""
    begun = time.process_time()
    with model.workspace.lock:
        assert model.workspace.context.used == 0
    return time.process_time() - begun


def test_a_task_that_is_cancelled_ends_the_answer(model: notes.Model, returns: notes.Segment) -> None:
    """During generation and while queued, as does a stream that is left; later questions are unaffected."""

    async def work() -> None:
        writing = asyncio.Event()
        loop = asyncio.get_running_loop()
        callbacks = on(notes.Text, lambda text: loop.call_soon_threadsafe(writing.set))
        how: Any = {"grammar": ENDLESS, "max_tokens": 900}
        first = asyncio.create_task(model.aask("Write.", callbacks=callbacks, **how))
        second = asyncio.create_task(model.aask("Write.", **how))
        third = asyncio.create_task(model.aask(QUESTION, splice=[returns]))
        await writing.wait()
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert str(await third) == "accepted"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(model.aask("Write.", **how), 0.05)
        pieces: AsyncIterator[str] = model.astream("Write.", **how)
        async for piece in pieces:
            assert piece == "a"
            break
        await pieces.aclose()  # type: ignore[attr-defined]

    run(work)
    assert ended(model) < 5
    assert str(model.ask(QUESTION, splice=[returns])) == "accepted"


def test_a_prefill_is_cancelled_in_the_middle_of_a_batch(large: notes.Model) -> None:
    """It ends long before the batch would have, whose rows are given back; the next answer is the one that it was."""
    text = "Read these words again, and again. " * 65
    begun = time.process_time()
    wanted = str(large.ask(text, max_tokens=1))
    whole = time.process_time() - begun  # the same on a busy machine

    async def work() -> None:
        task = asyncio.create_task(large.aask(text, max_tokens=1))
        await asyncio.sleep(whole / 8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begun = time.process_time()
    run(work)
    ended(large)
    assert time.process_time() - begun < whole / 2
    assert str(large.ask(text, max_tokens=1)) == wanted


def test_a_session_is_awaited(model: notes.Model, returns: notes.Segment) -> None:
    """Turns are kept; that of a task that is cancelled, or of a stream that is left, is not."""
    with model.session("awaited") as session:

        async def work() -> None:
            assert str(await session.aask(QUESTION, splice=[returns])) == "accepted"
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(session.aask("Write.", grammar=ENDLESS, max_tokens=700), 0.05)
            pieces = [piece async for piece in session.astream(QUESTION, errata={"date": "2026-07-01"})]
            assert "".join(pieces) == "refused"

        run(work)
        assert session.turns == 2


def test_a_closed_model_is_said_to_be(home: Path) -> None:
    """Also for tasks that were queued when it was closed."""

    async def work() -> list[object]:
        model = notes.open(TINY, n_ctx=1024, n_threads=1)
        with model.workspace.lock:
            waiting = asyncio.create_task(model.aask(QUESTION))
            await asyncio.sleep(0.05)
            model.close()
        return await asyncio.gather(waiting, model.aask(QUESTION), return_exceptions=True)

    for found in run(work):
        assert isinstance(found, NotesError)


def test_all_errors_are_exported() -> None:
    """But for those of stdout."""
    raised = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, NotesError)}
    assert raised - {"OutputError", "UnreadError"} <= set(notes.__all__)


def test_an_agent_calls_tools(model: notes.Model, returns: notes.Segment) -> None:
    """Calls come with id and arguments, and are no text; skills and errata are placed as with a question."""
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("clock", "other")]
    asked: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
    how: dict[str, Any] = {"splice": [returns], "tools": tools, "errata": ["date=2026-07-01", "Note: closed."]}
    answer = model.ask(asked, tool_choice="clock", **how)
    (call,) = answer.calls
    assert (call.name, dict(call.arguments), str(answer)) == ("clock", {}, "")
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "12:00"}]}
    told = model.ask([*asked, answer.message, result], choices=CHOICES, **how)
    assert told.choice in CHOICES and not told.calls
    kinds = dict.fromkeys(piece.kind for piece in told.pieces if piece.kind != "text")
    assert [*kinds] == ["splice", "erratum", "question", "call", "result"]
    assert told.counts.spliced >= len(returns) - 1 and returns.name in model.skills
    assert model.explain(QUESTION, tools=tools, system="Be kind.").counts.total > 20
    for wrong, says in (
        ([{"content": "x"}], "is no message of texts and tool calls"),
        ([{"role": "user", "content": 3}], "is no message"),
        ([{"role": "system", "content": "x"}], "the messages have no question"),
    ):
        with pytest.raises(NotesError, match=says):
            model.ask(wrong, splice=[returns])
    for more, says in (
        ({"tool_choice": "none"}, "there is no tool 'none' to call"),
        ({"system": "x"}, "system and messages are both given"),
    ):
        with pytest.raises(NotesError, match=says):
            model.ask(asked, tools=tools, **more)
    with model.session("agent") as session, pytest.raises(notes.SessionError, match="Compile a set of tools"):
        session.ask(QUESTION, tools=tools)


def test_stopping_one_thread_stops_no_other(model: notes.Model, returns: notes.Segment, home: Path) -> None:
    """Also where both compute at once, and where it is asked too late."""
    stop, outcomes = Stop(), list[object]()
    begun = threading.Event()

    def compute() -> None:
        try:
            with stop:
                callbacks = on(notes.Text, lambda text: begun.set())
                model.ask("Write.", grammar=ENDLESS, max_tokens=900, callbacks=callbacks)
        except Cancelled as error:
            outcomes.append(error)

    with notes.open(TINY, n_ctx=1024, n_threads=1) as other:
        thread = threading.Thread(target=compute)
        thread.start()
        begun.wait(60)
        going = other.stream("Write.", grammar=ENDLESS, max_tokens=100)
        next(going)
        stop.ask()
        assert "".join(going) == "a" * 99
        thread.join(60)
        assert len(outcomes) == 1
        stop.ask()
        assert str(model.ask(QUESTION, splice=[returns])) == str(other.ask(QUESTION, splice=[returns])) == "accepted"


def test_a_users_files_pass_mypy_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's example and asyncio, with the package installed as from a wheel; misuse is an error."""
    package, site, folder = Path(notes.__file__).parent, tmp_path / "site", tmp_path / "user"
    monkeypatch.setenv("MYPY_CACHE_DIR", str(Path(__file__).parents[1] / ".mypy_cache" / "user"))  # has numpy's types
    folder.mkdir()
    shutil.copytree(package, site / "notes_cli", ignore=lambda _, names: [n for n in names if n in ("lib", "models")])
    (example,) = readme.examples()
    example += """

async def awaits(model: notes.Model) -> str:
    answer = await model.aask("Why?", temperature=0.7, seed=1, max_tokens=20)
    async for piece in model.astream("Why?", sampling=notes.SamplerOptions(0.7)):
        print(piece.strip())
    with model.session("mine") as session:
        await session.aask("Why?", errata={"date": "1 May"})
    model.compile(text="date: 1 May", name="mine")
    many = model.ask_many(["Why?"])
    print([one if isinstance(one, notes.NotesError) else one.text for one in many])
    return answer.text


model = notes.open(n_ctx=4096, n_threads=2, n_gpu_layers=0)
"""
    wrongs = ("model.ask('Why?', choices=3)", "model.aask('Why?', seed='x')", "notes.open(n_contexts=3)")
    found = readme.check(sys.executable, example + "\n".join(wrongs), folder, site)
    errors = [line.partition(": error")[0] for line in found if ": note" not in line]
    last = example.count("\n")
    assert sorted({*errors}) == [f"example.py:{last + number}" for number in (1, 2, 3)], found
    assert (package / "py.typed").is_file()  # without it a wheel's types are not believed: make wheel
