"""`stored_model`: a model directory as a module that a backend shards, weights read as late as can be."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from spmd_rl.model.build import build_model, build_on_meta, model_directory
from spmd_rl.model.load import RegionReader, WeightFiles, load_weights, mismatch


class Stored(NamedTuple):
    """A model before it is sharded, and how its weights are read."""

    model: torch.nn.Module
    load: Callable[..., None] | None
    """Fills this rank's shards; None of a model that is whole."""
    num_bytes: Callable[[], int]
    """Bytes read so far."""
    reader: Callable[..., RegionReader] | None = None
    """Called with the model, on the meta device: how any part of its weights is read; None of one that is whole."""


Source = Callable[..., Stored]
"""Called like `stored_model`."""


def stored_model(path: str, dtype: torch.dtype, remote_code: bool, on_progress: Callable[[], object]) -> Stored:
    """The model of a directory or a name of the hub; on the meta device, where its shards can be read one by one."""
    folder = model_directory(path)
    model, files = build_on_meta(folder, dtype, remote_code), WeightFiles(folder)
    load, reader = partial(load_weights, files=files, on_progress=on_progress), partial(RegionReader, files=files)
    if mismatch(model, files):  # transformers renames and merges some weights as it loads them: experts, for one
        model, load, reader = build_model(folder, dtype, "cpu", remote_code), None, None
    return Stored(model, load, lambda: files.bytes_read, reader)


def materialize(model: torch.nn.Module, device: torch.device) -> None:
    """Give the shards of a model on the meta device memory on `device`; buffers keep what was computed for them."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # `to_empty` would forget them
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
