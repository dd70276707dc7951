"""Hostile archives of sessions: tricks of tar, and sound tar files with hostile snapshots and rows inside."""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import lzma
import random
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.faults.containers import sealed
from bench.faults.frame import ACCEPTED, Mutants, check, refused
from bench.faults.mutate import bytes_changed, list_changed
from bench.faults.parts import UnreadableError, apart, vouched
from bench.faults.snapshots import contradictions, snapshot_changed, stage, vouching
from notes_cli.errors import SessionError
from notes_cli.sessions import SNAPSHOT
from notes_cli.sessions.archive import load, save
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import read_snapshot

Members = list[tuple[tarfile.TarInfo, bytes]]


class Archives(Mutants):
    """Mutants of two exports."""

    cases, share, memory, suffix = 12_000, 2, 6 << 30, ".tar"
    patience = 120  # to make a mutant of 70 MB takes most of it

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        sessions = Sessions(stage().folder / "begun" / "sessions")
        self.sound = [exported(sessions.find(name)) for name in ("mine", "other")]
        self.members = [taken_apart(data) for data in self.sound]
        self.home = stage().folder / "in"
        self.sessions = Sessions(self.home / "sessions")
        self.home.mkdir(mode=0o700)
        self.known = set(stage().folder.iterdir())

    def mutant(self, rng: random.Random, number: int) -> bytes:
        if rng.random() < 0.2:
            return bytes_changed(rng, rng.choice(self.sound), self.sound)
        members = [member(info.name, data, info.mode) for info, data in rng.choice(self.members)]
        for _ in range(rng.choice((1, 1, 2))):
            rng.choice(TRICKS)(rng, members, self.members)
        if rng.random() < 0.7:
            _vouch(members)
        return rng.choice((*[put_together] * 8, *WRAPPED))(members)

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        try:
            stored = load(self.sessions, io.BytesIO(data), "it.notes.tar", "came")
        except SessionError as error:
            check(not self._written(), f"refused ({error}), and it left {self._written()}")
            return refused(error)
        try:
            self._check(stored)
        finally:
            self.sessions.remove("came")
        return ACCEPTED

    def _written(self) -> list[Path]:
        """Files, links and folders other than the stage's own."""
        outside = [path for path in stage().folder.iterdir() if path not in self.known]
        inside = [path for path in self.home.rglob("*") if path.is_symlink() or not path.is_dir()]
        inside += [path for path in self.sessions.folder.glob("*") if path.name not in (".locks", "came")]
        return outside + [path for path in inside if path.parent.name != ".locks"]

    def _check(self, stored: SessionFolder) -> None:
        snapshots = [read_snapshot(stored.path(number).read_bytes()) for number in stored.numbers]
        names = {stored.path(number).name for number in stored.numbers} | {*stored.kept()}
        for path in self._written():
            own = path.parent == stored.folder and path.name in names
            check(own, f"{path} was written")
            found = path.lstat()
            safe = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 1
            check(safe, f"{path.name} has the mode {oct(found.st_mode)}")
        ids = {path.name: vouched(path.read_bytes()).tensor("notes.tokens") for path in stored.folder.glob("*.gguf")}
        for snapshot in snapshots:
            contradictions(snapshot)
            for token, (name, row) in zip(snapshot.state.tokens, snapshot.state.by_position, strict=True):
                here = ids.get(name, b"")[4 * row : 4 * row + 4]
                check(here == token.to_bytes(4, "little"), f"row {row} of {name} is not of token {token}")
        again = exported(stored)
        back = load(self.sessions, io.BytesIO(again), "it", "back")
        try:
            check(exported(back) == again, "it comes back otherwise")
        finally:
            self.sessions.remove("back")


def exported(stored: SessionFolder) -> bytes:
    out = io.BytesIO()
    save(stored, out)
    return out.getvalue()


