"""llguidance: grammars that it can use, what they may cost, and its errors in one line."""

from __future__ import annotations

import re
from typing import Any

from notes_cli.errors import GrammarError

HEAD = '%llguidance {"no_forcing": true}\n'  # any tokens that spell a text, not only those that the tokenizer chooses
# What a grammar may cost, in units of llguidance: about 100 ms for one token, 100 ms to compile, 100 MB.
LIMITS = {
    "max_items_in_row": 2000,
    "step_max_items": 200_000,
    "step_lexer_fuel": 1_000_000,
    "initial_lexer_fuel": 4_000_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,
}


class Grammar(str):
    """A grammar for llguidance, which can use it."""

    __slots__ = ()


def check_grammar(grammar: str) -> Grammar:
    """The grammar, checked. Raise GrammarError for one that llguidance cannot use."""
    if problem := problem_of(grammar):
        raise GrammarError(f"the grammar cannot be used: {problem}")
    return Grammar(grammar)


def problem_of(grammar: str) -> str:
    """Why llguidance cannot use a grammar; empty if it can."""
    from llguidance import LLMatcher

    return reason(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar), limits=limits()))


def limits() -> Any:
    """LIMITS in the form of llguidance."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)  # type: ignore[arg-type]


def reason(error: str) -> str:
    """One line of an error of llguidance, without the places in the text that it was given."""
    lines = error.removeprefix("ERROR: ").split("\n   1 | ")[0].splitlines()
    last = next((line.strip() for line in lines if line.strip().startswith("error: ")), lines[0] if lines else "")
    return re.sub(r"^(at \d+\(\d+\): |failed to compile JSON schema: |error: |Parser Error: )+", "", last).strip()[:200]
