"""Several epochs over a step's samples: in which order, from which old logprobs, and how long the schedule is."""

from spmd_rl.config.schema import AgenticConfig, RlvrConfig
from spmd_rl.config.sections.algorithm import AlgorithmConfig
from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.distributed import solo
from tests.unit.test_learner import FakeBackend, FakeCritic, learner_of
from tests.unit.test_prepare import GROUPS, collected, group, planned


def test_each_epoch_takes_every_mini_batch_in_an_order_of_its_own() -> None:
    plan = planned([group(ticket, [(2, 1.0), (3, 0.0)]) for ticket in range(6)], num_updates=6)
    visits = plan.visits(4, seed=3)
    epochs = [visits[i : i + 6] for i in range(0, 24, 6)]
    assert epochs[0] == [0, 1, 2, 3, 4, 5] and all(sorted(epoch) == epochs[0] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert plan.visits(1, seed=3) == epochs[0] and plan.visits(2, seed=3) == visits[:12], "epochs do not shift others"
    assert plan.visits(4, seed=4) != visits
    assert planned([], num_updates=2).visits(3, seed=0) == []


def test_old_logprobs_are_computed_once_and_before_the_first_update() -> None:
    cfg, critic = RlvrConfig(), FakeCritic()
    cfg.policy.dtype, cfg.algorithm = "bfloat16", AlgorithmConfig(advantage="gae", sample_epochs=2)
    policy = FakeBackend()
    with solo() as world:
        learner = learner_of(cfg, policy, None, critic, world)
        learner.update(learner.prepare(collected(GROUPS)))
    assert policy.asked == ["logprobs", "update of 15", "update of 15"]
    assert critic.asked == ["update of 15", "update of 15"]


def test_a_decay_ends_with_the_last_update() -> None:
    """The critic learns alone at first; what is shown is learnt from once, and by the policy alone."""
    cfg = RlvrConfig(steps=10)
    cfg.train.updates_per_step, cfg.algorithm = 2, AlgorithmConfig(advantage="gae", sample_epochs=3, critic_warmup=4)
    assert [cfg.role(name).total_updates for name in ("policy", "critic")] == [6 * 2 * 3, 10 * 2 * 3]
    shown = AgenticConfig(steps=10, env=EnvsConfig())
    shown.warmup.steps, shown.algorithm = 4, AlgorithmConfig(advantage="gae", sample_epochs=3)
    assert [shown.role(name).total_updates for name in ("policy", "critic")] == [4 + 6 * 3, 6 * 3]
