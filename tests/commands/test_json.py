"""docs/json.md names every key that the commands print, with its type, and none that they do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from samples import SAMPLES

from .. import stores
from .conftest import Notes

DOCUMENT = Path(__file__).parents[2] / "docs" / "json.md"
TYPES = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array of strings": (list,),
    "array of objects": (list,),
    "array of arrays": (list,),
    "array of 2 integers": (list,),
    "array of integers": (list,),
}


def documented(section: str) -> dict[str, tuple[type, ...]]:
    """Types of a section's keys: in its tables, in its text, and of a section that it names; objects have `version` and
    `warnings`."""
    keys: dict[str, str] = {}
    if base := re.search(r"^The keys of `([^`]+)`(?: but ((?:`[^`]+`(?:,\s)?)+))?", _text(section), re.M):
        keys |= {key.removeprefix("[]."): kind for key, kind in _kinds(base[1]).items()}
        for key in re.findall(r"`([^`]+)`", base[2] or ""):
            del keys[key]
    keys |= _kinds(section)
    if not any(key.startswith("[].") for key in keys):
        keys |= {"version": "integer", "warnings": "array of strings"}
    return {key: tuple(kind for name in types.split(" or ") for kind in TYPES[name]) for key, types in keys.items()}


def _text(section: str) -> str:
    return DOCUMENT.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]


def _kinds(section: str) -> dict[str, str]:
    """The keys that a section itself describes, by table or as `key` (type), and their types as they are written."""
    text = _text(section)
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", text, re.M)
    kinds = {key: kind for cell, kind in rows for key in re.findall(r"`([^`]+)`", cell)}
    prose = re.findall(r"`([^`]+)` \(([a-z0-9 ]+)\)", " ".join(re.sub(r"^\|.*", "", text, flags=re.M).split()))
    return kinds | {key: kind for key, kind in prose if all(name in TYPES for name in kind.split(" or "))}


def flat(value: Any, keys: dict[str, tuple[type, ...]], prefix: str = "") -> list[tuple[str, Any]]:
    """Yield key and value of every leaf; values documented as a whole, and empty ones, are leaves."""
    if prefix in keys:
        return [(prefix, value)]
    if value in ({}, []) and not any(key.startswith((f"{prefix}.", f"{prefix}[]")) for key in keys):
        return [(prefix, value)]
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in flat(part, keys, f"{prefix}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [leaf for part in value for leaf in flat(part, keys, f"{prefix}[]")]
    return [(prefix, value)]


ASK = "ask Why? -n 2 --json"
# Sections of the document, or "" for what a later command needs, and command lines, in one home and in this order.
COMMANDS = (
    ("ask --json", f"{ASK} --splice returns --erratum tier=b -s x"),
    ("ask --json", "ask Why? --splice returns --choices a,b --json"),
    ("ask --json", ASK),
    ("ask --json", f"{ASK} --think --max-think 3"),
    ("ask --json", f"{ASK} --splice returns --field tier=basic"),
    ("verify --json", "verify returns --choices a,b --erratum tier=basic --json"),
    ("verify --json", "verify returns --question Why? --json"),
    ("verify --json", "verify returns {samples}/support --question Why? --json"),
    ("verify --field --json", "verify returns --field tier=b --json"),
    ("bench --json", "bench -m notes-tiny --tokens 8 --runs 2 --json"),
    ("", "ask Why? --splice returns --session mine -n 2"),
    ("edit --json", "edit mine --field date=2026-07-01 --json"),
    ("ask --json", f"{ASK} --session mine"),
    ("verify --session --json", "verify --session mine --json"),
    ("session ls --json", "session ls --json"),
    ("session show --json", "session show mine --json"),
    ("session fork --json", "session fork mine other --json"),
    ("session export --json", "session export other {folder}/other.notes.tar --json"),
    ("session forget --json", "session forget mine 2 --method suffix --dry-run --json"),
    ("session forget --json", "session forget mine 1 --json"),
    ("session compact --json", "session compact mine --json"),
    ("session undo --json", "session undo mine --json"),
    ("edit --all --json", "edit --all --field tier=basic --json"),
    ("session rm --json", "session rm other -y --json"),
    ("session import --json", "session import {folder}/other.notes.tar --json"),
    ("ls --json", "ls --json"),
    ("inspect --json", "inspect returns --json"),
    ("export --json", "export returns {folder}/returns.gguf --json"),
    ("import --json", "import {folder}/returns.gguf --name other --json"),
    ("compile --json", "compile {samples}/returns --json --name third"),
    ("compile --json", "compile --from returns --blocks 2 --json"),
    ("rm --json", "rm returns --dry-run --json"),
    ("rm --json", "rm returns --json"),
    ("rm --json", "rm --older-than 0s --dry-run --json"),
    ("rm --json", "rm --older-than 0s -y --json"),
    ("models --json", "models --json"),
    ("doctor --json", "doctor --json"),
    ("init --json", "init {folder}/samples --json"),
    ("config show --json", "config show --json"),
)


def test_keys_are_those_of_the_document(notes: Notes, model: Path, compiled: Path, tmp_path: Path) -> None:
    """Exactly the documented keys, each of the documented type."""
    stores.hub(Path.home() / ".cache" / "huggingface" / "hub", "me/mine", {"mine-Q8_0.gguf": model})
    places = {"folder": tmp_path, "samples": SAMPLES}
    for section, line in COMMANDS:
        outcome = notes(*line.format(**places).split())
        if section:
            keys = documented(section)
            found = flat(outcome.json, keys)
            assert {key for key, _ in found} == set(keys), line
            assert not [key for key, value in found if type(value) not in keys[key]], line
        else:
            assert outcome.code == 0, line


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["ask", "Why?", "--splice", "nothing", "--json"], 1),
        (["ask", "--json", "Why?", "--temp", "nan"], 2),
        (["ls", "--json", "too", "many"], 2),
        (["session", "show", "nobody", "--json"], 1),
        (["frobnicate", "--json"], 2),
        (["inspect", "x", "--json", "--tokens"], 2),
    ],
)
def test_errors_are_json_too(notes: Notes, arguments: list[str], status: int) -> None:
    """Refused or wrong usage: one document of the documented keys on stdout, the same line for people on stderr."""
    outcome = notes(*arguments)
    keys = documented("Errors")
    assert outcome.code == status
    assert {key for key, _ in flat(outcome.json, keys)} == set(keys)
    assert outcome.err == f"notes: {outcome.json['error']['message']}\n"
    assert outcome.json["error"]["status"] == status


def test_a_failure_is_reported_once(notes: Notes) -> None:
    """doctor with a problem, a question that is called --json: no second document, none at all."""
    found = notes("doctor", "-m", "/nowhere.gguf", "--json")
    assert found.code == 1 and found.json["problems"]
    assert notes("ask", "--splice", "nothing", "--", "--json").out == ""


def test_explain_has_the_keys_of_ask(notes: Notes, compiled: Path) -> None:
    """version, warnings, server, tokens without the answer's, settings and pieces; nothing else."""
    found = notes("ask", "Why?", "--splice", "returns", "--explain", "--json").json
    settled = {"method", "method_why", "place", "seam", "wording"}
    assert found.keys() == {"version", "warnings", "server", "tokens", "pieces", *settled}
    known = {key for key in documented("ask --json") if key.startswith("tokens.")}
    assert {f"tokens.{key}" for key in found["tokens"]} == known - {"tokens.answer", "tokens.reasoning"}


def test_times_add_up(notes: Notes, compiled: Path) -> None:
    """Stages nest as documented; the identity's keys are documented too."""
    ms = notes("ask", "Why?", "--splice", "returns", "-n", 2, "--json").json["ms"]
    assert 0 < ms["splice"] <= ms["prompt"] <= ms["first_token"] <= ms["total"]
    assert ms["load"] + ms["first_token"] <= ms["total"]
    for key in notes("ls", "--json").json[0]["identity"]:
        assert f"`{key}`" in DOCUMENT.read_text()
