"""Pipelines of diffusers as a `FlowModel`: Stable Diffusion 3 and Wan 2.1 / 2.2 (text to video).

Text encoders and the VAE are frozen and whole on every rank; each is on the device only in its phase. Latents are
decoded one by one (`enable_slicing`). Weights are read from disk alone, as safetensors.
"""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from spmd_rl.base.errors import UserError
from spmd_rl.model.build import parameters_on_meta
from spmd_rl.model.diffusion.base import Denoiser, DenoiserConfig, Given, OnDevice, on_device
from spmd_rl.model.load import WeightFiles

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
Sizes = tuple[int | None, ...]
"""Height, width and frames; None: the model's own"""


class DiffusersModel(ABC):
    """The common part of all pipelines."""

    stem = "diffusion_pytorch_model"
    pipeline_class: type
    transformer: type
    vae_class: type
    latent_shape: tuple[int, ...]
    pipeline: Any
    """Pipeline with tokenizers and text encoders alone"""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        """Read the configuration files. UserError if one is missing or a size cannot be drawn."""
        self.folder, self.pipeline = folder, None
        self.index = _json(folder / "model_index.json")
        self.names = [name for name in ("transformer", "transformer_2") if (folder / name).is_dir()]
        self.configs = {name: _json(folder / name / "config.json") for name in self.names}
        self.vae_config = _json(folder / "vae" / "config.json")
        scheduler = _json(folder / "scheduler" / "scheduler_config.json")
        self.shift = float(scheduler.get("flow_shift") or scheduler.get("shift") or 1.0)
        self.latent_shape = self.shape_of(*sizes)
        odd = next((size for size in sizes[:2] if size and size % 16), None)
        if odd:
            raise UserError(f"pictures.height, pictures.width: {odd} is no multiple of 16")

    @abstractmethod
    def shape_of(self, height: int | None, width: int | None, frames: int | None) -> tuple[int, ...]:
        """Return the shape of a latent."""

    @abstractmethod
    def call(self, module: nn.Module, latents: Tensor, levels: Tensor, given: Given) -> Tensor:
        """Return the velocity of a transformer."""

    @abstractmethod
    def conditions(self, pipeline: Any, prompts: list[str], device: torch.device) -> Given:
        """Return the encoded prompts."""

    @abstractmethod
    def pixels(self, latents: Tensor) -> Tensor:
        """Return decoded pictures in -1..1."""

    def build(self, dtype: torch.dtype) -> Denoiser:
        """See `FlowModel`."""
        with parameters_on_meta():
            experts = {name: self.transformer.from_config(config).to(dtype) for name, config in self.configs.items()}
        first = self.configs["transformer"]
        facts = DenoiserConfig(str(self.folder), first["num_attention_heads"] * first["attention_head_dim"])
        boundary = float(self.index.get("boundary_ratio") or 0.0)
        return Denoiser(experts, self.transformer._no_split_modules, self.call, facts, boundary).eval()

    def files(self) -> WeightFiles:
        """See `FlowModel`."""
        return WeightFiles(self.folder, self.stem, self.names)

    def encoding(self, device: torch.device, dtype: torch.dtype) -> OnDevice:
        """Return a context with the text encoders on the device, see `FlowModel`."""
        if self.pipeline is None:
            without = {name: None for name in (*self.names, "vae") if name in self.index}
            self.pipeline = self._loaded(self.pipeline_class, self.folder, dtype=dtype, **without)
        return on_device([found for name in ENCODERS if (found := getattr(self.pipeline, name, None))], device)

    def encode(self, prompts: Sequence[str], device: torch.device, dtype: torch.dtype) -> Given:
        """Return the conditions of prompts, see `FlowModel`."""
        with torch.no_grad():
            found = self.conditions(self.pipeline, list(prompts), device)
            return {name: tensor.to(dtype) for name, tensor in found.items()}

    def without_weights(self, dtype: torch.dtype) -> dict[str, list[nn.Module]]:
        """Use encoders and a decoder without weights, see `FlowModel`."""
        encoders = {name: AutoConfig.from_pretrained(self.folder / name) for name in ENCODERS if name in self.index}
        with parameters_on_meta():
            self.vae = self.vae_class.from_config(self.vae_config).eval().requires_grad_(False)
            for name, config in encoders.items():
                encoder = getattr(transformers, self.index[name][1])(config)
                encoders[name] = encoder.to(dtype).eval().requires_grad_(False)
        self.vae.enable_slicing()
        tokenizers = {name: PlannedTokens() for name in self.index if name.startswith("tokenizer")}
        known = dict.fromkeys(inspect.signature(self.pipeline_class).parameters)
        self.pipeline = self.pipeline_class(**{**known, **encoders, **tokenizers})
        return {"encoders": list(encoders.values()), "decoder": [self.vae]}

    @cached_property
    def vae(self) -> Any:
        """Decoder of latents, in float32."""
        vae = self._loaded(self.vae_class, self.folder / "vae").eval().requires_grad_(False)
        vae.enable_slicing()
        return vae

    def _loaded(self, kind: Any, folder: Path, **more: Any) -> Any:
        try:
            return kind.from_pretrained(folder, use_safetensors=True, local_files_only=True, **more)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"policy.model: {folder} does not load: {str(error).splitlines()[0]}") from error

    def decoding(self, device: torch.device) -> OnDevice:
        """Return a context with the VAE on the device, see `FlowModel`."""
        return on_device([self.vae], device)

    def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
        """Return pictures in 0..1, see `FlowModel`."""
        # The decoders of videos are causal: later latents do not change the first frames.
        latents = latents if frames is None else latents[:, :, : (frames - 1) // 4 + 1]
        return (self.pixels(latents) + 1) / 2


class StableDiffusion3(DiffusersModel):
    """Pictures by Stable Diffusion 3 and 3.5."""

    pipeline_class = diffusers.StableDiffusion3Pipeline
    transformer, vae_class = diffusers.SD3Transformer2DModel, diffusers.AutoencoderKL

    def shape_of(self, height: int | None, width: int | None, frames: int | None) -> tuple[int, ...]:
        """Return [channels, height / 8, width / 8]."""
        own, factor = self.configs["transformer"]["sample_size"], 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        if frames is not None:
            raise UserError("pictures.frames: this model draws pictures, not videos; leave it out")
        size = (side // factor if side else own for side in (height, width))
        return (self.configs["transformer"]["in_channels"], *size)

    def call(self, module: nn.Module, latents: Tensor, levels: Tensor, given: Given) -> Tensor:
        """Return the velocity, see `DiffusersModel`."""
        texts = given["prompt"]
        return module(latents.to(texts), texts, given["pooled"], 1000 * levels, return_dict=False)[0]

    def conditions(self, pipeline: Any, prompts: list[str], device: torch.device) -> Given:
        """Return the sequence of all text encoders and the pooled one."""
        args = {"prompt_2": None, "prompt_3": None, "device": device, "do_classifier_free_guidance": False}
        embeds, _, pooled, _ = pipeline.encode_prompt(prompts, **args)
        return {"prompt": embeds, "pooled": pooled}

    def pixels(self, latents: Tensor) -> Tensor:
        """Return decoded pictures, [B, 3, H, W]."""
        config = self.vae.config
        return self.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0), return_dict=False)[0]


