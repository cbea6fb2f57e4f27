"""Guarantee E (exact) and guarantee S (same samples), through the real door."""

import json
import shutil

import pytest
import torch

from bench.gpu.same import MEASURED
from tests.e2e.runs import EXACT, Running, Toy

SETTINGS = (*EXACT, "policy.lr=1e-5", "rollout.prompts_per_step=3", "rollout.over_sample=0")
"""Three prompts a step: at world size 4 some rank holds none."""


@pytest.fixture(scope="module")
def by_size(toy: Toy) -> dict[int, Running]:
    """One step at world sizes 0 (plain python), 1, 2 and 4."""
    one_step = (*SETTINGS, "steps=1")
    return {n: toy.run(*one_step, ranks=n, name=f"size-{n}", torchrun=n == 0) for n in (0, 1, 2, 4)}


@pytest.fixture(scope="module")
def straight(toy: Toy) -> Running:
    """Three steps on 2 ranks in one go: the reference."""
    return toy.run(*SETTINGS, "steps=3", name="straight")


def continued(toy: Toy, first: Running, name: str, *overrides: str, **how) -> Running:
    """A copy of a finished run, with more steps."""
    shutil.copytree(first.run_dir, toy.path / name)
    return toy.run(*SETTINGS, *overrides, name=name, **how)


def tokens(run: Running, step: int) -> list:
    return [(s["ticket"], s["answer"], s["id"], [t["token_ids"] for t in s["turns"]]) for s in run.samples(step)]


def difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def bitwise_equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_prompts_and_tokens_at_every_world_size(by_size, ranks: int) -> None:
    expected = tokens(by_size[0], 1)
    assert len(expected) >= 12
    assert tokens(by_size[ranks], 1) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_gradient_norm_and_weights_at_every_world_size(by_size, ranks: int) -> None:
    norm = by_size[0].metrics()[1]["actor/grad_norm"]
    assert norm > 1e-3
    assert by_size[ranks].metrics()[1]["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert difference(by_size[ranks].weights(1), by_size[0].weights(1)) < 1e-6


def test_train_and_inference_agree(by_size) -> None:
    for run in by_size.values():
        assert run.metrics()[1]["train_infer/abs_diff/mean"] < 1e-4


def test_a_rerun_is_bitwise_equal(straight: Running, by_size) -> None:
    assert bitwise_equal(by_size[2].weights(1), straight.weights(1))
    assert not bitwise_equal(straight.weights(1), straight.weights(3))
    assert by_size[2].samples(1) == straight.samples(1)


def test_more_steps_continue_the_run_as_if_never_stopped(toy: Toy, straight: Running, by_size) -> None:
    run = continued(toy, by_size[2], "continued", "steps=3", ranks=2)
    assert bitwise_equal(run.weights(3), straight.weights(3))
    assert [m["step"] for m in run.metrics()] == [0, 1, 2, 3]
    assert [run.samples(step) for step in (1, 2, 3)] == [straight.samples(step) for step in (1, 2, 3)]
    for ours, theirs in zip(run.metrics()[1:], straight.metrics()[1:], strict=True):
        # the short run evaluated its last step, which the long one passes
        measured = [key for key in MEASURED if key in ours and (key in theirs or "val" not in key)]
        assert [ours[key] for key in measured] == [theirs[key] for key in measured], ours["step"]


def test_a_rank_of_two_threads_reruns_and_resumes_exactly(toy: Toy) -> None:
    # many answers to one prompt: they share its last hidden state, whose gradients two threads add up
    how = {"ranks": 1, "env": {"OMP_NUM_THREADS": "2"}}
    many = (*SETTINGS, "rollout.prompts_per_step=2", "rollout.answers_per_prompt=64")
    whole = toy.run(*many, "steps=2", name="threads", **how)
    first = toy.run(*many, "steps=1", name="threads-first", **how)
    assert bitwise_equal(first.weights(1), whole.weights(1))
    assert first.samples(1) == whole.samples(1)
    rest = continued(toy, first, "threads-rest", *many, "steps=2", **how)
    assert bitwise_equal(rest.weights(2), whole.weights(2))
    assert rest.samples(2) == whole.samples(2)


def test_a_checkpoint_continues_at_another_world_size(toy: Toy, straight: Running, by_size) -> None:
    run = continued(toy, by_size[2], "moved", "steps=2", ranks=4)
    assert tokens(run, 2) == tokens(straight, 2)
    assert run.metrics()[2]["actor/grad_norm"] == pytest.approx(straight.metrics()[2]["actor/grad_norm"], rel=1e-4)
    assert difference(run.weights(2), straight.weights(2)) < 1e-6


def test_priorities_change_no_sample_and_no_weight(toy: Toy, straight: Running, by_size) -> None:
    rows = [json.loads(line) | {"priority": i % 3} for i, line in enumerate(toy.data.read_text().splitlines())]
    ranked = toy.path / "ranked.jsonl"
    ranked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = toy.run(*SETTINGS, f"data.train={ranked}", "steps=1", ranks=1, name="ranked")
    assert tokens(first, 1) == tokens(by_size[1], 1)
    assert bitwise_equal(first.weights(1), by_size[1].weights(1))
    resumed = toy.run(*SETTINGS, f"data.train={ranked}", "steps=3", ranks=1, name="ranked")
    assert [tokens(resumed, step) for step in (2, 3)] == [tokens(straight, step) for step in (2, 3)]
    assert difference(resumed.weights(3), straight.weights(3)) < 1e-6


@pytest.mark.slow
def test_claims_from_the_store_accept_the_same_tickets(toy: Toy, by_size) -> None:
    run = toy.run(*SETTINGS, "rollout.claim=store", "steps=1", ranks=2, name="store")
    assert tokens(run, 1) == tokens(by_size[0], 1)
    assert [s["kept"] for s in run.samples(1)] == [s["kept"] for s in by_size[0].samples(1)]


def test_a_finished_run_says_so(toy: Toy, straight: Running) -> None:
    run = toy.run(*SETTINGS, "steps=2", name="straight")
    assert run.text().splitlines()[-1].endswith("straight: already at step 3; set steps above 3 to continue")
    assert [m["step"] for m in run.metrics()] == [0, 1, 2, 3]


def test_samples_are_logged_whole(by_size) -> None:
    run = by_size[2]
    for row in run.samples(1):
        assert row["kept"] is (row["reject_reason"] is None)
        for turn in row["turns"]:
            assert len(turn["token_ids"]) == len(turn["logprobs"]) == len(turn["versions"]) > 0
            assert set(turn["versions"]) == {0}
    names = ["eval-000000.jsonl", "eval-000001.jsonl", "step-000001.jsonl"]
    assert sorted(path.name for path in (run.run_dir / "samples").iterdir()) == names
    for step in (0, 1):
        text = (run.run_dir / "samples" / f"eval-{step:06d}.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert {row["reject_reason"] for row in rows} == {"held out"}
        for greedy, key in ((True, "val/score_greedy/mean"), (False, "val/score/mean")):
            scores = [row["verdict"]["score"] for row in rows if row.get("greedy", False) is greedy]
            assert sum(scores) / len(scores) == pytest.approx(run.metrics()[step][key])
