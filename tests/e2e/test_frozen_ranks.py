"""Frozen roles on ranks of their own, and roles on backends of their own, through the real door."""

import os
import signal

import pytest
import torch

from tests.e2e import strikes
from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_layouts import TOYS
from tests.models import tiny

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
        assert found == (
            wanted if exactly else [one if one is None else pytest.approx(one, rel=SAME, abs=1e-6) for one in wanted]
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["split", "lent placement.generate=2"])
def test_a_reference_apart_where_other_ranks_generate_is_the_one_beside_the_policy(
    toy: Toy, colocated, placement: str
) -> None:
    """Ranks 0 and 1 train, 2 generates, 3 holds the reference; on-policy."""
    words = f"placement.mode={placement} placement.train=0-1 placement.reference=3 placement.max_staleness=0".split()
    run = toy.run(*SETTINGS, *words, ranks=4, name=f"reference-{words[0][15:]}")
    assert_same(run, colocated(2), exactly=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["apart", "beside"])
def test_a_checkpoint_goes_on_with_its_reference_elsewhere(toy: Toy, colocated, first: str) -> None:
    ways = {"apart": (("placement.reference=1",), 2), "beside": ((), 1)}
    (begins, ranks), (ends, then) = (ways[one] for one in (first, ({*ways} - {first}).pop()))
    toy.run(*SETTINGS, *begins, "steps=2", ranks=ranks, name=f"moved-{first}")
    run = toy.run(*SETTINGS, *ends, ranks=then, name=f"moved-{first}")
    assert "resumed from step 2: " in run.text()
    assert_same(run, colocated(1), exactly=True)


@pytest.mark.slow
def test_a_run_whose_reference_was_killed_in_its_forward_goes_on_to_the_bit(toy: Toy, record_property) -> None:
    settings, how = (*strikes.SETTINGS, *SETTINGS, "placement.reference=2"), {"ranks": 3, "name": "killed"}
    straight = toy.run(*settings, ranks=3, name="straight")
    point = "collective reference: logprobs: micro-batch 1/1"
    run = toy.linger(point, *settings, **how)
    run.wait_for(point, rank=2)
    os.kill(run.pid("rank-2"), signal.SIGKILL)
    said = strikes.ended_soon(run, record_property)
    assert "rank 2 is gone: killed?" in said, said[-3000:]
    assert_same(toy.run(*settings, **how), straight, exactly=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocated", "overlapped"])
def test_teachers_and_the_reference_on_ranks_that_they_share(toy: Toy, mode: str) -> None:
    """The teacher is of another width, and its columns are lists; its ranks are some of those of the reference."""
    teacher = toy.path / "teacher"
    if not teacher.exists():
        tiny("llama", teacher, seed=5, hidden_size=96, intermediate_size=96)
    settings = (f"placement.mode={mode}", f"teacher.model={teacher}", "teacher.only=false", "teacher.top_k=20")
    beside = toy.run(*SETTINGS, *settings, name=f"teacher-{mode}")
    placed = ("placement.reference=0,2", "placement.teacher=2")
    run = toy.run(*SETTINGS, *settings, *placed, ranks=4, name=f"teacher-apart-{mode}")
    assert_same(run, beside, exactly=False)
    found, wanted = ([line.get("distill/loss") for line in one.metrics()[1:]] for one in (run, beside))
    assert found == pytest.approx(wanted, rel=SAME) and min(wanted) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, "reference.train.name=megatron reference.train.tp=2"),
        (2, "train=megatron train.tp=2 reference.train.name=fsdp2 reference.train.tp=1"),
        (2, "train=megatron train.tp=2 critic.train.name=fsdp2 critic.train.tp=1 algorithm=ppo critic.eps=1e-3"),
        (2, "train=deepspeed critic.train.name=megatron critic.train.tp=2 algorithm=ppo critic.eps=1e-3"),
    ],
    ids=["fsdp2-with-megatron", "megatron-with-fsdp2", "megatron-with-critic-fsdp2", "deepspeed-with-critic-megatron"],
)
def test_roles_have_backends_of_their_own(toy: Toy, ranks: int, settings: str) -> None:
    """All beside each other, against the run of the same roles on fsdp2 alone."""
    lines = settings.split()
    algorithm = [line for line in lines if line.startswith("algorithm=") or ".eps=" in line]
    name = settings.replace(" ", "-").replace("=", "-")
    plain = toy.run(*SETTINGS, *algorithm, ranks=ranks, name=f"plain-{name}")
    assert_same(toy.run(*SETTINGS, *lines, ranks=ranks, name=name), plain, exactly=False)


def test_a_mistake_is_one_line(toy: Toy) -> None:
    run = toy.start(*SETTINGS, "placement.reference=0", ranks=0, name="mistake")
    assert run.wait() == 2
    assert run.text().splitlines()[-1] == "error: placement.reference: no rank of 1 is left to train"
