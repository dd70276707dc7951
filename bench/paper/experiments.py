"""The experiments, cell by cell. A cell is one task of one experiment; its result is plain data (report.py sums up).

Where a decision is asked for, its cell has `right`: whether a full prefill of the same text decides rightly, a flag for
each side. The report's gate is the share of those.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.paper import tasks as made
from bench.paper.caches import Lab, Mix, Pair
from bench.paper.tasks import Persona, Tasks
from bench.real.tasks import Fact, Question
from notes_cli.engine.positions import Patch
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.measure.verify import cosine
from training import policies

Result = dict[str, Any]
Logits = NDArray[np.float32]
K = 8  # positions of the highest effect, and as many random ones
DRAWS = 3  # of random positions
TURNS = 28
SESSION = 12  # turns of a conversation with a memory, of which every third decides
PROBES = 7  # of these turns, one is compared with a prefill after edits in place
BLOCKS = (1, 2, 4, 8, 16)
ANSWER, CALL = 8, 32  # tokens of an answer at most
YES = ("yes", "no")


@dataclass(frozen=True)
class Cell:
    """One task of an experiment; `run` measures it."""

    experiment: str
    item: int
    run: Callable[[Lab], Result]

    @property
    def key(self) -> str:
        return f"{self.experiment}/{self.item}"


# The number of tasks: of decisions that one change flips, of texts that were compiled once, of a user's memory.
EXPERIMENTS = {"gated": 8, "compose": 8, "trigger": 18, "lookup": 16, "positions": 6}
EXPERIMENTS |= {"facts": 104, "tools": 108, "agent": 100, "turns": 3}
EXPERIMENTS |= {"e2": 24, "e3": 24, "e4": 8, "e5": 3}
PAIRS = ("gated", "compose", "trigger", "lookup", "positions")


def cells(tasks: Tasks, scale: float, only: Sequence[str], *, tiny: bool) -> Iterator[Cell]:
    """The cells of these experiments; `scale`: the share of each one's tasks, of which at least one is left. `tiny`:
    pairs in the language of the tiny model in place of the author's, all of them."""
    gated = made.tiny(24, "gated") if tiny else made.gated(tasks)
    compose = made.tiny(24, "compose", before=policies.PREAMBLES[1]) if tiny else made.compose(tasks)
    triggers = made.tiny_triggers(24, "t") if tiny else made.triggers(tasks)
    lookups = made.tiny(24, "look", ask=policies.RECALL[0]) if tiny else made.lookups(tasks)
    counts = {name: max(1, round(count * scale)) for name, count in EXPERIMENTS.items()}
    domains = tasks["agent"]["DOMAINS"]
    users = partial(made.personas, tasks)
    sources: dict[str, list[Callable[[Lab], Result]]] = {
        "gated": [partial(edited, pair=pair) for pair in gated],
        "compose": [partial(edited, pair=pair, spliced=True) for pair in compose],
        "trigger": [partial(mechanism, pair=pair) for pair in triggers],
        "lookup": [partial(mechanism, pair=pair) for pair in lookups],
        "positions": [partial(positions, pair=pair) for pair in (gated[:12] if tiny else [*gated[:3], *lookups[:3]])],
        "facts": [partial(facts, fact=fact) for fact in made.facts(tasks)],
        "tools": [partial(tool_call, asked=one, tool=tool) for one, tool in made.tool_calls(counts["tools"])],
        "agent": [
            partial(agent, domain=domains[number % len(domains)], other=tasks["agent"]["ACT_OTHER"], number=number)
            for number in range(counts["agent"])
        ],
        "turns": [partial(turns, seed=seed) for seed in range(counts["turns"])],
        "e2": [partial(moved, user=user) for user in users(counts["e2"], 24, 2, 5000)],
        "e3": [partial(memory_edit, user=user) for user in users(counts["e3"], 24, 2, 7000)],
        "e4": [partial(blocks, user=user) for user in users(counts["e4"], 60, 4, 9000, spread=True)],
        "e5": [partial(session, tasks=tasks, seed=seed) for seed in range(counts["e5"])],
    }
    whole = PAIRS if tiny else PAIRS[:2]  # there is no other one of the author's, and the tiny model is fast
    for name, source in sources.items():
        if name in only:
            kept = source if name in whole else source[: counts[name]]
            yield from (Cell(name, item, run) for item, run in enumerate(kept))


