"""The tasks: the author's, read from a file or from a clone of his repository, in frames of ours, and the tiny model's.

`tasks.json` has his word lists, policies and instances as data (keys `gated`, `compose_edit`, `agent`, `facts` and
`memory`, each with the names of his modules in it). In a clone the same names are read from his modules, which are
parsed and never run. Tool calls, the 28 turns and the trigger tokens are in words of ours.
"""

from __future__ import annotations

import ast
import copy
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.paper.caches import Pair
from bench.real.tasks import Fact, Question, facts_of
from notes_cli.errors import NotesError
from training import policies
from training.tiny import world

MODULES = {  # key -> module of the author's repository, and the names in it
    "gated": ("esys/diverse_tasks.py", {"TASKS": "tasks"}),
    "compose_edit": ("esys/compose_edit.py", {"INSTANCES": "INSTANCES"}),
    "agent": ("esys/editkv_agent_rigorous.py", {"DOMAINS": "DOMAINS", "ACT_OTHER": "ACT_OTHER"}),
    "facts": ("esys/composable_facts.py", {name: name for name in ("CO", "CITY", "NAME", "DRUG", "NUM", "DOMAINS")}),
    "memory": ("mem/data.py", {"CATALOG": "CATALOG", "ACTIONS": "ACTIONS"}),
}
FILLER = 18  # lines that decide nothing, after a rule
ORDERS = ("A1204", "B5530", "C7718", "D2046", "E9913", "F3381")
STATES = ("pending", "shipped", "delivered")
Tasks = dict[str, dict[str, Any]]


def load(path: Path) -> Tasks:
    """Read the author's tasks from a file of that form, or from a clone. Raises NotesError if they are not there."""
    try:
        if path.is_dir():
            return {key: _module(path / name, names) for key, (name, names) in MODULES.items()}
        found: Tasks = json.loads(path.read_text(encoding="utf-8"))
        missing = [
            f"{key}.{name}" for key, (_, names) in MODULES.items() for name in names.values() if name not in found[key]
        ]
    except (OSError, ValueError, KeyError, TypeError, SyntaxError) as error:
        raise NotesError(
            f"{path}: it has not the author's tasks ({error})", "Name a clone of his repository, or a tasks.json of it"
        ) from error
    if missing:
        raise NotesError(f"{path}: it lacks {', '.join(missing)}")
    return found


def _module(path: Path, names: dict[str, str]) -> dict[str, Any]:
    """Values that a module assigns to these names, under the keys for them. Raises ValueError for other code."""
    values: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            values[node.targets[0].id] = _value(node.value, values)
    return {key: json.loads(json.dumps(values[name])) for name, key in names.items()}


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of a literal, of a name, of dict(...) or of a list of numbers as strings."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return known[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, known) for part in parts]
        case ast.Dict(keys=keys, values=parts):
            return {_value(key, known): _value(part, known) for key, part in zip(keys, parts, strict=True) if key}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=pairs):
            return {pair.arg: _value(pair.value, known) for pair in pairs}
        case ast.ListComp(elt=ast.Call(func=ast.Name(id="str")), generators=[one]):
            return [str(part) for part in _value(one.iter, known)]
    raise ValueError(f"line {node.lineno} is no plain data")


def filler(count: int, line: str = "Note {number}: an ordinary note, which asks for nothing.") -> str:
    """Lines that decide nothing."""
    return "\n".join(line.format(number=number + 1) for number in range(count))


# Pairs of texts in the author's language.


def gated(tasks: Tasks) -> list[Pair]:
    """His tasks whose decision a field above the rule gates."""
    pairs = []
    for name, task in tasks["gated"]["tasks"].items():
        opening = f"SESSION CONTEXT\n{task['field']}:"
        rest = f"\nchannel: api\nagent_id: agent-3\n\n{task['rule']}\n{filler(FILLER)}"
        old, new = ((opening, f" {task[key]}", rest) for key in ("vold", "vnew"))
        question = f"TASK\n{task['request']}\nDecide in exactly one word.\nDecision:"
        choices = (task["stale"], task["correct"])
        pairs.append(Pair(name, task["role"], old, new, question, choices, task["field"], task["vnew"]))
    return pairs


def compose(tasks: Tasks) -> list[Pair]:
    """His policies with a state in them, which are compiled and spliced before the state changes."""
    pairs = []
    for one in tasks["compose_edit"]["INSTANCES"]:
        opening, rest = f"# {one['skill_name']}\nState: {one['field']} =", f".\nRule: {one['rule']}\n{filler(FILLER)}"
        old, new = ((opening, f" {one[key]}", rest) for key in ("Told", "Tnew"))
        choices = (one["act_old"], one["act_new"])
        pairs.append(Pair(one["name"], one["sys"], old, new, one["task"], choices, one["field"], one["Tnew"]))
    return pairs


