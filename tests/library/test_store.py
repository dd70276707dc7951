"""Tests of the library: names of skills, lookup, locks, export."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine.segment import Identity, Segment
from notes_cli.errors import DamagedError, NotesError, SegmentError, UnwritableError
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.library.store import Library, export, shared_segments

from ..limits import as_a_new_process, belongs_to_another, few_descriptors, small_files
from ..refused import refused

MakeSegment = Callable[..., Segment]


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "library")


@pytest.fixture
def filled(library: Library, identity: Identity, make_segment: MakeSegment) -> Library:
    for name in ("returns", "support"):
        write_segment(library.path(name, identity), make_segment(name=name))
    return library


def test_names_and_entries(filled: Library, identity: Identity, tmp_path: Path) -> None:
    """Other files are not shown, a damaged one is shown with its problem; a folder appears with the first compile."""
    assert Library(tmp_path / "none").names() == Library(tmp_path / "none").entries() == []
    (filled.folder / "readme.txt").touch()
    (filled.folder / f"broken.{identity.key}.gguf").write_bytes(b"GGUF")
    assert filled.names() == ["broken", "returns", "support"]
    broken, returns, _ = filled.entries()
    assert broken.info is None and "Compile it again" in str(broken.problem)
    assert returns.info is not None and returns.info.name == "returns"


def test_names_in_any_script(library: Library, identity: Identity, make_segment: MakeSegment) -> None:
    """Each has a file, is listed and is found in whichever form its letters are typed. None leaves the folder."""
    for name in ("../x", "a/b", "", "A", "a--b", ".", "a.b", "-", "a\u202e", "u\u0308", "規 則"):
        with pytest.raises(SegmentError, match="cannot be the name of a skill"):
            library.path(name, identity)
    for name in ("規則", "方針", "rückgabe"):
        with library.compiling(name, identity) as path:
            write_segment(path, make_segment(name=name))
    assert library.names() == ["rückgabe", "方針", "規則"]
    target = library.resolve("r\u0075\u0308ckgabe")
    assert (target.kind, target.name) == ("name", "rückgabe")
    with pytest.raises(SegmentError, match="Windows reserves the name nul"), library.compiling("nul", identity):
        pass
    write_segment(library.path("maße", identity), make_segment(name="maße"))
    with refused(SegmentError, r"there is already maße.*: --name NAME"), library.compiling("masse", identity):
        pass  # a file system may take them for one


def test_folders_are_made_for_us_alone(tmp_path: Path, identity: Identity, make_segment: MakeSegment) -> None:
    """Also those above that are missing, whatever the umask is."""
    library = Library(tmp_path / "home" / "library")
    before = os.umask(0)
    try:
        with library.compiling("returns", identity) as path:
            write_segment(path, make_segment())
    finally:
        os.umask(before)
    made = (tmp_path / "home", library.folder, library.folder / ".locks")
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700] * 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_library_that_others_can_write_in(filled: Library, identity: Identity) -> None:
    """It may be forged: nothing is listed, found, compiled or removed. One that others can read becomes private."""
    uses: list[Callable[[], object]] = [
        *(filled.names, filled.entries, lambda: filled.find("returns", identity), lambda: filled.resolve("returns")),
        *(lambda: filled.remove("returns"), lambda: filled.path("returns", identity)),
        lambda: filled.compiling("returns", identity).__enter__(),
    ]
    for use, mode in zip(uses, (0o777, 0o770, 0o702) * 3, strict=False):
        filled.folder.chmod(mode)
        as_a_new_process()
        with refused(NotesError, f"others can write in .*run: chmod 700 {filled.folder}$"):
            use()
    filled.folder.chmod(0o755)
    as_a_new_process()
    assert filled.names() == ["returns", "support"] and filled.folder.stat().st_mode & 0o777 == 0o700


def test_a_segment_of_another_user(filled: Library, identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not used until it is gone, since its owner may have written elsewhere, too."""
    path = filled.path("returns", identity)
    belongs_to_another(path, monkeypatch)
    for use in (filled.entries, filled.names, lambda: filled.find("support", identity)):
        with refused(NotesError, f"returns.* belongs to .*not to you.*: rm -f {path}$"):
            use()
    path.unlink()
    assert filled.names() == ["support"]


def test_what_cannot_be_read_now_is_not_damaged(filled: Library, identity: Identity) -> None:
    """Running out of descriptors is reported as such, not as a damaged or missing file."""
    path = filled.path("returns", identity)
    with few_descriptors(0):
        for action in (lambda: peek(path), lambda: open_segment(path), lambda: filled.resolve(str(path))):
            with pytest.raises(SegmentError, match=r"cannot read .*: Too many open files") as caught:
                action()
            assert not isinstance(caught.value, DamagedError) and "Compile" not in str(caught.value)