class Wan(DiffusersModel):
    """Videos by Wan 2.1 (one transformer) and Wan 2.2 (two experts by noise level)."""

    pipeline_class = diffusers.WanPipeline
    transformer, vae_class = diffusers.WanTransformer3DModel, diffusers.AutoencoderKLWan

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        """Read the configuration files. UserError for Wan's pictures to video, whose noise levels differ by token."""
        super().__init__(folder, sizes)
        if self.index.get("expand_timesteps"):
            raise UserError(f"policy.model: {folder} has noise levels by token (expand_timesteps): not supported")

    def shape_of(self, height: int | None, width: int | None, frames: int | None) -> tuple[int, ...]:
        """Return [channels, (frames - 1) / 4 + 1, height / 8, width / 8]."""
        channels = self.configs["transformer"]["in_channels"]
        return (channels, ((frames or 81) - 1) // 4 + 1, (height or 480) // 8, (width or 832) // 8)

    def call(self, module: nn.Module, latents: Tensor, levels: Tensor, given: Given) -> Tensor:
        """Return the velocity, see `DiffusersModel`."""
        texts = given["prompt"]
        return module(latents.to(texts), 1000 * levels, texts, return_dict=False)[0]

    def conditions(self, pipeline: Any, prompts: list[str], device: torch.device) -> Given:
        """Return the sequence of the text encoder."""
        # As many tokens as the pipeline takes when it draws.
        args = {"do_classifier_free_guidance": False, "max_sequence_length": 512, "device": device}
        return {"prompt": pipeline.encode_prompt(prompts, **args)[0]}

    def pixels(self, latents: Tensor) -> Tensor:
        """Return decoded videos, [B, F, 3, H, W]."""
        config = self.vae.config
        mean, std = (latents.new_tensor(of).view(1, -1, 1, 1, 1) for of in (config.latents_mean, config.latents_std))
        return self.vae.decode(latents * std + mean, return_dict=False)[0].movedim(2, 1)


class PlannedTokens:
    """A plan's tokenizer: all prompts have the same tokens."""

    model_max_length = 77

    def __call__(self, texts: Sequence[str], max_length: int = 1, **_: Any) -> SimpleNamespace:
        """Return the ids, int64 [B, max_length]."""
        ids = torch.ones(len(texts), max_length, dtype=torch.int64)
        return SimpleNamespace(input_ids=ids, attention_mask=ids)


PIPELINES = {kind.pipeline_class.__name__: kind for kind in (StableDiffusion3, Wan)}
"""Supported pipelines by the name in `model_index.json`"""


def open_pipeline(folder: Path, sizes: Sizes) -> DiffusersModel:
    """Return the model of a pipeline's directory. UserError for another kind of pipeline."""
    name = _json(folder / "model_index.json").get("_class_name")
    if name not in PIPELINES:
        raise UserError(f"policy.model: {folder} is a {name}; supported are {', '.join(PIPELINES)}")
    return PIPELINES[name](folder, sizes)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"policy.model: {path} cannot be read: {error}") from None
