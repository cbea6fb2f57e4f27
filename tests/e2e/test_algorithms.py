"""Algorithms with state of their own, through the real door: PPO with a critic, an adaptive KL and running moments."""

import re

import pytest

from tests.e2e.runs import EXACT, Toy

STATEFUL = (
    *EXACT,
    "algorithm=ppo",
    "algorithm.kl_reward_coef=0.1",
    "algorithm.target_kl=0.01",
    "algorithm.kl_horizon=20",
    "algorithm.norm_mean_type=running",
    "algorithm.norm_std_type=running",
    "algorithm.critic_warmup=1",
    "algorithm.sample_epochs=2",
    "reference.sync_steps=2",
    "reference.mixup=0.5",
    "train.updates_per_step=2",
    "rollout.prompts_per_step=3",
)
READ = (
    "critic/kl",
    "critic/kl_coef",
    "critic/rewards/mean",
    "critic/values/mean",
    "critic/loss",
    "actor/grad_norm",
    "actor/pg_loss",
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("algorithms"))


def test_all_state_of_an_algorithm_survives_a_resume(toy: Toy) -> None:
    straight = toy.run(*STATEFUL, "steps=4", name="straight")
    toy.run(*STATEFUL, "steps=2", name="stopped")
    resumed = toy.run(*STATEFUL, "steps=4", name="stopped")
    for step in (1, 2, 3, 4):
        ours, theirs = resumed.metrics()[step], straight.metrics()[step]
        assert {key: ours.get(key) for key in READ} == {key: theirs.get(key) for key in READ}, step
    assert "actor/grad_norm" not in straight.metrics()[1], "the critic alone learns in its warm-up"
    assert all(key in straight.metrics()[2] for key in READ)
    coefs = [metrics["critic/kl_coef"] for metrics in straight.metrics()[2:]]
    assert len(set(coefs)) == 3, "the controller moves"
    assert straight.metrics()[4]["critic/values/mean"] != 0
    assert "view tensor" not in straight.text(), "FSDP warns of modules whose output is a view"


def test_a_run_outside_of_a_bound_stops_on_all_ranks_and_says_where(toy: Toy) -> None:
    bounds = ("algorithm.bounds.max_abs_diff=1e-12", "algorithm.bounds.on_breach=stop")
    run = toy.start(*EXACT, *bounds, "steps=2", ranks=2, name="bound")
    assert run.wait() == 1
    line = (run.run_dir / "error.txt").read_text().strip()
    found = re.fullmatch(
        r"step 1: train_infer/abs_diff/mean is (\S+), above algorithm\.bounds\.max_abs_diff=1e-12", line
    )
    assert found and 1e-12 < float(found[1]) < 1e-4, line
    assert [line["step"] for line in run.metrics()] == [0], "there was no update"
    warned = toy.run(*EXACT, bounds[0], "steps=3", ranks=2, name="warned")
    said = [line for line in warned.text().splitlines() if "algorithm.bounds.max_abs_diff" in line]
    assert len(said) == 1 and said[0].startswith("warning: step 1: train_infer/abs_diff/mean is ")
    for metrics in warned.metrics()[1:]:
        low, mean, high = (metrics[f"train_infer/ratio/{kind}"] for kind in ("min", "mean", "max"))
        assert 0.9 < low < mean < high < 1.1 and 0.999 < metrics["train_infer/ess"] <= 1
        assert metrics["train_infer/abs_diff/max"] >= metrics["train_infer/abs_diff/mean"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["ppo", "remax", "reinforce_pp", "clip_cov", "icepop", "dr_grpo", "topr", "dppo", "gspo"]
)
def test_recipes_run_through_the_door(toy: Toy, recipe: str) -> None:
    run = toy.run(*EXACT, f"algorithm={recipe}", "steps=2", name=recipe)
    last = run.metrics()[2]
    assert last["actor/grad_norm"] > 0 and last["actor/skipped"] == 0
    assert len(last) > 30
