"""The weight road over real ranks: FSDP2 shards into whole engines; one rank's finding stops them all, alike."""

import json

import pytest
import torch

from spmd_rl import sync
from spmd_rl.config.schema import TrainConfig
from spmd_rl.engine.native import NativeEngine, empty_module
from spmd_rl.errors import RunFailed
from spmd_rl.model.build import build_model
from spmd_rl.train.fsdp2 import FSDP2Backend
from tests.dist.harness import run_ranks
from tests.models import tiny

NAME = "model.layers.1.self_attn.v_proj.weight"


class Broken(NativeEngine):
    """An engine with the fault that a test names, from the second load on."""

    fault = "none"

    def load(self, weights, version):
        if version == 0 or self.fault == "none":
            return super().load(weights, version)
        if self.fault == "raises early":
            next(iter(weights))
            raise RunFailed("the loader gave up")
        super().load(weights, version)
        held = dict(self.held())
        if self.fault == "flips":
            held[NAME].data.view(torch.uint8)[0, 0] ^= 1
        if self.fault == "not a number":
            self._module.model.norm.register_forward_hook(lambda module, args, out: out * float("nan"))


def publish_twice(world, path, fault):
    """Publish versions 0 and 1; the fault is the last rank's. Returns what came of the second."""
    policy = FSDP2Backend(build_model(path, torch.float32, world.device), world, TrainConfig(), torch.float32)
    engine = Broken(empty_module(path, torch.float32), 4, 256)
    engine.fault = fault if world.rank == world.size - 1 else "none"
    publish = sync.build(policy, engine, world)
    metrics = publish(version=0)
    try:
        again = publish(version=1)
    except RunFailed as error:
        return {"error": str(error), "versions": world.gather("still together", 1)}
    reference = dict(build_model(path, torch.float32, "cpu").named_parameters())
    equal = all(torch.equal(reference[name], held) for name, held in engine.held())
    return {"first": metrics, "again": again, "equal": equal}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_hold_the_whole(tmp_path, size):
    results = run_ranks(size, publish_twice, str(tiny("qwen3", tmp_path)), "none")
    assert len({json.dumps(result, sort_keys=True) for result in results}) == 1, "metrics are equal on all ranks"
    assert results[0]["equal"] and results[0]["again"]["publish/probe_abs_diff"] < 1e-5


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flips", f"the engine holds other bytes of {NAME}"),
        ("raises early", "the loader gave up"),
        ("not a number", "computed a logprob of nan"),
    ],
)
def test_one_ranks_fault_stops_all_in_step(tmp_path, fault, words):
    results = run_ranks(2, publish_twice, str(tiny("llama", tmp_path)), fault)
    assert len({result["error"] for result in results}) == 1
    assert results[0]["error"].startswith("publish of version 1, rank 1: ") and words in results[0]["error"]


def publish_what_differs(world, path):
    """Each rank's policy is another model, as if a rank had missed an update."""
    publishable = build_model(path, torch.float32, world.device)
    engine = NativeEngine(empty_module(path, torch.float32), 4, 256)
    policy = FSDP2Backend(publishable, world, TrainConfig(), torch.float32)
    weights = policy.weights
    policy.weights = lambda: ((name, tensor + world.rank) for name, tensor in weights())
    try:
        sync.build(policy, engine, world)(version=0)
    except RunFailed as error:
        return str(error)


def test_ranks_that_were_handed_different_weights_stop(tmp_path):
    results = run_ranks(2, publish_what_differs, str(tiny("llama", tmp_path)))
    assert results == ["publish of version 0: ranks [1] were handed other weights than rank 0"] * 2