def test_remove(filled: Library, identity: Identity, make_segment: MakeSegment) -> None:
    """All files of a name go, or the one of an identity; the rest stays. Of several files for other models, that with
    the fewest differences is named."""
    other = replace(identity, weights="cd" * 32, kv_type="f32/f32")
    write_segment(filled.path("returns", other), make_segment(identity=other))
    with pytest.raises(SegmentError) as caught:
        filled.find("returns", replace(identity, kv_type="q8_0/q8_0"))
    assert "this model is" not in str(caught.value)
    assert filled.remove("returns", other) == [filled.path("returns", other)]
    assert filled.remove("returns") == [filled.path("returns", identity)]
    assert filled.names() == ["support"]
    with pytest.raises(SegmentError, match="no compiled skill"):
        filled.remove("returns")


def test_one_compile_at_a_time(library: Library, identity: Identity) -> None:
    """A second process waits, or names the process that it would wait for; leftovers of a killed one are removed."""

    def second() -> None:
        with library.compiling("returns", identity, wait=0.05):
            pass

    with library.compiling("returns", identity) as path, ThreadPoolExecutor(1) as pool:
        assert path == library.path("returns", identity)
        with pytest.raises(SegmentError, match="another process is compiling returns"):
            pool.submit(second).result()
        left = library.folder / f".{path.name}.abc.tmp"
        left.touch()
    with library.compiling("returns", identity):
        assert not left.exists()


@pytest.fixture
def own(tmp_path: Path, make_segment: Callable[..., Segment]) -> Path:
    (tmp_path / "own").mkdir(mode=0o700)
    path = tmp_path / "own" / "returns.0123456789ab.gguf"
    write_segment(path, make_segment(n=50, source="/home/me/secret/returns.txt", stamp=(1, 2, 3)))
    return path


def test_all_but_where_the_text_came_from(own: Path, tmp_path: Path) -> None:
    """Rows, text, fields, when it was compiled: the same; the path of the text is nowhere in the file. The same segment
    is left alone, any other file is refused, force replaces it."""
    target = tmp_path / "a.gguf"
    assert export(own, target)
    before, after = open_segment(own), open_segment(target)
    assert np.array_equal(before.layers[0].k, after.layers[0].k)
    assert (before.text, before.fields, before.identity) == (after.text, after.fields, after.identity)
    assert peek(own).created == peek(target).created and b"secret" not in target.read_bytes()
    assert (after.source, after.stamp) == ("", ())
    written = target.stat().st_mtime_ns
    assert not export(own, target) and target.stat().st_mtime_ns == written
    for content in (b"a letter", b""):
        target.write_bytes(content)
        with refused(SegmentError, "is there already, and is another file"):
            export(own, target)
        assert target.read_bytes() == content
    write_segment(target, replace(before, text="other", fields=()))
    with refused(SegmentError, "is another file"):
        export(own, target)
    assert export(own, target, force=True) and open_segment(target).text == before.text


def test_who_can_read_the_folder_can_read_the_file(own: Path, tmp_path: Path) -> None:
    """In a shared folder; a single file is for its owner alone."""
    for folder_mode, mode in ((0o700, 0o600), (0o750, 0o640), (0o755, 0o644)):
        folder = tmp_path / f"{folder_mode}"
        folder.mkdir()
        folder.chmod(folder_mode)
        export(own, folder / own.name, shared=True)
        export(own, folder / "alone.gguf")
        assert [stat.S_IMODE((folder / name).stat().st_mode) for name in (own.name, "alone.gguf")] == [mode, 0o600]


def test_damage_and_full_disks_leave_nothing(own: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    with small_files(500), refused(UnwritableError, "Nothing was changed"):
        export(own, tmp_path / "shared" / "a.gguf")
    data = bytearray(own.read_bytes())
    data[-40] ^= 1
    own.write_bytes(data)
    with refused(DamagedError, "checksum"):
        export(own, tmp_path / "shared" / "a.gguf")
    assert not list((tmp_path / "shared").iterdir())


def test_only_segments_are_found_in_a_shared_folder(own: Path, tmp_path: Path) -> None:
    (own.parent / "model.gguf").write_bytes(b"GGUF")
    (own.parent / "readme.txt").touch()
    second = own.with_name("returns.abcdefabcdef.gguf")
    second.write_bytes(own.read_bytes())
    assert shared_segments(own.parent) == {"returns": [own, second]}
    with refused(SegmentError, "cannot read"):
        shared_segments(tmp_path / "nowhere")