# Decisions that one change flips.


def _scores(lab: Lab, base: KVSequence, full: KVSequence, texts: Sequence[Patch], pair: Pair) -> dict[str, float]:
    """Scores of every way to correct `base`, whose sequence has the old text at its end; `full` has the new one."""
    question, corrected = lab.tail(pair.question), lab.tail(pair.question, lab.erratum(pair.label, pair.value))

    def ask(sequence: KVSequence, tail: Tokens) -> float:
        with lab.after(sequence, tail):
            return lab.score(sequence, pair.choices)

    found = {"stale": ask(base, question), "erratum": ask(base, corrected), "full": ask(full, question)}
    base.replace(texts)
    return found | {"field": ask(base, question), "both": ask(base, corrected)}


def edited(lab: Lab, pair: Pair, *, spliced: bool = False) -> Result:
    """Corrections in an ordinary cache, and in one where the text was spliced; and where the decision is."""
    texts = lab.changed(pair)
    patches = [patch.offset(len(texts.head)) for patch in texts.patches]
    result: Result = {}
    with lab.sequence(texts.head, texts.old) as base, lab.sequence(texts.head, texts.new) as full:
        result["prefilled"] = _scores(lab, base, full, patches, pair)
    if spliced:
        old, new = lab.compile(texts.old), lab.compile(texts.new)
        with lab.spliced(texts.head, old) as base, lab.spliced(texts.head, new) as full:
            result["spliced"] = _scores(lab, base, full, patches, pair)
    result["right"] = [result["prefilled"]["stale"] < 0, result["prefilled"]["full"] > 0]
    return result | ({"mechanism": mechanism(lab, pair)} if all(result["right"]) else {})


def mechanism(lab: Lab, pair: Pair) -> Result:
    """Recoveries of the changed tokens alone and of everything after them alone, and the decisions of these mixes."""
    with Mix(lab, pair) as mix:
        result: Result = {"right": [mix.stale < 0, mix.fresh > 0]}
        if not all(result["right"]):
            return result

        def changed(number: int) -> bool:
            return mix.columns[number].field

        result["changed"] = mix.recovery(changed)
        result["after"] = mix.recovery(lambda number: number > mix.first and not changed(number))
        result["downstream"] = mix.recovery(lambda number: number >= mix.first)
        result["injected"] = [mix.score(lambda number: number > mix.first and not changed(number)) > 0]
        result["injected"].append(mix.score(lambda number: number < mix.first or changed(number)) < 0)
    return result


def positions(lab: Lab, pair: Pair) -> Result:
    """Recoveries of the 8 positions after the change that have the highest effect alone, and of 8 random ones."""
    with Mix(lab, pair) as mix:
        result: Result = {"right": [mix.stale < 0, mix.fresh > 0]}
        if not all(result["right"]):
            return result
        after = [n for n, column in enumerate(mix.columns) if n > mix.first and not column.field]
        effects = {n: mix.recovery(lambda number, n=n: number == n) for n in reversed(after)}  # type: ignore[misc]
        best = set(sorted(after, key=effects.__getitem__, reverse=True)[:K])
        draw = random.Random(pair.name)
        drawn = [set(draw.sample(after, min(K, len(after)))) for _ in range(DRAWS)]
        random_recoveries = [mix.recovery(chosen.__contains__) for chosen in drawn]
        return result | {"top": mix.recovery(best.__contains__), "random": sum(random_recoveries) / DRAWS}


# Composition.


