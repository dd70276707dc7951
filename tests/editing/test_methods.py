"""The edit methods: each changes exactly its KV entries, and the tokens are those of its text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from samples import with_values

import notes_cli as notes
from notes_cli.editing.methods import (
    Change,
    Method,
    change,
    counterfactual,
    deviation,
    influence,
    most_influenced,
    prepare,
    stretches,
)
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.positions import Patch
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, UnsupportedError
from notes_cli.explanations import why
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeModel
from ..engine.reference import edit_in_place, nmse
from ..refused import refused
from .conftest import OpenWorkspace, measured, skill_of

BOUND = {"f32": 1e-6, "f16": 1e-5}
QUESTION = "Why?"
NEW = {"date": "2026-07-01"}
TOUCHING = ["field", "selective@4", "blend@4", "field+erratum"]


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
    return measured(workspace, skill)


# ---- a value of equal length: the K/V that each method changes


@pytest.mark.parametrize("method", ["stale", "erratum", *TOUCHING])
def test_the_named_rows_change_alone(workspace: Workspace, segment: Segment, method: str) -> None:
    """They recompute only later tokens, or the field from its first new token on, and exactly K more: those of the
    highest influence."""
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
        effect = segment.influence["date"]
        if "blend" in method:
            with workspace.scratch() as sequence:
                effect = deviation(sequence, segment, changed_to(workspace, segment), 2)
        more = (np.argsort(-effect, kind="stable")[:4] + plain.start).tolist() if "@" in method else []
        assert [at for at in changed if at not in field] == sorted(more)
        assert {at for at in field if at >= first} <= set(changed)
        assert sum(piece.rewritten for piece in edited.seq.pieces) == len(field) + len(more)
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


def test_what_selective_selects(workspace: Workspace, segment: Segment) -> None:
    """By the influence of changed fields, not of one set to its current value; all later tokens if K exceeds their
    number: the logits are those of a recompute."""
    date = decoded(workspace, segment, "selective@4", NEW)
    loud = {**segment.influence, "tier": segment.influence["tier"] * 100}
    both = decoded(workspace, replace(segment, influence=loud), "selective@4", {**NEW, "tier": "gold"})
    assert same_rows(both, date, date.end).all()
    found, wanted = (decoded(workspace, segment, method, NEW) for method in ("selective@1000", "recompute"))
    assert sum(piece.rewritten for piece in found.seq.pieces) == len(segment) - segment.fields[0].first
    assert nmse(found.logits, wanted.logits) < BOUND[workspace.options.type_k]


@pytest.mark.parametrize("method", ["selective@4", "blend@4"])
def test_ranked_when_it_is_edited(workspace: Workspace, segment: Segment, skill: Skill, method: str) -> None:
    """The tokens whose V deviates most from that of the corrected text are selected, and the pass is counted."""
    plain, found = replace(segment, influence={}), changed_to(workspace, segment)
    texts = skill, with_values(skill, NEW)
    old, new = (np.stack([r.v.astype(np.float32) for r in compile_skill(workspace, text).layers]) for text in texts)
    far = np.linalg.norm(new - old, axis=2) / np.linalg.norm(old, axis=2)
    layers = 2 if method == "blend@4" else None
    field = segment.fields[0].last
    wanted = np.sort(np.argsort(-far[:layers, field:].mean(axis=0), kind="stable")[:4] + field)
    prepared = prepare(workspace.scratch, plain, found, Method.parse(method))
    assert list(prepared.also) == wanted.tolist()
    count = len(segment.context) + len(found.tokens)
    assert prepared.passed == count
    seq = decoded(workspace, plain, method, NEW).seq
    reason = next(why(piece) for piece in seq.pieces if piece.rewritten)
    assert f"selected by a pass over {count} tokens of the corrected text" in reason
    assert ("notes compile --influence spares it" in reason) == (method == "selective@4")


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


def test_recompute_after_another_text(workspace: Workspace, segment: Segment) -> None:
    """After a system text, recompute is a full prefill, and suffix reuses the K/V before the field."""
    found = decoded(workspace, segment, "recompute", NEW, "Be kind.")
    wanted = decoded(workspace, segment, "recompute", NEW, "Be kind.", splice=False)
    assert found.seq.tokens.tolist() == wanted.seq.tokens.tolist()
    assert nmse(found.logits, wanted.logits) < BOUND[workspace.options.type_k]
    suffix = decoded(workspace, segment, "suffix", NEW, "Be kind.")
    assert suffix.seq.tokens.tolist() == wanted.seq.tokens.tolist()
    assert suffix.seq.count("spliced") == segment.fields[0].first - suffix.seq.count("seam") > 0


# ---- blocks


BLOCKS = "# When\n\nuntil {{x}}\n\n# What\n\nfor {{y}} only\n\n# How\n\nby {{x}} mail"
OLD = {"x": "1 June", "y": "books"}


def in_blocks(workspace: Workspace, **values: str) -> Segment:
    return compile_skill(workspace, skill_of(BLOCKS, **{**OLD, **values}), blocks="headings")


@pytest.mark.parametrize(
    ("values", "blocks", "system"),
    [
        *(({"y": "tools"}, [1], None), ({"y": "the tools"}, [1], "Be kind."), ({"y": "ink"}, [1], None)),
        ({"x": "the last day of July"}, [0, 2], None),
    ],
    ids=str,
)
def test_a_block_is_as_compiled_from_the_corrected_text(
    workspace: Workspace, values: dict[str, str], blocks: list[int], system: str | None
) -> None:
    """In the same blocks, for any length of value: all blocks with the field are recomputed, others only moved."""
    segment, corrected = in_blocks(workspace), in_blocks(workspace, **values)
    plain, found = decoded(workspace, segment, system=system), decoded(workspace, segment, "block", values, system)
    wanted = decoded(workspace, corrected, system=system)
    assert found.seq.tokens.tolist() == wanted.seq.tokens.tolist()
    assert nmse(found.rows, wanted.rows) < BOUND[workspace.options.type_k]
    assert nmse(found.logits, wanted.logits) < 10 * BOUND[workspace.options.type_k]
    spans = [corrected.spans[block] for block in blocks]
    again = [piece for piece in found.seq.pieces if piece.rewritten]
    assert [(piece.position - found.start, piece.tokens) for piece in again] == [
        (first, last - first) for first, last in spans
    ]
    assert all(piece.rewritten == piece.tokens for piece in again)
    for block, piece in zip(blocks, again, strict=True):
        assert why(piece).startswith(f"block {block + 1} of 3, recomputed after the left context alone")
    if len(corrected) == len(segment):
        first, last = spans[0]
        changed = np.flatnonzero(~same_rows(found, plain, plain.end)) - plain.start
        assert changed.size and first <= changed.min() <= changed.max() < last
        assert nmse(plain.rows, wanted.rows) > 100 * BOUND[workspace.options.type_k]


def test_a_quantized_cache_takes_blocks_from_another(open_workspace: OpenWorkspace) -> None:
    """Blocks are computed in f16 in another context, and quantized when spliced, as the others were."""
    workspace = open_workspace("qwen3", kv="q8_0")
    value = {"y": "tools"}
    segment, corrected = in_blocks(workspace), in_blocks(workspace, **value)
    found, wanted = (
        assemble(workspace, Prompt(QUESTION, [of], fields=values, method=Method("block"))).logits()
        for of, values in ((segment, value), (corrected, {}))
    )
    assert nmse(found, wanted) < 1e-3


def test_a_change_across_a_cut_makes_one_block_of_two(open_workspace: OpenWorkspace) -> None:
    """Tokens and stretches are right for a patch across a block boundary."""
    workspace = open_workspace()
    segment = in_blocks(workspace)
    found = change(workspace.model, segment, {"x": "4 July"})
    assert found is not None
    second = segment.spans[1][0]
    across = replace(found, patches=(Patch(second - 3, second + 2, found.tokens[second - 3 : second + 2].tolist()),))
    (part,) = stretches(segment, across)
    assert (list(part.blocks), part.first, part.last, part.start) == ([1, 2], 0, segment.spans[2][0], 0)
    assert part.tokens.tolist() == found.tokens[: part.last].tolist()


def test_only_blocks_with_a_change_deviate(workspace: Workspace) -> None:
    """Other blocks do not depend on the field: its influence on them is 0."""
    segment = compile_skill(workspace, skill_of(BLOCKS, **OLD), blocks="headings", measure=lambda done, of: None)
    first, last = segment.spans[1]
    found = segment.influence["y"]
    assert found[segment.fields[1].last : last].all() and not found[:first].any() and not found[last:].any()
    assert segment.influence["x"][segment.spans[2][0] :].any() and not segment.influence["x"][first:last].any()


def test_without_blocks_there_is_none_to_compute(workspace: Workspace, segment: Segment) -> None:
    """The error has the command that compiles blocks; a dry run, too."""
    for dry in (True, False):
        with refused(NotesError, r"Run: notes compile --from returns -m .* --blocks 8"):
            assemble(workspace, Prompt(QUESTION, [segment], fields=NEW, method=Method("block")), dry=dry)


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
    segment = measured(workspace, skill)
    for value in VALUES[1:]:
        new = {"x": value, **({"y": "a Sunday in June"} if "{{y}}" in text else {})}
        for method in ("selective@4", "blend@4", "field+erratum", "suffix"):
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
    segment = measured(workspace, skill)
    for method in ("field", "selective@4", "blend@4", "field+erratum", "suffix", "block"):
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
    segment = measured(workspace, skill)
    plain, edited = decoded(workspace, segment), decoded(workspace, segment, "field", NEW)
    changed = np.flatnonzero(~same_rows(edited, plain, plain.end)).tolist()
    assert changed and set(changed) <= set(field_positions(segment, plain.start))
    for dry in (True, False):
        with pytest.raises(UnsupportedError, match="what follows the change cannot be moved: this model learned"):
            assemble(workspace, Prompt(QUESTION, [segment], fields={"date": "1 May"}, method=Method("field")), dry=dry)
    found, wanted = (decoded(workspace, segment, name, {"date": "1 May"}) for name in ("suffix", "recompute"))
    assert found.seq.count("spliced") == segment.base + segment.fields[0].first
    assert nmse(found.logits, wanted.logits) < BOUND["f16"]
    plain, edited = (decoded(workspace, segment, name, NEW, "Be kind.") for name in ("stale", "field"))
    assert "than at compile time; this model learned" in why(plain.seq.pieces[1])
    assert why(edited.seq.pieces[1]) == why(plain.seq.pieces[1]) + "; 10 of them recomputed in place"


# ---- names


def test_methods_have_names() -> None:
    """As in the paper, some with a number of tokens; formatting and parsing round-trip, and others are refused."""
    for text, method in (
        *(("erratum", Method("erratum")), ("block", Method("block")), ("selective@16", Method("selective"))),
        *(("selective@3", Method("selective", 3)), ("blend@16", Method("blend")), ("blend@3", Method("blend", 3))),
    ):
        assert Method.parse(text) == method == Method.parse(text.removesuffix("@16")) and str(method) == text
    others = ["", "fields", "Erratum", "field@2", "block@2", "selective@", "selective@0", "selective@-1", "selective@x"]
    for other in [*others, "blend@", "@", "@3"]:
        with pytest.raises(NotesError, match="Known: stale, field, selective, blend, erratum"):
            Method.parse(other)


def test_what_is_known_without_a_pass(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """Selection by compiled influence; without it, the error has the remedy."""
    workspace = open_workspace()
    segment = compile_skill(workspace, skill)
    found = changed_to(workspace, segment)
    with refused(NotesError, "Run: notes compile --from returns --influence"):
        most_influenced(segment, found, 3)
    known = replace(segment, influence={"date": np.arange(len(segment), dtype=np.float32)})
    assert most_influenced(known, found, 3) == tuple(range(len(segment) - 3, len(segment)))


def touched(segment: Segment, name: str) -> list[int]:
    return [at for span in segment.fields if span.name == name for at in range(span.first, span.last)]


def test_the_other_value() -> None:
    """Of the same kind, for numbers of the same length, never the value itself, and a valid date of any day."""
    values = {"2026-06-01": "2021-01-05", "2026-05-12": "2021-09-07", "120": "115", "100": "105", "9": "4"}
    values |= {"gold": "other", "other": "another", "up to 5": "up to 9"}
    assert {value: counterfactual(value) for value in values} == values
    days = [date(2024, 1, 1) + timedelta(day) for day in range(366)]
    assert all(day != date.fromisoformat(counterfactual(day.isoformat())) for day in days)


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "lfm2", "mamba"])
def test_nothing_in_the_field_or_before_it(open_workspace: OpenWorkspace, skill: Skill, kind: str) -> None:
    """One number per token: 0 up to the field's end, positive after it; the context is left empty. All 0 where there
    are recurrent layers alone, as no single token can be recomputed."""
    workspace = open_workspace(kind)
    progress: list[tuple[int, int]] = []
    segment = compile_skill(workspace, skill, measure=lambda done, of: progress.append((done, of)))
    assert progress == [(1, 2), (2, 2)] and workspace.context.length(0) == 0
    assert list(segment.influence) == ["date", "tier"]
    for name, found in segment.influence.items():
        last = touched(segment, name)[-1] + 1
        assert found.shape == (len(segment),) and found.dtype == np.float32 and np.isfinite(found).all()
        assert (found[:last] == 0).all() and (found[last:] >= 0).all() and found[last:].any() == (kind != "mamba")


def test_it_is_what_another_value_does_to_the_rows(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """The mean over the layers of the relative distance of V from that of a compile with the other value."""
    workspace = open_workspace(kv="f32")
    segment = measured(workspace, skill)
    other = compile_skill(workspace, with_values(skill, {"date": "2021-01-05"}))
    far = np.mean(
        [
            np.linalg.norm(a.v - b.v, axis=1) / np.linalg.norm(a.v, axis=1)
            for a, b in zip(segment.layers, other.layers, strict=True)
        ],
        axis=0,
    )
    after = segment.fields[0].last
    np.testing.assert_allclose(segment.influence["date"][after:], far[after:], rtol=1e-4, atol=1e-6)


def test_it_is_the_same_again(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """Bit-identical in a sequence that held other K/V, and nearly equal in an f32 cache."""
    workspace = open_workspace()
    first = measured(workspace, skill).influence
    segment = compile_skill(workspace, skill)
    with workspace.scratch() as sequence:
        sequence.append(np.arange(9, dtype=np.int32))
        sequence.flush()
        again = influence(sequence, segment, "date")
    assert (again == first["date"]).all()
    exact = measured(open_workspace(kv="f32"), skill).influence["date"]
    np.testing.assert_allclose(again, exact, atol=0.02 * float(exact.max()))


def test_a_field_in_several_places_and_of_another_length(open_workspace: OpenWorkspace) -> None:
    """0 at all its places, positive between them, and each token keeps its number."""
    workspace = open_workspace()
    segment = measured(workspace, skill_of("A {{x}} is a {{x}}, they say.", x="cat"))
    found, own = segment.influence["x"], touched(segment, "x")
    assert (found[own] == 0).all() and (found[: own[0]] == 0).all()
    after = [at for at in range(own[0], len(segment)) if at not in own]
    assert (found[after] > 0).all()


def test_in_the_library(open_workspace: OpenWorkspace, skill: Skill) -> None:
    """Measured on request; kept by later compiles of the same text, and dropped for another text."""
    workspace = open_workspace()
    plain = compile_to_library(workspace, skill)
    assert workspace.open(plain.path).influence == {}
    progress: list[int] = []

    def asked(of: Skill) -> tuple[str, ...]:
        return compile_to_library(workspace, of, measure=lambda done, _: progress.append(done)).reasons

    assert asked(skill) == ("the influence of its fields has not been measured",) and progress == [1, 2]
    kept = workspace.open(plain.path).influence
    wanted = measured(workspace, skill).influence
    assert all((kept[name] == wanted[name]).all() for name in ("date", "tier"))
    assert not compile_to_library(workspace, skill).reasons and not asked(skill) and progress == [1, 2]
    assert workspace.open(plain.path).influence.keys() == kept.keys()
    assert compile_to_library(workspace, replace(skill, description="Another.")).reasons
    assert workspace.open(plain.path).influence == {}


def test_a_skill_without_fields(open_workspace: OpenWorkspace) -> None:
    """Its influence is empty, not missing."""
    workspace, progress = open_workspace(), []
    skill = Skill("s", "", "No fields.", (), "-")
    for reasons in (1, 0):
        compiled = compile_to_library(workspace, skill, measure=lambda done, of: progress.append(done))
        assert len(compiled.reasons) == reasons and progress == []
