"""The embedded diffusion model: 16 x 16 pictures of coloured squares, drawn from a prompt such as `three red squares`.

`build_tiny` trains it on one core in a minute, on pictures of which half belong to another prompt: it draws well and
follows its prompt half of the time, so that a reward has something to teach.
"""

import json
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from spmd_rl.base.errors import tell
from spmd_rl.base.shapes import COLOURS, COUNTS, words_of
from spmd_rl.model.build import parameters_on_meta
from spmd_rl.model.diffusion.base import Denoiser, DenoiserConfig, Given
from spmd_rl.model.load import WeightFiles

SIZE, PATCH, WIDTH, HEADS, LAYERS = 16, 4, 64, 4, 3
CELL, SIDE = 4, 3
"""Pixels of the grid's cells, and of a square in its cell"""
UPDATES, BATCH, MISLABELLED = 1500, 64, 0.5
VOCABULARY = ("", *COUNTS, *COLOURS, "square", "squares")
MAX_WORDS = 8


class TinyBlock(nn.Module):
    """Attention and feed-forward side by side, modulated by the condition (adaLN of DiT, arXiv 2212.09748)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """Return the next hidden states, [B, patches, WIDTH]. condition: [B, WIDTH]."""
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, -1)
        x = F.layer_norm(hidden, (WIDTH,)) * (1 + scale) + shift
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return hidden + gate * (self.out(attended) + self.down(F.gelu(self.up(x))))


class TinyTransformer(nn.Module):
    """A transformer of 0.2 M parameters over patches of pixels."""

    def __init__(self) -> None:
        super().__init__()
        patch, patches = 3 * PATCH**2, (SIZE // PATCH) ** 2
        self.input, self.output = nn.Linear(patch, WIDTH), nn.Linear(WIDTH, patch)
        self.words, self.level = nn.Embedding(len(VOCABULARY), WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Parameter(torch.randn(patches, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(LAYERS))

    def forward(self, latents: Tensor, levels: Tensor, ids: Tensor) -> Tensor:
        """Return the velocity, [B, 3, SIZE, SIZE]. levels: [B]; ids: int64 [B, MAX_WORDS]."""
        rates = torch.arange(WIDTH // 2, device=levels.device) * (-math.log(1e3) / (WIDTH // 2))
        angles = 1e3 * levels[:, None] * rates.exp()
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(self.level.weight.dtype)
        condition = F.silu(self.level(waves) + self.words(ids).sum(1))
        hidden = self.input(F.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2).to(waves)) + self.places
        for block in self.blocks:
            hidden = block(hidden, condition)
        found = self.output(F.layer_norm(hidden, (WIDTH,))).transpose(1, 2)
        return F.pixel_shuffle(found.unflatten(2, (SIZE // PATCH, SIZE // PATCH)), PATCH)


class TinyFlowModel:
    """A `FlowModel` in pixels, without encoders."""

    kind = "tiny_flow"
    latent_shape, shift, stem = (3, SIZE, SIZE), 1.0, "model"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """config: of its directory, which fixes nothing yet."""
        self.folder = folder

    def build(self, dtype: torch.dtype) -> Denoiser:
        """Return the denoiser without weights, see `FlowModel`."""
        with parameters_on_meta():
            model = TinyTransformer().to(dtype)
        config = DenoiserConfig(str(self.folder), WIDTH)
        return Denoiser({"transformer": model}, ["TinyBlock"], _call, config, 0.0).eval()

    def files(self) -> WeightFiles:
        """Return the stored weights, see `FlowModel`."""
        return WeightFiles(self.folder)

    def encoding(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Return an empty context: it has no encoders."""
        return nullcontext()

    def without_weights(self, dtype: torch.dtype) -> dict[str, list[nn.Module]]:
        """Return nothing: it has neither encoders nor a decoder."""
        return {}

    def encode(self, prompts: Sequence[str], device: torch.device, dtype: torch.dtype) -> Given:
        """Return the ids of known words, see `FlowModel`."""
        return {"ids": word_ids(prompts).to(device)}

    def decoding(self, device: torch.device) -> AbstractContextManager[None]:
        """Return an empty context: latents are pixels."""
        return nullcontext()

    def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
        """Return pixels in 0..1, see `FlowModel`."""
        return (latents + 1) / 2


def _call(model: nn.Module, latents: Tensor, levels: Tensor, given: Given) -> Tensor:
    return model(latents, levels, given["ids"])


def word_ids(prompts: Sequence[str]) -> Tensor:
    """Return the ids of the words of prompts, int64 [B, MAX_WORDS], padded with 0; unknown words are left out."""
    known = [[VOCABULARY.index(word) for word in text.split() if word in VOCABULARY][:MAX_WORDS] for text in prompts]
    return torch.tensor([[*ids, *[0] * (MAX_WORDS - len(ids))] for ids in known])


def draw(counts: Tensor, colours: Tensor, generator: torch.Generator) -> Tensor:
    """Return pictures of squares at random places: float32 [B, 3, SIZE, SIZE] in -1..1. counts, colours: int64 [B]."""
    cells = (SIZE // CELL) ** 2
    order = torch.rand(len(counts), cells, generator=generator).argsort(1).argsort(1)
    grid = (order < counts[:, None]).float().unflatten(1, (SIZE // CELL, SIZE // CELL))
    square = F.pad(torch.ones(SIDE, SIDE), (0, CELL - SIDE, 0, CELL - SIDE))
    mask = torch.kron(grid, square)[:, None]
    return 2 * mask * F.one_hot(colours, 3)[:, :, None, None] - 1


def build_tiny(folder: Path, updates: int = UPDATES) -> None:
    """Train the tiny model and write its directory, completely or not at all; no-op if it is there."""
    if (folder / "config.json").is_file():
        return
    tell(f"policy.model: training the tiny model of squares once, {updates} updates, into {folder}")
    generator, model = torch.Generator().manual_seed(0), _initialized()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    every = word_ids([words_of(count, colour) for count in range(1, 1 + len(COUNTS)) for colour in COLOURS])
    for _ in range(updates):
        shown, said = torch.randint(0, len(every), (2, BATCH), generator=generator)
        said = torch.where(torch.rand(BATCH, generator=generator) < MISLABELLED, said, shown)
        # Some have no prompt at all, for guidance.
        ids = every[said] * (torch.rand(BATCH, 1, generator=generator) > 0.1)
        pictures = draw(1 + shown // len(COLOURS), shown % len(COLOURS), generator)
        noise, levels = torch.randn(pictures.shape, generator=generator), torch.rand(BATCH, generator=generator)
        found = model(torch.lerp(pictures, noise, levels.view(-1, 1, 1, 1)), levels, ids)
        F.mse_loss(found, noise - pictures).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".tiny-flow-") as draft:
        weights = {f"transformer.{name}": tensor for name, tensor in model.state_dict().items()}
        save_file(weights, Path(draft, "model.safetensors"), {"format": "pt"})
        Path(draft, "config.json").write_text(json.dumps({"model_type": TinyFlowModel.kind}) + "\n")
        os.chmod(draft, 0o755)
        if not folder.exists():
            os.rename(draft, folder)
            os.mkdir(draft)


def _initialized() -> TinyTransformer:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = TinyTransformer()
    for block in model.blocks:
        nn.init.zeros_(block.modulation.weight)
    nn.init.zeros_(model.output.weight)
    return model
