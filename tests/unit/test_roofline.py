"""The roofline: numbers worked out by hand, a published run, and which devices it is known for."""

from pathlib import Path

import pytest
import torch

from spmd_rl.config import RlvrConfig
from spmd_rl.config.schema import DeviceSpecConfig
from spmd_rl.distributed import solo
from spmd_rl.model.build import build_model
from spmd_rl.model.size import ModelSize
from spmd_rl.track.metrics import read_lines
from spmd_rl.track.roofline import (
    KNOWN_DEVICES,
    Devices,
    DeviceSpec,
    ModelPasses,
    TokenCounts,
    find_device_spec,
    roofline,
)
from spmd_rl.track.run import Run
from tests.models import tiny

SMALL = ModelSize(parameters=1000, read=900, per_token=800, head=100, kv=10, attention=20)
GROUP = [(4, 2, 6), (4, 3, 7)]


def test_what_answers_share_counts_once() -> None:
    one = TokenCounts.of([GROUP])
    assert one == TokenCounts(prompts=4, sampled=5, longest=3, attended=4 * 2 + 2 + 4 * 3 + 4.5, attended_by_prompts=8)
    assert TokenCounts.of([GROUP, [(4, 2, 9)]]).prompts == 4 + 4 + 3  # three tokens between the turns
    assert TokenCounts.of([]) == TokenCounts.of([[]]) == TokenCounts(0, 0, 0, 0, 0)


def test_seconds_worked_out_by_hand() -> None:
    spec, devices = DeviceSpec(1000, 1000), Devices(ranks=2, tp=1, itemsize=2)
    passes = [ModelPasses(SMALL, 1, True), ModelPasses(SMALL, 1, False), ModelPasses(SMALL, 1, False)]
    tokens = TokenCounts.of([GROUP])
    prompt = 2 * 800 * 4 + 4 * 20 * 8
    answers = 2 * 900 * 5 + 4 * 20 * 26.5
    seconds = roofline(tokens, tokens, SMALL, passes, devices, spec)
    expected = {
        "generate": prompt / 2000 + 3 * 900 * 2 / 1000 + 10 * 2 * 26.5 / 2000,  # decoding: arithmetic is but 5.56 s
        "logprobs": 3 * (prompt + answers) / 2000,
        "train": 3 * (prompt + answers) / 2000,
    }
    assert seconds == pytest.approx(expected, rel=1e-12)
    busy = roofline(tokens, tokens, SMALL, passes, devices._replace(tp=2), spec)
    assert busy["generate"] == pytest.approx(
        (prompt + answers) / 2000
    )  # half the weights a rank: arithmetic is the bound
    alone = roofline(tokens, tokens, SMALL, passes, devices._replace(ranks=1), spec)
    assert alone["train"] == pytest.approx(2 * seconds["train"])


def test_a_published_run() -> None:
    """Llama-3.1-8B on 16 H100 (NeMo-RL's performance summary, v0.5): 2,048 answers of 1,019 tokens with their prompts.

    Assumed: prompts of 120 tokens, the longest answer at the limit of 4,096, a variance of the lengths of half their
    mean squared, and no prompt shared in training. A roof worked out independently: 25.4 s of generation, 5.3 of two
    passes for logprobs, 8.0 of training.
    """
    llama = ModelSize(8_030_000_000, 8_030_000_000, 8_030_000_000, 0, kv=2 * 32 * 8 * 128, attention=0)
    num, prompt, answer = 2048, 120, 1019 - 120
    seen = num * (prompt * answer + 1.5 * answer**2 / 2)
    generated = TokenCounts(num // 32 * prompt, num * answer, 4096, seen, 0)
    trained = generated._replace(prompts=num * prompt)
    h100 = KNOWN_DEVICES["NVIDIA H100 80GB HBM3"]
    devices = Devices(ranks=16, tp=1, itemsize=2)
    seconds = roofline(generated, trained, llama, [ModelPasses(llama, 2, True)], devices, h100)
    assert seconds["generate"] == pytest.approx(25.4, rel=0.03)
    assert seconds["logprobs"] == pytest.approx(5.3, rel=0.02)
    assert seconds["train"] == pytest.approx(8.0, rel=0.02)
    assert sum(seconds.values()) == pytest.approx(25.4 + 5.3 + 8.0, rel=0.02)


@pytest.mark.parametrize("tie", [False, True])
def test_the_size_of_a_model_is_counted(tmp_path: Path, tie: bool) -> None:
    model = build_model(tiny("llama", tmp_path, tie=tie), torch.float32, "cpu")
    table = 260 * 64
    body = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    assert ModelSize.of(model) == ModelSize(
        parameters=body + table * (1 if tie else 2),
        read=body + table,
        per_token=body,
        head=table,
        kv=2 * 2 * 2 * 16,
        attention=2 * 4 * 16,
    )


def test_idle_experts_multiply_nothing() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(
        **sizes, num_key_value_heads=1, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=1
    )
    with torch.device("meta"):
        size = ModelSize.of(AutoModelForCausalLM.from_config(config))
    routed = 2 * 4 * 3 * 32 * 8
    assert size.parameters - size.per_token == 2 * 64 * 32 + routed * 3 // 4
    assert size.read == size.parameters - 64 * 32  # a replica's answers meet all experts


class Named:
    """An accelerator, as `torch.get_device_module` gives it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_device_name(self, device: torch.device) -> str:
        return self.name


def test_spec_are_the_settings_else_those_of_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, none = torch.device("cpu"), torch.device("cuda", 0), DeviceSpecConfig()
    assert find_device_spec(none, cpu, "bfloat16") is None
    assert find_device_spec(DeviceSpecConfig(flops=1e12), cpu, "float32") is None
    given = DeviceSpecConfig(flops=1e12, memory_bandwidth=2e10)
    assert find_device_spec(given, cpu, "float32") == DeviceSpec(1e12, 2e10)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Named("NVIDIA H200"))
    h200 = find_device_spec(none, gpu, "bfloat16")
    assert h200.flops == pytest.approx(790e12, rel=0.01) and h200.memory_bandwidth == pytest.approx(4.3e12, rel=0.01)
    assert find_device_spec(none, gpu, "float32") is None
    assert find_device_spec(DeviceSpecConfig(flops=5e14), gpu, "bfloat16") == DeviceSpec(5e14, h200.memory_bandwidth)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Named("NVIDIA GeForce RTX 4090"))
    assert find_device_spec(none, gpu, "bfloat16") is None


def test_a_step_is_measured_without_evaluation_and_checkpoint(tmp_path: Path) -> None:
    cfg = RlvrConfig(steps=2)
    cfg.run.dir = str(tmp_path)
    with solo(tmp_path) as world, Run.open(cfg, world) as track:
        for step, least in ((1, {"roofline/generate": 0.01, "roofline/train": 0.02}), (2, {})):
            with track.step(step):
                track.add(least)
                for phase in ("update", "eval", "save"):
                    with world.phase(phase):
                        world.progress()
    first, second = read_lines(tmp_path / "metrics.jsonl")
    measured = first["time/total"] - first["time/eval"] - first["time/checkpoint"]
    assert first["system/efficiency"] == pytest.approx(0.03 / measured)
    assert "system/efficiency" not in second
