"""The weight road into vLLM: what arrives is proven, and each way it can go wrong stops the run before the next token.

On the CPU vLLM packs its matrices, so that most of the proof is the probe's. One engine serves all tests at tp=1; one
start of two ranks all faults at tp=2.
"""

from array import array
from contextlib import contextmanager

import pytest
import torch

from spmd_rl import engine as engines
from spmd_rl import weights
from spmd_rl.config.schema import EngineConfig, PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.errors import RunFailed
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.train.fsdp2 import shard
from spmd_rl.types import Request
from tests.dist.harness import run_ranks
from tests.engines import VLLM_SIZES, needs_vllm, vllm_engine
from tests.models import EXPERTS, tiny
from tests.training import fsdp2_policy
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


def serve(engine):
    """Two rounds of requests of all kinds: tokens by id."""
    done = {}
    for round in "ab":
        for i in range(24):
            prompt = array("i", range(i, i + 3 + 4 * i % 50))
            engine.add(Request(f"{round}{i}", prompt, 6 + i % 7, i % 3 / 2, seed=i * 7919))
        engine.step()
        engine.abort([f"{round}{i}" for i in (3, 20)])
        while engine.num_unfinished:
            done |= {c.id: (c.token_ids.tolist(), c.finish_reason) for c in engine.step()}
    return done


def attempt(publish, version):
    """The error of a publish, or nothing."""
    try:
        publish(version=version)
    except RunFailed as error:
        return str(error)


def replica_of_two(world, path):
    """Publishes over a replica of two ranks: sound, then with each fault, on both ranks or on the last alone."""
    model = build_model(path, torch.float32, world.device)
    policy = fsdp2_policy(model, Layout(world), TrainConfig(), torch.float32)
    cfg = RlvrConfig(
        policy=PolicyConfig(model=path, dtype="float32"),
        engine=EngineConfig(name="vllm", tp=2, max_running=16, kv_tokens=1024),
    )
    engine = engines.build(cfg.engine, cfg.policy, cfg.train.offload, world)
    publish, whole = weights.build(policy, engine, world), policy.weights
    last = world.rank == world.size - 1
    diffs = [publish(version=0)["publish/probe_abs_diff"]]
    served = serve(engine)
    errors = {}

    def broken(name, weights):
        policy.weights = weights
        errors[name] = attempt(publish, 1)
        policy.weights = whole
        diffs.append(publish(version=2)["publish/probe_abs_diff"])

    swap = {K0: K1, K1: K0}
    bucket = {name for name, _ in model.named_parameters() if ".1.mlp." in name}
    broken("dropped by all", lambda: ((n, t) for n, t in whole() if n not in bucket))
    broken("dropped by one", lambda: ((n, t) for n, t in whole() if not (last and n in bucket)))
    both = {name: tensor.clone() for name, tensor in whole()}
    broken("swapped", lambda: [(n, both[swap.get(n, n)]) for n, _ in whole()])
    grow(model)
    llm = engine.engine.llm
    rpc = llm.collective_rpc
    llm.collective_rpc = lambda method, kwargs: list(kwargs["weights_iterator"])
    errors["previous"] = attempt(publish, 3)
    llm.collective_rpc = rpc
    diffs.append(publish(version=4)["publish/probe_abs_diff"])
    if last:
        llm.collective_rpc = lambda method, kwargs: list(kwargs["weights_iterator"])
    grow(model)
    errors["previous on one"] = attempt(publish, 5)
    llm.collective_rpc = rpc
    diffs.append(publish(version=6)["publish/probe_abs_diff"])
    return errors, diffs, served


@pytest.mark.slow
def test_tokens_and_faults_at_tp_two(tmp_path):
    path = tiny("qwen2", tmp_path, **VLLM_SIZES, **SPREAD)
    results = run_ranks(2, replica_of_two, str(path), timeout=120)
    assert results[0] == results[1]
    errors, diffs, served = results[0]
    with vllm_engine(path, max_running=16, kv_tokens=1024) as engine:
        engine.load(build_model(path, torch.float32, "cpu").named_parameters(), version=0)
        assert served == {id: list(pair) for id, pair in serve(engine).items()}
    assert max(diffs) < 1e-4
    missing = "engine weights of version 1: model.layers.1.mlp.gate_proj.weight is missing (3 faults)"
    assert errors["dropped by all"] == f"publish of version 1, rank 0: {missing}"
    assert errors["dropped by one"] == f"publish of version 1, rank 1: {missing}"
    for fault in ("swapped", "previous", "previous on one"):
        assert "rank 0: the engine's logprobs are" in errors[fault], fault


def serve_alone(world, path, tp):
    """What a replica of `tp` ranks serves."""
    cfg = RlvrConfig(
        policy=PolicyConfig(model=path, dtype="float32"),
        engine=EngineConfig(name="vllm", tp=tp, max_running=16, kv_tokens=1024),
    )
    engine = engines.build(cfg.engine, cfg.policy, cfg.train.offload, world)
    engine.load(build_model(path, torch.float32, "cpu").named_parameters(), version=0)
    return serve(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tp"), [(4, 2), (3, 3), (2, 1)])
def test_replicas_serve_the_same(path, size, tp):
    sizes = VLLM_SIZES if tp == 2 else SMOL
    whole = tiny("qwen2" if tp == 2 else "llama", path.parent / f"tp{tp}", **sizes, **SPREAD)
    with vllm_engine(whole, max_running=16, kv_tokens=1024) as engine:
        engine.load(build_model(whole, torch.float32, "cpu").named_parameters(), version=0)
        expected = {id: list(pair) for id, pair in serve(engine).items()}
    assert run_ranks(size, serve_alone, str(whole), tp, timeout=240) == [expected] * size