def facts(lab: Lab, fact: Fact) -> Result:
    """A passage early and late in the prompt, spliced with one boundary token, against a full prefill."""
    passage, tail = lab.text(fact.passage), lab.tail(fact.question.ask)
    segment, system = lab.compile(passage), "You answer exactly, from the document."
    result: Result = {}
    for place, before in (("early", system), ("late", f"{system}\n\nThe document is looked up.\n\n[RESULT]")):
        head = lab.head(before)
        with lab.sequence(head, passage, tail) as sequence:
            full = lab.answer(sequence, ANSWER)
        with lab.spliced(head, segment) as sequence:
            sequence.append(tail)
            answer = lab.answer(sequence, ANSWER)
        right, spliced = fact.question.right(full), fact.question.right(answer)
        result[place] = {"right": [right], "spliced": spliced, "agree": right == spliced, "text": full == answer}
    return result


def tool_call(lab: Lab, asked: Question, tool: str) -> Result:
    """A request for one of the tools, whose definitions are spliced or prefilled."""
    head, tools, tail = lab.head(made.CALLER), lab.text(made.tool_text()), lab.tail(asked.ask)
    with lab.prefilled(head, tools) as sequence:
        sequence.append(tail)
        full = lab.answer(sequence, CALL).lower()
    with lab.spliced(head, lab.compile(tools)) as sequence:
        sequence.append(tail)
        spliced = lab.answer(sequence, CALL).lower()
    names = [name.partition("(")[0] for name in made.TOOLS]
    called = [next((name for name in names if name in text), "") for text in (full, spliced)]
    right = [name == tool and asked.accept[0] in text for name, text in zip(called, (full, spliced), strict=True)]
    return {"right": [right[0]], "spliced": right[1], "agree": called[0] == called[1]}


def _decided(lab: Lab, sequence: KVSequence, tail: Tokens, choices: tuple[str, str]) -> tuple[bool, Logits]:
    """Return True if the first answer is likelier than the second after these tokens, and the logits."""
    with lab.after(sequence, tail):
        return lab.score(sequence, choices) <= 0, sequence.logits().copy()


def agent(lab: Lab, domain: list[Any], other: dict[str, str], number: int) -> Result:
    """Three turns in one cache with a spliced policy, and errata for the state, against a prefill of every turn.

    A prefill of the same tokens continues the one of the turn before, whose K/V it equals; it is counted as a whole.
    """
    name, field, rule, steps = domain
    policy = lab.text(f"# {name} policy\nRule: {rule}\nThe state is in the field {field}.\n{made.filler(24)}")
    head, segment = lab.head(f"You act by the {name} policy."), lab.compile(policy)
    result: Result = {"right": [], "spliced": [], "agree": []}
    with lab.spliced(head, segment) as live, lab.prefilled(head, policy) as full:
        result["decoded"], result["prefilled"] = len(head) + 1, 0
        for turn, (value, request, act) in enumerate(steps):
            state = lab.erratum(field, value) if turn else f"Current {field}: {value}."
            choices = (act, other[act])
            asked = request.format(x=f"{name[:2]}{1000 + 7 * number}")
            text = f"\n\n{state}\n{asked}. Answer in one word, {act} or {choices[1]}.\nDecision:"
            tokens, closing = lab.text(text), lab.model.tokenize(lab.closing, special=True)
            decisions = []
            for sequence in (live, full):
                sequence.append(tokens)
                decisions.append(_decided(lab, sequence, closing, choices)[0])
            result["decoded"] += len(tokens) + len(closing)
            result["prefilled"] += len(full) + len(closing)
            for sequence in (live, full):
                sequence.append(lab.text(f" {act}"))
            result["spliced"].append(decisions[0])
            result["right"].append(decisions[1])
            result["agree"].append(decisions[0] == decisions[1])
    return result


def turns(lab: Lab, seed: int) -> Result:
    """A field that changes in every turn, by errata in one cache with a spliced rule, and also in place."""
    return {"errata": _turns(lab, seed, in_place=False), "both": _turns(lab, seed, in_place=True)}


