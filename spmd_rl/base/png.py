"""Pictures as PNG files and `data:` URLs, written with zlib alone. Videos are animated PNGs."""

import base64
import struct
import zlib
from collections.abc import Sequence

SIGNATURE = b"\x89PNG\r\n\x1a\n"
URL = "data:image/png;base64,"


def encode_png(frames: Sequence[bytes], width: int, height: int, fps: int = 8) -> bytes:
    """Return the PNG of 8-bit RGB frames, height x width x 3 bytes each; animated if there are several."""
    parts = [SIGNATURE, _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    if len(frames) > 1:
        parts.append(_chunk(b"acTL", struct.pack(">II", len(frames), 0)))
    number = 0
    for index, pixels in enumerate(frames):
        rows = [pixels[begin : begin + 3 * width] for begin in range(0, len(pixels), 3 * width)]
        # Each row begins with its filter: none.
        packed = zlib.compress(b"".join(b"\0" + row for row in rows), 6)
        if len(frames) > 1:
            parts.append(_chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, width, height, 0, 0, 1, fps, 0, 0)))
            number += 1
        if index == 0:
            parts.append(_chunk(b"IDAT", packed))
        else:
            parts.append(_chunk(b"fdAT", struct.pack(">I", number) + packed))
            number += 1
    return b"".join([*parts, _chunk(b"IEND", b"")])


def data_url(png: bytes) -> str:
    """Return a PNG as text for rewarders and pages."""
    return URL + base64.b64encode(png).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
