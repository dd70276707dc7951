"""Checks grammars with llguidance: cost limits, validation, and its errors as one line."""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary

from notes_cli.errors import GrammarError

HEAD = '%llguidance {"no_forcing": true}\n'  # also tokens that the tokenizer would not choose
# In units of llguidance: about 100 ms a token, 100 ms to compile, 100 MB.
LIMITS = {
    "max_items_in_row": 2000,
    "step_max_items": 200_000,
    "step_lexer_fuel": 1_000_000,
    "initial_lexer_fuel": 4_000_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,
}


class Grammar(str):
    """A grammar that llguidance has accepted. `matchers`: compiled for a vocabulary, by model (engine/sampler.py)."""

    def __init__(self, _: str) -> None:
        self.matchers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def check_grammar(grammar: str) -> Grammar:
    """Return the grammar as a Grammar. Raises GrammarError for one that llguidance cannot use."""
    if problem := problem_of(grammar):
        raise GrammarError(f"the grammar cannot be used: {problem}")
    return Grammar(grammar)


def problem_of(grammar: str) -> str:
    """Return the reason why llguidance cannot use a grammar; empty if it can."""
    from llguidance import LLMatcher

    return reason(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar), limits=limits()))


def limits() -> Any:
    """Return LIMITS as an object of llguidance."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)  # type: ignore[arg-type]


def reason(error: str) -> str:
    """Return an error of llguidance as one line, without places in the grammar's text."""
    lines = error.removeprefix("ERROR: ").split("\n   1 | ")[0].splitlines()
    last = next((line.strip() for line in lines if line.strip().startswith("error: ")), lines[0] if lines else "")
    return re.sub(r"^(at \d+\(\d+\): |failed to compile JSON schema: |error: |Parser Error: )+", "", last).strip()[:200]
