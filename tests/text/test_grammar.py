"""Tests parsing GBNF: errors in a grammar are found before an answer begins."""

from __future__ import annotations

import pytest

from notes_cli.errors import GrammarError
from notes_cli.text.grammar import gbnf_grammar


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(("", "has no rule root"), ('answer ::= "a"', "has no rule root")),
        ("root ::= other", "line 1 of the grammar: there is no rule other"),
        ('root ::= "a"\nroot ::= "b"', "line 2 of the grammar: the rule root is there twice"),
        ('root = "a"', "line 1 of the grammar: '= \"a\"' is not GBNF"),
        *(('root ::= "a" )', r"'\)' does not belong there"), ('root ::= ("a"', r"\) is missing before the end")),
        *(('root ::= "a', "is not GBNF"), (r'root ::= "\q"', "is not GBNF"), (r'root ::= "\ud800"', "is no character")),
        *(("root ::= * ", r"\* repeats nothing"), ("root ::= []", "without any character")),
        ("root ::= [z-a]", "a range that is none"),
        ('root ::= "a"\n  | "b"', "line 2 of the grammar: the name of a rule is missing"),
        ('root ::= "a"{3,2}', "asks for at least 3 and at most 2"),
        *(('root ::= "a"{99999999999999999999}', "is not GBNF"), ("root ::= <think>", "is not GBNF")),
        (f"root ::= {'(' * 300}{')' * 300}", "nested more than 20 deep"),
        ("\n".join(f"r{i} ::= r{i + 1}" for i in range(300)) + '\nr300 ::= "a"\nroot ::= r0', "more than 300 rules"),
        ("\n".join(f"r{i} ::= {'(' * 19}r0{')' * 19}" for i in range(50)) + "\nroot ::= r0", "levels of parentheses"),
        (f'root ::= "{"a" * 70_000}"', "longer than 65,536 characters"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_grammar(text: str, says: str) -> None:
    """One line has the error and its place."""
    with pytest.raises(GrammarError, match=says) as caught:
        gbnf_grammar(text)
    assert "\n" not in str(caught.value)
