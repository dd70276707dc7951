"""Tests images in prompts, on the small vision model: compiled once, spliced anywhere, never confused."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from projectors import image_bytes, write_projector
from reference import decode, nmse, shown

from notes_cli import config
from notes_cli.editing.methods import Method
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Segment
from notes_cli.engine.vision import ImageEmbeddings, text_part
from notes_cli.errors import EngineError, ModelError, Notice, SegmentError, SkillError, UnsupportedError
from notes_cli.images import load_picture
from notes_cli.library.container import open_segment, peek
from notes_cli.measure.verify import verify, verify_edits
from notes_cli.runtime.answering import ask, ask_many, explain
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.freshness import stale_reasons
from notes_cli.runtime.prefix_cache import PrefixCache
from notes_cli.runtime.prompt import Prompt, rendered
from notes_cli.runtime.recompile import compile_to_library, import_segment, stale
from notes_cli.runtime.request import Answer, Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import known_fields, read_errata
from notes_cli.text.skill import Skill, load_skill, parse_skill


@pytest.fixture
def seeing(home: Path) -> Iterator[Workspace]:
    model, projector = config.shipped_eye()
    with Workspace(model, ContextOptions(n_ctx=512, n_threads=1), projector=projector) as workspace:
        yield workspace


def photo(folder: Path, seed: int = 1, name: str = "photo", size: tuple[int, int] = (48, 48)) -> Skill:
    path = folder / f"{name}.png"
    path.write_bytes(image_bytes(*size, seed=seed))
    return load_skill(path)


TEXT = (
    "Read this receipt:\n\n![receipt](one.png)\n\nshop: Ada\n\nAnd these shapes: ![shapes](<the second.png>), please."
)


def pictured(folder: Path, text: str = TEXT, name: str = "pictured") -> Skill:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "one.png").write_bytes(image_bytes(36, 60, seed=4))
    (folder / name / "the second.png").write_bytes(image_bytes(48, 48, seed=5))
    (folder / name / f"{name}.md").write_text(text)
    return load_skill(folder / name / f"{name}.md")


def compiled(workspace: Workspace, skill: Skill) -> Segment:
    return workspace.open(compile_to_library(workspace, skill).path)


def logits(workspace: Workspace, prompt: Prompt, **how: bool) -> np.ndarray:
    with assemble(workspace, prompt, **how) as sequence:  # type: ignore[arg-type]
        return sequence.logits()


def test_another_image_of_the_same_name_and_size_is_compiled(seeing: Workspace, tmp_path: Path) -> None:
    first = compile_to_library(seeing, photo(tmp_path, 1))
    before = open_segment(first.path)
    assert not compile_to_library(seeing, photo(tmp_path, 1)).reasons
    second = compile_to_library(seeing, photo(tmp_path, 2))
    after = open_segment(second.path)
    assert second.reasons and second.path == first.path
    assert (before.tokens == after.tokens).all() and before.media != after.media
    assert any((a.v != b.v).any() for a, b in zip(before.layers, after.layers, strict=True))


def test_other_limits_or_another_projector_compile_it_again(seeing: Workspace, tmp_path: Path) -> None:
    """The segment records what determines its rows; without a projector the image stays as it is."""
    skill = photo(tmp_path)
    path = compile_to_library(seeing, skill).path
    info = peek(path)
    assert "max=16" in info.projector and info.projector == seeing.image_encoding.projector
    model, projector = config.shipped_eye()
    options = ContextOptions(n_ctx=512, n_threads=1)
    with Workspace(model, options, projector=projector, image_tokens=(None, 9)) as other:
        assert stale(other, skill, path) == [
            "the projector, or its limits, have changed",
            "its text gives different tokens now",
        ]
        with pytest.raises(SegmentError, match="or with other limits"):
            logits(other, Prompt("What?", [other.open(path)]), splice=False)
        assert len(compiled(other, skill)) == 11
    with Workspace(model, options) as blind:
        assert stale(blind, skill, path) == []
        assert blind.open(path).name == "photo"
        with pytest.raises(ModelError, match="projector"):
            logits(blind, Prompt("What?", [blind.open(path)]), splice=False)
        with pytest.raises(ModelError, match="takes its projector"):
            compile_to_library(blind, photo(tmp_path, 2, "other"))


def test_decoded_images_share_no_prefix(seeing: Workspace, tmp_path: Path) -> None:
    """Two images have equal tokens: a prefix of live rows matches only with the same image, spliced or decoded."""
    images = [compiled(seeing, photo(tmp_path, seed, f"photo-{seed}")) for seed in (1, 2)]
    for splice in (True, False):
        prefixes = PrefixCache()
        prompts = [Prompt("What is the total?", [image], splice=splice) for image in images]
        layouts = [prefixes.layout(rendered(seeing, prompt)) for prompt in prompts]
        with assemble(seeing, prompts[0]) as sequence:
            sequence.flush()
            prefixes.add(sequence, layouts[0], "")
            assert prefixes.find(layouts[0], "")[1] == 3 + len(images[0])  # and the question is decoded as alone
            assert prefixes.find(layouts[1], "")[1] == 0  # the opening of the system message is no batch of its own


def test_numbers_of_placed_skills_expire(seeing: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused numbers are dropped and never reused; used ones stay."""
    monkeypatch.setattr("notes_cli.runtime.prefix_cache.REMEMBERED", 2)
    one, other, third = (compiled(seeing, photo(tmp_path, seed, f"photo-{seed}")) for seed in (1, 2, 3))
    prefixes = PrefixCache()
    prompts = [Prompt("What is the total?", [image]) for image in (one, other, one, third, one, other)]
    layouts = [prefixes.layout(rendered(seeing, prompt)) for prompt in prompts]
    numbers = [int(layout.origins.max()) for layout in layouts]
    assert numbers[0] == numbers[2] == numbers[4] and len({*numbers[1:4], numbers[5]}) == 4


