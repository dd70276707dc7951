"""Keeps the K/V of evicted prefixes in host memory, and restores it for a prompt that begins alike.

Rows are stored in blocks, a tree of them per salt: prefixes share the blocks of the tokens with which all of them
begin. Without room for another block, the least recently used one is dropped. Rows are read without loss and restored
at their positions, so they are the same bits as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from notes_cli.engine.context import Context
from notes_cli.engine.limits import available_memory
from notes_cli.engine.segment import Identity, Media, Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError
from notes_cli.runtime.token_runs import Source
from notes_cli.runtime.workspace import Workspace

BLOCK = 256  # tokens
WORTH = 16  # a restore must save more tokens than this
MOST = 8 << 30  # bytes by default, as for --cache-ram of llama-server
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Block:
    """The K/V of some tokens, valid after those of its ancestors only."""

    segment: Segment
    origins: Tokens  # of its tokens (runtime/prefix_cache.py)
    nbytes: int
    siblings: list[Block]  # all that follow the same tokens, itself among them
    children: list[Block] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.origins)

    def common(self, tokens: Tokens, origins: Tokens) -> int:
        """Return the number of leading tokens that these have in common with the block."""
        most = min(len(self), len(tokens))
        same = (self.segment.tokens[:most] == tokens[:most]) & (self.origins[:most] == origins[:most])
        return most if same.all() else int(same.argmin())


class PrefixStore:
    """Blocks of at most `budget` bytes. Use it from the thread of the context."""

    def __init__(self, workspace: Workspace, budget: int) -> None:
        self.budget, self.nbytes = budget, 0
        self.hits = self.restored = 0  # restored prefixes and their tokens
        self._workspace = workspace
        self._identity: Identity | None = None  # of the context that all rows are from
        self._first: dict[str, list[Block]] = {}  # by salt
        self._blocks: dict[Block, None] = {}  # least recently used first, and each before its ancestors

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def recurrent(self) -> bool:
        return self._workspace.model.recurrent

    @property
    def _context(self) -> Context:
        return self._workspace.context

    def find(self, tokens: Tokens, origins: Tokens, salt: str) -> list[tuple[Block, int]]:
        """Return the blocks with the longest common prefix, and its number of tokens in each of them. A recurrent
        state exists after the last token of its block only."""
        path, blocks = list[tuple[Block, int]](), self._first.get(salt, [])
        if blocks and self._context.identity("") != self._identity:  # grown, it rotates otherwise (LongRoPE)
            self.clear()
            return []
        while blocks:
            found = [(block.common(tokens, origins), block) for block in blocks]
            if self.recurrent:
                found = [(count, block) for count, block in found if count == len(block)]
            count, block = max(found, key=lambda one: (one[0], -len(one[1])), default=(0, None))
            if block is None or not count:
                break
            path.append((block, count))
            tokens, origins = tokens[count:], origins[count:]
            blocks = block.children if count == len(block) else []
        return path

    def sources(self, salt: str) -> list[Source]:
        """Return all blocks of a salt as sources of runs (token_runs.py)."""
        if self._identity is None or self._context.identity("") != self._identity:
            return []
        whole, type_k = self._workspace.identity, self._context.options.type_k
        found, blocks = list[Source](), [*self._first.get(salt, [])]
        while blocks:
            block = blocks.pop()
            blocks += block.children
            segment = replace(block.segment, identity=whole)
            found.append(Source.of_prompt(segment.tokens, block.origins, segment, type_k))
        return found

    def restore(self, sequence: KVSequence, path: list[tuple[Block, int]], length: int) -> None:
        """Append the K/V of these blocks that the sequence lacks, up to `length` tokens. On failure the sequence is
        unchanged."""
        begun, place = len(sequence), 0
        try:
            for block, count in path:
                first, last = max(len(sequence) - place, 0), min(count, length - place)
                if first < last:
                    sequence.splice(block.segment.slice(first, last))
                place += count
        except BaseException as error:
            sequence.truncate(begun)
            if not isinstance(error, (NotesError, MemoryError)):
                raise
            return
        self._use(block for block, _ in path)
        if not sequence.dry:
            self.hits, self.restored = self.hits + 1, self.restored + len(sequence) - begun

    def save(self, sequence: KVSequence, tokens: Tokens, origins: Tokens, salt: str) -> None:
        """Store the rows of a sequence with these tokens, as far as they can be read and the budget allows."""
        kept: list[Block] = []
        try:
            if len(tokens) <= WORTH or not sequence.intact or not self._exact:
                return
            identity = self._context.identity("")
            if identity != self._identity:
                self.clear()
                self._identity = identity
            siblings = self._first.setdefault(salt, [])
            for first, last in self._spans(sequence, len(tokens)):
                span = tokens[first:last], origins[first:last]
                if (block := self._covering(siblings, *span, final=last == len(tokens))) is None:
                    nbytes = self._row_bytes(last - first) + sum(part.nbytes for part in span)
                    if not self._make_room(nbytes, kept):
                        break
                    block = Block(self._read(sequence, first, last, span[0]), span[1].copy(), nbytes, siblings)
                    self._add(block)
                kept.append(block)
                self._blocks[block] = self._blocks.pop(block)
                siblings = block.children
        except (NotesError, MemoryError):
            pass  # blocks before the failure are complete
        finally:
            self._use(kept)
            self._first = {salt: blocks for salt, blocks in self._first.items() if blocks}

    def clear(self) -> None:
        self._first, self._blocks, self.nbytes = {}, {}, 0

    @property
    def _exact(self) -> bool:
        """True if rows of this context can be read and restored bit for bit: no window has dropped any, and keys of an
        indexer, which are rounded, are not among them."""
        context = self._context
        readable = context.supports("read") is None and context.supports("restore") is None
        return readable and not context.drops and all(layer.part != "indexer" for layer in context.layers)

    def _spans(self, sequence: KVSequence, count: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens [first, last) of each block. An image is a block of its own; a recurrent state is valid
        with all tokens before it only."""
        if self.recurrent:
            yield 0, count
            return
        images = sequence.images
        cuts = {*range(0, count, BLOCK), count, *(cut for image in images for cut in (image.first, image.last))}
        yield from pairwise(sorted(c for c in cuts if not any(image.first < c < image.last for image in images)))

    def _covering(self, blocks: list[Block], tokens: Tokens, origins: Tokens, *, final: bool) -> Block | None:
        """Return the block with exactly these tokens; for the `final` ones of a prefix, also one with more."""
        longer = final and not self.recurrent
        found = (block for block in blocks if block.common(tokens, origins) == len(tokens))
        return next((block for block in found if longer or len(block) == len(tokens)), None)

    def _row_bytes(self, count: int) -> int:
        """Return the bytes of so many rows as they are read."""
        size, total = 2 if self._context.lossless_type == "f16" else 4, 0
        for layer in self._context.layers:
            state = layer.part == "state"
            total += (layer.n_embd_k + layer.n_embd_v) * (4 if state else size * count)
        return total

    def _make_room(self, nbytes: int, kept: list[Block]) -> bool:
        """Drop the least recently used blocks, but none of `kept`, until there is room. Returns False if that is not
        enough."""
        while self.nbytes + nbytes > self.budget:
            block = next(iter(self._blocks), None)
            if block is None or block in kept:
                return False
            self._drop(block)
        return True

    def _read(self, sequence: KVSequence, first: int, last: int, tokens: Tokens) -> Segment:
        rows, axes = sequence.read(first, last, self._context.lossless_type)
        assert self._identity is not None
        base = sequence.position(first)
        images = [image for image in sequence.images if first <= image.first < last]
        media = tuple(Media(image.first - first, image.last - first, image.positions, "", 0, 0) for image in images)
        axes = None if axes is None else axes - base
        segment = Segment("", "", "", tokens.copy(), base, NO_TOKENS, (), self._identity, rows)
        return replace(segment, media=media, axes=axes)

    def _add(self, block: Block) -> None:
        """Add a block, in place of shorter ones with the same tokens that nothing follows."""
        if not self.recurrent:
            for other in list(block.siblings):
                span = block.segment.tokens, block.origins
                if not other.children and other.common(*span) == len(other):
                    self._drop(other)
        block.siblings.append(block)
        self._blocks[block] = None
        self.nbytes += block.nbytes

    def _drop(self, block: Block) -> None:
        block.siblings.remove(block)
        del self._blocks[block]
        self.nbytes -= block.nbytes

    def _use(self, path: Iterator[Block] | list[Block]) -> None:
        """Mark blocks as used, each more recently than those after it."""
        for block in reversed(list(path)):
            self._blocks[block] = self._blocks.pop(block)


def default_budget() -> int:
    """Return a quarter of the free memory, at most MOST; 0 where it is unknown."""
    return min(MOST, (available_memory() or 0) // 4)
