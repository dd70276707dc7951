"""Converts requests of OpenAI's Decisions API to chat requests, one for each question.

Every question has the prompt of `notes ask`: the input, an empty line, then the instructions. Its answer is that of
`--choices`: each option is scored whole, and nothing is generated. There are yes-or-no questions, choices and scores.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from notes_cli.serve.parsing import MOST_ANSWERS, PROMPTS, ChatRequest, Reader, parse_chat, readers
from notes_cli.serve.refusals import Refused, invalid, renaming
from notes_cli.serve.replies import Json, Reply, response_usage
from notes_cli.text.messages import BETWEEN

IGNORED = {"safety_identifier", "prompt_cache_key", "prompt_cache_options"}
NAMES = {"messages": "input", "prompt": "questions"}  # of keys, in errors


class Option(NamedTuple):
    """An option of a question: its text in the prompt, its value in the answer, and its description, if any."""

    text: str
    value: Any
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A typed question: predicate, choice or score. `name` and the values of options are the client's."""

    kind: str
    name: str | None
    instructions: str
    options: Sequence[Option]

    @property
    def text(self) -> str:
        """The end of the prompt. Options are listed only if they are described, as `--choices` lists none."""
        described = any(option.description for option in self.options)
        lines = [f"- {option.text}: {option.description}".removesuffix(": ") for option in self.options if described]
        return "\n".join(filter(None, [self.instructions, *lines]))


@dataclass(slots=True)
class DecisionReply(Reply):
    """Collects the probabilities of a question's options."""

    question: Question | None = None

    def answer(self) -> Json:
        assert self.question is not None
        question, probabilities = self.question, list(self.done[0].probabilities.values())
        kind = {"type": question.kind, "name": question.name}
        if question.kind == "predicate":  # yes is the first option
            return {**kind, "probability": probabilities[0]}
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        pairs = list(zip(question.options, probabilities, strict=True))
        if question.kind == "choice":
            listed = [{"value": option.value, "probability": probability} for option, probability in pairs]
            chosen, confidence = {"choice": question.options[best].value}, _choice_confidence(probabilities)
        else:
            levels = enumerate(pairs)
            listed = [{"value": at, "label": option.text, "probability": share} for at, (option, share) in levels]
            chosen = {"score": sum(level * probability for level, probability in enumerate(probabilities))}
            confidence = _score_confidence(probabilities, best)
        return {**kind, **chosen, "probabilities": listed, "confidence": confidence}


def _choice_confidence(probabilities: Sequence[float]) -> float:
    """Return how far the best probability is above that of a blind guess, from 0 to 1, as llama.cpp does."""
    guess = 1 / len(probabilities)
    return max(0.0, (max(probabilities) - guess) / (1 - guess))


def _score_confidence(probabilities: Sequence[float], best: int) -> float:
    """Return 1 less the mean distance to the best level, relative to that of blind guesses to the middle, as llama.cpp
    does; 0 at least."""
    middle = (len(probabilities) - 1) / 2
    distance = sum(probability * abs(level - best) for level, probability in enumerate(probabilities))
    blind = sum(abs(level - middle) for level in range(len(probabilities))) / len(probabilities)
    return max(0.0, 1 - distance / blind)


# Requests.


