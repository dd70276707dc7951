"""Tests parsing errata as fields or free text, references to fields, and the wordings."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.erratum import (
    Erratum,
    Known,
    Reference,
    known_fields,
    language_forms,
    language_of,
    parse_erratum,
    read_errata,
    shipped_wordings,
    word,
)
from notes_cli.text.fields import Field
from notes_cli.text.skill import Skill, parse_skill

KNOWN = {"date", "tier", "日期", "Delivery time", "Größe", "returns.date"}
NAMES = st.sampled_from(["returns", "support", "規則"])
FIELDS = st.sampled_from(["date", "Delivery time", "日期", "a-b", "GPT-4.1"])
TWO = Known([("returns", ["date", "tier"]), ("support", ["date"])])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (" date = a=b ", "date", "a=b"),  # all after the first equals sign
        ("date: 2026-07-01", "date", "2026-07-01"),  # as a line of a text
        *(("date : at 10:30=late", "date", "at 10:30=late"), ("date=a: b", "date", "a: b")),
        ("date=Monday, at 10:30; or later", "date", "Monday, at 10:30; or later"),
        ("date=1, x=2", "date", "1, x=2"),  # x is no field
        *(("日期\uff1a2026-07-01", "日期", "2026-07-01"), ("日期=5", "日期", "5")),
        *(("Delivery  time: 5 days", "Delivery time", "5 days"), ("Delivery  time = 5", "Delivery time", "5")),
        ("Gro\u0308\u00dfe=5", "Größe", "5"),
    ],
)
def test_a_known_field(text: str, name: str, value: str) -> None:
    """A name has several words in any script, and is followed by its value."""
    assert parse_erratum(text, KNOWN) == Erratum(name, value, text.strip())


@pytest.mark.parametrize(
    "text",
    [
        *("The shop moved.", "Closed today: 1 May", "the date: 2026-07-01", "See a.b: it moved", "a.b.c: moved"),
        *("Note: the date is wrong.", "note : we now say x=1", "Note\uff1a1+1=2", "Note: data=2026-07-01"),
    ],
)
def test_free_text(text: str) -> None:
    """A sentence, also one with a colon, and anything after `Note:`, which the model does not see."""
    assert parse_erratum(text, KNOWN) == Erratum(None, None, text)
    assert read_errata([text], TWO) == [Erratum(None, None, text)]
    assert word(Erratum(None, None, text)) == "Correction: " + re.sub("(?i)^note ?[:\uff1a] ?", "", text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "is empty") for text in ("", "  ")),
        *((text, "value") for text in ("date=", "date= ", "date:", "date", " tier ")),
        ("date=a\nb", "more than one line"),
        *((text, "names no field") for text in ("=x", " = x")),
        *((text, "and 'tier' another one") for text in ("date: 2026-07-01; tier: silver", "date=1, tier : silver")),
        *((text, "begins with =") for text in ("tier==silver", "tier: =silver")),
        # A typo, another case, an empty name, braces: it would leave the old value uncorrected.
        *((text, "Known fields: ") for text in ("data=2026-07-01", "returns.data=1", "support.plan=team", "*.data=1")),
        *((text, "Known fields: ") for text in ("Delivry time=5 days", "Grösse=5", "価格=5", "DELIVERY TIME=5 days")),
        *((text, "has a field") for text in ("RETURNS.date=x", "Returns.tier=x", "returns.=x", "returns..date=x")),
        *((text, "has a field") for text in (".date=x", "*.=x", "{{date}}=x")),
        *((text, 'Begin words of your own with "Note:"') for text in ("We now say x=1", "Time of day = 5", "A rose=2")),
        *((text, "has a field") for text in ("1+1=2", "see config.yaml=yes", "Delivry time: 5", "dates: wrong")),
        *((text, "has a field") for text in ("Date: 2026-07-01", "DATE: 1", "returns.Date: 1")),
    ],
)
def test_what_is_no_correction_is_refused(text: str, says: str) -> None:
    """An erratum names its field, and its value is one line; what resembles a field is not parsed as a sentence."""
    with pytest.raises(SkillError, match=says):
        parse_erratum(text, KNOWN)
    with pytest.raises(SkillError, match="Known fields: none"):
        parse_erratum("data=1", ())


@pytest.mark.parametrize("between", [" ", ", ", "; ", ", and ", " and "])
def test_a_value_with_another_fields_value(between: str) -> None:
    """Any separator between the two is detected: otherwise one would become part of the other."""
    known = Known([("returns", ["date", "tier", "Delivery time"])])
    for text in ("date=2026-07-01", "date: 2026-07-01"):
        for other in ("tier", "Delivery time", "returns.tier"):
            with pytest.raises(SkillError, match=f"gives 'date' a value, and '{other}' another one.*Write an erratum"):
                parse_erratum(f"{text}{between}{other}=silver", known)


def test_a_long_value_is_looked_through_once() -> None:
    """The time does not grow with the square of its equals signs."""
    value = "x = " * 20_000
    assert parse_erratum(f"date={value}", KNOWN).value == value.strip()
    with pytest.raises(SkillError, match="gives 'date' a value, and 'tier' another one"):
        parse_erratum(f"date={value}tier=gold", KNOWN)


@pytest.mark.parametrize(
    ("text", "skills"),
    [
        *(("returns.date=1", ["returns"]), ("support.date = 1", ["support"]), ("*.date=1", ["returns", "support"])),
        *((text, [""]) for text in ("tier=1", "returns.tier=1", "*.tier=1", " returns . tier = 1")),
    ],
)
def test_whose_field_it_is(text: str, skills: list[str]) -> None:
    """The skill is named if several have the field, and only then."""
    errata = read_errata([text], TWO)
    assert [erratum.skill for erratum in errata] == skills
    for erratum in errata:
        of = f" of {erratum.skill}" if erratum.skill else ""
        assert word(erratum).startswith(f"Correction: the {erratum.field}{of} is now 1. This replaces the earlier")


def test_the_names_that_come_near() -> None:
    """Those that begin with the wrong one, else those with a few other letters."""
    known = Known([("leave", ["Annual leave Notice", "Annual leave Days per year", "Badge fee", "Bag fee"])])
    for wrong, near in (
        ("Annual leave", "Annual leave Notice or Annual leave Days per year"),
        ("Bagde fee", "Badge fee or Bag fee"),
    ):
        with pytest.raises(SkillError, match=f"no spliced skill has a field '{wrong}'. Did you mean {near}\\?"):
            read_errata([f"{wrong}=32 days"], known)


def test_case_is_no_typo() -> None:
    """Case is ignored if one field matches; an exact match comes first, two others are ambiguous."""
    known = Known([("returns", ["Owner", "Delivery time", "tier"]), ("support", ["Owner", "Tier", "Größe"])])
    (found,) = known.resolve("delivery TIME")
    assert found == Reference("returns", "Delivery time", "Delivery time") and "grÖsse" in known and 3 not in known
    assert [one.key for one in known.resolve("*.owner")] == ["returns.Owner", "support.Owner"]
    assert known.resolve("support.owner")[0].key == "support.Owner"
    assert [one.key for one in known.resolve("tier")] == ["tier"] and known.resolve("support.tier")[0].field == "Tier"
    with pytest.raises(SkillError, match=r"name one of returns\.Owner, support"):
        known.resolve("owner")
    for name, near in (("TIER", "(t|T)ier"), ("ownr", "(returns|support)\\.Owner"), ("delivery", "Delivery time")):
        with pytest.raises(SkillError, match=f"Did you mean {near}\\? Known fields: "):
            known.resolve(name)
    (erratum,) = read_errata(["delivery time: 5 days"], known)
    assert (erratum.field, erratum.value, erratum.key) == ("Delivery time", "5 days", "Delivery time")


@given(st.dictionaries(NAMES, st.lists(FIELDS, max_size=3, unique=True)), FIELDS)
def test_every_field_has_one_key(skills: dict[str, list[str]], field: str) -> None:
    """The key finds only its field; `*.` finds all of a name; a name that several have is refused."""
    known = Known(skills.items())
    pairs = [(skill, name) for skill, names in skills.items() for name in names]
    assert [(one.skill, one.field) for key in known for one in known.resolve(key)] == pairs and len(known) == len(pairs)
    owners = [skill for skill, name in pairs if name == field]
    assert [one.skill for one in known.find(f"*.{field}")] == [one.skill for one in known.find(field)] == owners
    if len(owners) != 1:
        with pytest.raises(SkillError):
            known.resolve(field)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(("date=1", r"name one of returns.date, support.date, or all: \*.date"), ("*.date =", "has no value")),
        ("refunds.date=1", r"a field 'refunds.date'. Did you mean returns.date\? Known fields: returns.date, support"),
        *(("support.tier=1", "has a field 'support.tier'"), ("*.day=1", r"has a field '\*.day'")),
    ],
)
def test_a_field_of_several_skills_is_not_guessed(text: str, says: str) -> None:
    with pytest.raises(SkillError, match=says):
        read_errata([text], TWO)


def test_wordings() -> None:
    """The default is what the shipped model is trained on, `state` the author's; all are whole, and braces stay."""
    date = Erratum("date", "2026-07-01", "")
    sentence = "Correction: the date is now 2026-07-01. This replaces the earlier date."
    assert word(date) == word(date, "now") == sentence
    assert word(parse_erratum("We moved.", KNOWN)) == "Correction: We moved."
    assert word(date, "state") == (
        "[STATE UPDATE] date has changed to 2026-07-01; this overrides any earlier value AND any earlier conclusion. "
        "Apply the current value."
    )
    wordings = shipped_wordings()
    assert wordings["default"] in wordings["wordings"]
    assert all("{field}" in form and "{value}" in form for form in wordings["wordings"].values())
    for wrong in ("loud", "the new {value}", "{field}: {text}"):
        with pytest.raises(SkillError, match=r"Known wordings: now, changed.*; or a sentence with {field} and {value}"):
            word(Erratum("a", "b", ""), wrong)
    assert word(date, "From now on {value} for {field}, {skill}") == "From now on 2026-07-01 for date, {skill}"
    assert word(Erratum("date", "{field}{0}{text}", ""), "line") == "Correction. date: {field}{0}{text}"
    assert word(Erratum(None, None, "{text} {value}")) == "Correction: {text} {value}"