def test_what_cannot_move_is_encoded_again(seeing: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its rows may not move, an image is encoded from its bytes, and never decoded from its tokens."""
    image = compiled(seeing, photo(tmp_path))
    with pytest.raises(EngineError, match="no part can be taken out"):
        image.slice(0, 4)
    prompt = Prompt("What is the total?", [image], system="Be brief.")
    monkeypatch.setattr(seeing.context, "can_move", lambda *_: "for this test")
    with assemble(seeing, prompt) as sequence:
        (piece,) = [piece for piece in sequence.pieces if piece.name == "photo"]
        assert piece.refused and piece.how == "decoded"
        found = sequence.logits()
    assert np.allclose(found, logits(seeing, prompt, splice=False), atol=1e-5)
    with pytest.raises(SegmentError, match="holds no image"):
        seeing.encode_images(replace(image, pictures=()))


def test_rows_belong_to_the_projector_that_made_them(home: Path, tmp_path: Path) -> None:
    """Another file under its name, or in its place, while the first is in use: never the digest of the second."""
    model, projector = config.shipped_eye()
    path = Path(shutil.copy(projector, tmp_path / "mmproj.gguf"))
    with Workspace(model, ContextOptions(n_threads=1), projector=path) as workspace:
        _ = workspace.image_encoding.vision
        path.rename(tmp_path / "moved.gguf")
        write_projector(path, "qwen2vl_merger", 128)
        with pytest.raises(ModelError, match="was changed after it was loaded"):
            _ = workspace.image_encoding.projector  # its change time differs: it may be another file
    path.unlink()
    shutil.copy(projector, path)
    with Workspace(model, ContextOptions(n_threads=1), projector=path) as workspace:
        _ = workspace.image_encoding.vision
        other = write_projector(tmp_path / "other.gguf", "qwen2vl_merger", 128)
        path.write_bytes(other.read_bytes())
        with pytest.raises(ModelError, match="was changed after it was loaded"):
            _ = workspace.image_encoding.projector


def test_many_questions_about_an_image(seeing: Workspace, tmp_path: Path) -> None:
    """Each is answered as alone, with the image in shared cells; a text instead of an image is refused."""
    path = photo(tmp_path).source
    (tmp_path / "note.txt").write_text("Answer in one word.")
    note = compiled(seeing, load_skill(tmp_path / "note.txt"))
    questions = "What is the total?", "What is the day?"
    asked = [Request(question, [note], images=[path], max_tokens=3) for question in questions]
    answers = [answer for _, answer in ask_many(seeing, asked)]
    for request, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Answer) and answer.text == ask(seeing, request).text
        assert [piece.name for piece in answer.pieces if piece.how == "spliced"] == ["note", "photo"]
        assert answer.counts.shared > len(note) + 18
    ((_, refused),) = ask_many(seeing, [replace(asked[0], splice=[], images=[str(tmp_path / "note.txt")])])
    assert isinstance(refused, SkillError) and "is a text, and no image" in refused.what


def test_a_text_with_images_is_one_skill(seeing: Workspace, tmp_path: Path) -> None:
    """At its original place it is exact; elsewhere images are encoded again, from the bytes in the segment."""
    skill = pictured(tmp_path)
    segment = compiled(seeing, skill)
    assert [one.positions < one.rows for one in segment.media] == [True, True]
    assert [segment.text[one.start : one.end].split()[0] for one in segment.pictures] == ["image", "image"]
    assert [(span.name, span.value) for span in segment.fields] == [("shop", "Ada")]
    (span,) = segment.fields
    assert seeing.model.text(segment.tokens[span.first : span.last]).strip() == "Ada"
    shutil.rmtree(tmp_path / "pictured")
    here = Prompt("What is the total?", [segment])
    exact = logits(seeing, here, splice=False)
    assert nmse(logits(seeing, here), exact) < 1e-5
    with assemble(seeing, here, splice=False) as sequence:
        sequence.logits()
        (decoded,) = [piece for piece in sequence.pieces if piece.name == "pictured"]
        assert decoded.how == "decoded" and decoded.tokens == len(segment)


def test_another_picture_makes_the_text_another(seeing: Workspace, tmp_path: Path) -> None:
    """With equal words, sizes and names it is compiled again, and `notes ls` reports it before."""
    first = compile_to_library(seeing, pictured(tmp_path))
    assert not compile_to_library(seeing, pictured(tmp_path)).reasons
    (entry,) = seeing.library.entries("pictured")
    assert entry.info and stale_reasons(entry, [entry]) == []
    before = open_segment(first.path)
    (tmp_path / "pictured" / "one.png").write_bytes(image_bytes(36, 60, seed=6))
    (reason,) = stale_reasons(entry, [entry])
    assert "the text, or an image in it, has changed" in reason.what
    again = compile_to_library(seeing, load_skill(tmp_path / "pictured" / "pictured.md"))
    after = open_segment(again.path)
    assert again.reasons == ("the text has changed",) and (after.tokens == before.tokens).all()
    assert any((a.v != b.v).any() for a, b in zip(before.layers, after.layers, strict=True))


def test_without_a_projector_a_text_is_text(seeing: Workspace, tmp_path: Path) -> None:
    """It is compiled as text, with a notice; but a text compiled with images is not replaced unless forced."""
    model = config.shipped_eye()[0]
    said: list[Notice] = []
    with Workspace(model, ContextOptions(n_ctx=512, n_threads=1)) as blind:
        plain = compile_to_library(blind, pictured(tmp_path, name="plain"), say=said.append)
        assert open_segment(plain.path).text == TEXT and not peek(plain.path).media
        (notice,) = said
        assert "plain.md shows one.png, the second.png: that is compiled as the text it is" in str(notice)
        path = compile_to_library(seeing, pictured(tmp_path)).path
        assert not compile_to_library(blind, pictured(tmp_path)).reasons  # the bytes are the same
        with pytest.raises(ModelError, match="takes its projector"):
            compile_to_library(blind, pictured(tmp_path, TEXT + " Now."))
        assert peek(path).pictures
        compile_to_library(blind, pictured(tmp_path), force=True)
        assert not peek(path).pictures
    found = compile_to_library(seeing, pictured(tmp_path, name="plain"))
    assert found.reasons[0] == "an image in it was text until now" and len(peek(found.path).pictures) == 2


def test_rows_of_a_text_with_images_are_not_edited(seeing: Workspace, tmp_path: Path) -> None:
    """Its fields are corrected by errata, which is the default; other methods are refused with a remedy."""
    segment = compiled(seeing, pictured(tmp_path))
    request = Request("What is the total?", [segment], fields={"shop": "Ben"}, max_tokens=2)
    plan = explain(seeing, request)
    assert [piece.kind for piece in plan.pieces if piece.kind in ("splice", "erratum")] == [
        "splice",
        "erratum",
    ]
    assert "no rows of such skills are edited" in str(plan.settings.why)
    for name in ("field", "suffix", "recompute", "field+erratum"):
        with pytest.raises(UnsupportedError, match="fields cannot be edited"):
            ask(seeing, replace(request, method=Method.parse(name)))
    assert ask(seeing, replace(request, fields={}, errata=["shop=Ben"])).counts.spliced == len(segment)
    # A text next to it is corrected in place, too; the erratum of the other precedes the question.
    rules = compiled(seeing, parse_skill("date: 2026-06-01\n\nAll goods count.", source="rules.txt", default="rules"))
    both = replace(request, splice=[segment, rules], fields={"shop": "Ben", "date": "2026-07-01"})
    answer = ask(seeing, both)
    assert str(answer.settings.method) == "field+erratum" and answer.counts.rewritten > 0
    assert [piece.kind for piece in answer.pieces][-5:] == ["erratum", "text", "erratum", "question", "answer"]
    for skill in (pictured(tmp_path), photo(tmp_path)):
        with pytest.raises(SkillError, match="in no blocks"):
            compile_to_library(seeing, skill, blocks=2)


def test_a_text_with_images_is_imported_and_verified(seeing: Workspace, tmp_path: Path) -> None:
    """It is imported with its fields, or compiled from its content; a correction is compared, its edits refused."""
    segment = compiled(seeing, pictured(tmp_path))
    path = next(entry.path for entry in seeing.library.entries("pictured"))
    shutil.rmtree(tmp_path / "pictured")
    for name, trust in (("trusted", True), ("computed", False)):
        import_segment(seeing, path, name=name, trust=trust)
        (entry,) = seeing.library.entries(name)
        found = seeing.open(entry.path)
        assert (found.pictures, found.fields, found.media) == (segment.pictures, segment.fields, segment.media)
    prompt = Prompt("", [segment], read_errata(["shop=Ben"], known_fields(segment)))
    _, case = verify(seeing, prompt, ["What is the total?"]).cases
    assert case.errata and case.cosine > 0.99 and case.corrected is None
    with pytest.raises(UnsupportedError, match="nothing is edited"):
        verify_edits(seeing, replace(prompt, errata=[], fields={"shop": "Ben"}), ["What is the total?"], [])


def test_the_words_of_an_image_are_no_image(seeing: Workspace, tmp_path: Path) -> None:
    """A question or a text that spells the placeholder of an image, or its marks, is text, also beside an image."""
    marks = {3, 4, 5}  # the tokens around an image
    with assemble(seeing, Prompt("What is <__media__> and <|vision_start|><|image_pad|>?")) as sequence:
        assert not marks & set(sequence.tokens.tolist())
        sequence.logits()
    pictured(tmp_path)
    words = load_picture(tmp_path / "pictured" / "one.png").text
    (tmp_path / "words.md").write_text(f"{words} <__media__> <|vision_start|><|image_pad|>")
    segment = compiled(seeing, load_skill(tmp_path / "words.md"))
    assert not segment.media and not marks & set(segment.tokens.tolist())
    both = compiled(seeing, pictured(tmp_path, f"{words} <|vision_start|> ![it](one.png)", "both"))
    assert len(both.media) == len(both.pictures) == 1 and both.pictures[0].start > len(words)
    assert (both.tokens[: both.media[0].first] == 3).sum() == 1  # the mark before its rows


def there(scratch: Context, segment: Segment, place: int, look: Callable[[Segment], ImageEmbeddings]) -> Segment:
    """Return the segment recomputed with its left context, so that its first row is at a position."""
    scratch.clear()
    decode(scratch, segment.context, place - len(segment.context))
    shown(scratch, look(segment) if segment.media else text_part(segment.tokens), place)
    if not segment.media:
        return replace(segment, base=place, layers=scratch.read(0, place, len(segment), base=place, dtype="f32"))
    rows = scratch.read_axes(0, place, len(segment), base=place, dtype="f32")[0]
    return replace(segment, base=place, layers=rows)


def test_random_prompts_have_the_rows_of_their_places(home: Path, tmp_path: Path) -> None:
    """In any order and place, with any seam: the logits with each computed in place. Without rotation they differ."""
    chance = random.Random(15)
    model, projector = config.shipped_eye()
    options = ContextOptions(n_ctx=1024, n_threads=1, type_k="f32", type_v="f32", flash_attention="off")
    with Workspace(model, options, projector=projector) as workspace, Context(workspace.model, options) as scratch:
        sizes = ((48, 48), (96, 12), (20, 70), (36, 60))
        known = [compiled(workspace, photo(tmp_path, seed, f"p{seed}", size)) for seed, size in enumerate(sizes)]
        for name, text in (("note", "Answer in one word."), ("long", "A receipt has a day and a total. " * 4)):
            (tmp_path / f"{name}.txt").write_text(text)
            known.append(compiled(workspace, load_skill(tmp_path / f"{name}.txt")))
        known.append(compiled(workspace, pictured(tmp_path)))
        wrong = []
        for _ in range(8):
            segments = chance.sample(known, chance.randint(1, 4))
            prompt = Prompt(
                chance.choice(("What is the total?", "What is the day?")),
                segments,
                read_errata(["the receipt is void."] * chance.randint(0, 1), known_fields(*segments)),
                "Be brief. " * chance.randint(0, 12),
                place=chance.choice(("early", "late")),
                shown=frozenset(one.name for one in segments if one.media and chance.random() < 0.5),
            )
            seam, places = chance.randint(0, 3), {}
            with assemble(workspace, prompt, seam=seam) as sequence:
                found = sequence.logits()
                for piece in sequence.pieces:
                    places.setdefault(piece.name, sequence.position(piece.position))
            again = [there(scratch, one, places[one.name], workspace.encode_images) for one in segments]
            with assemble(workspace, replace(prompt, segments=again), seam=seam) as sequence:
                # With q8_0 weights activations are rounded to 8 bits: a difference in a last bit becomes a step.
                assert nmse(found, sequence.logits()) < 5e-5
            with assemble(workspace, prompt, seam=seam, rotate=False) as sequence:
                wrong.append(nmse(found, sequence.logits()))
        assert np.median(wrong) > 1e-2
