"""Tests of segment files with images, whose axes, images and bytes must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine.segment import Q8_0, ImageFile, Media, Segment
from notes_cli.errors import SegmentError
from notes_cli.library.container import open_segment, peek, write_segment

MakeSegment = Callable[..., Segment]
DATA = b"the bytes of a picture, 31 long"


@pytest.fixture
def photo(make_segment: MakeSegment) -> Segment:
    """One token, four rows of an image that take two positions, one token."""
    media = (Media(1, 5, 2, sha256(DATA).hexdigest(), 48, 24),)
    axes = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 3, 3]], np.int32)
    text = f"Look: image {sha256(DATA).hexdigest()}."
    pictures = (ImageFile(6, len(text) - 1, DATA),)
    return make_segment(6, media=media, axes=axes, projector="ab max=4", pictures=pictures, fields=(), text=text)


def test_an_image_comes_back_as_it_was(tmp_path: Path, photo: Segment) -> None:
    write_segment(tmp_path / "photo.gguf", photo)
    found, info = open_segment(tmp_path / "photo.gguf"), peek(tmp_path / "photo.gguf")
    assert found.media == photo.media and (found.axes == photo.axes).all() and found.axes.dtype == np.int32
    assert (found.projector, found.pictures) == (photo.projector, photo.pictures)
    assert (info.media, info.projector) == (photo.media, photo.projector)
    assert [info.text[one.start : one.end] for one in info.pictures] == [f"image {sha256(DATA).hexdigest()}"]
    assert found.positions == 4 and found.max_seam == 1


def test_a_file_may_have_quantized_rows_and_an_image(tmp_path: Path, photo: Segment, make_segment: MakeSegment) -> None:
    rows = make_segment(6, k=32, v=32, fields=(), text="image").layers
    write_segment(tmp_path / "photo.gguf", replace(photo, layers=rows, kv="q8_0"))
    found, info = open_segment(tmp_path / "photo.gguf"), peek(tmp_path / "photo.gguf")
    assert (found.kv, info.kv, info.dtype) == ("q8_0", "q8_0", "q8_0")
    assert found.media == info.media == photo.media and found.pictures == photo.pictures
    assert all(one.k.dtype == one.v.dtype == Q8_0 for one in found.layers)


def test_a_text_with_images_keeps_each_file_once(tmp_path: Path, photo: Segment) -> None:
    """Three places, two files: the same picture is not written twice, and all come back where they were."""
    files = DATA, b"another picture's", DATA
    text, pictures, media = "", [], []
    for number, data in enumerate(files):
        text += "See "
        digest = sha256(data).hexdigest()
        pictures.append(ImageFile(len(text), len(text) + 64, data))
        text += digest + ". "
        media.append(Media(2 * number, 2 * number + 1, 1, digest, 8, 8))
    segment = replace(photo, text=text, pictures=tuple(pictures), media=tuple(media), axes=None)
    write_segment(tmp_path / "photo.gguf", segment)
    assert open_segment(tmp_path / "photo.gguf").pictures == segment.pictures
    data = (tmp_path / "photo.gguf").read_bytes()
    assert data.count(DATA) == data.count(files[1]) == 1
    missing = replace(segment, pictures=(pictures[0], pictures[2]))
    write_segment(tmp_path / "photo.gguf", missing)
    with pytest.raises(SegmentError, match="the images"):
        open_segment(tmp_path / "photo.gguf")


def other(photo: Segment, place: tuple[int, int], by: int) -> np.ndarray:
    assert photo.axes is not None
    axes = photo.axes.copy()
    axes[place] += by
    return axes


WRONG = {
    "a text that leaps": lambda one: {"axes": other(one, (5, 0), 1)},
    "a row beyond the image": lambda one: {"axes": other(one, (2, 2), 1)},
    "a row before it": lambda one: {"axes": other(one, (1, 1), -1)},
    "a row at another time": lambda one: {"axes": other(one, (2, 0), 1)},
    "no axes": lambda one: {"axes": None},
    "too few axes": lambda one: {"axes": one.axes[:-1]},
    "beyond the end": lambda one: {"media": (replace(one.media[0], last=7),)},
    "no rows": lambda one: {"media": (replace(one.media[0], last=1),)},
    "more positions than rows": lambda one: {"media": (replace(one.media[0], positions=5),)},
    "one inside another": lambda one: {"media": (one.media[0], replace(one.media[0], first=2))},
    "no digest": lambda one: {"media": (replace(one.media[0], sha256="12"),)},
    "another image's bytes": lambda one: {"pictures": (one.pictures[0]._replace(data=DATA[:-1] + b"?"),)},
    "a place beyond the text": lambda one: {"pictures": (one.pictures[0]._replace(end=99),)},
    "a place of other words": lambda one: {"pictures": (one.pictures[0]._replace(start=0, end=5),)},
    "two in one place": lambda one: {"pictures": one.pictures * 2},
    "bytes without an image": lambda one: {"media": (), "axes": None},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(tmp_path: Path, photo: Segment, what: str) -> None:
    """A file that was written with other axes, images or bytes than belong together: never read as good."""
    write_segment(tmp_path / "photo.gguf", replace(photo, **WRONG[what](photo)))
    with pytest.raises(SegmentError, match="damaged or not a segment"):
        open_segment(tmp_path / "photo.gguf")
