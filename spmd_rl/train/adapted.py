"""Checkpoints with adapters only, merged into the model's files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from spmd_rl.base.errors import UserError
from spmd_rl.model.load import Region, WeightFiles
from spmd_rl.model.lora import IN_NF4, MAGNITUDE, PREFIX, SCALING, A, Adapter, B
from spmd_rl.model.stored import Part
from spmd_rl.train.dither import merged
from spmd_rl.train.nf4 import rounded
from spmd_rl.train.state import MODEL, SavedState, TensorSpec, write_safetensors


def adapters_of(saved: SavedState, dtype: torch.dtype = torch.float32) -> dict[str, Adapter]:
    """Return a saved state's adapters in `dtype`, by layer; none if it holds whole weights."""
    if SCALING not in saved.tensors:
        return {}
    head, scaling = MODEL + PREFIX, float(saved.read(SCALING))
    names = [name for name in saved.tensors if name.startswith(head) and name.endswith(A)]
    layers = [name.removeprefix(head).removesuffix(A) for name in names]
    found = {}
    for layer in layers:
        a, b, *magnitude = (
            saved.read(head + layer + kind).to(dtype)
            for kind in (A, B, MAGNITUDE)
            if kind != MAGNITUDE or head + layer + kind in saved.tensors
        )
        found[layer] = Adapter(a, b, scaling, *magnitude)
    return found


class AdaptedFiles(WeightFiles):
    """Weights of a model's directory, merged with a checkpoint's adapters."""

    def __init__(
        self, folder: Path, saved: SavedState, parts: Mapping[str, Sequence[Part]], dtype: torch.dtype
    ) -> None:
        """parts: `stored_parts` of the model. dtype: of computation. UserError if it is another model."""
        super().__init__(folder)
        self._saved, self._dtype = saved, dtype
        self._adapters: dict[str, Adapter] = {}
        self._layers: dict[str, str] = {}
        """Trainer's weight of each layer, by stored name"""
        for layer, adapter in adapters_of(saved, dtype).items():
            weight = f"{layer}.weight"
            stored = (weight, *(part.name for part in parts.get(weight, ())))
            name = next((name for name in stored if name in self.names), None)
            shape = [adapter.b.shape[0], adapter.a.shape[1]]
            if name is None or self.shape(name) != shape:
                has = "has none" if name is None else f"has {self.shape(name)}"
                raise UserError(f"{saved.folder} holds an adapter of {layer}, {shape}; the model in {folder} {has}")
            self._adapters[name], self._layers[name] = adapter, f"{layer}.weight"

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a merged weight."""
        # Weights that were trained in addition to the adapters, such as a value head.
        if MODEL + name in self._saved.tensors:
            return self._saved.read(MODEL + name, region)
        adapter = self._adapters.get(name)
        if adapter is None:
            return super().read(name, region)
        rows, columns = region
        whole_rows = super().read(name, (rows, slice(0, self.shape(name)[1]))).to(self._dtype)
        if IN_NF4 in self._saved.tensors:
            whole_rows = rounded(whole_rows)
        return merged(adapter, whole_rows, self._layers[name], self.shape(name)[0], rows)[:, columns]


def write_adapter(saved: SavedState, model_dir: Path, path: Path, dtype: torch.dtype) -> None:
    """Write adapters into the folder `path`, as peft's `save_pretrained` does."""
    adapters, head = adapters_of(saved, dtype), len(MODEL)
    one = next(iter(adapters.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": one.a.shape[0],
        # peft computes alpha / r, so alpha is chosen to give this scaling for either kind of scaling in training.
        "lora_alpha": one.scaling * one.a.shape[0],
        "target_modules": sorted({layer.rpartition(".")[2] for layer in adapters}),
        "use_dora": one.magnitude is not None,
        "inference_mode": True,
    }
    tensors = {name[head:]: saved.read(name).to(dtype) for name in saved.tensors if name.startswith(MODEL + PREFIX)}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    write_safetensors(path / "adapter_model.safetensors", specs, tensors.items(), {"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
