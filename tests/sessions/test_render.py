"""Rendered conversations over all chat templates: as they grew, and as if what was removed had never been there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from notes_cli.editing.methods import Change
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import Patch, apply_patches
from notes_cli.engine.segment import FieldSpan, Tokens
from notes_cli.errors import ModelError
from notes_cli.runtime.place import Policy, place
from notes_cli.sessions.edits import Parts, remaining
from notes_cli.sessions.follow import follow, render
from notes_cli.sessions.state import Entry, Part, SkillText, State, Turn
from notes_cli.text.erratum import known_fields, read_errata
from notes_cli.text.messages import Conversation, Message, TextPart, asking, results_of, user_message
from notes_cli.text.prompt import build
from notes_cli.text.reasoning import reasoning_of

from ..text.test_tools import SHOWS, SOURCES, template_of

TEXT = "date: June\ntier: gold"
SKILL = SkillText("returns", TEXT, (FieldSpan("date", "June", 6, 10, 6, 10), FieldSpan("tier", "gold", 17, 21, 17, 21)))
BOS = 1000


def spelled(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


class Plain:
    """In place of a workspace: a template, and a token for each byte; those of special texts are others."""

    def __init__(self, name: str) -> None:
        template, self.reasoning = template_of(name), reasoning_of(SOURCES[name], name)
        self.template = self.reasoning.template(template, False)
        self.thinking_template = self.reasoning.template(template, True)
        self.model = SimpleNamespace(name=name, end_tokens=[2000], text=self.text, tokenize=spelled)
        self.model.token_bytes = lambda token, special: b"</s>"

    def text(self, tokens: Iterable[int], special: bool = True) -> str:
        return bytes(token % 256 for token in tokens if token < BOS).decode(errors="replace")

    def tokenize(self, chunk: Any) -> Tokens:
        return np.array([256 * run.special + byte for run in chunk.runs for byte in run.text.encode()], np.int32)

    def with_bos(self, ids: Tokens) -> Tokens:
        return np.array([BOS, *ids], np.int32)


def answered(text: str, thought: str = "") -> tuple[Part, ...]:
    thoughts = (Part(spelled(thought), reason=Reason.THOUGHT),) if thought else ()
    return (*thoughts, Part(spelled(text)))


def grown(workspace: Any, turns: Sequence[Turn], skills: Sequence[SkillText] = (), **more: Any) -> State:
    """The state of turns, one after the other."""
    state = State(skills=tuple(skills), conversation=tuple(turns), **more)
    texts = {skill.name: np.array(spelled(skill.text), np.int32) for skill in skills}
    for number, turn in enumerate(turns, 1):
        for part in render(workspace, turn, texts, first=number == 1):
            at = len(state.tokens)
            entry = Entry(part.kind, part.name, "", at, len(part.tokens), "decoded", number, part.reason)
            state = replace(state, pieces=(*state.pieces, entry), tokens=[*state.tokens, *part.tokens])
    return replace(state, rows=())


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """A template that has no place for something is no failure."""
    try:
        yield
    except ModelError:
        pytest.skip(f"{name} has no place for it")


def talk(count: int = 4, system: str | None = "Be kind.") -> list[Turn]:
    """Questions with answers; the first comes with a system message that has a skill."""
    first = asking("Why 0?", system=system, skills=["returns"]).messages
    later = [(user_message(f"Why {number}?"),) for number in range(1, count)]
    return [Turn(messages, answered(f"So {number}.")) for number, messages in enumerate([first, *later])]


def check(workspace: Any, before: State, rest: State, kept: Sequence[int], changes: dict[str, Change]) -> list[Patch]:
    """The sequence follows to the tokens of the conversation that has never been another; return the patches."""
    patches, after = follow(workspace, before, rest, kept, changes)
    never = grown(workspace, rest.conversation, rest.skills)
    assert after.tokens == never.tokens == apply_patches(before.tokens, patches)
    shape = [
        [(one.kind, one.name, one.position, one.tokens, one.turn) for one in each.pieces] for each in (after, never)
    ]
    assert shape[0] == shape[1]
    assert all(patch.first < patch.last for patch in patches)
    return patches


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_turns_are_rendered_as_a_whole_conversation_and_go_as_if_never_there(name: str) -> None:
    """Any turns: what is left has the tokens of a conversation without them, and at most words of the template, no
    question and no answer, are decoded again."""
    workspace: Any = Plain(name)
    with refusing(name):
        turns = talk()
        state = grown(workspace, turns, [SKILL])
        messages = [message for turn in turns for message in (*turn.messages, _answer(turn))]
        chunks = build(workspace.template, Conversation(tuple(messages[:-1])))
        tokens = [spelled(TEXT) if one.kind == "splice" else workspace.tokenize(one).tolist() for one in chunks]
        assert state.tokens == [BOS, *(token for part in tokens for token in part), *spelled(_answer(turns[-1]).text)]
        for gone in (each for count in (1, 2, 3) for each in combinations(range(4), count)):
            kept = [number for number in range(4) if number not in gone]
            parts = named(turn=[number + 1 for number in gone])
            rest, _, _ = remaining(workspace, state, parts, kept, "mine")
            decoded = [token for patch in check(workspace, state, rest, kept, {}) for token in patch.tokens]
            assert "Why" not in workspace.text(decoded) and "So" not in workspace.text(decoded)


def named(**parts: Sequence[int]) -> Parts:
    return {"turn": [], "thought": [], "tool": [], **parts}


def _answer(turn: Turn) -> Message:
    return Message("assistant", (TextPart(bytes(turn.answer[-1].tokens).decode()),))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_corrected_turns_are_as_if_they_had_begun_with_the_last_values(name: str) -> None:
    """New values in place, errata that end, and the corrections that a removed turn leaves."""
    workspace: Any = Plain(name)
    with refusing(name):
        turns, corrections = [], State().corrections
        state = State()
        script = [["date=July", "Be quick."], ["tier=silver"], ["date=May", "tier=new"], []]
        for number, errata in enumerate(script):
            question = talk()[number].messages if not number else (user_message(f"Why {number}?"),)
            flat = [message for turn in turns for message in (*turn.messages, Message("assistant"))]
            known = read_errata(errata, known_fields(SKILL))
            placed, corrections = place([*flat, *question], [SKILL], known, corrections, Policy(cuts=True))
            left = iter(placed)
            turns = [replace(turn, messages=tuple(next(left) for _ in (*turn.messages, 0))[:-1]) for turn in turns]
            rest = replace(state, conversation=tuple(turns), corrections=corrections)
            check(workspace, state, rest, range(len(turns)), {})
            turns = [*turns, Turn(tuple(left), answered(f"So {number}."))]
            state = grown(workspace, turns, [SKILL], corrections=corrections)
        assert [part.key for turn in turns for part in turn.errata] == ["", "returns.date", "returns.tier"]
        rest, repeated, _ = remaining(workspace, state, named(turn=[1, 3]), [1, 3], "mine")
        check(workspace, state, rest, [1, 3], {})
        assert repeated == ("date", "tier") and not rest.conversation[0].errata
        edited = Change(
            ("date",),
            TEXT.replace("June", "a longer one"),
            np.array(spelled(TEXT.replace("June", "a longer one")), np.int32),
            (Patch(6, 10, spelled("a longer one")),),
            (),
        )
        changed = replace(state, skills=(replace(SKILL, text=edited.text, fields=()),))
        [patch] = check(workspace, state, changed, range(4), {"returns": edited})
        assert bytes(patch.tokens) == b"a longer one"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_memory_moves_to_each_question(name: str) -> None:
    workspace: Any = Plain(name)
    with refusing(name):
        turns = [Turn((user_message("Why 0?", skills=["returns"]),), answered("So."))]
        state = grown(workspace, [*turns, Turn((user_message("Why 1?"),), answered("So."))], [SKILL])
        without = [replace(turn, messages=(user_message(turn.question),)) for turn in state.conversation]
        rest = replace(state, conversation=tuple(without), skills=())
        patches = check(workspace, state, rest, [0, 1], {})
        assert not any("returns" in workspace.text(patch.tokens) for patch in patches)


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_results_of_tools_and_reasoning_go_as_if_never_there(name: str) -> None:
    """A round with a tool, its result alone, and a chain of thought; answers stay as they were generated."""
    workspace: Any = Plain(name)
    with refusing(name):
        results = tuple(message for message in results_of([("look_up", "It is 37.")]) if message.role == "tool")
        turns = [
            Turn(asking("Why?", system="s").messages, answered("So.", "Hm."), "requested"),
            Turn((user_message("And?"),), answered("CALL")),
            Turn(results, answered("It is 37.")),
            Turn((user_message("Why?"),), answered("So.", "Well."), "requested"),
        ]
        state = grown(workspace, turns)
        gone: list[tuple[Parts, list[int]]] = [
            (named(turn=[2, 3]), [0, 3]),
            (named(tool=[3]), [0, 1, 2, 3]),
            (named(turn=[1, 4]), [1, 2]),
        ]
        gone += [(named(thought=[1, 4]), [0, 1, 2, 3])] if not workspace.reasoning.end else []
        for parts, kept in gone:
            rest, _, _ = remaining(workspace, state, parts, kept, "mine")
            check(workspace, state, rest, kept, {})
            texts = workspace.text(grown(workspace, rest.conversation).tokens)
            assert ("Hm." in texts) == (0 in kept and not parts["thought"]) and ("CALL" in texts) == (1 in kept)
