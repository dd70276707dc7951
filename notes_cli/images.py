"""The pixels of an image file, decoded with care: anybody may have made it.

Pillow decodes (pip install pillow), and not libmtmd's own decoder, which drops transparency, shows photos
on their side, reads no WebP, and allocates what a file of a few bytes claims. It knows neither models nor rows.
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
MAX_PIXELS = 1 << 26  # of any camera: 200 MiB in memory
MAX_ASPECT = 200  # the longer side over the shorter: some models take more rows than they allow otherwise


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file: its bytes as they are, and its size as it is seen."""

    data: bytes
    width: int
    height: int
    source: str  # for people
    sha256: str  # of the file's bytes: that of the picture, whatever it is called

    @property
    def text(self) -> str:
        """What stands for it where texts are compared: equal texts are equal bytes."""
        return f"image {self.width}x{self.height} sha256:{self.sha256}"


def looks_like_image(data: bytes) -> bool:
    """Whether the first bytes of a file are those of an image, be it of a kind that is not read."""
    return any(data.startswith(mark) for mark in SIGNATURES) and (data[:4] != b"RIFF" or data[8:12] == b"WEBP")


def load_picture(path: Path) -> Picture:
    """The picture in a file. Raise ImageError for a file that is none, or that is refused."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ImageError(f"cannot read {path}: {reason(error)}") from error
    return read_picture(data, str(path))


def read_picture(data: bytes, source: str) -> Picture:
    """The picture in these bytes. Raise as load_picture does."""
    if len(data) > MAX_BYTES:
        raise ImageError(f"{source} is larger than {MAX_BYTES >> 20} MiB", "Make it smaller first")
    with _opened(data, source) as image, _decoding(source):
        width, height = image.size
        if image.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # on its side: Orientation
            width, height = height, width
    return Picture(data, width, height, source, hashlib.sha256(data).hexdigest())


def pixels(picture: Picture) -> NDArray[np.uint8]:
    """Red, green and blue, [height, width, 3]: turned as it is meant to be seen, what is transparent on white."""
    import numpy as np  # help and completion need none
    from PIL import Image, ImageOps

    with _opened(picture.data, picture.source) as image, _decoding(picture.source):
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I"):  # 16 bits
            turned = Image.fromarray((np.asarray(turned, np.int64) >> 8).clip(0, 255).astype(np.uint8))
        if turned.has_transparency_data:
            clear = turned.convert("RGBA")
            turned = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
        found = np.array(turned.convert("RGB"), np.uint8)
    assert found.shape == (picture.height, picture.width, 3)
    return found


@contextmanager
def _decoding(source: str) -> Iterator[None]:
    """What Pillow raises in the block is raised as ImageError."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, struct.error) as error:
        raise ImageError(f"{source} is cut off or damaged: {error}", "Save it again") from error


def _opened(data: bytes, source: str) -> Image:
    """The image, its head read and found good. Raise ImageError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        what = f"{source} is an image, which takes Pillow to be decoded"
        raise ImageError(what, "Install it: pip install pillow") from error
    try:
        with warnings.catch_warnings():  # of many pixels: they are counted below
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=(*FORMATS, "GIF"))
    except Image.DecompressionBombError as error:
        raise ImageError(f"{source} has more than {MAX_PIXELS:,} pixels", "Make it smaller first") from error
    except UnidentifiedImageError:
        raise ImageError(f"{source} is no image that can be read", f"Known: {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ImageError(f"{source} is cut off or damaged: {error}", "Save it again") from error
    width, height = image.size
    why = None
    if image.format == "GIF" or getattr(image, "n_frames", 1) > 1:
        why = "may be animated, and one picture is looked at"
    elif width * height > MAX_PIXELS:
        why = f"has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,}"
    elif not width or not height or max(width, height) > MAX_ASPECT * min(width, height):
        why = f"is {width:,} x {height:,} pixels: one side is more than {MAX_ASPECT} times the other"
    if why:
        image.close()
        raise ImageError(f"{source} {why}", "Save it as a PNG or JPEG of one picture, smaller or less long")
    return image
