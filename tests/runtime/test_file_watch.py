"""Tests watching files: each change is reported once, when complete, and no other."""

from __future__ import annotations

from pathlib import Path

from notes_cli.runtime.sources import Files, Watched, file_stamp


def test_a_change_is_told_once_it_is_left_alone(tmp_path: Path) -> None:
    file, watched = tmp_path / "a.txt", Watched()
    file.write_text("one")
    watched.mark_handled(file, file_stamp(file))
    assert watched.changed([file]) == []
    file.write_text("one and a")
    assert watched.changed([file]) == []  # perhaps there is more to come
    file.write_text("one and a half")
    assert watched.changed([file]) == []
    ((path, look),) = watched.changed([file])
    assert path == file
    file.write_text("two, while the first is compiled")  # is not lost
    watched.mark_handled(file, look)
    assert watched.changed([file]) == []
    ((_, look),) = watched.changed([file])
    watched.mark_handled(file, look)
    assert watched.changed([file]) == []


def test_a_file_that_is_replaced_or_removed(tmp_path: Path) -> None:
    """Editors rename a new file over the old one; removal and return are reported."""
    file, watched = tmp_path / "a.txt", Watched()
    file.write_text("one")
    watched.mark_handled(file, file_stamp(file))
    (tmp_path / "new").write_text("two")
    (tmp_path / "new").replace(file)
    watched.changed([file])
    ((_, look),) = watched.changed([file])
    watched.mark_handled(file, look)
    file.unlink()
    watched.changed([file])
    assert watched.changed([file]) == [(file, None)]
    watched.mark_handled(file, None)
    assert watched.changed([file]) == []
    file.write_text("back")
    watched.changed([file])
    assert len(watched.changed([file])) == 1


def test_skills_that_share_a_file() -> None:
    """Two names of one text, one image in two texts, an image that is a skill itself: all depend on the file."""
    files, (a, b, photo) = Files(), map(Path, ("a.md", "b.md", "photo.png"))
    files.add({a: ["first", "second"], b: ["third"]})
    files.set_images(a, [photo])
    files.set_images(b, {photo: None})
    assert files.paths == [a, b, photo]
    assert files.skills(a) == ["first", "second"] and files.skills(photo) == ["first", "second", "third"]
    files.add({photo: ["photo"]})
    assert files.skills(photo) == ["photo", "first", "second", "third"] and sorted(files.paths) == [a, b, photo]
    files.set_images(a, ())
    assert files.skills(photo) == ["photo", "third"]
