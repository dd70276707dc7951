"""Tests names: any script, one form, and a file name on every system."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.text.names import MAX_BYTES, MAX_NAME, is_name, name_of, objection


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *(("規則", "規則"), ("方針", "方針"), ("Rückgabe", "rückgabe"), ("Maße", "maße"), ("ΛΌΓΟΣ", "λόγος")),
        *(("हिन्दी नाम", "हिन्दी-नाम"), ("правила_2", "правила-2"), ("القواعد", "القواعد"), ("규칙", "규칙")),
        *(
            *(("My Skill!", "my-skill"), ("a__b", "a-b"), ("../etc/x", "etc-x"), (".hidden", "hidden")),
            ("caf\udce9", "caf"),
        ),
        *(("a\u202eb", "a-b"), ("a\u200db", "a-b"), ("a\x1b[31m", "a-31m"), ("葛\U000e0100", "葛"), ("a\u3164b", "ab")),
        *(("", ""), ("🙂", ""), ("\u0301", ""), ("- -", "")),
    ],
)
def test_a_word_gives_a_name(word: str, name: str) -> None:
    """Letters of every script stay, in lower case; invisible characters and path separators do not."""
    assert name_of(word) == name


@pytest.mark.parametrize("char", ["x", "規", "\U00020000", "u\u0308\u0323", "नि"])
def test_a_long_name_is_cut_between_letters(char: str) -> None:
    """A file name with it has at most 255 bytes; no mark is separated from its letter."""
    name = name_of(char * 100)
    assert len(name) <= MAX_NAME and len(name.encode()) <= MAX_BYTES and is_name(name)
    whole = unicodedata.normalize("NFC", char)
    assert name == whole * (len(name) // len(whole)) and len(name) > 40


@given(st.text(max_size=100))
def test_any_word(word: str) -> None:
    """A name is a fixed point, in NFC, without blank, dot, slash, control or format character."""
    name = name_of(word)
    assert name_of(name) == name == unicodedata.normalize("NFC", name)
    assert is_name(name) == bool(name)
    assert all(char == "-" or unicodedata.category(char)[0] in "LMN" for char in name)
    assert not name.startswith("-") and not name.endswith("-") and "--" not in name


def test_names_that_some_system_takes_for_one_or_reserves() -> None:
    assert objection("masse", ["maße"]) and objection("ﬁles", ["files"])
    assert objection("rückgabe", ["ruckgabe", "rückgabe"]) is None
    assert objection("con", []) and objection("com1", []) and objection("console", []) is None
