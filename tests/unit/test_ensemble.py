"""Several critics: their values, which tokens are treated apart for how far they differ, and what is refused."""

from statistics import fmean, pstdev

import pytest
import torch

from spmd_rl.algo.values import ensemble
from spmd_rl.batch import Batch
from spmd_rl.config.load import load
from spmd_rl.config.schema import AlgorithmConfig, RlvrConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.errors import UserError
from spmd_rl.learn.losses import bind_loss
from spmd_rl.train.ensemble import CriticEnsemble
from tests.unit.test_learner import FakeBackend as FakePolicy
from tests.unit.test_learner import FakeCritic, collected, learner_of
from tests.unit.test_prepare import GROUPS
from tests.unit.test_token_advantages import batch_of, finished

SPREAD = [0.3, 0.0, 0.9, 0.1, 0.2, 0.5, 0.4, 0.8, 0.6, 0.7]


def spread_batch(spread: list[float] = SPREAD) -> Batch:
    """Two answers of ten tokens in all, with values of their own and these deviations."""
    batch = batch_of((6, 1.0), (len(spread) - 6, -1.0))
    at = lambda column: torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, torch.tensor(column))  # noqa: E731
    batch.values, batch.value_spread = at([0.1 * n for n in range(len(spread))]), at(spread)
    return batch


def test_the_value_is_the_mean_and_the_spread_the_deviation() -> None:
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    mean, spread = ensemble(values)
    for column, m, s in zip(values.T.tolist(), mean.tolist(), spread.tolist(), strict=True):
        assert m == pytest.approx(fmean(column), abs=1e-6) and s == pytest.approx(pstdev(column), abs=1e-6)
    assert torch.equal(ensemble(values[:1])[0], values[0]) and not ensemble(values[:1])[1].any()


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_where_critics_agree_most_there_is_no_advantage(share: float) -> None:
    plain, masked = spread_batch(), spread_batch()
    (wanted,), _ = finished([plain], advantage="gae", whiten_advantages=True)
    (got,), metrics = finished([masked], advantage="gae", whiten_advantages=True, advantage_mask_ratio=share)
    lowest = sorted(range(10), key=SPREAD.__getitem__)[: int(10 * share)]
    assert got == [0.0 if i in lowest else value for i, value in enumerate(wanted)]
    assert torch.equal(masked.returns, plain.returns) and masked.disputed is None
    assert metrics["critic/value_spread/mean"] == pytest.approx(fmean(SPREAD))


def test_where_they_differ_most_there_is_no_entropy_bonus() -> None:
    plain, masked = spread_batch(), spread_batch()
    settings = {"advantage": "gae", "entropy_coef": 0.5}
    finished([plain], **settings)
    (advantages,), _ = finished([masked], **settings, entropy_mask_ratio=0.3)
    highest = [2, 7, 9]
    assert masked.disputed[masked.loss_mask].nonzero().flatten().tolist() == highest
    assert torch.equal(masked.advantages, plain.advantages) and all(advantages[i] for i in highest)
    logprobs, entropy = torch.full((10,), -0.5), torch.rand(10).requires_grad_()
    losses = [bind_loss(AlgorithmConfig(**settings))(logprobs, entropy, batch)[0] for batch in (plain, masked)]
    missing = torch.tensor([0.5 * entropy[i].item() if i in highest else 0.0 for i in range(10)])
    assert torch.allclose(losses[1] - losses[0], missing, atol=1e-6)
    losses[1].sum().backward()
    assert (entropy.grad == 0).nonzero().flatten().tolist() == highest


def test_critics_that_do_not_differ_mask_nothing() -> None:
    """As in the first step, when all values are 0; and at the border of the share no one of equals is chosen."""
    batch = spread_batch([0.0] * 10)
    (got,), _ = finished([batch], advantage="gae", advantage_mask_ratio=0.2, entropy_mask_ratio=0.2, entropy_coef=0.1)
    assert all(got) and not batch.disputed.any()
    (got,), _ = finished([spread_batch([0.1, 0.0, 0.1, *[0.5] * 7])], advantage="gae", advantage_mask_ratio=0.2)
    assert [i for i, value in enumerate(got) if not value] == [1]


class Critic(FakeCritic):
    """Notes the samples and the weights that it is trained on."""

    size, lr_factor = None, 1.0

    def __init__(self, value: float = 0.5) -> None:
        super().__init__()
        self.value, self.seen, self.weight = value, [], []

    def values(self, batch):
        return torch.full((batch.num_tokens,), self.value)

    def update(self, batch, loss):
        self.seen += map(tuple, batch.keys.tolist())
        self.weight.append(float(batch.weights.double().sum()))
        return super().update(batch, loss)


def test_a_prompts_answers_are_dealt_out_to_all_critics() -> None:
    cfg, critics = RlvrConfig(), [Critic(0.25), Critic(0.75)]
    cfg.policy.dtype, cfg.algorithm = "bfloat16", AlgorithmConfig(advantage="gae")
    both = CriticEnsemble(critics)
    with solo() as world:
        both.layout = Layout(world)
        learner = learner_of(cfg, FakePolicy(), None, both, world)
        batches = learner.prepare(collected(GROUPS))
        metrics = learner.update(batches)
    every = {tuple(key) for key in batches[0].keys.tolist()}
    assert {*critics[0].seen} | {*critics[1].seen} == every and not {*critics[0].seen} & {*critics[1].seen}
    for ticket in {ticket for ticket, _ in every}:
        counts = [sum(one == ticket for one, _ in critic.seen) for critic in critics]
        assert abs(counts[0] - counts[1]) <= 1 and sum(counts) > 1
    whole = float(batches[0].weights.double().sum())
    assert [w for critic in critics for w in critic.weight] == pytest.approx([whole] * 2)
    assert batches[0].values[batches[0].loss_mask].unique().tolist() == [0.5]
    assert metrics["critic/value_spread/mean"] == pytest.approx(0.25)


def test_a_critic_without_a_sample_is_not_updated() -> None:
    critics = [Critic(), Critic()]
    both = CriticEnsemble(critics)
    batch = spread_batch().select([0])
    batch.weights, batch.returns = batch.loss_mask / 6, batch.values
    part = int(both.parts(batch))
    with solo() as world:
        both.layout = Layout(world)
        both.update(batch, lambda values, _: (values, {}))
        assert [len(critic.seen) for critic in critics] == [part == 0, part == 1]
        assert both.update(batch.select([]), lambda values, _: (values, {})) == {}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["algorithm=ppo", "critic.ensemble=2"], "algorithm.value_clip: 0.5 has no meaning around the mean"),
        (["algorithm=ppo", "algorithm.advantage_mask_ratio=0.2"], "algorithm.advantage_mask_ratio: is for several"),
        (["algorithm=grpo", "algorithm.entropy_mask_ratio=0.2"], "algorithm.entropy_mask_ratio: is for several"),
        (["algorithm=asyppo", "rollout.answers_per_prompt=1"], "critic.ensemble: 2 critics need as many answers"),
        (["algorithm=asyppo", "critic.ensemble=0"], "ensemble: must be at least 1"),
    ],
)
def test_what_has_no_meaning_is_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        load("rlvr", RlvrConfig, overrides)
