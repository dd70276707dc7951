"""A llama.cpp context: K/V rows of one or more sequences, and the hooks that place, replace, add and read them.

It knows sequences, positions and rows; what they mean is the sequence's business.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import interrupts, limits, native, process
from notes_cli.engine.arguments import (
    check_axes,
    check_layers,
    empty_rows,
    file_layers,
    int32_pointer,
    int_array,
    row_pointers,
)
from notes_cli.engine.identity import Identity
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.options import ContextOptions, context_params
from notes_cli.engine.segment import LayerRows, Stored, Tokens
from notes_cli.engine.seq_pool import Lease, Pool
from notes_cli.errors import EngineError, Help, UnsupportedError

_GROWS_TO = 128  # that a context grows to by itself
_STRIDE = 128  # tokens of a call that nothing stops
_STOPS = 3  # times that signals whose handlers raise nothing may stop a call
_ROPE_NAMES = {-1: "none", 0: "norm", 2: "neox", 8: "mrope", 40: "imrope"}

Output = Literal["none", "last", "all"]
_OUTPUT = {"none": native.OUTPUT_NONE, "last": native.OUTPUT_LAST, "all": native.OUTPUT_ALL}


class Context:
    """One llama_context, and who holds its sequences. Use it from one thread at a time, but for `identity`; its model
    closes it, too."""

    def __init__(self, model: Model, options: ContextOptions | None = None) -> None:
        """Raise EngineError where the memory for it is not there, or llama.cpp cannot make it."""
        self._handle: Any = None
        self.unmovable: str | None = None  # why no rows may be moved, where that was measured (engine/rotation.py)
        self.carries = False  # whether the state of recurrent layers may be carried through what was compiled elsewhere
        self.longest: int | None = None  # tokens that one sequence may have, where that is less than there is room for
        self.model = model
        self.remaking = threading.RLock()  # held while the llama_context is replaced, and to read its identity
        self._listening = interrupts.Listening()
        model.users.add(self)
        self._damaged = False  # a recurrent state may hold what is no number
        self._open(options or ContextOptions())
        self._pool = Pool(self._sequences, self._empty)

    def _open(self, options: ContextOptions) -> None:
        model, params = self.model, context_params(self.model, options)
        bound = limits.trained_length(model, options)
        learned = limits.has_learned_positions(model)
        if learned and options.n_sequences == 1 and options.n_ctx > model.n_ctx_train:
            raise EngineError(
                f"{model.name} has learned vectors for {model.n_ctx_train:,} positions and for no others: a context "
                f"of {options.n_ctx:,} tokens is not possible",
                Help.SMALLER_CONTEXT(tokens=model.n_ctx_train),
            )
        limits.check_memory(model, options)
        reason, handle = native.can_keep(model.handle, params.type_k, params.type_v), None
        if reason is None:
            with process.log.collected() as lines:
                handle = llama.llama_init_from_model(model.handle, params)
            reason = lines[-1].split(": ", 1)[-1].strip() if lines else "no reason given"
        if not handle:
            raise EngineError(f"llama.cpp cannot make a context of {options.n_ctx} tokens for {model.name} ({reason})")
        self._handle, self.options, self._sequences = handle, options, int(params.n_seq_max)
        self.unified = bool(params.kv_unified) or self._sequences == 1  # all sequences in one cache
        self.cells = int(llama.llama_n_ctx_seq(handle))  # tokens that all sequences, or each of them, can have
        self.n_batch = int(llama.llama_n_batch(handle))  # tokens of one call, of which all logits can be had
        self.n_ubatch = int(llama.llama_n_ubatch(handle))
        self._bound = self.cells
        if learned:
            self._bound = min(self._bound, model.n_ctx_train)
        if bound is not None and options.n_ctx <= bound:  # llama.cpp rounds up: no reason to go beyond
            self._bound = min(self._bound, bound)
        self.drops = not options.swa_full and llama.llama_model_n_swa(model.handle) > 0  # what leaves a window
        # What cannot go back is not stopped half way, a recurrent state or a cache that drops rows: such a context gets
        # shorter batches instead.
        self._watched = not model.recurrent and not self.drops and interrupts.descriptor() >= 0
        if self._watched:
            native.call("notes_watch", handle, interrupts.descriptor())
        self.stride = self.n_batch if self._watched else min(self.n_batch, _STRIDE)  # tokens that nothing stops

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can have."""
        return self._bound if self.longest is None else min(self._bound, self.longest)

    @property
    def threads(self) -> int:
        """How many compute a batch."""
        return int(llama.llama_n_threads_batch(self.handle))

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise EngineError("this context is closed")
        return self._handle

    @property
    def _memory(self) -> Any:
        return llama.llama_get_memory(self.handle)

    def close(self) -> None:
        native.free_once(self, "_handle", llama.llama_free)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def supports(self, operation: str) -> str | None:
        """None if this context can `splice`, `rewrite`, `append`, `read` or `restore`, else the reason it cannot."""
        return native.supports(self.handle, operation) or (self.unmovable if operation == "splice" else None)

    @property
    def backend(self) -> str:
        """Everything in this context and machine that changes rounding: flash attention, devices, llama.cpp's
        version. The number of threads and the size of batches are no part of it."""
        model = self.model
        here = [native.system_info(), str(model.placed), str(self.options.offload_kv)] if model.offloads else []
        digest = hashlib.sha256("\n".join([native.system_info(), *here]).encode()).hexdigest()[:8]
        return f"flash attention {self.options.flash_attention}, backend {digest}"

    @property
    def compile_options(self) -> ContextOptions:
        """The options of a context that rows for this one are compiled in."""
        type_k, type_v = self.options.compiled
        return replace(self.options, type_k=type_k, type_v=type_v)

    def can_move(self, base: int, position: int, count: int) -> str | None:
        """None if `count` rows computed at `base` can be placed at `position`, else the reason they cannot."""
        return native.can_move(self.handle, base, position, count) or (self.unmovable if position != base else None)

    @property
    def lossless_type(self) -> str:
        """The type in which rows are read so that they come back bit for bit. All but f16 pass through f32 unharmed. Of
        an indexer's keys, which the cache keeps transformed, numbers close to 0 come back within 1e-6."""
        plain = self.options.cache == "f16/f16" and all(layer.part != "indexer" for layer in self.layers)
        return "f16" if plain else "f32"

    @cached_property
    def layers(self) -> list[native.Layer]:
        """Shape and rotation of each layer of the cache. Raise UnsupportedError where its rows cannot be read."""
        count = native.call("notes_layers", self.handle, None, 0)
        layers = (native.Layer * count)()
        native.call("notes_layers", self.handle, layers, count)
        return list(layers)

    def frequencies(self, index: int) -> NDArray[np.float64]:
        """Radians a position of each rotary pair of the index-th cache layer, all scaling in effect."""
        count = native.call("notes_frequencies", self.handle, index, None, 0)
        out = np.zeros(count)
        native.call("notes_frequencies", self.handle, index, out.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), count)
        return out

    @cached_property
    def _rotation(self) -> str:
        """Digest of how every layer rotates. It does not change while the context lives, and is asked for often."""
        digest = hashlib.sha256()
        for index, layer in enumerate(self.layers):
            part = "" if layer.part == "attention" else f" {layer.part}"
            digest.update(f"{layer.layer} {layer.rope} {layer.n_rot} {layer.magnitude:.6f}{part}\n".encode())
            digest.update(self.frequencies(index).astype(np.float32).tobytes())
        return digest.hexdigest()

    def identity(self, weights: str) -> Identity:
        """What a segment must have been compiled with to fit here. `weights`: sha256 of the model's file.

        Any thread may ask for it. Raise UnsupportedError where rows cannot be read, also while an adapter is applied to
        the context.
        """
        with self.remaking:
            return self._identity(weights)

    def _identity(self, weights: str) -> Identity:
        reason = self.supports("read")
        if reason:
            raise UnsupportedError(reason)
        first = next((layer for layer in self.layers if layer.rope >= 0), self.layers[0])
        return Identity(
            model=self.model.name,
            architecture=self.model.architecture,
            quantization=self.model.quantization,
            weights=weights,
            rope=self._rotation,
            rope_text=f"{_ROPE_NAMES.get(first.rope, first.rope)} base {first.freq_base:g} scale {first.freq_scale:g}"
            if first.rope >= 0
            else "none",
            kv_type="/".join(self.options.compiled),
            adapters="",  # a context with one does not read
        )

    # Sequences.

    def lease(self) -> Lease:
        """An empty sequence. Where all are held, the context is made again with more of them (`resize`)."""
        if self._damaged and not self._pool.held and not self.used:
            self.clear()
        number = self._free()
        if number is None and self._pool.size < _GROWS_TO:
            self.resize(n_sequences=min(_GROWS_TO, 2 * self._pool.size))
            number = self._free()
        if number is None:
            raise EngineError(f"all {self._pool.size} sequences of the context are in use", "Close a sequence")
        return self._pool.lease(number)

    def _free(self) -> int | None:
        """The first sequence that is neither leased nor has rows: code that uses bare numbers has no lease."""
        return next((number for number in self._pool.free if not self.length(number)), None)

    def share(self, seq_id: int, length: int) -> Lease:
        """An empty sequence that has the first `length` rows of this one, in the same cells: nothing is copied until
        one of the two rewrites them. Of recurrent layers only all rows can be shared.

        Raise UnsupportedError where sequences have caches of their own.
        """
        if not self.unified:
            raise UnsupportedError(
                "sequences with K/V caches of their own cannot share cells (kv_unified puts them in one)"
            )
        lease = self.lease()
        try:
            native.call("notes_share", self.handle, seq_id, lease.id, length)
        except BaseException:
            lease.close()
            raise
        return lease

    @property
    def n_leased(self) -> int:
        """How many sequences somebody holds."""
        return len(self._pool.held)

    @property
    def n_free(self) -> int:
        """How many sequences nobody holds."""
        return len(self._pool.free)

    @property
    def used(self) -> int:
        """Cells that hold a row of some sequence, a shared one once. 0 where the model keeps no rows."""
        self._pool.collect()
        return native.call("notes_used", self.handle)

    def room(self, seq_id: int | None = None) -> int:
        """How many tokens this sequence can still take at its end; without one, a new sequence."""
        left = self.n_ctx - (0 if seq_id is None else self.length(seq_id))
        return min(left, self.cells - self.used) if self.unified else left

    def _empty(self, number: int) -> None:
        """Drop all rows of a sequence. The data of recurrent state goes with the last one: see `clear`."""
        if self._handle is None:
            return
        if self.model.recurrent and not any(self.length(other) for other in range(self._sequences) if other != number):
            llama.llama_memory_clear(self._memory, True)
        else:
            llama.llama_memory_seq_rm(self._memory, number, -1, -1)

    def resize(self, *, n_ctx: int = 0, n_sequences: int = 0, rotated_alike: bool = False) -> None:
        """Make the context again with at least so many tokens (each sequence, where they have caches of their own) and
        sequences. Sequences that are held come along, their rows bit for bit, and go on sharing what they share.
        `rotated_alike`: rows of segments must fit as they did.

        Raise EngineError or UnsupportedError where that is not possible; nothing has changed then.
        """
        from notes_cli.engine.resize import restore_sequences, save_sequences  # most contexts stay as they are

        old = self.options
        sequences = max(n_sequences, old.n_sequences)
        unified = old.unified or (sequences > 1 and old.n_sequences == 1)
        size = n_ctx if n_ctx > max(self.cells, old.n_ctx) else old.n_ctx
        if not unified and sequences > 1:
            size = max(n_ctx, self.cells) * sequences
        new = replace(old, n_ctx=size, n_sequences=sequences, unified=unified)
        self._pool.collect()
        with self.remaking, self._pool.deferring_releases():
            kept = save_sequences(self, self._pool)
            same = bool(kept) or (rotated_alike and self.supports("read") is None)
            rotation = self._rotation if same else ""
            try:
                self._reopen(new)
                if same and self._rotation != rotation:
                    raise UnsupportedError(
                        f"{self.model.name} rotates its keys differently in a context of {new.n_ctx:,} tokens than in "
                        f"one of {old.n_ctx:,}, so the rows of its sequences cannot be kept"
                    )
                restore_sequences(self, kept)
            except BaseException:  # an interrupt, too, must not lose them
                self._reopen(old)
                restore_sequences(self, kept)
                raise

    def _reopen(self, options: ContextOptions) -> None:
        reason = self.unmovable
        self.close()
        self.__dict__.pop("layers", None)
        self.__dict__.pop("_rotation", None)
        self._open(options)
        self.unmovable, self._pool.size = reason, self._sequences

    def cells_of(self, number: int) -> list[int]:
        """The cell of each row of a sequence, in order of position; none where the model keeps no rows."""
        count = native.call("notes_cells", self.handle, number, None, 0)
        cells = np.zeros(count, np.int32)
        native.call("notes_cells", self.handle, number, int32_pointer(cells), count)
        return [int(cell) for cell in cells]

    @property
    def several_axes(self) -> bool:
        """Whether positions have rows and columns (M-RoPE)."""
        return any(_ROPE_NAMES.get(layer.rope, "").endswith("mrope") for layer in self.layers)

    def copy(self, source: int, seq_id: int, first: int, last: int) -> None:
        """Let a sequence have the rows [first, last) of another, in the same cells; -1: to the end. Of a model with
        states, and in caches of their own, only all rows can be copied: llama.cpp aborts, or copies half."""
        if (first > 0 or last >= 0) and not (self.unified and not self.model.recurrent):
            raise UnsupportedError("only all rows of a sequence can be copied here, and no part of them")
        source, seq_id = self._known(source), self._known(seq_id)
        llama.llama_memory_seq_cp(self._memory, source, seq_id, first, last)

    # Rows. `sequence` is a sequence id; positions count from 0.

    def length(self, seq_id: int) -> int:
        """Number of positions up to the last row of the sequence."""
        return int(llama.llama_memory_seq_pos_max(self._memory, self._known(seq_id))) + 1

    def append(self, tokens: Mapping[int, Tokens], output: Output | Mapping[int, Output] = "last") -> None:
        """Decode tokens after the last row of each sequence, all in one batch. `output`: which logits are wanted, of
        all sequences or of each; `logits` counts them in the order of the tokens.

        A signal that Python handles stops it, and what was appended is removed: raise what the handler raises.
        """
        sequences = int_array([self._known(seq_id) for seq_id in tokens], "a sequence")
        counts = int_array([len(part) for part in tokens.values()], "a count")
        wanted = [_OUTPUT[output if isinstance(output, str) else output[seq_id]] for seq_id in tokens]
        outputs = int_array(wanted, "an output")
        flat = np.concatenate([np.zeros(0, np.int32), *(int_array(part, "a token") for part in tokens.values())])
        self._compute(
            tokens,
            "notes_append",
            int32_pointer(sequences),
            int32_pointer(counts),
            int32_pointer(outputs),
            len(sequences),
            int32_pointer(flat),
        )

    def _compute(self, sequences: Iterable[int], hook: str, *arguments: Any) -> None:
        """Call a hook that computes in these sequences, and again if a signal stopped it whose handler raised nothing.
        If such signals keep coming, as those of a timer do, they no longer stop it."""
        interrupts.check_stop()
        lengths = {seq_id: self.length(seq_id) for seq_id in sequences} if self._watched else {}
        for _ in range(_STOPS if self._watched else 0):
            try:
                with self._listening, process.interrupts.caught():
                    native.call(hook, self.handle, *arguments)
                process.interrupts.raise_kept()
                return
            except native.StoppedError:
                process.interrupts.raise_kept()
                interrupts.check_stop()
                # Not by a signal; or a memory that cannot go back is empty now, which is no place to go on from.
                if self._listening.silent or any(self.length(one) != length for one, length in lengths.items()):
                    raise
        with self._unwatched():
            native.call(hook, self.handle, *arguments)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """No signal stops a computation."""
        if not self._watched:
            yield
            return
        native.call("notes_watch", self.handle, -1)
        try:
            yield
        finally:
            native.call("notes_watch", self.handle, interrupts.descriptor())

    def decode_at(self, seq_id: int, position: int, tokens: Tokens) -> None:
        """Decode tokens from any position on, in a sequence that is empty. Raise EngineError if that fails."""
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, token in enumerate(tokens):
                batch.token[index], batch.pos[index] = int(token), position + index
                batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, seq_id, 0
            with self._unwatched():
                status = llama.llama_decode(self.handle, batch)
        finally:
            llama.llama_batch_free(batch)
        process.interrupts.raise_kept()
        if status:
            raise EngineError(f"llama.cpp cannot decode at position {position} (status {status})")

    def decode_embeddings(
        self,
        seq_id: int,
        position: int,
        rows: NDArray[np.float32],
        axes: NDArray[np.int32] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Decode the rows of an image ([n, width of the model's input], see eye.py) after the last row of the sequence,
        from `position` on. `axes`, [n, 3]: time, row and column of each, from 0 on, where the model has them. `whole`:
        they see each other, so that all must go into one micro-batch.

        Raise EngineError if that fails; the sequence is as it was, or empty where it cannot go back.
        """
        if whole and len(rows) > self.n_ubatch:
            raise EngineError(
                f"the {len(rows):,} rows of this image see each other, and {self.n_ubatch:,} fit into a micro-batch",
                Help.LARGER_MICRO_BATCH(tokens=len(rows)),
            )
        count, width = rows.shape
        planes = position + (np.zeros((3, 1), int) + np.arange(count) if axes is None else check_axes(axes, count).T)
        embeddings = np.ascontiguousarray(rows, np.float32)
        where = int_array(planes.ravel(), "a position")
        with self._unwatched():
            native.call(
                "notes_show",
                self.handle,
                self._known(seq_id),
                embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
                count,
                width,
                int32_pointer(where),
                whole,
            )
        process.interrupts.raise_kept()

    def rewrite(self, seq_id: int, positions: Sequence[int], tokens: Tokens, output: Output = "none") -> None:
        """Decode tokens at positions that already hold rows, ascending, scattered or not, in their place."""
        where, what = int_array(positions, "a position"), int_array(tokens, "a token")
        if len(where) != len(what):
            raise EngineError(f"{len(where)} positions but {len(what)} tokens to rewrite")
        self._compute(
            [seq_id], "notes_rewrite", seq_id, int32_pointer(where), int32_pointer(what), len(where), _OUTPUT[output]
        )

    def splice(
        self,
        seq_id: int,
        position: int,
        tokens: Tokens,
        layers: Sequence[LayerRows],
        base: int,
        *,
        first: int = 0,
        rotate: bool = True,
        axes: NDArray[np.int32] | None = None,
    ) -> None:
        """Place rows at [position, position + len(tokens)), K rotated by position - base; not those before `first`.

        Rows in a file are read, checked and placed in one pass; none of them counts before all were right. Where they
        are not, raise what `layers.refused` makes. A signal stops that as it stops an append.

        `rotate=False` leaves K as it is: the control, which must give wrong rows, for measuring what the rotation does.
        `axes`, [n, 3]: where rows are not one a position (an image), their positions on three axes, from `read_axes`.
        """
        if self.unmovable and position != base:
            raise UnsupportedError(self.unmovable)
        what = int_array(tokens, "a token")
        where = seq_id, position, int32_pointer(what), len(what)
        if not rotate:
            axes = None if axes is None else axes + (position - base)
            base = position
        # What leaves a small window is gone before the rows come, which must then be known to be right.
        if isinstance(layers, Stored) and layers.file is not None and axes is None and not self.drops:
            count = first + len(what)
            check_layers(layers.tensors, self.layers, count)
            try:
                self._compute(
                    *([seq_id], "notes_splice_file", *where, layers.file.fileno()),
                    *(file_layers(layers.tensors), len(layers), count, first, base),
                )
            except native.FileError as error:
                raise layers.refused(error.what, damaged=error.damaged) from error
            return
        if first:
            layers = [rows.cut(slice(first, None)) for rows in layers]
        check_layers(layers, self.layers, len(what))
        planes = None if axes is None else int32_pointer(int_array(check_axes(axes, len(what)).ravel(), "a position"))
        native.call("notes_splice", self.handle, *where, planes, *row_pointers(layers), base)

    def read(self, seq_id: int, position: int, count: int, *, base: int, dtype: str = "f16") -> tuple[LayerRows, ...]:
        """Rows of [position, position + count), the first one's K rotated to position `base`."""
        layers = empty_rows(self.layers, count, dtype)
        native.call("notes_read", self.handle, seq_id, position, count, None, *row_pointers(layers), base)
        return layers

    def read_axes(
        self, seq_id: int, position: int, count: int, *, base: int, dtype: str = "f16"
    ) -> tuple[tuple[LayerRows, ...], NDArray[np.int32]]:
        """The first `count` rows from `position` on, and their positions on the axes of M-RoPE, [count, 3]."""
        layers, axes = empty_rows(self.layers, count, dtype), np.zeros((count, 3), np.int32)
        native.call(
            "notes_read", self.handle, seq_id, position, count, int32_pointer(axes), *row_pointers(layers), base
        )
        return layers, axes

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop the rows of the sequence from position `length` on."""
        native.call("notes_truncate", self.handle, seq_id, length)

    @contextmanager
    def lookahead_sequence(self, seq_id: int) -> Iterator[int]:
        """A sequence that goes on from this one and is forgotten afterwards; this one is as it was."""
        length = self.length(seq_id)
        if self.model.recurrent:
            with self.share(seq_id, length) as other:
                yield other.id
            return
        window = self._window(seq_id) if self.drops else None
        try:
            yield seq_id
        finally:
            try:
                self.truncate(seq_id, length)
            except EngineError:  # what went ahead has taken the cells of the window
                if window is None:
                    raise
                self._restore_window(seq_id, length, window)

    def _window(self, seq_id: int) -> NDArray[np.uint8]:
        """The rows that the sliding-window layers need to go on with a sequence, as llama.cpp writes them."""
        where = seq_id, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        window = np.empty(llama.llama_state_seq_get_size_ext(self.handle, *where), np.uint8)
        pointer = window.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = llama.llama_state_seq_get_data_ext(self.handle, pointer, window.nbytes, *where)
        if not 0 < window.nbytes == written:
            raise EngineError(f"the window of sequence {seq_id} cannot be kept")
        return window

    def _restore_window(self, seq_id: int, length: int, window: NDArray[np.uint8]) -> None:
        """Go back to a length at which `_window` was called. Raise EngineError where that fails; the sequence is empty
        then."""
        llama.llama_memory_seq_rm(self._memory, seq_id, length, -1)
        pointer = window.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        partly = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if not llama.llama_state_seq_set_data_ext(self.handle, pointer, window.nbytes, seq_id, partly):
            self._empty(seq_id)
            raise EngineError(f"there is no room for the window of sequence {seq_id}: its rows are gone")

    def clear(self) -> None:
        """Drop all sequences and end every lease. The data is cleared, too: NaN would survive them in a recurrent state
        and in free cells, which are multiplied by 0 without flash attention."""
        llama.llama_memory_clear(self._memory, True)
        self._damaged = False
        self._pool.clear()

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Logits of an output of the last append or rewrite, [n_vocab], a copy."""
        pointer = llama.llama_get_logits_ith(self.handle, index)
        if not pointer:
            raise EngineError(f"there are no logits for output {index}")
        logits = np.empty(self.model.n_vocab, np.float32)
        ctypes.memmove(logits.ctypes.data, pointer, logits.nbytes)
        if np.isnan(logits).any():
            self._damaged = True
            raise EngineError(
                f"{self.model.name} computes logits that are not numbers: its file or its K/V cache is damaged"
            )
        return logits

    def _known(self, seq_id: int) -> int:
        """The sequence, if there is one: llama.cpp aborts on others."""
        if not 0 <= seq_id < self._sequences:
            raise EngineError(f"sequence {seq_id} does not exist; the context has {self._sequences}")
        return seq_id
