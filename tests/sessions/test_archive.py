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
from notes_cli.sessions.archive import load, save
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import Part, Snapshot, read_snapshot, serialize

from .snapshots import HEADER, asked, snapshot

Change = Callable[[dict[str, bytes]], Any]
MakeSegment = Callable[..., Segment]
NAMES = ["0000.json", "0001.json", "0002.json", "0001.gguf", "0002.gguf"]


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "sessions")


@pytest.fixture
def begun(sessions: Sessions, make_segment: MakeSegment) -> SessionFolder:
    """A session of two turns with valid K/V files."""
    with sessions.locked("mine", new=True) as stored:
        stored.folder.mkdir(parents=True)
        for questions in (("Why?",), ("Why?", "And then?")):
            segment = replace(make_segment(3), identity=HEADER.identity, text="", fields=())
            if stored.header:  # other rows
                segment = replace(segment, layers=tuple(replace(rows, k=-rows.k) for rows in segment.layers))
            files = {**stored.files, stored.next_rows.name: write_segment(stored.next_rows, segment)}
            state = asked(*questions)
            last = tuple(segment.tokens.tolist())
            turn = replace(state.conversation[-1], answer=(Part(last[2:]),))
            state = replace(
                state, tokens=[*stored.state.tokens, *last], conversation=(*stored.state.conversation, turn)
            )
            stored.commit("turn", questions[-1], state, files, HEADER)
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
    monkeypatch.setattr("notes_cli.sessions.folder.sync_folder", synced.append)
    data = archived(begun)
    parts = members(data)
    assert archived(begun) == data and list(parts) == NAMES
    there = load(sessions, io.BytesIO(data), "a file", "other")
    assert synced[-1] == sessions.folder
    assert there.state == begun.state and there.header == replace(HEADER, model="tiny.gguf")
    assert b"/models" not in data and b"/models" in begun.path(2).read_bytes()
    for name in NAMES[3:]:
        assert (there.folder / name).read_bytes() == parts[name] == (begun.folder / name).read_bytes()
    assert archived(there) == data and {path.stat().st_mode & 0o777 for path in there.folder.iterdir()} == {0o600}
    assert there.folder.stat().st_mode & 0o777 == 0o700
    with sessions.locked("other") as stored:
        stored.undo()
        assert stored.state.turns == 1
    begun.next_rows.write_bytes(b"half")
    assert archived(SessionFolder(begun.folder)) == data


def test_a_name_that_is_there_is_refused(begun: SessionFolder, sessions: Sessions) -> None:
    """The existing session is not touched; a folder without a session does not count."""
    before, data = snapshot(begun.folder), archived(begun)
    with pytest.raises(SessionError, match="there is a session mine already"):
        load(sessions, io.BytesIO(data), "a file", "mine")
    assert snapshot(begun.folder) == before
    (sessions.folder / "other").mkdir()
    (sessions.folder / "other" / "0001.gguf").write_bytes(b"of a fork that was killed")
    (sessions.folder / ".other.import").mkdir()
    assert load(sessions, io.BytesIO(data), "a file", "other").state == begun.state


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def renamed(old: str, new: str) -> Change:
    return lambda parts: packed({new if name == old else name: data for name, data in parts.items()})


def forged(change: Callable[[Snapshot], Snapshot], name: str = "0002.json") -> Change:
    """The archive with another snapshot, with a valid checksum."""
    return lambda parts: packed({**parts, name: serialize(change(read_snapshot(parts[name])))})


def other_tokens(last: Snapshot) -> Snapshot:
    state = last.state
    return replace(last, state=replace(state, tokens=[9, 9, *state.tokens[2:]]))


def other_model(each: Snapshot) -> Snapshot:
    return replace(each, header=replace(each.header, identity=replace(each.header.identity, weights="1" * 64)))


def all_of_another_model(parts: dict[str, bytes]) -> bytes:
    for name in NAMES[:3]:
        parts = members(forged(other_model, name)(parts))
    return packed(parts)


def with_info(name: str, **settings: Any) -> Change:
    """The archive with one more member, which has only a header."""
    info = tarfile.TarInfo(name)
    for key, value in settings.items():
        setattr(info, key, value)
    return lambda parts: packed(parts, info.tobuf(tarfile.GNU_FORMAT))