def triggers(_: Tasks) -> list[Pair]:
    """A rule that names one value: with another one there the conclusion is the opposite, and the field is the same."""
    pairs = []
    for order in ORDERS:
        for state, other in zip(STATES, STATES[1:] + STATES[:1], strict=True):
            opening = f"order_status: {state}\n\nRULE: Cancel order {order} only if order_status is"
            rest = f". For any other order_status you must deny.\n{filler(FILLER)}"
            question = f"The customer asks to cancel order {order}. Answer in one word, cancel or deny.\nDecision:"
            old, new = ((opening, f" {value}", rest) for value in (state, other))
            pairs.append(Pair(f"{order} {state}", "You process orders.", old, new, question, ("cancel", "deny")))
    return pairs


def lookups(tasks: Tasks) -> list[Pair]:
    """Facts whose value changes, and a question about it: nothing has to be derived."""
    pairs = []
    for number, fact in enumerate(facts_of(tasks["facts"])):
        value = fact.question.accept[0]
        parts = fact.passage.split(f" {value}")
        pool = next(words for words in tasks["facts"].values() if value in words)
        other = pool[(pool.index(value) + 1) % len(pool)]
        if len(parts) == 2 and other not in fact.passage:
            old, new = ((parts[0], f" {one}", parts[1]) for one in (value, other))
            pairs.append(Pair(f"fact {number}", "", old, new, fact.question.ask, (value, other)))
    return pairs


def facts(tasks: Tasks) -> list[Fact]:
    return facts_of(tasks["facts"])


# Pairs of texts in the language of the tiny model that ships (training/tiny/world.py).


def tiny(count: int, seed: str, *, before: str = "", ask: str = "") -> list[Pair]:
    """Policies with a field above their rules, which flips a decision. `ask`: a question in place of the case's own,
    about the field itself."""
    level = world.Level(rules=(1, 2), rows=(2, 3), kinds=("table",) if ask else world.KINDS, below=0.0, shared=0.0)
    pairs = []
    for number, case in enumerate(world.cases(count, level, seed, held=True)):
        head, value, rest = case.draft.text().partition(f"{case.rule.field}: {case.old}")
        assert value, "the field is not in its text"
        opening, choices = f"{head}{case.rule.field}:", (case.old, case.new) if ask else case.right
        old, new = ((opening, f" {one}", rest) for one in (case.old, case.new))
        question = ask.format(field=case.rule.field) if ask else case.question
        pairs.append(Pair(f"{seed} {number}", before, old, new, question, choices, case.rule.field, case.new))
    return pairs


def tiny_triggers(count: int, seed: str) -> list[Pair]:
    """The same field with another limit in its rule, which flips the decision."""
    level = world.Level(rules=(1, 1), kinds=("date", "amount"), below=0.0)
    pairs, draw = [], random.Random(f"triggers {seed}")
    for number, case in enumerate(world.cases(count, level, f"triggers {seed}", held=True)):
        rule, value = case.rule, case.old
        limit = rule.limit
        while replace(rule, limit=limit).outcome(value) == rule.outcome(value):
            limit = policies.make_date(draw) if rule.kind == "date" else world.make_amount(draw)
        head, found, rest = case.draft.text().partition(f" {rule.relation} {rule.limit}")
        assert found, "the limit is not in its text"
        old, new = ((f"{head} {rule.relation}", f" {one}", rest) for one in (rule.limit, limit))
        choices = rule.outcome(value), replace(rule, limit=limit).outcome(value)
        pairs.append(Pair(f"{seed} trigger {number}", "", old, new, case.question, choices))
    return pairs


# Tool calls: requests for one of six tools, whose name and argument must be in the answer.

TOOLS = {
    "weather_report(city)": "the weather in a city",
    "find_train(destination)": "trains to a destination",
    "stop_order(order)": "stop an order by its number",
    "customer_record(email)": "the record of a customer by e-mail address",
    "write_mail(recipient)": "write a mail to an address",
    "open_case(priority)": "open a case with a priority",
}
REQUESTS = (
    "What is the weather in {city} today?",
    "Which trains go to {city}?",
    "Please stop my order {order}.",
    "Show me the record of {email}.",
    "Write a mail to {email} about the delay.",
    "Open a case with {priority} priority.",
)
CALLER = "You call tools. Answer with one JSON object: the tool's name and its arguments, and nothing else."


