"""Encodes the images of skills with the workspace's vision encoder, and identifies it in segments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from notes_cli.engine.header import Source
from notes_cli.engine.model import Model
from notes_cli.engine.segment import Segment
from notes_cli.engine.vision import ImageEmbeddings, VisionEncoder, join_parts, text_part
from notes_cli.errors import Help, ModelError, Remedy, SegmentError
from notes_cli.runtime.freshness import as_skill
from notes_cli.text.skill import Skill


class ImageEncoding:
    """The vision encoder of one workspace, loaded on demand."""

    def __init__(
        self,
        model: Model,
        threads: Callable[[], int],
        digest: Callable[[Source], str],
        projector: Path | None,
        tokens: tuple[int | None, int | None],
    ) -> None:
        """`threads`: of the context. `digest`: hashes an open file. `tokens`: minimum and maximum per image, where the
        projector leaves that open."""
        self._model, self._threads, self._digest = model, threads, digest
        self._path, self._tokens = projector, tokens

    @cached_property
    def vision(self) -> VisionEncoder:
        """The encoder. Raises ModelError without a projector, or for another model's."""
        if self._path is None:
            text = f"{self._model.name} is to look at an image, which takes its projector (mmproj)"
            raise ModelError(text, Help.NAME_PROJECTOR(model=self._model.name))
        low, high = self._tokens
        return VisionEncoder(self._model, self._path, min_tokens=low, max_tokens=high, threads=self._threads())

    def close(self) -> None:
        if "vision" in self.__dict__:
            self.vision.close()

    @cached_property
    def projector(self) -> str:
        """Identity of the vision encoder in segments: digest of the projector, and its settings."""
        digest = self._digest(self.vision.source)
        if self.vision.source.changed:
            raise self.vision.source.changed_error()
        return f"{digest} {self.vision.settings}"

    def split(self, skill: Skill, *, dry: bool = True) -> list[tuple[int, int, ImageEmbeddings]]:
        """Split a skill into texts and images: (start, end, embeddings) with character ranges; texts are tokenized
        separately, images encoded, or only measured (`dry`)."""
        result: list[tuple[int, int, ImageEmbeddings]] = []
        at = 0
        for shown in (*skill.pictures, None):
            end = shown.start if shown else len(skill.text)
            if at < end:
                result.append((at, end, text_part(self._model.tokenize(skill.text[at:end]))))
            if shown:
                result.append(
                    (shown.start, shown.end, (self.vision.plan if dry else self.vision.encode)(shown.picture))
                )
                at = shown.end
        return result

    def encode_segment(
        self, segment: Segment, compile_again: Callable[[str], Remedy], *, dry: bool = False
    ) -> ImageEmbeddings:
        """Encode the images of a segment again. `dry`: only compute tokens and positions. Raises SegmentError, with the
        remedy `compile_again`, if the segment has no image files, or was compiled with another encoder."""
        if not segment.pictures:
            raise SegmentError(f"{segment.name} holds no image to look at again", compile_again(segment.name))
        skill = as_skill(segment, segment.pictures, segment.name)
        same = segment.projector == self.projector
        planned = join_parts([part for *_, part in self.split(skill)]) if same else None
        if planned is None or not np.array_equal(planned.tokens, segment.tokens) or planned.media != segment.media:
            text = f"{segment.name} was compiled with another projector than {self.vision.path}, or with other limits"
            raise SegmentError(text, compile_again(segment.name))
        return planned if dry else join_parts([part for *_, part in self.split(skill, dry=False)])
