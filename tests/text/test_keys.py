"""Tests names of fields, and references to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.erratum import Known, Reference, read_errata

NAMES = st.sampled_from(["returns", "support", "規則"])
FIELDS = st.sampled_from(["date", "Delivery time", "日期", "a-b", "GPT-4.1"])


def test_a_name_alone_is_enough_where_one_skill_has_it() -> None:
    """The skill may be named too; the key is the name alone."""
    known = Known([("returns", ["date", "tier"]), ("support", ["plan"])])
    assert list(known) == ["date", "tier", "plan"] and len(known) == 3
    for reference in ("date", "returns.date", "*.date", " returns . date"):
        assert known.resolve(reference) == [Reference("returns", "date", "date")]
    assert "support.date" not in known and "date" in known and 3 not in known


def test_case_is_no_typo() -> None:
    """Case is ignored if one field matches; an exact match comes first, two others are ambiguous."""
    known = Known([("returns", ["Owner", "Delivery time", "tier"]), ("support", ["Owner", "Tier", "Größe"])])
    (found,) = known.resolve("delivery TIME")
    assert found == Reference("returns", "Delivery time", "Delivery time") and "grÖsse" in known
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
    assert [(one.skill, one.field) for key in known for one in known.resolve(key)] == pairs
    owners = [skill for skill, name in pairs if name == field]
    assert [one.skill for one in known.find(f"*.{field}")] == [one.skill for one in known.find(field)] == owners
    if len(owners) != 1:
        with pytest.raises(SkillError):
            known.resolve(field)
