"""The check of an encoded picture that comes from outside: a row, or an environment.

What is accepted is a plain PNG or JPEG afterwards, so that every image processor sees the same pixels. Pillow is
imported where a picture is checked, and only there.
"""

import struct
import warnings
from io import BytesIO
from typing import TYPE_CHECKING

from spmd_rl.base.errors import one_line
from spmd_rl.types import ImagePart

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 6 << 20
"""Bytes of all pictures of a row together, which travel with each of its answers to the rewarder"""
MAX_PIXELS = 1 << 24
"""17 million pixels, 50 MB when decoded"""
MAX_RATIO = 200
"""Largest ratio of the sides, as image processors have it"""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MEDIA = {"PNG": "image/png", "JPEG": "image/jpeg"}
ORIENTATION = 0x0112
"""Exif tag by which a viewer turns or mirrors a photograph"""
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, OverflowError, struct.error)
"""Exceptions of Pillow's readers for damaged files"""


class UnfitPicture(ValueError):
    """The reason why a picture cannot be used."""


def plain_picture(data: bytes, name: str = "it") -> ImagePart:
    """Return a picture as plain PNG or JPEG, turned upright, on white where it is transparent.

    UnfitPicture: damaged, too large, too narrow, animated, or of a kind that image processors do not read alike.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UnfitPicture("pictures need Pillow: pip install 'spmd-rl[pictures]'") from None
    check_bytes(len(data), name)
    try:
        with warnings.catch_warnings():
            # The limit here is below Pillow's.
            warnings.simplefilter("ignore")
            # The header alone is read here, and pixels only once their number is known.
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                check_size(*image.size, name)
                # A camera's JPEG may have a preview as a second frame, and is then called MPO.
                if image.format != "MPO" and getattr(image, "is_animated", False):
                    raise UnfitPicture(f"{name} is animated: save one of its frames as PNG")
                return _plain(image, data, name)
    except UnfitPicture:
        raise
    except Image.UnidentifiedImageError:
        raise UnfitPicture(f"{name} is not a picture ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise UnfitPicture(f"{name} has more than {MAX_PIXELS} pixels: make it smaller") from None
    except DAMAGED as error:
        raise UnfitPicture(f"{name} is damaged: {one_line(error)}") from None


def _plain(image: "Image", data: bytes, name: str) -> ImagePart:
    from PIL import Image, ImageOps

    image.load()
    kept = "JPEG" if image.format == "MPO" else image.format
    turned = image.getexif().get(ORIENTATION, 1) != 1
    clear = image.has_transparency_data
    if kept in MEDIA and image.mode in ("RGB", "L") and not turned and not clear:
        return ImagePart(MEDIA[kept], data)
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"):
        raise UnfitPicture(f"{name} has pixels of the kind {image.mode}: save it as RGB with 8 bits a channel")
    upright = ImageOps.exif_transpose(image) if turned else image
    if clear:
        upright = upright.convert("RGBA")
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright)
    file = BytesIO()
    # A photograph as PNG would have ten times the bytes.
    kept = kept if kept == "JPEG" else "PNG"
    upright.convert("RGB").save(file, kept, quality=95, subsampling=0)
    return ImagePart(MEDIA[kept], file.getvalue())


def check_bytes(size: int, name: str) -> None:
    """UnfitPicture if a file of `size` bytes is empty or too large."""
    if not 0 < size <= MAX_BYTES:
        raise UnfitPicture(
            f"{name} has {size} bytes; pictures have at most {MAX_BYTES}" if size else f"{name} is empty"
        )


def check_size(width: int, height: int, name: str) -> None:
    """UnfitPicture if a picture of this size has too many pixels, or is too narrow."""
    if width * height > MAX_PIXELS:
        raise UnfitPicture(f"{name} has {width} x {height} pixels, more than {MAX_PIXELS}: make it smaller")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UnfitPicture(f"{name} has {width} x {height} pixels: one side is more than {MAX_RATIO} times the other")