def tool_text() -> str:
    """The definitions of the tools."""
    spare = "- unused_{number}(text): internal, never called"
    return "# TOOLS\n" + "\n".join(f"- {name}: {use}" for name, use in TOOLS.items()) + "\n" + filler(18, spare)


def tool_calls(count: int) -> list[tuple[Question, str]]:
    """Requests with the argument that the call must have, and the name of its tool."""
    draw, found = random.Random(0), []
    for number in range(count):
        words = {
            "city": draw.choice(("Paris", "Denver", "Tokyo", "Cairo", "Lima", "Oslo", "Boston", "Madrid", "Riga")),
            "order": f"{draw.choice('ABCDEFGH')}{draw.randint(1000, 9999)}",
            "email": f"{draw.choice(('jane', 'amir', 'lena', 'yuki', 'ivan'))}@{draw.choice(('x.io', 'mail.net'))}",
            "priority": draw.choice(("low", "medium", "high", "urgent")),
        }
        request, tool = REQUESTS[number % 6], list(TOOLS)[number % 6].partition("(")[0]
        argument = words[request.partition("{")[2].partition("}")[0]]
        found.append((Question(f"User: {request.format(**words)}", (argument.lower(),)), tool))
    return found


# User memory: settings, of which all that an action needs must be enabled.

RULES = "You manage accounts, and follow the user's settings exactly."


@dataclass
class Persona:
    """A user's settings as (group, name, note, enabled), and the action that needs those of the indexes `needed`.
    `toggled`: the one that an edit changes."""

    settings: list[tuple[str, str, str, bool]]
    needed: list[int]
    action: str

    @property
    def toggled(self) -> int:
        return self.needed[0]

    @property
    def allowed(self) -> bool:
        return all(self.settings[index][3] for index in self.needed)

    def toggle(self, enabled: bool) -> Persona:
        """The same user after an edit."""
        changed = copy.deepcopy(self)
        changed.settings[self.toggled] = (*self.settings[self.toggled][:3], enabled)
        return changed

    def parts(self) -> tuple[str, ...]:
        """The memory in three parts: the second is the value that an edit changes."""
        lines = [
            f"- [{group}] {name}: {'enabled' if on else 'disabled'} ({note})" for group, name, note, on in self.settings
        ]
        group, name, note, on = self.settings[self.toggled]
        before = "\n".join(["# USER MEMORY", "", *lines[: self.toggled], f"- [{group}] {name}:"])
        after = "\n".join([f" ({note})", *lines[self.toggled + 1 :], "", "# END"])
        return before, " enabled" if on else " disabled", after

    @property
    def label(self) -> str:
        return self.settings[self.toggled][1]

    @property
    def question(self) -> str:
        names = ", ".join(self.settings[index][1] for index in self.needed)
        return (
            f"TASK: You want to {self.action}.\nRULE: Do it only if all of these settings are enabled: {names}.\n"
            "Answer in one word, yes (do it) or no.\nAnswer:"
        )


def personas(tasks: Tasks, count: int, settings: int, needed: int, seed: int, *, spread: bool = False) -> list[Persona]:
    """Users of the author's catalogue of settings; the action is allowed for every other one of them."""
    catalog, found = tasks["memory"]["CATALOG"], []
    for number in range(count):
        draw = random.Random(seed + number)
        rows = []
        for index in range(settings):
            group, name, note = catalog[index % len(catalog)]
            suffix = f"_{index // len(catalog)}" if index >= len(catalog) else ""
            rows.append((group, name + suffix, note, draw.random() < 0.6))
        draw.shuffle(rows)
        step = settings // needed
        chosen = [part * step for part in range(needed)] if spread else draw.sample(range(settings), needed)
        for index in chosen:
            rows[index] = (*rows[index][:3], True)
        person = Persona(rows, chosen, draw.choice(tasks["memory"]["ACTIONS"]))
        found.append(person if number % 2 == 0 else person.toggle(False))
    return found


def chat(turns: Iterable[int], seed: int = 0) -> str:
    """A conversation about nothing that a decision needs."""
    draw, topics = random.Random(seed), ("the weather", "a recipe", "a film", "a journey", "sleep", "music", "a book")
    lines = []
    for number in turns:
        topic = draw.choice(topics)
        lines.append(f"User: Let us talk about {topic} (part {number + 1}).")
        lines.append(f"Assistant: Gladly. Here is a friendly thought about {topic}, and none about your settings.")
    return "\n".join(lines)
