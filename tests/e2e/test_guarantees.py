"""Guarantee E (exact) and guarantee S (same samples), through the real door."""

from pathlib import Path

import pytest
import torch

from tests.e2e.runs import EXACT, Toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def by_size(toy: Toy) -> dict:
    """One step at world sizes 0 (plain python), 1, 2 and 4."""
    runs = {}
    for ranks in (0, 1, 2, 4):
        run = toy.start(*EXACT, "steps=1", "policy.lr=1e-5", ranks=ranks, name=f"size-{ranks}")
        assert run.wait() == 0, run.text()[-3000:]
        runs[ranks] = run
    return runs


def tokens(run, step: int) -> list:
    return [(s["ticket"], s["answer"], s["id"], [t["token_ids"] for t in s["turns"]]) for s in run.samples(step)]


def test_same_prompts_and_tokens_at_every_world_size(by_size) -> None:
    expected = tokens(by_size[0], 1)
    assert len(expected) >= 16
    for ranks in (1, 2, 4):
        assert tokens(by_size[ranks], 1) == expected


def test_same_gradient_norm_and_weights_at_every_world_size(by_size) -> None:
    norm = by_size[0].metrics()[1]["actor/grad_norm"]
    weights = by_size[0].weights(1)
    assert norm > 1e-3
    for ranks in (1, 2, 4):
        assert by_size[ranks].metrics()[1]["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
        other = by_size[ranks].weights(1)
        assert other.keys() == weights.keys()
        assert max(float((weights[k] - other[k]).abs().max()) for k in weights) < 1e-6


def test_train_and_inference_agree(by_size) -> None:
    for run in by_size.values():
        assert run.metrics()[1]["train_infer/abs_diff/mean"] < 1e-4


def test_a_rerun_is_bitwise_equal(toy: Toy, by_size) -> None:
    again = toy.start(*EXACT, "steps=1", "policy.lr=1e-5", ranks=2, name="again")
    assert again.wait() == 0
    first, second = by_size[2].weights(1), again.weights(1)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert by_size[2].samples(1) == again.samples(1)


def test_more_steps_continue_the_run_as_if_never_stopped(toy: Toy) -> None:
    straight = toy.start(*EXACT, "steps=4", name="straight")
    assert straight.wait() == 0, straight.text()[-3000:]
    halves = toy.start(*EXACT, "steps=2", name="halves")
    assert halves.wait() == 0
    halves = toy.start(*EXACT, "steps=4", name="halves")
    assert halves.wait() == 0, halves.text()[-3000:]
    a, b = straight.weights(4), halves.weights(4)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert [m["step"] for m in halves.metrics()] == [0, 1, 2, 3, 4]
    for ours, theirs in zip(straight.metrics(), halves.metrics(), strict=True):
        for key in ("critic/score/mean", "actor/grad_norm", "train_infer/abs_diff/mean", "val/score/mean"):
            assert ours.get(key) == theirs.get(key), (ours["step"], key)


def test_a_finished_run_says_so(toy: Toy) -> None:
    run = toy.start(*EXACT, "steps=4", name="straight")
    assert run.wait() == 0
    assert "finished" in run.text().splitlines()[-1]


def test_a_checkpoint_continues_at_another_world_size(toy: Toy) -> None:
    two = toy.start(*EXACT, "steps=2", ranks=2, name="moved")
    assert two.wait() == 0
    four = toy.start(*EXACT, "steps=3", ranks=4, name="moved")
    assert four.wait() == 0, four.text()[-3000:]
    straight = Toy(toy.path).start(*EXACT, "steps=3", ranks=2, name="unmoved")
    assert straight.wait() == 0
    assert tokens(four, 3) == tokens(straight, 3)
    a, b = straight.weights(3), four.weights(3)
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-4


def test_samples_are_logged_whole(by_size) -> None:
    row = by_size[2].samples(1)[0]
    turn = row["turns"][0]
    assert len(turn["token_ids"]) == len(turn["logprobs"]) == len(turn["versions"])
    assert set(turn["versions"]) == {0}
    assert row["kept"] is (row["why_not"] is None)
    path: Path = by_size[2].run_dir / "samples"
    assert sorted(p.name for p in path.iterdir()) == ["step-000001.jsonl"]
