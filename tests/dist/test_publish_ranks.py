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
    """An engine with the fault that a test names."""

    fault = ""

    def load(self, weights, version):
        if self.fault == "raises early":
            next(iter(weights))
            raise RunFailed("the loader gave up")
        super().load(weights, version)
        if self.fault == "flips":
            dict(self.loaded_weights())[NAME].data.view(torch.uint8)[0, 0] ^= 1
        if self.fault == "not a number":
            self._module.model.norm.register_forward_hook(lambda module, args, out: out * float("nan"))


def parts(world, path):
    """A sharded policy and this rank's engine."""
    model = build_model(path, torch.float32, world.device)
    policy = FSDP2Backend(model, world, TrainConfig(), torch.float32)
    return policy, Broken(empty_module(path, torch.float32), 4, 256)


def attempt(publish, version):
    """The error of a publish, or nothing."""
    try:
        publish(version=version)
    except RunFailed as error:
        return str(error)


def publish_whole(world, path):
    policy, engine = parts(world, path)
    publish = sync.build(policy, engine, world)
    metrics = [publish(version=version) for version in range(2)]
    reference = dict(build_model(path, torch.float32, "cpu").named_parameters())
    return metrics, all(torch.equal(reference[name], held) for name, held in engine.loaded_weights())


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_hold_the_whole(tmp_path, size):
    results = run_ranks(size, publish_whole, str(tiny("qwen3", tmp_path)))
    assert len({json.dumps(result, sort_keys=True) for result in results}) == 1, "metrics are equal on all ranks"
    metrics, equal = results[0]
    assert equal and metrics[1]["publish/probe_abs_diff"] < 1e-5


def publish_with_faults(world, path):
    """Each fault on the last rank alone, with a sound publish before each."""
    policy, engine = parts(world, path)
    publish = sync.build(policy, engine, world)
    whole, errors = policy.weights, []
    for version, fault in enumerate(["", "flips", "", "raises early", "", "differs", "", "not a number"]):
        engine.fault = fault if world.rank == world.size - 1 else ""
        shift = world.rank if fault == "differs" else 0
        policy.weights = lambda shift=shift: ((name, tensor + shift) for name, tensor in whole())
        errors.append(attempt(publish, version))
    return errors


def test_one_ranks_fault_stops_all_in_step(tmp_path):
    results = run_ranks(2, publish_with_faults, str(tiny("llama", tmp_path)))
    assert results[0] == results[1]
    assert results[0][::2] == [None] * 4
    flips, early, differs, nan = results[0][1::2]
    assert flips == f"publish of version 1, rank 1: the engine holds other bytes of {NAME} than it was given"
    assert early == "publish of version 3, rank 1: the loader gave up"
    assert differs == "publish of version 5: ranks [1] were handed other weights than rank 0"
    assert nan.startswith("publish of version 7, rank 1: the engine computed a logprob of nan")
