"""The edit methods: each changes exactly its KV entries, and the tokens are those of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from samples import with_values

import notes_cli as notes
from notes_cli.editing.methods import (
    METHODS,
    Change,
    Method,
    change,
)
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, UnsupportedError
from notes_cli.explanations import why
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeModel
from ..engine.reference import edit_in_place, nmse
from ..refused import refused
from .conftest import OpenWorkspace, skill_of

BOUND = {"f32": 1e-6, "f16": 1e-5}
QUESTION = "Why?"
NEW = {"date": "2026-07-01"}
TOUCHING = ["field", "field+erratum"]


@dataclass
class Decoded:
    """An assembled and decoded prompt: the sequence, its K/V side by side, and the logits at its end."""

    seq: KVSequence
    rows: NDArray[np.float32]  # a row a token: K and V of all layers
    logits: NDArray[np.float32]

    @property
    def start(self) -> int:
        """The position where the skill begins."""
        return next(piece.position for piece in self.seq.pieces if piece.kind == "splice")

    @property
    def end(self) -> int:
        """The position where it ends."""
        return max(piece.position + piece.tokens for piece in self.seq.pieces if piece.kind == "splice")


def rows_of(workspace: Workspace, count: int) -> NDArray[np.float32]:
    layers = workspace.context.read(0, 0, count, base=0, dtype=workspace.options.type_k)
    parts = [part.astype(np.float32) for rows in layers if rows.part != "state" for part in (rows.k, rows.v)]
    return np.hstack([np.zeros((count, 0), np.float32), *parts])


def decoded(
    workspace: Workspace,
    segment: Segment,
    method: str = "stale",
    values: dict[str, str] | None = None,
    system: str | None = None,
    splice: bool = True,
) -> Decoded:
    prompt = Prompt(QUESTION, [segment], system=system, fields=values or {}, method=Method.parse(method))
    workspace.context.clear()  # in the same cells as others: rounding goes by these, too
    seq = assemble(workspace, prompt, splice=splice)
    logits = seq.logits()
    return Decoded(seq, rows_of(workspace, len(seq)), logits)


def same_rows(one: Decoded, other: Decoded, end: int) -> NDArray[np.bool_]:
    """Which of the first `end` KV entries are bit-identical."""
    return (one.rows[:end] == other.rows[:end]).all(axis=1)


def changed_to(workspace: Workspace, segment: Segment) -> Change:
    found = change(workspace.model, segment, NEW)
    assert found is not None
    return found


def field_positions(segment: Segment, start: int, name: str = "date") -> list[int]:
    return [start + p for span in segment.fields if span.name == name for p in range(span.first, span.last)]


# gemma3 has layers that see a window, smollm3 one without positions.
@pytest.fixture(scope="module", params=["llama-f16", "gemma3-f32", "smollm3-f32"])
def workspace(request: pytest.FixtureRequest, open_workspace: OpenWorkspace) -> Workspace:
    return open_workspace(*request.param.split("-"))


@pytest.fixture(scope="module")
def segment(workspace: Workspace, skill: Skill) -> Segment:
    return compile_skill(workspace, skill)


# ---- a value of equal length: the K/V that each method changes


@pytest.mark.parametrize("method", ["stale", "erratum", *TOUCHING])
def test_the_named_rows_change_alone(workspace: Workspace, segment: Segment, method: str) -> None:
    """They recompute only later tokens, or the field from its first new token on."""
    for system in (None, "Be kind."):
        plain, edited = decoded(workspace, segment, system=system), decoded(workspace, segment, method, NEW, system)
        assert [p.kind for p in edited.seq.pieces].count("erratum") == ("erratum" in method)
        end = len(plain.seq) if method == "stale" else plain.end
        changed = np.flatnonzero(~same_rows(edited, plain, end)).tolist()
        if method not in TOUCHING:
            assert edited.seq.tokens[:end].tolist() == plain.seq.tokens[:end].tolist() and changed == []
            assert all(piece.rewritten == 0 for piece in edited.seq.pieces)
            continue
        field = field_positions(segment, plain.start)
        first = field[int((plain.seq.tokens[field] != edited.seq.tokens[field]).argmax())]
        assert {at for at in field if at >= first} <= set(changed) <= set(field)
        assert sum(piece.rewritten for piece in edited.seq.pieces) == len(field)
        assert edited.seq.count("spliced") == plain.seq.count("spliced")


def test_rows_of_the_field_are_those_of_decoding_it_there(workspace: Workspace, segment: Segment) -> None:
    """One by one with stock llama.cpp, without those after them."""
    plain = decoded(workspace, segment)
    field = field_positions(segment, plain.start)
    found = changed_to(workspace, segment)
    edited = decoded(workspace, segment, "field", NEW)
    workspace.sequence()
    seq = assemble(workspace, Prompt(QUESTION, [segment]))
    seq.flush()
    edit_in_place(workspace.context, {at: int(found.tokens[at - plain.start]) for at in field})
    wanted = rows_of(workspace, plain.end)
    assert nmse(edited.rows[field], wanted[field]) < BOUND[workspace.options.type_k]
    assert nmse(plain.rows[field], wanted[field]) > 1000 * BOUND[workspace.options.type_k]


# ---- from the field on, or all of it


@pytest.mark.parametrize(
    ("method", "value"),
    [("suffix", "2026-07-01"), ("suffix", "the first of July, in the year 2026"), ("recompute", "May")],
)
def test_recomputed_it_is_the_corrected_text(
    workspace: Workspace, segment: Segment, skill: Skill, method: str, value: str
) -> None:
    """At the compiled position: tokens, K/V and logits of a prefill of the corrected text; `stale` differs clearly."""
    bound = BOUND[workspace.options.type_k]
    found = decoded(workspace, segment, method, {"date": value})
    stale = decoded(workspace, segment, "stale", {"date": value})
    corrected = compile_skill(workspace, with_values(skill, {"date": value}))
    wanted = decoded(workspace, corrected, splice=False)
    assert found.seq.tokens.tolist() == wanted.seq.tokens.tolist()
    assert nmse(found.rows, wanted.rows) < bound
    assert nmse(found.logits, wanted.logits) < bound < nmse(stale.logits, wanted.logits) / 100
    reused = segment.fields[0].first if method == "suffix" else 0
    assert found.seq.count("spliced") == reused


# ---- values of other lengths, and fields anywhere


TEXTS = {
    "at the start": "{{x}} is the last day.",
    "alone": "{{x}}",
    "in several places": "From {{x}} on, not before {{x}}, that is {{x}}",
    "with another": "Between {{x}} and {{y}} it is free.",
    "beside another": "Until {{x}}{{y}} it is free.",
}
VALUES = ["1 June", "4 July", "May", "the day after tomorrow"]
BARE = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"  # a skill begins at position 0


@pytest.mark.parametrize("where", TEXTS)
@pytest.mark.parametrize(("template", "system"), [("chatml", "Be kind."), ("bare", None)])
def test_any_place_and_any_length(open_workspace: OpenWorkspace, where: str, template: str, system: str | None) -> None:
    """Tokens of the corrected text, sound pieces, an equal dry run, a reversible edit; suffix equals a recompute."""
    workspace, text = open_workspace(**({"template": BARE} if template == "bare" else {})), TEXTS[where]
    values = {"x": VALUES[0], **({"y": "8 June"} if "{{y}}" in text else {})}
    skill = skill_of(text, **values)
    segment = compile_skill(workspace, skill)
    for value in VALUES[1:]:
        new = {"x": value, **({"y": "a Sunday in June"} if "{{y}}" in text else {})}
        for method in ("field", "field+erratum", "suffix"):
            prompt = Prompt(QUESTION, [segment], system=system, fields=new, method=Method.parse(method))
            full = assemble(workspace, prompt, splice=False).tokens.tolist()
            dry = assemble(workspace, prompt, dry=True)
            dry.flush()
            seq = assemble(workspace, prompt)
            seq.flush()
            assert seq.tokens.tolist() == full == dry.tokens.tolist()
            assert with_values(skill, new).text in workspace.model.text(seq.tokens)
            assert seq.pieces == dry.pieces
            at = 0
            for piece in seq.pieces:
                assert piece.position == at and 0 <= piece.rewritten <= piece.tokens
                at += piece.tokens
            assert at == len(seq) == workspace.context.length(seq.seq_id)
            middle = next(piece.position for piece in seq.pieces if piece.kind == "splice") + 2
            seq.truncate(middle)
            assert sum(piece.tokens for piece in seq.pieces) == middle
            assert all(piece.rewritten <= piece.tokens for piece in seq.pieces)
            seq.append([65])
            assert np.isfinite(seq.logits()).all() and workspace.context.length(seq.seq_id) == middle + 1
        if system is None:
            found, wanted = (decoded(workspace, segment, name, new).logits for name in ("suffix", "recompute"))
            assert nmse(found, wanted) < BOUND["f16"]


# ---- models that cannot


@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
def test_recurrent_models_take_erratum_and_recompute(open_workspace: OpenWorkspace, skill: Skill, kind: str) -> None:
    """Methods that need K/V within the sequence are refused with the reason; the others work as elsewhere."""
    workspace = open_workspace(kind)
    segment = compile_skill(workspace, skill)
    for method in ("field", "field+erratum", "suffix"):
        for dry in (True, False):
            with pytest.raises(
                UnsupportedError, match=r"not possible: this model has recurrent .* Use the edit method erratum or rec"
            ):
                assemble(workspace, Prompt(QUESTION, [segment], fields=NEW, method=Method.parse(method)), dry=dry)
    corrected = compile_skill(workspace, with_values(skill, NEW))
    # A prefill decodes in one go what a restore and its question decode in two.
    wanted, found = decoded(workspace, corrected, splice=False), decoded(workspace, segment, "recompute", NEW)
    assert found.seq.tokens.tolist() == wanted.seq.tokens.tolist()
    assert nmse(found.logits, wanted.logits) < BOUND["f16"]
    erratum = decoded(workspace, segment, "erratum", NEW)
    assert erratum.seq.count("spliced") == len(segment) + segment.base
    assert "2026-07-01" in workspace.model.text(erratum.seq.tokens[erratum.end :])


def test_a_window_that_drops_rows(make_model: MakeModel, home: Path) -> None:
    """A text longer than it is compiled, and corrected by an erratum; edits in place and sessions are refused."""
    options = ContextOptions(n_ctx=2048, n_threads=1, n_ubatch=64, swa_full=False)
    with notes.open(make_model("gemma3"), options) as model:
        text = "date: 2026-05-01\n\n" + "Tea is served at noon in the old hall.\n" * 13
        segment = model.compile(parse_skill(text, source="s", default="s"))
        assert len(segment) > 512
        asked: Any = {"splice": [segment], "max_tokens": 1}
        answer = model.ask(QUESTION, errata={"date": "the 1st of July"}, **asked)
        assert str(answer.settings.method) == "erratum" and answer.counts.spliced == len(segment)
        assert "(swa_full keeps them all)" in str(answer.settings.why)
        for method in TOUCHING:
            with refused(UnsupportedError, r"\(swa_full keeps them all\)\. Use --method erratum or recompute"):
                model.ask(QUESTION, fields=NEW, method=method, **asked)
        assert model.ask(QUESTION, fields=NEW, method="suffix", **asked).counts.spliced < 20
        with refused(UnsupportedError, "a session cannot be kept for"), model.session("mine") as session:
            session.ask(QUESTION, **asked)


def test_learned_positions_take_a_value_of_as_many_tokens(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """K/V that cannot be moved can be recomputed in place; a value that would move it is refused, in a dry run, too.
    An edit adds to the reason of a piece, also to one with a semicolon."""
    workspace = open_workspace("gpt2")
    segment = compile_skill(workspace, skill)
    plain, edited = decoded(workspace, segment), decoded(workspace, segment, "field", NEW)
    changed = np.flatnonzero(~same_rows(edited, plain, plain.end)).tolist()
    assert changed and set(changed) <= set(field_positions(segment, plain.start))
    for dry in (True, False):
        with pytest.raises(UnsupportedError, match="what follows the change cannot be moved: this model learned"):
            assemble(
                workspace, Prompt(QUESTION, [segment], fields={"date": "1 May"}, method=Method.parse("field")), dry=dry
            )
    found, wanted = (decoded(workspace, segment, name, {"date": "1 May"}) for name in ("suffix", "recompute"))
    assert found.seq.count("spliced") == segment.base + segment.fields[0].first
    assert nmse(found.logits, wanted.logits) < BOUND["f16"]
    plain, edited = (decoded(workspace, segment, name, NEW, "Be kind.") for name in ("stale", "field"))
    assert "than at compile time; this model learned" in why(plain.seq.pieces[1])
    assert why(edited.seq.pieces[1]) == why(plain.seq.pieces[1]) + "; 10 of them recomputed in place"


# ---- names


def test_a_method_is_found_by_its_name() -> None:
    for name, method in METHODS.items():
        assert Method.parse(name) is method and str(method) == name and repr(method) == f"Method('{name}')"
    for other in ("", "fields", "Erratum", "field@2", "auto", "selective@16"):
        with pytest.raises(NotesError, match="Known: stale, field, erratum, field\\+erratum, suffix, recompute"):
            Method.parse(other)
