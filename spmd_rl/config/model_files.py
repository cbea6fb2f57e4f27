"""Facts about a model from its directory: number of weights, shape. Torch-free."""

import errno
import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.config.run_identity import saved_config

# If only holes follow this first part of a file, it has no weights.
WRITTEN_BYTES = 2**20


def trained_model(key: str, name: str) -> tuple[str, str | None]:
    """Return model and checkpoint for the path of a checkpoint or run (its newest); for other names the name and None.

    The model is the one that was trained. UserError if unknown.
    """
    folder = Path(name).expanduser()
    if (folder / "config.yaml").is_file() and not (folder / "manifest.json").is_file():
        found = sorted(folder.glob("checkpoints/step-*/manifest.json"), key=lambda path: int(path.parent.name[5:]))
        if not found:
            raise UserError(f"{key}: {name} is a run without a checkpoint")
        folder = found[-1].parent
    if not (folder / "manifest.json").is_file():
        return name, None
    settings = saved_config(folder.parents[1]) if len(folder.parents) > 1 else None
    if settings is None:
        way = f"python -m spmd_rl convert to-hf {folder} OUT --model MODEL converts it; then set {key}=OUT"
        raise UserError(f"{key}: {folder} is not in a run's directory; {way}")
    return settings["policy"]["model"], str(folder)


def exported_model(key: str, name: str) -> str:
    """Return `hf/` of the checkpoint that `name` names, or of its run's newest; other names unchanged.

    UserError without `hf/`.
    """
    checkpoint = trained_model(key, name)[1]
    if checkpoint is None:
        return name
    exported = Path(checkpoint) / "hf"
    if not exported.is_dir():
        way = f"python -m spmd_rl convert to-hf {checkpoint} OUT converts it; then set {key}=OUT"
        raise UserError(f"{key}: {checkpoint} has no hf/, as checkpoint.export_hf was false; {way}")
    return str(exported)


def check_weights(key: str, folder: Path) -> None:
    """Raise a `UserError`, naming the setting `key`, if a safetensors file is cut off or damaged."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            # Opening a file checks its header against its size, which finds interrupted downloads.
            list(shapes(path))
            fault = "" if _is_written(path) else "it has only zeros after its first MiB"
        except (OSError, SafetensorError) as error:
            fault = one_line(str(error))
        if fault:
            raise UserError(f"{key}: {path} is damaged: {fault}; download or copy it again")


def shapes(path: Path) -> Iterator[list[int]]:
    """Yield the shape of each tensor of a safetensors file, from its header.

    SafetensorError if cut off or of another format; OSError if unreadable.
    """
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            yield file.get_slice(name).get_shape()


def _is_written(path: Path) -> bool:
    # An interrupted download with preallocation leaves a file of full size that is mostly a hole.
    if (size := path.stat().st_size) <= WRITTEN_BYTES:
        return True
    try:
        with open(path, "rb") as file:
            return os.lseek(file.fileno(), WRITTEN_BYTES, os.SEEK_DATA) < size
    except OSError as error:
        return error.errno != errno.ENXIO


def num_weights(folder: Path) -> int:
    """Return the number of weights in a directory's safetensors files, from headers."""
    return sum(prod(shape) for path in folder.glob("*.safetensors") for shape in shapes(path))


def describe_model(folder: Path) -> str:
    """Describe a model in a few words: `135 M weights, llama, 30 layers of width 576`."""
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = (config.get("text_config") or {}) | config
    count = num_weights(folder)
    parts = [f"{count / 1e9:.2f} B weights" if count >= 1e9 else f"{count / 1e6:.3g} M weights"]
    if not count:
        parts = ["weights are still to be downloaded"]
    if kind := config.get("model_type"):
        parts.append(str(kind))
    if layers := config.get("num_hidden_layers"):
        parts.append(f"{layers} layers of width {config.get('hidden_size')}")
    return ", ".join(parts)
