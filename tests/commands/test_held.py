"""`notes ask --json-schema` and `--grammar`: the answer satisfies the constraint, or stderr notes that it was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import notes_cli as api
from notes_cli import config

from .conftest import Notes
from .test_batch import answers, lines

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
}
WORDS = 'root ::= "accepted" | "refused"'


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that ships, in place of the random one."""
    monkeypatch.setenv("NOTES_MODEL", str(config.shipped_model()))


def test_json_that_is_valid(notes: Notes, tmp_path: Path, shipped: None) -> None:
    """A file or the schema itself; greedy, drawn, and the same with the same seed."""
    path = tmp_path / "answer.schema.json"
    path.write_text(json.dumps(SCHEMA))
    ask = ("ask", "Who?", "-n", 120)
    found = [notes(*ask, "--json-schema", path), notes(*ask, "-j", json.dumps(SCHEMA))]
    drawn = [notes(*ask, "-j", path, "--temp", 1, "--seed", seed) for seed in (1, 1, 2)]
    for outcome in (*found, *drawn):
        assert outcome.code == 0, outcome.err
        jsonschema.validate(json.loads(outcome.out), SCHEMA)
        assert "cut" not in outcome.err
    assert found[0].out == found[1].out and drawn[0].out == drawn[1].out


def test_the_thought_is_free(notes: Notes, shipped: None) -> None:
    """Only the answer is constrained, not the reasoning."""
    found = notes("ask", "May I return this?", "--think", "--grammar", WORDS, "--json").json
    assert found["answer"] in ("accepted", "refused") and found["stopped"] == "end"
    assert len(found["reasoning"].split()) > 3
    told = notes("ask", "May I return this?", "--think", "--grammar", WORDS)
    assert told.out.strip() == found["answer"]


def test_a_session(notes: Notes, shipped: None) -> None:
    """Each turn of a session has its own constraint."""
    first = notes("ask", "Which?", "--session", "mine", "--grammar", 'root ::= "one"')
    second = notes("ask", "And?", "--session", "mine", "-j", '{"const": 2}')
    third = notes("ask", "And?", "--session", "mine", "--grammar", 'root ::= " three"', "--json")
    assert (first.out, second.out) == ("one\n", "2\n"), second.err
    assert third.json["answer"] == " three"
    assert "one" in notes("session", "show", "mine").out


def test_lines_of_a_batch(notes: Notes, shipped: None) -> None:
    """A line has its own form, or that of the command; a bad one spoils no other."""
    asked = lines(
        '"Which?"',
        {"question": "Which?", "json_schema": {"enum": ["x"]}},
        {"question": "Which?", "grammar": 'root ::= "y"'},
        {"question": "Which?", "choices": ["no", "yes"]},
        {"question": "Which?", "json_schema": {"not": {}}},
        {"question": "Which?", "grammar": "answer.gbnf"},
        {"question": "Which?", "json_schema": "answer.json"},
        {"question": "Which?", "grammar": "root ::= nothing"},
        {"question": "Which?", "grammar": 'root ::= "y"', "choices": ["no", "yes"]},
    )
    found = notes("ask", "--grammar", 'root ::= "z"', "--batch", "-", stdin=asked)
    assert found.code == 1
    got = answers(found)
    assert [line["answer"] for line in got[:4]][:3] == ["z", '"x"', "y"] and got[3]["choice"] in ("no", "yes")
    told = [line["error"]["message"] for line in got[4:]]
    for message, says in zip(
        told,
        ("uses 'not'", "not the name of a file", "must be an object, or true", "there is no rule nothing", "one of:"),
        strict=True,
    ):
        assert says in message


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("-j", "nothere.json"), 2, "cannot read nothere.json"),
        (("--grammar", "nothere.gbnf"), 2, "cannot read nothere.gbnf"),
        (("-j", "{"), 1, "the JSON schema is not JSON"),
        (("-j", '{"not": {}}'), 1, "uses 'not', which is not supported but for types (at /)"),
        (("--grammar", "root ::= x"), 1, "there is no rule x"),
        (("--grammar", WORDS, "-j", '{"type": "string"}'), 1, "one of: a JSON schema, a grammar, choices"),
        (("--grammar", WORDS, "--choices", "a,b"), 1, "one of: a JSON schema, a grammar, choices"),
        (("--grammar", 'root ::= "€"', "--explain"), 0, ""),
        (("-j", '{"not": {}}', "--explain"), 1, "uses 'not'"),
    ],
)
def test_nonsense(notes: Notes, options: tuple[str, ...], code: int, says: str) -> None:
    """One line, before anything is decoded."""
    found = notes("ask", "Why?", *options)
    assert found.code == code and says in found.err
    assert code == 0 or (found.out == "" and found.err.count("\n") == 1)


@pytest.mark.model
def test_in_python() -> None:
    """As on the command line; `stream` yields the text."""
    with api.open() as model:
        found = model.ask("Who?", json_schema=SCHEMA, max_tokens=120)
        jsonschema.validate(json.loads(str(found)), SCHEMA)
        assert "".join(model.stream("Who?", grammar=WORDS)) in ("accepted", "refused")
        with pytest.raises(api.NotesError, match="uses 'not'"):
            model.ask("Who?", json_schema={"not": {}})
