"""Tests values that errata name by their text: `OLD => NEW`."""

from __future__ import annotations

import unicodedata

import pytest

from notes_cli.errors import SkillError
from notes_cli.text.erratum import known_fields, read_errata
from notes_cli.text.fields import find_fields, parse_values
from notes_cli.text.quotations import name_quoted
from notes_cli.text.skill import Skill

PAY = """# Payroll

Pay day: the 27th

Salaries are paid on the last Friday. Claims are due by the 5th of
  the month. The office closes at 17:00 on Friday and at 12:00 on Sunday.
The fee is 5.50 EUR, or 5 EUR for members. `mode=fast` is the "usual way".

A café. Een pre-order. 每月27日发工资\u3002"""


def skill(name: str, body: str) -> Skill:
    text, fields, _ = find_fields(body, {})
    return Skill(name, "", text, fields, "")


SKILLS = [skill("pay", PAY), skill("leave", "Leave is approved by the last Friday.\n\nOwner: Anna Berg\n")]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        # A place of its own: whole words and numbers, over the end of a line, in any script, with signs of errata.
        *(("17:00 => 18:00", '"17:00"', "18:00"), ("17:00=>18:00", '"17:00"', "18:00"), ("5 => 6", '"5"', "6")),
        ("by the  5th of the month => by the 6th", '"by the 5th of the month"', "by the 6th"),
        *(("27日 => 28日", '"27日"', "28日"), ("mode=fast => mode=slow", '"mode=fast"', "mode=slow")),
        *(("cafe\u0301 => bar", '"café"', "bar"), ('"café" => "bar"', '"café"', "bar")),
        *(('"usual way" => "new way"', "\"'usual way'\"", '"new way"'), ("5 EUR => a=b", '"5 EUR"', "a=b")),
        ("pay.the last Friday => Monday", '"the last Friday"', "Monday"),
        ("paid on the last Friday => paid on Monday", '"paid on the last Friday"', "paid on Monday"),
        # In the value of a field, which gets the rest of its value, too.
        *((text, "Pay day", "the 28th") for text in ("the 27th => the 28th", "27th => 28th")),
        *(("Pay day: the 27th => Pay day: the 28th", "Pay day", "the 28th"), ("Anna Berg => Bo Li", "Owner", "Bo Li")),
        # As before: fields, and free text.
        *(("Owner=>Bo", "Owner", ">Bo"), ("Owner=a => b", "Owner", "a => b"), ("Note: a => b", "", "Note: a => b")),
    ],
)
def test_a_value_named_by_its_text(text: str, key: str, value: str) -> None:
    named, _, added = name_quoted([text], {}, SKILLS)
    skills = [Skill(one.name, "", one.text, added.get(one.name, one.fields), "") for one in SKILLS]
    (erratum,) = read_errata(named, known_fields(*skills))
    assert (erratum.field or "", erratum.value or erratum.text) == (key, value)
    assert bool(added) == key.startswith('"')
    for one in skills:
        assert all(one.text[field.start : field.end] == field.value for field in one.fields)
    if added:  # the same once more, as a session has it, and the other forms of the same
        (field,) = [field for one in skills for field in one.fields if field.name == key]
        assert unicodedata.normalize("NFC", " ".join(field.value.split())) == key[1:-1].replace("'", '"')
        assert name_quoted([text], {}, skills)[2] == {} and name_quoted([text], {}, skills)[0] == named
        if " => " in text:
            assert name_quoted((), parse_values([text]), SKILLS)[1] == {named[0].split('"=')[0] + '"': value}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "is not an old text and a new one") for text in ("=>", "a =>", " => b", "a => b => c")),
        ("the last Friday => Monday", r'2 places: pay line 5: "Salaries are .*; leave line 1: .*pay.the last Friday'),
        ("the => a", r'places: pay line 3: "Pay day: the 27th"; pay line 5: .*Quote more of the line'),
        ("the 29th => x", r'no spliced skill has the text .*The lines that come near: pay line 3: "Pay day: the 27th"'),
        *((text, "no spliced skill has the text") for text in ("cafe => x", "order => x", "50 => x", "17 => x")),
        ("Pay day => the 28th", "'Pay day' is the name of a field. Write Pay day=the 28th, or quote more"),
        ("Pay day: the 27th => the 28th", "holds the value of field 'Pay day'. Write Pay day=VALUE"),
        ("Owner: Anna Berg => Owner: ", "holds the value of field 'Owner'"),
    ],
)
def test_a_text_that_names_no_value(text: str, says: str) -> None:
    with pytest.raises(SkillError, match=says):
        name_quoted([text], {}, SKILLS)


def test_two_texts_of_one_place() -> None:
    with pytest.raises(SkillError, match="two corrections are of the same place"):
        name_quoted(["17:00 => 18:00", "17:00 on Friday => 18:00 on Friday"], {}, SKILLS)
