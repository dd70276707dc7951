"""Decodes image files from untrusted sources: checks format, size and shape, and returns RGB pixels.

Pillow decodes (pip install pillow) instead of libmtmd, whose decoder drops transparency and EXIF orientation, reads no
WebP, and allocates as much as a header of a few bytes asks for.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from notes_cli.errors import ImageError, reason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"BM", b"GIF8", b"II*\x00", b"MM\x00*")
MAX_BYTES = 64 << 20
MAX_PIXELS = 1 << 26  # 200 MiB in memory: more than cameras have
MAX_ASPECT = 200  # longer side over shorter: beyond it some models take more rows than their limit


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file: its bytes, and its size in pixels after EXIF rotation."""

    data: bytes
    width: int
    height: int
    source: str  # in messages
    sha256: str  # of `data`

    @property
    def text(self) -> str:
        """Placeholder where texts are compared: equal placeholders mean equal bytes."""
        return f"image {self.width}x{self.height} sha256:{self.sha256}"


def looks_like_image(data: bytes) -> bool:
    """Return True if data begins with the signature of an image format, supported or not."""
    return any(data.startswith(mark) for mark in SIGNATURES) and (data[:4] != b"RIFF" or data[8:12] == b"WEBP")


def load_picture(path: Path) -> Picture:
    """Read an image file. Raises ImageError for a file that is no image, or is refused."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ImageError(f"cannot read {path}: {reason(error)}") from error
    return read_picture(data, str(path))


def read_picture(data: bytes, source: str) -> Picture:
    """As `load_picture`, for bytes; `source` names them in messages."""
    if len(data) > MAX_BYTES:
        raise ImageError(f"{source} is larger than {MAX_BYTES >> 20} MiB", "Make it smaller first")
    with _open(data, source) as image, _decoding(source):
        width, height = image.size
        if image.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # EXIF orientation: rotated by 90 degrees
            width, height = height, width
    return Picture(data, width, height, source, hashlib.sha256(data).hexdigest())


def pixels(picture: Picture) -> NDArray[np.uint8]:
    """Return RGB pixels of shape [height, width, 3], EXIF rotation applied, transparency on white."""
    import numpy as np  # help and completion need none
    from PIL import Image, ImageOps

    with _open(picture.data, picture.source) as image, _decoding(picture.source):
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits
            upright = Image.fromarray((np.asarray(upright, np.int64) >> 8).clip(0, 255).astype(np.uint8))
        if upright.has_transparency_data:
            rgba = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
        rgb = np.array(upright.convert("RGB"), np.uint8)
    assert rgb.shape == (picture.height, picture.width, 3)
    return rgb


@contextmanager
def _decoding(source: str) -> Iterator[None]:
    """Raise Pillow's errors in the block as ImageError."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, struct.error) as error:
        raise ImageError(f"{source} is cut off or damaged: {error}", "Save it again") from error


def _open(data: bytes, source: str) -> Image:
    """Open an image and check its header, without decoding pixels. Raises ImageError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        problem = f"{source} is an image, which takes Pillow to be decoded"
        raise ImageError(problem, "Install it: pip install pillow") from error
    try:
        with warnings.catch_warnings():  # pixels are counted below
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=(*FORMATS, "GIF"))
    except Image.DecompressionBombError as error:
        raise ImageError(f"{source} has more than {MAX_PIXELS:,} pixels", "Make it smaller first") from error
    except UnidentifiedImageError:
        raise ImageError(f"{source} is no image that can be read", f"Known: {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ImageError(f"{source} is cut off or damaged: {error}", "Save it again") from error
    width, height = image.size
    fault = None
    if image.format == "GIF" or getattr(image, "n_frames", 1) > 1:
        fault = "may be animated, and one picture is looked at"
    elif width * height > MAX_PIXELS:
        fault = f"has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,}"
    elif not width or not height or max(width, height) > MAX_ASPECT * min(width, height):
        fault = f"is {width:,} x {height:,} pixels: one side is more than {MAX_ASPECT} times the other"
    if fault:
        image.close()
        raise ImageError(f"{source} {fault}", "Save it as a PNG or JPEG of one picture, smaller or less long")
    return image
