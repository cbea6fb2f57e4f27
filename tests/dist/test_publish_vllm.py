"""The weight road into vLLM: what arrives is proven, and each way it can go wrong stops the run before the next token.

On the CPU vLLM packs its matrices, so that most of the proof is the probe's. One engine serves all tests, at tp=1;
`test_replicas` has the faults at tp=2.
"""

from contextlib import contextmanager

import pytest
import torch

from spmd_rl import weights
from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed import solo
from spmd_rl.model.build import weights_of
from spmd_rl.train.fsdp2 import shard
from tests.engines import VLLM_SIZES, needs_vllm, vllm_engine
from tests.models import EXPERTS, tiny
from tests.unit.test_publish import Policy

pytestmark = needs_vllm

SMOL = {
    "hidden_size": 288,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 384,
    "intermediate_size": 192,
    "tie": True,
}
"""Nine heads, three of them for keys, and a head tied to the embedding, like SmolLM2; sizes that three ranks share."""
SPREAD = {"initializer_range": 0.3}
"""Layers that differ as those of a trained model do; at the usual random scale they would hardly matter."""
K0, K1 = (f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2))


def grow(model):
    """An update."""
    shard.reshard(model)  # as before each of the trainer's: what a forward has gathered would not change with it
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)


@pytest.mark.slow
def test_weights_arrive_rounded(tmp_path):
    """First, since one process has one default group, which the fixture below keeps."""
    path = tiny("qwen2", tmp_path, **VLLM_SIZES)
    with vllm_engine(path, "bfloat16") as engine, solo() as world:
        publish = weights.build(Policy(path, torch.bfloat16), engine, world)
        assert all(publish(version=v)["publish/probe_abs_diff"] < 0.02 for v in range(2))


class Mixture(Policy):
    """A trainer whose experts are one parameter, which leaves expert by expert."""

    def weights(self):
        return ((name, tensor.detach()) for name, tensor in weights_of(self.model).items())


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 40])
def test_the_experts_of_a_mixture_arrive_every_time(width, tmp_path):
    """On the CPU vLLM packs them, and fills up a width that 32 does not divide."""
    path = tiny("qwen3_moe", tmp_path, **VLLM_SIZES, **EXPERTS["qwen3_moe"] | {"moe_intermediate_size": width})
    policy = Mixture(path, torch.float32)
    with vllm_engine(path) as engine, solo() as world:
        publish = weights.build(policy, engine, world)
        for version in range(3):
            assert publish(version=version)["publish/probe_abs_diff"] < 1e-5
            grow(policy.model)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"), **SMOL, **SPREAD)


@pytest.fixture(scope="module")
def engine(path):
    with vllm_engine(path) as engine:
        yield engine


@pytest.fixture
def road(path, engine):
    """A trainer and a publisher that has published version 1; then the trainer has learnt."""
    policy = Policy(path, torch.float32)
    with solo() as world:
        publish = weights.build(policy, engine, world)
        publish(version=1)
        grow(policy.model)
        yield policy, publish
    for id in list(engine.under_way):
        engine.abort([id])
    engine.step()


def fails(publish, *words):
    with pytest.raises(RunFailed) as caught:
        publish(version=2)
    assert str(caught.value).startswith("publish of version 2, rank 0: ")
    for word in words:
        assert word in str(caught.value)


def test_weights_arrive(engine, road):
    policy, publish = road
    metrics = publish(version=2)
    assert metrics["publish/probe_abs_diff"] < 1e-5
    held = dict(engine.loaded_weights())
    assert held.keys() == dict(policy.weights()).keys()
    assert {name for name, tensor in held.items() if tensor is not None} == {
        name for name in held if "norm" in name or "embed" in name
    }


def test_a_tensor_that_the_trainer_skips(road):
    policy, publish = road
    policy.road = lambda weights: [w for w in weights if w[0] != K1]
    fails(publish, f"{K1} is missing")


def test_a_tensor_that_vllm_skips(engine, road, monkeypatch):
    _, publish = road
    old = engine.model.model.layers[1].self_attn.qkv_proj.cpu_linear

    def forgetful(*args, **kwargs):
        real(*args, **kwargs)
        engine.model.model.layers[1].self_attn.qkv_proj.cpu_linear = old

    real = engine.llm.collective_rpc
    monkeypatch.setattr(engine.llm, "collective_rpc", forgetful)
    fails(publish, "from the trainer's on average (limit 0.0003)")


def test_two_layers_swapped_by_the_trainer(road):
    policy, publish = road
    swap = {K0: K1, K1: K0}
    policy.road = lambda weights: [(name, dict(weights)[swap.get(name, name)]) for name, _ in weights]
    fails(publish, "from the trainer's on average")


def test_two_layers_swapped_by_vllm(engine, road, monkeypatch):
    _, publish = road
    layers = engine.model.model.layers

    def swapping(*args, **kwargs):
        real(*args, **kwargs)
        layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp

    real = engine.llm.collective_rpc
    monkeypatch.setattr(engine.llm, "collective_rpc", swapping)
    fails(publish, "from the trainer's on average")
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def test_a_plain_tensor_that_vllm_holds_otherwise(engine, road, monkeypatch):
    _, publish = road

    def flipping(*args, **kwargs):
        real(*args, **kwargs)
        engine.model.model.norm.weight.data.view(torch.uint8)[5] ^= 1

    real = engine.llm.collective_rpc
    monkeypatch.setattr(engine.llm, "collective_rpc", flipping)
    fails(publish, "holds other bytes of model.norm.weight")


def test_the_previous_version_served(engine, road, monkeypatch):
    _, publish = road
    monkeypatch.setattr(engine.llm, "collective_rpc", lambda method, kwargs: list(kwargs["weights_iterator"]))
    monkeypatch.setattr(type(engine), "loaded_weights", lambda self: ((name, None) for name in self.shapes))
    fails(publish, "from the trainer's on average (limit 0.0003)")


def test_buffers_lost_in_sleep(engine, road, monkeypatch):
    _, publish = road
    buffers = [buffer for name, buffer in engine.model.named_buffers() if "cos_sin" in name]
    kept = [buffer.clone() for buffer in buffers]

    @contextmanager
    def lossy():
        with real():
            yield
        for buffer in buffers:
            buffer.zero_()

    real = engine.awake
    monkeypatch.setattr(engine, "awake", lossy)
    publish(version=2)
    with pytest.raises(RunFailed, match="rank 0: engine weights of version 3: the engine lost .*rotary"):
        publish(version=3)
    for buffer, whole in zip(buffers, kept, strict=True):
        buffer.copy_(whole)
    engine.lost = ""


def test_a_stale_prefix_cache(engine, road, monkeypatch):
    _, publish = road
    add = engine.llm.add_request
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    monkeypatch.setattr(
        engine.llm, "add_request", lambda id, prompt, *a, **k: add(id, prompt | {"cache_salt": "same"}, *a, **k)
    )
    publish(version=2)
    with pytest.raises(RunFailed, match="rank 0: the engine served keys and values older than version 3"):
        publish(version=3)
