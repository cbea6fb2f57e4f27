"""The utilization of devices: operations worked out by hand, and the devices whose peak is known."""

from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.config import RlvrConfig
from spmd_rl.distributed import solo
from spmd_rl.learn.utilization import forward_flops, peak_flops
from spmd_rl.model.build import build_model
from spmd_rl.model.size import ModelSize
from spmd_rl.rollout.table import ANSWER
from spmd_rl.track.metrics import read_lines
from spmd_rl.track.run import Run
from tests.models import tiny

SMALL = ModelSize(parameters=1000, read=900, per_token=800, head=100, kv=10, attention=20)


def rows(*answers: tuple[int, int, int, int]) -> np.ndarray:
    """Answers by ticket, prompt tokens, sampled tokens and all tokens."""
    table = np.zeros(len(answers), ANSWER)
    for row, values in zip(table, answers, strict=True):
        row["ticket"], row["num_prompt_tokens"], row["num_answer_tokens"], row["num_tokens"] = values
    return table


def test_operations_worked_out_by_hand() -> None:
    prompt, answers = 2 * 800 * 4 + 4 * 20 * 8, 2 * 900 * 5 + 4 * 20 * (4 * 2 + 2 + 4 * 3 + 4.5)
    group = [(0, 4, 2, 6), (0, 4, 3, 7)]
    assert forward_flops(SMALL, rows(*group)) == prompt + answers  # the prompt counts once
    other = prompt + 2 * 900 * 2 + 4 * 20 * (4 * 2 + 2) + 2 * 800 * 3  # three tokens between the turns
    assert forward_flops(SMALL, rows(*group, (1, 4, 2, 9))) == prompt + answers + other
    assert forward_flops(SMALL, rows()) == 0


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


def test_a_peak_is_the_setting_else_that_of_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert peak_flops(None, cpu, "bfloat16") is None
    assert peak_flops(1e12, cpu, "float32") == 1e12
    monkeypatch.setattr(torch, "get_device_module", lambda device: Named("NVIDIA H200"))
    assert peak_flops(None, gpu, "bfloat16") == 989.4e12
    assert peak_flops(None, gpu, "float32") is None
    assert peak_flops(5e14, gpu, "bfloat16") == 5e14
    monkeypatch.setattr(torch, "get_device_module", lambda device: Named("NVIDIA GeForce RTX 4090"))
    assert peak_flops(None, gpu, "bfloat16") is None


def test_a_step_is_measured_without_evaluation_and_checkpoint(tmp_path: Path) -> None:
    cfg = RlvrConfig(steps=2)
    cfg.run.dir = str(tmp_path)
    with solo(tmp_path) as world, Run.open(cfg, world) as track:
        for step, least in ((1, {"seconds_at_peak": 0.03}), (2, {})):
            with track.step(step):
                track.add(least)
                for phase in ("update", "eval", "save"):
                    with world.phase(phase):
                        world.progress()
    first, second = read_lines(tmp_path / "metrics.jsonl")
    measured = first["time/total"] - first["time/eval"] - first["time/checkpoint"]
    assert first["system/efficiency"] == pytest.approx(0.03 / measured)
    assert "seconds_at_peak" not in first and "system/efficiency" not in second
