"""Drawings of grid worlds: a picture of a board, for policies that see."""

from collections.abc import Mapping, Sequence
from io import BytesIO

CELL = 28
"""Pixels of a cell's side: one token of Qwen2.5-VL"""

Look = tuple[str, str, str]
"""Colour of a cell, the shapes in it (`disc`, `box`, `ring`), and their colour"""


def drawn(letters: Sequence[str], width: int, looks: Mapping[str, Look]) -> bytes:
    """Return the PNG of a board, whose cells come row by row. looks: by letter."""
    # Drawn boards alone need Pillow.
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (CELL * width, CELL * (len(letters) // width)))
    pen = ImageDraw.Draw(picture)
    for number, letter in enumerate(letters):
        row, column = divmod(number, width)
        ground, shape, colour = looks[letter]
        x, y = CELL * column, CELL * row
        pen.rectangle((x, y, x + CELL - 1, y + CELL - 1), ground, "#8a8f98")
        if "disc" in shape:
            pen.ellipse((x + 5, y + 5, x + CELL - 6, y + CELL - 6), colour)
        if "box" in shape:
            pen.rectangle((x + 4, y + 4, x + CELL - 5, y + CELL - 5), colour)
        if "ring" in shape:
            pen.ellipse((x + 8, y + 8, x + CELL - 9, y + CELL - 9), None, "#c62828", 3)
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
