"""A step's plan and batches of what tests have collected, as `Learner.prepare` makes them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import DataShard, World
from spmd_rl.learn import prepare, token_advantages, transfer
from spmd_rl.learn.advantages import Key, Samples, StepTable, credit
from spmd_rl.learn.custom import bind
from spmd_rl.rollout.table import trajectories_of
from spmd_rl.types import Sample


def plan(
    collected: Samples,
    settings: AlgorithmConfig,
    running: Moments,
    *,
    max_tokens: int,
    greedy_answer: int | None = None,
    penalties: Mapping[Key, float] | None = None,
    terms: Mapping[Key, Sequence[float]] | None = None,
    **shares: int,
) -> tuple[prepare.UpdatePlan, Moments]:
    """The plan, and the moments of the run's scores. shares: the fields of `prepare.Shares`."""
    table = StepTable.of(collected.table, greedy_answer)
    table, running = credit(table, settings, running, max_tokens, penalties, terms)
    aggregate = bind(AGGREGATIONS[settings.loss_agg], settings)
    return prepare.plan(collected.step, table, prepare.Shares(**shares), aggregate), running


def redistribute(
    collected: Samples, plan: prepare.UpdatePlan, num_updates: int, data: DataShard, world: World
) -> list[Batch]:
    """[all] This rank's mini-batches."""
    packed = pack(plan.samples_of(collected.groups, world.rank), collected.step - 1)
    return transfer.redistribute(packed, plan, num_updates, data, world)


def take_kl(
    collected: Samples,
    batches: Sequence[Batch],
    plan: prepare.UpdatePlan,
    settings: AlgorithmConfig,
    data: DataShard,
    max_tokens: int = 64,
) -> prepare.UpdatePlan:
    """[all] The plan, and advantages of the batches, after the KL of an estimator of answers or of steps."""
    credited = partial(credit, StepTable.of(collected.table), settings, Moments(), max_tokens)
    kl = token_advantages.turn_kl(batches, plan, len(credited()[0].advantages), settings, data)  # [all]
    plan = prepare.with_scores(plan, credited(kl=settings.kl_reward_coef * kl)[0])
    transfer.give_advantages(batches, plan, data)
    return plan


def trajectories(collected: Samples) -> Iterator[list[Sample]]:
    """This rank's."""
    return (samples for group in collected.groups for samples in trajectories_of(group.samples))