def only(*names: str) -> Change:
    return lambda parts: packed({name: parts[name] for name in names})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: b"", "it ends too early"),
        (lambda parts: b"no tar at all" * 100, "it is not a tar file"),
        (lambda parts: bytes(10240), "does not begin with a snapshot"),
        (lambda parts: gzip.compress(packed(parts)), "it is not a tar file"),
        (lambda parts: packed(parts)[:700], "it ends too early"),
        (lambda parts: packed(parts)[:9000], "it ends too early"),
        (only(*NAMES[:3]), "the rows 0001.gguf are missing"),
        (only(*NAMES[1:]), "0001.json is of another session"),
        (only("0000.json", "0002.json", *NAMES[3:]), r"'0001\.gguf' does not belong in it"),
        (only("0001.gguf", *NAMES[:3]), r"'0001\.gguf' does not belong in it"),
        (only("0001.json", "0000.json", *NAMES[2:-1]), "the rows 0002.gguf are missing"),
        (lambda parts: packed({**parts, "0002.json": parts["0002.json"] + b"{}\n"}), "0002.json cannot be read"),
        (lambda parts: packed({**parts, "0000.json": b""}), "0000.json cannot be read: it is empty"),
        (lambda parts: packed({**parts, "0002.json": flip(parts["0002.json"], 99)}), "is not as it was written"),
        (forged(lambda one: replace(one, format=12)), "it has format 12, this version of notes reads 11"),
        (forged(lambda one: replace(one, op="x")), "0002.json cannot be read: its values contradict"),  # type: ignore[arg-type]
        (forged(other_model), "0002.json is of another session"),
        (forged(lambda one: replace(one, first=True)), "the rows 0001.gguf are missing"),
        (all_of_another_model, "0001.gguf is of another model"),
        (forged(other_tokens), "has the rows of other tokens"),
        (lambda parts: packed({**parts, "0001.gguf": flip(parts["0001.gguf"], -9)}), "0001.gguf is damaged"),
        (lambda parts: packed({**parts, "0001.gguf": b"GGUF"}), "0001.gguf is damaged"),
        (lambda parts: packed({**parts, "0001.gguf": parts["0002.gguf"]}), "0001.gguf is not the file"),
        (renamed("0002.gguf", "../0002.gguf"), r"'\.\./0002\.gguf' does not belong in it"),
        (renamed("0002.gguf", "/tmp/0002.gguf"), "does not belong in it"),
        (renamed("0002.gguf", "0009.gguf"), r"'0009\.gguf' does not belong in it"),
        (renamed("0002.gguf", "0002.gguf\x1b[2J\n"), r"'0002\.gguf\\x1b\[2J\\n' does not belong in it"),
        (renamed("0002.gguf", "x" * 200 + ".gguf"), "is not a regular file"),
        (renamed("0002.json", "999999999.json"), r"'999999999\.json' does not belong in it"),
        (renamed("0000.json", "./0000.json"), r"'\./0000\.json' does not belong in it"),
        (renamed("0000.json", "00000.json"), "'00000.json' does not belong in it"),
        (with_info("0001.gguf"), r"'0001\.gguf' does not belong in it"),
        (with_info("0003.json"), "0003.json cannot be read: it is empty"),
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


@pytest.mark.parametrize("name", ["0000.json", "0001.gguf"])
def test_huge_sizes_are_believed_by_nobody(begun: SessionFolder, sessions: Sessions, name: str) -> None:
    """The header of an archive of a few KB claims a size that no disk has."""
    parts = {} if name == "0000.json" else {each: members(archived(begun))[each] for each in NAMES[:3]}
    with pytest.raises(SessionError, match="1,152,921,504,606,846,976 bytes"):
        load(sessions, io.BytesIO(with_info(name, size=1 << 60)(parts)), "a file", "other")
    assert sessions.names() == ["mine"]


def test_an_interrupt_leaves_nothing(begun: SessionFolder, sessions: Sessions) -> None:

    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 9000:
                raise KeyboardInterrupt
            return super().read(size)

    with pytest.raises(KeyboardInterrupt):
        load(sessions, Interrupted(archived(begun)), "a file", "other")
    assert [path.name for path in sessions.folder.iterdir() if path.name != ".locks"] == ["mine"]


def test_a_damaged_session_is_not_exported(begun: SessionFolder) -> None:
    """It could not be imported."""
    (begun.folder / "0001.gguf").write_bytes(b"GGUF")
    with pytest.raises(SessionError, match=r"session mine cannot be exported: 0001\.gguf is damaged"):
        archived(begun)
    (begun.folder / "0001.gguf").unlink()
    with pytest.raises(SessionError, match=r"the rows 0001\.gguf are missing"):
        archived(begun)
