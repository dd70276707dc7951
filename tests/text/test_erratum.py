"""Tests parsing errata as fields or free text, and their wordings."""

from __future__ import annotations

import pytest

from notes_cli.errors import SkillError
from notes_cli.text.erratum import Erratum, of_fields, parse_erratum, read_errata, shipped_wordings, word
from notes_cli.text.keys import Known

KNOWN = {"date", "tier"}


def test_a_known_field() -> None:
    """The value is everything after the first equals sign."""
    assert parse_erratum(" date = a=b ", KNOWN) == Erratum("date", "a=b", "date = a=b")


def test_a_line_of_a_text() -> None:
    """The line of a field is accepted; a colon after other words is free text."""
    known = {"date", "日期", "Delivery time"}
    for text, name, value in (
        ("date: 2026-07-01", "date", "2026-07-01"),
        ("date : at 10:30=late", "date", "at 10:30=late"),
        ("日期\uff1a2026-07-01", "日期", "2026-07-01"),
        ("Delivery  time: 5 days", "Delivery time", "5 days"),
        ("date=a: b", "date", "a: b"),
    ):
        assert parse_erratum(text, known) == Erratum(name, value, text)
    for text in ("Note: the date is wrong.", "dates: all wrong", "the date: 2026-07-01"):
        assert parse_erratum(text, known) == Erratum(None, None, text)
    with pytest.raises(SkillError, match="no value"):
        parse_erratum("date:", known)


@pytest.mark.parametrize("text", ["The shop moved.", "We now say x=1 everywhere.", "1+1=2"])
def test_free_text(text: str) -> None:
    """A sentence with an equals sign remains a sentence."""
    assert parse_erratum(text, KNOWN) == Erratum(None, None, text)


def test_names_as_people_write_them() -> None:
    """Names have several words in any script; words that nearly match a name are a typo, others free text."""
    known = {"Delivery time", "日期", "Größe"}
    for text, name in [("Delivery  time = 5", "Delivery time"), ("日期=5", "日期"), ("Gro\u0308\u00dfe=5", "Größe")]:
        assert parse_erratum(text, known) == Erratum(name, "5", text)
    for text in ("Delivry time=5 days", "Grösse=5", "価格=5"):
        with pytest.raises(SkillError, match="Known fields: Delivery time, Größe, 日期"):
            parse_erratum(text, known)
    for text in ("The shop says x=5", "Time of day = 5", "1=2", "a.b.c: x=5"):
        assert parse_erratum(text, known) == Erratum(None, None, text)


def test_an_unknown_field_names_the_known() -> None:
    """A typo is not parsed as a sentence."""
    with pytest.raises(SkillError, match="Known fields: date, tier"):
        parse_erratum("data=2026-07-01", KNOWN)
    for text in (
        "returns.data=1",
        "support.plan=team",
        "*.data=1",
    ):  # whether the skill has another field or is not there
        with pytest.raises(SkillError, match="Known fields: date, tier"):
            parse_erratum(text, KNOWN)
    with pytest.raises(SkillError, match="Known fields: none"):
        parse_erratum("data=1", ())


@pytest.mark.parametrize("text", ["", "  ", "date=", "date= ", "date=a\nb", "date", " tier ", "=x", " = x"])
def test_empty_and_many_lined_values_are_refused(text: str) -> None:
    """An erratum names its field, and its value is one line."""
    with pytest.raises(SkillError):
        parse_erratum(text, KNOWN)


TWO = Known([("returns", ["date", "tier"]), ("support", ["date"])])


@pytest.mark.parametrize(
    ("text", "skills"),
    [
        ("returns.date=1", ["returns"]),
        ("support.date = 1", ["support"]),
        ("*.date=1", ["returns", "support"]),
        ("tier=1", [""]),
        ("returns.tier=1", [""]),
        ("*.tier=1", [""]),
    ],
)
def test_whose_field_it_is(text: str, skills: list[str]) -> None:
    """The skill is named if several have the field, and only then."""
    errata = read_errata([text], TWO)
    assert [erratum.skill for erratum in errata] == skills
    for erratum in errata:
        of = f" of {erratum.skill}" if erratum.skill else ""
        assert word(erratum).startswith(f"Correction: the {erratum.field}{of} is now 1. This replaces the earlier")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("date=1", r"several skills have a field 'date': name one of returns.date, support.date, or all: \*.date"),
        ("refunds.date=1", r"a field 'refunds.date'. Did you mean returns.date\? Known fields: returns.date, support"),
        ("support.tier=1", "no spliced skill has a field 'support.tier'"),
        ("*.day=1", r"no spliced skill has a field '\*.day'"),
        ("*.date =", "has no value"),
    ],
)
def test_a_field_of_several_skills_is_not_guessed(text: str, says: str) -> None:
    """The error lists the alternatives."""
    with pytest.raises(SkillError, match=says):
        read_errata([text], TWO)


