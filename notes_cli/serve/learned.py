"""Learns the texts of prompts that recur: computes their K/V by itself while the server is idle.

A block is a set of tools, a single tool, or a message without its tools and without paragraphs about the present: the
day, the time, the working directory, the state of a repository. Its K/V is computed after the template's opening
alone, so it has seen nothing that may change, and is placed wherever the same tokens are (runtime/token_runs.py). A
text is one block, because sections that have not seen each other answer worse. So is a set of tools; the single ones
are for prompts in which some of the others are missing (docs/serving.md).

Blocks of the system text and of tools are learned at once, and kept on disk; others are learned when they are long or
come a second time, and are kept in memory. Over the budget the block that spared the fewest tokens goes first.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from notes_cli import output
from notes_cli.engine.interrupts import Stop
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import LayerRows, Segment, Tokens, concatenate_rows
from notes_cli.engine.sequence import Task
from notes_cli.errors import NotesError
from notes_cli.library import check
from notes_cli.library.container import open_stored, peek, write_segment
from notes_cli.library.safe_files import make_private
from notes_cli.library.segment_files import LEARNED, mark_use, segment_files
from notes_cli.library.store import Library
from notes_cli.runtime.prefix_cache import Layout, lossless_bytes
from notes_cli.runtime.scheduler import Job
from notes_cli.runtime.token_runs import SHORTEST, SKIPPED, WINDOW, TextIndex, Texts, common_prefix, resembles_earlier
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.messages import Conversation, Message, TextPart

DISK = 2 << 30  # bytes
LEAST = 64  # tokens of a tool or a part of a text that is worth it
JOINED = 16  # most tokens between two tools of a set that belong to it
LONG = 256  # tokens of a block that is learned when it comes the first time
WAITING = 512  # blocks that are remembered until they are computed
SEARCHED = 32  # latest prompts that are searched
PRESENT = 256  # most tokens of a paragraph about the present
DECAY = 0.9  # of the tokens that a block has spared, with each new block

_ROLE = re.compile(rb"(?:\w+\n)?\s*")  # before the text of a message
_PARAGRAPH = re.compile(rb"\n\s*\n(?=\S)")
# Words of paragraphs about the present, which differ in each prompt.
PRESENT_WORDS = re.compile(
    rb"(?i)\b(?:today|git ?status|working ?dir(?:ectory)?|cwd|current ?(?:date|time|day|dir(?:ectory)?|branch))\b"
)
_OBJECT = re.compile(rb'(?m)^\{|\{"type": ?"function"')
_DECODER = json.JSONDecoder()
_ATTEMPTS = 8  # objects of a message that are no JSON, before the rest of it is taken as a text

Span = tuple[int, int]  # tokens [first, last)
Json = dict[str, Any]
Paragraphs = list[tuple[Span, bytes]]
Objects = list[tuple[Json, Span]]
Found = tuple[list[Json], tuple[Span, ...]]  # the objects of a block, none for a text, and its parts


@dataclass(slots=True, eq=False)
class Block:
    """Tokens that recur. `segment`: its first tokens with their K/V in memory; `path`: the file with that of all."""

    tokens: Tokens
    parts: tuple[int, ...]  # the first tokens of those that were computed after each other; none of a single tool
    salt: str
    tools: bool  # a tool or a set of them, not a text
    of_system: bool  # of the system text or the tools: learned at once, and kept on disk
    prompts: int = 1  # that had it
    saved: float = 0  # tokens that were placed, not decoded
    used: int = 0  # larger is more recent
    segment: Segment | None = None
    path: Path | None = None

    @property
    def name(self) -> str:
        return name_of(self.tokens)

    @property
    def begin(self) -> bytes:
        """The tokens by which it is found."""
        return self.tokens[SKIPPED : SKIPPED + WINDOW].tobytes()

    @property
    def texts(self) -> Texts:
        """The tokens with the beginnings by which they are found."""
        return Texts(self.tokens, self.parts or (0,), chained=bool(self.parts))

    @property
    def complete(self) -> bool:
        return self.segment is not None and len(self.segment) == len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.segment.nbytes if self.segment else 0


def name_of(tokens: Tokens) -> str:
    return f"learned-{blake2b(tokens.tobytes(), digest_size=6).hexdigest()}"


def write(library: Library, segment: Segment) -> Path:
    """Write the file of a learned text, and remove the least recently used ones beyond DISK. Raises NotesError or
    OSError."""
    make_private(library.folder)
    path = library.path(segment.name, segment.identity)
    write_segment(path, segment)
    files = [file for file in check.library_files(library.folder) if file.path != path]
    check.remove_files(files, library.folder, files, most=DISK)
    return path


def messages_of(pieces: Sequence[bytes], begin: int, end: int) -> Iterator[tuple[Paragraphs, Objects]]:
    """Yield the paragraphs and the objects of JSON of each message within tokens [begin, end). `pieces`: the text of
    each token, empty for control tokens, which enclose messages."""
    controls = [number for number in range(begin, end) if not pieces[number]]
    for before, last in pairwise([begin - 1, *controls, end]):
        first = before + 1
        text, ends = b"".join(pieces[first:last]), list(accumulate(map(len, pieces[first:last]), initial=0))
        found = list(_objects(text))
        start = len(match.group()) if before >= begin and (match := _ROLE.match(text)) else 0
        cuts = {start, len(text), *(cut for _, where in found for cut in where)}
        cuts |= {match.end() for match in _PARAGRAPH.finditer(text)}
        paragraphs: Paragraphs = []
        for where in pairwise(sorted(cut for cut in cuts if cut >= start)):
            inside = any(one <= where[0] < other for _, (one, other) in found)
            span = _span(first, ends, where)
            if not inside and span[0] < span[1]:
                paragraphs.append((span, text[slice(*where)].strip()))
        yield paragraphs, [(item, _span(first, ends, where)) for item, where in found]


def _span(first: int, ends: Sequence[int], where: tuple[int, int]) -> Span:
    """Return the tokens of a range of bytes. `ends`: where each token from `first` on begins and the last one ends."""
    return first + bisect_left(ends, where[0]), first + bisect_left(ends, where[1])


def _objects(text: bytes) -> Iterator[tuple[Json, tuple[int, int]]]:
    """Yield the objects of JSON in a text that may be tools, and their bytes [first, last)."""
    characters, end, failed = text.decode("latin-1"), 0, 0  # a character each
    for match in _OBJECT.finditer(text):
        if match.start() < end:
            continue
        try:
            item, end = _DECODER.raw_decode(characters, match.start())
        except (ValueError, RecursionError):
            failed += 1
            if failed == _ATTEMPTS:  # each may take as long as the text
                return
            continue
        if "name" in item or "function" in item:
            yield item, (match.start(), end)


def blocks_of(paragraphs: Paragraphs, objects: Objects) -> Iterator[Found]:
    """Yield the blocks of a message."""
    yield from (([item], (span,)) for item, span in objects if span[1] - span[0] >= LEAST)
    if len(objects) > 1:
        items, spans = map(list, zip(*objects, strict=True))
        joined = (span if then - span[1] > JOINED else (span[0], then) for span, (then, _) in pairwise(spans))
        yield items, (*joined, spans[-1])
    parts: list[Span] = []
    behind = {end for _, (_, end) in objects}  # paragraphs that begin there end a list of tools
    for (start, end), text in paragraphs:
        if end - start > PRESENT or not (start in behind or PRESENT_WORDS.search(text)):
            parts = [*parts[:-1], (parts[-1][0], end)] if parts and parts[-1][1] == start else [*parts, (start, end)]
    if parts := [(start, end) for start, end in parts if end - start >= SHORTEST]:
        yield [], tuple(parts)


def _last_text(message: Message | None) -> bytes:
    """Return the last text of a message; empty without one."""
    texts = [part.text.strip() for part in message.parts if isinstance(part, TextPart)] if message else []
    return texts[-1].encode() if texts else b""


def _system_end(talk: Conversation, pieces: Sequence[bytes]) -> int:
    """Return the tokens of a prompt up to the end of its system message; 0 without one, or if the template puts the
    user's words into it."""
    first = {role: next((each for each in talk.messages if each.role == role), None) for role in ("system", "user")}
    system, user = map(_last_text, first.values())
    end, whole = system[-LEAST:], b"".join(pieces)
    if not system or not user or (place := whole.find(end)) < 0:
        return 0
    begin = bisect_left(list(accumulate(map(len, pieces))), place + len(end))
    control = next((number for number in range(begin, len(pieces)) if not pieces[number]), begin)
    alone = control > begin and user[:LEAST] not in b"".join(pieces[begin:control])
    return control if alone else 0


