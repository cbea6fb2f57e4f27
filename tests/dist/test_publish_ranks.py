"""The weight road over real ranks: FSDP2 shards into whole engines; one rank's finding stops them all, alike."""

import json
from functools import partial

import pytest
import torch

from spmd_rl import weights
from spmd_rl.base.errors import RunFailed
from spmd_rl.config.schema import TrainConfig
from spmd_rl.distributed import Layout
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model
from spmd_rl.weights import Buckets, WeightReceiver
from tests.dist.harness import run_ranks
from tests.models import tiny
from tests.training import fsdp2_policy
from tests.unit.test_publish import Hidden, Policy

NAME = "model.layers.1.self_attn.v_proj.weight"


class Broken(NativeEngine):
    """An engine with the fault that a test names."""

    fault = ""

    def __init__(self, module, *sizes):
        super().__init__(module, *sizes)
        self.module = module

    def load(self, weights, version):
        if self.fault == "raises early":
            next(iter(weights))
            raise RunFailed("the loader gave up")
        super().load(weights, version)
        if self.fault == "flips":
            dict(self.loaded_weights())[NAME].data.view(torch.uint8)[0, 0] ^= 1
        if self.fault == "not a number":
            self.module.model.norm.register_forward_hook(lambda module, args, out: out * float("nan"))


def parts(world, path):
    """A sharded policy and this rank's engine."""
    model = build_model(path, torch.float32, world.device)
    policy = fsdp2_policy(model, Layout(world), TrainConfig(), torch.float32)
    return policy, Broken(empty_module(path, torch.float32), 4, 256)


def attempt(publish, version):
    """What a publish returns, or its error."""
    try:
        return publish(version=version)
    except RunFailed as error:
        return str(error)


def publish_whole(world, path):
    policy, engine = parts(world, path)
    publish = weights.build(policy, engine, world)
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
    publish = weights.build(policy, engine, world)
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
    assert all(sound["publish/bytes"] > 0 for sound in results[0][::2])
    flips, early, differs, nan = results[0][1::2]
    assert flips == f"publish of version 1, rank 1: the engine holds other bytes of {NAME} than it was given"
    assert early == "publish of version 3, rank 1: the loader gave up"
    assert differs == "publish of version 5: ranks [1] got other weights than rank 0"
    assert nan.startswith("publish of version 7, rank 1: the engine computed a logprob of nan")


def publish_apart(world, path):
    """Rank 0 trains, the others generate: a sound publish, one that is not probed, and two faults of engines."""
    trainers, buckets, found = world.subset("train", [0]), Buckets(world, [0], bucket_bytes=4096), []
    if trainers:
        policy = Policy(path, torch.float32)
        publish = weights.Publisher(policy, trainers, None, probe_every=2, buckets=buckets, everyone=world)
    else:
        engine = (Broken, Hidden)[world.rank - 1](empty_module(path, torch.float32), 4, 256)
        receiver = WeightReceiver(engine, buckets, world)
    for version, fault, probed in ((0, "", True), (1, "", False), (3, "flips", False), (4, "stale", True)):
        if trainers:
            if fault == "stale":
                with torch.no_grad():
                    for weight in policy.model.parameters():
                        weight.mul_(1.01)
            assert publish.is_probed(version) == probed
            found.append(attempt(publish, version))
        else:
            engine.fault = fault
            found.append(attempt(partial(receiver.load, probed=probed), version))
    return found


def test_ranks_that_train_and_ranks_that_generate(tmp_path):
    trainer, broken, hidden = run_ranks(3, publish_apart, str(tiny("llama", tmp_path)))
    first, second, third, stale = trainer
    assert first["publish/probe_abs_diff"] < 1e-5 and first["publish/bytes"] == second["publish/bytes"] > 0
    assert "publish/probe_abs_diff" not in second
    assert broken[:2] == hidden[:2] == [None, None] and broken[3] is hidden[3] is None
    line = f"publish of version 3, rank 1: the engine holds other bytes of {NAME} than it was given"
    assert third == broken[2] == hidden[2] == line
    assert stale.startswith("publish of version 4, rank 0: the engine's logprobs are ")
    assert stale.endswith(", on rank 2")
