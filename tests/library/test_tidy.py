"""Tests of eviction from the library: the order, files that are spared, and records of uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from notes_cli.engine.segment import Identity, Segment
from notes_cli.errors import Notice, UnwritableError
from notes_cli.library import check, segment_files
from notes_cli.library.container import open_segment, open_stored, write_segment
from notes_cli.library.safe_files import locked
from notes_cli.library.store import Library

from ..limits import unprivileged_here

MakeSegment = Callable[..., Segment]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "library"


@pytest.fixture
def put(folder: Path, identity: Identity, make_segment: MakeSegment, tmp_path: Path) -> Callable[..., Path]:
    """Write a segment whose file has that size at least and was used `age` seconds ago."""

    def put(name: str, age: float = 0.0, rows: int = 8, source: str = "file") -> Path:
        (tmp_path / f"{name}.txt").write_text("x")
        where = str(tmp_path / f"{name}.txt") if source == "file" else source
        path = Library(folder).path(name, identity)
        write_segment(path, make_segment(n=rows, name=name, source=where))
        then = path.stat().st_mtime - age
        os.utime(path, (then, then))
        return path

    return put


def names(folder: Path) -> list[str]:
    return [one.name for one in check.library_files(folder)]


def test_the_least_recently_used_is_first(folder: Path, put: Callable[..., Path]) -> None:
    """By the last use, else the time of the compile; a use moves a segment to the end and rewrites nothing of it."""
    old, _, young = put("old", 300), put("middle", 200), put("young", 100)
    before = old.read_bytes(), old.stat().st_mtime_ns
    assert names(folder) == ["old", "middle", "young"]
    for _ in range(3):
        Library(folder).used(old)
    assert names(folder) == ["middle", "young", "old"]
    assert (old.read_bytes(), old.stat().st_mtime_ns) == before
    assert [one.uses for one in check.library_files(folder)] == [0, 0, 3]
    assert segment_files.uses_of(young) == segment_files.Uses()


def test_uses_of_many_processes_are_all_counted(folder: Path, put: Callable[..., Path]) -> None:
    """Appended at once by threads and processes, none is lost and nothing is torn."""
    path = put("returns")
    code = f"""from pathlib import Path; from notes_cli.library.segment_files import mark_use
for _ in range(50): mark_use(Path({str(path)!r}), 100, 0.5)"""
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: segment_files.mark_use(path, 10), range(200)))
    assert [other.wait() for other in others] == [0, 0]
    assert segment_files.uses_of(path).count == 300
    # Unknown times count as 0.
    assert segment_files.spliced_from(path) == segment_files.Spliced(300, 12_000, 50.0)
    segment_files.mark_use(path, 0, 0.0)  # it was decoded
    assert segment_files.uses_of(path).count == 301 and segment_files.spliced_from(path).times == 300
    with (folder / segment_files.USES / path.name).open("ab") as file:
        file.write(b"abc")  # of a mark that another program has cut
    assert segment_files.spliced_from(path).tokens == 12_000


def test_what_cannot_be_counted_is_no_error(folder: Path, put: Callable[..., Path], tmp_path: Path) -> None:
    """A folder that is read-only, one that a link leads to, a file elsewhere: nothing is written, nothing raised."""
    path = put("returns")
    (folder / segment_files.USES).mkdir(mode=0o500)
    with unprivileged_here():
        Library(folder).used(path)
    assert segment_files.uses_of(path) == segment_files.Uses()
    (folder / segment_files.USES).rmdir()
    (folder / segment_files.USES).mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / segment_files.USES / path.name).symlink_to(victim)
    Library(folder).used(path)
    Library(folder).used(tmp_path / "elsewhere.gguf")
    assert victim.read_text() == "mine" and not (tmp_path / segment_files.USES).exists()


def test_the_budget_takes_the_oldest_and_never_the_new_one(folder: Path, put: Callable[..., Path]) -> None:
    """No more files are removed than needed; the newly compiled one stays even if its time is the oldest. None is
    removed in vain: if the new one exceeds the budget, the others keep within it by themselves."""
    put("a", 400)
    put("b", 300)
    new, youngest = put("new", 500), put("c", 200)
    size = new.stat().st_size + youngest.stat().st_size
    done = check.shrink(folder, size + 10, new=new)
    assert [one.name for one in done.removed] == ["a", "b"] and done.nbytes == size
    assert names(folder) == ["new", "c"]
    assert not check.shrink(folder, size, new=new).removed
    large = put("large", rows=4000)
    assert not check.shrink(folder, size, new=large).removed
    assert [one.name for one in check.shrink(folder, size // 2 + 10, new=large).removed] == ["new"]


def test_a_segment_that_is_open_stays(folder: Path, put: Callable[..., Path]) -> None:
    """In this process or another, until its rows are read or it is closed; so does one that is being compiled."""
    path = put("returns", 100)
    Library(folder).used(path)
    with locked(segment_files.lock_of(path)):
        assert not check.remove(path) and path.exists()
    held = open_stored(path)
    assert not check.remove(path)
    done = check.shrink(folder, 0)
    assert [(one.name, why) for one, why in done.spared] == [("returns", "it is in use")] and path.exists()
    assert held.layers[0].k.shape[0] == 8  # all is read, and the file is closed
    assert check.remove(path) and not path.exists() and not list((folder / segment_files.USES).iterdir())
    path = put("returns", 100)
    code = f"""from pathlib import Path; from notes_cli.library.container import open_stored
