"""Checks on random conversations that a prompt's last value of each field is the one that holds for its client.

Requests of many conversations are prepared without computing. Each prompt is read from beginning to end, and compared
with the errata so far, by client and skill. Skills are recompiled meanwhile, to another text or back to an earlier one.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest

from notes_cli.serve.parsing import parse_chat
from notes_cli.serve.prepare import prepare_request

from .conftest import Json, Served

FIELDS = {"date": ("2026-05-03", "2026-07-01"), "tier": ("silver", "gold", "basic"), "amount": ("501", "20")}
QUESTIONS = ("May I return this?", "What is the shipping?")
SAID = re.compile(
    r"^# (?P<head>\w+) policy|^(?P<line>date|tier|amount): (?P<value>\S+)$"
    r"|Correction: the (?P<name>\w+)(?: of (?P<skill>\w+))? is now (?P<new>\S+)\. ",
    re.M,
)


@dataclass
class Talk:
    number: int
    named: list[str]
    messages: list[Json] = field(default_factory=list)
    errata: list[str] = field(default_factory=list)

    def skills(self, texts: dict[str, tuple[str, str]]) -> set[str]:
        """`texts`: two texts between which each skill changes."""
        said = [one["content"] for one in self.messages]
        sent = {name for name, both in texts.items() if any(text in one for text in both for one in said)}
        return {*self.named} | sent


def read(prompt: str) -> dict[str, dict[str, str]]:
    """Return the last value of each field of each skill in the prompt."""
    return read_through(prompt)[0]


def read_through(prompt: str) -> tuple[dict[str, dict[str, str]], set[str]]:
    """The same, with the errata that repeat an earlier one."""
    found: dict[str, dict[str, str]] = {}
    corrected, again = set[tuple[str, str]](), set[str]()
    last = ""
    for said in SAID.finditer(prompt):
        if said["head"]:
            last = said["head"].lower()
            found.setdefault(last, {})
        elif said["line"]:
            found[last][said["line"]] = said["value"]
            corrected.discard((last, said["line"]))
        else:
            for skill in [said["skill"]] if said["skill"] else found:
                key = skill, said["name"]
                if key in corrected and found[skill][said["name"]] == said["new"]:
                    again.add(f"{said['name']}={said['new']}")
                found[skill][said["name"]] = said["new"]
                corrected.add(key)
    return found, again


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("alike", [False, True])
def test_what_is_said_last_is_what_holds(own: Served, seed: int, alike: bool) -> None:
    """`alike`: several clients have the same messages, but other errata."""
    rng = random.Random(f"{seed} {alike}")
    returns: str = own.http.get("/v1/notes/returns").json()["text"]
    loans = returns.replace("# Returns policy", "# Loans policy").replace("gold", "basic", 1)
    loans = loans.replace("2026-05-01", "2026-05-09")
    assert own.http.post("/v1/notes/compile", json={"name": "loans", "text": loans}).status_code == 200
    texts = {"returns": returns, "loans": loans}
    both = {name: (text, text + "\n\nAsk at the state for more.") for name, text in texts.items()}
    standing: dict[str, dict[str, str]] = {name: {} for name in texts}
    state, model = own.scheduler.state, own.scheduler.workspace.model

    def begun(number: int) -> Talk:
        talk = Talk(number, rng.choice([[], ["returns"], ["loans"], ["returns", "loans"]]))
        if rng.random() < 0.3:
            given = rng.sample([*texts.values()], rng.choice([1, 2]))
            talk.messages.append({"role": "system", "content": "\n\n".join(given)})
        return talk

    def asked(talk: Talk) -> str:
        """Return the prompt of the next turn, and record its answer in the server."""
        request = parse_chat({"messages": talk.messages, "notes": {"splice": talk.named, "errata": talk.errata}})
        prepared = prepare_request(state, request)
        assert prepared.conversation is not None
        state.conversations.keep(request, prepared.digests, prepared.conversation, ["accepted"])
        return b"".join(model.token_bytes(int(one), special=True) for one in prepared.layout.tokens).decode()

    talks: list[Talk | None] = [None] * 6
    turns = 0
    for step in range(150):
        if rng.random() < 0.1:
            name = rng.choice([*texts])
            texts[name] = both[name][texts[name] == both[name][0]]
            given = {"name": name, "text": texts[name], "force": True}
            assert own.http.post("/v1/notes/compile", json=given).status_code == 200
            continue
        if rng.random() < 0.1:
            skill, name = rng.choice([*texts]), rng.choice([*FIELDS])
            standing[skill][name] = rng.choice([*FIELDS[name], read(texts[skill])[skill][name]])
            correction = {"field": f"{skill}.{name}", "value": standing[skill][name]}
            assert own.http.post("/v1/notes/errata", json=correction).status_code == 200
            continue
        place = rng.randrange(len(talks))
        talk = talks[place]
        if talk is None or len(talk.messages) > 8:
            talk = talks[place] = begun(step)
        parts = [rng.choice([*texts.values()]) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
        parts.insert(rng.choice([0, len(parts)]), rng.choice(QUESTIONS) + ("" if alike else f" {talk.number}"))
        talk.messages.append({"role": "user", "content": "\n\n".join(parts)})
        skills = talk.skills(both)
        while skills and rng.random() < 0.35:
            name = rng.choice([*FIELDS])
            talk.errata.append(f"{rng.choice([*sorted(skills), '*'])}.{name}={rng.choice(FIELDS[name])}")
        if talk.errata and rng.random() < 0.06:
            talk.errata.pop(rng.randrange(len(talk.errata)))
        wanted = {skill: read(texts[skill])[skill] | standing[skill] for skill in skills}
        for one in talk.errata:
            reference, _, value = one.partition("=")
            skill, _, name = reference.partition(".")
            for its in skills if skill == "*" else {skill} & skills:
                wanted[its][name] = value
        prompt = own.at_context(lambda talk=talk: asked(talk))
        found, again = read_through(prompt)
        assert found == wanted, (step, talk.named, talk.errata, prompt)
        assert again <= {one.partition(".")[2] for one in talk.errata}, (step, talk.named, talk.errata, prompt)
        talk.messages.append({"role": "assistant", "content": "accepted"})
        if rng.random() < 0.08:
            del talk.messages[-2:]
            there = talk.skills(both)
            talk.errata = [one for one in talk.errata if there and one.split(".")[0] in {*there, "*"}]
            if len(talk.messages) < 2:  # its first text may have been replaced since
                talks[place] = None
        turns += 1
    assert turns > 100
