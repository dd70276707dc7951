"""Texts of the experiments: those of the first world stay what they were when docs/results-reversed.md was measured."""

from __future__ import annotations

import hashlib

from bench.experiments import agent, blocks
from bench.experiments.texts import First


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def test_the_first_world_draws_what_it_drew() -> None:
    """The same seeds give the same cases, memories, instances and sections; digests are of the published ones."""
    texts = First(20260614)
    found = [case for _, case in texts.cases("decisions", 12)]
    assert [number for number, _ in texts.cases("probes", 3)] == [1, 2, 3]
    assert digest(found) == "c1ffb7b8ae797291"
    memories = []
    for _, rng in texts.rngs("agent", 2):
        drafts = texts.memory(rng, agent.MEMORY)
        memories.append((drafts, agent.make_instance(texts, rng, drafts)))
    assert digest(memories) == "2ecf832655881730"
    sections = []
    for _, rng in texts.rngs("blocks", 2):
        drafts = texts.memory(rng, blocks.RULES)
        sections += [blocks._section(texts, rng, draft.skill.fields, draft.rules) for draft in drafts]
        sections += [blocks._section(texts, rng, {field: value}, ()) for field, value in texts.spare(rng, drafts)]
    assert len(sections) == 32 and digest(sections) == "22c3971d035eae9c"
