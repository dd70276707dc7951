"""Archives: export and import round-trip, and hostile archives are refused."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.segment import Segment
from notes_cli.errors import SessionError
from notes_cli.library.container import write_segment
from notes_cli.sessions import HEAD, LEDGER
from notes_cli.sessions.archive import load, save
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import read_ledger, serialize

from .ledgers import HEADER, turn

Change = Callable[[dict[str, bytes]], Any]
MakeSegment = Callable[..., Segment]


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "sessions")


@pytest.fixture
def begun(sessions: Sessions, make_segment: MakeSegment) -> SessionFolder:
    """A session of two turns with valid K/V files."""
    with sessions.locked("mine", new=True) as stored:
        stored.folder.mkdir(parents=True)
        for number, count in ((1, 3), (2, 2)):
            segment = make_segment(count)
            segment = replace(segment, identity=HEADER.identity, text="", fields=())
            checksum = write_segment(stored.next_rows, segment)
            line = turn(*segment.tokens.tolist(), rows=f"000{number}.gguf", rows_checksum=checksum)
            stored.commit(line, None if stored.header else HEADER)
    return stored


def archived(stored: SessionFolder) -> bytes:
    out = io.BytesIO()
    save(stored, out)
    return out.getvalue()


def members(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]


def packed(parts: dict[str, bytes], last: bytes = b"") -> bytes:
    """An archive of these members; `last`: the header of one more."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        out.write(last)
    return out.getvalue()


