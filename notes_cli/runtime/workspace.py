"""Combines a model, its context, its chat template and the user's library: the start of every use.

The context is created on demand and enlarged. Its identity goes with measurements: whether K/V may be moved and
recurrent state carried. The first use measures that this model's keys rotate as native/notes_graph.cpp declares, which
was made from llama.cpp's graphs and random models of each architecture: a file with unusual metadata, or a changed
graph, would make every splice silently wrong.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.config import Paths, load_config, model_defaults
from notes_cli.config import paths as default_paths
from notes_cli.engine import devices, limits
from notes_cli.engine.context import Context
from notes_cli.engine.header import Source
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import Identity, Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import ContextLengthError, EngineError, Help, ModelError, Remedy, SegmentError
from notes_cli.library.container import open_stored
from notes_cli.library.safe_files import file_sha256, remember, remembered
from notes_cli.library.store import Library, Store, check_name
from notes_cli.runtime.naming import library as own_library
from notes_cli.text.prompt import Chunk, left_context
from notes_cli.text.reasoning import Reasoning, reasoning_of
from notes_cli.text.rendering import start_rendering
from notes_cli.text.template import ChatTemplate

if TYPE_CHECKING:
    from notes_cli.engine.vision import ImageEmbeddings
    from notes_cli.runtime.image_encoding import ImageEncoding
    from notes_cli.text.skill import Skill


DEFAULT_CONTEXT = 4096
SEQUENCES = 4  # initial number of sequences
MOST_SEQUENCES = 255  # of llama.cpp's 256 one holds old entries during a rewrite (native/notes_decode.cpp)
# Options that affect segments: LongRoPE depends on the context's size, keys of some sparse attention on flash
# attention.
_COMPILED = (
    *("n_ctx", "flash_attention", "type_k", "type_v"),
    *("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
)


class Workspace(AbstractContextManager["Workspace"]):
    """A loaded model with its context, template and library. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: Path,
        options: ContextOptions | None = None,
        *,
        paths: Paths | None = None,
        library: Store | None = None,
        fixed_size: bool = False,
        beyond_trained: bool = False,
        gpu_layers: int = -1,
        rpc: Sequence[str] = (),
        projector: Path | None = None,
        image_tokens: tuple[int | None, int | None] = (None, None),
        carry: bool | None = None,
        chat_template: str | None = None,
        hashing: Callable[[int, int], None] | None = None,
        loading: Callable[[float], object] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Load a model.

        Arguments:
            model: A GGUF file.
            paths: The folders of one user, by default set by NOTES_HOME or the system.
            library: The compiled skills, by default the folder in `paths`.
            fixed_size: n_ctx is fixed (0: the trained length); a prompt that does not fit is an error.
            beyond_trained: Allow more tokens than the model was trained for.
            gpu_layers, rpc: As for Model.
            projector: The file of the vision encoder (mmproj).
            image_tokens: Minimum and maximum tokens per image, where the projector leaves that open.
            carry: Carry recurrent state through skills; None: as config.yaml has it for this model.
            chat_template: The Jinja text of a chat template in place of the model's.
            hashing: Called with (bytes done, total) while a model's file is hashed, once per file.
            loading: Called with the loaded fraction, 0 to 1.
            log: Called with the memory of each context.

        Raises ModelError for a model that cannot be loaded, EngineError for a fixed n_ctx beyond the trained length.
        """
        if projector is not None and not projector.is_file():  # report it before an image is encoded
            raise ModelError(f"{projector}: no such projector", "Name the file that was published with the model")
        self.paths = paths = paths or default_paths()
        self.library: Store = library or own_library(paths)
        self._projector, self._image_tokens = projector, image_tokens
        self.files: dict[str, Path] = {}  # segment name -> file it was last opened from
        self._words: dict[str, str] = {}  # segment name -> the user's reference
        self._carry, self._hashing, self._log = carry, hashing, log
        self._weights: str | None = None
        self._lock = os.getpid(), threading.RLock()
        self._fixed_size, self._beyond_trained = fixed_size, beyond_trained
        self._context: Context | None = None
        self._left: KVSequence | None = None  # left context shared by compiles within `compiling`
        self._sharing = 0  # nesting depth of `compiling`
        start_rendering()  # prepares in the background while the model loads
        self.model = Model(model, gpu_layers=gpu_layers, rpc=rpc, loading=loading)
        try:
            self._set_options(options or ContextOptions(n_ctx=DEFAULT_CONTEXT))
        except BaseException:
            self.model.close()
            raise
        own = f"the chat template of {self.model.path.name}"
        self._template_name = own if chat_template is None else "the chat template"
        # The Jinja text, "" for a model without one.
        self.chat_template = (self.model.chat_template or "") if chat_template is None else chat_template

    def _set_options(self, options: ContextOptions) -> None:
        """Limit a context of these options to the trained length. Raises EngineError for a fixed n_ctx beyond it."""
        trained = limits.trained_length(self.model, options)
        # Maximum tokens of a sequence; None for no limit.
        self.longest = None if self._beyond_trained and not limits.has_learned_positions(self.model) else trained
        self._options = options
        if not options.n_ctx:
            self._options = replace(options, n_ctx=trained or DEFAULT_CONTEXT)
        elif self._fixed_size:
            self.check_length(options.n_ctx, "a context of {:,} tokens was asked for")
        elif self.longest is not None:
            self._options = replace(options, n_ctx=min(options.n_ctx, self.longest))

    def close(self) -> None:
        if encoding := self.__dict__.pop("image_encoding", None):
            encoding.close()
        self._forget_left()
        if self._context is not None:
            self._context.close()
            self._context = None
        self.model.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # The context.

    @property
    def lock(self) -> threading.RLock:
        """Lock of the computing thread (synchronized.py). A forked process gets a new one: its parent's threads, which
        may hold this one, do not exist in it."""
        process, lock = self._lock
        if process != os.getpid():
            self._lock = process, lock = os.getpid(), threading.RLock()
        return lock

    @property
    def context(self) -> Context:
        """The context. It grows with its sequences, unless its size is fixed."""
        if self._context is None:
            options = self.options
            # each recurrent state takes memory, so sequences are added on demand
            if options.n_sequences == 1 and not self.model.recurrent:
                options = replace(options, n_sequences=SEQUENCES, unified=True)
            self._context = Context(self.model, options)
            self._context.longest = self.longest  # also if it has more cells, for several sequences
            self._log_size()
        return self._context

    def _log_size(self) -> None:
        if self._log and self._context:
            options = self._context.options
            self._log(f"a context of {options.n_ctx:,} tokens: {limits.describe_memory(self.model, options)}")

    @property
    def options(self) -> ContextOptions:
        """Current options of the context."""
        return self._context.options if self._context else self._options

    @contextmanager
    def scratch(self, tokens: int = 0) -> Iterator[KVSequence]:
        """Yield an empty sequence with capacity for `tokens` tokens, in f16 or f32 even if the cache is quantized."""
        context = self.context
        if self._fits_beside(tokens):
            with KVSequence(context) as sequence:
                yield sequence
        else:
            size = context.options.n_ctx  # not less: LongRoPE depends on it
            if not self._fixed_size:
                size = max(size, limits.padded(tokens))
            options = replace(context.compile_options, n_ctx=size, n_sequences=1, unified=False)
            with Context(self.model, options) as scratch_context:
                scratch_context.unmovable, scratch_context.carries = context.unmovable, context.carries
                yield KVSequence(scratch_context)

    def _fits_beside(self, tokens: int, shared: int = 0) -> bool:
        """True if the context itself can hold so many more tokens, of which some are shared."""
        context = self.context
        room = context.room() >= tokens - shared and context.n_ctx >= tokens
        return context.compile_options == context.options and room

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Decode the left context of compiles once during the block; the K/V is that of separate compiles."""
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
        """Yield a scratch sequence that begins with `left`, for `tokens` tokens in all; within `compiling` the prefix
        is shared."""
        present = len(self._left) if self._left and np.array_equal(self._left.tokens, left) else 0
        shares = self._sharing and not self.model.recurrent and self.context.options.unified
        if not shares or not self._fits_beside(tokens, present):
            self._forget_left()
            with self.scratch(tokens) as sequence:
                sequence.append(left)
                sequence.flush()
                yield sequence
            return
        if self._left is None or not self._left.intact or not present:
            self._forget_left()
            self._left = self.sequence()
            self._left.append(left)
            self._left.flush()
        with self._left.share() as sequence:
            yield sequence

    def check_text(self, text: str) -> None:
        """Raise EngineError for a text that is certain not to fit, before it is tokenized, which takes long."""
        longest = self.longest if self.grows else min(self.options.n_ctx, self.longest or self.options.n_ctx)
        if longest is None or not self.model.exceeds(text, longest):
            return
        why = f"more than {longest:,} tokens are to be read, which is all that fits"
        raise ContextLengthError(why, "Take a shorter text", tokens=longest, longest=longest, counted=False)

    def make_room(self, tokens: int, spare: int = 0, held: int = 0) -> None:
        """Ensure capacity for a sequence of so many tokens, of which it has `held` already, enlarging the context if
        needed; leased sequences are kept. `spare` more tokens are for an answer, reduced to the capacity but at least
        one. Raises EngineError beyond the trained length, or where `tokens` do not fit a fixed size; its remedy is a
        size that includes `spare`."""
        needed = self.check_fits(tokens, spare)
        used = self._context.used if self._context else 0  # occupied cells
        used -= min(used, len(self._left) if self._left else 0)  # the prefix kept for compiles can be dropped
        size = max(needed, used + needed - held)
        if size <= self.options.n_ctx or self._fixed_size:
            return
        size = limits.padded(size)
        if self.longest is not None and not used:
            size = min(size, self.longest)
        if self._context:
            self._forget_left()  # cheaper to decode again than to move
            self._context.resize(n_ctx=size)
            self._log_size()
        else:
            self._options = replace(self._options, n_ctx=size)

    def check_fits(self, tokens: int, spare: int = 0) -> int:
        """Return the cells of a sequence with `spare` more tokens, limited to the trained length. Raises EngineError
        for `tokens` beyond that, or more than fit a fixed size; its remedy is a size that includes `spare`."""
        self.check_length(tokens + min(spare, 1))
        needed = tokens + spare if self.longest is None else min(tokens + spare, self.longest)
        if self._fixed_size and tokens > (n_ctx := self.context.n_ctx):
            text = f"the context is too small: {tokens} tokens do not fit {n_ctx}"
            remedy = Help.LARGER_CONTEXT(tokens=limits.padded(needed))
            raise ContextLengthError(text, remedy, tokens=tokens, longest=n_ctx)
        return needed

    @property
    def grows(self) -> bool:
        """True if the context may be enlarged: its size is not fixed."""
        return not self._fixed_size

    def reserve(self, tokens: int, sequences: int) -> None:
        """Ensure free cells and sequences beside those in use. Raises EngineError, with nothing changed, where that is
        impossible: the size is fixed, memory does not suffice, or K/V would no longer fit (LongRoPE)."""
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
        size = limits.padded(cells) if cells > context.cells else 0
        context.resize(n_ctx=size, n_sequences=context.n_leased + sequences, rotated_alike=True)
        self._log_size()

    def check_length(self, tokens: int, reason: str = "{:,} tokens are to be read and written") -> None:
        """Raise EngineError for more tokens than the model was trained for, RoPE scaling included."""
        if self.longest is None or tokens <= self.longest:
            return
        why = f"{reason.format(tokens)}, but {self.model.name} was trained for {self.longest:,}"
        counts: dict[str, Any] = {"tokens": tokens, "longest": self.longest}
        if limits.has_learned_positions(self.model):
            raise ContextLengthError(f"{why}, and has no position beyond", "Take fewer", **counts)
        scales = (1 / factor for factor in (2, 4, 8, 16, 32))
        yarn = (replace(self.options, rope_scaling="yarn", rope_freq_scale=scale) for scale in scales)
        reach = (
            scaled.rope_freq_scale for scaled in yarn if (limits.trained_length(self.model, scaled) or 0) >= tokens
        )
        scale = next(reach, None)
        raise ContextLengthError(why, Help.SCALE_ROPE(scale=scale) if scale else Help.BEYOND_TRAINED(), **counts)

    def sequence(self, *, dry: bool = False) -> KVSequence:
        """Lease an empty sequence. Close it afterwards."""
        return KVSequence(self.context, dry=dry)

    # Identity of the model in its context.

    @property
    def weights(self) -> str:
        """SHA-256 of the model's file (of the digests of its files, if it is split), cached between runs. Raises
        ModelError if a loaded file has changed."""
        sources, known = self.model.sources, self._weights
        changed_sources = [source for source in sources if source.changed]
        if known is not None and not changed_sources:
            return known
        digests = [self.digest(source) for source in sources]
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        if known is None:
            changed_sources = [source for source in sources if source.changed]
        if changed_sources and digest != known:
            raise changed_sources[0].changed_error()
        for source in changed_sources:  # moved, linked or touched
            source.accept_content()
        self._weights = digest
        return digest

    def digest(self, source: Source) -> str:
        """Return the SHA-256 of an open file."""
        return file_sha256(source.path, source.file, self.paths.models / "digests.json", self._hashing)

    @property
    def identity(self) -> Identity:
        """Identity of this model in this context. Raises UnsupportedError where its K/V cannot be read."""
        return self.refresh_capabilities()

    def refresh_capabilities(self) -> Identity:
        """Set in the context whether K/V may be moved and recurrent state carried, as measured for this identity, which
        is returned. The property `identity` calls it, so that nothing uses a stale setting. Any thread may call it."""
        weights, context = self.weights, self.context
        with context.remaking:
            identity = context.identity(weights)
            context.unmovable = self._rotations.get(self._rotation_key(identity)) or None
            if self.model.recurrent:
                context.carries = self.configured.get("carry") == "true" if self._carry is None else self._carry
        return identity

    @property
    def name(self) -> str:
        """Name and quantization of the model, for display and in config.yaml."""
        return f"{self.model.name} {self.model.quantization}"

    @cached_property
    def configured(self) -> dict[str, str]:
        """The defaults of this model in config.yaml, by setting. Raises NotesError for an invalid file."""
        return model_defaults(load_config(self.paths.config), self.name)

    def measure_rotation(self) -> None:
        """Check once per identity that keys rotate as expected; if not, K/V will not be moved."""
        key = self._rotation_key(self.identity)
        if key in self._rotations:
            return
        with self.scratch() as sequence:
            check = measure_rotation(sequence.context, sequence.seq_id)
        self._rotations[key] = "" if check is None or check.right else check.reason
        remember(self._rotations_file, _text, {key: self._rotations[key]})
        self.refresh_capabilities()

    @cached_property
    def _rotations(self) -> dict[str, str]:
        """Why no K/V may be moved, by `_rotation_key`; "" where nothing speaks against it."""
        return remembered(self._rotations_file, _text)

    @property
    def _rotations_file(self) -> Path:
        return self.paths.models / "rotations.json"

    def _rotation_key(self, identity: Identity) -> str:
        """Return a key for the model, its rotation and the build of the native library, whose graphs may change."""
        return f"{identity.key} {devices.build()}"

    # Images.

    @property
    def has_vision(self) -> bool:
        """True if a projector was given."""
        return self._projector is not None

    @cached_property
    def image_encoding(self) -> ImageEncoding:
        """The vision encoder for skills."""
        from notes_cli.runtime.image_encoding import ImageEncoding  # most prompts have no images

        return ImageEncoding(self.model, lambda: self.context.threads, self.digest, self._projector, self._image_tokens)

    def encode_images(self, segment: Segment, *, dry: bool = False) -> ImageEmbeddings:
        """Encode the images of a segment again. `dry`: only compute tokens and positions."""
        return self.image_encoding.encode_segment(segment, self.compile_again, dry=dry)

    # The chat template.

    @cached_property
    def reasoning(self) -> Reasoning:
        """The model's form of reasoning."""
        return reasoning_of(self.chat_template, self.model.name)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template for direct answers."""
        return self._template()

    @cached_property
    def thinking_template(self) -> ChatTemplate:
        """The chat template with reasoning before the answer."""
        return self._template(think=True)

    @cached_property
    def left_context(self) -> Tokens:
        """Tokens that skills are compiled after: BOS and the opening of the system message. A date printed there by
        some templates is fixed, or every skill would be outdated the next day."""
        opening = left_context(self._template(now=datetime(2026, 1, 1)))
        return self.with_bos(self.model.tokenize(opening, special=True))

    def _template(self, *, now: datetime | None = None, think: bool = False) -> ChatTemplate:
        bos, eos = self.model.special_text("bos"), self.model.special_text("eos")
        template = ChatTemplate(self.chat_template, bos, eos, now=now, name=self._template_name)
        return self.reasoning.template(template, think)

    def tokenize(self, chunk: Chunk) -> Tokens:
        """Tokenize a chunk separately from its neighbours."""
        return self.model.tokenize_runs(chunk.runs)

    def tokens_of(self, skill: Skill) -> Tokens:
        """Return the tokens of a skill to be compiled; an image has its markers and one placeholder per row."""
        if skill.pictures:
            return np.concatenate([part.tokens for *_, part in self.image_encoding.split(skill)])
        return self.model.tokenize_runs(skill.runs) if skill.runs else self.model.tokenize(skill.text)

    def with_bos(self, tokens: Tokens) -> Tokens:
        """Prepend the model's BOS, unless the template has added it."""
        bos = self.model.bos
        if bos is None or (len(tokens) and tokens[0] == bos):
            return tokens
        return np.concatenate([np.array([bos], np.int32), tokens])

    # Segments.

    def open(self, path: Path, word: str = "") -> Segment:
        """Open a segment file and check it against this model; its K/V is checked when it is used. `word`: its name in
        the library, if it was found by that. Raises SegmentError with the mismatch."""
        segment = open_stored(path)
        if not (isinstance(self.library, Library) and path.parent == self.library.folder):
            segment = replace(segment, prefill=None)  # possibly measured on another machine
        if word:
            check_name(segment, path, word)
        self._words[segment.name] = word or str(path)
        self.check(segment)
        self.files[segment.name] = path
        return segment

    def used(self, name: str, spliced: int = 0, saved: float | None = None) -> None:
        """Record the use of an opened segment's file, with the tokens spliced into a prompt and the seconds saved."""
        if name in self.files:
            self.library.used(self.files[name], spliced, saved)

    def check(self, segment: Segment) -> None:
        """Raise SegmentError with the differences unless the segment fits the present context."""
        differences = segment.identity.differences(self.identity)
        if differences:
            text = "; ".join(differences)
            raise SegmentError(f"{segment.name} was {text}", self.compile_again(segment.name))
        model, tokens = self.model, [*segment.tokens.tolist(), *segment.context.tolist()]
        unknown = model.unknown(tokens)
        if unknown is not None:
            raise SegmentError(
                f"{segment.name} holds token {unknown}, and {model.name} has a vocabulary of {model.n_vocab}: it is "
                "not what was compiled for this model",
                self.compile_again(segment.name),
            )

    def compile_again(self, name: str) -> Remedy:
        """Return the remedy to compile a skill for this model with its present options, from the segment's text."""
        options = self._compile_options()
        return Help.COMPILE_AGAIN(name=self._words.get(name, name), model=self.model.path, options=options)

    def compile_edited(self, name: str) -> Remedy:
        """As `compile_again`, from the present text of its file."""
        options = self._compile_options()
        return Help.COMPILE_EDITED(name=self._words.get(name, name), model=self.model.path, options=options)

    def _compile_options(self) -> dict[str, object]:
        rows = self.context.compile_options  # compiled in f16 for all caches but f32
        current = replace(self.options, type_k=rows.type_k, type_v=rows.type_v)
        defaults = ContextOptions(n_ctx=DEFAULT_CONTEXT)
        options = {
            name: getattr(current, name) for name in _COMPILED if getattr(current, name) != getattr(defaults, name)
        }
        return {**options, **({"beyond_trained": True} if self._beyond_trained else {})}


