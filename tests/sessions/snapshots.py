"""Files of sessions for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from notes_cli.engine.segment import Identity
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.state import Entry, Header, Op, Part, Rows, State, Turn, serialize
from notes_cli.text.messages import user_message

IDENTITY = Identity("tiny", "llama", "F32", "0" * 64, "r", "norm base 10000", "f16/f16", "")
HEADER = Header(IDENTITY, "f16/f16", "/models/tiny.gguf")


def asked(*questions: str) -> State:
    """The state after questions of two tokens, with answers of one."""
    state = State()
    for turn, question in enumerate(questions, 1):
        at = len(state.tokens)
        pieces = (
            Entry("question", "", question, at, 2, "decoded", turn),
            Entry("answer", "", "x", at + 2, 1, "decoded", turn),
        )
        state = replace(
            state,
            conversation=(*state.conversation, Turn((user_message(question),), (Part((at + 2,)),))),
            pieces=(*state.pieces, *pieces),
            tokens=[*state.tokens, at, at + 1, at + 2],
            rows=(*state.rows, Rows(f"{turn:04d}.gguf", 0, 3)),
        )
    return state


def commit(stored: SessionFolder, state: State, op: Op = "turn", *, for_good: bool = False) -> None:
    """Write a snapshot, and a file in the place of the K/V that is new in it."""
    stored.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stored.next_rows.write_bytes(b"rows")
    stored.next_rows.chmod(0o600)
    files = {rows.file: "?" for rows in state.rows}
    stored.commit(op, state.questions[-1], state, files, HEADER, for_good=for_good)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def forge(stored: SessionFolder, change: Callable[[State], State]) -> None:
    """Change the state in the last snapshot, with a right checksum."""
    last = stored.snapshot
    assert last
    stored.path(stored.numbers[-1]).write_bytes(serialize(replace(last, state=change(last.state))))
