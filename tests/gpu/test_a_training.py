"""First half of the list: one step end to end, kernels against float32, speed and waits of an update, a publish."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from spmd_rl import weights
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.learn.losses import bind_loss
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.model.fingerprint import fingerprint
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.train.offload import Offload
from tests.gpu.machine import ROOT, note, one_rank, pytestmark, random_model, samples, seconds, trainer  # noqa: F401
from tests.models import tiny
from tests.training import relative

DEMO = [sys.executable, "-m", "spmd_rl.rlvr", "+experiment=demo", "seed=0"]


def demo(tmp_path, *args, **options):
    """The demo on this machine."""
    return subprocess.Popen([*DEMO, f"run.dir={tmp_path}/run", *args], cwd=ROOT, **options)


def test_1_two_steps_end_to_end(tmp_path):
    note("versions", torch=torch.__version__, device=torch.accelerator.current_accelerator().type)
    assert demo(tmp_path, "steps=2", "debug=true").wait(300) == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_2_varlen_attention_with_parents_and_fewer_key_value_heads(kind, tmp_path):
    """Values and gradients in bfloat16 against padded attention in float32: as near as padded attention in bfloat16."""
    path = tiny(kind, tmp_path, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    ids = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(0))
    starts, parents = torch.tensor([0, 90, 130, 131, 400]), torch.tensor([-1, 0, 0, 1])
    first = [0, 90, 90, 130]
    positions = torch.cat([torch.arange(b - a) + f for a, b, f in zip(starts[:-1], starts[1:], first, strict=True)])
    direction = torch.randn(400, 260, generator=torch.Generator().manual_seed(1))

    def run(dtype, device):
        model = build_model(path, dtype, device)
        packing = Packing.of(starts, parents, torch.device(device), dtype)
        place = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
        out = model(**place, packing=packing).logits[0].float()
        (out * direction.to(device)).sum().backward()
        return [out.detach().cpu(), *(p.grad.float().cpu() for p in model.parameters())]

    exact, rounded, ours = run(torch.float32, "cpu"), run(torch.bfloat16, "cpu"), run(torch.bfloat16, "cuda")
    for want, near, got in zip(exact, rounded, ours, strict=True):
        assert relative(got, want) < 2 * relative(near, want) + 1e-3


def test_2_the_logprob_head(tmp_path):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 256, generator=generator) / 8 for n in (700, 50_000))
    targets, found = torch.randint(0, 50_000, (700,), generator=generator), {}
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in (hidden, weight)]
        logprobs, entropy = token_logprobs(*leaves, targets.to(device), 0.7)
        (logprobs.sum() + entropy.sum()).backward()
        found[device] = [x.detach().cpu() for x in (logprobs, entropy, *(leaf.grad for leaf in leaves))]
    assert all(relative(got, want) < 1e-3 for got, want in zip(found["cuda"], found["cpu"], strict=True))


def test_2_twenty_round_trips_to_the_host_keep_every_bit():
    tensors = [torch.randn(n, device="cuda") for n in (3, 2**24 + 1, 10**7, 5)]
    before, moved = [fingerprint(t) for t in tensors], Offload(tensors)
    for _ in range(20):
        moved.changed()
        moved.to_host()
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        moved.to_device()
    assert [fingerprint(t) for t in tensors] == before
    gigabytes = 2 * sum(t.nbytes for t in tensors) / 1e9
    moved.changed()
    note("offload", gb_per_s=gigabytes / seconds(lambda: (moved.to_host(), moved.to_device())))


@pytest.mark.parametrize("name", ["0.5b", "1.7b", "3b"])
def test_3_speed_memory_and_waits_of_an_update(name, tmp_path):
    """64 samples of 1,024 tokens; the waits of the CPU for the device do not grow with the micro-batches."""
    path, loss, waits = random_model(name, tmp_path / "model"), bind_loss(AlgorithmConfig()), {}
    with one_rank(tmp_path / "run") as world:
        for budget in (32768, 8192):
            policy = trainer(world, path, tokens_per_microbatch=budget, activation_checkpointing=name == "3b")
            batch = samples(64, 256, 768)
            policy.update(batch, loss, 1.0)
            torch.accelerator.reset_peak_memory_stats()
            took = seconds(lambda p=policy: p.update(batch, loss, 1.0))
            torch.cuda.set_sync_debug_mode("warn")
            with pytest.warns(UserWarning) as told:
                policy.update(batch, loss, 1.0)
            torch.cuda.set_sync_debug_mode("default")
            waits[budget] = sum("synchroniz" in str(w.message) for w in told)
            flops = 6 * policy.size.parameters * batch.num_tokens
            note(
                "update",
                model=name,
                budget=budget,
                tokens_per_s=batch.num_tokens / took,
                tflops=flops / took / 1e12,
                peak_gb=torch.accelerator.max_memory_allocated() / 1e9,
                waits=waits[budget],
            )
            policy.close()
            torch.accelerator.empty_cache()
    assert waits[8192] <= waits[32768] + 6, waits  # six more micro-batches


def test_3_one_answer_of_32k_tokens(tmp_path):
    with one_rank(tmp_path / "run") as world:
        policy = trainer(world, random_model("0.5b", tmp_path / "model"), activation_checkpointing=True)
        batch = samples(1, 512, 32256)
        assert policy.update(batch, bind_loss(AlgorithmConfig()), 1.0)["skipped"] == 0
        note("32k answer", seconds=seconds(lambda: policy.logprobs(batch, 1.0)))


def test_4_a_publish_of_3b(tmp_path):
    """Gather and hashes against the time in which memory is read."""
    path = random_model("3b", tmp_path / "model")
    with one_rank(tmp_path / "run") as world:
        policy = trainer(world, path)
        engine = NativeEngine(empty_module(path, torch.bfloat16, world.device), max_running=8, kv_tokens=4096)
        publish = weights.build(policy, engine, world, 0)
        publish(version=0)
        metrics = publish(version=1)
        note("publish", **metrics, floor_seconds=metrics["publish/bytes"] / 4.3e12)


def test_5_the_demo_learns(tmp_path):
    assert demo(tmp_path, "steps=12").wait(500) == 0


def test_5_a_stop_inside_an_update_is_reported(tmp_path):
    """Nobody moves: the run ends by itself and says where it stood."""
    process = demo(tmp_path, "steps=50", "journal.stall_seconds=10", stderr=subprocess.DEVNULL)
    journal, deadline = tmp_path / "run" / "journal" / "rank-0.jsonl", time.monotonic() + 200
    while not (journal.exists() and '"phase":"update"' in journal.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(process.pid, signal.SIGCONT)  # what it was stopped for is no stall of its own
    time.sleep(5)
    assert process.poll() is None
    process.terminate()
    assert process.wait(30) != 0
