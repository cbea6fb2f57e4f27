"""`stored_model`: a model directory as a module to shard, with weights read late."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.model.build import build_model, build_on_meta, model_directory, tower_names
from spmd_rl.model.load import Region, RegionReader, WeightFiles, load_weights, mismatch
from spmd_rl.model.lora import SCALING
from spmd_rl.model.stored import stored_parts
from spmd_rl.model.value_head import ValueHeadFiles, head_weights, with_value_head
from spmd_rl.train.adapted import AdaptedFiles
from spmd_rl.train.state import MODEL, SavedState


class Stored(NamedTuple):
    """A model before sharding, and readers of its weights."""

    model: torch.nn.Module
    load: Callable[..., None] | None
    """Function that fills this rank's shards; None for a whole model"""
    num_bytes: Callable[[], int]
    """Function that returns the bytes read so far"""
    reader: Callable[..., RegionReader] | None = None
    """Function from the model on the meta device to a reader of weight regions; None for a whole model"""
    files: WeightFiles | None = None
    """Stored tensors, for a backend that uses only the model's sizes"""


Source = Callable[..., Stored]


def stored_model(role: RoleConfig, dtype: torch.dtype, on_progress: Callable[[], object]) -> Stored:
    """Return a role's model, a critic's with a value head; on the meta device if shards can be read separately."""
    folder, is_critic = model_directory(role.model), role.name == "critic"
    model, files = build_on_meta(folder, dtype, role.trust_remote_code), WeightFiles(folder)
    if is_critic:
        files = ValueHeadFiles(files, head_weights(with_value_head(model, role.value_bias)))
    load, reader = partial(load_weights, files=files, on_progress=on_progress), partial(RegionReader, files=files)
    # transformers renames and merges some weights on loading (experts, for one), so regions cannot be read by name.
    if mismatch(model, files):
        whole = build_model(folder, dtype, "cpu", role.trust_remote_code, files.head if is_critic else ())
        model, load, reader = (files.fill(whole, role.value_bias) if is_critic else whole), None, None
    return Stored(model, load, lambda: files.bytes_read, reader, files)


class CheckpointFiles(WeightFiles):
    """Weights of a checkpoint's policy, and from the model's directory what it lacks."""

    def __init__(self, folder: Path, saved: SavedState, untrained: Collection[str]) -> None:
        """untrained: stored names of saved buffers, and of weights that may be frozen."""
        super().__init__(folder)
        self._saved, prefix = saved, len(MODEL)
        self._trained = {name[prefix:]: spec for name, spec in saved.tensors.items() if name.startswith(MODEL)}
        # Not all others: a stored weight may be tied to a trained one, and is then stale.
        self._names = self._trained.keys() | (super().names & untrained)

    @property
    def names(self) -> Collection[str]:
        """Names of all stored tensors."""
        return self._names

    def file_of(self, name: str) -> Path:
        """Return the file of a stored tensor."""
        return self._saved.folder if name in self._trained else super().file_of(name)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a stored tensor."""
        return list(self._trained[name].size) if name in self._trained else super().shape(name)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a stored tensor."""
        return self._saved.read(MODEL + name, region) if name in self._trained else super().read(name, region)


def checkpoint_model(
    checkpoint: str, role: RoleConfig, dtype: torch.dtype, on_progress: Callable[[], object]
) -> Stored:
    """Return `stored_model` with the policy of a verified checkpoint of any layout. UserError, before reading, if it is
    another model's."""
    folder = model_directory(role.model)
    model, saved = build_on_meta(folder, dtype, role.trust_remote_code), SavedState.open(Path(checkpoint) / "policy")
    parts = stored_parts(model)
    others = {name for name, _ in model.named_buffers()} | tower_names(model)
    untrained = {part.name for name in others for part in parts.get(name, ())}
    has_adapters = SCALING in saved.tensors
    files = AdaptedFiles(folder, saved, parts, dtype) if has_adapters else CheckpointFiles(folder, saved, untrained)
    load = partial(load_weights, files=files, on_progress=on_progress)
    return Stored(model, load, lambda: files.bytes_read, partial(RegionReader, files=files), files)
