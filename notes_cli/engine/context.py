"""Wraps a llama_context: K/V entries of one or more sequences, and hooks that splice, rewrite, append and read.

It knows sequence ids, positions and K/V entries; KVSequence knows which text they belong to. Sequence ids are leased
exclusively: a lease keeps its sequence until it is closed; a second one may share the entries without a copy.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import interrupts, limits, native
from notes_cli.engine.limits import ContextOptions, context_params
from notes_cli.engine.model import Model
from notes_cli.engine.native import (
    check_axes,
    check_layers,
    empty_rows,
    int32_pointer,
    int_array,
    llama,
    row_pointers,
    splice_file,
)
from notes_cli.engine.segment import Identity, LayerRows, Stored, Tokens
from notes_cli.errors import EngineError, Help, UnsupportedError


class Lease(AbstractContextManager["Lease"]):
    """An exclusive lease of one sequence of a context. Close it, or use it as a context manager."""

    def __init__(self, pool: Pool, seq_id: int, ticket: int) -> None:
        self.tokens: list[int] = []  # of its entries, decoded or pending
        self._pool, self._seq_id, self._ticket = pool, seq_id, ticket

    @property
    def id(self) -> int:
        """The sequence id. Raises EngineError if the lease has ended."""
        if not self.held:
            raise EngineError("this sequence was given back, or its context was cleared: its rows are gone")
        return self._seq_id

    @property
    def held(self) -> bool:
        """True if the lease is valid: not closed, and the context not cleared since."""
        return self._pool.tickets.get(self._seq_id) == self._ticket

    def close(self) -> None:
        """End the lease; the entries are gone."""
        if self.held:
            self._pool.release(self._seq_id)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # May run in any thread while the context computes: only note it, `collect` releases the sequence later.
        self._pool.dropped.append((self._seq_id, self._ticket))


class Pool:
    """The sequences 0 to `size` - 1 of a context and their leases. `empty` drops the entries of a sequence."""

    def __init__(self, size: int, empty: Callable[[int], object]) -> None:
        self.size = size
        self._empty = empty
        self.tickets: dict[int, int] = {}  # sequence id -> number of its lease
        self.dropped: list[tuple[int, int]] = []  # (sequence id, number) of garbage-collected leases
        self._numbers = count()
        self._tokens: dict[int, list[int]] = {}
        self._waits = False  # whether releases are deferred

    @property
    def held(self) -> list[int]:
        """Sequences that are leased."""
        self.collect()
        return sorted(self.tickets)

    @property
    def free(self) -> list[int]:
        """Sequences that are not leased."""
        self.collect()
        return [seq_id for seq_id in range(self.size) if seq_id not in self.tickets]

    def lease(self, seq_id: int) -> Lease:
        """Lease a free sequence."""
        self.tickets[seq_id] = ticket = next(self._numbers)
        lease = Lease(self, seq_id, ticket)
        self._tokens[seq_id] = lease.tokens
        return lease

    def tokens(self, seq_id: int) -> list[int]:
        """Return the tokens of a sequence; empty if it is not leased."""
        return self._tokens.get(seq_id, [])

    @contextmanager
    def deferring_releases(self) -> Iterator[None]:
        """Defer releases during the block, in which K/V is moved: a collected generator may close a lease at any
        time."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self.collect()

    def release(self, seq_id: int) -> None:
        """End the lease of a sequence and drop its entries."""
        if self._waits:
            self.dropped.append((seq_id, self.tickets[seq_id]))
            return
        del self.tickets[seq_id], self._tokens[seq_id]
        self._empty(seq_id)

    def clear(self) -> None:
        """End all leases. The caller drops the entries."""
        self.tickets.clear()
        self._tokens.clear()

    def collect(self) -> None:
        """Release the sequences of garbage-collected leases."""
        while self.dropped and not self._waits:
            seq_id, ticket = self.dropped.pop()
            if self.tickets.get(seq_id) == ticket:
                self.release(seq_id)