def parse_decisions(data: Any, *, forms: bool = True) -> list[tuple[Question, ChatRequest]]:
    """Parse a request of /v1/decisions; return its questions, and the chat request of each. Raises Refused. `forms`
    changes nothing: choices need no grammar."""
    reader = Reader(data)
    system, parts = _input(reader.any("input"))
    asked = [(_question(item), item.where) for item in reader.listed("questions", "questions", 1, PROMPTS)]
    model, notes = reader.text("model"), reader.inner("notes").rest()
    if reader.flag("stream"):
        raise Refused(400, "decisions are not streamed", param="stream", code="unsupported_value")
    for name in ("notes.session", "notes.choices"):
        if notes.pop(name.removeprefix("notes."), None) is not None:
            raise invalid(name, f"{name} does not go with decisions")
    reader.end(IGNORED)
    shared = BETWEEN.join(part["text"] for part in parts if part["type"] == "text" and part["text"].strip())
    questions = []
    for question, place in asked:
        choices = [option.text for option in question.options]
        if not (question.text and all(choices)):
            what = "an option without a text" if question.text else "no instructions"
            raise invalid(place, f"{place} has {what}")
        body = {
            "model": model,
            "messages": [*system, {"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}],
            "max_tokens": 1,
            "max_think": 0,
            "notes": {**notes, "ask": True, "choices": choices},
        }
        with renaming({"notes.choices": place, **NAMES}):
            chat = parse_chat(body)
        questions.append((question, replace(chat, shared=shared if len(asked) > 1 else "")))
    return questions


def _input(data: Any) -> tuple[list[Json], list[Json]]:
    """Return the messages of the system, and the parts of the user's messages as one."""
    if isinstance(data, str):
        return [], [{"type": "text", "text": data}]
    system: list[Json] = []
    parts: list[Json] = []
    for reader in readers(data or None, "input", "a string, or a list of one message or more"):
        kind, role = reader.text("type", "message"), reader.text("role")
        if kind != "message" or role not in ("user", *(() if parts else ("system", "developer"))):
            where = reader.name("role")
            message = f"{where} must be user, or system before those of the user: send other text in theirs"
            raise Refused(400, message, param=where, code="unsupported_value")
        content = _parts(reader.any("content"), reader.name("content"))
        if role == "user":
            parts += content
        else:
            system.append({"role": "system", "content": content})
    return system, parts


def _parts(data: Any, where: str) -> list[Json]:
    """Convert the content of a message, or instructions, to the parts of a chat's message."""
    if isinstance(data, str):
        return [{"type": "text", "text": data}]
    parts: list[Json] = []
    for reader in readers(data or None, where, "a string or a list of parts"):
        kind = reader.text("type")
        if kind == "input_text":
            parts.append({"type": "text", "text": reader.needed("text")})
        elif kind == "input_json":
            parts.append({"type": "text", "text": _as_text(reader.any("data"))})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": reader.needed("image_url")}})
        else:
            raise reader.wrong("type", "input_text, input_json or input_image", kind)
    return parts


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _question(reader: Reader) -> Question:
    kind, name = reader.text("type"), reader.take("name", "a string", lambda value: isinstance(value, str), None)
    parts = _parts(reader.any("instructions"), reader.name("instructions"))
    if any(part["type"] != "text" for part in parts):
        raise Refused(400, f"{reader.name('instructions')} has an image: send it in the input", param="questions")
    if kind == "predicate":
        options = [Option("yes", True), Option("no", False)]
    elif kind == "choice":
        options = [_option(item, "value", (str, bool)) for item in reader.listed("choices", "options", 2, MOST_ANSWERS)]
    elif kind == "score":
        options = [_option(item, "label", (str,)) for item in reader.listed("levels", "options", 2, MOST_ANSWERS)]
    else:
        raise reader.wrong("type", "predicate, choice or score", kind)
    reader.end()
    return Question(kind, name, BETWEEN.join(part["text"] for part in parts), options)


def _option(reader: Reader, key: str, types: tuple[type, ...]) -> Option:
    value, description = reader.any(key), reader.text("description")
    if not isinstance(value, types):
        raise reader.wrong(key, " or ".join({str: "a string", bool: "a boolean"}[kind] for kind in types), value)
    reader.end()
    return Option(value if isinstance(value, str) else json.dumps(value), value, description)


# Replies.


def join_decisions(replies: Sequence[Reply]) -> Json:
    """Return the document of all answers, with the keys `notes` of the questions, in order, if requested."""
    answers = [reply.answer() for reply in replies if isinstance(reply, DecisionReply)]
    explained = [reply.explained()["notes"] for reply in replies if reply.request.notes.explain]
    more = {"notes": explained} if explained else {}
    return {"model": replies[0].model, "answers": answers, "usage": response_usage(replies), **more}
