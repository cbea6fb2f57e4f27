"""Safetensors files of known names, shapes and dtypes, written one tensor at a time, with their index."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from spmd_rl.checkpoint.export import begins_file, file_name, write_index
from spmd_rl.train.state import TensorSpec, write_safetensors


def write_streamed(
    specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], path: Path, max_bytes: int
) -> None:
    """Write `tensors`, in the order of `specs`, into files of at most `max_bytes` each, and their index.

    `path` exists. A larger tensor gets a separate file. OSError from the file system.
    """
    files: list[dict[str, TensorSpec]] = [{}]
    held = 0
    for name, spec in specs.items():
        if begins_file(held, spec.num_bytes, max_bytes):
            files.append({})
            held = 0
        files[-1][name] = spec
        held += spec.num_bytes
    mine = iter(tensors)
    for number, inside in enumerate(files, start=1):
        write_safetensors(path / file_name(number, len(files)), inside, mine, {"format": "pt"})
    write_index(path, [list(inside) for inside in files], sum(spec.num_bytes for spec in specs.values()))
