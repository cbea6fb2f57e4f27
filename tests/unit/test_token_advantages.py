"""From the advantage of an answer to that of each token: KL in the reward, GAE, whitening, clip, choice of tokens."""

from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch

from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.learn import token_advantages
from spmd_rl.learn.token_advantages import mark, token_numbers
from tests import plans
from tests.unit.test_prepare import GROUPS, collected, group, plan_of, planned, sample

PLAN = planned(GROUPS)


def batch_of(*rows: tuple[int, float]) -> Batch:
    """Samples of (tokens, number so far), with logprobs that differ from token to token."""
    batch = pack([sample(0, answer, n, 1.0) for answer, (n, _) in enumerate(rows)])
    given = torch.tensor([value for _, value in rows])
    batch.advantages = given.repeat_interleave(batch.starts.diff()) * batch.loss_mask
    batch.old_logprobs = -0.1 * batch.position_ids * batch.loss_mask
    batch.ref_logprobs = -0.2 * batch.position_ids * batch.loss_mask
    return batch


def finished(batches: list[Batch], **settings) -> tuple[list[list[float]], dict[str, float]]:
    """Advantages at the sampled tokens of each batch, and the metrics."""
    algorithm = AlgorithmConfig(**settings)
    with solo() as world:
        plan = replace(PLAN, num_sampled=batches[0].loss_mask.sum()[None], minibatches=torch.tensor([0]))
        data = Layout(world).data
        metrics = token_advantages.finish(batches, plan, algorithm, algorithm.kl_reward_coef, data, seed=7)
    assert all(not batch.advantages[~batch.loss_mask].any() for batch in batches)
    return [batch.advantages[batch.loss_mask].tolist() for batch in batches], metrics


def test_nothing_to_do_changes_nothing() -> None:
    batch = batch_of((2, 0.5), (1, -1.0))
    assert finished([batch])[0] == [[0.5, 0.5, -1.0]]
    assert batch.returns is None and batch.marked is None


def test_a_reward_flows_back_and_the_kl_of_each_token_with_it() -> None:
    """Positions 3, 4, 5: KL (k1) 0.3, 0.4, 0.5."""
    returns = {"advantage": "reinforce_returns"}
    (got,), _ = finished([batch_of((3, 1.0))], **returns, kl_reward_coef=2.0)
    assert got == pytest.approx([1 - 2 * 1.2, 1 - 2 * 0.9, 1 - 2 * 0.5])
    (got,), _ = finished([batch_of((3, 1.0))], **returns, gamma=0.5)
    assert got == pytest.approx([0.25, 0.5, 1.0])


KL_SUMS = [-0.701, 0.578, -0.061, 0.433]


@pytest.mark.parametrize("num_updates", [1, 2])
def test_the_kl_of_an_answer_is_taken_from_its_score_before_the_baseline(num_updates: int) -> None:
    """RLOO's definition: R_i = r_i - beta sum of log(pi / pi_ref), A_i = R_i - mean of the other R."""
    scores, coef = [1.0, 0.0, 1.0, 1.0], 0.05
    c = collected([group(t, [(2 + i, s) for i, s in enumerate(scores)]) for t in range(num_updates)])
    settings = AlgorithmConfig(advantage="rloo", kl_reward_coef=coef)
    plan = plan_of(c, settings, num_updates=num_updates)
    with solo() as world:
        data = Layout(world).data
        batches = plans.redistribute(c, plan, num_updates, data, world)
        for batch in batches:
            lengths = torch.arange(2, 6)
            kl = (torch.tensor(KL_SUMS) / lengths).repeat_interleave(lengths)
            batch.old_logprobs = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, kl)
            batch.ref_logprobs = torch.zeros(batch.num_tokens)
        plan = plans.take_kl(c, batches, plan, settings, data)
    rewards = [s - coef * k for s, k in zip(scores, KL_SUMS, strict=True)]
    wanted = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert wanted[0] == pytest.approx(0.384, abs=1e-3) and sum(wanted) == pytest.approx(0)
    for batch in batches:
        assert [batch.advantages[b - 1].item() for b in batch.starts[1:].tolist()] == pytest.approx(wanted, abs=1e-6)
    assert plan.mean_reward == pytest.approx(fmean(rewards))


def test_gae_by_hand() -> None:
    batch = batch_of((3, 1.0), (1, 0.0))
    batch.values = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, torch.tensor([0.5, 0.25, 0.0, 0.75]))
    (got,), metrics = finished([batch], advantage="gae", gamma=0.9, lam=0.5)
    errors = [0.9 * 0.25 - 0.5, 0.9 * 0.0 - 0.25, 1.0 - 0.0]
    third = errors[2]
    second = errors[1] + 0.45 * third
    first = errors[0] + 0.45 * second
    assert got == pytest.approx([first, second, third, -0.75])
    returns = [first + 0.5, second + 0.25, third, 0.0]
    assert batch.returns[batch.loss_mask].tolist() == pytest.approx(returns)
    left = stdev([first, second, third, -0.75]) ** 2
    assert metrics["critic/explained_variance"] == pytest.approx(1 - left / stdev(returns) ** 2)


def test_whitening_is_over_all_minibatches_and_before_the_clip() -> None:
    rows = [[(2, 1.0), (1, 4.0)], [(3, -2.0)]]
    flat = [1.0, 1.0, 4.0, -2.0, -2.0, -2.0]
    wanted = [(x - fmean(flat)) / stdev(flat) for x in flat]
    got, _ = finished([batch_of(*r) for r in rows], whiten_advantages=True)
    assert got[0] + got[1] == pytest.approx(wanted, abs=1e-5)
    got, _ = finished([batch_of(*r) for r in rows], whiten_advantages=True, advantage_clip=0.7)
    assert got[0] + got[1] == pytest.approx([max(-0.7, min(0.7, x)) for x in wanted], abs=1e-5)


def test_kl_cov_marks_the_largest_covariances() -> None:
    batch = batch_of((4, 1.0), (4, -1.0))
    finished([batch], loss="kl_cov", kl_cov_ratio=0.25)
    # (logprob - mean) * advantage is largest at the first token of the good answer and the last of the bad one
    assert batch.marked[batch.loss_mask].tolist() == [True, False, False, False, False, False, False, True]


def test_clip_cov_draws_the_same_tokens_wherever_they_lie() -> None:
    together, first, second = batch_of((8, 1.0), (9, -1.0)), batch_of((8, 1.0)), batch_of((8, 1.0), (9, -1.0))
    settings = {"loss": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_low": -9.0, "clip_cov_high": 9.0}
    finished([together], **settings)
    finished([second], **settings)
    assert int(together.marked.sum()) == 3
    assert torch.equal(together.marked, second.marked)
    with solo() as world:
        ids = [token_numbers(batch, (7, 1)) for batch in (together, first)]
        mark(first, AlgorithmConfig(**settings), 8, Layout(world).data, (7, 1))
    assert torch.equal(ids[0][:8], ids[1]) and len(set(ids[0].tolist())) == 17


def test_nothing_at_all_is_legal() -> None:
    for settings in ({"advantage": "gae"}, {"whiten_advantages": True}, {"loss": "clip_cov"}):
        batch = pack([])
        batch.old_logprobs = batch.ref_logprobs = batch.values = torch.zeros(0)
        assert finished([batch], **settings)[0] == [[]]
