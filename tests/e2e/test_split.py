"""`placement.mode=split` through the real door: on-policy it is the colocated run, and else it keeps its bound."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy
from tests.engines import VLLM_SIZES, needs_vllm

SETTINGS = (*EXACT, "steps=3", "placement.mode=split", "placement.max_staleness=0")


@pytest.fixture(scope="module")
def straight(toy: Toy) -> Running:
    """Three steps on one rank that does everything: the reference."""
    return toy.run(*EXACT, "steps=3", ranks=1, name="straight")


def tokens(run: Running, step: int) -> list:
    return [(s["ticket"], s["answer"], [turn["token_ids"] for turn in s["turns"]]) for s in run.samples(step)]


def lags(run: Running, step: int) -> set[int]:
    return {step - 1 - version for s in run.samples(step) for turn in s["turns"] for version in turn["versions"]}


def assert_same(run: Running, straight: Running) -> None:
    """Samples, scores and weights of all steps, to the bit."""
    for step in (1, 2, 3):
        assert tokens(run, step) == tokens(straight, step)
    scores = "critic/score/mean", "val/score/mean", "actor/grad_norm"
    assert [[line.get(key) for key in scores] for line in run.metrics()] == [
        [line.get(key) for key in scores] for line in straight.metrics()
    ]
    ours, theirs = run.weights(3), straight.weights(3)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_on_policy_it_is_the_colocated_run_to_the_bit(toy: Toy, straight: Running) -> None:
    run = toy.run(*SETTINGS, name="on-policy")
    assert_same(run, straight)
    assert all(lags(run, step) == {0} for step in (1, 2, 3))
    assert run.text().count(": rank 0 trains (fsdp2, tp=1), rank 1 generates (native, tp=1)") == 1


@pytest.mark.slow
@needs_vllm
def test_a_replica_of_two_ranks_on_policy_is_the_colocated_one_to_the_bit(tmp_path: Path) -> None:
    toy, engine = Toy(tmp_path, "qwen2", **VLLM_SIZES), ("engine=vllm", "engine.tp=2")
    straight = toy.run(*EXACT, "steps=3", *engine, name="straight-vllm")
    assert_same(toy.run(*SETTINGS, *engine, ranks=4, name="replica"), straight)


@pytest.mark.slow
def test_stages_of_megatron_on_policy_are_the_colocated_ones_to_the_bit(toy: Toy) -> None:
    backend = ("train=megatron", "train.pp=2")
    straight = toy.run(*EXACT, "steps=3", *backend, name="straight-megatron")
    run = toy.run(*SETTINGS, *backend, "placement.train=0-1", ranks=3, name="megatron")
    assert_same(run, straight)


@pytest.mark.slow
def test_experts_of_two_versions_are_replayed(tmp_path: Path) -> None:
    """A publish comes in the middle of answers: each token goes to the experts that its own version chose."""
    carried = ("rollout.partial_rollout=true", "rollout.over_sample=4", "rollout.max_new_tokens=24")
    run = Toy(tmp_path, "qwen3_moe").run(
        "placement.mode=split", *carried, "policy.dtype=float32", "policy.router_replay=true", "engine.max_running=4"
    )
    turns = [turn for step in (1, 2, 3, 4) for s in run.samples(step) for turn in s["turns"]]
    assert any(len(set(turn["versions"])) > 1 for turn in turns)
    shares = [line["moe/replayed"] for line in run.metrics()[1:]]
    assert all(share > 0.5 for share in shares), shares
    assert max(line["rollout/lag/max"] for line in run.metrics()[1:]) == 1
    assert run.metrics()[1]["train_infer/abs_diff/mean"] < 1e-5


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_token_is_older_than_the_bound(toy: Toy, straight: Running, staleness: int) -> None:
    run = toy.run(
        *SETTINGS, f"placement.max_staleness={staleness}", "placement.generate=0,2", ranks=4, name=f"stale-{staleness}"
    )
    assert tokens(run, 1) == tokens(straight, 1)  # guarantee S
    # Step 2 is begun before there is a version 1; where a replica is late, some of it after.
    assert lags(run, 1) == {0} and {1} <= lags(run, 2) <= {0, 1}
    assert lags(run, 3) <= set(range(staleness + 1))
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]
    assert max(line["rollout/lag/max"] for line in run.metrics()[1:]) <= staleness
    used = [(s["ticket"], s["answer"]) for step in (1, 2, 3) for s in run.samples(step)]
    assert used == [(ticket, answer) for ticket in range(max(used)[0] + 1) for answer in range(4)]


POINTS = [("rank-1", "progress generate"), ("rank-0", "enter update"), ("rank-0", "enter save")]
"""A generating rank and a training rank, where each is at work."""


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "point"), POINTS)
def test_a_killed_run_continues_as_if_nothing_had_happened(
    toy: Toy, straight: Running, victim: str, point: str
) -> None:
    name = f"{victim}-{point.replace(' ', '-')}"
    run = toy.linger(point, *SETTINGS, name=name, torchrun=True)  # whose agent ends the others
    run.wait_for(point, rank=int(victim[-1]))
    os.kill(run.pid(victim), signal.SIGKILL)
    assert run.wait(60) != 0
    assert not run.outlived(2.0), "a process outlived its run"
    assert_same(toy.run(*SETTINGS, name=name), straight)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank-0", "rank-1"])
def test_a_stopped_rank_is_named(toy: Toy, victim: str) -> None:
    point = {"rank-0": "enter update", "rank-1": "progress generate"}[victim]
    run = toy.linger(
        point, *SETTINGS, "reward.toy.timeout=3", "journal.stall_seconds=4", name=f"{victim}-stopped", torchrun=True
    )
    run.wait_for(point, rank=int(victim[-1]))
    os.kill(run.pid(victim), signal.SIGSTOP)
    assert run.wait(60) != 0
    report = Path(run.run_dir, "hang.txt").read_text()
    waits = {
        "rank-0": "'publish: version 2 from trainer ranks'",
        "rank-1": "'generate: step 2 from generator ranks'",
    }
    assert waits[victim] in report
    assert f"{victim.replace('-', ' ')} (pid" in report and "stopped, dead or cut off; no stack" in report