TEXTS = {
    "en": "# Shop\n\nDelivery time: 3 days\n\nWe ship with the post, and take back what is not used.",
    "de": "# Laden\n\nLieferzeit: 3 Tage\n\nWir liefern mit der Post und nehmen zuru\u0308ck, was nicht benutzt ist.",
    "es": "# Tienda\n\nPlazo: 3 días\n\nEnviamos por correo y aceptamos la devolución en la tienda.",
    "fr": "# Boutique\n\nDélai : 3 jours\n\nNous livrons par la poste et les retours sont acceptés.",
    "pt": "# Loja\n\nPrazo: 3 dias\n\nEnviamos pelo correio e não aceitamos a devolução do que está usado.",
    "ru": "# Лавка\n\nДень: 3 июня\n\nНужны ли билеты? Да, были бы они дёшевы.",  # noqa: RUF001
    "ar": "# متجر\n\nمدة: 3 يوم\n\nنحن نقبل كل شيء.",
    "zh": "# 商店\n\n配送时间\uff1a3 天\n\n我们接受退货\u3002API: `GET /v1/orders of the shop` is JSON\u3002",
    "ja": "# 店\n\n配送時間\uff1a3日\n\n返品は店で受け付けます\u3002",
    "ko": "# 매장\n\n배송 기간: 3일\n\n반품은 매장에서 받습니다.",
}


