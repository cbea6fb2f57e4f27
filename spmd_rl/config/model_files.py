"""What a model directory says of its model without loading it: the number of weights and the shape. Torch-free."""

import errno
import json
import os
from math import prod
from pathlib import Path
from typing import Any

from spmd_rl.config.run_identity import saved_config
from spmd_rl.errors import UserError, one_line

MAX_HEAD_BYTES = 100_000_000
"""As the safetensors library has it"""
WRITTEN_BYTES = 2**20
"""A file behind whose first mebibyte nothing was ever written holds no weights, whatever its size"""


def trained_model(key: str, name: str) -> tuple[str, str | None]:
    """Return the model and the checkpoint that the path of a checkpoint or a run stands for; else the name and None.

    Of a run it is the newest checkpoint. The model is what was trained. UserError if that is not known.
    """
    folder = Path(name)
    if (folder / "config.yaml").is_file() and not (folder / "manifest.json").is_file():
        found = sorted(folder.glob("checkpoints/step-*/manifest.json"), key=lambda path: int(path.parent.name[5:]))
        if not found:
            raise UserError(f"{key}: {name} is a run without a checkpoint")
        folder = found[-1].parent
    if not (folder / "manifest.json").is_file():
        return name, None
    settings = saved_config(folder.parents[1]) if len(folder.parents) > 1 else None
    if settings is None:
        way = f"python -m spmd_rl convert to-hf {folder} OUT --model MODEL makes a model of it: {key}=OUT"
        raise UserError(f"{key}: {folder} lies in no run's directory; {way}")
    return settings["policy"]["model"], str(folder)


def check_weights(key: str, folder: Path) -> None:
    """Raise a `UserError` that names the setting `key` if a safetensors file of a directory is cut off or damaged."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensor_table(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: {path} is damaged: {one_line(str(error))}; download or copy it again") from None


def tensor_table(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the head of a safetensors file says of each tensor: `dtype`, `shape`, `data_offsets`.

    ValueError if the file is not as long as its head says, or is no such file; OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEAD_BYTES):
            raise ValueError(f"no head of {length} bytes in a file of {size}")
        try:
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            ends = {_end(tensor) for tensor in table.values()}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise ValueError("its head is no table of tensors") from None
        if (data := max(ends, default=0)) != size - 8 - length:
            raise ValueError(f"its tensors take {data} bytes, of which it has {size - 8 - length}")
        if size > WRITTEN_BYTES and not _is_written(file.fileno(), size):
            raise ValueError("nothing was ever written behind its first mebibyte")
    return table


def _end(tensor: dict[str, Any]) -> int:
    """Where a tensor ends. KeyError, TypeError or ValueError if its entry is not one."""
    begin, end = tensor["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (begin, end - begin, *tensor["shape"])):
        raise ValueError
    return end


def _is_written(file: int, size: int) -> bool:
    """Whether anything but a hole lies behind the first mebibyte; True where the file system does not know."""
    try:
        return os.lseek(file, WRITTEN_BYTES, os.SEEK_DATA) < size
    except OSError as error:
        return error.errno != errno.ENXIO


def num_weights(folder: Path) -> int:
    """Return the number of weights in the safetensors files of a directory, from their heads; 0 without such files."""
    return sum(prod(t["shape"]) for path in folder.glob("*.safetensors") for t in tensor_table(path).values())


def describe_model(folder: Path) -> str:
    """Describe a model in a few words. Example: `135 M weights, llama, 30 layers of width 576`.

    A folder whose weights are not there yet is one that is downloaded at the start.
    """
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config") or {}
    count = num_weights(folder)
    parts = [f"{count / 1e9:.2f} B weights" if count >= 1e9 else f"{count / 1e6:.3g} M weights"]
    if not count:
        parts = ["weights are still to be downloaded"]
    if kind := config.get("model_type"):
        parts.append(str(kind))
    if layers := config.get("num_hidden_layers"):
        parts.append(f"{layers} layers of width {config.get('hidden_size')}")
    return ", ".join(parts)
