"""Drawn pictures of one to five coloured shapes, and questions about them, as rows of JSON lines with PNG files.

    python -m tests.drawn_shapes FOLDER 2000 0

writes FOLDER/train.jsonl, a prompt and its right answer a row, FOLDER/train_taught.jsonl, the same as chats, and
FOLDER/train/*.png.
"""

import json
import sys
from pathlib import Path
from random import Random

CELL, CELLS = 28, 4
"""Pixels of a cell's side, and cells of a picture's side"""
COLOURS = {"red": (220, 40, 40), "blue": (40, 70, 220)}
SHAPES = ("circle", "square", "triangle")
Scene = list[tuple[str, str, int, int, int]]
"""Shapes of a picture: name, colour, centre in pixels and radius"""


def write_shapes(
    folder: Path | str, count: int, seed: int, name: str = "train", kinds: str = "count compare", cells: int = CELLS
) -> Path:
    """Write `count` rows with their pictures and return the path of the prompts, `folder`/`name`.jsonl.

    kinds: kinds of questions, separated by spaces. cells: of a picture's side.
    """
    folder = Path(folder)
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows, taught = [], []
    for number in range(count):
        rng = Random(f"{seed} {number}")
        shown = scene(rng, cells)
        question, answer = ask(shown, rng, rng.choice(kinds.split()))
        file = f"{name}/{number}.png"
        draw(shown, cells).save(folder / file)
        # The row names its file relative to itself.
        rows.append({"question": f"<image>{question}", "images": [file], "answer": answer})
        asked = [{"type": "image"}, {"type": "text", "text": question}]
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        taught.append({"messages": said, "images": [file]})
    for stem, lines in ((name, rows), (f"{name}_taught", taught)):
        (folder / f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / f"{name}.jsonl"


def scene(rng: Random, cells: int = CELLS) -> Scene:
    """Return one to five shapes in different cells of a grid, a little off the centres of their cells."""
    places = rng.sample(range(cells * cells), rng.randint(1, 5))
    out = []
    for place in sorted(places):
        row, column = divmod(place, cells)
        x, y = (CELL * at + CELL // 2 + rng.randint(-3, 3) for at in (column, row))
        out.append((rng.choice(SHAPES), rng.choice(list(COLOURS)), x, y, rng.randint(8, 11)))
    return out


def ask(shown: Scene, rng: Random, kind: str) -> tuple[str, str]:
    """Return a question about a scene and its answer: a number, or `red`, `blue` or `equal`."""
    if kind == "compare":
        red, blue = (sum(colour == wanted for _, colour, *_ in shown) for wanted in COLOURS)
        return "Are there more red or blue?", "equal" if red == blue else "red" if red > blue else "blue"
    shape = rng.choice(SHAPES)
    return f"How many {shape}s?", str(sum(name == shape for name, *_ in shown))


def draw(shown: Scene, cells: int = CELLS) -> "Image.Image":  # noqa: F821
    """Return the picture of a scene, RGB, 28 pixels a cell."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (CELL * cells, CELL * cells), (245, 245, 245))
    pen = ImageDraw.Draw(picture)
    for name, colour, x, y, radius in shown:
        box = (x - radius, y - radius, x + radius, y + radius)
        if name == "circle":
            pen.ellipse(box, COLOURS[colour])
        elif name == "square":
            pen.rectangle(box, COLOURS[colour])
        else:
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], COLOURS[colour])
    return picture


if __name__ == "__main__":
    write_shapes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6], *map(int, sys.argv[6:]))