def test_the_language_of_the_skill() -> None:
    """The ten languages are recognized. Other languages, and texts of data, get the English wording."""
    assert {language: language_of(text) for language, text in TEXTS.items()} == {name: name for name in TEXTS}
    for text in (
        *("", "date: 2026-06-01", "die: 5\nla: 4", "Ціна: 5. Ми приймаємо повернення", "Цена: 5", "قیمت: 5 پوند"),
        *("Butiken är öppen och det är gratis.", "Il negozio è aperto e gli ordini sono spediti con la posta."),
        "Use `der die das und ist nicht` in the text\n```\nder die das und ist nicht mit\n```",
    ):
        assert language_forms(text)["free"] == "Correction: {text}" and "now" not in language_forms(text), text
    for name in TEXTS:
        forms = language_forms(TEXTS[name])
        assert name == "en" or ("{field}" in forms["now"] and "{value}" in forms["now"])
        assert "{text}" in forms["free"] and "{skill}" in forms["of"], name


# Of a text in each language: prose, and fields with an old and a new value.
SKILLS = {
    "zh": "我们接受退货\u3002 配送时间=3天/5天 运费=9元/12元 退货期限=30天/14天 电话=5550142/5550199 经理=李伟/王芳",
    "de": "Wir_nehmen_zurück,_was_nicht_benutzt_ist. Lieferzeit=3_Tage/5_Tage Versand=9_Euro/12_Euro "
    "Rückgabefrist=30_Tage/14_Tage Telefon=5550142/5550199 Leiterin=Frau_Weber/Frau_Koch",
    "es": "Aceptamos_la_devolución_en_la_tienda_y_no_por_correo. Plazo=3_días/5_días Envío=9_euros/12_euros "
    "Garantía=30_días/14_días Teléfono=5550142/5550199 Gerente=Ana_Ruiz/Luis_Gil",
    "ja": "返品は店で受け付けます\u3002 配送時間=3日/5日 送料=900円/1200円 "
    "返品期限=30日/14日 電話番号=5550142/5550199 店長=佐藤/鈴木",
}