def test_there_and_back(begun: SessionFolder, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The K/V is byte-identical and the state equal; archives are reproducible and contain neither paths of models nor
    what a crash left. The rename that creates the session is on disk before success is reported."""
    synced: list[Path] = []
    monkeypatch.setattr("notes_cli.sessions.archive.sync_folder", synced.append)
    data = archived(begun)
    assert archived(begun) == data
    parts = members(data)
    assert list(parts) == [LEDGER, "0001.gguf", "0002.gguf"]
    there = load(sessions, io.BytesIO(data), "a file", "other")
    assert synced == [sessions.folder]
    assert there.state == begun.state and there.header == replace(HEADER, model="tiny.gguf")
    assert b"/models" not in data and b"/models" in begun.ledger.read_bytes()
    for name in ("0001.gguf", "0002.gguf"):
        assert (there.folder / name).read_bytes() == parts[name] == (begun.folder / name).read_bytes()
    assert archived(there) == data and (there.folder / HEAD).is_file()
    assert {path.stat().st_mode & 0o777 for path in there.folder.iterdir()} == {0o600}
    assert there.folder.stat().st_mode & 0o777 == 0o700
    begun.next_rows.write_bytes(b"half")
    with begun.ledger.open("ab") as file:
        file.write(b'{"op": "tu')
    assert archived(SessionFolder(begun.folder)) == data


def test_a_name_that_is_there_is_refused(begun: SessionFolder, sessions: Sessions) -> None:
    """The existing session is not touched; a folder without a session does not count."""
    before = begun.ledger.read_bytes()
    data = archived(begun)
    with pytest.raises(SessionError, match="there is a session mine already"):
        load(sessions, io.BytesIO(data), "a file", "mine")
    assert begun.ledger.read_bytes() == before
    (sessions.folder / "other").mkdir()
    (sessions.folder / "other" / "0001.gguf").write_bytes(b"of a fork that was killed")
    (sessions.folder / ".other.import").mkdir()
    assert load(sessions, io.BytesIO(data), "a file", "other").state == begun.state


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def renamed(old: str, new: str) -> Change:
    return lambda parts: packed({new if name == old else name: data for name, data in parts.items()})


def forged(change: Callable[[list[Any]], object]) -> Change:
    """The archive with other lines in its ledger, with valid checksums."""

    def changed(parts: dict[str, bytes]) -> bytes:
        lines: list[Any] = read_ledger(parts[LEDGER]).lines
        change(lines)
        return packed({**parts, LEDGER: serialize(lines)})

    return changed


def with_info(name: str, **settings: Any) -> Change:
    """The archive with one more member, which has only a header."""
    info = tarfile.TarInfo(name)
    for key, value in settings.items():
        setattr(info, key, value)
    return lambda parts: packed(parts, info.tobuf(tarfile.GNU_FORMAT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: b"", "it ends too early"),
        (lambda parts: b"no tar at all" * 100, "it is not a tar file"),
        (lambda parts: bytes(10240), "does not begin with ledger.jsonl"),
        (lambda parts: gzip.compress(packed(parts)), "it is not a tar file"),
        (lambda parts: packed(parts)[:700], "it ends too early"),
        (lambda parts: packed(parts)[:6000], "it ends too early"),
        (lambda parts: packed({LEDGER: parts[LEDGER]}), "the rows 0001.gguf are missing"),
        (lambda parts: packed({**parts, LEDGER: parts[LEDGER] + b"{}\n"}), "its ledger is damaged"),
        (lambda parts: packed({**parts, LEDGER: b""}), "its ledger is damaged"),
        (lambda parts: packed({**parts, LEDGER: parts[LEDGER].replace(b"Why?", b"Who?")}), "line 2 is not as it was"),
        (
            lambda parts: packed({**parts, LEDGER: parts[LEDGER].replace(b'"format": 8', b'"format": 9')}),
            "it has format 9, this version of notes reads 8",
        ),
        (lambda parts: packed({**parts, "0001.gguf": flip(parts["0001.gguf"], -9)}), "0001.gguf in it is damaged"),
        (lambda parts: packed({**parts, "0001.gguf": b"GGUF"}), "0001.gguf in it is damaged"),
        (lambda parts: packed({**parts, "0001.gguf": parts["0002.gguf"]}), "0001.gguf in it is not the file"),
        (forged(lambda lines: lines[1]["pieces"][0].update(tokens=[9, 9, 9])), "holds the rows of other tokens"),
        (forged(lambda lines: lines[0]["identity"].update(weights="1" * 64)), "0001.gguf in it is of another model"),
        (lambda parts: packed(dict(reversed(parts.items()))), "does not begin with ledger.jsonl"),
        (renamed("0002.gguf", "../0002.gguf"), r"'\.\./0002\.gguf' does not belong in it"),
        (renamed("0002.gguf", "/tmp/0002.gguf"), "does not belong in it"),
        (renamed("0002.gguf", "0009.gguf"), r"'0009\.gguf' does not belong in it"),
        (renamed("0002.gguf", "0002.gguf\x1b[2J\n"), r"'0002\.gguf\\x1b\[2J\\n' does not belong in it"),
        (renamed("0002.gguf", "x" * 200 + ".gguf"), "is not a regular file"),
        (renamed(LEDGER, "./ledger.jsonl"), "does not begin with ledger.jsonl"),
        (with_info("0001.gguf"), r"'0001\.gguf' does not belong in it"),
        (with_info("0003.gguf", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "is not a regular file"),
        (with_info("0003.gguf", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "is not a regular file"),
        (with_info("0003.gguf", type=tarfile.DIRTYPE), "is not a regular file"),
        (with_info("0003.gguf", type=tarfile.CHRTYPE), "is not a regular file"),
        (with_info("0003.gguf", type=tarfile.GNUTYPE_SPARSE, size=1 << 60), "is not a regular file"),
    ],
)
def test_hostile_archives(
    begun: SessionFolder, sessions: Sessions, tmp_path: Path, change: Change, message: str
) -> None:
    """Each gives one line of error, no session, and no file left behind."""
    data = change(members(archived(begun)))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        SessionError, match=f"a file is not an export of a session: .*{message}.*Nothing was changed$"
    ) as f:
        load(sessions, io.BytesIO(data), "a file", "other")
    assert "\n" not in str(f.value) and sessions.names() == ["mine"]
    assert [path for path in sorted(tmp_path.rglob("*")) if path.suffix != ".lock"] == [
        path for path in before if path.suffix != ".lock"
    ]


@pytest.mark.parametrize("name", [LEDGER, "0001.gguf"])
def test_huge_sizes_are_believed_by_nobody(begun: SessionFolder, sessions: Sessions, name: str) -> None:
    """The header of an archive of 1 KB claims a size that no disk has."""
    parts = {} if name == LEDGER else {LEDGER: members(archived(begun))[LEDGER]}
    with pytest.raises(SessionError, match="1,152,921,504,606,846,976 bytes"):
        load(sessions, io.BytesIO(with_info(name, size=1 << 60)(parts)), "a file", "other")
    assert sessions.names() == ["mine"]


def test_an_interrupt_leaves_nothing(begun: SessionFolder, sessions: Sessions) -> None:

    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 3000:
                raise KeyboardInterrupt
            return super().read(size)

    with pytest.raises(KeyboardInterrupt):
        load(sessions, Interrupted(archived(begun)), "a file", "other")
    assert [path.name for path in sessions.folder.iterdir() if path.name != ".locks"] == ["mine"]


def test_whole_sessions_bring_what_they_have(sessions: Sessions, make_segment: MakeSegment) -> None:
    """Each turn's file has all K/V; after an undo without a file, only the text is exported."""
    identity = HEADER.identity
    with sessions.locked("mine", new=True) as stored:
        stored.folder.mkdir(parents=True)
        for number in (1, 2):
            segment = replace(make_segment(2), identity=identity, text="", fields=(), prefix_only=True, base=0)
            segment = replace(segment, context=segment.tokens[:0])
            checksum = write_segment(stored.next_rows, segment)
            line = turn(5, rows=f"000{number}.gguf", rows_checksum=checksum)
            stored.commit(line, None if stored.header else replace(HEADER, prefix_only=True))
        (stored.folder / "0001.gguf").unlink()
    assert list(members(archived(stored))) == [LEDGER, "0002.gguf"]
    assert load(sessions, io.BytesIO(archived(stored)), "a file", "other").state == stored.state


def test_a_damaged_session_is_not_exported(begun: SessionFolder) -> None:
    """It could not be imported."""
    (begun.folder / "0001.gguf").write_bytes(b"GGUF")
    with pytest.raises(SessionError, match=r"session mine is damaged: 0001\.gguf in it is damaged"):
        archived(begun)
    (begun.folder / "0001.gguf").unlink()
    with pytest.raises(SessionError, match=r"the rows 0001\.gguf are missing"):
        archived(begun)
