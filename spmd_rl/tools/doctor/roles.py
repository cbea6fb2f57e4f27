"""A training step, an offload round trip and a checkpoint of the tiny model."""

import time
from array import array
from dataclasses import replace

import torch

from spmd_rl.batch import Batch, pack
from spmd_rl.checkpoint import Checkpointer
from spmd_rl.config.backends import backend
from spmd_rl.config.schema import CheckpointConfig, TrainConfig
from spmd_rl.model.fingerprint import fingerprints
from spmd_rl.tools.doctor.bench import Bench
from spmd_rl.tools.doctor.checks import BACKEND, REPORT, Failed, check_package, gib
from spmd_rl.train import build_role
from spmd_rl.train.base import PolicyRole
from spmd_rl.train.offload import Offload
from spmd_rl.types import Sample, Turn, Verdict

PROMPT, ANSWER, SAMPLES = 32, 32, 4
OFFLOADED = {"cpu": 16 << 20, "device": 256 << 20}
"""Bytes that are moved to host memory and back, to measure the bandwidth."""


def batch(bench: Bench) -> Batch:
    """Return this rank's artificial samples, different on every data shard."""
    shard = bench.policy.layout.data
    samples = []
    for number in range(SAMPLES):
        ids = [3 + (7 * i + 11 * number + shard.rank) % 500 for i in range(PROMPT + ANSWER)]
        none = array("i", [0] * ANSWER)
        turn = Turn(array("i", ids[:PROMPT]), array("i", ids[PROMPT:]), array("f", none), none, "length")
        samples.append(Sample(shard.rank, number, (turn,), Verdict("ok")))
    made = pack(samples)
    # Weights sum to 1 over all shards, as in a run, so that the loss does not depend on their number.
    made.weights[:] = made.loss_mask / (ANSWER * SAMPLES * shard.size)
    return made.to(bench.world.device)


def loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the negative log-likelihood of each token."""
    return -logprobs, {}


def training_step(bench: Bench) -> str:
    """[all] Train for two steps, forward and backward over all ranks; the loss must fall."""
    return _two_steps(bench, bench.policy)  # [all]


def other_step(name: str, bench: Bench) -> str:
    """[all] Train for two steps with a backend whose package may be missing."""
    package = backend(name).package
    check_package(package, package, BACKEND.format(name), "train=fsdp2")
    role = replace(bench.cfg.role("policy"), train=TrainConfig(name=name))
    return _two_steps(bench, build_role(role, bench.world))  # [all]


def _two_steps(bench: Bench, policy: PolicyRole) -> str:
    mine = batch(bench)
    with policy.awake():
        first = policy.update(mine, loss, 1.0)  # [all]
        began = time.perf_counter()
        second = policy.update(mine, loss, 1.0)  # [all]
    told = f"loss {first['loss']:.3f} -> {second['loss']:.3f}, gradient norm {first['grad_norm']:.3g}"
    if first["skipped"] or not second["loss"] < first["loss"]:
        raise Failed(told, REPORT)
    return f"{told}, {time.perf_counter() - began:.2f} s a step of {bench.cfg.policy.dtype}"


def offload(bench: Bench) -> str:
    """[all] Offload the policy and load it again: the bytes must be the same; and measure the bandwidth."""
    before = prints(bench)  # [all]
    if prints(bench) != before:  # [all]
        raise Failed("weights differ after a copy to host memory and back", REPORT)
    device = bench.world.device
    size = OFFLOADED["cpu" if device.type == "cpu" else "device"]
    tensor = torch.arange(size // 4, device=device, dtype=torch.int32)
    moved = Offload([tensor])
    # The first move also reserves the host's memory, which is not measured.
    moved.to_host()
    moved.to_device()
    began = time.perf_counter()
    moved.to_host()
    moved.to_device()
    same = bool((tensor == torch.arange(size // 4, device=device, dtype=torch.int32)).all())
    seconds = time.perf_counter() - began
    if not same:
        raise Failed("a tensor differs after a copy to host memory and back", REPORT)
    where = "" if device.type != "cpu" else ", within host memory: a run on the CPU moves nothing"
    return f"the same bytes, {2 * size / seconds / 2**30:.1f} GiB/s{where}"


def prints(bench: Bench) -> dict[str, object]:
    """[all] Return a fingerprint of each weight."""
    with bench.policy.awake():
        return fingerprints(bench.policy.weights())  # [all]


def checkpoint(bench: Bench) -> str:
    """[all] Save to the shared directory, train on, restore: the weights must be those of the checkpoint."""
    policy = bench.policy
    settings = CheckpointConfig()
    saver = Checkpointer(settings, bench.shared, bench.world, {"policy": policy}, {})
    before = prints(bench)  # [all]
    began = time.perf_counter()
    saver.maybe_save(1, last=True)  # [all]
    saved = time.perf_counter()
    with policy.awake():
        policy.update(batch(bench), loss, 1.0)  # [all]
    if prints(bench) == before:  # [all]
        raise Failed("an update did not change the weights", REPORT)
    resumed = time.perf_counter()
    step = saver.restore()  # [all]
    ended = time.perf_counter()
    if step != 1 or prints(bench) != before:  # [all]
        raise Failed("the weights restored are not those saved", "check the file system of run.dir")
    num_bytes = sum(path.stat().st_size for path in bench.shared.rglob("*") if path.is_file())
    return f"{gib(num_bytes)} saved in {saved - began:.2f} s, restored in {ended - resumed:.2f} s"
