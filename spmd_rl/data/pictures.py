"""The pictures of rows: read from files or from the row itself, checked, and put into messages. See docs/PICTURES.md.

A picture is its encoded bytes. A plain PNG or JPEG stays as it is; others are encoded as RGB, so that every image
processor sees the same pixels. Pillow is imported only for a row with a picture.
"""

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from spmd_rl.base.errors import one_line
from spmd_rl.base.hub import hub_dataset
from spmd_rl.base.pictures import MAX_BYTES, UnfitPicture, check_bytes, plain_picture
from spmd_rl.data.fields import BrokenRow, picture_reference
from spmd_rl.types import PICTURE, ImagePart, Message, TextPart

COLUMNS = ("images", "image")
KEPT = 64
"""Cache size: files whose pictures are kept, for rows with the same picture"""
WITHOUT_MARKS = ("assistant", "system")
"""Roles in whose texts `<image>` is a word like others"""
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder outside of which no row may read a file."""

    path: Path | None
    """None: rows may name no files."""

    @classmethod
    def of(cls, source: str, setting: str | None = None) -> "Folder":
        """Return the folder of `data.pictures`, else the one with the rows of a source of `data.train`."""
        home = _hub_cache() if hub_dataset(source) else Path(source).expanduser().parent
        return cls(Path(setting).expanduser() if setting else home)

    def open(self, name: str) -> ImagePart:
        """Return the picture of a file. UnfitPicture: it is outside of the folder, missing, or not a picture."""
        if self.path is None:
            raise UnfitPicture(f"{_short(name)} is a path, but its row is in no file")
        try:
            folder = self.path.resolve()
            file = (folder / name.removeprefix("file://")).resolve()
            if not file.is_relative_to(folder):
                raise UnfitPicture(f"{_short(name)} is outside of {folder}; data.pictures names another folder")
            if not file.is_file():
                raise UnfitPicture(f"{_short(name)} is no file in {folder}; data.pictures names another folder")
            found = file.stat()
        except (OSError, ValueError) as error:
            raise UnfitPicture(f"{_short(name)}: {one_line(error)}") from None
        return _read(file, found.st_mtime_ns, found.st_size)


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME)


@lru_cache(KEPT)
def _read(file: Path, mtime: int, size: int) -> ImagePart:
    check_bytes(size, file.name)
    try:
        return plain_picture(file.read_bytes(), file.name)
    except OSError as error:
        raise UnfitPicture(f"{file}: {one_line(error)}") from None


def picture_of(reference: str, folder: Folder) -> ImagePart:
    """Return the picture of a path, a `data:` URL or base64 text. UnfitPicture: it cannot be used."""
    head, comma, encoded = reference.partition(",")
    if head.startswith("data:") and comma:
        if not head.endswith(";base64"):
            raise UnfitPicture(f"{_short(reference)} is not in base64")
    elif re.match(r"https?://", reference):
        raise UnfitPicture(f"{_short(reference)} is an address: download the picture, and name its file")
    elif BASE64.fullmatch(reference):
        encoded = reference
    else:
        return folder.open(reference)
    check_bytes(len(encoded) * 3 // 4, "it")
    try:
        return plain_picture(b64decode(encoded))
    except binascii.Error as error:
        raise UnfitPicture(f"its base64 text is damaged: {error}") from None


def take_pictures(data: dict[str, Any], columns: Mapping[str, str | None], folder: Folder) -> tuple[ImagePart, ...]:
    """Remove the columns of pictures from a row and return the pictures, checked. BrokenRow: one cannot be used.

    columns: `data.keys`; null for `images` leaves them in the row.
    """
    if columns.get("images", "") is None:
        return ()
    found: list[ImagePart] = []
    for column in COLUMNS:
        value = data.pop(column, None)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for number, one in enumerate(values):
            name = f"{column}[{number}]"
            found.append(_named(name, picture_reference(one, name), folder))
    return tuple(found)


def with_own(messages: Sequence[Message], folder: Folder) -> tuple[Message, ...]:
    """Return messages with the pictures that their own parts name, checked. BrokenRow: one cannot be used."""

    def loaded(part: TextPart | ImagePart, name: str) -> TextPart | ImagePart:
        named = isinstance(part, ImagePart) and part.path and not part.data
        return _named(name, part.path, folder) if named else part

    return tuple(
        one
        if isinstance(one.content, str)
        else replace(one, content=tuple(loaded(part, f"messages[{at}]") for part in one.content))
        for at, one in enumerate(messages)
    )


def with_pictures(messages: Sequence[Message], pictures: Sequence[ImagePart]) -> tuple[Message, ...]:
    """Return messages with the pictures of the row's columns, in order.

    They go to the parts that are places for pictures; without such parts, to `<image>` in texts; without these, before
    the user's first text. BrokenRow: other numbers of places and pictures.
    """
    messages = tuple(messages)
    if pictures and not _num_places(messages):
        messages = tuple(one if one.role in WITHOUT_MARKS else _split(one) for one in messages)
        if not _num_places(messages):
            first = next((number for number, one in enumerate(messages) if one.role == "user"), 0)
            parts = messages[first].content
            parts = (TextPart(parts),) if isinstance(parts, str) else parts
            lead = replace(messages[first], content=(*[ImagePart("")] * len(pictures), *parts))
            messages = (*messages[:first], lead, *messages[first + 1 :])
    if (places := _num_places(messages)) != len(pictures):
        raise BrokenRow(f"has {len(pictures)} pictures in its columns, and {places} places for them in its messages")
    left = iter(pictures)
    filled = tuple(
        one
        if isinstance(one.content, str)
        else replace(one, content=tuple(next(left) if _is_place(part) else part for part in one.content))
        for one in messages
    )
    if (size := sum(len(picture.data) for one in filled for picture in one.pictures)) > MAX_BYTES:
        raise BrokenRow(f"has pictures of {size} bytes, more than {MAX_BYTES} together: make them smaller")
    return filled


def _named(name: str, reference: str, folder: Folder) -> ImagePart:
    try:
        return picture_of(reference, folder)
    except UnfitPicture as error:
        raise BrokenRow(f"`{name}`: {error}") from None


def _is_place(part: TextPart | ImagePart) -> bool:
    return isinstance(part, ImagePart) and not part.path and not part.data


def _num_places(messages: Sequence[Message]) -> int:
    return sum(_is_place(part) for one in messages if not isinstance(one.content, str) for part in one.content)


def _split(message: Message) -> Message:
    """Return a message with a place for each `<image>` of its text."""
    if PICTURE not in message.plain_text:
        return message
    pieces = re.split(f"({PICTURE})", message.plain_text)
    return replace(
        message, content=tuple(ImagePart("") if piece == PICTURE else TextPart(piece) for piece in pieces if piece)
    )


def _short(reference: str) -> str:
    return repr(reference if len(reference) <= 80 else f"{reference[:60]}...")
