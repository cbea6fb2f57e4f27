"""What the tests on an accelerator share: a world of one on it, random models of known shapes, batches, figures."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from spmd_rl.batch import Batch
from spmd_rl.config.schema import EngineConfig, PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_on_meta, model_directory
from spmd_rl.model.load import WeightFiles, load_weights
from spmd_rl.train.accumulate import Policy
from tests.models import tiny
from tests.training import fsdp2_policy

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
    pytest.mark.timeout(600),
]
SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
}
HEADS = {"0.5b": (2, 64), "1.7b": (8, 128), "3b": (2, 128)}
"""Key-value heads and the width of a head."""


def random_model(name: str, path: Path) -> Path:
    """Write a model of a known shape with random weights: "0.5b", "1.7b" or "3b"."""
    kv_heads, width = HEADS[name]
    sizes = {"num_key_value_heads": kv_heads, "head_dim": width, "vocab_size": 151936}
    return tiny("qwen2", path, tie=name != "3b", max_position_embeddings=40960, **SHAPES[name], **sizes)


@contextmanager
def one_rank(path: Path) -> Iterator[World]:
    """A world of one on this machine's accelerator; its run directory is `path`."""
    with World.open(path, 300, debug=True) as world:
        assert world.device.type != "cpu"
        yield world


def trainer(world: World, path: Path, **train: object) -> Policy:
    """A policy in bfloat16 from a model directory."""
    folder = model_directory(path)
    model, files = build_on_meta(folder, torch.float32), WeightFiles(folder)
    settings = TrainConfig(**train)
    own = PolicyConfig(model=str(path), lr=1e-5)
    return fsdp2_policy(
        model, Layout(world), settings, torch.bfloat16, own, 100, lambda model: load_weights(model, files)
    )


def vllm_settings(path: Path, **engine: object) -> RlvrConfig:
    """Settings of a vLLM beside an offloading trainer."""
    return RlvrConfig(
        policy=PolicyConfig(model=str(path), dtype="bfloat16"),
        train=TrainConfig(offload=True),
        engine=EngineConfig(name="vllm", **engine),
    )


def samples(count: int, prompt: int, answer: int, vocabulary: int = 1000) -> Batch:
    """Samples that share nothing, with all that a loss wants."""
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


def seconds(call) -> float:
    """Of one call, the device's work included."""
    torch.accelerator.synchronize()
    began = time.perf_counter()
    call()
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def note(what: str, **figures: object) -> None:
    """Keep figures."""
    folder = Path(os.environ.get("OUT", ROOT / "runs"))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "gpu.jsonl", "a") as file:
        file.write(json.dumps({"what": what, **figures}) + "\n")
