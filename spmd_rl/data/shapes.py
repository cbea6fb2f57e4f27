"""The prompts of the embedded diffusion model: `data.train=shapes:squares` asks for one to four squares of a colour."""

from collections.abc import Iterator

from spmd_rl.base.errors import UserError
from spmd_rl.base.shapes import COLOURS, COUNTS, words_of
from spmd_rl.data.rows import Record

DOMAIN, TASK = "shapes", "squares"


def generate(task: str, key: str) -> Iterator[Record]:
    """Yield the rows of a task, with count and colour as the ground truth. key: the setting that a `UserError`
    names.
    """
    if task != TASK:
        raise UserError(f"{key}: no shapes {task!r}; known: {TASK}")
    for count in range(1, 1 + len(COUNTS)):
        for colour in COLOURS:
            yield Record(f"shapes:{task}", words_of(count, colour), f"{count} {colour}", DOMAIN)
