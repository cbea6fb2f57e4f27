"""The door with vLLM or SGLang in its ranks: both guarantees, replicas of two ranks, and when a peer is struck."""

import os
import signal

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy
from tests.engines import OTHERS, VLLM_SIZES

pytestmark = pytest.mark.timeout(900)
SETTINGS = (*EXACT, "policy.lr=1e-4", "rollout.prompts_per_step=3", "steps=1")
STALL = 30
"""An engine is imported and started in less, without any progress to show."""
LAYOUTS = {"1": (0, 1), "2": (2, 1), "2-tp2": (2, 2), "4-tp2": (4, 2)}
"""name -> ranks (0: plain python), engine.tp"""


class EngineToy(Toy):
    """A toy whose runs have one engine."""

    engine = ""

    def settings(self) -> list[str]:
        return [*super().settings(), f"engine={self.engine}"]


@pytest.fixture(scope="module", params=OTHERS)
def toy(request, tmp_path_factory) -> Toy:
    toy = EngineToy(tmp_path_factory.mktemp("toy"), "qwen2", **VLLM_SIZES)
    toy.engine = request.param
    return toy


def start(toy: Toy, layout: str, name: str, *overrides: str) -> Running:
    ranks, tp = LAYOUTS[layout]
    return toy.start(*SETTINGS, f"engine.tp={tp}", *overrides, ranks=ranks, name=name)


def done(run: Running) -> Running:
    assert run.wait(400) == 0, run.text()[-3000:]
    return run


def tokens(run: Running, step: int) -> list:
    return [(s["ticket"], s["answer"], s["id"], [t["token_ids"] for t in s["turns"]]) for s in run.samples(step)]


def equal(one: Running, other: Running, step: int) -> bool:
    ours, theirs = one.weights(step), other.weights(step)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def pair(toy: Toy) -> Running:
    """One step on a replica of two ranks."""
    return done(start(toy, "2-tp2", "pair"))


def test_a_replica_of_two_ranks_trains(pair: Running) -> None:
    line = pair.metrics()[1]
    assert line["train_infer/abs_diff/mean"] < 1e-4
    assert line["publish/probe_abs_diff"] < 1e-4
    assert line["actor/grad_norm"] > 1e-3
    assert len(pair.samples(1)) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "2", "4-tp2"])
def test_same_samples_and_gradient_at_every_layout(toy: Toy, pair: Running, layout: str) -> None:
    run = done(start(toy, layout, f"layout-{layout}"))
    assert tokens(run, 1) == tokens(pair, 1)
    ours, theirs = run.metrics()[1], pair.metrics()[1]
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
    assert ours["train_infer/abs_diff/mean"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2", "2-tp2"])
def test_reruns_and_continuations_are_bitwise_equal(toy: Toy, layout: str) -> None:
    straight = done(start(toy, layout, f"straight-{layout}", "steps=3"))
    done(start(toy, layout, f"again-{layout}", "steps=2"))
    again = done(start(toy, layout, f"again-{layout}", "steps=3"))
    assert equal(straight, again, 3) and equal(straight, again, 2)
    assert [again.samples(step) for step in (1, 2, 3)] == [straight.samples(step) for step in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_struck_in_a_tick_ends_the_job_and_it_resumes(toy: Toy, fate: signal.Signals) -> None:
    straight = done(start(toy, "2-tp2", "undisturbed", "steps=3"))
    name = f"struck-{fate.name}"
    limits = ("reward.toy.timeout=3", f"journal.stall_seconds={STALL}")
    settings = (*SETTINGS, "engine.tp=2", "steps=3", *limits)
    run = toy.linger("progress generate", *settings, name=name)
    run.wait_for("progress generate", rank=1, timeout=300)
    os.kill(run.pid("rank-1"), fate)
    assert run.wait(STALL + 15) != 0
    assert run.outlived() == []
    if fate == signal.SIGSTOP:
        assert "did not arrive: rank 1" in run.text()
    again = done(toy.start(*settings, ranks=2, name=name))
    assert equal(straight, again, 3)
    assert [again.samples(step) for step in (1, 2, 3)] == [straight.samples(step) for step in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "lent"])
def test_a_replica_takes_a_new_policy_in_the_middle_of_its_answers(toy: Toy, mode: str) -> None:
    """Both ranks of it at once; answers are carried, and no token is too old."""
    steps = ("steps=6", "rollout.max_new_tokens=40", "publish.probe_every=1")
    carried = ("rollout.partial_rollout=true", "rollout.over_sample=3")
    claim, train = "rollout.claim=store", f"placement.train={'0' if mode == 'split' else '0-1'}"
    ranks = 3 if mode == "split" else 4
    settings = (*SETTINGS, *steps, *carried, claim, train, "engine.tp=2", f"placement.mode={mode}")
    run = done(toy.start(*settings, ranks=ranks, name=f"swapped-{mode}"))
    lines = run.metrics()[1:]
    assert max(line["placement/publishes"] for line in lines) > 0
    assert all(line["rollout/lag/max"] <= 1 and line["publish/probe_abs_diff"] < 1e-4 for line in lines)
    first, second = ([e for e in run.events(rank) if e["event"] == "loaded"] for rank in (ranks - 2, ranks - 1))
    assert [e["version"] for e in first] == [e["version"] for e in second]
