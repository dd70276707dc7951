"""Tests that a prompt gives bitwise equal logits by every way of asking, if the same tokens are computed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from notes_cli.engine.sequence import KVSequence

from ..commands.conftest import run_here
from .conftest import Served

LONG = "It was bought in a shop by the river, and it has been worn twice since then by somebody else. " * 3
ASKED = [  # questions, and the text before the skills
    ("May I return this?", None),
    ("What is the tier?", "Be kind."),
    (f"{LONG}May I return this?", None),
    ("May I return this?", LONG),
    ("Who are you, and why?", LONG),
]
VALUES = ["2026-07-01", "2026-06-03", "a day long after all of the others, which nobody remembers any more"]


class Seen:
    """Logits after each prompt, by its tokens and by the way of asking."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[int, ...], dict[str, bytes]] = defaultdict(dict)
        self._way: str | None = None
        ask = KVSequence.try_logits

        def asked(sequence: KVSequence) -> object:
            logits = ask(sequence)
            if self._way and logits is not None:
                self.found[tuple(sequence.tokens.tolist())][self._way] = logits.tobytes()
            return logits

        monkeypatch.setattr(KVSequence, "try_logits", asked)

    @contextmanager
    def way(self, name: str) -> Iterator[None]:
        """Record logits in the block under this way of asking."""
        self._way = name
        yield
        self._way = None

    def by_command(self, way: str, *arguments: str | Path) -> None:
        with self.way(way):
            outcome = run_here("ask", *arguments, "-n", "1", "--server", "off")
            assert outcome.code == 0, outcome.err


def _alike(found: dict[str, bytes]) -> list[list[str]]:
    groups = defaultdict(list)
    for way, bits in found.items():
        groups[bits].append(way)
    return sorted(groups.values())


@pytest.mark.parametrize("method", ["erratum", "field+erratum"])
@pytest.mark.patches("speed")
def test_bits_follow_from_the_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """By an erratum, by a field's new value, in a batch, in a session and from a server, one after the other."""
    monkeypatch.setenv("NOTES_HOME", str(served.home))
    seen = Seen(monkeypatch)
    for asked, (question, system) in enumerate(ASKED):
        skills = ["returns", "support"][: 1 + asked % 2]
        value = f"date={VALUES[asked % len(VALUES)]}"
        given = [question, *(word for skill in skills for word in ("--splice", skill))]
        given += ["-s", system] if system else []
        seen.by_command("erratum", *given, "--method", method, "--erratum", value)
        seen.by_command("field", *given, "--method", method, "--field", value)
        session = ["--session", f"{method[:3]}-{asked}"]
        seen.by_command("session", *given, *session, "--method", method, "--erratum", value)
        line = {"splice": skills, "errata": [value], "method": method, "system": system}
        (tmp_path / "one").write_text(json.dumps({"question": question, **line}))
        seen.by_command("batch", "--batch", tmp_path / "one")
        (tmp_path / "two").write_text("\n".join(json.dumps({"question": one, **line}) for one in ("Why?", question)))
        if method == "erratum":  # an edit in place frees cells, which an earlier answer takes
            seen.by_command("batch of two", "--batch", tmp_path / "two", "--parallel", "1")
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": question}]
        with seen.way("server"):
            how = {"ask": True, "splice": skills, "errata": [value], "method": method}
            served.chat(messages, notes=how, max_tokens=1, max_think=0)
        with seen.way("chat"):
            body = {"splice": skills, "errata": [value], "cache_salt": f"{method} {asked}"}
            served.chat(messages, notes=body, max_tokens=1)
    ways = [found for found in seen.found.values() if len(found) > 1]
    every = {"erratum", "field", "session", "batch", "server"} | ({"chat"} if method == "field+erratum" else set())
    assert len([found for found in ways if every <= {*found}]) >= len(ASKED), [sorted(found) for found in ways]
    differing = [_alike(found) for found in ways if len({*found.values()}) > 1]
    assert not differing


@pytest.mark.patches("speed")
def test_the_next_question_is_decoded_as_it_is_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to a server share the skill's prefix, and have the bits of `notes ask`."""
    monkeypatch.setenv("NOTES_HOME", str(served.home))
    seen = Seen(monkeypatch)
    for question in ("May I return this?", "May I return that?", "May I return this?"):
        seen.by_command("alone", question, "--splice", "returns")
        with seen.way(f"server {len(seen.found)}"):
            reply = served.ask(question, splice=["returns"])
    assert {piece["how"] for piece in reply["notes"]["pieces"] if piece["kind"] == "splice"} == {"live"}
    prompts = [found for found in seen.found.values() if "alone" in found]
    assert max(map(len, prompts)) == 3 and not [_alike(found) for found in prompts if len({*found.values()}) > 1]
