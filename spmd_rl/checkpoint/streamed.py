"""Safetensors files of known names, shapes and dtypes, written one tensor at a time, with their index."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from spmd_rl.checkpoint.export import begins_file, file_name, write_index
from spmd_rl.train.state import Shape, write_safetensors


def write_streamed(
    shapes: Mapping[str, Shape], tensors: Iterable[tuple[str, Tensor]], path: Path, max_bytes: int
) -> None:
    """Write `tensors`, which come in the order of `shapes`, into files of at most `max_bytes` each, and their index.

    `path` exists. A tensor that is larger has a file of its own. OSError as the file system gives it.
    """
    files: list[dict[str, Shape]] = [{}]
    held = 0
    for name, shape in shapes.items():
        if begins_file(held, shape.num_bytes, max_bytes):
            files.append({})
            held = 0
        files[-1][name] = shape
        held += shape.num_bytes
    mine = iter(tensors)
    for number, inside in enumerate(files, start=1):
        write_safetensors(path / file_name(number, len(files)), inside, mine, {"format": "pt"})
    write_index(path, [list(inside) for inside in files], sum(shape.num_bytes for shape in shapes.values()))
