"""Tests /v1/decisions: probabilities as those of `notes ask --choices`, shared inputs, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import Decision

from notes_cli.serve.decisions import _choice_confidence, _score_confidence

from ..commands.conftest import run_here
from .conftest import QUESTION, Json, Served, started

NOTES: Json = {"splice": ["returns"], "errata": {"date": "2026-07-01"}}
OPTIONS = [{"value": "accepted"}, {"value": "refused"}]
CHOICE: Json = {"type": "choice", "name": "return", "instructions": QUESTION, "choices": OPTIONS}
INPUT = "A customer brings a book that was bought in May. "


def decide(served: Served, questions: list[Json], text: Any = INPUT, **notes: Any) -> Decision:
    more = {"notes": {**NOTES, **notes}}
    return served.client.decisions.create(model="tiny", input=text, questions=questions, extra_body=more)  # type: ignore[arg-type]


def probabilities(answer: Any) -> list[float]:
    return [one.probability for one in answer.probabilities]


def test_the_probabilities_are_those_of_choices(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same text, to the last bit, where nothing else was in the context; descriptions are part of the text."""
    monkeypatch.setenv("NOTES_HOME", str(library))
    monkeypatch.setenv("NOTES_THREADS", "1")
    described = [{"value": "accepted", "description": "the book is taken back"}, {"value": "refused"}]
    listed = "\n- accepted: the book is taken back\n- refused"
    for choices, lines in ((OPTIONS, ""), (described, listed)):
        text = f"{INPUT}\n\n{QUESTION}{lines}"
        given = ("-m", "notes-tiny", "--splice", "returns", "--erratum", "date=2026-07-01", "--server", "off")
        found = run_here("ask", text, *given, "--choices", "accepted,refused", "--json")
        with started(library) as served:
            [answer] = decide(served, [{**CHOICE, "choices": choices}]).answers
        assert answer.type == "choice" and answer.choice == found.json["choice"]
        assert dict(zip(("accepted", "refused"), probabilities(answer), strict=True)) == found.json["probabilities"]


def test_each_type_of_question(served: Served) -> None:
    """Answers are in the order of the questions, with the values and names of the client."""
    levels = [{"label": "slow"}, {"label": "fair", "description": "within a week"}, {"label": "fast"}]
    questions: list[Json] = [
        {**CHOICE, "choices": [{"value": True}, {"value": "perhaps"}]},
        {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it late?"}]},
        {"type": "score", "name": "speed", "instructions": "How fast is it?", "levels": levels},
    ]
    found = decide(served, questions)
    choice, predicate, score = found.answers
    assert choice.type == "choice" and choice.name == "return" and choice.choice in (True, "perhaps")
    assert [one.value for one in choice.probabilities] == [True, "perhaps"]
    assert predicate.type == "predicate" and predicate.name is None and 0 < predicate.probability < 1
    assert score.type == "score" and [one.label for one in score.probabilities] == ["slow", "fair", "fast"]
    assert [one.value for one in score.probabilities] == [0, 1, 2]
    first, second, third = likely = probabilities(score)
    assert first + second + third == pytest.approx(1) and score.score == pytest.approx(second + 2 * third)
    assert score.confidence == _score_confidence(likely, likely.index(max(likely)))
    assert found.model == "tiny" and found.usage.output_tokens == 0


def test_several_questions_share_their_input(library: Path) -> None:
    questions = [{**CHOICE, "name": name, "instructions": f"{name}: {QUESTION}"} for name in ("a", "b", "c", "d")]
    text = INPUT * 12
    with started(library) as served:
        alone = [decide(served, [question], text) for question in questions]
    with started(library) as served:
        found = decide(served, questions, [{"role": "user", "content": text}])
        assert [answer.name for answer in found.answers] == ["a", "b", "c", "d"]
        for answer, other in zip(found.answers, alone, strict=True):
            assert probabilities(answer) == pytest.approx(probabilities(other.answers[0]), abs=0.01)
        once = alone[0].usage
        details: Any = found.usage.input_tokens_details
        assert found.usage.input_tokens == sum(one.usage.input_tokens for one in alone)
        assert details.notes["decoded_tokens"] < once.input_tokens < found.usage.input_tokens / 3
        again: Any = decide(served, questions, text, explain=True)
        assert again.usage.input_tokens_details.notes["decoded_tokens"] < details.notes["decoded_tokens"] / 2
        assert [one["pieces"][0]["how"] for one in again.notes] == ["live"] * 4
        gauges = served.at_context(served.scheduler.gauges)
        assert [gauges[name] for name in ("requests_running", "cells_promised", "prefixes_idle")] == [0, 0, 1]


def test_the_input_has_a_system_message_and_json(served: Served) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_json", "data": {"late": True}}]},
        {"role": "user", "content": "Thanks."},
    ]
    [answer] = decide(served, [CHOICE], messages).answers
    text = f'{{"late": true}}\n\nThanks.\n\n{QUESTION}'
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    reply = served.chat(asked, notes={**NOTES, "ask": True, "choices": ["accepted", "refused"]})
    assert probabilities(answer) == pytest.approx([*reply["notes"]["probabilities"].values()], abs=0.01)


def test_confidences() -> None:
    """1 for a certain answer, 0 for a blind guess, and values in between as in llama.cpp's server."""
    assert _choice_confidence([1, 0, 0]) == _score_confidence([0, 1, 0], 1) == 1
    assert _choice_confidence([0.25] * 4) == _score_confidence([1 / 3] * 3, 0) == 0
    assert _choice_confidence([0.5, 0.3, 0.2]) == pytest.approx(0.25)
    assert _score_confidence([0.7, 0.2, 0.1], 0) == pytest.approx(0.4)
