"""What small policies are made of: words, names, wordings of questions and corrections, and rules with their answers.

Pure Python. Everything random comes from a `random.Random` that the caller seeds.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

WORD_FIELDS: dict[str, tuple[str, ...]] = {
    "tier": ("gold", "silver", "basic", "bronze", "platinum", "standard", "copper", "premium"),
    "region": ("north", "south", "east", "west", "central", "coastal", "inland", "island"),
    "plan": ("starter", "family", "team", "student", "studio", "campus", "solo", "business"),
    "status": ("active", "paused", "closed", "pending", "open", "blocked", "archived", "new"),
    "season": ("spring", "summer", "autumn", "winter", "holiday", "harvest", "carnival", "rainy"),
    "channel": ("web", "phone", "store", "mail", "app", "partner", "kiosk", "agent"),
    "category": ("books", "toys", "tools", "garden", "music", "food", "clothes", "lamps"),
    "material": ("glass", "wood", "paper", "steel", "cotton", "stone", "plastic", "leather"),
}
DATE_FIELDS: tuple[str, ...] = ("date", "start", "arrival", "renewal")
AMOUNT_FIELDS: tuple[str, ...] = ("amount", "weight", "total", "distance")
TOPICS: dict[str, tuple[str, ...]] = {
    "return": ("accepted", "refused", "reviewed", "partial", "credited", "postponed"),
    "shipping": ("free", "reduced", "full", "express", "slow", "shared"),
    "approval": ("automatic", "manual", "waived", "delegated", "joint", "instant"),
    "refund": ("complete", "half", "delayed", "denied", "capped", "split"),
    "support": ("daily", "weekly", "remote", "local", "priority", "limited"),
    "discount": ("large", "small", "medium", "doubled", "frozen", "seasonal"),
    "delivery": ("morning", "evening", "night", "pickup", "courier", "locker"),
    "warranty": ("long", "short", "extended", "void", "lifetime", "renewed"),
    "exchange": ("allowed", "forbidden", "optional", "direct", "counted", "restricted"),
    "invoice": ("digital", "printed", "combined", "separate", "quarterly", "yearly"),
    "deposit": ("none", "fixed", "variable", "high", "low", "refundable"),
    "access": ("granted", "revoked", "guided", "public", "private", "timed"),
}
_FIELDS = "date tier amount total plan season distance start arrival channel category renewal"
FIELD_OF: dict[str, str] = dict(zip(TOPICS, _FIELDS.split(), strict=True))  # the field that decides a topic
VERBS: dict[str, tuple[str, ...]] = {
    **{topic: (f"May I {topic} this?", f"Can I {topic} it?") for topic in ("return", "exchange")},
    "refund": ("Do I get a refund?",),
    "support": ("Do I get support?",),
    "discount": ("Do I get a discount?",),
    "access": ("Do I get access?",),
    "invoice": ("Do I get an invoice?",),
    "deposit": ("Do I pay a deposit?",),
    **{topic: (f"How does the {topic} work?",) for topic in ("delivery", "shipping", "approval", "warranty")},
}
PLAIN: tuple[str, ...] = (
    "What is the {topic}?",
    "Which {topic} applies?",
    "What about the {topic}?",
    "Tell me the {topic}.",
    "And the {topic}?",
)
SYSTEM = "<|im_start|>system\n"
USER = "<|im_end|>\n<|im_start|>user\n"
REPLY = "<|im_end|>\n<|im_start|>assistant\n"
REASON_CUE = " Think first."
REASON_CUES: tuple[str, ...] = (REASON_CUE, REASON_CUE, REASON_CUE, " Explain.", " Give the reason.")
RECALL: tuple[str, ...] = ("What is the {field}?", "Which {field} is it?", "Tell me the {field}.")
PREAMBLES: tuple[str, ...] = (
    "You are a helpful assistant.",
    "Answer from the policy below.",
    "You answer questions about policies.",
    "Read the text and answer.",
    "Be brief.",
    "You work for {org}.",
    "You are the assistant of {org}. Answer with one word where you can.",
)
FILLERS: tuple[str, ...] = (
    "Please keep the receipt.",
    "Ask the front desk when in doubt.",
    "This page is checked every year.",
    "Staff follow these rules in every shop.",
    "Other questions go to the office.",
    "The rules below hold for everyone.",
    "We thank you for your visit.",
    "Nothing else changes the result.",
    "Keep this page at hand.",
    "All rules are read together.",
)
HEADINGS: tuple[str, ...] = ("# {title} policy of {org}", "# {title} at {org}", "# {org}: {title} rules", "# {org}")
_SYLLABLES = (
    "Har bor Mil ton Vel mar Os ric Lun den Tar vik Bel sen Cor dal Fen wick Gor lin Nor bury Pel ham Quin ster Ros "
    "mere Sal ford"
)
SYLLABLES = tuple(_SYLLABLES.split())
_COMPANIES = "Books Tools Market Trading Outfitters Foods Garden Supplies Travel Records"
COMPANIES = tuple(_COMPANIES.split())
EXTRA_WORDINGS: tuple[str, ...] = (
    "From now on the {field} is {value}.",
    "Correction: the {field} is {value}.",
    "Change of {field}: it is now {value}.",
)
OLD_WORDINGS: tuple[str, ...] = (
    "Correction: the {field} is {value}, not {old}.",
    "The {field} was changed from {old} to {value}.",
)
ERRATA_FILE = Path(__file__).resolve().parent.parent / "prompts" / "errata.json"


def wordings() -> dict[str, str]:
    """The erratum wordings of the CLI, read from its one source (default first)."""
    found: dict[str, str] = json.loads(ERRATA_FILE.read_text(encoding="utf-8"))["wordings"]
    return found


@dataclass(frozen=True)
class Rule:
    """What decides one topic: a table over the values of a word field, or a limit on a date or an amount."""

    kind: str  # table, date, amount
    topic: str
    field: str
    table: tuple[tuple[str, str], ...] = ()
    limit: str = ""
    yes: str = ""
    no: str = ""

    def holds(self, value: str) -> bool:
        """Whether the condition of a threshold rule holds for `value`."""
        return value < self.limit if self.kind == "date" else int(value) > int(self.limit)

    def outcome(self, value: str) -> str:
        """The right answer when the field has this value."""
        if self.kind == "table":
            return dict(self.table)[value]
        return self.yes if self.holds(value) else self.no

    @property
    def relation(self) -> str:
        """The word of the comparison."""
        return "before" if self.kind == "date" else "over"

    @property
    def choices(self) -> tuple[str, ...]:
        """All outcomes the text names for the topic, in order."""
        if self.kind == "table":
            return tuple(dict.fromkeys(o for _, o in self.table))
        return (self.yes, self.no)

    def lines(self) -> list[str]:
        """The rule in English, one line a case."""
        if self.kind == "table":
            return [f"- If the {self.field} is {v} then the {self.topic} is {o}." for v, o in self.table]
        return [
            f"- If the {self.field} is {self.relation} {self.limit} then the {self.topic} is {self.yes},"
            f" otherwise the {self.topic} is {self.no}."
        ]


def is_held_out(key: str) -> bool:
    """True for the tenth of all names and rules that training never sees."""
    return zlib.crc32(key.encode()) % 10 == 0


def make_org(rng: random.Random, held: bool) -> str:
    """An organisation name of syllables, from the training or from the held-out combinations."""
    while True:
        name = (rng.choice(SYLLABLES) + rng.choice(SYLLABLES).lower()).capitalize() + " " + rng.choice(COMPANIES)
        if is_held_out(name) == held:
            return name


def make_date(rng: random.Random, near: str | None = None) -> str:
    """A date of 2024 to 2028; with `near`, mostly in the same year and sometimes in the same month."""
    year, month, day = rng.randint(2024, 2028), rng.randint(1, 12), rng.randint(1, 28)
    if rng.random() < 0.12:
        day = rng.randint(1, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1])
    if near is not None:
        kind = rng.random()
        if kind < 0.8:
            year = int(near[:4])
        if kind < 0.12:
            month = int(near[5:7])
            day = rng.randint(1, 28)
    return f"{year}-{month:02d}-{day:02d}"


def make_rule(rng: random.Random, kind: str, topic: str, field: str, rows: int) -> Rule:
    """A random rule that is not held out."""
    while True:
        outcomes = rng.sample(TOPICS[topic], len(TOPICS[topic]))
        if kind == "table":
            values = rng.sample(WORD_FIELDS[field], rows)
            chosen = outcomes[: max(2, rows - (rng.random() < 0.3))]
            column = chosen + [rng.choice(chosen) for _ in range(rows - len(chosen))]
            rng.shuffle(column)
            rule = Rule(kind, topic, field, tuple(zip(values, column, strict=True)))
        else:
            limit = make_date(rng) if kind == "date" else str(10 * rng.randint(3, 97))
            rule = Rule(kind, topic, field, limit=limit, yes=outcomes[0], no=outcomes[1])
        key = repr((rule.topic, rule.field, sorted(rule.table), rule.limit, rule.yes, rule.no))  # not its wording
        if not is_held_out(key):
            return rule


def too_near(kind: str, value: str, limit: str) -> bool:
    """Whether a comparison takes more than a glance: less than 60 apart, or in the same month."""
    return value[:7] == limit[:7] if kind == "date" else abs(int(value) - int(limit)) < 60


def any_value(rng: random.Random, field: str) -> str:
    """A random value of a field."""
    kind = kind_of(field)
    if kind == "table":
        return rng.choice(WORD_FIELDS[field])
    return make_date(rng) if kind == "date" else str(10 * rng.randint(1, 99))


def kind_of(field: str) -> str:
    """table, date or amount: how the values of a field are read."""
    return "date" if field in DATE_FIELDS else "amount" if field in AMOUNT_FIELDS else "table"
