"""`placement.mode=lent`, and policies that change in the middle of answers, through the real door."""

import os
import signal

import pytest

from tests.e2e.runs import Running, Toy

SETTINGS = ("policy.dtype=float32", "rollout.partial_rollout=true", "rollout.over_sample=4", "steps=4")
LENT = (*SETTINGS, "placement.mode=lent", "placement.train=0-1")


def tokens(run: Running, step: int) -> list:
    return [(s["ticket"], s["answer"], [turn["token_ids"] for turn in s["turns"]]) for s in run.samples(step)]


def assert_bounded(run: Running, staleness: int = 1) -> None:
    """Each ticket once and in its order, no token too old, and one line for each step."""
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    used = [(s["ticket"], s["answer"]) for step in (1, 2, 3, 4) for s in run.samples(step)]
    assert used == [(ticket, answer) for ticket in range(max(used)[0] + 1) for answer in range(4)]
    for step in (1, 2, 3, 4):
        lags = {step - 1 - version for s in run.samples(step) for turn in s["turns"] for version in turn["versions"]}
        assert lags <= set(range(staleness + 1))


def test_lent_ranks_generate_and_train_and_no_token_is_too_old(toy: Toy) -> None:
    run = toy.run(*LENT, ranks=3, name="lent")
    assert_bounded(run)
    assert run.text().count("ranks 0-1 train (fsdp2, tp=1), ranks 0-2 generate (native, tp=1)") == 1
    one = toy.run("policy.dtype=float32", "steps=1", ranks=1, name="one")
    assert tokens(run, 1) == tokens(one, 1)  # guarantee S


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "lent"])
def test_where_all_versions_are_alike_it_does_not_matter_who_answers(toy: Toy, mode: str) -> None:
    """Learning rate 0: carried, left to others or swapped, tokens are those of a run that does none of it."""
    settings = ("policy.lr=0", "rollout.max_new_tokens=24")
    straight = toy.run(*settings, "policy.dtype=float32", "steps=4", ranks=1, name=f"straight-{mode}")
    run = toy.run(*settings, *SETTINGS, f"placement.mode={mode}", ranks=4, name=mode)
    assert_bounded(run)
    assert [tokens(run, step) for step in (1, 2, 3, 4)] == [tokens(straight, step) for step in (1, 2, 3, 4)]


VICTIMS = [("rank-0", "enter update"), ("rank-1", "progress generate"), ("rank-2", "progress generate")]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "point"), VICTIMS)
def test_a_killed_run_goes_on_and_keeps_the_bound(toy: Toy, victim: str, point: str) -> None:
    name = f"{victim}-killed"
    run = toy.linger(point, *LENT, ranks=3, name=name, torchrun=True)
    run.wait_for(point, rank=int(victim[-1]))
    os.kill(run.pid(victim), signal.SIGKILL)
    assert run.wait(60) != 0
    assert not run.outlived(2.0), "a process outlived its run"
    assert_bounded(toy.run(*LENT, ranks=3, name=name))