held = open_stored(Path({str(path)!r})); print("open", flush=True); input()"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "open\n"
    assert not check.remove(path)
    other.kill()
    other.wait()
    assert check.remove(path)


@pytest.mark.parametrize("source", ["-", "", "/nowhere/at/all.txt", "{other}\n/nowhere/at/all.txt"])
def test_a_text_that_is_nowhere_else_is_not_removed_by_itself(
    folder: Path, put: Callable[..., Path], source: str, tmp_path: Path
) -> None:
    """From standard input, or a file of it is gone: a budget does not lose it; a second segment of it is enough."""
    path = put("piped", 300, source=source.format(other=tmp_path / "other.txt"))
    put("other", 100)
    done = check.shrink(folder, 0)
    assert [(one.name, why) for one, why in done.spared] == [("piped", "its text is nowhere else")]
    assert names(folder) == ["piped"]
    there = check.library_files(folder)
    assert check.select_files(there, [], 1.0, None) == ([], there)
    second = path.with_name(f"piped.{'0' * 12}.gguf")
    second.write_bytes(path.read_bytes())
    assert len(check.shrink(folder, path.stat().st_size).removed) == 1


def test_what_has_changed_since_it_was_chosen_stays(folder: Path, put: Callable[..., Path], tmp_path: Path) -> None:
    """A file that was used, compiled again or removed while the user was asked is not removed."""
    used, written, alone = put("used", 300), put("written", 200), put("alone", 100)
    there = check.library_files(folder)
    Library(folder).used(used)
    written.write_bytes(written.read_bytes())
    (tmp_path / "alone.txt").unlink()
    done = check.remove_files(there, folder)
    assert [(one.name, why) for one, why in done.spared] == [
        *((name, "it was used or compiled meanwhile") for name in ("used", "written")),
        ("alone", "its text is nowhere else"),
    ]
    assert not done.removed and alone.exists()
    asked = [one for one in there if one.name == "alone"]
    assert len(check.remove_files(check.library_files(folder), folder, asked).removed) == 3


def test_one_that_cannot_be_removed_keeps_no_others(folder: Path, put: Callable[..., Path], tmp_path: Path) -> None:
    """Removed files are reported, and the reason to spare one. A damaged file is left to fsck and rm."""
    path = put("linked", 300)
    path.rename(tmp_path / "elsewhere.gguf")
    path.symlink_to(tmp_path / "elsewhere.gguf")
    put("other", 100)
    damaged = put("damaged", 200)
    damaged.write_bytes(b"GGUF" + bytes(100))
    done = check.shrink(folder, 0)
    assert [one.name for one in done.removed] == ["other"] and damaged.exists()
    found = {one.name: why for one, why in done.spared}
    assert found["linked"].startswith(f"cannot remove {path}")


def test_a_compile_keeps_the_budget_and_says_what_went(
    folder: Path,
    put: Callable[..., Path],
    identity: Identity,
    make_segment: MakeSegment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One notice with the names. A failed compile removes nothing, and a failure to remove spoils no compile."""
    size = put("a", 300).stat().st_size
    put("b", 200)
    said: list[Notice] = []
    library = Library(folder, max_size=2 * size)
    with pytest.raises(KeyboardInterrupt), library.compiling("c", identity, say=said.append):
        raise KeyboardInterrupt
    assert names(folder) == ["a", "b"] and not said
    with library.compiling("c", identity, say=said.append) as path:
        write_segment(path, make_segment(n=8, name="c", source="-"))
    assert names(folder) == ["b", "c"]
    (notice,) = said
    assert notice.what.startswith("removed a (") and "to keep the library within" in notice.what
    with Library(folder, max_size=1).compiling("d", identity, say=said.append) as path:
        write_segment(path, make_segment(n=8, name="d", source="-"))
    assert "more than the 1 B it may (c: its text is nowhere else)" in said[-1].what

    def full(path: Path) -> bool:
        raise UnwritableError(f"cannot remove {path}: Input/output error")

    monkeypatch.setattr(check, "remove", full)
    put("f", 300)
    with Library(folder, max_size=1).compiling("e", identity, say=said.append) as path:
        write_segment(path, make_segment(n=8, name="e"))
    assert open_segment(path).name == "e" and "was not kept within 1 B: cannot remove" in said[-1].what


def test_many_that_tidy_at_once_remove_no_more_than_one_would(folder: Path, put: Callable[..., Path]) -> None:
    size = min(put(f"s{number}", 1000 - number).stat().st_size for number in range(8))
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: check.shrink(folder, 4 * size), range(4)))
    assert sum(len(one.removed) for one in done) == 4 and names(folder) == ["s4", "s5", "s6", "s7"]
