"""Learns the blocks of prompts that recur: computes the K/V of each by itself while the server is idle.

A block is a tool, a section of a text or a result of a tool. It is computed after the template's opening alone, so its
K/V has seen nothing of a prompt that may change, and is placed wherever the same tokens are (runtime/token_runs.py).
Blocks of the system text and tools are learned at once, and kept on disk; others are learned when they are long or come
a second time, and are kept in memory. Over the budget the block that spared the fewest tokens goes first.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, count, pairwise
from pathlib import Path
from zlib import crc32

import numpy as np

from notes_cli.engine.model import Model
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import LayerRows, Segment, Tokens, concatenate_rows
from notes_cli.engine.sequence import Task
from notes_cli.errors import NotesError
from notes_cli.library import check
from notes_cli.library.container import open_stored, peek, write_segment
from notes_cli.library.safe_files import make_private
from notes_cli.library.segment_files import mark_use, segment_files
from notes_cli.library.store import Library
from notes_cli.runtime.prefix_cache import Layout
from notes_cli.runtime.scheduler import Job
from notes_cli.runtime.token_runs import SHORTEST, SKIPPED, WINDOW, TextIndex, Texts, common_prefix
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.messages import TextPart

FOLDER = "learned"  # in that of the library
DISK = 2 << 30  # bytes
LEAST = 64  # tokens of a section that is a block of its own
LONG = 256  # tokens of a block that is learned when it comes the first time
SPLIT = 1024  # tokens of a section that is divided at paragraphs
MOST = 4096  # tokens of a block
STEP = 32  # tokens of a batch: a request that arrives waits for one
WAITING = 512  # blocks and prompts that are remembered until they are computed

# A section begins with a heading, an opening tag, a line of JSON, or a tool within one.
_SECTION = re.compile(rb'(?m)^(?:#{1,6} |<[A-Za-z][\w.:-]*[ >\n]|\{)|\{"type": ?"function"')
_PARAGRAPH = re.compile(rb"\n\s*\n(?=\S)")


@dataclass(slots=True, eq=False)
class Block:
    """Tokens that recur. `segment`: its first tokens with their K/V in memory; `path`: the file with that of all."""

    tokens: Tokens
    salt: str
    shared: bool  # of the system text or the tools: kept on disk
    prompts: int = 1  # that had it
    saved: int = 0  # tokens that were placed, not decoded
    used: int = 0  # larger is more recent
    segment: Segment | None = None
    path: Path | None = None

    @property
    def name(self) -> str:
        return f"learned-{blake2b(self.tokens.tobytes(), digest_size=6).hexdigest()}"

    @property
    def begin(self) -> bytes:
        """The tokens by which it is found."""
        return self.tokens[SKIPPED : SKIPPED + WINDOW].tobytes()

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.segment.nbytes if self.segment else 0


def sections(model: Model, tokens: Tokens) -> Iterator[tuple[int, int]]:
    """Yield the blocks [first, last) of a text's tokens. Each begins where its own content does, so that a text added
    or removed elsewhere changes no other block."""
    pieces = [model.token_bytes(int(token)) for token in tokens]
    controls = [number for number, piece in enumerate(pieces) if not piece]  # a message begins or ends
    for first, last in pairwise([-1, *controls, len(tokens)]):
        first += 1
        text, ends = b"".join(pieces[first:last]), list(accumulate(map(len, pieces[first:last]), initial=0))
        starts = sorted({0, *(bisect_left(ends, match.start()) for match in _SECTION.finditer(text))})
        bounds = [*(start for start, end in pairwise([*starts, last - first]) if end - start >= LEAST or not start)]
        for start, end in pairwise([*bounds, last - first]):
            cuts = [start]
            if end - start > SPLIT:  # where the content of a paragraph says so
                inner = [match.end() for match in _PARAGRAPH.finditer(text, ends[start], ends[end])]
                chosen = (bisect_left(ends, at) for at in inner if crc32(text[at : at + 64]) % 4 == 0)
                cuts += [cut for cut in chosen if start < cut < end]
            for begin, stop in pairwise([*cuts, end]):
                if stop - begin >= SHORTEST:
                    yield first + begin, first + min(stop, begin + MOST)


class Learned:
    """The blocks that recur in the prompts of a server. Any thread may use it; the decode thread computes them."""

    def __init__(self, workspace: Workspace, budget: int) -> None:
        """`budget`: bytes in memory."""
        self._workspace, self._budget = workspace, budget
        library = workspace.library
        self._library = Library(library.folder / FOLDER) if isinstance(library, Library) else None
        self._lock = threading.Lock()  # guards the attributes below
        self._prompts: deque[tuple[Layout, str, int]] = deque(maxlen=WAITING)
        self._waiting: OrderedDict[tuple[str, bytes], Block] = OrderedDict()  # not computed; last: most recent
        self._blocks: dict[str, list[Block]] = {}  # computed, by salt
        self._indexes: dict[str, TextIndex] = {}  # of these
        self._clock = count(1)
        for _, path in segment_files(self._library.folder) if self._library else ():
            with suppress(NotesError):  # damaged: it is removed when there is no room for others
                if (found := peek(path)).identity == workspace.identity:
                    self._add(Block(found.tokens, "", shared=True, path=path))

    # In any thread.

    def with_runs(self, layout: Layout, salt: str) -> tuple[Segment, ...]:
        """Return the learned blocks that share runs of tokens with a prompt."""
        with self._lock:
            blocks = self._blocks.get(salt, [])
            if blocks and salt not in self._indexes:
                texts = [Texts(block.tokens) for block in blocks]
                self._indexes[salt] = TextIndex(self._workspace.model, texts)
            index = self._indexes.get(salt)
            numbers = dict.fromkeys(run.source for run in index.runs(layout.tokens, layout.texts)) if index else {}
            found = [blocks[number] for number in numbers]
            return tuple(segment for block in found if (segment := self._opened(block)) is not None)

    def observe(self, layout: Layout, salt: str, live: int) -> None:
        """Remember a prompt, of which `live` tokens continued a cached one."""
        if layout.prompt.conversation is not None:
            self._prompts.append((layout, salt, live))

    def count(self, salt: str, pieces: Sequence[Piece]) -> None:
        """Count the tokens of a prompt that learned blocks have spared."""
        spared = {piece.detail: piece.tokens for piece in pieces if piece.reason is Reason.NEAR}
        with self._lock:
            for block in self._blocks.get(salt, []) if spared else ():
                if tokens := spared.get(block.name):
                    block.saved, block.used = block.saved + tokens, next(self._clock)
                    if block.path is not None:
                        mark_use(block.path, tokens)

    # In the decode thread.

    def job(self, room: int) -> Job[None] | None:
        """Return the job that computes the next block, in at most `room` cells; None without one."""
        context = self._workspace.context
        if context.model.recurrent or context.drops or context.supports("splice") or context.supports("read"):
            return None
        while self._prompts:
            self._find(*self._prompts.popleft())
        left = len(self._workspace.left_context)
        with self._lock:
            ready = [one for one in self._waiting.values() if one.shared or one.prompts > 1 or len(one.tokens) >= LONG]
            ready = [one for one in ready if left + len(one.tokens) <= room]
        if not ready:
            return None
        block = max(ready, key=lambda one: (one.shared, one.prompts, len(one.tokens)))
        return Job(lambda job: self._compute(job, block), left + len(block.tokens), batch=STEP)

    def _find(self, layout: Layout, salt: str, live: int) -> None:
        """Add the blocks of a prompt that are neither learned nor placed from a compiled text."""
        model, head, found = self._workspace.model, self._head(layout), list[tuple[int, int]]()
        for first, last in ((max(first, live), last) for first, last in layout.texts if last > live):
            found += [(first + start, first + end) for start, end in sections(model, layout.tokens[first:last])]
        with self._lock:
            learned: dict[bytes, list[Tokens]] = {}
            for block in self._blocks.get(salt, []):
                learned.setdefault(block.begin, []).append(block.tokens)
            for first, last in found:
                block = Block(layout.tokens[first:last].copy(), salt, shared=last <= head)
                known = [int(np.count_nonzero(layout.origins[first:last] < 0))]
                known += [common_prefix(block.tokens, other) for other in learned.get(block.begin, [])]
                if len(block.tokens) - max(known) < LEAST:
                    continue
                key = salt, block.tokens.tobytes()
                if (earlier := self._waiting.pop(key, None)) is not None:
                    earlier.prompts, block = earlier.prompts + 1, earlier
                self._waiting[key] = block
                if len(self._waiting) > WAITING:
                    self._waiting.popitem(last=False)

    def _head(self, layout: Layout) -> int:
        """Return the number of a prompt's tokens before the text of its first message of the user."""
        talk, place = layout.prompt.conversation, 0
        first = next((each for each in talk.messages if each.role == "user"), None) if talk else None
        text = next((part.text for part in first.parts if isinstance(part, TextPart)), "").strip() if first else ""
        if not text:
            return 0
        pieces = [self._workspace.model.token_bytes(int(token)) for token in layout.tokens]
        place = b"".join(pieces).find(text.encode()[:LEAST])
        return max(0, bisect_left(list(accumulate(map(len, pieces))), place))

    def _compute(self, job: Job[None], block: Block) -> Task[None]:
        """Compute the K/V of a block. If the job is cancelled, what is computed is kept, and continued later."""
        sequence, left = job.sequence, self._workspace.left_context
        assert sequence is not None
        begun = block.segment
        try:
            sequence.append(left)
            if begun is not None:
                sequence.splice(begun)
            present = len(sequence)
            sequence.append(block.tokens[present - len(left) :])
            while sequence.pending:
                yield [sequence]
        except NotesError:
            self._forget(block)  # it does not fit
            raise
        finally:
            try:
                if sequence.intact and (rows := sequence.rows) > (first := len(left) + len(begun or ())):
                    layers, _ = sequence.read(first, rows, self._workspace.context.lossless_type)
                    self._keep(block, concatenate_rows([begun.layers, layers]) if begun else layers)
            finally:
                sequence.close()

    def _keep(self, block: Block, layers: Sequence[LayerRows]) -> None:
        """Keep the K/V of a block's first tokens."""
        left, identity, tokens = (
            self._workspace.left_context,
            self._workspace.identity,
            block.tokens[: len(layers[0].k)],
        )
        text = self._workspace.model.text(tokens)
        segment = Segment(block.name, "", text, tokens, len(left), left, (), identity, layers)
        block.segment = segment
        if len(tokens) < len(block.tokens):
            return
        self._forget(block)
        if block.shared and not block.salt and self._library is not None:
            with suppress(NotesError, OSError):  # else it stays in memory
                make_private(self._library.folder)
                path = self._library.path(block.name, identity)
                write_segment(path, segment)
                block.path, block.segment = path, None
                files = [file for file in check.library_files(self._library.folder) if file.path != path]
                check.remove_files(files, self._library.folder, files, most=DISK)  # the least recently used
        self._add(block)

    def _forget(self, block: Block) -> None:
        with self._lock:
            self._waiting.pop((block.salt, block.tokens.tobytes()), None)

    def _add(self, block: Block) -> None:
        """Add a learned block, and drop the least useful ones beyond the budget."""
        with self._lock:
            block.used = next(self._clock)
            self._blocks.setdefault(block.salt, []).append(block)
            self._indexes.pop(block.salt, None)
            held = [one for blocks in self._blocks.values() for one in blocks if one.nbytes]
            total = sum(one.nbytes for one in held)
            for one in sorted(held, key=lambda one: (one.saved, one.used)):
                if total <= self._budget:
                    return
                total -= one.nbytes
                self._drop(one)

    def _drop(self, block: Block) -> None:
        self._blocks[block.salt] = [one for one in self._blocks[block.salt] if one is not block]
        self._indexes.pop(block.salt, None)

    def _opened(self, block: Block) -> Segment | None:
        """Return the segment of a block; None, and drop it, if its file cannot be read."""
        if block.path is None:
            return block.segment
        try:
            return open_stored(block.path)
        except NotesError:  # it was removed, or is damaged
            self._drop(block)
            return None
