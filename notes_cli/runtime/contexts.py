"""The context of a model: made when it is wanted, enlarged for what is put into it, with scratch sequences beside it.

It knows no user, and nothing of what is put into it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from notes_cli.engine import limits
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import ContextLengthError, EngineError, Help

DEFAULT_CONTEXT = 4096
SEQUENCES = 4  # that a context has to begin with
MOST_SEQUENCES = 255  # of llama.cpp's 256 a rewrite parks old rows under one (native/notes_decode.cpp)


class Contexts:
    """A model with its one context. Close it."""

    def __init__(
        self,
        model: Model,
        options: ContextOptions | None,
        *,
        fixed_size: bool,
        beyond_trained: bool,
        log: Callable[[str], None] | None,
    ) -> None:
        """It takes the model over, and closes it. The options are those of Workspace. Raise EngineError for an n_ctx
        that was chosen beyond what the model was trained for."""
        self.model = model
        self._lock = os.getpid(), threading.RLock()
        self._options = options = options or ContextOptions(n_ctx=DEFAULT_CONTEXT)
        self._fixed_size, self._beyond_trained, self._log = fixed_size, beyond_trained, log
        self._context: Context | None = None
        self._left: KVSequence | None = None  # what compiles begin with, while several are made (`compiling`)
        self._sharing = 0  # blocks of `compiling` that are open
        trained = limits.trained_length(model, options)
        # The most tokens that a context may have, None for any number.
        self.longest = None if beyond_trained and not limits.has_learned_positions(model) else trained
        if not options.n_ctx:
            self._options = replace(options, n_ctx=trained or DEFAULT_CONTEXT)
        elif fixed_size:
            self._check_trained(options.n_ctx, "a context of {:,} tokens was asked for")
        elif self.longest is not None:
            self._options = replace(options, n_ctx=min(options.n_ctx, self.longest))

    @property
    def lock(self) -> threading.RLock:
        """Held by the thread that computes (alone.py). A process that was forked has one of its own: threads that held
        this one are not in it."""
        process, lock = self._lock
        if process != os.getpid():
            self._lock = process, lock = os.getpid(), threading.RLock()
        return lock

    def close(self) -> None:
        self._forget_left()
        if self._context is not None:
            self._context.close()
            self._context = None
        self.model.close()

    @property
    def context(self) -> Context:
        """The one context. It hands out sequences, and grows with what is put into them, unless its size was given."""
        if self._context is None:
            options = self.options
            if options.n_sequences == 1 and not self.model.recurrent:  # each state takes memory, and grows on demand
                options = replace(options, n_sequences=SEQUENCES, unified=True)
            self._context = Context(self.model, options)
            self._context.longest = self.longest  # also where it has more cells, for several sequences
            self._told()
        return self._context

    def _told(self) -> None:
        if self._log and self._context:
            options = self._context.options
            self._log(f"a context of {options.n_ctx:,} tokens: {limits.estimate_memory(self.model, options)}")

    @property
    def options(self) -> ContextOptions:
        """How the context is made, as it is now."""
        return self._context.options if self._context else self._options

    @contextmanager
    def scratch(self, tokens: int = 0) -> Iterator[KVSequence]:
        """An empty sequence to compute `tokens` rows in, beside those that are in use: in f16 or f32, also where the
        cache is quantized. It is given back afterwards."""
        context = self.context
        if self._beside(tokens):
            with KVSequence(context) as sequence:
                yield sequence
        else:
            size = context.options.n_ctx  # not less: LongRoPE goes by it
            if not self._fixed_size:
                size = max(size, _padded(tokens))
            options = replace(context.compile_options, n_ctx=size, n_sequences=1, unified=False)
            with Context(self.model, options) as other:
                other.unmovable, other.carries = context.unmovable, context.carries
                yield KVSequence(other)

    def _beside(self, tokens: int, shared: int = 0) -> bool:
        """Whether so many rows can be computed in the context itself, beside those that are in use, of which it is to
        share some."""
        context = self.context
        room = context.room() >= tokens - shared and context.n_ctx >= tokens
        return context.compile_options == context.options and room

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within the block what compiles begin with is decoded once, and stays for the next one: rows are those of a
        compile by itself."""
        with self.lock:
            self._sharing += 1
        try:
            yield
        finally:
            with self.lock:
                self._sharing -= 1
                if not self._sharing:
                    self._forget_left()

    def _forget_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.close()

    @contextmanager
    def scratch_after(self, left: Tokens, tokens: int) -> Iterator[KVSequence]:
        """A scratch sequence that begins with these tokens, for `tokens` rows in all. Within `compiling` it shares them
        with others before and after it."""
        there = len(self._left) if self._left and np.array_equal(self._left.tokens, left) else 0
        shares = self._sharing and not self.model.recurrent and self.context.options.unified
        if not shares or not self._beside(tokens, there):
            self._forget_left()
            with self.scratch(tokens) as sequence:
                sequence.append(left)
                sequence.flush()
                yield sequence
            return
        if self._left is None or not self._left.intact or not there:
            self._forget_left()
            self._left = self.sequence()
            self._left.append(left)
            self._left.flush()
        with self._left.share() as sequence:
            yield sequence

    def make_room(self, tokens: int, spare: int = 0, held: int = 0) -> None:
        """See to room for a sequence of so many tokens, of which it has `held` already. The context is made larger
        where it must be; the sequences that are in use come along.

        `spare` tokens more are for an answer, as many as there is room for, at least one. Raise EngineError where that
        is more than the model was trained for, or where the tokens do not fit the size that was given: its remedy is a
        size for all of them, those to spare included.
        """
        self.check_length(tokens + min(spare, 1))
        wanted = tokens + spare if self.longest is None else min(tokens + spare, self.longest)
        beside = self._context.used if self._context else 0  # cells that are in use
        beside -= min(beside, len(self._left) if self._left else 0)  # what is kept for compiles asks for no more room
        size = max(wanted, beside + wanted - held)
        if self._fixed_size and tokens > (there := self.context.n_ctx):
            what, remedy = f"the context is too small: {tokens} tokens do not fit {there}", _padded(size)
            raise ContextLengthError(what, Help.LARGER_CONTEXT(tokens=remedy), tokens=tokens, longest=there)
        if size <= self.options.n_ctx or self._fixed_size:
            return
        size = _padded(size)
        if self.longest is not None and not beside:
            size = min(size, self.longest)
        if self._context:
            self._forget_left()  # nobody needs it enough to have rows come along
            self._context.resize(n_ctx=size)
            self._told()
        else:
            self._options = replace(self._options, n_ctx=size)

    @property
    def grows(self) -> bool:
        """Whether the context may be made larger: nobody chose its size."""
        return not self._fixed_size

    def check_length(self, tokens: int) -> None:
        """Raise EngineError for more tokens in one sequence than the model was trained for."""
        self._check_trained(tokens, "{:,} tokens are to be read and written")

    def reserve(self, tokens: int, sequences: int) -> None:
        """See to cells for so many tokens, and sequences, beside those in use, which others are going to share.

        Raise EngineError where there cannot be so many: the size was given, the memory does not suffice, or rows would
        not fit any more (LongRoPE). Then all is as it was.
        """
        context = self.context
        cells = context.used + tokens
        if cells <= context.cells and sequences <= context.n_free:
            return
        if cells > context.cells and self._fixed_size:
            raise EngineError(f"{cells:,} tokens do not fit into the {context.cells:,} of this context")
        if context.n_leased + sequences > MOST_SEQUENCES:
            raise EngineError(
                f"{context.n_leased + sequences} sequences are more than the {MOST_SEQUENCES} of a context"
            )
        size = _padded(cells) if cells > context.cells else 0
        context.resize(n_ctx=size, n_sequences=context.n_leased + sequences, rotated_alike=True)
        self._told()

    def _check_trained(self, tokens: int, what: str) -> None:
        """Raise EngineError for more tokens than the model was trained for, RoPE scaling counted in."""
        if self.longest is None or tokens <= self.longest:
            return
        why = f"{what.format(tokens)}, but {self.model.name} was trained for {self.longest:,}"
        counts = {"tokens": tokens, "longest": self.longest}
        if limits.has_learned_positions(self.model):
            raise ContextLengthError(f"{why}, and has no position beyond", "Take fewer", **counts)
        scales = (1 / factor for factor in (2, 4, 8, 16, 32))
        yarn = (replace(self.options, rope_scaling="yarn", rope_freq_scale=scale) for scale in scales)
        reach = (one.rope_freq_scale for one in yarn if (limits.trained_length(self.model, one) or 0) >= tokens)
        scale = next(reach, None)
        raise ContextLengthError(why, Help.SCALE_ROPE(scale=scale) if scale else Help.BEYOND_TRAINED(), **counts)

    def sequence(self, *, dry: bool = False) -> KVSequence:
        """An empty sequence in a sequence of its own, beside those that are in use. Close it afterwards."""
        return KVSequence(self.context, dry=dry)


def _padded(tokens: int) -> int:
    """The size of a context for so many tokens, as llama.cpp rounds it up."""
    return -(-tokens // 256) * 256
