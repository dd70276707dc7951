"""What a projector makes of images: the rows that they get, and by what those are told from others."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from notes_cli.engine.segment import Segment
from notes_cli.engine.vision import ImageEmbeddings, VisionEncoder, join_parts, text_part
from notes_cli.errors import Help, ModelError, SegmentError
from notes_cli.images import read_picture
from notes_cli.runtime.identity import changed
from notes_cli.text.pictures import Shown
from notes_cli.text.skill import Skill

if TYPE_CHECKING:
    from notes_cli.runtime.workspace import Workspace


class ImageEncoding:
    """The images of one workspace."""

    def __init__(self, workspace: Workspace, projector: Path | None, tokens: tuple[int | None, int | None]) -> None:
        """`tokens`: how many of an image at least and at most, where the projector leaves that open."""
        self._workspace, self._model = workspace, workspace.model
        self._path, self._tokens = projector, tokens

    @cached_property
    def vision(self) -> VisionEncoder:
        """The projector, loaded when it is first used. Raise ModelError without one, or for another model's."""
        if self._path is None:
            what = f"{self._model.name} is to look at an image, which takes its projector (mmproj)"
            raise ModelError(what, Help.NAME_PROJECTOR(model=self._model.name))
        low, high = self._tokens
        threads = self._workspace.context.threads
        return VisionEncoder(self._model, self._path, min_tokens=low, max_tokens=high, threads=threads)

    def close(self) -> None:
        if "vision" in self.__dict__:
            self.vision.close()

    @cached_property
    def projector(self) -> str:
        """What decides, beside the model, which rows an image gets: the digest of the projector, and its settings."""
        digest = self._workspace.digest(self.vision.source)
        if self.vision.source.changed:
            raise changed(self.vision.source)
        return f"{digest} {self.vision.settings}"

    def split(self, skill: Skill, *, dry: bool = True) -> list[tuple[int, int, ImageEmbeddings]]:
        """The texts of a skill and the images among them, each with its characters [start, end): each text tokenised
        apart, each image looked at, or (`dry`) how many rows it would take."""
        found: list[tuple[int, int, ImageEmbeddings]] = []
        at = 0
        for one in (*skill.pictures, None):
            end = one.start if one else len(skill.text)
            if at < end:
                found.append((at, end, text_part(self._model.tokenize(skill.text[at:end]))))
            if one:
                found.append((one.start, one.end, (self.vision.plan if dry else self.vision.encode)(one.picture)))
                at = one.end
        return found

    def encode_segment(self, segment: Segment, *, dry: bool = False) -> ImageEmbeddings:
        """A segment with images, these looked at again. `dry`: how many rows they would take."""
        again = self._workspace.compile_again
        if not segment.pictures:
            raise SegmentError(f"{segment.name} holds no image to look at again", again(segment.name))
        pictures = [Shown(one.start, one.end, read_picture(one.data, segment.name)) for one in segment.pictures]
        skill = Skill(segment.name, "", segment.text, (), "", pictures=tuple(pictures))
        same = segment.projector == self.projector
        seen = join_parts([part for *_, part in self.split(skill)]) if same else None
        if seen is None or not np.array_equal(seen.tokens, segment.tokens) or seen.media != segment.media:
            what = f"{segment.name} was compiled with another projector than {self.vision.path}, or with other limits"
            raise SegmentError(what, again(segment.name))
        return seen if dry else join_parts([part for *_, part in self.split(skill, dry=False)])
