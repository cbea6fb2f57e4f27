"""Problems made by reasoning-gym: `data.train=reasoning_gym:<task>`, judged by the task's own scorer.

Each row carries in `extra` what the scorer needs: {"task": name, "entry": the generated item as plain JSON}.
Another seed is *not* another set of problems (item i of seed s is item i+1 of seed s-1), which is why held-out problems
are told by content. Left out: curricula, and the two tasks whose scorer does not survive plain JSON (arc_agi, rearc).
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from spmd_rl.data.rows import Row
from spmd_rl.errors import UserError

DOMAIN = "reasoning_gym"
PREFIX = "reasoning_gym:"


def generate(task: str, size: int, seed: int, args: Mapping[str, Any], key: str) -> Iterator[Row]:
    """`size` rows of a task, duplicates included. `key`: the setting to name in a UserError."""
    dataset = _create(task, size, seed, args, key)
    for index in range(size):
        item = dataset[index]
        entry = plain(item)
        if index == 0:
            _check_scorer(dataset, task, item, entry, key)
        truth = "" if item["answer"] is None else str(item["answer"])  # None: any answer that fits is right
        yield Row(f"{PREFIX}{task}[{index}]", item["question"], truth, DOMAIN, None, {"task": task, "entry": entry})


def plain(value: Any) -> Any:
    """The same as JSON values: numpy's scalars and arrays, tuples and sets become Python's numbers and lists.

    Whole numbers beyond 64 bits, which msgpack cannot carry, become text, and so does anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(part) for part in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _create(task: str, size: int, seed: int, args: Mapping[str, Any], key: str) -> Any:
    import reasoning_gym  # a second, and only when asked for
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = ", ".join(get_close_matches(task, DATASETS, n=4, cutoff=0.4)) or "none is near"
        raise UserError(f"{key}: reasoning-gym has no task {task!r}; nearest: {near}")
    known = {f.name for f in fields(DATASETS[task][1])} - {"size", "seed"}
    for name in args:
        if name in ("size", "seed"):
            raise UserError(f"data.args.{name}: set data.{name} instead")
        if name not in known:
            raise UserError(f"data.args.{name}: {task} has no such parameter; it has {', '.join(sorted(known))}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **args)
    except (AssertionError, TypeError, ValueError) as error:  # its own checks are asserts
        raise UserError(f"data.args: {task} refuses {dict(args)}: {error or 'a failed check of its own'}") from error


def _check_scorer(dataset: Any, task: str, item: dict[str, Any], entry: dict[str, Any], key: str) -> None:
    """A scorer that compares tuples would call every right answer wrong once its entry has been plain JSON."""
    if dataset.score_answer(item["answer"], item) != dataset.score_answer(item["answer"], entry):
        raise UserError(f"{key}: {task} is not supported: its scorer cannot judge from plain JSON")