@pytest.mark.parametrize(
    "text",
    [
        *("RETURNS.date=x", "Returns.tier=x", "returns.=x", "returns..date=x", ".date=x", "*.=x", "{{date}}=x"),
        "DELIVERY TIME=5 days",
    ],
)
def test_what_is_written_as_a_field_is_not_taken_for_words(text: str) -> None:
    """In another case, with an empty name or in braces it would leave the old value uncorrected."""
    with pytest.raises(SkillError, match="has a field"):
        parse_erratum(text, {"date", "tier", "returns.date", "Delivery time"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tier==silver", "begins with ="),
        ("tier: =silver", "begins with ="),
        ("date=2026-07-01, tier=silver", "Write an erratum for each"),
        ("date: 2026-07-01; tier: silver", "Write an erratum for each"),
    ],
)
def test_a_value_that_is_more_than_one(text: str, message: str) -> None:
    """The second correction would be part of the first one's value."""
    with pytest.raises(SkillError, match=message):
        parse_erratum(text, KNOWN)
    assert parse_erratum("date=Monday, at 10:30; or later", KNOWN).value == "Monday, at 10:30; or later"


def test_dots_in_words() -> None:
    """A dot alone does not make a reference."""
    for text in ("see config.yaml=yes", "See a.b: x=1", "Version 1.2 = old"):
        assert read_errata([text], TWO) == [Erratum(None, None, text)]


def test_the_default_wording() -> None:
    """It is the exact sentence that the shipped model is trained on."""
    erratum = parse_erratum("date=2026-07-01", KNOWN)
    sentence = "Correction: the date is now 2026-07-01. This replaces the earlier date."
    assert word(erratum) == word(erratum, "now") == sentence
    assert word(parse_erratum("We moved.", KNOWN)) == "Correction: We moved."


def test_braces_of_a_user_stay() -> None:
    """Values are not filled in again."""
    assert word(Erratum("date", "{field}{0}{text}", ""), "line") == "Correction. date: {field}{0}{text}"
    assert word(Erratum(None, None, "{text} {value}")) == "Correction: {text} {value}"


def test_the_authors_wording() -> None:
    """As in the author's experiments, word by word."""
    said = word(Erratum("date", "2026-07-01", ""), "state")
    assert said == (
        "[STATE UPDATE] date has changed to 2026-07-01; this overrides any earlier value AND any earlier conclusion. "
        "Apply the current value."
    )


def test_an_unknown_wording_names_the_known() -> None:
    """The names are those of prompts/errata.json."""
    with pytest.raises(SkillError, match="Known wordings: now, changed"):
        word(Erratum("a", "b", ""), "loud")
    assert all(word(Erratum("a", "b", ""), name) for name in shipped_wordings().forms)


def test_the_wordings_that_ship_are_whole() -> None:
    """Each has its slots, and the default is one of them."""
    wordings = shipped_wordings()
    assert wordings.default in wordings.forms and "{text}" in wordings.free
    assert "{field}" in wordings.of and "{skill}" in wordings.of
    assert all("{field}" in form and "{value}" in form for form in wordings.forms.values())


@pytest.mark.parametrize("between", [" ", ", ", "; ", ", and ", " and "])
def test_a_value_with_another_fields_value(between: str) -> None:
    """Any separator between the two is detected: otherwise one would become part of the other."""
    for other in ("tier", "Delivery time", "returns.tier"):
        known = Known([("returns", ["date", "tier", "Delivery time"])])
        with pytest.raises(SkillError, match=f"gives 'date' a value, and '{other}' another one"):
            parse_erratum(f"date=2026-07-01{between}{other}=silver", known)
    assert parse_erratum(f"date=1{between}x=2", KNOWN).value == f"1{between}x=2"


def test_a_field_and_its_value_are_no_words() -> None:
    """Fields from a program are looked up as they are."""
    for errata in ({"shipping fee": "2"}, {"date: x": "1"}):
        with pytest.raises(SkillError, match="no spliced skill has a field"):
            parse_erratum(*of_fields(errata), KNOWN)
    for wrong in ({"": "x"}, {"a=b": "x"}):
        with pytest.raises(SkillError, match="no field is called so"):
            of_fields(wrong)


@pytest.mark.parametrize("text", ["Date: 2026-07-01", "DATE: 1", "returns.Date: 1"])
def test_a_line_in_another_case_is_no_words(text: str) -> None:
    """As with an equals sign, the field has the name of the text."""
    with pytest.raises(SkillError, match="no spliced skill has a field"):
        parse_erratum(text, KNOWN)


def test_a_long_value_is_looked_through_once() -> None:
    """The time does not grow with the square of its equals signs."""
    value = "x = " * 20_000
    assert parse_erratum(f"date={value}", KNOWN).value == value.strip()
    with pytest.raises(SkillError, match="gives 'date' a value, and 'tier' another one"):
        parse_erratum(f"date={value}tier=gold", KNOWN)
