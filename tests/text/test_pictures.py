"""Tests images in texts: which references count, and which files may be read for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from projectors import image_bytes

from notes_cli.errors import ImageError, SkillError
from notes_cli.images import read_picture
from notes_cli.text import pictures
from notes_cli.text.fields import Field
from notes_cli.text.pictures import find_images
from notes_cli.text.skill import joined, load_skill, parse_skill, with_images

PNG = image_bytes(8, 8, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a skill's folder with pictures of several names, and one outside of it."""
    (tmp_path / "s" / "sub").mkdir(parents=True)
    for name in ("a.png", "my photo.png", "b(1).JPG", "sub/c.webp", "%20.png", "new\nline.png", "draw.svg"):
        (tmp_path / "s" / name).write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "s" / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "s" / "folder.png").mkdir()
    os.mkfifo(tmp_path / "s" / "pipe.png")
    (tmp_path / "s" / "circle.png").symlink_to(tmp_path / "s" / "circle.png")
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        *(("![a](a.png)", "a.png"), ("![](./a.png)", "a.png"), ("![a b](<my photo.png>)", "my photo.png")),
        *(("![a](my%20photo.png)", "my photo.png"), ("![a](%20.png)", "%20.png")),
        *(("![a](new%0Aline.png)", "new\nline.png"), ('![a]( a.png "A title" )', "a.png")),
        *(("![a](a.png 'A title')", "a.png"), ("![a](b(1).JPG)", "b(1).JPG")),
        *(("![a](sub/../sub/c.webp)", "sub/c.webp"), ("text![a](a.png)text", "a.png")),
        ("[![a](a.png)](https://example.org)", "a.png"),
    ],
)
def test_marks_of_images(folder: Path, mark: str, name: str) -> None:
    (link,) = find_images(mark, folder)
    assert link.why == "" and Path(link.path).resolve() == folder / name
    assert mark[link.start : link.end].startswith("![") and mark[link.start : link.end].endswith(")")


def test_what_is_no_image(folder: Path) -> None:
    """Backticks pair within a paragraph: an unclosed one, or one that closes in the next, makes no code."""
    for text in (
        *("[a](a.png)", r"\![a](a.png)", "`![a](a.png)`", "``a ` ![a](a.png)``", "```\n![a](a.png)\n```"),
        *("~~~\n![a](a.png)", "<!-- ![a](a.png) -->", "<!--\n```\n-->```\n![a](a.png)\n```", "![a][a]\n\n[a]: a.png"),
        *("![a](a.png", "![a](my photo.png)", "![a]()", "![a\n](a.png)", "! [a](a.png)", "`` a ` ![a](a.png) `"),
    ):
        assert find_images(text, folder) == (), text
    for text in ("It's a ` and ![a](a.png)", "a ` b\n\n![a](a.png) ` c", "`a` ![a](a.png) `b`"):
        assert len(find_images(text, folder)) == 1, text


@pytest.mark.parametrize(
    ("target", "why"),
    [
        *(("https://example.org/a.png", "nothing is fetched"), ("//example.org/a.png", "nothing is fetched")),
        *(("file:///etc/passwd", "nothing is fetched"), ("data:image/png;base64,iVBORw0KGgo=", "nothing is fetched")),
        ("../secret.png", "outside of the skill's folder"),
        *(("sub/../../secret.png", "outside of the skill's folder"), ("out.png", "outside of the skill's folder")),
        *(("/dev/zero", "outside of the skill's folder"), ("none.png", "no such file"), ("circle.png", "no such file")),
        *(("a.png/b.png", "no such file"), ("x" * 400 + ".png", "no such file"), ("%00.png", "no such file")),
        *(("folder.png", "not a regular file"), ("pipe.png", "not a regular file"), ("draw.svg", "none of .png")),
    ],
)
def test_files_that_are_not_taken(folder: Path, target: str, why: str) -> None:
    """Each has the reason; no file is opened, so that nothing can hang."""
    (link,) = find_images(f"![a]({target})", folder)
    assert why in link.why and link.path == ""


def test_what_stands_for_an_image_names_its_bytes(folder: Path) -> None:
    """The placeholder is in its place; fields keep theirs, and one inside of an image is dropped."""
    (folder / "s.md").write_text(
        "---\ndescription: d\nfields: {logo: '![x](a.png)', until: '![y](no.png)'}\n---\n"
        "date: 2026-06-01\nlogo: ![x](a.png)\n\nSee ![date](a.png), shop: Ada\nuntil: ![y](no.png)"
    )
    skill = load_skill(folder / "s.md")
    assert [link.target for link in skill.links] == ["a.png", "a.png", "no.png"] and not skill.pictures
    shown, words = with_images(skill), read_picture(PNG, "").text
    assert shown.text == skill.text.replace("![x](a.png)", words).replace("![date](a.png)", words)
    assert [shown.text[one.start : one.end] for one in shown.pictures] == [words, words]
    assert shown.values == {"date": "2026-06-01", "until": "![y](no.png)"}
    assert all(shown.text[one.start : one.end] == one.value for one in shown.fields)
    assert with_images(shown) is shown and shown.stamp == ()


def test_joined_texts_keep_their_images(folder: Path) -> None:
    """A text from elsewhere than a file cannot name local files. A value that is filled in may choose the file."""
    for name in ("x", "y"):
        (folder / f"{name}.md").write_text(f"The text {name} ![a](a.png) ends.")
    whole = with_images(joined([load_skill(folder / "x.md"), load_skill(folder / "y.md")], "both"))
    words = read_picture(PNG, "").text
    assert whole.text == f"The text x {words} ends.\n\nThe text y {words} ends."
    assert [whole.text[one.start : one.end] for one in whole.pictures] == [words, words]
    assert parse_skill(f"![a]({folder / 'a.png'})", source="-", default="x").links == ()
    (folder / "s.md").write_text("---\nname: s\ndescription: d\nfields: {which: a}\n---\nSee ![it]({{which}}.png).")
    skill = load_skill(folder / "s.md")
    assert [link.target for link in skill.links] == ["a.png"] and skill.fields == (Field("which", "a", 10, 11),)
    assert with_images(skill).fields == ()


def test_broken_and_large_images_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bad.png").write_bytes(b"no picture")
    (folder / "s.md").write_text("![a](bad.png)")
    with pytest.raises(ImageError, match=r"bad\.png is no image that can be read"):
        with_images(load_skill(folder / "s.md"))
    (folder / "s.md").write_text("![a](a.png) " * 257)
    with pytest.raises(SkillError, match="a text shows 257 images, more than 256"):
        with_images(load_skill(folder / "s.md"))
    (folder / "s.md").write_text("![a](a.png) ![b](sub/c.webp)")
    monkeypatch.setattr(pictures, "MAX_BYTES", len(PNG) + 1)
    with pytest.raises(SkillError, match="the images of a text are larger than"):
        with_images(load_skill(folder / "s.md"))


@pytest.mark.parametrize("text", ["![a](" * 100_000, "![" * 200_000, "`" * 200_000, "` `` " * 80_000, "<!--" * 100_000])
def test_hostile_texts_take_no_time(folder: Path, text: str) -> None:
    """Quadratic time would not end here."""
    assert find_images(text + " ![a](a.png", folder) == ()
