"""Combines a model and its context with its chat template and the user's library: the start of every use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from notes_cli.config import Paths
from notes_cli.config import paths as default_paths
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.errors import Help, ModelError, NotesError, Remedy, SegmentError
from notes_cli.library.container import open_stored
from notes_cli.library.store import Library, Store, check_name
from notes_cli.runtime.contexts import DEFAULT_CONTEXT, Contexts
from notes_cli.runtime.naming import library as own_library
from notes_cli.text.prompt import Chunk, left_context
from notes_cli.text.reasoning import Reasoning, reasoning_of
from notes_cli.text.rendering import start_rendering
from notes_cli.text.template import ChatTemplate

if TYPE_CHECKING:
    from notes_cli.engine.vision import ImageEmbeddings
    from notes_cli.runtime.image_encoding import ImageEncoding
    from notes_cli.text.skill import Skill

# Options that affect segments: LongRoPE depends on the context's size, keys of some sparse attention on flash
# attention.
_COMPILED = (
    *("n_ctx", "flash_attention", "type_k", "type_v"),
    *("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
)


class Workspace(Contexts):
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
            carry: Carry recurrent state through skills; None: if calibration found that it works for this model.
            chat_template: The Jinja text of a chat template in place of the model's.
            hashing: Called with (bytes done, total) while a model's file is hashed, once per file.
            loading: Called with the loaded fraction, 0 to 1.
            log: Called with the memory of each context.

        Raises ModelError for a model that cannot be loaded, EngineError for a fixed n_ctx beyond the trained length.
        """
        if projector is not None and not projector.is_file():  # report it before an image is encoded
            raise ModelError(f"{projector}: no such projector", "Name the file that was published with the model")
        paths = paths or default_paths()
        self.library: Store = library or own_library(paths)
        self._projector, self._image_tokens = projector, image_tokens
        self._image_encoding: ImageEncoding | None = None
        self.files: dict[str, Path] = {}  # segment name -> file it was last opened from
        self._words: dict[str, str] = {}  # segment name -> the user's reference
        start_rendering()  # prepares in the background while the model loads
        loaded = Model(model, gpu_layers=gpu_layers, rpc=rpc, loading=loading)
        try:
            super().__init__(
                *(loaded, options),
                paths=paths,
                fixed_size=fixed_size,
                beyond_trained=beyond_trained,
                carry=carry,
                hashing=hashing,
                log=log,
            )
        except BaseException:
            loaded.close()
            raise
        own = f"the chat template of {loaded.path.name}"
        self._template_name = own if chat_template is None else "the chat template"
        # The Jinja text, "" for a model without one.
        self.chat_template = (loaded.chat_template or "") if chat_template is None else chat_template

    def close(self) -> None:
        if self._image_encoding is not None:
            self._image_encoding.close()
            self._image_encoding = None
        super().close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Images.

    @property
    def has_vision(self) -> bool:
        """True if a projector was given."""
        return self._projector is not None

    @property
    def image_encoding(self) -> ImageEncoding:
        """The vision encoder for skills."""
        if self._image_encoding is None:
            from notes_cli.runtime.image_encoding import ImageEncoding  # most prompts have no images

            self._image_encoding = ImageEncoding(self, self._projector, self._image_tokens)
        return self._image_encoding

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

    def compile_again(self, name: str, more: Mapping[str, object] | None = None) -> Remedy:
        """Return the remedy to compile a skill for this model with its present options, from the segment's text.
        `more`: other arguments of compile_skill."""
        options = {**self._compile_options(), **(more or {})}
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

    def advise(self, error: NotesError) -> None:
        """Complete a remedy to compile a skill differently with this model and its options."""
        if error.remedy and error.remedy.help is Help.COMPILE_OTHERWISE:
            values = error.remedy.values
            error.remedy = self.compile_again(values["name"], values["options"])
