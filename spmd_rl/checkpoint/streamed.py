"""Safetensors files of known names, shapes and dtypes, written one tensor at a time.

The library's own `save_file` wants all tensors of a file at once. The bytes are the same as its own: a head in JSON,
then the tensors, those of wider numbers first, by name.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.checkpoint.export import begins_file, file_name, write_index

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What safetensors calls them, in the order in which it writes them."""
ALIGNMENT = 8
"""Of the first tensor's place in the file, in bytes."""


class Shape(NamedTuple):
    """What is known of a tensor before it is there."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its contents."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


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
        _write_file(path / file_name(number, len(files)), inside, mine)
    write_index(path, [list(inside) for inside in files], sum(shape.num_bytes for shape in shapes.values()))


def _write_file(path: Path, shapes: Mapping[str, Shape], tensors: Iterable[tuple[str, Tensor]]) -> None:
    order = sorted(shapes, key=lambda name: (list(DTYPES).index(shapes[name].dtype), name))
    head, begins, end = {"__metadata__": {"format": "pt"}}, {}, 0
    for name in order:
        begins[name], end = end, end + shapes[name].num_bytes
        dtype, size = DTYPES[shapes[name].dtype], list(shapes[name].size)
        head[name] = {"dtype": dtype, "shape": size, "data_offsets": [begins[name], end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (given, tensor) in zip(shapes, tensors, strict=False):
            assert given == name and (tensor.dtype, tuple(tensor.shape)) == shapes[name], (given, name)
            file.seek(8 + len(text) + begins[name])
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
