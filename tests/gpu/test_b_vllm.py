"""vLLM: what it promises with either of its model runners, sleep on a shared device, speed, the demo."""

import os
import subprocess
import sys
import time
from array import array

import pytest
import torch

from spmd_rl import weights
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.model.smollm2 import default_dir, is_complete
from spmd_rl.types import Request
from tests.engines import VLLM_SIZES, has_vllm, needs_vllm
from tests.gpu.machine import DEVICE, REHEARSED, ROOT, note, seconds, shape, trainer, vllm
from tests.gpu.machine import pytestmark as needs_gpu
from tests.models import EXPERTS, tiny
from tests.patience import patient

pytestmark = [*needs_gpu, needs_vllm if REHEARSED else has_vllm]
EAGER = {"enforce_eager": True}
"""Settings with which it starts in seconds; graphs are captured where speed is measured."""
GRAPHS = {} if REHEARSED else {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
SPEEDS = {"graphs": GRAPHS, "compiled": {}}
"""Settings by what is measured; vLLM's own compile the model"""


def ask(engine, *requests: Request) -> dict[str, tuple[list[int], list[float]]]:
    """Generate the answers to these requests: tokens and logprobs by id."""
    for request in requests:
        engine.add(request)
    done = {}
    while engine.num_unfinished:
        done |= {c.id: (c.token_ids.tolist(), c.logprobs.tolist()) for c in engine.step()}
    return done


def request(id: str, seed: int, temperature: float = 1.0, new: int = 16, prompt=range(3, 20)) -> Request:
    return Request(id, array("i", prompt), new, temperature, seed)


def promises(world, path, args) -> None:
    """Check that a seed alone decides an answer, that logprobs are the trainer's, and that a reload changes nothing."""
    began = time.perf_counter()
    engine = vllm(world, path, max_running=64, kv_tokens=16384, args=args)
    started = time.perf_counter() - began
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    stored = {name: weight.to(torch.bfloat16) for name, weight in weights_of(model).items()}
    with engine.awake():
        engine.load(stored.items(), version=1)
        alone = ask(engine, request("a", 7))["a"]
        crowd = ask(engine, *(request(f"x{i}", i, new=3 + i % 9) for i in range(40)), request("a", 7))["a"]
        tokens, logprobs = ask(engine, request("g", 0, 0.0))["g"]
    engine.sleep()
    with engine.awake():
        engine.load(stored.items(), version=2)
        again = ask(engine, request("g2", 0, 0.0))["g2"][0]
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            weight.copy_(stored[name])
        logits = model(torch.tensor([[*range(3, 20), *tokens]])).logits[0, 16:-1].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    difference = float((torch.tensor(logprobs) - wanted).abs().mean())
    same = {"crowd_same": crowd[0] == alone[0], "again_same": again == tokens}
    runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "")
    note("promises", model=path.name, runner=runner, start_seconds=started, abs_diff=difference, **same)
    engine.close()
    assert difference < 0.05 and all(same.values())


def cycles(world, path) -> None:
    """Check that an engine that sleeps gives its memory back while the trainer's cache is full.

    Every other cycle generates nothing.
    """
    policy = trainer(world, path, offload=True)
    engine = vllm(world, path, max_running=64, kv_tokens=16384, args=EAGER)
    publish, asleep = weights.build(policy, engine, world, 1), []
    room = 0 if REHEARSED else torch.accelerator.get_memory_info()[0] * 7 // 10
    for version in range(3 if REHEARSED else 10):
        hoard = [torch.empty(2**30, dtype=torch.uint8, device=DEVICE) for _ in range(room >> 30)]
        del hoard  # torch keeps it
        with engine.awake():
            found = publish(version=version)
            if version % 2:
                ask(engine, request(f"r{version}", version))
        engine.sleep()
        if not REHEARSED:
            torch.accelerator.empty_cache()
        asleep.append(0 if REHEARSED else torch.accelerator.get_memory_info()[0])
    lost = (asleep[1] - min(asleep[2:])) / 1e9
    with engine.awake():
        pass
    wake = seconds(engine.awake().__enter__)
    note("sleep", free_gb=asleep[-1] / 1e9, lost_gb=lost, wake_seconds=wake, **found)
    engine.close()
    assert lost < 0.25, asleep


def decoding(world, path, name, kind) -> None:
    """Note the speed, as a share of the speed at which each step reads all weights once."""
    policy, new = trainer(world, path, offload=True), 4 if REHEARSED else 128
    began = time.perf_counter()
    engine = vllm(world, path, max_running=256, kv_tokens=256 * 384, args=SPEEDS[kind])
    started = time.perf_counter() - began
    weights.build(policy, engine, world, 0)(version=0)
    with engine.awake():
        for running in (8, 64, 256):
            for round in range(2):  # the first one loads kernels
                began = time.perf_counter()
                done = ask(engine, *(request(f"{running}-{round}-{i}", i, new=new) for i in range(running)))
                took = time.perf_counter() - began
            floor, tokens = new * 2 * policy.size.read / 3e12, sum(len(ids) for ids, _ in done.values())
            speed = {"tokens_per_s": tokens / took, "of_roofline": floor / took}
            note("vllm decode", model=name, kind=kind, running=running, start_seconds=started, **speed)
    engine.close()


def alone(what: str, path, *args, runner: str = "") -> None:
    """Run a function of this file in another process: a process can start vLLM's memory pool only once."""
    code = (
        "from pathlib import Path; from tests.gpu.machine import one_rank; from tests.gpu import test_b_vllm as tests\n"
        f"path = Path({str(path)!r})\n"
        f"with one_rank(path.parent / 'run') as world: tests.{what}(world, path, *{args!r})"
    )
    env = os.environ | ({"VLLM_USE_V2_MODEL_RUNNER": runner} if runner and not REHEARSED else {})
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=patient(100))


CASES = [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3_moe", EXPERTS["qwen3_moe"] | {"num_experts": 8})]


@pytest.mark.parametrize("runner", ["1", "0"])
@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=[kind for kind, _ in CASES])
def test_1_what_the_engine_leans_on(kind, sizes, runner, tmp_path):
    sizes = VLLM_SIZES | {"hidden_size": 256, "head_dim": 64} | sizes
    args = GRAPHS if kind == "llama" else EAGER
    alone("promises", tiny(kind, tmp_path / kind, **sizes), args, runner=runner)


def test_2_cycles_beside_a_large_trainer(tmp_path):
    alone("cycles", shape("1.7b", tmp_path / "model"))


@pytest.mark.parametrize("kind", list(SPEEDS))
@pytest.mark.parametrize("name", ["0.5b", "1.7b"])
def test_3_speed_of_decoding(name, kind, tmp_path):
    alone("decoding", shape(name, tmp_path / "model"), name, kind)


@pytest.mark.skipif(not is_complete(default_dir()), reason="python -m spmd_rl smollm2")
def test_4_the_demo_with_vllm(tmp_path):
    args = [
        "+experiment=demo",
        f"steps={1 if REHEARSED else 12}",
        "seed=0",
        "engine=vllm",
        "train.offload=true",
        f"run.dir={tmp_path}/run",
    ]
    subprocess.run([sys.executable, "-m", "spmd_rl.rlvr", *args], cwd=ROOT, check=True, timeout=patient(110))
