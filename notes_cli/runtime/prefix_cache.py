"""Live prefixes: sequences that were read already, and how much of a new prompt each of them begins with.

Rows are those of another prompt only if the tokens are the same from the beginning on, and all of them came about in
the same way: decoded, spliced from the same segment with the same seam, or reused only where that is exact. Where a
skill begins to differ, nothing of it is taken. Of a first question few tokens are not taken either where decoding
begins a batch anyway: another question after the same skill is decoded as it is alone, to the last bit. Who may not
share with whom is told apart by a salt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import Segment, Stored, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.runtime.assemble import APART
from notes_cli.runtime.prompt import Parts, Prompt
from notes_cli.text.prompt import Chunk

_DECODED, _EXACT = -1, -2  # in the place of a seam: how the rows of a segment came about
REMEMBERED = 4096  # ways that rows came about, of which the numbers are known


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A prompt in tokens, and how the row of each is to come about."""

    prompt: Prompt
    parts: Parts
    seam: int
    splice: bool  # skills are spliced, not decoded
    exact: bool  # rows of skills are those of a prefill, as assemble has it
    tokens: Tokens
    origins: Tokens  # 0: decoded; else the number of what it is spliced from
    splices: tuple[tuple[int, int], ...]  # [first, last) of each skill
    prefix_only: int  # tokens up to the end of the last skill that can be placed nowhere else; 0 without one

    def __len__(self) -> int:
        return len(self.tokens)

    def begin(self, length: int) -> int:
        """Where to go on if so many first tokens are there: after them, or, if nothing has been answered yet, where a
        batch begins that is decoded alone, if that is at most APART tokens before."""
        talk = self.prompt.conversation
        if talk and any(message.role == "assistant" for message in talk.messages):
            return length
        batch = max((last for _, last in self.splices if last <= length), default=0)
        asked = len(self) - sum(map(len, self.parts.tokens[len(self.parts.tokens) - self.parts.asking :]))
        if asked <= length and asked - batch > APART:
            batch = asked
        return batch if length - batch <= APART else length

    def live(self, length: int) -> list[Piece]:
        """The pieces of so many first tokens that are there already, whatever they were to who left them there."""
        pieces, place = [], 0
        for chunk, ids in self.parts.all_chunks:
            if (count := min(len(ids), length - place)) > 0:
                pieces.append(Piece(chunk.kind, chunk.name, place, count, "live", Reason.LIVE))
            place += count
        return pieces


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A sequence with rows that others may go on from."""

    sequence: KVSequence
    tokens: Tokens  # that others may want, with their origins
    origins: Tokens
    salt: str
    idle: bool = False
    used: int = 0  # the latest has the highest


class PrefixCache:
    """The sequences of a context that somebody may go on from."""

    def __init__(self) -> None:
        self.entries: list[CachedPrefix] = []
        self._numbers: dict[object, int] = {}  # the latest used are last
        self._numbering = threading.Lock()  # layouts may be made in several threads
        self._unused = count(1)
        self._clock = count(1)

    def layout(self, prompt: Prompt, parts: Parts, seam: int, *, splice: bool = True, exact: bool = False) -> Layout:
        """How the rows of a prompt will come about."""
        by_name = {segment.name: segment for segment in prompt.segments}
        tokens = [parts.opening, *parts.tokens]
        origins = [np.zeros(len(parts.opening), np.int32)]
        splices, prefix_only, place = [], 0, len(parts.opening)
        for chunk, ids in zip(parts.chunks, parts.tokens, strict=True):
            spliced = splice and chunk.kind == "splice" and chunk.name not in prompt.decoded
            image = chunk.kind == "splice" and bool(by_name[chunk.name].media)  # its tokens tell nothing of it
            how = _DECODED if not spliced else _EXACT if exact else seam
            number = self._number(by_name[chunk.name], how) if spliced or image else 0
            origins.append(np.full(len(ids), number, np.int32))
            if spliced or image:
                splices.append((place, place + len(ids)))
                prefix_only = place + len(ids) if by_name[chunk.name].prefix_only else prefix_only
            place += len(ids)
        whole = np.concatenate(tokens).astype(np.int32)
        return Layout(prompt, parts, seam, splice, exact, whole, np.concatenate(origins), tuple(splices), prefix_only)

    def raw(self, tokens: Tokens) -> Layout:
        """That of a text that is decoded as it is."""
        parts = Parts((Chunk("text"),), (tokens,), np.zeros(0, np.int32), {})
        origins = np.zeros(len(tokens), np.int32)
        return Layout(
            Prompt(""), parts, 0, splice=False, exact=False, tokens=tokens, origins=origins, splices=(), prefix_only=0
        )

    def _number(self, segment: Segment, how: int) -> int:
        """The same for segments with the same rows that are placed alike. `how`: by which seam, _DECODED or _EXACT."""
        layers = segment.layers
        if isinstance(layers, Stored):
            rows: object = tuple(tensor.checksum for layer in layers.tensors for tensor in (layer.k, layer.v))
        else:  # in memory, of an image that is not kept: the same bytes, looked at alike, give the same rows
            rows = segment.text, segment.projector, segment.context.tobytes(), segment.blocks
        key = segment.name, segment.base, segment.prefix_only, rows, how
        with self._numbering:
            number = self._numbers.pop(key, None) or next(self._unused)
            self._numbers[key] = number
            if len(self._numbers) > REMEMBERED:  # what is forgotten gets another number: at worst it is read once more
                del self._numbers[next(iter(self._numbers))]
        return number

    def find(self, layout: Layout, salt: str) -> tuple[CachedPrefix | None, int, int]:
        """The sequence that has the longest beginning of the prompt, how many tokens that is, and how many there will
        be, as far as is known, when those that are being read are there. The last token is left to be decoded."""
        best, length, coming = None, 0, 0
        for one in self.entries:
            if one.salt != salt or not one.sequence.intact:
                continue
            alike = self._alike(one, layout)
            there = self._whole(one, layout, min(alike, one.sequence.rows))
            if one.sequence.rows < alike:
                coming = max(coming, self._whole(one, layout, alike))
            if there > length:
                best, length = one, there
        return best, length, max(coming, length)

    def _alike(self, one: CachedPrefix, layout: Layout) -> int:
        """How many tokens, with their origins, are the same from the beginning on."""
        most = min(len(one.tokens), len(layout) - 1)
        same = (one.tokens[:most] == layout.tokens[:most]) & (one.origins[:most] == layout.origins[:most])
        return most if same.all() else int(same.argmin())

    def _whole(self, one: CachedPrefix, layout: Layout, length: int) -> int:
        """As much of that as can be gone on from."""
        if one.sequence.context.model.recurrent:  # a state is after its last token
            whole = length == len(one.sequence) == one.sequence.rows and length >= layout.prefix_only
            return length if whole and not any(first < length < last for first, last in layout.splices) else 0
        for first, last in layout.splices:
            if first < length < last:
                length = first
        length = layout.begin(length)
        return 0 if length < layout.prefix_only else length

    def begin(self, one: CachedPrefix, length: int, layout: Layout, *, dry: bool = False) -> KVSequence:
        """A sequence that goes on after the first tokens of a kept one, which are those of this prompt: that itself, if
        nothing else is in it. A `dry` one only tells what would be done."""
        one.used = next(self._clock)
        if one.idle and length == len(one.sequence) and not dry:
            self.entries.remove(one)
            sequence = one.sequence
        else:
            sequence = one.sequence.share(length, dry=dry)
        sequence.pieces = layout.live(length)
        sequence.seconds = {"splice": 0.0, "decode": 0.0}
        sequence.token_limit = None
        return sequence

    def undo(self, one: CachedPrefix | None, sequence: KVSequence) -> None:
        """What was begun could not go on."""
        if one is not None and one.sequence is sequence:
            self.entries.append(one)
        else:
            sequence.close()

    def add(self, sequence: KVSequence, layout: Layout, salt: str) -> CachedPrefix:
        """A sequence that is being read: others may go on from what of it is there."""
        one = CachedPrefix(sequence, layout.tokens, layout.origins, salt, used=next(self._clock))
        self.entries.append(one)
        return one

    def set_idle(self, one: CachedPrefix) -> None:
        """Nobody works on it any more. It stays with all tokens that have rows, if they are sound."""
        seq = one.sequence
        if not seq.intact or not seq.rows:
            self.drop(one)
            return
        try:
            seq.truncate(seq.rows)
        except Exception:
            self.drop(one)
            raise
        known = min(len(one.tokens), len(seq))
        one.tokens = seq.tokens
        one.origins = np.concatenate([one.origins[:known], np.zeros(len(seq) - known, np.int32)])
        one.idle, one.used = True, next(self._clock)

    def drop(self, one: CachedPrefix) -> None:
        if one in self.entries:
            self.entries.remove(one)
        one.sequence.close()

    def idle_prefixes(self) -> Iterator[CachedPrefix]:
        """Those that nobody works on, the one that was used longest ago first."""
        yield from sorted((one for one in self.entries if one.idle), key=lambda one: one.used)

    def evict(self) -> bool:
        """Give up the one that was used longest ago. False where there is none."""
        for one in self.idle_prefixes():
            self.drop(one)
            return True
        return False

    def close(self) -> None:
        for one in list(self.entries):
            self.drop(one)