def _text(entry: object) -> str:
    if not isinstance(entry, str):
        raise TypeError(entry)
    return entry


CHECK_TOKENS = 8
SAMPLE = "On 2026-06-01 the rule was: 14 days, paid in euros."
# squared relative rounding of f16 rows: 1e-7, plus a margin for steep models, where it grows in K alone
ROUNDING = 5e-5
AMPLIFIED = 4.0  # V is not rotated and shows the rounding of a layer; K has up to twice that
FLOATS = 8 / 2**24  # radians per position by which llama.cpp's float angles may be off


@dataclass(frozen=True, slots=True)
class RotationCheck:
    """The layer with the largest error of its keys, computed `distance` positions on and rotated back to 0."""

    distance: int
    layer: int
    error: float  # squared difference, relative to the squared keys
    bound: float  # explained by rounding

    @property
    def right(self) -> bool:
        return self.error <= self.bound  # false for NaN

    @property
    def reason(self) -> str:
        """Why no K/V may be moved."""
        return (
            f"its keys do not rotate as notes expects: those of layer {self.layer} are off by {self.error:.2g} after "
            f"{self.distance} positions, where rounding explains {self.bound:.2g}. "
            "Skills can still be put back where they were compiled, at the start of a prompt"
        )


def measure_rotation(context: Context, seq_id: int) -> RotationCheck | None:
    """Decode a few tokens at the start and near the middle of the context, rotate the latter back, and compare. The
    sequence is empty before and after. Returns None where the context cannot move K/V, or has no room to."""
    distance = _rotation_distance(context)
    if context.supports("splice") is not None or not distance:
        return None
    tokens = _sample_tokens(context)
    try:
        context.decode_at(seq_id, 0, tokens)
        at_start = context.read(seq_id, 0, CHECK_TOKENS, base=0, dtype="f32")
        context.truncate(seq_id, 0)
        context.decode_at(seq_id, distance, tokens)
        moved = context.read(seq_id, distance, CHECK_TOKENS, base=0, dtype="f32")
    finally:
        context.truncate(seq_id, 0)
    floats = (FLOATS * distance) ** 2
    checks = []
    for layer, moved_layer in zip(at_start, moved, strict=True):
        bound = ROUNDING + floats + AMPLIFIED * _relative_error(layer.v, moved_layer.v)
        checks.append(RotationCheck(distance, layer.layer, _relative_error(layer.k, moved_layer.k), bound))
    return max(checks, key=lambda check: check.error / check.bound if check.bound > 0 else np.inf)


def _rotation_distance(context: Context) -> int:
    """Return half of the context or the largest distance that this model allows; 0 if none."""
    distance = context.n_ctx // 2
    while distance >= CHECK_TOKENS and context.can_move(0, distance, CHECK_TOKENS) is not None:
        distance //= 2
    return distance if distance >= CHECK_TOKENS else 0


def _sample_tokens(context: Context) -> Tokens:
    """Return tokens of a sample text, or the first ids of a vocabulary in which it has too few."""
    tokens = context.model.tokenize(SAMPLE)[:CHECK_TOKENS]
    return tokens if len(tokens) == CHECK_TOKENS else np.arange(CHECK_TOKENS, dtype=np.int32) % context.model.n_vocab


def _relative_error(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    a, b = first.astype(np.float64), second.astype(np.float64)
    squares = float((a**2).sum())
    if not squares:
        return float((b**2).sum() > 0)
    return float(((a - b) ** 2).sum() / squares)
