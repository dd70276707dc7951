"""A workspace: one model, one context, its identity, its chat template and the user's library, opened as needed.

Whatever runs a model starts from it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from notes_cli.config import Paths
from notes_cli.config import paths as default_paths
from notes_cli.engine import limits, system
from notes_cli.engine.context import Context
from notes_cli.engine.identity import Identity
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.rotation import RotationCheck, measure_rotation
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import EngineError, Help, ModelError, NotesError, Remedy, SegmentError
from notes_cli.images import read_picture
from notes_cli.library.container import open_stored
from notes_cli.library.digest import file_sha256
from notes_cli.library.profiles import Profiles
from notes_cli.library.renderings import Renderings
from notes_cli.library.rotations import rotation_checks
from notes_cli.library.store import Store, check_called
from notes_cli.runtime.naming import library as own_library
from notes_cli.text.pictures import Shown
from notes_cli.text.prompt import Chunk, left_context
from notes_cli.text.reasoning import Reasoning, reasoning_of
from notes_cli.text.rendering import start_rendering
from notes_cli.text.skill import Skill
from notes_cli.text.template import ChatTemplate

if TYPE_CHECKING:
    from notes_cli.engine.eye import Eye, Seen

DEFAULT_CONTEXT = 4096
# Options that a segment goes by: LongRoPE by the size of the context, the keys of some sparse attention by flash
# attention.
_COMPILED = (
    *("n_ctx", "flash_attention", "type_k", "type_v"),
    *("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
)
SEQUENCES = 4  # that a context has to begin with
MOST_SEQUENCES = 255  # of llama.cpp's 256 a rewrite parks old rows under one (native/notes_decode.cpp)


class Workspace:
    """Use as a context manager, or close it."""

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
        hashing: Callable[[int, int], None] | None = None,
        loading: Callable[[float], object] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """`model`: a GGUF file. `paths`: the folders of one user, by default those that NOTES_HOME or the system names.
        `library`: where compiled skills are, by default the folder in `paths`. `fixed_size`: the user chose n_ctx (0:
        what the model was trained for), a prompt that does not fit is an error. `beyond_trained`: more tokens than the
        model was trained for are allowed. `gpu_layers`, `rpc`: as in Model. `projector`: the file that makes rows of
        images (mmproj); `image_tokens`: how many of one at least and at most, where it leaves that open. `carry`: the
        state of recurrent layers goes through skills that are not at the start of a prompt; None: where this model was
        measured to answer right then. `hashing` gets the progress of reading the model's file for its digest (bytes
        done, bytes in all), which happens once a file, `loading` the part of it that is loaded, 0 to 1. `log` is told
        what each context takes.

        Raise ModelError for a model that cannot be loaded, EngineError for an n_ctx that was chosen beyond what it was
        trained for."""
        if projector is not None and not projector.is_file():  # said before an image is looked at
            raise ModelError(f"{projector}: no such projector", "Name the file that was published with the model")
        self._alone = os.getpid(), threading.RLock()
        self._options = options or ContextOptions(n_ctx=DEFAULT_CONTEXT)
        self.paths = paths or default_paths()
        self.library: Store = library or own_library(self.paths)
        self._fixed_size = fixed_size
        self._hashing = hashing
        self._log = log
        self._context: Context | None = None
        self._left: Notebook | None = None  # what compiles begin with, while several are made (`compiling`)
        self._sharing = 0  # blocks of `compiling` that are open
        self._weights: str | None = None
        self._projector, self._image_tokens = projector, image_tokens
        self._eye: Eye | None = None
        self._beyond_trained = beyond_trained
        self._carry = carry
        self._measured: dict[str, bool] = {}  # whether a profile says that a state may be carried, by what it is of
        self._files: dict[str, Path] = {}  # of the segments that were opened, by their names
        self._words: dict[str, str] = {}  # what the user calls the segments that were opened, by their names
        self._renderings = Renderings(self.paths.models / "renderings.json")
        if self._renderings.empty:
            start_rendering()  # it gets ready while the model is loaded
        self.model = Model(model, gpu_layers=gpu_layers, rpc=rpc, loading=loading)
        try:
            trained = limits.trained(self.model, self.options)
            # The most tokens that a context may have, None for any number.
            self.longest = None if beyond_trained and not limits.learned(self.model) else trained
            if not self.options.n_ctx:
                self._options = replace(self._options, n_ctx=trained or DEFAULT_CONTEXT)
            elif fixed_size:
                self._check_trained(self.options.n_ctx, "a context of {:,} tokens was asked for")
            elif self.longest is not None:
                self._options = replace(self._options, n_ctx=min(self.options.n_ctx, self.longest))
        except BaseException:
            self.model.close()
            raise

    @property
    def alone(self) -> threading.RLock:
        """Held by the thread that computes (alone.py). A process that was forked has one of its own: threads that held
        this one are not in it."""
        process, lock = self._alone
        if process != os.getpid():
            self._alone = process, lock = os.getpid(), threading.RLock()
        return lock

    def close(self) -> None:
        self._forget_left()
        if self._context is not None:
            self._context.close()
            self._context = None
        if self._eye is not None:
            self._eye.close()
            self._eye = None
        self._renderings.save()
        self.model.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            self._log(f"a context of {options.n_ctx:,} tokens: {limits.memory(self.model, options)}")

    @property
    def options(self) -> ContextOptions:
        """How the context is made, as it is now."""
        return self._context.options if self._context else self._options

    @contextmanager
    def scratch(self, tokens: int = 0) -> Iterator[Notebook]:
        """An empty notebook to compute `tokens` rows in, beside those that are in use: in f16 or f32, also where the
        cache is quantized. It is given back afterwards."""
        context = self.context
        if self._beside(tokens):
            with Notebook(context) as notebook:
                yield notebook
        else:
            size = context.options.n_ctx  # not less: LongRoPE goes by it
            if not self._fixed_size:
                size = max(size, -(-tokens // 256) * 256)
            options = replace(context.compile_options, n_ctx=size, n_sequences=1, unified=False)
            with Context(self.model, options) as other:
                other.unmovable, other.carries = context.unmovable, context.carries
                yield Notebook(other)

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
        with self.alone:
            self._sharing += 1
        try:
            yield
        finally:
            with self.alone:
                self._sharing -= 1
                if not self._sharing:
                    self._forget_left()

    def _forget_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.close()

    @contextmanager
    def scratch_after(self, left: Tokens, tokens: int) -> Iterator[Notebook]:
        """A scratch notebook that begins with these tokens, for `tokens` rows in all. Within `compiling` it shares them
        with others before and after it."""
        there = len(self._left) if self._left and np.array_equal(self._left.tokens, left) else 0
        shares = self._sharing and not self.model.recurrent and self.context.options.unified
        if not shares or not self._beside(tokens, there):
            self._forget_left()
            with self.scratch(tokens) as notebook:
                notebook.append(left)
                notebook.flush()
                yield notebook
            return
        if self._left is None or not self._left.intact or not there:
            self._forget_left()
            self._left = self.notebook()
            self._left.append(left)
            self._left.flush()
        with self._left.share() as notebook:
            yield notebook

    def make_room(self, tokens: int, spare: int = 0, held: int = 0) -> None:
        """See to room for a sequence of so many tokens, of which it has `held` already. The context is made larger
        where it must be; the sequences that are in use come along.

        `spare` tokens more are for an answer, as many as there is room for, at least one. Raise EngineError where that
        is more than the model was trained for.
        """
        self.check_length(tokens + min(spare, 1))
        wanted = tokens + spare if self.longest is None else min(tokens + spare, self.longest)
        beside = self._context.used if self._context else 0  # cells that are in use
        beside -= min(beside, len(self._left) if self._left else 0)  # what is kept for compiles asks for no more room
        size = max(wanted, beside + wanted - held)
        if size <= self.options.n_ctx or self._fixed_size:
            return
        size = -(-size // 256) * 256
        if self.longest is not None and not beside:
            size = min(size, self.longest)
        if self._context:
            self._forget_left()  # nobody needs it enough to have rows come along
            self._context.resize(n_ctx=size)
            self._told()
        else:
            self._options = replace(self._options, n_ctx=size)

    def size_alone(self, tokens: int, spare: int) -> int:
        """Tokens that the context would have by `make_room` if nothing else had ever been in it."""
        size = self._options.n_ctx
        wanted = tokens + spare if self.longest is None else min(tokens + spare, self.longest)
        if wanted > size and not self._fixed_size:
            size = -(-wanted // 256) * 256
        return size if self.longest is None else min(size, self.longest)

    @property
    def grows(self) -> bool:
        """Whether the context may be made larger: nobody chose its size."""
        return not self._fixed_size

    def check_length(self, tokens: int) -> None:
        """Raise EngineError for more tokens in one sequence than the model was trained for."""
        self._check_trained(tokens, "{:,} tokens are to be read and written")

    def make_way(self, tokens: int, sequences: int) -> None:
        """See to cells for so many tokens, and sequences, beside those in use, which others are going to share.

        Raise EngineError where there cannot be so many: the size was given, the memory does not suffice, or rows would
        not fit any more (LongRoPE). Then all is as it was.
        """
        context = self.context
        cells = context.used + tokens
        if cells <= context.cells and sequences <= context.free:
            return
        if cells > context.cells and self._fixed_size:
            raise EngineError(f"{cells:,} tokens do not fit into the {context.cells:,} of this context")
        if context.held + sequences > MOST_SEQUENCES:
            raise EngineError(f"{context.held + sequences} sequences are more than the {MOST_SEQUENCES} of a context")
        size = -(-cells // 256) * 256 if cells > context.cells else 0
        context.resize(n_ctx=size, n_sequences=context.held + sequences, rotated_alike=True)
        self._told()

    def _check_trained(self, tokens: int, what: str) -> None:
        """Raise EngineError for more tokens than the model was trained for, RoPE scaling counted in."""
        if self.longest is None or tokens <= self.longest:
            return
        why = f"{what.format(tokens)}, but {self.model.name} was trained for {self.longest:,}"
        if limits.learned(self.model):
            raise EngineError(f"{why}, and has no position beyond", "Take fewer")
        scales = (1 / factor for factor in (2, 4, 8, 16, 32))
        yarn = (replace(self.options, rope_scaling="yarn", rope_freq_scale=scale) for scale in scales)
        reach = (one.rope_freq_scale for one in yarn if (limits.trained(self.model, one) or 0) >= tokens)
        scale = next(reach, None)
        raise EngineError(why, Help.SCALE_ROPE(scale=scale) if scale else Help.BEYOND_TRAINED())

    def notebook(self, *, dry: bool = False) -> Notebook:
        """An empty notebook in a sequence of its own, beside those that are in use. Close it afterwards."""
        return Notebook(self.context, dry=dry)

    @property
    def weights(self) -> str:
        """SHA-256 of the model's file (of the digests of its files, if it is split), remembered between runs.

        It is that of what was loaded: raise ModelError if a file has been changed since.
        """
        sources = self.model.sources
        if self._weights is None:
            digest = self._hash()
            found = [source for source in sources if source.changed]
        else:
            found = [source for source in sources if source.changed]
            digest = self._hash() if found else self._weights
            if digest == self._weights:  # moved, linked or touched
                for source in found:
                    source.settle()
                found = []
        if found:
            raise _changed(found[0].path)
        self._weights = digest
        return digest

    # Images.

    @property
    def sees(self) -> bool:
        """Whether a projector was named."""
        return self._projector is not None

    @property
    def eye(self) -> Eye:
        """The projector, loaded when it is first used. Raise ModelError without one, or for another model's."""
        if self._eye is None:
            from notes_cli.engine.eye import Eye

            if self._projector is None:
                what = f"{self.model.name} is to look at an image, which takes its projector (mmproj)"
                raise ModelError(what, Help.NAME_PROJECTOR(model=self.model.name))
            low, high = self._image_tokens
            threads = self.context.threads
            self._eye = Eye(self.model, self._projector, min_tokens=low, max_tokens=high, threads=threads)
        return self._eye

    @cached_property
    def projector(self) -> str:
        """What decides, beside the model, which rows an image gets: the digest of the projector, and its
        settings."""
        source = self.eye.source
        digest = file_sha256(source.path, source.file, self.paths.models / "digests.json", self._hashing)
        if source.changed:
            raise _changed(source.path)
        return f"{digest} {self.eye.settings}"

    def stretches(self, skill: Skill, *, dry: bool = True) -> list[tuple[int, int, Seen]]:
        """The texts of a skill and the images among them, each with its characters [start, end): each text tokenised
        apart, each image looked at, or (`dry`) how many rows it would take."""
        from notes_cli.engine.eye import words

        found: list[tuple[int, int, Seen]] = []
        at = 0
        for one in (*skill.pictures, None):
            end = one.start if one else len(skill.text)
            if at < end:
                found.append((at, end, words(self.model.tokenize(skill.text[at:end]))))
            if one:
                found.append((one.start, one.end, (self.eye.plan if dry else self.eye.see)(one.picture)))
                at = one.end
        return found

    def look(self, segment: Segment, *, dry: bool = False) -> Seen:
        """A segment with images, these looked at again. `dry`: how many rows they would take."""
        from notes_cli.engine.eye import joined

        if not segment.pictures:
            raise SegmentError(f"{segment.name} holds no image to look at again", self.compile_again(segment.name))
        pictures = [Shown(one.start, one.end, read_picture(one.data, segment.name)) for one in segment.pictures]
        skill = Skill(segment.name, "", segment.text, (), "", pictures=tuple(pictures))
        same = segment.projector == self.projector
        seen = joined([part for *_, part in self.stretches(skill)]) if same else None
        if seen is None or not np.array_equal(seen.tokens, segment.tokens) or seen.media != segment.media:
            what = f"{segment.name} was compiled with another projector than {self.eye.path}, or with other limits"
            raise SegmentError(what, self.compile_again(segment.name))
        return seen if dry else joined([part for *_, part in self.stretches(skill, dry=False)])

    def _hash(self) -> str:
        memory = self.paths.models / "digests.json"
        digests = [file_sha256(source.path, source.file, memory, self._hashing) for source in self.model.sources]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    @property
    def identity(self) -> Identity:
        """Identity of this model in this context. Raise UnsupportedError where its rows cannot be read."""
        return self.learn()

    def learn(self) -> Identity:
        """See to it that the context goes by what is known of a model of this identity: whether its rows may be moved,
        and a state carried. Whoever asks for the identity has that done, so nobody can forget it."""
        identity = self.context.identity(self.weights)
        turned = self._rotations.get(self._rotation_key(identity))
        self.context.unmovable = None if turned is None or turned.right else turned.reason
        if self.model.recurrent:
            self.context.carries = self._carries(identity)
        return identity

    def _carries(self, identity: Identity) -> bool:
        """Whether a state may be carried through skills: as was chosen, else as was measured."""
        if self._carry is not None:
            return self._carry
        cache = self.context.options.cache
        key = f"{identity.key} {cache}"
        if key not in self._measured:
            self._measured[key] = False
            with suppress(NotesError):  # a profile that cannot be followed; who asks for it is told
                profile = Profiles(self.paths.profiles).find(identity, cache)
                self._measured[key] = profile is not None and profile.carries
        return self._measured[key]

    @contextmanager
    def carrying(self, carry: bool) -> Iterator[None]:
        """A state is carried through skills in this block, or is not, whatever was chosen: to measure it."""
        before, self._carry = self._carry, carry
        try:
            self.learn()
            yield
        finally:
            self._carry = before
            self.learn()

    def measure_rotation(self) -> None:
        """See, once an identity, whether keys turn as we think; if not, rows of it will not be moved."""
        key = self._rotation_key(self.identity)
        if key in self._rotations:
            return
        with self.scratch() as notebook:
            self._rotations[key] = measure_rotation(notebook.context, notebook.sequence)
        rotation_checks(self._rotation_memory).add({key: self._rotations[key]})
        self.learn()

    @cached_property
    def _rotations(self) -> dict[str, RotationCheck | None]:
        return rotation_checks(self._rotation_memory).load()

    @property
    def _rotation_memory(self) -> Path:
        return self.paths.models / "turns.json"

    def _rotation_key(self, identity: Identity) -> str:
        """The same model and rotation under the same native library, which is rebuilt with other graphs."""
        return f"{identity.key} {system.build()}"

    @cached_property
    def reasoning(self) -> Reasoning:
        """How this model thinks before it answers."""
        return reasoning_of(self.model.chat_template or "", self.model.name)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, with answers that begin at once."""
        return self._template()

    @cached_property
    def thinking_template(self) -> ChatTemplate:
        """The chat template, with a chain of thought before the answer."""
        return self._template(think=True)

    @cached_property
    def left_context(self) -> Tokens:
        """The tokens that a skill is compiled after: BOS and the opening of the system message.

        Some templates print today's date there. It is held still, or every skill would be out of date tomorrow.
        """
        opening = left_context(self._template(now=datetime(2026, 1, 1)))
        return self.opened(self.model.tokenize(opening, special=True))

    def _template(self, *, now: datetime | None = None, think: bool = False) -> ChatTemplate:
        bos, eos = self.model.special_text("bos"), self.model.special_text("eos")
        name = f"the chat template of {self.model.path.name}"
        source = self.model.chat_template or ""
        template = ChatTemplate(source, bos, eos, now=now, name=name, memory=self._renderings)
        return self.reasoning.template(template, think)

    def tokenize(self, chunk: Chunk) -> Tokens:
        """Tokens of a chunk, apart from its neighbours."""
        return self.model.tokenize_runs(chunk.runs)

    def tokens_of(self, skill: Skill) -> Tokens:
        """Tokens of a skill that is to be compiled; of its images those that mark them, and one for each row."""
        if skill.pictures:
            return np.concatenate([part.tokens for *_, part in self.stretches(skill)])
        return self.model.tokenize_runs(skill.runs) if skill.runs else self.model.tokenize(skill.text)

    def opened(self, tokens: Tokens) -> Tokens:
        """The first tokens of a prompt, after the BOS that the model wants unless its template has put it there."""
        bos = self.model.bos
        if bos is None or (len(tokens) and tokens[0] == bos):
            return tokens
        return np.concatenate([np.array([bos], np.int32), tokens])

    def open(self, path: Path, word: str = "") -> Segment:
        """A segment from a file, checked against this model; its rows are checked when they are used. `word`: the
        name that it has in the library, if it was found by that.

        Raise SegmentError that says what does not fit.
        """
        segment = open_stored(path)
        if word:
            check_called(segment, path, word)
        self._words[segment.name] = word or str(path)
        self.check(segment)
        self._files[segment.name] = path
        return segment

    def used(self, name: str) -> None:
        """A segment that was opened has come into a notebook: remember that as a use of its file."""
        if name in self._files:
            self.library.used(self._files[name])

    def file_of(self, name: str) -> Path | None:
        """The file that a segment of this name was last opened from."""
        return self._files.get(name)

    def check(self, segment: Segment) -> None:
        """Raise SegmentError, saying what differs, unless the segment fits the context as it is now."""
        differences = segment.identity.differences(self.identity)
        if differences:
            found = "; ".join(differences)
            raise SegmentError(f"{segment.name} was {found}", self.compile_again(segment.name))
        model, tokens = self.model, [*segment.tokens.tolist(), *segment.context.tolist()]
        unknown = model.unknown(tokens)
        if unknown is not None:
            raise SegmentError(
                f"{segment.name} holds token {unknown}, and {model.name} has a vocabulary of {model.n_vocab}: it is "
                "not what was compiled for this model",
                self.compile_again(segment.name),
            )

    def compile_again(self, name: str, more: Mapping[str, object] | None = None) -> Remedy:
        """What compiles a skill for this model with these options, from the text that its segment holds. `more`: other
        arguments of compile_skill."""
        options = {**self._compile_options(), **(more or {})}
        return Help.COMPILE_AGAIN(name=self._words.get(name, name), model=self.model.path, options=options)

    def compile_edited(self, name: str) -> Remedy:
        """The same, from what the file of its text says now."""
        options = self._compile_options()
        return Help.COMPILE_EDITED(name=self._words.get(name, name), model=self.model.path, options=options)

    def _compile_options(self) -> dict[str, object]:
        rows = self.context.compile_options  # compiled in f16, which serves all caches but f32
        wanted = replace(self.options, type_k=rows.type_k, type_v=rows.type_v)
        given = ContextOptions(n_ctx=DEFAULT_CONTEXT)
        options = {each: getattr(wanted, each) for each in _COMPILED if getattr(wanted, each) != getattr(given, each)}
        return {**options, **({"beyond_trained": True} if self._beyond_trained else {})}

    def advise(self, error: NotesError) -> None:
        """Complete a remedy that is to compile a skill otherwise: with this model and its options."""
        if error.remedy and error.remedy.help is Help.COMPILE_OTHERWISE:
            values = error.remedy.values
            error.remedy = self.compile_again(values["name"], values["options"])


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path} was changed after it was loaded: what was computed belongs to no file", "Run this again")
