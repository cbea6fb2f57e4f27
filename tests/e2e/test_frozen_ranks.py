"""Frozen roles on ranks of their own, and roles on backends of their own, through the real door."""

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_layouts import TOYS

SETTINGS = (*EXACT, "steps=3", "algorithm.kl_coef=0.1", "policy.warmup_steps=0", "policy.lr=1e-2", "policy.eps=1e-3")
"""The epsilon hides gradients that are rounding alone, of which AdamW would make whole steps."""
SAME = 1e-5


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    kind, sizes = TOYS["native"]["qwen2"]
    return Toy(tmp_path_factory.mktemp("toy"), kind, intermediate_size=96, **sizes)


@pytest.fixture(scope="module")
def colocated(toy: Toy):
    """The run on so many ranks that train, each of which holds the reference too."""
    runs: dict[int, Running] = {}

    def made(ranks: int) -> Running:
        if ranks not in runs:
            runs[ranks] = toy.run(*SETTINGS, ranks=ranks, name=f"colocated-{ranks}")
        return runs[ranks]

    return made


def tokens(run: Running, step: int) -> list:
    return [(s["ticket"], s["answer"], [turn["token_ids"] for turn in s["turns"]]) for s in run.samples(step)]


def assert_same(run: Running, other: Running, exactly: bool) -> None:
    for step in (1, 2, 3):
        assert tokens(run, step) == tokens(other, step)
    keys = "actor/kl_loss", "critic/kl", "actor/grad_norm", "critic/score/mean", "val/score/mean"
    for mine, theirs in zip(run.metrics(), other.metrics(), strict=True):
        found, wanted = ([line.get(key) for key in keys] for line in (mine, theirs))
        assert found == (wanted if exactly else [one if one is None else pytest.approx(one, rel=SAME, abs=1e-6) for one in wanted])
    assert run.metrics()[-1]["actor/kl_loss"] > 0
    ours, theirs = run.weights(3), other.weights(3)
    for name, wanted in theirs.items():
        if exactly:
            assert torch.equal(ours[name], wanted), name
        assert (ours[name] - wanted).norm() <= SAME * wanted.norm(), name


CASES = {
    "1+1": (1, 1, True, "placement.reference=1"),
    "2+1": (2, 1, False, "placement.reference=0"),
    "2+2-tp": (2, 2, False, "placement.reference=2-3 reference.train.tp=2"),
    "2+2": (2, 2, True, "placement.reference=50%"),
    "2+1-deepspeed": (2, 1, False, "placement.reference=2 reference.train.name=deepspeed"),
    "2+2-megatron": (2, 2, False, "placement.reference=2,3 reference.train.name=megatron reference.train.tp=2"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ("2+1", "2+2-tp") else pytest.mark.slow) for name in CASES]
)
def test_a_reference_on_ranks_of_its_own_is_the_one_beside_the_policy(toy: Toy, colocated, case: str) -> None:
    trains, holds, exactly, settings = CASES[case]
    run = toy.run(*SETTINGS, *settings.split(), ranks=trains + holds, name=case)
    assert_same(run, colocated(trains), exactly)