class LearnedBlocks:
    """The blocks that recur in the prompts of a server. Any thread may use it; the decode thread computes them."""

    def __init__(self, workspace: Workspace, budget: int) -> None:
        """`budget`: bytes in memory."""
        self._workspace, self._budget = workspace, budget
        library = workspace.library
        self._library = Library(library.folder / LEARNED) if isinstance(library, Library) else None
        self._lock = threading.Lock()  # guards the attributes below
        self._prompts: deque[tuple[Layout, str, int]] = deque(maxlen=SEARCHED)
        self._waiting: OrderedDict[tuple[str, bytes], Block] = OrderedDict()  # not computed; last: most recent
        self._blocks: dict[str, list[Block]] = {}  # computed, by salt
        self._indexes: dict[str, TextIndex] = {}  # of these
        self._clock = count(1)
        self._writer = ThreadPoolExecutor(1, "learned")  # gigabytes take seconds
        for _, path in segment_files(self._library.folder) if self._library else ():
            with suppress(NotesError):  # damaged: it is removed when there is no room for others
                found, left = peek(path), workspace.left_context
                if found.identity == workspace.identity and np.array_equal(found.context, left):
                    tools = next(_objects(found.text.encode()), None) is not None
                    self._add(Block(found.tokens, found.parts, "", tools, of_system=True, path=path))

    # In any thread.

    def with_runs(self, layout: Layout, salt: str) -> tuple[Segment, ...]:
        """Return the learned blocks that share runs of tokens with a prompt, if its `reuse` is "learned", but no text
        that may be another version of one above it (`resembles_earlier`)."""
        if layout.reuse != "learned":
            return ()
        with self._lock:
            blocks = self._blocks.get(salt, [])
            if blocks and salt not in self._indexes:
                self._indexes[salt] = TextIndex(self._workspace.model, [block.texts for block in blocks])
            index, blocks = self._indexes.get(salt), [*blocks]
        runs = index.runs(layout.tokens, layout.texts) if index else []
        versions = {
            run.source for run in runs if not blocks[run.source].tools and resembles_earlier(layout.tokens, run)
        }
        numbers = dict.fromkeys(run.source for run in runs if run.source not in versions)
        found = [self._opened(blocks[number]) for number in numbers]
        return tuple(segment for segment in found if segment is not None)

    def observe(self, layout: Layout, salt: str, live: int) -> None:
        """Remember a prompt, of which `live` tokens continued a cached one."""
        if layout.reuse == "learned" and layout.prompt.conversation is not None and self._usable:
            self._prompts.append((replace(layout, compiled=()), salt, live))

    def count(self, salt: str, pieces: Sequence[Piece]) -> None:
        """Count the tokens of a prompt that learned blocks have spared."""
        spared = {piece.detail: piece.tokens for piece in pieces if piece.reason is Reason.NEAR}
        with self._lock:
            for block in self._blocks.get(salt, []) if spared else ():
                if tokens := spared.get(block.name):
                    block.saved, block.used = block.saved + tokens, next(self._clock)
                    if block.path is not None:
                        mark_use(block.path, tokens)

    @property
    def writing(self) -> bool:
        """True while a file is being written."""
        with self._lock:
            return any(block.complete for block in self._waiting.values())

    def close(self) -> None:
        """Wait for files that are being written."""
        self._writer.shutdown()

    # In the decode thread.

    def job(self, room: int) -> Job[None] | None:
        """Return the job that computes the next block, in at most `room` cells; None without one."""
        while self._prompts and self._usable:
            self._find(*self._prompts.popleft())
        left = len(self._workspace.left_context)
        with self._lock:
            waiting = [one for one in self._waiting.values() if not one.complete]  # else it is being written
            ready = [one for one in waiting if self._worth(one) and left + len(one.tokens) <= room]
            if not ready:
                return None
            block = max(ready, key=lambda one: (one.of_system, one.prompts, len(one.tokens)))
            for other in waiting:  # memory beyond the budget
                other.segment = other.segment if other is block else None
        ended = partial(self._ended, block)
        return Job(lambda job: self._compute(job, block), left + len(block.tokens), stop=Stop(), on_end=ended)

    @property
    def _usable(self) -> bool:
        """True if the context can move rows that are as they were computed."""
        context = self._workspace.context
        movable = not (context.drops or context.supports("splice"))
        return movable and context.supports("read") is None and context.compile_options == context.options

    def _worth(self, block: Block) -> bool:
        """Return True if a block is likely to come again, and there is a place for its K/V."""
        likely = block.of_system or block.prompts > 1 or len(block.tokens) >= LONG
        fits = lossless_bytes(self._workspace.context, len(block.tokens)) <= self._budget
        return likely and (fits or self._on_disk(block))

    def _on_disk(self, block: Block) -> bool:
        return block.of_system and not block.salt and self._library is not None

    def _ended(self, block: Block, job: Job[None]) -> None:
        if isinstance(job.outcome, Exception):
            self._forget(block)
            output.say(f"a text was not learned: {job.outcome}")

    def _find(self, layout: Layout, salt: str, live: int) -> None:
        """Find the blocks of a prompt behind its `live` tokens."""
        pieces = [self._workspace.model.token_bytes(int(token)) for token in layout.tokens]
        talk, found = layout.prompt.conversation, list[tuple[Found, bool]]()
        assert talk is not None
        head = _system_end(talk, pieces)
        functions = [tool["function"] for tool in talk.tools]
        for first, last in ((max(first, live), last) for first, last in layout.texts if last > live):
            for paragraphs, objects in messages_of(pieces, first, last):
                for items, parts in blocks_of(paragraphs, objects):
                    ours = bool(items) and all(item.get("function", item) in functions for item in items)
                    found.append(((items, parts), ours or parts[-1][1] <= head))
        self._await(layout, salt, found)

    def _await(self, layout: Layout, salt: str, found: Sequence[tuple[Found, bool]]) -> None:
        """Add blocks that are neither learned nor placed from a compiled text to those that are to be computed. A set
        of tools is one of them unless most of its tokens are in others."""
        with self._lock:
            learned: dict[bytes, list[Tokens]] = {}
            for block in self._blocks.get(salt, []):
                learned.setdefault(block.begin, []).append(block.tokens)
            sets = [one.texts for one in self._blocks.get(salt, []) if one.parts[1:]]
            in_sets = np.zeros(len(layout), bool)
            for run in TextIndex(self._workspace.model, sets).runs(layout.tokens, layout.texts):
                in_sets[run.first : run.last] = True
            for (items, parts), of_system in found:
                begins = accumulate((end - start for start, end in parts[:-1]), initial=0)
                rows = np.concatenate([np.arange(*part) for part in parts])
                single = len(items) == 1
                block = Block(layout.tokens[rows], () if single else tuple(begins), salt, bool(items), of_system)
                known = [common_prefix(block.tokens, other) for other in learned.get(block.begin, [])]
                known += [] if items[1:] else [int(np.count_nonzero(layout.origins[rows] < 0))]
                windows = sliding_window_view(block.tokens[SKIPPED:], WINDOW)
                repeats = (windows == windows[0]).all(1).sum() > 1  # to find it would take long
                most = items[1:] and 2 * in_sets[rows].sum() > len(rows)
                if len(rows) - max(known, default=0) < LEAST or most or repeats:
                    continue
                key = salt, block.tokens.tobytes()
                if (same := self._waiting.pop(key, None)) is not None:
                    same.prompts, block = same.prompts + 1, same
                self._waiting[key] = block
                if len(self._waiting) > WAITING:
                    self._waiting.popitem(last=False)

    def _compute(self, job: Job[None], block: Block) -> Task[None]:
        """Compute the K/V of a block. A cancelled job keeps the rows that it has computed; the next one continues."""
        sequence, left = job.sequence, self._workspace.left_context
        assert sequence is not None
        begun: Segment | None = None
        try:
            if block.segment is not None and block.segment.identity == self._workspace.identity:
                begun = block.segment  # else the context has grown, and rotates otherwise (LongRoPE)
            sequence.append(left)
            if begun is not None:
                sequence.splice(begun)
            sequence.append(block.tokens[len(begun or ()) :])
            while sequence.pending:
                yield [sequence]
        finally:
            try:
                if sequence.intact and (rows := sequence.rows) > (first := len(left) + len(begun or ())):
                    layers, _ = sequence.read(first, rows, self._workspace.context.lossless_type)
                    self._keep(block, concatenate_rows([begun.layers, layers]) if begun else layers)
            finally:
                sequence.close()

    def _keep(self, block: Block, layers: Sequence[LayerRows]) -> None:
        """Keep the K/V of a block's first tokens."""
        workspace, tokens = self._workspace, block.tokens[: len(layers[0].k)]
        left, text = workspace.left_context, workspace.model.text(tokens)
        how: dict[str, Any] = {"parts": block.parts} if block.parts else {"blocks": (0,), "moves": (0,)}
        segment = Segment(block.name, "", text, tokens, len(left), left, (), workspace.identity, layers, **how)
        block.segment = segment
        if block.complete and self._on_disk(block):
            self._writer.submit(self._write, block, segment)
        elif block.complete:
            self._add(block)

    def _write(self, block: Block, segment: Segment) -> None:
        """Write a block's file, in a thread of its own, and add the block. If that fails, it stays in memory."""
        assert self._library is not None
        with suppress(NotesError, OSError):
            block.path, block.segment = write(self._library, segment), None
        self._add(block)

    def _forget(self, block: Block) -> None:
        """Forget a block that is to be computed."""
        with self._lock:
            self._waiting.pop((block.salt, block.tokens.tobytes()), None)

    def clear(self) -> None:
        """Forget all blocks that are to be computed, and the prompts that have not been searched."""
        with self._lock:
            self._prompts.clear()
            self._waiting.clear()

    def _add(self, block: Block) -> None:
        """Add a learned block, and drop the least useful ones beyond the budget."""
        self._forget(block)
        with self._lock:
            block.used = next(self._clock)
            for one in self._blocks.get(block.salt, []):
                one.saved *= DECAY
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
        left = [one for one in self._blocks.pop(block.salt, []) if one is not block]
        self._blocks |= {block.salt: left} if left else {}
        self._indexes.pop(block.salt, None)

    def _opened(self, block: Block) -> Segment | None:
        """Return the segment of a block; None, and drop it, if its file cannot be read."""
        if block.path is None:
            return block.segment
        try:
            return open_stored(block.path)
        except NotesError:  # it was removed, or is damaged
            with self._lock:
                self._drop(block)
            return None