@pytest.mark.parametrize("language", SKILLS)
def test_five_corrections_in_the_language_of_the_skill(language: str) -> None:
    prose, *lines = SKILLS[language].split()
    fields = {name: values.replace("_", " ").split("/") for name, values in (line.split("=") for line in lines)}
    text = "\n".join([prose.replace("_", " "), "", *(f"- {name}: {old}" for name, (old, _) in fields.items())])
    skill = parse_skill(text, source="-", default="shop")
    errata = read_errata([f"{name}={new}" for name, (_, new) in fields.items()], known_fields(skill))
    form = shipped_wordings()["languages"][language]["now"]
    stated = [form.replace("{field}", name).replace("{value}", new) for name, (_, new) in fields.items()]
    assert [word(erratum, None, skill) for erratum in errata] == stated


def test_an_erratum_in_the_language_of_its_skill() -> None:
    """A named wording stays English, one of one's own as it is; a place comes with its sentence."""
    text = "Wir sind bis 17 Uhr da. Die Frist ist am 5. des Monats. Mehr steht hier."
    skill = Skill("laden", "", text, (Field('"17 Uhr"', "17 Uhr", 13, 19),), "")
    assert word(Erratum("Frist", "9 Tage", ""), None, skill) == (
        "Korrektur: Frist ist jetzt 9 Tage. Das ersetzt die frühere Angabe."
    )
    assert word(Erratum("Frist", "9", "", "laden"), "now", skill).startswith("Korrektur: Frist von laden ist jetzt 9.")
    assert word(Erratum(None, None, "Note: Neu."), None, skill) == "Korrektur: Neu."
    assert word(Erratum("Frist", "9", ""), "changed", skill) == "Update: the Frist has changed to 9."
    place = Erratum('"17 Uhr"', "18 Uhr", "")
    assert word(place, None, skill) == "Korrektur: Wir sind bis 18 Uhr da."
    assert word(place, "{field} -> {value}", skill) == '"17 Uhr" -> 18 Uhr'
