"""A request from plain words: texts, numbers and lists, as a command line or another process has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from notes_cli.engine.sampler import SamplerOptions
from notes_cli.runtime.asking import ENDLESS, Request
from notes_cli.runtime.corrections import parse_values
from notes_cli.runtime.settings import method_named


class RequestFields(TypedDict):
    """The fields of Request, where nothing has been looked up yet. All of it can be written as JSON."""

    question: str
    results: Sequence[tuple[str, str]]  # in the place of a question: name of a tool, and what it returned
    splice: Sequence[str]
    images: Sequence[str]
    errata: Sequence[str]
    fields: Sequence[str]  # NAME=VALUE
    method: str | None
    system: str | None
    think: bool
    max_think: int
    choices: Sequence[str] | None
    max_tokens: int  # of the answer; below 0: until the answer or the context ends
    sampling: dict[str, float]
    seam: int | None
    place: str | None
    wording: str | None
    recompute: bool
    decode: Sequence[str]
    strict: bool
    exact: bool
    json_schema: Any
    grammar: str | None


def read_request(words: RequestFields) -> Request:
    """Raise NotesError for what cannot be meant."""
    fields, method = parse_values(words["fields"]), words["method"]
    return Request(
        question=words["question"],
        results=words["results"],
        splice=words["splice"],
        images=words.get("images", ()),  # another process may be older
        errata=words["errata"],
        fields=fields,
        method=method_named(method and str(method)),
        system=words["system"],
        think=words["think"],
        max_think=words["max_think"],
        choices=words["choices"],
        max_tokens=ENDLESS if words["max_tokens"] < 0 else words["max_tokens"],
        sampling=SamplerOptions(**words["sampling"]),  # type: ignore[arg-type]
        seam=words["seam"],
        place=words["place"],
        wording=words["wording"],
        recompute=words["recompute"],
        decode=words["decode"],
        strict=words["strict"],
        exact=words["exact"],
        json_schema=words["json_schema"],
        grammar=words["grammar"],
    )
