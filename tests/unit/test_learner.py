"""The learner: which passes it makes, what it leaves out, and what it evaluates."""

from contextlib import nullcontext

import pytest
import torch

from spmd_rl.batch import pack
from spmd_rl.config.schema import AlgorithmConfig, RlvrConfig
from spmd_rl.dist import solo
from spmd_rl.learn import Learner, evaluate, lineage, policy_loss
from spmd_rl.rollout import Rollouts
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, FakeTokenizer
from tests.unit.test_prepare import GROUPS, collected, sample


class FakeBackend:
    """Says -0.3 of every token; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def logprobs(self, batch, temperature):
        self.asked.append("logprobs")
        return torch.full((batch.num_tokens,), -0.3), torch.zeros(batch.num_tokens)

    def update(self, batch, loss, temperature):
        n = int(batch.loss_mask.sum())
        self.asked.append(f"update of {n}")
        values, quantities = loss(torch.full((n,), -0.3), torch.ones(n), batch)
        return {"loss": float(values.sum()), "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0, "num_microbatches": 1.0} | {
            name: float(q.mean()) for name, q in quantities.items()
        }

    def awake(self):
        return nullcontext()


def step(cfg: RlvrConfig, harvest, reference=None):
    policy = FakeBackend()
    with solo() as world:
        learner = Learner(cfg, policy, reference, world)
        metrics = learner.update(learner.prepare(harvest))
        return policy, metrics, learner


def test_one_update_on_fresh_samples_makes_no_logprob_pass() -> None:
    policy, metrics, _ = step(RlvrConfig(), collected(GROUPS))
    assert policy.asked == ["update of 15"]
    assert metrics["actor/grad_norm"] == 2.0 and metrics["actor/entropy"] == 1.0
    assert metrics["train_infer/abs_diff/mean"] == pytest.approx(0.2)


def test_stale_tokens_or_several_updates_need_one() -> None:
    cfg = RlvrConfig()
    policy, _, _ = step(cfg, collected(GROUPS, version=1))
    assert policy.asked == ["logprobs", "update of 15"]
    cfg.train.updates_per_step = 3
    policy, _, _ = step(cfg, collected(GROUPS))
    assert policy.asked == ["logprobs"] * 3 + ["update of 5", "update of 6", "update of 4"]


def test_the_reference_is_asked_only_for_a_kl() -> None:
    cfg, reference = RlvrConfig(), FakeBackend()
    cfg.algorithm.kl_coef = 0.1
    policy, metrics, _ = step(cfg, collected(GROUPS), reference)
    assert reference.asked == ["logprobs"] and policy.asked == ["update of 15"]
    assert metrics["actor/kl_loss"] == 0.0


def test_a_step_without_groups_updates_nothing_and_is_counted() -> None:
    policy, metrics, learner = step(RlvrConfig(), collected([]))
    assert policy.asked == []
    assert metrics == {"actor/empty_steps": 1}
    assert learner.state() == {"num_empty_steps": 1}


def test_kl_adds_its_gradient() -> None:
    batch = pack([sample(0, 0, 3, 1.0)])
    batch.ref_logprobs = torch.full((batch.num_tokens,), -1.0)
    logprobs = torch.tensor([-0.5, -1.0, -1.5], requires_grad=True)
    loss, quantities = policy_loss.bind(AlgorithmConfig(kl_coef=0.5, kl_estimator="k2"))(
        logprobs, torch.zeros(3), batch
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.25, 0.0, -0.25])
    assert quantities["actor/kl_loss"].tolist() == pytest.approx([0.125, 0.0, 0.125])


def test_evaluation_is_due_before_every_n_and_at_the_end() -> None:
    cfg = RlvrConfig(steps=7)
    cfg.eval.every, cfg.eval.answers = 3, 2
    with solo() as world:
        even = FakeScorer(lambda prompt, answer: int(answer[0]) % 2 == 0)
        rollouts = Rollouts(cfg, FakeEngine(), FakePrompts(4), even, FakeTokenizer(), world)
        due = [s for s in range(8) if evaluate(cfg, rollouts, world, s)]
        metrics = evaluate(cfg, rollouts, world, 3)
    assert due == [0, 3, 6, 7]
    assert metrics.keys() == {
        "val/score/mean", "val/score_greedy/mean", "val/toy/score/mean", "val/toy/score_greedy/mean",
    }  # fmt: skip
    assert 0 <= metrics["val/score/mean"] <= 1


def test_lineage_says_why_each_sample_was_kept_or_not() -> None:
    harvest = collected(GROUPS, GROUPS[:1])
    _, _, learner = step(RlvrConfig(), harvest)
    rows = list(lineage.rows(harvest, learner.plan, FakeTokenizer()))
    assert [(r["ticket"], r["answer"], r["kept"], r["why_not"]) for r in rows] == [
        (4, 0, True, None), (4, 1, True, None), (4, 2, False, "no score"),
    ]  # fmt: skip
    assert rows[0]["turns"][0]["versions"] == [0, 0]