_GROWS_TO = 128  # sequences that `lease` adds by itself at most
_DROPS = "the cache keeps no more rows than its sliding window has (swa_full keeps them all)"
_STRIDE = 128  # tokens of a call that cannot be interrupted
_STOPS = 3  # signals whose handlers raise nothing may abort a call this often
_ROPE_NAMES = {-1: "none", 0: "norm", 2: "neox", 8: "mrope", 40: "imrope"}

_OTHER_FORM = "the state has another form than that of this version of llama.cpp"

State = NDArray[np.uint8]  # as llama.cpp serialises it
Output = Literal["none", "last", "all"]
_OUTPUT = {"none": native.OUTPUT_NONE, "last": native.OUTPUT_LAST, "all": native.OUTPUT_ALL}


class Context(AbstractContextManager["Context"]):
    """One llama_context, and who holds its sequences. Use it from one thread at a time, but for `identity`; its model
    closes it, too."""

    def __init__(self, model: Model, options: ContextOptions | None = None) -> None:
        """Raises EngineError where memory does not suffice or llama.cpp cannot create it."""
        self._handle: Any = None
        self.unmovable: str | None = None  # why no K/V may be moved, where that was measured (runtime/workspace.py)
        self.carries = False  # whether recurrent state may be carried through segments that were compiled elsewhere
        self.longest: int | None = None  # limit of tokens in a sequence, where lower than the capacity
        self.model = model
        self.remaking = threading.RLock()  # held while the llama_context is replaced, and to read its identity
        model.users.add(self)
        self._damaged = False  # a recurrent state may hold NaN
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
        reason, handle = native.refusal("notes_can_keep", model.handle, params.type_k, params.type_v), None
        if reason is None:
            with native.collected_log() as lines:
                handle = llama.llama_init_from_model(model.handle, params)
            reason = lines[-1].split(": ", 1)[-1].strip() if lines else "no reason given"
        if not handle:
            raise EngineError(f"llama.cpp cannot make a context of {options.n_ctx} tokens for {model.name} ({reason})")
        self._handle, self.options, self._sequences = handle, options, int(params.n_seq_max)
        self.unified = bool(params.kv_unified) or self._sequences == 1  # all sequences in one cache
        self.cells = int(llama.llama_n_ctx_seq(handle))  # capacity in tokens: shared by all sequences, or of each
        self.n_batch = int(llama.llama_n_batch(handle))  # tokens in a call, for which all logits can be output
        self.n_ubatch = int(llama.llama_n_ubatch(handle))
        self._bound = self.cells
        if learned:
            self._bound = min(self._bound, model.n_ctx_train)
        if bound is not None and options.n_ctx <= bound:  # llama.cpp rounds up: no reason to exceed the trained length
            self._bound = min(self._bound, bound)
        # Why old entries are missing; empty where the cache keeps all.
        self.drops = _DROPS if not options.swa_full and llama.llama_model_n_swa(model.handle) > 0 else ""
        # A recurrent state or a cache that drops entries cannot be rolled back, so a call is not aborted half way: such
        # a context gets shorter batches instead.
        self._watched = not model.recurrent and not self.drops and interrupts.descriptor() >= 0
        if self._watched:
            native.call("notes_watch", handle, interrupts.descriptor())
        # tokens of a call at most: whole micro-batches, unless they run without an interrupt
        self.stride = self.n_batch // self.n_ubatch * self.n_ubatch if self._watched else min(self.n_batch, _STRIDE)
        self.n_prefill = min(self.n_ubatch, self.stride)  # tokens of a batch of a sequence alone

    @property
    def n_ctx(self) -> int:
        """Maximum number of tokens in a sequence."""
        return self._bound if self.longest is None else min(self._bound, self.longest)

    @property
    def threads(self) -> int:
        """Number of threads for a batch."""
        return int(llama.llama_n_threads_batch(self.handle))

    @threads.setter
    def threads(self, count: int) -> None:
        llama.llama_set_n_threads(self.handle, count, count)

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def supports(self, operation: str) -> str | None:
        """Return None if this context can `splice`, `rewrite`, `append`, `read` or `restore`, else the reason why
        not."""
        refusal = native.refusal("notes_supports", self.handle, native.OPERATIONS[operation])
        return refusal or (self.unmovable if operation == "splice" else None)

    @property
    def backend(self) -> str:
        """Everything in this context and machine that changes rounding, but for batches and threads
        (`Segment.batches`): flash attention, devices, llama.cpp's version."""
        model = self.model
        machine = [native.system_info(), str(model.placed), str(self.options.offload_kv)] if model.offloads else []
        digest = hashlib.sha256("\n".join([native.system_info(), *machine]).encode()).hexdigest()[:8]
        return f"flash attention {self.options.flash_attention}, backend {digest}"

    @property
    def compile_options(self) -> ContextOptions:
        """Options of the context in which K/V for this one is compiled."""
        type_k, type_v = self.options.compiled
        return replace(self.options, type_k=type_k, type_v=type_v, swa_full=True)

    def can_move(self, base: int, position: int, count: int) -> str | None:
        """Return None if `count` K/V entries computed at position `base` can be placed at `position`, else the
        reason."""
        return native.refusal("notes_can_move", self.handle, base, position, count) or (
            self.unmovable if position != base else None
        )

    @property
    def lossless_type(self) -> str:
        """The data type in which K/V is read so that it is restored bit for bit. All types but f16 survive f32. Keys of
        an indexer are kept transformed in the cache: values close to 0 are restored within 1e-6."""
        plain = self.options.cache == "f16/f16" and all(layer.part != "indexer" for layer in self.layers)
        return "f16" if plain else "f32"

    @cached_property
    def layers(self) -> list[native.Layer]:
        """Shape and rotation of each cache layer. Raises UnsupportedError where its K/V cannot be read."""
        count = native.call("notes_layers", self.handle, None, 0)
        layers = (native.Layer * count)()
        native.call("notes_layers", self.handle, layers, count)
        return list(layers)

    @property
    def state_nbytes(self) -> int:
        """Bytes of a sequence's recurrent state. Raises UnsupportedError as `layers`."""
        return sum(4 * (layer.n_embd_k + layer.n_embd_v) for layer in self.layers if layer.part == "state")

    def frequencies(self, index: int) -> NDArray[np.float64]:
        """Return radians per position of each rotary pair of the index-th cache layer, all scaling in effect."""
        count = native.call("notes_frequencies", self.handle, index, None, 0)
        out = np.zeros(count)
        native.call("notes_frequencies", self.handle, index, out.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), count)
        return out

    @cached_property
    def _rotation(self) -> str:
        """Digest of the rotation of every layer: constant while the context lives, and used often."""
        digest = hashlib.sha256()
        for index, layer in enumerate(self.layers):
            part = "" if layer.part == "attention" else f" {layer.part}"
            digest.update(f"{layer.layer} {layer.rope} {layer.n_rot} {layer.magnitude:.6f}{part}\n".encode())
            digest.update(self.frequencies(index).astype(np.float32).tobytes())
        return digest.hexdigest()

    def identity(self, weights: str) -> Identity:
        """Return the identity that a segment must have been compiled with to fit here. `weights`: sha256 of the model's
        file. Safe to call from any thread. Raises UnsupportedError where K/V cannot be read, also while an adapter is
        applied to the context."""
        with self.remaking:
            if reason := self.supports("read"):
                raise UnsupportedError(reason)
            rope = "none"
            if first := next((layer for layer in self.layers if layer.rope >= 0), None):
                kind = _ROPE_NAMES.get(first.rope, first.rope)
                rope = f"{kind} base {first.freq_base:g} scale {first.freq_scale:g}"
            return Identity(
                model=self.model.name,
                architecture=self.model.architecture,
                quantization=self.model.quantization,
                weights=weights,
                rope=self._rotation,
                rope_text=rope,
                kv_type="/".join(self.options.compiled),
                adapters="",  # a context with one cannot read its K/V
            )

    # Sequences.

    def lease(self) -> Lease:
        """Lease an empty sequence; if all are leased, recreate the context with more of them (`resize`). Raises
        EngineError at the maximum."""
        if self._damaged and not self._pool.held and not self.used:
            self.clear()
        # One that holds no entries either: code that uses bare ids has no lease.
        while (number := next((number for number in self._pool.free if not self.length(number)), None)) is None:
            if self._pool.size >= _GROWS_TO:
                raise EngineError(f"all {self._pool.size} sequences of the context are in use", "Close a sequence")
            self.resize(n_sequences=min(_GROWS_TO, 2 * self._pool.size))
        return self._pool.lease(number)

    def share(self, seq_id: int, length: int, state: State | None = None) -> Lease:
        """Lease a sequence with the first `length` entries of this one in the same cells; nothing is copied until one
        of the two rewrites them. Recurrent layers can only share everything, unless `state` is the one that the
        sequence had at that length. Raises UnsupportedError where sequences have separate caches."""
        if not self.unified:
            raise UnsupportedError(
                "sequences with K/V caches of their own cannot share cells (kv_unified puts them in one)"
            )
        lease = self.lease()
        try:
            if state is None:
                native.call("notes_share", self.handle, seq_id, lease.id, length)
            elif reason := self.supports("restore"):
                raise UnsupportedError(reason)
            else:
                llama.llama_memory_seq_cp(self._memory, self._check_seq_id(seq_id), lease.id, 0, length)
                self.set_state(lease.id, length, state)
        except BaseException:
            lease.close()
            raise
        return lease

    @property
    def n_leased(self) -> int:
        """Number of leased sequences."""
        return len(self._pool.held)

    @property
    def n_free(self) -> int:
        """Number of sequences that are not leased."""
        return len(self._pool.free)

    @property
    def used(self) -> int:
        """Number of occupied cells, shared ones counted once. 0 where the model keeps no K/V."""
        self._pool.collect()
        return native.call("notes_used", self.handle)

    def room(self, seq_id: int | None = None) -> int:
        """Return how many tokens can still be appended to this sequence, or to a new one."""
        left = self.n_ctx - (0 if seq_id is None else self.length(seq_id))
        return min(left, self.cells - self.used) if self.unified else left

    def _empty(self, number: int) -> None:
        """Drop all entries of a sequence. The data of recurrent state is zeroed with the last sequence (see
        `clear`)."""
        if self._handle is None:
            return
        if self.model.recurrent and not any(self.length(other) for other in range(self._sequences) if other != number):
            llama.llama_memory_clear(self._memory, True)
        else:
            llama.llama_memory_seq_rm(self._memory, number, -1, -1)

    def resize(self, *, n_ctx: int = 0, n_sequences: int = 0, rotated_alike: bool = False) -> None:
        """Recreate the context with at least so many tokens (per sequence, where caches are separate) and sequences.
        Leased sequences keep their K/V bit for bit and share the cells that they shared. `rotated_alike`: existing
        segments must still fit. Raises EngineError or UnsupportedError where that is not possible, with nothing
        changed."""
        old = self.options
        sequences = max(n_sequences, old.n_sequences)
        unified = old.unified or (sequences > 1 and old.n_sequences == 1)
        size = n_ctx if n_ctx > max(self.cells, old.n_ctx) else old.n_ctx
        if not unified and sequences > 1:
            size = max(n_ctx, self.cells) * sequences
        new = replace(old, n_ctx=size, n_sequences=sequences, unified=unified)
        self._pool.collect()
        with self.remaking, self._pool.deferring_releases():
            saved_sequences = _save_sequences(self, self._pool)
            same = bool(saved_sequences) or (rotated_alike and self.supports("read") is None)
            rotation = self._rotation if same else ""
            try:
                self._reopen(new)
                if same and self._rotation != rotation:
                    raise UnsupportedError(
                        f"{self.model.name} rotates its keys differently in a context of {new.n_ctx:,} tokens than in "
                        f"one of {old.n_ctx:,}, so the rows of its sequences cannot be kept"
                    )
                _restore_sequences(self, saved_sequences)
            except BaseException:  # an interrupt must not lose them either
                self._reopen(old)
                _restore_sequences(self, saved_sequences)
                raise

    def _reopen(self, options: ContextOptions) -> None:
        reason = self.unmovable
        self.close()
        self.__dict__.pop("layers", None)
        self.__dict__.pop("_rotation", None)
        self._open(options)
        self.unmovable, self._pool.size = reason, self._sequences

    def cells_of(self, number: int) -> list[int]:
        """Return the cell of each entry of a sequence by position; empty where the model keeps no K/V."""
        count = native.call("notes_cells", self.handle, number, None, 0)
        cells = np.zeros(count, np.int32)
        native.call("notes_cells", self.handle, number, int32_pointer(cells), count)
        return [int(cell) for cell in cells]

    def copy(self, source: int, seq_id: int, first: int, last: int) -> None:
        """Share the entries [first, last) of another sequence in the same cells; -1: to the end. With recurrent state
        or separate caches only everything can be copied: llama.cpp would abort or copy half."""
        if (first > 0 or last >= 0) and not (self.unified and not self.model.recurrent):
            raise UnsupportedError("only all rows of a sequence can be copied here, and no part of them")
        source, seq_id = self._check_seq_id(source), self._check_seq_id(seq_id)
        llama.llama_memory_seq_cp(self._memory, source, seq_id, first, last)

    # K/V entries. `seq_id` is a sequence id; positions count from 0.

    def length(self, seq_id: int) -> int:
        """Return the last position of the sequence, plus 1."""
        return int(llama.llama_memory_seq_pos_max(self._memory, self._check_seq_id(seq_id))) + 1

    def append(self, tokens: Mapping[int, Tokens], output: Output | Mapping[int, Output] = "last") -> None:
        """Decode tokens after the last entry of each sequence, all in one batch. `output`: the logits to keep, for all
        sequences or for each; `logits` counts them in the order of the tokens. A signal with a Python handler aborts
        the call and the appended entries are removed. Raises what the handler raises."""
        sequences = int_array([self._check_seq_id(seq_id) for seq_id in tokens], "a sequence")
        counts = int_array([len(part) for part in tokens.values()], "a count")
        output_codes = [_OUTPUT[output if isinstance(output, str) else output[seq_id]] for seq_id in tokens]
        outputs = int_array(output_codes, "an output")
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
        """Call a computing hook for these sequences, and again after a signal whose handler raised nothing. After a few
        such signals (a timer's, say) the call runs without interrupts."""
        interrupts.check_stop()
        lengths = {seq_id: self.length(seq_id) for seq_id in sequences} if self._watched else {}
        for _ in range(_STOPS if self._watched else 0):
            arrived: list[bytes] = []
            try:
                with interrupts.listening() as arrived, native.keeping_errors():
                    native.call(hook, self.handle, *arguments)
                native.raise_kept()
                return
            except native.StoppedError:
                native.raise_kept()
                interrupts.check_stop()
                silent = arrived == [b""]
                # Either no signal caused it, or the sequence cannot be rolled back and is empty now.
                if silent or any(self.length(seq_id) != length for seq_id, length in lengths.items()):
                    raise
        with self._unwatched():
            native.call(hook, self.handle, *arguments)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Run a computation that signals cannot abort."""
        if not self._watched:
            yield
            return
        native.call("notes_watch", self.handle, -1)
        try:
            yield
        finally:
            native.call("notes_watch", self.handle, interrupts.descriptor())

    def decode_at(self, seq_id: int, position: int, tokens: Tokens) -> None:
        """Decode tokens from any position on in an empty sequence. Raises EngineError on failure."""
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
        native.raise_kept()
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
        """Decode image embeddings ([n, width of the model's input], engine/vision.py) after the last entry of the
        sequence, from `position` on. `axes` [n, 3]: time, row and column of each, from 0 on, under M-RoPE. `whole`:
        attention is not causal within the image, so all must be in one micro-batch. Raises EngineError on failure; the
        sequence is unchanged, or empty if it cannot be rolled back."""
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
                self._check_seq_id(seq_id),
                embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
                count,
                width,
                int32_pointer(where),
                whole,
            )
        native.raise_kept()

    def rewrite(self, seq_id: int, positions: Sequence[int], tokens: Tokens, output: Output = "none") -> None:
        """Decode tokens at ascending positions, contiguous or not, and overwrite their entries."""
        at, token_ids = int_array(positions, "a position"), int_array(tokens, "a token")
        if len(at) != len(token_ids):
            raise EngineError(f"{len(at)} positions but {len(token_ids)} tokens to rewrite")
        self._compute(
            [seq_id], "notes_rewrite", seq_id, int32_pointer(at), int32_pointer(token_ids), len(at), _OUTPUT[output]
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
        """Place K/V rows at [position, position + len(tokens)), K rotated by position - base, without those before
        `first`. Rows in a file are read, checked and placed in one pass, and none becomes valid before all are checked;
        a bad file raises the error that `layers.refused` makes. A signal aborts that as it aborts `append`.
        `rotate=False` leaves K as it is: the control of the rotation, with wrong K/V by design. `axes` [n, 3]:
        positions on three axes, from `read_axes`, where an image's rows share positions."""
        if self.unmovable and position != base:
            raise UnsupportedError(self.unmovable)
        token_ids = int_array(tokens, "a token")
        target = seq_id, position, int32_pointer(token_ids), len(token_ids)
        if not rotate:
            axes = None if axes is None else axes + (position - base)
            base = position
        # A small window drops entries before all rows are checked, so those are read and checked first.
        if isinstance(layers, Stored) and layers.file is not None and axes is None and not self.drops:
            count = first + len(token_ids)
            check_layers(layers.tensors, self.layers, count)
            try:
                compute = partial(self._compute, [seq_id])
                splice_file(
                    *(layers.tensors, compute, *target, layers.file.fileno()), first=first, base=base, count=count
                )
            except native.FileError as error:
                raise layers.refused(error.what, damaged=error.damaged) from error
            return
        if first:
            layers = [rows.cut(slice(first, None)) for rows in layers]
        check_layers(layers, self.layers, len(token_ids))
        planes = (
            None if axes is None else int32_pointer(int_array(check_axes(axes, len(token_ids)).ravel(), "a position"))
        )
        native.call("notes_splice", self.handle, *target, planes, *row_pointers(layers), base)

    def read(self, seq_id: int, position: int, count: int, *, base: int, dtype: str = "f16") -> tuple[LayerRows, ...]:
        """Read the K/V rows of [position, position + count), K rotated so that the first is at position `base`."""
        layers = empty_rows(self.layers, count, dtype)
        native.call("notes_read", self.handle, seq_id, position, count, None, *row_pointers(layers), base)
        return layers

    def read_axes(
        self, seq_id: int, position: int, count: int, *, base: int, dtype: str = "f16"
    ) -> tuple[tuple[LayerRows, ...], NDArray[np.int32]]:
        """Read the first `count` rows from `position` on, and their positions on the axes of M-RoPE, [count, 3]."""
        layers, axes = empty_rows(self.layers, count, dtype), np.zeros((count, 3), np.int32)
        native.call(
            "notes_read", self.handle, seq_id, position, count, int32_pointer(axes), *row_pointers(layers), base
        )
        return layers, axes

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop the entries of the sequence from position `length` on."""
        native.call("notes_truncate", self.handle, seq_id, length)

    @contextmanager
    def rolling_back(self, seq_id: int) -> Iterator[None]:
        """Drop the entries that are appended to the sequence during the block."""
        length, state = self.length(seq_id), self.state(seq_id) if self.drops else None
        try:
            yield
        finally:
            try:
                self.truncate(seq_id, length)
            except EngineError:  # the lookahead overwrote cells of the window
                if state is None:
                    raise
                self.set_state(seq_id, length, state)

    def state(self, seq_id: int) -> State:
        """Read what the sequence needs to continue besides K/V that `truncate` leaves: recurrent state, and the entries
        of sliding-window layers where the cache drops some. Raises EngineError on failure."""
        args = self._check_seq_id(seq_id), llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        state = np.empty(llama.llama_state_seq_get_size_ext(self.handle, *args), np.uint8)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = llama.llama_state_seq_get_data_ext(self.handle, pointer, state.nbytes, *args)
        if not 0 < state.nbytes == written:
            raise EngineError(f"the state of sequence {seq_id} cannot be read")
        window = llama.llama_model_n_swa(self.model.handle) > 0
        return self._without_window(state, self.length(seq_id)) if window and not self.drops else state

    def _without_window(self, state: State, length: int) -> State:
        """Return a state without its K/V, which llama.cpp would restore in further cells: it begins with magic number
        and sequence, then the K/V of sliding-window layers (streams, cells, ...), then the cell of the recurrent state
        (number, position, sequences), and its layers (transposed or not, number; of R and S each: type, size, data)."""
        layers = [layer for layer in self.layers if layer.part == "state"]
        size = 20 + sum(24 + 4 * (layer.n_embd_k + layer.n_embd_v) for layer in layers)
        recurrent = state[-size:]
        if not np.array_equal(recurrent[:12].view(np.int32), [1, length - 1, 0]):
            raise EngineError(_OTHER_FORM)
        return np.concatenate([state[:8], np.array([1, 0], np.int32).view(np.uint8), recurrent])

    def state_rows(self, state: State) -> list[LayerRows]:
        """Return the rows of recurrent layers in a state, as `read` does: of each, one after the other, type, size and
        data of R (and of P, the tokens before, a size and data), then of each layer type, size and data of S. Raises
        EngineError for another form."""
        layers = [layer for layer in self.layers if layer.part == "state"]
        words = state.view(np.uint32)
        at = 9 if words[4] else 7  # after the head, the K/V that was left out, and the cell (`_without_window`)

        def take(head: int) -> NDArray[np.float32]:
            nonlocal at
            at += head
            count = int(words[at - 2]) // 4
            at += count
            return words[at - count : at].view(np.float32)

        rows = {"k": list[NDArray[np.float32]](), "v": list[NDArray[np.float32]]()}
        try:
            for layer in layers:
                row = take(3)
                rows["k"].append(row if len(row) == layer.n_embd_k else np.concatenate([row, take(2)]))
            rows["v"] += [take(3) for _ in layers]
        except IndexError:
            at = 0
        sizes = [(len(k), len(v)) for k, v in zip(rows["k"], rows["v"], strict=False)]
        if at != len(words) or sizes != [(layer.n_embd_k, layer.n_embd_v) for layer in layers]:
            raise EngineError(_OTHER_FORM)
        both = zip(layers, rows["k"], rows["v"], strict=True)
        return [LayerRows(layer.layer, k[None], v[None], "state") for layer, k, v in both]

    def set_state(self, seq_id: int, length: int, state: State) -> None:
        """Go back to the length at which `state` was read, in this sequence or in one with the same entries. Raises
        EngineError on failure, with the sequence empty."""
        if self.drops:  # its cells may be needed for the window
            llama.llama_memory_seq_rm(self._memory, seq_id, length, -1)
        pointer, flags = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        with native.collected_log() as lines:
            read = llama.llama_state_seq_set_data_ext(self.handle, pointer, state.nbytes, seq_id, flags)
        # Afterwards: llama.cpp removes no K/V after a position as long as a recurrent state belongs to a later one.
        removed = read and llama.llama_memory_seq_rm(self._memory, seq_id, length, -1)
        if not removed or self.length(seq_id) != length:
            self._empty(seq_id)
            reason = f" ({lines[-1].strip()})" if lines and not read else ""
            raise EngineError(f"the state of sequence {seq_id} cannot be restored: its rows are gone{reason}")

    def clear(self) -> None:
        """Drop all sequences and end every lease. Clears the data, too: NaN would survive in a recurrent state and in
        free cells, which are multiplied by 0 without flash attention."""
        llama.llama_memory_clear(self._memory, True)
        self._damaged = False
        self._pool.clear()

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Return the logits of an output of the last append or rewrite, [n_vocab], as a copy."""
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

    def _check_seq_id(self, seq_id: int) -> int:
        """Return `seq_id` if it exists: llama.cpp aborts on others."""
        if not 0 <= seq_id < self._sequences:
            raise EngineError(f"sequence {seq_id} does not exist; the context has {self._sequences}")
        return seq_id


# The K/V of all sequences, while a context is recreated with more capacity.


@dataclass(frozen=True, slots=True)
class _SavedEntries:
    """Entries of a sequence from position `first` on, one per token: their K/V, or the id of the sequence that they are
    shared with. Images are stored for each sequence."""

    seq_id: int
    first: int
    tokens: Tokens
    rows: tuple[LayerRows, ...] | int
    axes: NDArray[np.int32] | None = None  # positions of all rows, where images share them


def _save_sequences(context: Context, pool: Pool) -> list[_SavedEntries]:
    """Read the K/V of every sequence; entries that several share are read once."""
    result: list[_SavedEntries] = []
    shared: dict[object, int] = {}  # cell, or tuple of all cells -> id of a sequence
    for seq_id in range(pool.size):
        if context.length(seq_id):
            try:
                result += _save_sequence(context, seq_id, pool.tokens(seq_id), shared)
            except EngineError as error:
                message = f"the context cannot be made larger while sequence {seq_id} has rows: {error.what}"
                raise UnsupportedError(message) from error
    needed = sum(len(entry.tokens) for entry in result if not isinstance(entry.rows, int))
    # With recurrent state, sequences that shared a prefix each need their own cells.
    if context.unified and context.used and needed > context.cells:
        raise UnsupportedError(
            f"the context cannot be made larger: its sequences share rows, without which they need {needed} cells, "
            f"and it has {context.cells}"
        )
    return result


def _save_sequence(
    context: Context, seq_id: int, tokens: Sequence[int], shared: dict[object, int]
) -> list[_SavedEntries]:
    """Read the K/V of a sequence in runs, with references for those that an earlier one shares. Raises EngineError if
    that is not possible."""
    if reason := context.supports("read") or context.supports("restore"):
        raise UnsupportedError(reason)
    count, cells = context.length(seq_id), context.cells_of(seq_id)
    dtype, ids = context.lossless_type, np.array(tokens[: max(count, len(cells))], np.int32)
    if len(ids) < max(count, len(cells)):
        raise EngineError("it has rows of unknown tokens")
    result = []
    try:
        if len(cells) > count:
            raise EngineError("some rows share positions")
        for first, last, owner in _runs(context, seq_id, cells, count, shared):
            rows = context.read(seq_id, first, last - first, base=first, dtype=dtype) if owner is None else owner
            result.append(_SavedEntries(seq_id, first, ids[first:last], rows))
    except EngineError:
        # images under M-RoPE; one of a single row has as many positions as rows
        if not any(_ROPE_NAMES.get(layer.rope, "").endswith("mrope") for layer in context.layers) or len(cells) < count:
            raise
        return [_SavedEntries(seq_id, 0, ids, *context.read_axes(seq_id, 0, len(cells), base=0, dtype=dtype))]
    return result


def _runs(
    context: Context, seq_id: int, cells: list[int], count: int, shared: dict[object, int]
) -> Iterator[tuple[int, int, int | None]]:
    """Yield runs (first, last, id of an earlier sequence with the same cells or None), and add the cells to
    `shared`."""
    if len(cells) != count or context.model.recurrent:  # a state belongs to all of them: shared as a whole
        whole = tuple(cells)
        yield 0, count, shared.get(whole) if cells else None
        shared.setdefault(whole, seq_id)
        return
    first = 0
    for owner, run in groupby(cells, shared.get):
        last = first + len(list(run))
        yield first, last, owner
        first = last
    for cell in cells:
        shared.setdefault(cell, seq_id)


def _restore_sequences(context: Context, saved_entries: Iterable[_SavedEntries]) -> None:
    """Write saved entries into the same sequences, which are empty."""
    for entry in saved_entries:
        if isinstance(entry.rows, int):
            last = -1 if context.model.recurrent else entry.first + len(entry.tokens)
            context.copy(entry.rows, entry.seq_id, entry.first, last)
        else:
            context.splice(entry.seq_id, entry.first, entry.tokens, entry.rows, entry.first, axes=entry.axes)
