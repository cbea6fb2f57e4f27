"""Rules for pictures: colour (with a gradient), number of shapes, and size of the file. No weights are needed.

feedback.reward.target=rewards.pictures:colour
reward.shapes.target=rewards.pictures:ShapeCount

A rewarder gets a picture as an answer: a `data:` URL of a PNG, as `spmd_rl` writes them. The ground truth of a prompt
has its number and its colour: `3 red`.
"""

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

CHANNELS = ("red", "green", "blue")
BRIGHT = 128
"""Least value, of 255, of a channel in a bright pixel"""
URL = "data:image/png;base64,"


def colour(images: Any, prompts: Sequence[Prompt]) -> Any:
    """Return the share of the prompt's colour in the light of each picture: 1 if there is no other.

    images: a tensor [B, 3, H, W] in 0..1, or [B, F, 3, H, W]; its methods alone are used. Returns [B], with gradient.
    """
    means = images.clamp(0, 1).mean((-2, -1) if images.dim() == 4 else (1, -2, -1))
    wanted = [next(i for i, name in enumerate(CHANNELS) if name in prompt.ground_truth.split()) for prompt in prompts]
    # A black picture has no light, so that its share must not be 1.
    return means[range(len(wanted)), wanted] / (means.sum(1) + 0.02)


def pixels(answer: str) -> tuple[int, int, bytes]:
    """Return width, height and RGB bytes of the first frame of a PNG. ValueError unless its rows have no filter."""
    if not answer.startswith(URL):
        raise ValueError("the answer is no PNG as a data: URL")
    data, place, packed, size = base64.b64decode(answer[len(URL) :]), 8, b"", (0, 0)
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        body, place = data[place + 8 : place + 8 + length], place + 12 + length
        size = struct.unpack(">II", body[:8]) if kind == b"IHDR" else size
        packed += body if kind == b"IDAT" else b""
    rows, stride = zlib.decompress(packed), 3 * size[0] + 1
    if len(rows) != stride * size[1] or any(rows[::stride]):
        raise ValueError("a PNG of another kind than 8-bit RGB without filters")
    return *size, b"".join(rows[begin + 1 : begin + stride] for begin in range(0, len(rows), stride))


def shapes(answer: str, channel: int, least: int) -> int:
    """Return the number of connected regions of at least `least` pixels that are bright in one channel."""
    width, height, data = pixels(answer)
    open_ = {i for i in range(width * height) if data[3 * i + channel] >= BRIGHT}
    count = 0
    while open_:
        found, size = [open_.pop()], 0
        while found:
            place, size = found.pop(), size + 1
            near = (place - width, place + width, place - (place % width > 0), place + ((place + 1) % width > 0))
            for other in open_.intersection(near):
                open_.remove(other)
                found.append(other)
        count += size >= least
    return count


class ShapeCount:
    """A rewarder with 1 for the right number of shapes of the right colour, less with each one too many or too few."""

    def __init__(self, least: int = 4) -> None:
        """least: pixels of a shape; smaller regions are noise."""
        self._least = least

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Count the shapes of the prompt's colour, and those of others, which are all too many."""
        number, wanted = prompt.ground_truth.split()
        counts = {name: shapes(answer, channel, self._least) for channel, name in enumerate(CHANNELS)}
        off = abs(counts.pop(wanted) - int(number)) + sum(counts.values())
        return Verdict("ok", 1 / (1 + off), {"is_right": float(off == 0)})

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield pictures with two red squares, their prompts and scores."""
        rows = [[(255, 0, 0) if x in (0, 1, 4, 5) and y < 2 else (0, 0, 0) for x in range(6)] for y in range(4)]
        raw = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
        chunks = (
            (b"IHDR", struct.pack(">IIBBBBB", 6, 4, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(raw)),
            (b"IEND", b""),
        )
        png = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )
        answer = URL + base64.b64encode(png).decode()
        for truth, score in (("2 red", 1.0), ("3 red", 0.5), ("2 green", 0.2)):
            yield Prompt("0" * 32, (Message("user", "?"),), "shapes", truth), answer, score


class Compressibility:
    """A rewarder with the negative size of the PNG in thousands of bytes: plain pictures win (DDPO, arXiv
    2305.13301, with PNG in the place of JPEG)."""

    def __init__(self, sign: float = -1.0) -> None:
        """sign: 1 rewards what does not compress."""
        self._sign = sign

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Measure the size."""
        return Verdict("ok", self._sign * len(base64.b64decode(answer.removeprefix(URL))) / 1000)
