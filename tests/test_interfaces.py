"""One table of questions, asked in Python, by the command line, of a server and as lines of a batch.

Each has the same answer, tokens, pieces and notices, or the same error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import pytest
from samples import SAMPLES

from notes_cli import api, config
from notes_cli.commands.ask import command
from notes_cli.commands.remedies import worded
from notes_cli.engine.limits import ContextOptions
from notes_cli.errors import WARNING, NotesError, Notice
from notes_cli.explanations import answer_as_json
from notes_cli.runtime.workspace import Workspace
from tests.events import on

from .commands.conftest import run_here
from .serve.conftest import QUESTION, Json, compile_into
from .serve.test_ask_server import Running, serving

LATE = {"date": "2026-07-01"}
SHIPPING = {"question": "What is the shipping?", "choices": ["free", "reduced", "full"]}
SCHEMA = {"type": "object", "properties": {"is": {"enum": ["accepted", "refused"]}}, "required": ["is"]}
OF_SHOP = {"system": "You work for Harbor Books."}
CHOICES = ["accepted", "refused"]
DRAWN = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.1, "max_tokens": 9}

# New values of fields, with their answers before and after.
NEW_VALUES = [
    ({"question": QUESTION, "fields": LATE}, "accepted", "refused"),
    ({"question": "What is the shipping?", "fields": {"tier": "silver"}, **OF_SHOP}, "free", "reduced"),
    ({"question": "What is the approval?", "fields": {"amount": "900"}, **OF_SHOP}, "automatic", "manual"),
]
# Questions, of the skill `returns` if no other is named, with the answer of the model that ships; None: any text.
QUESTIONS: list[tuple[Json, str | None]] = [
    ({"splice": []}, None),
    ({}, "accepted"),
    (OF_SHOP, "accepted"),
    ({"errata": ["date=2026-07-01"]}, "refused"),
    ({"errata": ["date=2026-07-01"], "wording": "line", "seam": 0}, None),
    ({"errata": ["date=2026-05-01", "date=2026-07-01"], "choices": CHOICES}, "refused"),
    ({"errata": ["The shop is closed."]}, None),
    ({"errata": ["The shop has moved."], "method": "suffix"}, None),
    ({"splice": ["returns", "support"], "errata": ["*.date=2026-07-01"], **OF_SHOP}, None),
    ({"splice": ["Returns", "SUPPORT"], "decode": ["SUPPORT"]}, None),
    ({"splice": ["Returns"], "strict": True}, "accepted"),
    *(  # later entries have notes of the old value
        ({**asked, "method": method, "choices": [old, new]}, old)
        for asked, old, new in NEW_VALUES
        for method in ("stale", "field")
    ),
    *(
        ({**asked, "method": method, "choices": [old, new]}, new)
        for asked, old, new in NEW_VALUES
        for method in (None, "erratum", "field+erratum", "suffix", "recompute")
    ),
    ({"fields": LATE, "choices": CHOICES, "recompute": True}, "refused"),
    ({"fields": {**LATE, "amount": "130"}, "method": "erratum", "place": "late", "decode": ["returns"]}, None),
    ({"fields": {"tier": "silver"}, **SHIPPING, "seam": 4, "place": "late"}, "reduced"),
    ({**SHIPPING, "exact": True, **OF_SHOP}, "free"),
    ({**SHIPPING, "recompute": True, **OF_SHOP}, "free"),
    ({**SHIPPING, "memory": "returns", "splice": []}, "free"),
    ({"choices": ["no", "no way", "not sure", "The return is accepted."]}, None),
    ({"think": True}, "accepted"),
    ({"think": True, "errata": ["date=2026-07-01"]}, "refused"),
    ({"think": True, "errata": ["date=2026-07-01"], "choices": CHOICES}, "refused"),
    ({"think": True, "max_think": 3}, None),
    ({"think": True, "max_think": 0}, None),
    ({"question": "Où, 日本? Think first.", "max_tokens": 3}, None),
    ({"question": "Think first.", **DRAWN}, None),
    ({"question": "Think first.", **DRAWN, "seed": 4}, None),
    ({"json_schema": SCHEMA}, None),
    ({"json_schema": {"enum": ["x"]}}, '"x"'),
    ({"grammar": 'root ::= "perhaps"'}, "perhaps"),
    ({"splice": ["edited"]}, None),
    ({"splice": ["corrected"]}, "refused"),
    ({"splice": ["corrected"], "recompute": True}, "refused"),
    ({"splice": ["corrected"], "errata": ["date=2026-05-02"]}, "accepted"),
    ({"splice": ["corrected"], "fields": {"date": "2026-05-02"}, "method": "field"}, "accepted"),
]
NOTICES = (
    "warning: edited: the text has changed",
    "date is 2026-07-01: a correction for all sessions",
    "the edit method suffix has no effect",
)
SERVED = "cannot answer this: nothing is no compiled skill"  # one of the user's servers opens no file
CONTEXT = "This model's maximum context length is 4096 tokens"  # OpenAI's words
HELD = "an answer can be held to one of: a JSON schema, a grammar, choices"
FIELD = "no spliced skill has a field 'colour'. Known fields: amount, date, tier"
ANSWERS = "choices must be two or more different answers, got"
# Wrong values, the error of all interfaces without its advice, and what a server has in its place.
WRONG: list[tuple[Json, str, str]] = [
    ({"splice": ["nothing"]}, "no compiled skill and no file 'nothing'", SERVED),
    ({"memory": "nothing"}, "no compiled skill and no file 'nothing'", SERVED),
    ({"splice": ["f32"]}, "f32 was compiled from a f32/f32 K/V cache, this context keeps f16/f16", ""),
    ({"errata": ["colour=red"]}, FIELD, ""),
    ({"fields": {"colour": "red"}}, FIELD, ""),
    ({"fields": LATE, "method": "nonsense"}, "no edit method 'nonsense'. Known: stale, field, erratum, ", ""),
    ({"errata": ["date=2026-07-01"], "wording": "loud"}, "no erratum wording 'loud'. Known wordings: now, ", ""),
    ({"seam": 5000}, "a seam of 5000 tokens leaves nothing of returns to splice, which has 115. Give it a ", ""),
    ({"decode": ["support"]}, "support is to be decoded, and is none of the skills to splice", ""),
    ({"splice": [], "choices": ["yes", "yes"]}, f"{ANSWERS} 'yes,yes'", ""),
    ({"choices": ["yes"]}, f"{ANSWERS} 'yes'", ""),
    ({"choices": ["yes", ""]}, f"{ANSWERS} 'yes,'", ""),
    ({"grammar": "root ::= nothing"}, "line 1 of the grammar: there is no rule nothing", ""),
    ({"grammar": 'root ::= "perhaps'}, "line 1 of the grammar: '\"perhaps' is not GBNF", ""),
    ({"json_schema": {"not": {}}}, "the JSON schema cannot be enforced: Unsatisfiable schema", ""),
    ({"json_schema": SCHEMA, "choices": CHOICES}, HELD, ""),
    ({"grammar": 'root ::= "y"', "choices": CHOICES}, HELD, ""),
    ({"splice": [], "system": "why " * 9000}, "more than 4,096 tokens are to be read, which is all that fits", CONTEXT),
]


def named(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())[:70] or "alone"


def whole(options: Json) -> Json:
    """The options of a question of the table, with its defaults."""
    return {"question": QUESTION, "splice": ["returns"], "seed": 3, **options}


def words_of(options: Json) -> list[str]:
    """The options as words of the command line."""
    words = []
    for name, value in options.items():
        option = next((one for one in command.params if one.name == name), None)
        if value is None or not isinstance(option, click.Option):
            continue
        flag = max(option.opts, key=len)
        if option.is_flag:
            words += [flag] * value
        elif name == "fields":
            words += [word for field, text in value.items() for word in (flag, f"{field}={text}")]
        elif name == "choices":
            words += [flag, ",".join(value)]
        elif option.multiple:
            words += [word for one in value for word in (flag, one)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [options["question"], *words]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with skills: `f32` of another type of K/V, `edited` of a changed text, `corrected` for all sessions."""
    home = tmp_path_factory.mktemp("home")
    compile_into(home, "returns", "support")
    other = ContextOptions(n_threads=1, type_k="f32", type_v="f32")
    with api.Model(Workspace(config.shipped_model(), other, paths=config.Paths.under(home))) as model:
        model.compile(SAMPLES / "returns", name="f32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES_HOME", str(home))
        (home / "edited.txt").write_text("date: 2026-05-01\n\nBe brief.\n")
        assert run_here("compile", home / "edited.txt").code == 0
        (home / "edited.txt").write_text("date: 2026-05-02\n\nBe brief.\n")
        assert run_here("compile", SAMPLES / "returns", "--name", "corrected").code == 0
        assert run_here("edit", "--all", "--field", "corrected.date=2026-07-01").code == 0
    with serving(home) as found:
        yield found


