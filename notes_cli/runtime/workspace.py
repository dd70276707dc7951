"""A workspace: a model in its context, with the words of its chat template and the library of its user.

Whatever runs a model starts from it.
"""

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
from notes_cli.library.facts import Renderings
from notes_cli.library.store import Library, Store, check_called
from notes_cli.runtime.contexts import DEFAULT_CONTEXT
from notes_cli.runtime.identity import IdentifiedContexts
from notes_cli.runtime.naming import library as own_library
from notes_cli.text.prompt import Chunk, left_context
from notes_cli.text.reasoning import Reasoning, reasoning_of
from notes_cli.text.rendering import start_rendering
from notes_cli.text.template import ChatTemplate

if TYPE_CHECKING:
    from notes_cli.engine.vision import ImageEmbeddings
    from notes_cli.runtime.image_encoding import ImageEncoding
    from notes_cli.text.skill import Skill

# Options that a segment goes by: LongRoPE by the size of the context, the keys of some sparse attention by flash
# attention.
_COMPILED = (
    *("n_ctx", "flash_attention", "type_k", "type_v"),
    *("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
)


class Workspace(IdentifiedContexts):
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
        self.paths = paths or default_paths()
        self.library: Store = library or own_library(self.paths)
        self._carry, self._hashing, self._measured = carry, hashing, {}
        self._projector, self._image_tokens = projector, image_tokens
        self._image_encoding: ImageEncoding | None = None
        self._files: dict[str, Path] = {}  # of the segments that were opened, by their names
        self._words: dict[str, str] = {}  # what the user calls the segments that were opened, by their names
        self._renderings = Renderings(self.paths.models / "renderings.json")
        if self._renderings.empty:
            start_rendering()  # it gets ready while the model is loaded
        loaded = Model(model, gpu_layers=gpu_layers, rpc=rpc, loading=loading)
        try:
            super().__init__(loaded, options, fixed_size=fixed_size, beyond_trained=beyond_trained, log=log)
        except BaseException:
            loaded.close()
            raise

    def close(self) -> None:
        if self._image_encoding is not None:
            self._image_encoding.close()
            self._image_encoding = None
        self._renderings.save()
        super().close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Images.

    @property
    def has_vision(self) -> bool:
        """Whether a projector was named."""
        return self._projector is not None

    @property
    def image_encoding(self) -> ImageEncoding:
        """What the projector makes of images."""
        if self._image_encoding is None:
            from notes_cli.runtime.image_encoding import ImageEncoding  # most prompts have none

            self._image_encoding = ImageEncoding(self, self._projector, self._image_tokens)
        return self._image_encoding

    def encode_images(self, segment: Segment, *, dry: bool = False) -> ImageEmbeddings:
        """A segment with images, these looked at again. `dry`: how many rows they would take."""
        return self.image_encoding.encode_segment(segment, dry=dry)

    # The chat template.

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
        return self.with_bos(self.model.tokenize(opening, special=True))

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
            return np.concatenate([part.tokens for *_, part in self.image_encoding.split(skill)])
        return self.model.tokenize_runs(skill.runs) if skill.runs else self.model.tokenize(skill.text)

    def with_bos(self, tokens: Tokens) -> Tokens:
        """The first tokens of a prompt, after the BOS that the model wants unless its template has put it there."""
        bos = self.model.bos
        if bos is None or (len(tokens) and tokens[0] == bos):
            return tokens
        return np.concatenate([np.array([bos], np.int32), tokens])

    # Segments.

    def open(self, path: Path, word: str = "") -> Segment:
        """A segment from a file, checked against this model; its rows are checked when they are used. `word`: the
        name that it has in the library, if it was found by that.

        Raise SegmentError that says what does not fit.
        """
        segment = open_stored(path)
        if not (isinstance(self.library, Library) and path.parent == self.library.folder):
            segment = replace(segment, prefill=None)  # of another machine, perhaps
        if word:
            check_called(segment, path, word)
        self._words[segment.name] = word or str(path)
        self.check(segment)
        self._files[segment.name] = path
        return segment

    def used(self, name: str, spliced: int = 0, saved: float | None = None) -> None:
        """A segment that was opened has come into a sequence: remember that as a use of its file, with the tokens that
        an answer got from there, and the seconds of prefill that this saved, if they are known."""
        if name in self._files:
            self.library.used(self._files[name], spliced, saved)

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
