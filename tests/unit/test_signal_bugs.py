"""Silent bugs of other trainers that bend the learning signal of many turns: each is a test of what is right here.

Named by the project and the number of the thread that tells of the bug. Of those that an environment's episode could
have, the ones about its end are in test_agent.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from spmd_rl.algo import AGGREGATIONS, POLICY_LOSSES
from spmd_rl.algo.correction import correction
from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.learn import sample_log, token_advantages
from spmd_rl.learn.losses import bind_loss
from spmd_rl.learn.prepare import UpdatePlan
from spmd_rl.rollout.table import answer_row, answer_rows
from spmd_rl.types import Group
from tests import plans
from tests.agents import Step, collected, group, trajectory

SIZES = {"num_updates": 1, "num_shards": 1, "hidden_size": 64, "max_tokens": 64}


def prepared(some: list[Group], **keys) -> tuple[UpdatePlan, Batch]:
    """The plan, and the batch with finished advantages; a critic says 0 of everything."""
    settings, c = AlgorithmConfig(**keys), collected(some)
    plan, _ = plans.plan(c, settings, Moments(), **SIZES)
    with solo() as world:
        data = Layout(world).data
        (batch,) = plans.redistribute(c, plan, 1, data, world)
        if settings.uses_critic:
            batch.values = torch.zeros(batch.num_tokens)
        token_advantages.finish([batch], plan, settings, 0.0, data, seed=0)
    return plan, batch


def tokens(new: list[float], old: list[float], engine: list[float] | None = None, **more) -> Tokens:
    """One sample of these logprobs, with advantage 1 at each token."""
    zeros = torch.zeros(len(new), dtype=torch.int64)
    as_floats = [torch.tensor(values, dtype=torch.float64) for values in (new, old, engine or old)]
    return Tokens(*as_floats, torch.ones(len(new)).double(), torch.zeros(len(new)), zeros, more.get("segments", zeros))


@pytest.mark.parametrize("advantage", ["grpo", "starpo", "gigpo", "gae"])
def test_verl_6310_and_5613_an_empty_answer_puts_its_reward_nowhere_and_is_counted(advantage: str) -> None:
    """It has no last token, and index -1 would be another's: its peers' advantages are those without it."""
    pair = [trajectory(0, a, [Step(float(a)), Step(0.0)]) for a in range(2)]
    empty = trajectory(0, 2, [Step(10.0, num_tokens=0)])
    keys = {"advantage": advantage}
    (plan, batch), (alone, other) = prepared([group(0, [*pair, empty])], **keys), prepared([group(0, pair)], **keys)
    assert plan.keys.tolist() == alone.keys.tolist() == [[0, 0], [0, 1]]
    assert torch.equal(batch.advantages, other.advantages) and torch.equal(batch.weights, other.weights)
    assert plan.masked == (((0, 2), "nothing sampled"),) and plan.left_out == pytest.approx(1 / 3)
    c = collected([group(0, [*pair, empty])])
    assert c.metrics()["critic/score/mean"] == pytest.approx(11 / 3)
    assert [row.reject_reason for row in sample_log.rows(c, plan)] == [None, None, "nothing sampled"]


@pytest.mark.parametrize("trailing", [0, 3])
def test_verl_6392_a_reward_stands_at_the_last_token_that_the_model_sampled(trailing: int) -> None:
    """And not at one of the environment, not even where its word ends the trajectory."""
    steps = [Step(1.0), Step(4.0, num_tokens=3)]
    samples = trajectory(0, 0, [*steps, Step(num_tokens=0, observation=trailing, has_step=False)])
    _, batch = prepared([group(0, [samples])], advantage="reinforce_returns", gamma=0.0)
    ended = [0.0] * trailing
    assert batch.advantages.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 4, *ended]


def test_verl_6376_an_observation_neither_resets_nor_discounts_a_return() -> None:
    """Rewards [0, -, 1] over a sampled token, one of the environment and a sampled token, gamma 0.5."""
    steps = [Step(0.0, num_tokens=1), Step(1.0, num_tokens=1, observation=1)]
    _, batch = prepared([group(0, [trajectory(0, 0, steps)])], advantage="reinforce_returns", gamma=0.5)
    assert batch.advantages.tolist() == [0, 0, 0, 0.5, 0, 1.0]
    _, batch = prepared([group(0, [trajectory(0, 0, steps, cuts=(1,))])], advantage="reinforce_returns", gamma=0.5)
    assert batch.advantages.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0, 1.0], "nor does a prompt made afresh"


def test_verl_6362_and_6375_what_is_rejected_takes_its_reward_with_it() -> None:
    """An answer without a score is in no baseline; a token that the correction masks has no loss and no gradient."""
    pair = [trajectory(0, a, [Step(float(a)), Step(0.0)]) for a in range(2)]
    rejected = trajectory(0, 2, [Step(100.0), Step(0.0)], status="rejected")
    plan, _ = prepared([group(0, [*pair, rejected])], norm_std=False)
    assert plan.advantages.tolist() == [-0.5, 0.5] and len(plan.keys) == 2
    settings = AlgorithmConfig()
    settings.correction = replace(settings.correction, level="token", mask_low=0.8, mask_high=1.25)
    _, batch = prepared([group(0, pair)], norm_std=False)
    index = batch.sampled.index
    batch.old_logprobs = batch.rollout_logprobs.clone()
    batch.old_logprobs[index[1]] -= 5.0
    logprobs = batch.rollout_logprobs[index].clone().requires_grad_()
    loss, _ = bind_loss(settings)(logprobs, torch.zeros_like(logprobs), batch)
    loss.sum().backward()
    assert loss[1] == 0.0 and logprobs.grad[1] == 0.0 and (logprobs.grad != 0).sum() == len(index) - 1


def test_skyrl_1154_the_divisor_of_dr_grpo_is_the_most_that_an_answer_can_have() -> None:
    """Not the length of a turn, nor the number of turns it had."""
    assert RolloutConfig(max_new_tokens=16, max_turns=5).max_answer_tokens == 80
    assert RolloutConfig(max_new_tokens=16, max_turns=5, max_context_tokens=50).max_answer_tokens == 50
    assert RolloutConfig(max_new_tokens=16).max_answer_tokens == 16
    some = [group(0, [trajectory(0, 0, [Step(1.0)]), trajectory(0, 1, [Step(0.0)] * 4, cuts=(2,))])]
    keys = {"advantage": "dr_grpo", "loss_agg": "seq-mean-token-sum-norm", "loss_agg_length": 80}
    plan, _ = prepared(some, **keys)
    assert plan.weights.tolist() == pytest.approx([1 / 2 / 80] * 3)


def test_skyrl_1278_the_ratio_of_a_sequence_is_the_trajectorys_in_step_wise_training() -> None:
    steps = [Step(1.0, 1, 2), Step(0.0, 2, 6)]
    ratios = []
    for advantage, cuts in (("grpo", ()), ("gigpo", ()), ("gigpo", (1,))):
        some = [group(0, [trajectory(0, a, steps if a else steps[:1], cuts if a else ()) for a in range(2)])]
        _, batch = prepared(some, advantage=advantage)
        batch.old_logprobs = batch.rollout_logprobs - 0.1 * (batch.token_ids % 3)
        logprobs = batch.rollout_logprobs[batch.sampled.index]
        _, metrics = bind_loss(AlgorithmConfig(loss="gspo"))(logprobs, torch.zeros_like(logprobs), batch)
        ratios.append(metrics["actor/ratio"].tolist())
        assert len(set(ratios[-1])) == 2, "one for each trajectory"
    assert ratios[0] == ratios[1] and ratios[0] == pytest.approx(ratios[2])


def test_skyrl_201_the_rewards_of_all_turns_count() -> None:
    some = [group(0, [trajectory(0, 0, [Step(2.0), Step(0.0)]), trajectory(0, 1, [Step(0.0), Step(1.0)])])]
    for advantage in ("grpo", "starpo"):
        plan, _ = prepared(some, advantage=advantage, norm_std=False)
        assert set(plan.advantages[plan.num_spans[0] :].tolist()) == {-0.5}
        assert set(plan.advantages[: plan.num_spans[0]].tolist()) == {0.5}
        assert plan.mean_reward == 1.5


@pytest.mark.parametrize("advantage", ["grpo", "gigpo", "gae", "turn_gae"])
def test_unsloth_5673_the_environments_tokens_are_in_no_loss(advantage: str) -> None:
    """No advantage, no weight and no place among the tokens of a loss; test_trained_once.py has the gradient."""
    some = [group(0, [trajectory(0, a, [Step(float(a)), Step(1.0, 3)], cuts=(1,) * a) for a in range(2)])]
    _, batch = prepared(some, advantage=advantage, whiten_advantages=True)
    given = ~batch.loss_mask
    assert int(given.sum()) == 3 + 2 + 3 + (3 + 2 + 2)
    assert not batch.advantages[given].any() and not batch.weights[given].any()
    assert not set(batch.sampled.index.tolist()) & set(given.nonzero().flatten().tolist())
    assert float(batch.weights.sum()) == pytest.approx(1.0)


def test_openrlhf_1352_an_answer_that_ran_out_of_context_is_truncated() -> None:
    """By its last turn, in its last segment; and `max_len_mask` masks all of it."""
    some = [trajectory(0, a, [Step(float(a)), Step(1.0)], cuts=(1,)) for a in range(2)]
    last = some[0][1]
    some[0][1] = structs.replace(last, turns=(structs.replace(last.turns[0], finish_reason="length"),))
    rows = answer_rows(answer_row(sample, 0, 0) for samples in some for sample in samples)
    assert rows["truncated"].tolist() == [False, True, False, False]
    assert collected([group(0, some)]).metrics()["rollout/truncated"] == 0.5
    plan, _ = prepared([group(0, some)], max_len_mask=True)
    assert plan.num_answers == 1 and {reason for _, reason in plan.masked} == {"truncated"}


def test_nemo_rl_2269_a_long_episode_is_not_scaled_down_by_a_product_of_weights() -> None:
    """8,000 tokens whose ratios are a hair off 1: their product is 0.06, their geometric mean 0.9996; the metric is the
    ratio before it is cut off."""
    n, off = 8000, math.log(0.0596) / 8000
    old = [-1.0 + off] * n
    sample = tokens(old, old, [-1.0] * n)
    bounds = {"upper": 2.0, "mask_low": None, "mask_high": None}
    found = {level: correction(sample, level=level, **bounds) for level in ("token", "geometric", "sequence")}
    weights = {level: float(weight.mean()) for level, (weight, _) in found.items()}
    assert weights == pytest.approx({"token": 0.99965, "geometric": 0.99965, "sequence": 0.0596}, abs=1e-4)
    high = tokens([0.0] * 4, [0.0] * 4, [-1.0] * 4)
    weight, metrics = correction(high, level="sequence", **bounds)
    assert weight.tolist() == [2.0] * 4 and metrics["train_infer/ratio"].tolist() == pytest.approx([math.exp(4)] * 4)


def test_unsloth_zoo_870_a_sequence_ratio_is_the_exponential_of_the_sum() -> None:
    """And not a sum of exponentials."""
    new, old = [-1.0, -2.0, -0.5], [-1.1, -1.7, -0.9]
    differences = [a - b for a, b in zip(new, old, strict=True)]
    _, metrics = POLICY_LOSSES["gspo"](tokens(new, old), clip_low=0.5, clip_high=0.5)
    assert metrics["actor/ratio"].tolist() == pytest.approx([math.exp(sum(differences) / 3)] * 3)
    weight, _ = correction(tokens(old, new, old), level="sequence", upper=None, mask_low=None, mask_high=None)
    assert weight.tolist() == pytest.approx([math.exp(sum(differences))] * 3)


def test_every_turn_counts_in_the_same_way_in_each_aggregation() -> None:
    """The sum of all weights is 1 for the means, however answers are cut into turns and segments."""
    some = [group(0, [trajectory(0, a, [Step(float(a))] * (1 + a), cuts=range(1, 1 + a)) for a in range(4)])]
    for agg in ("token-mean", "seq-mean-token-mean"):
        _, batch = prepared(some, loss_agg=agg)
        assert agg in AGGREGATIONS and float(batch.weights.double().sum()) == pytest.approx(1.0)
