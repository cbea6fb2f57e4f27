"""Replicas of several ranks, of each engine that has them: one answer on every layout, faults on one rank or on all.

One start of two ranks shows all faults.
"""

from array import array

import pytest
import torch

from spmd_rl import engine as engines
from spmd_rl import weights
from spmd_rl.base.errors import RunFailed
from spmd_rl.config.schema import EngineConfig, PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.build import build_model
from spmd_rl.types import Request
from tests.dist.harness import run_ranks
from tests.dist.test_publish_vllm import K0, K1, SMOL, SPREAD, grow
from tests.engines import OTHERS, VLLM_SIZES, needs_sglang, needs_vllm, started_engine
from tests.models import tiny
from tests.training import fsdp2_policy


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


def deaf(*args, kwargs=None):
    """A loader that reads all weights and takes none."""
    list(kwargs["weights_iterator"] if kwargs else args[0])


def replica_of_two(world, path, name, axis):
    """Publishes over a replica of two ranks: sound, then with each fault, on both ranks or on the last alone."""
    model = build_model(path, torch.float32, world.device)
    policy = fsdp2_policy(model, Layout(world), TrainConfig(), torch.float32)
    cfg = RlvrConfig(
        policy=PolicyConfig(model=path, dtype="float32"),
        engine=EngineConfig(name=name, **{axis: 2}, max_running=16, kv_tokens=1024),
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
    one = engine.engine
    inside, loader = (one.llm, "collective_rpc") if name == "vllm" else (one.model, "load_weights")
    loads = getattr(inside, loader)
    setattr(inside, loader, deaf)
    errors["previous"] = attempt(publish, 3)
    setattr(inside, loader, loads)
    diffs.append(publish(version=4)["publish/probe_abs_diff"])
    if last:
        setattr(inside, loader, deaf)
    grow(model)
    errors["previous on one"] = attempt(publish, 5)
    setattr(inside, loader, loads)
    diffs.append(publish(version=6)["publish/probe_abs_diff"])
    return errors, diffs, served


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        pytest.param("vllm", "tp", marks=needs_vllm),
        pytest.param("vllm", "pp", marks=needs_vllm),
        pytest.param("sglang", "tp", marks=needs_sglang),
    ],
)
def test_tokens_and_faults_on_two_ranks(tmp_path, name, axis):
    path = tiny("qwen2", tmp_path, **VLLM_SIZES, **SPREAD)
    results = run_ranks(2, replica_of_two, str(path), name, axis, timeout=400)
    assert results[0] == results[1]
    errors, diffs, served = results[0]
    with started_engine(name, path, max_running=16, kv_tokens=1024) as engine:
        engine.load(build_model(path, torch.float32, "cpu").named_parameters(), version=0)
        assert served == {id: list(pair) for id, pair in serve(engine).items()}
    assert max(diffs) < 1e-4
    missing = "engine weights of version 1: model.layers.1.mlp.gate_proj.weight is missing (3 faults)"
    assert errors["dropped by all"] == f"publish of version 1, rank 0: {missing}"
    assert errors["dropped by one"] == f"publish of version 1, rank 1: {missing}"
    told = {"tp": "rank 0: the engine's logprobs are", "pp": ": the engine holds other bytes of model."}
    assert told["tp"] in errors["swapped"]
    for fault in ("previous", "previous on one"):  # a stage's layers are plain in part, and compared
        assert told[axis] in errors[fault], (fault, errors[fault])


def serve_alone(world, path, name, tp, pp=1):
    """What a replica of `tp` x `pp` ranks serves, after weights that it has computed with before."""
    cfg = RlvrConfig(
        policy=PolicyConfig(model=path, dtype="float32"),
        engine=EngineConfig(name=name, tp=tp, pp=pp, max_running=16, kv_tokens=1024),
    )
    engine = engines.build(cfg.engine, cfg.policy, cfg.train.offload, world)
    model = build_model(path, torch.float32, "cpu")
    if pp > 1:
        engine.load([(name, weight * 1.1) for name, weight in model.named_parameters()], version=0)
        serve(engine)
    engine.load(model.named_parameters(), version=1)
    if pp > 1 and tp == 1:
        assert any(held is not None for _, held in engine.loaded_weights()), "of its own layers"
        fine = dict(model.named_parameters())
        assert all(held is None or torch.equal(held, fine[name]) for name, held in engine.loaded_weights())
    return serve(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("size", "tp"), [(4, 2), (3, 3), (2, 1)])
def test_replicas_serve_the_same(tmp_path, name, size, tp):
    sizes = VLLM_SIZES if tp == 2 else SMOL
    whole = tiny("qwen2" if tp == 2 else "llama", tmp_path / f"tp{tp}", **sizes, **SPREAD)
    with started_engine(name, whole, max_running=16, kv_tokens=1024) as engine:
        engine.load(build_model(whole, torch.float32, "cpu").named_parameters(), version=0)
        expected = {id: list(pair) for id, pair in serve(engine).items()}
    assert run_ranks(size, serve_alone, str(whole), name, tp, timeout=400) == [expected] * size


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(("size", "tp", "layers"), [(2, 1, 3), (4, 2, 2)])
def test_stages_serve_the_same(tmp_path, size, tp, layers):
    """Two stages, one of which has the embedding that the head is tied to, and its own copy of it."""
    path = tiny("llama", tmp_path, **VLLM_SIZES, **SPREAD, tie=True, num_hidden_layers=layers)
    with started_engine("vllm", path, max_running=16, kv_tokens=1024) as engine:
        engine.load(build_model(path, torch.float32, "cpu").named_parameters(), version=0)
        expected = {id: list(pair) for id, pair in serve(engine).items()}
    assert run_ranks(size, serve_alone, str(path), "vllm", tp, 2, timeout=400) == [expected] * size
