"""Second half of the list: vLLM's promises with either of its runners, sleep beside a trainer, speed, the demo."""

import os
import subprocess
import sys
import time
from array import array

import pytest
import torch

from spmd_rl import engine as engines
from spmd_rl import weights
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.types import Request
from tests.engines import VLLM_SIZES, needs_vllm
from tests.gpu.machine import ROOT, note, one_rank, random_model, trainer, vllm_settings
from tests.gpu.machine import pytestmark as needs_gpu
from tests.models import EXPERTS, tiny

pytestmark = [*needs_gpu, needs_vllm]


def ask(engine, *requests: Request) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and logprobs by id."""
    for request in requests:
        engine.add(request)
    done = {}
    while engine.num_unfinished:
        done |= {c.id: (c.token_ids.tolist(), c.logprobs.tolist()) for c in engine.step()}
    return done


def request(id: str, seed: int, temperature: float = 1.0, new: int = 16, prompt=range(3, 20)) -> Request:
    return Request(id, array("i", prompt), new, temperature, seed)


def promises(world, path) -> None:
    """A seed alone decides, in any company; logprobs are the trainer's; the same weights twice, the same tokens."""
    cfg = vllm_settings(path, max_running=64, kv_tokens=16384)
    engine = engines.build(cfg.engine, cfg.policy, cfg.train.offload, world)
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    with engine.awake():
        engine.load(weights_of(model.to(torch.bfloat16)).items(), version=1)
        alone = ask(engine, request("a", 7))["a"]
        crowd = ask(engine, *(request(f"x{i}", i, new=3 + i % 9) for i in range(40)), request("a", 7))["a"]
        assert crowd[0] == alone[0]
        tokens, logprobs = ask(engine, request("g", 0, 0.0))["g"]
        with torch.no_grad():
            logits = model.float()(torch.tensor([[*range(3, 20), *tokens]])).logits[0, 16:-1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (torch.tensor(logprobs) - wanted).abs().mean() < 0.05
        engine.load(weights_of(model.to(torch.bfloat16)).items(), version=2)
        assert ask(engine, request("g2", 0, 0.0))["g2"][0] == tokens
    engine.close()


CASES = [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3_moe", EXPERTS["qwen3_moe"] | {"num_experts": 8})]


@pytest.mark.parametrize("runner", ["0", "1"])
@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=[kind for kind, _ in CASES])
def test_1_what_the_engine_leans_on(kind, sizes, runner, tmp_path):
    """Each in a process of its own: vLLM's memory pool may be used once."""
    path = tiny(kind, tmp_path / "model", **VLLM_SIZES | sizes)
    code = (
        "from pathlib import Path; from tests.gpu.machine import one_rank; from tests.gpu.test_b_vllm import promises\n"
        f"with one_rank(Path({str(tmp_path / 'run')!r})) as world: promises(world, Path({str(path)!r}))"
    )
    env = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": runner}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=300)


def test_2_thirty_cycles_beside_a_large_trainer(tmp_path):
    """Every other cycle without a request: what sleeps gives its memory back, whatever the trainer has kept."""
    path = random_model("1.7b", tmp_path / "model")
    with one_rank(tmp_path / "run") as world:
        policy = trainer(world, path, offload=True)
        engine = engines.build(vllm_settings(path, max_running=64, kv_tokens=65536), world)
        publish = weights.build(policy, engine, world, 1)
        asleep = []
        for version in range(30):
            hoard = [torch.empty(2**30, dtype=torch.uint8, device=world.device) for _ in range(60)]
            del hoard  # torch keeps it
            with engine.awake():
                publish(version=version)
                if version % 2:
                    ask(engine, request(f"r{version}", version))
            torch.accelerator.empty_cache()
            asleep.append(torch.accelerator.get_memory_info()[0])
        note("sleep", free_gb=asleep[-1] / 1e9)
        assert min(asleep[2:]) > asleep[1] - 2**28, asleep
        engine.close()


@pytest.mark.parametrize("name", ["0.5b", "1.7b"])
def test_3_speed_of_decoding(name, tmp_path):
    path = random_model(name, tmp_path / "model")
    with one_rank(tmp_path / "run") as world:
        policy = trainer(world, path, offload=True)
        engine = engines.build(vllm_settings(path, max_running=1024, kv_tokens=1024 * 640), world)
        weights.build(policy, engine, world, 0)(version=0)
        with engine.awake():
            ask(engine, request("warm", 0))
            for running in (64, 256, 1024):
                began = time.perf_counter()
                done = ask(engine, *(request(f"{running}-{i}", i, new=256) for i in range(running)))
                took = time.perf_counter() - began
                tokens = sum(len(ids) for ids, _ in done.values())
                # each step reads all weights once: what the memory's speed allows
                floor = 256 * 2 * policy.size.read / 4.3e12
                note("decode", model=name, running=running, tokens_per_s=tokens / took, of_roofline=floor / took)
        engine.close()


def test_4_the_demo_with_vllm(tmp_path):
    args = ["+experiment=demo", "steps=12", "seed=0", "engine=vllm", "train.offload=true", f"run.dir={tmp_path}/run"]
    subprocess.run([sys.executable, "-m", "spmd_rl.rlvr", *args], cwd=ROOT, check=True, timeout=500)
