"""`Denoiser`: the trained transformers of a diffusion model as one module; `FlowModel`: the interface of all models."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmd_rl.model.load import WeightFiles
from spmd_rl.model.size import ModelSize

Given = dict[str, Tensor]
"""Conditions of a velocity by name: encoded prompts, [B, ...] each"""
Call = Callable[[nn.Module, Tensor, Tensor, Given], Tensor]
"""Call of a transformer: module, latents, noise levels [B] in 0..1 (float32), conditions -> velocity"""
OnDevice = AbstractContextManager[None]
"""Context with frozen modules on the device"""


@dataclass(frozen=True)
class DenoiserConfig:
    """The facts about a model that language models have in `config.json`."""

    name_or_path: str
    hidden_size: int

    def get_text_config(self) -> "DenoiserConfig":
        """Return itself, like a transformers configuration."""
        return self


class Denoiser(nn.Module):
    """One transformer, or two experts by noise level, called as one module; backends shard it by its blocks."""

    _keys_to_ignore_on_load_unexpected = None
    casts_inputs = False
    """False: noise levels and rotary tables stay float32 where weights are narrower"""

    def __init__(
        self,
        experts: Mapping[str, nn.Module],
        blocks: Collection[str],
        call: Call,
        config: DenoiserConfig,
        boundary: float,
    ) -> None:
        """Take the experts by folder, from high noise to low; their blocks' classes; and the first one's least noise
        level."""
        super().__init__()
        self._no_split_modules, self.config = list(blocks), config
        self._call, self._boundary, self._names = call, boundary, list(experts)
        for name, module in experts.items():
            self.add_module(name, module)

    def forward(self, latents: Tensor, level: float, given: Given) -> Tensor:
        """Return the velocity at one noise level, float32, shaped like `latents`."""
        expert = self.get_submodule(self._names[0 if level >= self._boundary else -1])
        # From the level as a number: a tensor among the arguments would be rounded to the compute dtype.
        levels = torch.full((len(latents),), level, device=latents.device)
        return self._call(expert, latents, levels, given).float()

    def get_output_embeddings(self) -> None:
        """Return None: there is no vocabulary."""

    def gradient_checkpointing_enable(self, settings: Mapping[str, Any]) -> None:
        """Recompute each block in the backward pass, with arguments of `torch.utils.checkpoint`."""
        for module in self.modules():
            if type(module).__name__ in self._no_split_modules:
                module.forward = partial(checkpoint, module.forward, **settings)

    @property
    def size(self) -> ModelSize:
        """Counts of its weights; vocabulary and cache are 0."""
        count = sum(p.numel() for p in self.parameters())
        return ModelSize(parameters=count, read=count, per_token=count, head=0, kv=0, attention=0)


class FlowModel(Protocol):
    """A diffusion model: how to build its denoiser, to encode prompts and to decode latents."""

    folder: Path
    latent_shape: tuple[int, ...]
    """Shape of one picture's latent."""
    shift: float
    """Shift of its noise levels in training."""
    stem: str
    """Name of weight files without ending, in `experts`' folders if it has several files of parts."""

    def build(self, dtype: torch.dtype) -> Denoiser:
        """Return the denoiser without weights, on the meta device."""
        ...

    def files(self) -> WeightFiles:
        """Return the stored weights of the denoiser, by its names."""
        ...

    def encoding(self, device: torch.device, dtype: torch.dtype) -> OnDevice:
        """Return a context with text encoders on the device."""
        ...

    def encode(self, prompts: Sequence[str], device: torch.device, dtype: torch.dtype) -> Given:
        """Return the conditions of prompts, inside `encoding`; an empty prompt is none."""
        ...

    def without_weights(self, dtype: torch.dtype) -> dict[str, list[nn.Module]]:
        """Use `encoders` and a `decoder` on the meta device, from configuration files alone, for a plan; return
        them."""
        ...

    def decoding(self, device: torch.device) -> OnDevice:
        """Return a context with the decoder on the device."""
        ...

    def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
        """Return pictures, float32 [B, 3, H, W] or [B, F, 3, H, W], about 0..1, with gradient; inside `decoding`.

        frames: of a video the least number of first ones to decode; None: all.
        """
        ...


@contextmanager
def on_device(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Hold frozen modules on the device inside."""
    for module in modules:
        module.to(device)
    yield
    for module in modules:
        module.to("cpu")
