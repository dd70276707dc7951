"""Untrusted image files: decoded as intended, or refused in one line."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from projectors import image_bytes

from notes_cli import images
from notes_cli.errors import ImageError
from notes_cli.images import load_picture, looks_like_image, pixels, read_picture

RED_OVER_BLUE = np.array([[[255, 0, 0]] * 8] * 4 + [[[0, 0, 255]] * 8] * 12, np.uint8)  # 8 wide, 16 high


def saved(image: Image.Image, kind: str = "PNG", **settings: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_pixels_are_those_of_the_file(kind: str) -> None:
    """Of each kind that is read; lossy ones about."""
    settings = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    data = saved(Image.fromarray(RED_OVER_BLUE), kind, **settings)
    assert looks_like_image(data)
    found = pixels(read_picture(data, "x")).astype(int)
    assert np.abs(found - RED_OVER_BLUE).mean() < (12 if kind == "JPEG" else 0.001)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_on_its_side_is_turned(orientation: int) -> None:
    """By its EXIF orientation; the size is that of the rotated image."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = read_picture(saved(Image.fromarray(RED_OVER_BLUE), exif=exif), "x")
    found = pixels(picture)
    assert found.shape == ((8, 16, 3) if orientation >= 5 else (16, 8, 3)) == (picture.height, picture.width, 3)
    red = found[..., 0] > 128
    place = {1: red[:4], 2: red[:4], 3: red[-4:], 4: red[-4:], 5: red[:, :4], 6: red[:, -4:], 7: red[:, -4:]}
    assert place.get(orientation, red[:, :4]).all() and red.sum() == 32


def test_what_is_transparent_is_white_and_all_keep_their_light() -> None:
    """With an alpha channel, half of it, or a palette with one clear colour; not the black below it."""
    clear = np.zeros((4, 4, 4), np.uint8)
    clear[0, 0] = 255, 0, 0, 255
    clear[0, 1] = 255, 0, 0, 128
    found = pixels(read_picture(saved(Image.fromarray(clear)), "x"))
    assert found[0, 0].tolist() == [255, 0, 0] and (found[1:] == 255).all()
    assert abs(int(found[0, 1, 1]) - 127) <= 1
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.putpixel((1, 1), 1)
    found = pixels(read_picture(saved(palette, transparency=0), "x"))
    assert found[1, 1].tolist() == [255, 0, 0] and (found[0] == 255).all()
    # 16 bits a pixel, 1 bit, CMYK: each as light as it was.
    deep = Image.fromarray(np.full((4, 4), 32768, np.uint16))
    assert abs(int(pixels(read_picture(saved(deep), "x")).mean()) - 127) <= 1
    assert (pixels(read_picture(saved(Image.new("1", (4, 4), 1)), "x")) == 255).all()
    assert pixels(read_picture(saved(Image.new("CMYK", (4, 4), (0, 0, 0, 0)), "JPEG"), "x")).min() > 250


def png_of(width: int, height: int) -> bytes:
    """A PNG whose head claims so many pixels."""
    data = bytearray(image_bytes(4, 4))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


HOSTILE = {
    "text": (b"What is the total?", "no image that can be read"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image that can be read"),
    "empty": (b"", "no image that can be read"),
    "bomb": (png_of(40_000, 40_000), "more than 67,108,864"),
    "far too large": (png_of(2**30, 2**30), "more than 67,108,864"),
    "long": (saved(Image.new("RGB", (3000, 2))), "one side is more than 200 times the other"),
    "cut off": (image_bytes(64, 64)[:-600], "cut off or damaged"),
    "cut in its head": (image_bytes(64, 64)[:20], "cut off or damaged|no image"),
    "cut JPEG": (image_bytes(64, 64, kind="JPEG")[:-600], "cut off or damaged"),
} | {
    kind: (saved(Image.new("L", (8, 8)), kind, save_all=True, append_images=[Image.new("L", (8, 8), 9)]), "animated")
    for kind in ("GIF", "WEBP")
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_good_picture_is_refused(tmp_path: Path, what: str) -> None:
    """In one line with the file and the problem; no pixel of a decompression bomb is decoded."""
    data, message = HOSTILE[what]
    path = tmp_path / "photo.png"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=message) as refused:
        pixels(load_picture(path))
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_equal_texts_are_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The placeholder of an image in texts depends on every byte of the file, and not on its name. A file that is too
    large is not read, nor is a folder."""
    one, other = image_bytes(8, 8, seed=1), image_bytes(8, 8, seed=2)
    assert read_picture(one, "a").text == read_picture(one, "b").text != read_picture(other, "a").text
    assert read_picture(one + b"\0", "a").text != read_picture(one, "a").text
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    (tmp_path / "large.png").write_bytes(image_bytes(64, 64))
    for path, says in ((tmp_path / "large.png", "larger than"), (tmp_path, "cannot read")):
        with pytest.raises(ImageError, match=says):
            load_picture(path)