def _turns(lab: Lab, seed: int, *, in_place: bool) -> Result:
    """Decision and logits of each turn, compared with those of a prefill of the same tokens."""
    opening = "RULE: open a sealed file only if clearance is high. If clearance is low, you must refuse.\nclearance:"
    old, new = [(opening, f" {value}", "\nThe archive is closed on Sundays.") for value in ("high", "low")]
    pair = Pair("", "", old, new, "", ("open", "refuse"))
    texts, head = lab.changed(pair), lab.head("You guard the archive, and act by its rule.")
    (patch,) = texts.patches
    spelled = {"high": tuple(map(int, texts.old[slice(*patch.span)])), "low": tuple(patch.tokens)}
    at, value = len(head) + patch.first, "high"
    probe = lab.text("\nAnswer for the current clearance in one word, open or refuse.\nDecision:")
    probe = np.concatenate([probe, lab.model.tokenize(lab.closing, special=True)])
    result: Result = {"right": [], "live": [], "agree": [], "cosine": []}
    with lab.spliced(head, lab.compile(texts.old)) as live, lab.sequence(head, texts.old) as full:
        for turn in range(TURNS):
            text = f"\n[TURN {turn + 1}] user: please open file {100 * seed + turn}."
            if turn:
                before, value = value, "low" if value == "high" else "high"
                text += f"\n{lab.erratum('clearance', value)}"
                if in_place:
                    live.replace([Patch(at, at + len(spelled[before]), spelled[value])])
            tokens = lab.text(f"{text}\nassistant: noted.")
            live.append(tokens)
            if not in_place:
                full.append(tokens)
            elif (turn + 1) % PROBES:
                continue
            else:
                full.truncate(0)
                full.append(live.tokens)
            opens, logits = _decided(lab, live, probe, pair.choices)
            expected, reference = _decided(lab, full, probe, pair.choices)
            result["right"].append(expected == (value == "high"))
            result["live"].append(opens == (value == "high"))
            result["agree"].append(opens == expected)
            result["cosine"].append(round(cosine(logits, reference), 5))
    return result


# User memory.


def _compared(lab: Lab, sequence: KVSequence, tail: Tokens, full: tuple[bool, Logits]) -> Result:
    yes, logits = _decided(lab, sequence, tail, YES)
    same_token = int(logits.argmax()) == int(full[1].argmax())
    return {"agree": yes == full[0], "cosine": round(cosine(logits, full[1]), 5), "token": same_token}


def moved(lab: Lab, user: Persona) -> Result:
    """E2: a memory before (early) and after (late) the conversation, with boundary tokens and without rotation."""
    memory, talk, tail = lab.text("".join(user.parts())), made.chat(range(4), user.needed[0]), lab.tail(user.question)
    segment = lab.compile(memory)
    result: Result = {}
    after = np.concatenate([lab.text(f"\n\n{talk}"), tail])
    for place, head, rest in (
        ("early", lab.head(made.RULES), after),
        ("late", lab.head(f"{made.RULES}\n\n{talk}"), tail),
    ):
        with lab.sequence(head, memory) as sequence:
            full = _decided(lab, sequence, rest, YES)
        rows: Result = {"right": [full[0] == user.allowed]}
        for way, boundary in (("0", 0), ("1", 1), ("not rotated", 0)):
            with lab.spliced(head, segment, boundary=boundary, rotate=way != "not rotated") as sequence:
                rows[way] = _compared(lab, sequence, rest, full)
        result[place] = rows
    return result


