"""The door with other models and other settings: each variant runs two steps and leaves what it should."""

import json
import os
import signal

import pytest
import torch

from tests.e2e.runs import Toy


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_model_families(tmp_path, kind: str) -> None:
    run = Toy(tmp_path, kind).start("steps=1", ranks=0)
    assert run.wait() == 0, run.text()[-3000:]
    line = run.metrics()[1]
    assert line["actor/grad_norm"] > 1e-3
    assert line["train_infer/abs_diff/mean"] < 0.05  # bfloat16


def test_a_mixture_of_experts_is_loaded_by_transformers_and_trains(tmp_path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    run = Toy(tmp_path, "qwen3_moe", **sizes).start("steps=1", "policy.dtype=float32", ranks=2)
    assert run.wait() == 0, run.text()[-3000:]
    line = run.metrics()[1]
    assert line["actor/grad_norm"] > 1e-3
    assert line["train_infer/abs_diff/mean"] < 1e-4


def test_reference_several_updates_and_recomputation_on_two_ranks(tmp_path) -> None:
    run = Toy(tmp_path).start(
        "steps=2", "algorithm.kl_coef=0.1", "train.updates_per_step=2", "train.activation_checkpointing=true",
        "train.tokens_per_microbatch=24", "algorithm.loss_agg=seq-mean-token-mean", "policy.schedule=cosine",
        "policy.warmup_steps=1", "track.tensorboard=true", "track.wandb=offline", ranks=2,
    )  # fmt: skip
    assert run.wait() == 0, run.text()[-3000:]
    first, second = run.metrics()[1:]
    assert first["actor/kl_loss"] >= 0 and second["actor/kl_loss"] > 0
    assert first["time/logprobs"] > 0
    assert first["actor/backward_steps"] > 1
    assert second["actor/approxkl"] > 0, "the second update of a step is off-policy"
    assert any((run.run_dir / "tensorboard").iterdir())


def test_times_sum_to_the_step_and_overhead_is_small(tmp_path) -> None:
    run = Toy(tmp_path).start("steps=3", "rollout.max_new_tokens=24", "rollout.answers_per_prompt=16", ranks=2)
    assert run.wait() == 0, run.text()[-3000:]
    for line in run.metrics()[1:]:
        named = sum(v for k, v in line.items() if k.startswith("time/") and k not in ("time/total", "time/other"))
        assert named >= 0.99 * line["time/total"], {k: v for k, v in line.items() if k.startswith("time/")}
    assert sum(m["system/overhead"] for m in run.metrics()[1:]) / 3 < 0.1


def test_efficiency_is_of_what_was_sampled_and_trained(tmp_path) -> None:
    run = Toy(tmp_path).start("steps=2", "algorithm.kl_coef=0.1", "track.device.flops=1e11", ranks=2)
    assert run.wait() == 0, run.text()[-3000:]
    line = run.metrics()[2]
    spent = line["time/total"] - line["time/eval"] - line["time/checkpoint"]
    rows = run.samples(2)
    # Generated; and of what trains: read by the reference, and updated on by three passes.
    flops = forward_flops(rows) + 4 * forward_flops([row for row in rows if row["kept"]])
    assert line["system/efficiency"] == pytest.approx(flops / 2e11 / spent)


def forward_flops(rows: list[dict]) -> float:
    """Operations of a forward pass of the tiny Llama over the samples of a log, prompts once a group."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        (turn,) = row["turns"]
        groups.setdefault(row["ticket"], []).append((len(turn["prompt_ids"]), len(turn["token_ids"])))
    prompts, answers = [group[0][0] for group in groups.values()], [a for group in groups.values() for a in group]
    body, head, attention = 2 * 36992 + 64, 260 * 64, 2 * 64
    sampled, seen = sum(a for _, a in answers), sum(p * a + a * a / 2 for p, a in answers)
    flops = 2 * body * (sum(prompts) + sampled) + 2 * head * sampled
    return flops + 4 * attention * (seen + sum(p * p / 2 for p in prompts))


def test_a_rank_may_hold_nothing(tmp_path) -> None:
    """Four ranks, two groups a step: two ranks generate and train on nothing."""
    run = Toy(tmp_path).start("steps=2", "rollout.prompts_per_step=2", ranks=4)
    assert run.wait() == 0, run.text()[-3000:]
    assert [m["rollout/accepted"] for m in run.metrics()[1:]] == [2, 2]


def test_what_a_run_leaves_behind_is_whole(tmp_path) -> None:
    run = Toy(tmp_path).start("steps=1", "profile=true", ranks=0)
    assert run.wait() == 0
    trace = json.loads((run.run_dir / "traces" / "step-000001-rank-0.json").read_text())
    assert any("scaled_dot_product" in event.get("name", "") for event in trace["traceEvents"])
    page = (run.run_dir / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script src" not in page
    manifest = json.loads((run.run_dir / "checkpoints" / "step-000001" / "manifest.json").read_text())
    assert manifest["step"] == 1
    weights = run.weights(1)
    assert all(torch.isfinite(w).all() for w in weights.values())


def test_a_run_directory_in_use_is_refused(tmp_path) -> None:
    toy = Toy(tmp_path)
    first = toy.start("steps=2", "reward.toy.args.sleep=0.1", ranks=0)
    first.wait_for("enter generate", step=1)
    os.kill(first.process.pid, signal.SIGSTOP)  # however long the second takes to start
    second = toy.start("steps=2", "reward.toy.args.sleep=0.1", f"run.dir={first.run_dir}", ranks=0, name="second")
    assert second.wait() == 2
    os.kill(first.process.pid, signal.SIGCONT)
    assert "in use by another job" in second.text().splitlines()[-1]
    assert first.wait() == 0, first.text()[-3000:]
    assert [m["step"] for m in first.metrics()] == [0, 1, 2]


def test_an_answer_longer_than_the_engine_holds_is_told_at_start(tmp_path) -> None:
    run = Toy(tmp_path).start(
        "rollout.max_prompt_tokens=30",
        "rollout.max_new_tokens=89",
        "engine.kv_tokens=119",
        ranks=0,  # whole blocks: 116
    )
    assert run.wait() == 2
    assert "rollout.max_new_tokens=89" in run.text().splitlines()[-1]
