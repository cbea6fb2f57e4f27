"""Several rewards of one answer, from the verdicts to the advantages."""

from dataclasses import replace

import pytest
from msgspec import structs

from spmd_rl.base.errors import UserError
from spmd_rl.config.load import load
from spmd_rl.config.plugin_checks import check_reward_weights
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.config.sections.algorithm import AlgorithmConfig
from spmd_rl.config.sections.data import RewardConfig, RewardsConfig
from spmd_rl.distributed import solo
from spmd_rl.learn.advantages import verdict_parts
from spmd_rl.types import Verdict
from tests.unit.test_learner import FakeBackend, learner_of
from tests.unit.test_prepare import GROUPS, collected

PARTS = [{"right": float(n % 2), "short": n / 4} for n in range(7)]
WEIGHTS = {"right": 1.0, "short": 0.5}


def with_parts(groups=GROUPS, parts=PARTS):
    """The same groups, whose verdicts have parts."""
    given, made = iter(parts), []
    for group in groups:
        verdicts = [replace_parts(sample.verdict, next(given)) for sample in group.samples]
        samples = [structs.replace(s, verdict=v) for s, v in zip(group.samples, verdicts, strict=True)]
        made.append(structs.replace(group, samples=tuple(samples)))
    return made


def replace_parts(verdict: Verdict, parts: dict[str, float]) -> Verdict:
    return structs.replace(verdict, parts=parts) if verdict.scored else verdict


def test_each_answer_with_a_score_has_its_terms() -> None:
    with solo() as world:
        found = verdict_parts(with_parts(), ["short", "right"], world)
        assert (4, 2) not in found and len(found) == 6
        assert found[7, 1] == (1.0, 0.0)
        lacks = [*PARTS[:3], {"right": 1.0}, *PARTS[4:]]
        with pytest.raises(UserError, match=r"algorithm\.reward_weights\.short: a verdict of reward\.toy .* has right"):
            verdict_parts(with_parts(parts=lacks), ["short", "right"], world)


def test_a_step_with_several_rewards() -> None:
    cfg = RlvrConfig()
    cfg.policy.dtype, cfg.algorithm = "bfloat16", AlgorithmConfig(advantage="gdpo", reward_weights=WEIGHTS)
    with solo() as world:
        learner = learner_of(cfg, FakeBackend(), None, None, world)
        learner.update(learner.prepare(collected(with_parts())))
        ours = learner.plan.advantages.tolist()
    pairs = [(0, 1), (3, 4), (5, 6)]  # places in PARTS; number 2 has no score
    half = 0.5**0.5
    sums = [sign * half * (1.0 * (1 if a % 2 == 0 else -1) + 0.5) for a, _ in pairs for sign in (-1, 1)]
    norm = (sum(one**2 for one in sums) / 5) ** 0.5
    assert ours == pytest.approx([one / norm for one in sums], rel=1e-4)


def test_mistakes_in_the_weights() -> None:
    def tell(*overrides: str) -> str:
        with pytest.raises(UserError) as told:
            load("rlvr", RlvrConfig, ["algorithm.advantage=gdpo", *overrides])
        return str(told.value)

    weights = "algorithm.reward_weights={right: 1, short: 0.5}"
    assert load("rlvr", RlvrConfig, ["algorithm.advantage=gdpo", weights]).algorithm.reward_weights == WEIGHTS
    assert tell().startswith("algorithm.reward_weights: gdpo needs them")
    for shaping in ("norm_mean_type=batch", "format_penalty=1", "reward_scale=2", "difficulty_mask=true"):
        assert tell(weights, f"algorithm.{shaping}").startswith("algorithm.advantage: gdpo reads the parts")
    parts = {"right": {"target": "a:B"}}
    reward = RewardsConfig(domains={"toy": RewardConfig("rewards.composite:CompositeReward", {"parts": parts})})
    algorithm = AlgorithmConfig(advantage="gdpo", reward_weights={"right.detail": 1.0})
    check_reward_weights(algorithm, reward)
    with pytest.raises(UserError, match=r"algorithm.reward_weights.short: reward.toy has no such part; it has right"):
        check_reward_weights(replace(algorithm, reward_weights=WEIGHTS), reward)