def taken_apart(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [(info, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]


def put_together(members: Members) -> bytes:
    """A tar file of these members, with their own headers."""
    out = io.BytesIO()
    for info, data in members:
        form = tarfile.PAX_FORMAT if info.pax_headers else tarfile.GNU_FORMAT
        try:
            head = info.tobuf(form, "utf-8", "surrogateescape")
        except (ValueError, OverflowError):
            head = b"\xff" * 512
        out.write(head + data + bytes(-len(data) % 512))
    return out.getvalue() + bytes(1024 + -(out.tell() + 1024) % 10240)


def member(name: str, data: bytes, mode: int = 0o600, kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.type = len(data), mode, kind
    return info, data


# ---- tricks. Each changes the members in place; `others` are those of all sound exports.


HEADERS: dict[str, tuple[Any, ...]] = {
    "name": (
        *("/etc/x", "../x", "../../x", "./0001.json", "a/b", "0001.gguf/../../x", "", ".", "..", "0009.gguf", "~"),
        *("0001.json\0.gguf", "\n\x1b[2J", "0001.gguf ", "0001.JSON", "\uff10\uff10\uff10\uff11.gguf", "C:\\x"),
        *("evil.py", "0099.gguf", ".hidden", "00001.json", "999999999.json", ".locks", "x" * 99, "y" * 300),
    ),
    "type": tuple(bytes([byte]) for byte in b"0\x001234567LKSxg\xff"),
    "linkname": ("", "/etc/passwd", "../begun/sessions/mine/0001.json", "0001.json"),
    "devmajor": (0, 1, 8),
    "size": (0, 1, 512, 1 << 28, 1 << 33, 1 << 60, -1, -512),
    "mode": (0, 0o644, 0o4755),
}


def _header(rng: random.Random, member: tuple[tarfile.TarInfo, bytes]) -> tuple[tarfile.TarInfo, bytes]:
    """The member with one or two false values in its header."""
    info, data = copy.copy(member[0]), member[1]
    for name in rng.choice((["name"], ["type", "linkname"], ["size"], ["mode"], ["type", "devmajor"])):
        near = (info.size - 1, info.size + 1, info.size + 512) if name == "size" else ()
        setattr(info, name, rng.choice((*HEADERS[name], *near)))
    return info, data


def _members(rng: random.Random, members: Members, others: list[Members]) -> None:
    """A member is missing, twice there, foreign, in another place or has another header; or all are reversed."""
    members[:] = list_changed(rng, members, _header, rng.choice(others)) or members


def _longer_name(rng: random.Random, members: Members, others: list[Members]) -> None:
    """A member of the kind that names the next one, as GNU tar and PAX have it."""
    at = rng.randrange(len(members))
    if rng.random() < 0.5:
        data = rng.choice((b"../x\0", b"0001.gguf\0", b"x" * 5000 + b"\0"))
        members.insert(at, member("././@LongLink", data, kind=b"L"))
    else:
        headers = rng.choice(({"path": "../x"}, {"size": "99999999999"}, {"comment": "é" * 3000}))
        members[at][0].pax_headers = dict(headers)


def _bomb(rng: random.Random, members: Members, others: list[Members]) -> None:
    """Many zeros, or many members."""
    if rng.random() < 0.5:
        zeros = rng.choice((b"\0", b"\n", b"{}\n", b"[")) * (1 << rng.choice((10, 16, 20)))
        _replace(members, rng.randrange(len(members)), lambda data: data + zeros)
    else:
        members += [member(members[-1][0].name, b"")] * 500


def _replace(members: Members, at: int, change: Callable[[bytes], bytes]) -> None:
    info, data = members[at]
    data = change(data)
    members[at] = info, data
    info.size = len(data)


def _snapshot(rng: random.Random, members: Members, others: list[Members]) -> None:
    at = rng.choice([at for at, (info, _) in enumerate(members) if SNAPSHOT.fullmatch(info.name)] or [0])
    _replace(members, at, lambda data: snapshot_changed(rng, data, [them[0][1] for them in others]))


def _rows(rng: random.Random, members: Members, others: list[Members]) -> None:
    """Rows of another place or session under a name that a snapshot has, or changed ones."""
    donors = [data for them in others for info, data in them if info.name.endswith(".gguf")]

    def changed(data: bytes) -> bytes:
        if rng.random() < 0.4:
            return rng.choice(donors)
        try:
            parts = apart(data)
        except UnreadableError:
            return data
        return sealed(rng, parts, [parts], 1) if rng.random() < 0.7 else bytes_changed(rng, data, [data])

    if rows := [at for at, (info, _) in enumerate(members) if info.name.endswith(".gguf")]:
        _replace(members, rng.choice(rows), changed)


def _vouch(members: Members) -> None:
    """Make the snapshots name the files as they are now."""
    rows = {info.name: data for info, data in members}
    for at, (info, data) in enumerate(members):
        if SNAPSHOT.fullmatch(info.name) and info.size == len(data):
            _replace(members, at, lambda data: vouching(data, rows))


TRICKS: tuple[Callable[[random.Random, Members, list[Members]], None], ...] = (
    *([_members] * 9 + [_longer_name, _bomb] + [_snapshot] * 3 + [_rows] * 5),
)


def _zipped(members: Members) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for info, data in members:
            archive.writestr(info.name.replace("\0", "") or "x", data)
    return out.getvalue()


WRAPPED: tuple[Callable[[Members], bytes], ...] = (
    lambda members: gzip.compress(put_together(members) + bytes(1 << 20)),
    lambda members: bz2.compress(put_together(members), 1),
    lambda members: lzma.compress(put_together(members), preset=0),
    _zipped,
    lambda members: put_together(members) * 2,
    lambda members: put_together(members)[:-1024],
    lambda members: put_together(members).rstrip(b"\0"),
    lambda members: put_together(members) + b"x" * 999,
    lambda members: put_together(members[:1]),
    lambda members: b"",
)