@pytest.fixture(scope="module")
def model(server: Running) -> Iterator[api.Model]:
    with api.open(config.shipped_model(), n_threads=1, paths=config.Paths.under(server.home)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def at_home(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES_HOME", str(server.home))
    monkeypatch.setenv("NOTES_THREADS", "1")
    monkeypatch.setenv("NOTES_MODEL", str(config.shipped_model()))


Outcome = tuple[Any, list[str]]  # a document with the answer, or the text of an error; and the notices
OWN = {"ms", "server", "line", "id", "version", "warnings", "question", "session", "memory"}
OWN |= {"sampling", "identity", "probabilities"}


def in_python(model: api.Model, options: Json) -> Outcome:
    notices: list[str] = []

    def note(notice: Notice) -> None:
        notices.append(f"{WARNING if notice.warning else ''}{worded(notice)}")

    try:
        answer = model.ask(**options, callbacks=on(Notice, note))
    except NotesError as error:
        return worded(error), []
    return answer_as_json(answer, time.perf_counter()), notices


def by_command(options: Json, server: str = "off") -> Outcome:
    found = run_here("ask", *words_of(options), "--json", "--server", server)
    return (found.json["error"]["message"], []) if found.code else (found.json, found.err.splitlines())


def in_a_batch(questions: Sequence[Json]) -> list[Outcome]:
    """The outcomes of all questions, which are the lines of one batch."""
    lines = [json.dumps(one, ensure_ascii=False) for one in questions]
    found = run_here("ask", "--batch", "-", "--parallel", "4", stdin="\n".join(lines))
    documents = [json.loads(line) for line in found.out.splitlines()]
    assert [one["line"] for one in documents] == [*range(1, len(questions) + 1)]
    return [(one["error"]["message"] if "error" in one else one, found.err.splitlines()) for one in documents]


@pytest.fixture(scope="module")
def batch(server: Running) -> list[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES_HOME", str(server.home))
        patch.setenv("NOTES_MODEL", str(config.shipped_model()))
        patch.setenv("NOTES_THREADS", "1")
        return in_a_batch([whole(options) for options, *_ in (*QUESTIONS, *WRONG)])


def common(document: Json) -> Json:
    """Keys that all interfaces have, without times, tokens that are shared in a batch, and probabilities."""
    tokens = {name: count for name, count in document["tokens"].items() if name != "shared"}
    return {name: value for name, value in document.items() if name not in OWN} | {"tokens": tokens}


def bare(notice: str) -> str:
    """Cut off the advice, which a server words for clients."""
    return notice.partition(". ")[0]


@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=[named(options) for options, _ in QUESTIONS])
def test_an_answer_differs_between_interfaces(
    number: int, model: api.Model, server: Running, batch: list[Outcome]
) -> None:
    given, wanted = QUESTIONS[number]
    options = whole(given)
    document, notices = by_command(options)
    assert wanted in (None, document["answer"]) and document["server"] is None
    if choices := options.get("choices"):
        assert (document["choice"], document["stopped"]) == (document["answer"], None)
        probabilities = document["probabilities"]
        assert list(probabilities) == choices and sum(probabilities.values()) == pytest.approx(1)
        assert document["answer"] == max(probabilities, key=probabilities.__getitem__)
    line, lines = batch[number]
    asked, noticed = in_python(model, options)
    assert common(line) == common(asked) == common(document)
    cut = [notice for notice in notices if "was cut after" in notice]  # advice of the command alone
    assert [*noticed, *cut] == notices and {*noticed} <= {*lines}
    assert all(any(text in line for line in lines) for text in NOTICES)
    assert len(cut) == [document["stopped"], document["thought_stopped"]].count("length")
    for found in (line, asked):
        assert (found["probabilities"] or {}) == pytest.approx(document["probabilities"] or {}, abs=2e-2)
        assert found["ms"].keys() == document["ms"].keys()
    assert line["sampling"] == document["sampling"]
    served, of_server = by_command(options, server.url)
    assert list(served) == list(document) and [bare(one) for one in of_server] == [bare(one) for one in notices]
    assert min(time for time in served["ms"].values() if time is not None) >= 0
    own = {"server": None, "ms": None, "warnings": None}  # a server words advice for clients
    assert {**served, **own} == {**document, **own} and served["server"] == server.url


@pytest.mark.parametrize("options", [whole(options) for options, _ in QUESTIONS], ids=named)
def test_a_plan_differs_from_the_prompt(model: api.Model, server: Running, options: Json) -> None:
    """--explain has the pieces that the prompt then has."""
    plan, answer = model.explain(**options), model.ask(**options)
    assert plan.pieces == answer.pieces[: len(plan.pieces)] and plan.settings == answer.settings
    here, there = (
        run_here("ask", *words_of(options), "--json", "--explain", "--server", where).json
        for where in ("off", server.url)
    )
    assert {**there, "server": None, "warnings": None} == {**here, "warnings": None} and there["server"] == server.url
    assert here["pieces"] == answer_as_json(answer, 0)["pieces"][: len(plan.pieces)]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[named(options) for options, *_ in WRONG])
def test_an_error_differs_between_interfaces(
    number: int, model: api.Model, server: Running, batch: list[Outcome]
) -> None:
    given, what, of_server = WRONG[number]
    options = whole(given)
    found = [in_python(model, options)[0], batch[len(QUESTIONS) + number][0], by_command(options)[0]]
    assert [text.removeprefix("--").startswith(what) for text in found] == [True] * 3, found
    for where, part in (("off", what), (server.url, of_server or what)):
        shown = run_here("ask", *words_of(options), "--server", where)
        assert shown.code in (1, 2) and part in shown.refusal(shown.code)
        assert by_command(options, where)[0] == shown.err.rstrip("\n").removeprefix("notes: ")
