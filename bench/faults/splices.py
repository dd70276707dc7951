"""Segment files that others change while their rows are spliced."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from contextlib import nullcontext, suppress
from typing import Literal

import numpy as np

from bench.faults.frame import ACCEPTED, ROOT, Failed, Kind, chance, check, refused
from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.identity import Identity
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import LayerRows, Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, SegmentError
from notes_cli.library.container import open_segment, open_stored, write_segment

sys.path.append(str(ROOT / "tests"))
import tiny  # type: ignore[import-not-found]

ROWS, LAYERS, WIDTH = 5000, 2, 256
BASE = 7


class Splices(Kind):
    """A segment of 10 MB, spliced by three threads straight from its file."""

    cases, share = 1_000, 2

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        folder = self.folder()
        self.path = folder / "returns.gguf"
        self.model = tiny.write_model(folder / "model.gguf", "qwen3", layers=LAYERS, embd=WIDTH, heads=8, kv_heads=8)
        self.sound = [folder / f"sound-{number}.gguf" for number in range(2)]
        for number, path in enumerate(self.sound):
            write_segment(path, segment(number))
        self.bytes = [path.read_bytes() for path in self.sound]
        self._contexts: dict[str, Context] = {}
        self._known: dict[tuple[object, ...], list[bytes]] = {}

    def judge(self, number: int) -> str:
        rng = chance(self.seed, number)
        context = self._context(rng.choice(("on", "off")))
        before, seam = rng.choice((BASE, 30)), rng.choice((0, 0, 3))
        self.path.write_bytes(self.bytes[0])
        seq = begun(context, before)
        rows = entries(seq)
        writer = threading.Thread(target=self._disturb, args=(rng.randrange(1 << 30),))
        early = rng.random() < 0.5
        device = native.staged(lines=rng.random() < 0.5, late=True) if rng.random() < 0.5 else nullcontext()
        if early:
            writer.start()
        try:
            opened = open_stored(self.path)
            if not early:
                writer.start()
            with device:
                seq.splice(opened, seam=seam)
        except SegmentError as error:
            length = before + seam if len(seq) > before else before  # the seam is decoded before
            same = len(seq) == context.length(seq.seq_id) == context.used == length
            check(same and entries(seq, before) == rows, "refused, and the sequence is not as it was")
            return refused(error)
        except EngineError as error:  # a NaN that the check should have found before
            raise Failed(f"rows were used that had not been checked: {error}") from error
        finally:
            if writer.ident is not None:
                writer.join()
        check(entries(seq) == self._wanted(context, int(opened.name), before, seam), "other rows")
        return ACCEPTED

    def _context(self, flash: Literal["on", "off"]) -> Context:
        """Opened by the process that judges."""
        if flash not in self._contexts:
            options = ContextOptions(n_ctx=ROWS + 64, n_threads=3, flash_attention=flash)
            self._contexts[flash] = Context(Model(self.model), options)
        return self._contexts[flash]

    def _wanted(self, context: Context, which: int, before: int, seam: int) -> list[bytes]:
        key = (context.options.flash_attention, which, before, seam)
        if key not in self._known:
            seq = begun(context, before)
            seq.splice(open_segment(self.sound[which]), seam=seam)
            self._known[key] = entries(seq)
        return self._known[key]

    def _disturb(self, seed: int) -> None:
        rng = random.Random(seed)
        whole = self.bytes[0]
        for _ in range(rng.randint(1, 4)):
            time.sleep(rng.choice((0, rng.random() * 0.004)))
            at = rng.randrange(len(whole))
            with suppress(OSError), self.path.open("r+b", buffering=0) as file:
                way = rng.randrange(5)
                if way == 0:
                    os.truncate(self.path, at)
                elif way == 1:
                    file.seek(at)
                    file.write(rng.randbytes(rng.choice((1, 4096, 1 << 20)))[: len(whole) - at])
                elif way == 2:
                    file.write(whole)  # earlier entries, bit by bit
                elif way == 3:
                    file.write(self.bytes[1])  # another one of the same size, in place
                else:
                    other = self.path.with_suffix(".new")
                    other.write_bytes(self.bytes[1])
                    other.replace(self.path)


def segment(number: int) -> Segment:
    """Random rows; its name is its number."""
    chances = np.random.default_rng(number)

    def rows() -> np.ndarray[tuple[int, int], np.dtype[np.float16]]:
        return chances.standard_normal((ROWS, WIDTH), np.float32).astype(np.float16)

    return Segment(
        *(str(number), "", "", chances.integers(0, 256, ROWS).astype(np.int32), BASE, np.zeros(BASE, np.int32), ()),
        Identity(*[""] * 8),
        tuple(LayerRows(layer, rows(), rows()) for layer in range(LAYERS)),
    )


def begun(context: Context, count: int) -> KVSequence:
    """A sequence of some tokens in a context with nothing else."""
    context.clear()
    seq = KVSequence(context)
    seq.append(np.arange(count))
    seq.flush()
    return seq


def entries(seq: KVSequence, count: int | None = None) -> list[bytes]:
    """Its rows, as the cache has them; the first ones of them."""
    layers = seq.context.read(seq.seq_id, 0, len(seq) if count is None else count, base=0)
    return [part.tobytes() for rows in layers for part in (rows.k, rows.v)]
