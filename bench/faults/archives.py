"""Hostile archives of sessions: tricks of tar, and sound tar files with hostile ledgers and rows inside."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from bench.faults import containers
from bench.faults.frame import ACCEPTED, FOUND, REFUSED, Budget, Row, Verdict, chance, tried
from bench.faults.ledgers import begun, contradicted, ground, lied, vouching
from bench.faults.mutate import bytes_changed
from bench.faults.parts import UnreadableError, apart, vouched
from bench.faults.stage import Stage
from notes_cli.errors import SessionError
from notes_cli.sessions.archive import load, save
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.ledger import read_ledger
from notes_cli.sessions.listing import HEAD, LEDGER

TITLE = (
    "Exports of sessions, mutated: bytes; members with absolute paths, `..`, links, devices, pipes, folders, "
    "duplicates, holes, long names (GNU and PAX), other orders, sizes up to 2^60 and negative; compressed, "
    "concatenated, cut, with bombs of zeros; sound tar files with mutated ledgers, with mutated rows, sealed or not, "
    "with the rows of another session or place."
)
FAILS = (
    "an exception other than the one-line refusal, more than 6 GiB or 20 s, a file written outside of the new session "
    "or left by a refusal, a wrong accept (files that the ledger does not name, rows that their checksums do not vouch "
    "for or that are of other tokens than the ledger says, a ledger that contradicts itself), or a session that was "
    "taken and cannot be exported and imported again to the same bytes."
)
CASES, SHARE = 12_000, 2
Members = list[tuple[tarfile.TarInfo, bytes]]


def run(budget: Budget, seed: int) -> Row:
    return tried(Archives(ground(), seed), budget, patience=20, memory=containers.MEMORY, say="archives")


class Archives:
    """Judges mutants of two exports."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.seed = stage, seed
        sessions = Sessions(begun(stage) / "sessions")
        self.sound = [exported(sessions.find(name)) for name in ("mine", "other")]
        self.members = [taken_apart(data) for data in self.sound]
        self.folder = stage.folder / "in"
        self.sessions = Sessions(self.folder / "sessions")
        self.folder.mkdir(mode=0o700)
        self.known = set(stage.folder.iterdir())

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        data = self._lie(rng)
        verdict = self._judged(data)
        if verdict.outcome not in ("accepted", "refused"):
            (FOUND / f"archive-{number}.tar").write_bytes(data)
        return verdict

    def _lie(self, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return bytes_changed(rng, rng.choice(self.sound), self.sound)
        members = [(copied(info), data) for info, data in rng.choice(self.members)]
        for _ in range(rng.choice((1, 1, 2))):
            trick = rng.choice(TRICKS)
            trick(rng, members, self.members)
        if rng.random() < 0.7:
            _vouch(members)
        return rng.choice((*[put_together] * 8, *WRAPPED))(members)

    def _judged(self, data: bytes) -> Verdict:
        try:
            stored = load(self.sessions, io.BytesIO(data), "it.notes.tar", "came")
        except SessionError as error:
            said = str(error)
            left = [str(path) for path in self._written()]
            if left:
                return Verdict("wrong", f"refused ({said}), and it left {left[0]}")
            return REFUSED if said.isprintable() and len(said) < 500 else Verdict("wrong", f"no clear line: {said!r}")
        try:
            why = self._contradicted(stored)
        finally:
            self.sessions.remove("came")
        return Verdict("wrong", why) if why else ACCEPTED

    def _written(self) -> list[Path]:
        """Return files and links other than the stage's own."""
        outside = [path for path in self.stage.folder.iterdir() if path not in self.known]
        inside = [path for path in self.folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        inside = [path for path in inside if path.parent.name != ".locks"]
        return (
            outside + inside + [path for path in self.sessions.folder.glob("*") if path.name not in (".locks", "came")]
        )

    def _contradicted(self, stored: SessionFolder) -> str:
        data = stored.ledger.read_bytes()
        ledger = read_ledger(data)
        why = contradicted(ledger)
        if why:
            return why
        for path in self._written():
            mode = path.lstat().st_mode
            if path.parent != stored.folder or path.name not in (LEDGER, HEAD, *ledger.kept):
                return f"{path} was written"
            if not stat.S_ISREG(mode) or stat.S_IMODE(mode) != 0o600 or path.stat().st_nlink != 1:
                return f"{path.name} has the mode {oct(mode)}"
        tokens: dict[str, list[int]] = {}
        for path in stored.folder.glob("*.gguf"):
            try:
                why = vouched(path.read_bytes())
                ids = apart(path.read_bytes()).tensor("notes.tokens")
            except UnreadableError as error:
                return f"{path.name}: {error}"
            if why:
                return f"{path.name}: {why}"
            assert ids is not None
            tokens[path.name] = [int.from_bytes(ids.data[at : at + 4], "little") for at in range(0, len(ids.data), 4)]
        if not ledger.header.prefix_only:
            for token, (name, row) in zip(ledger.state.tokens, ledger.state.rows, strict=True):
                if tokens.get(name, [])[row : row + 1] != [token]:
                    return f"row {row} of {name} is not of token {token}"
        again = exported(stored)
        back = load(self.sessions, io.BytesIO(again), "it", "back")
        try:
            return "" if exported(back) == again else "it comes back otherwise"
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
    """Make a tar file of these members, with their own headers."""
    out = io.BytesIO()
    for info, data in members:
        form = tarfile.PAX_FORMAT if info.pax_headers or (len(info.name) > 200 and info.uid) else tarfile.GNU_FORMAT
        try:
            head = info.tobuf(form, "utf-8", "surrogateescape")
        except (ValueError, OverflowError):
            head = b"\xff" * 512
        out.write(head + data + bytes(-len(data) % 512))
    return out.getvalue() + bytes(1024 + -(out.tell() + 1024) % 10240)


def copied(info: tarfile.TarInfo) -> tarfile.TarInfo:
    new = tarfile.TarInfo(info.name)
    new.size, new.mode = info.size, info.mode
    return new


# ---- tricks. Each changes the members in place; `others` are those of all sound exports.


def _name(rng: random.Random, members: Members, others: list[Members]) -> None:
    rng.choice(members)[0].name = rng.choice(
        (
            *(
                "/etc/x",
                "../x",
                "../../x",
                "./ledger.jsonl",
                "a/b",
                "0001.gguf/../../x",
                "",
                ".",
                "..",
                "0009.gguf",
                "~",
            ),
            *(
                "x" * 99,
                "y" * 300,
                "ledger.jsonl\0.gguf",
                "\n\x1b[2J",
                "0001.gguf ",
                "LEDGER.JSONL",
                "\uff10\uff10\uff10\uff11.gguf",
                "C:\\x",
            ),
        )
    )


def _type(rng: random.Random, members: Members, others: list[Members]) -> None:
    info, _ = rng.choice(members)
    info.type = rng.choice(
        (b"0", b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"L", b"K", b"S", b"x", b"g", b"\xff")
    )
    info.linkname = rng.choice(("", "/etc/passwd", "../begun/sessions/mine/ledger.jsonl", LEDGER))
    info.devmajor, info.devminor = rng.choice(((0, 0), (1, 3), (8, 0)))


def _size(rng: random.Random, members: Members, others: list[Members]) -> None:
    info, data = rng.choice(members)
    info.size = rng.choice((0, 1, len(data) - 1, len(data) + 1, len(data) + 512, 1 << 28, 1 << 33, 1 << 60, -1, -512))


def _twice(rng: random.Random, members: Members, others: list[Members]) -> None:
    info, data = rng.choice(members)
    members.insert(rng.randrange(len(members) + 1), (copied(info), data))


def _order(rng: random.Random, members: Members, others: list[Members]) -> None:
    rng.shuffle(members)


def _gone(rng: random.Random, members: Members, others: list[Members]) -> None:
    if len(members) > 1:
        del members[rng.randrange(len(members))]


def _more(rng: random.Random, members: Members, others: list[Members]) -> None:
    info = tarfile.TarInfo(rng.choice(("evil.py", "0099.gguf", ".hidden", "ledger.jsonl.bak", ".locks", "../x")))
    data = rng.choice((b"", b"x" * 99, members[-1][1]))
    info.size, info.mode = len(data), rng.choice((0o644, 0o4755, 0))
    members.insert(rng.randrange(len(members) + 1), (info, data))


def _longer_name(rng: random.Random, members: Members, others: list[Members]) -> None:
    """A member of the kind that names the next one, as GNU tar and PAX have it."""
    at = rng.randrange(len(members))
    if rng.random() < 0.5:
        info, data = tarfile.TarInfo("././@LongLink"), rng.choice((b"../x\0", b"0001.gguf\0", b"x" * 5000 + b"\0"))
        info.type, info.size = b"L", len(data)
        members.insert(at, (info, data))
    else:
        members[at][0].pax_headers = rng.choice(({"path": "../x"}, {"size": "99999999999"}, {"comment": "é" * 3000}))
        members[at][0].pax_headers = dict(members[at][0].pax_headers)


def _bomb(rng: random.Random, members: Members, others: list[Members]) -> None:
    """Many zeros, or many members."""
    if rng.random() < 0.5:
        at = rng.randrange(len(members))
        data = members[at][1] + rng.choice((b"\0", b"\n", b"{}\n", b"[")) * (1 << rng.choice((10, 16, 20)))
        members[at] = (members[at][0], data)
        members[at][0].size = len(data)
    else:
        members += [(copied(members[-1][0]), b"")] * 500


def _other_rows(rng: random.Random, members: Members, others: list[Members]) -> None:
    """Rows of another place or session under a name that the ledger has."""
    rows = [at for at, (info, _) in enumerate(members) if info.name.endswith(".gguf")]
    donors = [data for them in others for info, data in them if info.name.endswith(".gguf")]
    if rows:
        at, data = rng.choice(rows), rng.choice(donors)
        members[at] = (members[at][0], data)
        members[at][0].size = len(data)


def _hostile_ledger(rng: random.Random, members: Members, others: list[Members]) -> None:
    data = lied(rng, members[0][1], [them[0][1] for them in others])
    members[0] = (members[0][0], data)
    members[0][0].size = len(data)


def _hostile_rows(rng: random.Random, members: Members, others: list[Members]) -> None:
    rows = [at for at, (info, _) in enumerate(members) if info.name.endswith(".gguf")]
    if not rows:
        return
    at = rng.choice(rows)
    data = members[at][1]
    try:
        if rng.random() < 0.7:
            parts = apart(data)
            rng.choice(containers.LIES)(rng, parts, [parts])
            data = parts.seal()
        else:
            data = bytes_changed(rng, data, [data])
    except UnreadableError:
        data = bytes_changed(rng, data, [data])
    members[at] = (members[at][0], data)
    members[at][0].size = len(data)


def _vouch(members: Members) -> None:
    """Have the ledger name the files as they are now."""
    for at, (info, data) in enumerate(members):
        if info.name == LEDGER and info.size == len(data):
            data = vouching(data, {info.name: rows for info, rows in members})
            members[at] = (info, data)
            info.size = len(data)


Trick = Callable[[random.Random, Members, list[Members]], None]
TRICKS: tuple[Trick, ...] = (
    *(_name, _name, _type, _type, _size, _size, _twice, _order, _gone, _more, _longer_name, _bomb, _other_rows),
    *(_other_rows, _hostile_ledger, _hostile_ledger, _hostile_ledger, _hostile_rows, _hostile_rows, _hostile_rows),
)


def _zipped(members: Members) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for info, data in members:
            archive.writestr(info.name.replace("\0", "") or "x", data)
    return out.getvalue()


WRAPPED: tuple[Callable[[Members], bytes], ...] = (
    lambda members: gzip.compress(put_together(members) + bytes(1 << 20)),
    lambda members: bz2.compress(put_together(members), 1),  # quickly: the time of a case counts this, too
    lambda members: lzma.compress(put_together(members), preset=0),
    _zipped,
    lambda members: put_together(members) * 2,
    lambda members: put_together(members)[:-1024],
    lambda members: put_together(members).rstrip(b"\0"),
    lambda members: put_together(members) + b"x" * 999,
    lambda members: put_together(members[:1]),
    lambda members: b"",
)
