"""Reading GBNF: what llama.cpp would print, take for something else or not survive is found before it sees it."""

from __future__ import annotations

import re

import pytest

from notes_cli.errors import GrammarError
from notes_cli.text.grammar import _Ways, check_grammar, times

from .wild import WILD

GRAMMARS = sorted((WILD[0].parents[2] / "grammars").glob("*.gbnf")) if WILD else []


@pytest.mark.parametrize("path", GRAMMARS, ids=lambda path: path.stem)
def test_grammars_of_others(path: object) -> None:
    """Those that llama.cpp comes with are sound."""
    check_grammar(path.read_text())  # type: ignore[attr-defined]


def test_they_are_there() -> None:
    """Else the test above says nothing."""
    assert len(GRAMMARS) >= 7, "run: make test"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no rule root"),
        ('answer ::= "a"', "has no rule root"),
        ("root ::= other", "line 1 of the grammar: there is no rule other"),
        ('root ::= "a"\nroot ::= "b"', "line 2 of the grammar: the rule root is there twice"),
        ('root = "a"', "line 1 of the grammar: '= \"a\"' is not GBNF"),
        ('root ::= "a" )', r"'\)' does not belong there"),
        ('root ::= ("a"', r"\) is missing before the end"),
        ('root ::= "a', "is not GBNF"),
        (r'root ::= "\q"', "is not GBNF"),
        ("root ::= * ", r"\* repeats nothing"),
        ('root ::= "a"\n  | "b"', "line 2 of the grammar: the name of a rule is missing"),
        ('root ::= "a"{3,2}', "asks for at least 3 and at most 2"),  # llama.cpp counts down without an end
        ('root ::= "a"{0,2001}', "more than 2,000 times"),  # llama.cpp takes any number
        ('root ::= "a"{99999999999999999999}', "more than 2,000 times"),
        ("root ::= <think>", "is not GBNF"),
        (f"root ::= {'(' * 300}{')' * 300}", "nested more than 200 deep"),
        (f'root ::= "{"a" * 100_000}"{{2000}}', "becomes larger"),
        ('root ::= ("a"{0,2000} ' + "b{0,2000}" * 15 + ')\nb ::= "b"', "becomes larger"),
        ('root ::= x{0,2000}\nx ::= y{0,9}\ny ::= "a"', "rule root can go on in more than 1,000 ways"),
        ("root ::= " + "x? " * 1001 + '"y"\nx ::= "a"', "rule root can go on in more than 1,000 ways"),
        ("\n".join(f"r{i} ::= r{i + 1}" for i in range(300)) + '\nr300 ::= "a"\nroot ::= r0', "begin with each other"),
        ('root ::= "a\0"', "NUL"),
        (r'root ::= "a\x00b"', "line 1 of the grammar: .* holds a NUL character, which no text has"),
        (r'root ::= [^\x00-\x1F] "\x41\\\u0000"', "holds a NUL character"),
        (
            "\n".join(f"r{i} ::= {'(' * 150}r{i + 1}{')' * 150}" for i in range(100)) + '\nr100 ::= "a"\nroot ::= r0',
            "the grammar is nested too deeply",
        ),
        ("#" * (2 << 20), "longer than"),
    ],
)
def test_what_is_no_grammar(text: str, says: str) -> None:
    """One line that says what is wrong, and where."""
    with pytest.raises(GrammarError, match=says) as caught:
        check_grammar(text)
    assert "\n" not in str(caught.value)


def test_groups_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once more for each of those around them."""
    counted: list[object] = []
    alternatives = _Ways._alternatives
    monkeypatch.setattr(_Ways, "_alternatives", lambda *given: counted.append(given) or alternatives(*given))
    check_grammar(f"root ::= {'(' * 150}{chr(34) * 2} {')' * 150}")
    assert len(counted) == 150


@pytest.mark.parametrize(("least", "most"), [(0, 2001), (3, 4999), (0, 5000), (2500, None), (2001, 2001), (7, 7)])
def test_more_repetitions_than_llama_takes(least: int, most: int | None) -> None:
    """Lots of them allow every count from the least to the most, and no other."""
    rule = times("a", least, most)
    check_grammar(f'root ::= {rule}\na ::= "a"')
    expression = re.compile(rule.replace(" ", "").replace("(", "(?:"))
    counts = {0, 1, 499, 500, 501, 999, 1000, 2000, 2001, 2499, 2500, 4498, 4999, 5000, 5001, least, max(0, least - 1)}
    for count in counts | ({most, most + 1} if most else set()):
        fits = least <= count and (most is None or count <= most)
        assert (expression.fullmatch("a" * count) is not None) == fits, count