def memory_edit(lab: Lab, user: Persona) -> Result:
    """E3: a setting that decides is toggled; decisions directly, without a chain of thought."""
    allowed = user.allowed
    edited_user = user.toggle(not allowed)
    head = lab.head(f"{made.RULES}\n\n{made.chat(range(4), user.needed[0])}")
    value = edited_user.parts()[1].strip()
    pair = Pair("", "", user.parts(), edited_user.parts(), user.question, YES, user.label, value)
    texts = lab.changed(pair)
    patches = [patch.offset(len(head)) for patch in texts.patches]
    with (
        lab.spliced(head, lab.compile(texts.old)) as base,
        lab.sequence(head, texts.new) as full,
        lab.spliced(head, lab.compile(texts.new)) as again,
    ):
        scores = _scores(lab, base, full, patches, pair)
        with lab.after(again, lab.tail(user.question)):
            scores["compiled again"] = lab.score(again, YES)
    right = {way: (score <= 0) == edited_user.allowed for way, score in scores.items()}
    return {"right": [right["full"]], "ways": right}


def blocks(lab: Lab, user: Persona) -> Result:
    """E4: a memory of 60 settings, compiled in blocks that do not see each other."""
    memory, tail = lab.text("".join(user.parts())), lab.tail(user.question)
    head = lab.head(f"{made.RULES}\n\n{made.chat(range(4), user.needed[0])}")
    result: Result = {}
    with lab.sequence(head, memory) as sequence:
        full = _decided(lab, sequence, tail, YES)
    for count in BLOCKS:
        bounds = [round(part * len(memory) / count) for part in range(count + 1)]
        with lab.sequence(head) as sequence:
            for first, last in pairwise(bounds):
                sequence.splice(lab.compile(memory[first:last]))
            result[str(count)] = _compared(lab, sequence, tail, full)
    return {"right": [full[0] == user.allowed], "blocks": result}


def session(lab: Lab, tasks: Tasks, seed: int) -> Result:
    """E5: a conversation of 12 turns with a memory of 120 settings, kept just before the question by moving it.

    Compared with a prefill of the same tokens at every decision. Tokens to decode at decisions are counted: moved
    (`ours`), memory at the front (`front`) and at the end (`end`) of a prefix cache, prefilled (`prefill`).
    """
    (user,) = made.personas(tasks, 1, 120, 2, 1000 + 2 * seed)
    draw = random.Random(seed)
    result: Result = {"right": [], "rows": [], "seconds": [[], []]}
    counted = dict.fromkeys(("ours", "front", "end", "prefill"), 0)
    memory = lab.text("".join(user.parts()))
    segment: Segment = lab.compile(memory)
    compiled, stale = len(memory), True
    unread = 0  # tokens of turns since the last decision
    with lab.sequence(lab.head(made.RULES)) as live:
        start = len(live)
        for turn in range(SESSION):
            tokens = lab.text(made.chat([turn], turn) + "\n")
            live.append(tokens)
            unread += len(tokens)
            if draw.random() < 0.25:
                user = user.toggle(not user.settings[user.toggled][3])
                memory = lab.text("".join(user.parts()))
                segment = lab.compile(memory)
                compiled, stale = compiled + len(memory), True
            if (turn + 1) % 3:
                continue
            tail, conversation = lab.tail(user.question), live.tokens
            with lab.sequence(conversation, memory) as full:
                began = time.perf_counter()
                expected = _decided(lab, full, tail, YES)
                prefilled = time.perf_counter() - began
            live.flush()
            began = time.perf_counter()
            live.splice(segment, seam=1)
            row = _compared(lab, live, tail, expected)
            result["seconds"][0].append(round(time.perf_counter() - began, 4))
            result["seconds"][1].append(round(prefilled, 4))
            live.truncate(len(conversation))
            result["right"].append(expected[0] == user.allowed)
            result["rows"].append(row)
            counted["ours"] += unread + 1 + len(tail)
            counted["end"] += unread + len(memory) + len(tail)
            counted["front"] += (len(memory) + len(conversation) - start if stale else unread) + len(tail)
            counted["prefill"] += len(conversation) + len(memory) + len(tail)
            unread, stale = 0, False
    counted["ours"] += compiled
    return result | {"tokens": counted}
