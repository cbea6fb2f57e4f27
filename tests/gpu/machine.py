"""Shared parts of the tests on an accelerator: a world of one rank, random models of known shapes, batches, figures.

With `GPU_TESTS=rehearse` in the environment the device is the CPU, and shapes are small.
"""

import gc
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from spmd_rl import engine as engines
from spmd_rl.batch import Batch
from spmd_rl.config.schema import EngineConfig, PolicyConfig, RoleConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.engine.base import Engine
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import shape_on_meta
from spmd_rl.model.load import local
from spmd_rl.train.accumulate import Policy
from spmd_rl.train.fsdp2.backend import policy_of
from tests.models import FAMILIES, tokenizer
from tests.patience import patient

ROOT = Path(__file__).parents[2]
REHEARSED = os.environ.get("GPU_TESTS") == "rehearse"
DEVICE = torch.device("cpu") if REHEARSED else torch.accelerator.current_accelerator(check_available=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="no accelerator"),
    pytest.mark.timeout(patient(120)),
]
SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
}
SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {"0.5b": (2, 64), "1.7b": (8, 128), "3b": (2, 128)}
"""Key-value heads and the width of a head."""


def shape(name: str, path: Path) -> Path:
    """Write a model directory without weights, of a known shape: "0.5b", "1.7b" or "3b"."""
    kv_heads, width = (2, 32) if REHEARSED else HEADS[name]
    sizes = {"num_key_value_heads": kv_heads, "head_dim": width, "vocab_size": 512 if REHEARSED else 151936}
    config = FAMILIES["qwen2"][0](
        **(SMALL if REHEARSED else SHAPES[name]),
        **sizes,
        tie_word_embeddings=name != "3b",
        max_position_embeddings=40960,
        architectures=["Qwen2ForCausalLM"],
        eos_token_id=258,
        pad_token_id=256,
    )
    config.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@torch.no_grad()
def fill_randomly(model: nn.Module) -> None:
    """Draw a model's shards on the device: on the CPU, and through a file, a large one would take longer."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            local(parameter).normal_(0.0, 0.02, generator=generator)
        else:
            local(parameter).fill_(float("norm" in name))


@contextmanager
def one_rank(path: Path) -> Iterator[World]:
    """Open a world of one rank on this machine's accelerator, with empty caches; its run directory is `path`."""
    gc.collect()
    if not REHEARSED:
        torch.accelerator.empty_cache()
    with World.open(path, 300, debug=True) as world:
        assert world.device.type == DEVICE.type
        yield world


def trainer(world: World, path: Path, **train: object) -> Policy:
    """Build a policy in bfloat16 of a shape, with random weights."""
    own = PolicyConfig(model=str(path), lr=1e-5)
    role = RoleConfig("policy", own, "", "bfloat16", False, TrainConfig(**train), 100)
    return policy_of(shape_on_meta(path, torch.float32), Layout(world), role, fill_randomly)


def native(world: World, path: Path, **sizes: object) -> NativeEngine:
    """Build our own engine in bfloat16, without weights yet."""
    return NativeEngine(empty_module(path, torch.bfloat16, world.device), **sizes)


def vllm(world: World, path: Path, **engine: object) -> Engine:
    """Start vLLM for a device that an offloading trainer shares, without weights yet."""
    settings = EngineConfig(name="vllm", **engine)
    return engines.build(settings, PolicyConfig(model=str(path), dtype="bfloat16"), not REHEARSED, world)


def samples(count: int, prompt: int, answer: int, vocabulary: int = 500) -> Batch:
    """Return samples that share no prompt, with every column that a loss reads."""
    if REHEARSED:
        count, prompt, answer = min(count, 4), prompt // 32, answer // 32
    generator, length = torch.Generator().manual_seed(0), prompt + answer
    total, mask = count * length, (torch.arange(length) >= prompt).repeat(count)
    return Batch(
        starts=torch.arange(0, total + 1, length),
        keys=torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.int64)], 1),
        units=torch.zeros(count, dtype=torch.int64),
        token_ids=torch.randint(0, vocabulary, (total,), generator=generator),
        position_ids=torch.arange(length).repeat(count),
        loss_mask=mask,
        rollout_logprobs=torch.full((total,), -7.0) * mask,
        lags=torch.zeros(total, dtype=torch.int32),
        advantages=torch.randn(total, generator=generator) * mask,
        weights=mask / mask.sum(),
    )


def synchronize() -> None:
    """Wait until the device has done its work."""
    if not REHEARSED:
        torch.accelerator.synchronize()


def peak_gb() -> float:
    """Return the most that torch has held on the device since the last call."""
    if REHEARSED:
        return 0.0
    peak = torch.accelerator.max_memory_allocated() / 1e9
    torch.accelerator.reset_peak_memory_stats()
    return peak


def seconds(call) -> float:
    """Return the seconds of one call, the device's work included."""
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def waits(call) -> int:
    """Count how often the CPU waits for the device in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not REHEARSED:
            torch.cuda.set_sync_debug_mode("warn")
        call()
        if not REHEARSED:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def note(what: str, **figures: object) -> None:
    """Append a line of figures to the file, and print it."""
    folder = Path(os.environ.get("OUT", ROOT / "runs"))
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}
    line = json.dumps({"what": what, **rounded})
    with open(folder / "gpu.jsonl", "a") as file:
        file.write(line + "\n")
    print(f"\n[gpu] {line}", flush=True)
