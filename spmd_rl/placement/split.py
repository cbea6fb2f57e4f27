"""`placement.mode=split` and `lent`: some ranks train while others generate.

Beyond the start the two sides meet in no collective: a generating rank fetches weights and delivers groups when it is
ready, and waits only where it would run ahead of training by more than `placement.max_staleness` versions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from spmd_rl import train
from spmd_rl.job import Job, Place
from spmd_rl.rollout import Services
from spmd_rl.split import Generator, HandedOver, Lent, meet
from spmd_rl.split.sides import Sides, TrainSide, announce
from spmd_rl.types import Environments, Scorer
from spmd_rl.weights import Local, Publisher, Served


@contextmanager
def split(job: Job) -> Iterator[Place]:
    """[all] Each rank has one task."""
    cfg, world = job.cfg, job.world
    with meet(cfg.placement, cfg.sidecar.keys, world) as sides:  # [all]
        if sides.generate:
            yield Place(generate=partial(_generate, job, sides))
            return
        side = sides.train
        roles, _, environments = _started(job, side)  # [train]
        publish = Publisher(roles.policy, side.world, [_served(job, side)], cfg.publish.probe_every)
        rollouts = HandedOver(cfg, job.source, job.tokenizer, side)  # [train]
        yield Place(None, side.world, roles, rollouts, publish, environments, _start_sender(job, sides, rollouts))


@contextmanager
def lent(job: Job) -> Iterator[Place]:
    """[all] As `split`, but the ranks that train generate too, from the end of an update until its step is there."""
    cfg, world = job.cfg, job.world
    with meet(cfg.placement, cfg.sidecar.keys, world) as sides:  # [all]
        if sides.generate:
            yield Place(generate=partial(_generate, job, sides))
            return
        side = sides.train
        roles, scorer, environments = _started(job, side)  # [train]
        services = Services(scorer, job.tokenizer, job.episode, environments)
        with Lent.build(cfg, job.source, services, side, world) as rollouts:  # [all]
            transports = [_served(job, side), Local(rollouts.engine, side.world)]
            publish = Publisher(roles.policy, side.world, transports, cfg.publish.probe_every)
            yield Place(None, side.world, roles, rollouts, publish, environments, _start_sender(job, sides, rollouts))


def _started(job: Job, side: TrainSide) -> tuple[train.Roles, Scorer, Environments | None]:
    """[train] The roles, and the sidecar, whose host is also for the ranks of this machine that generate."""
    job.open_run(side.world)  # [train]
    with job.starting():
        scorer, environments = job.connect()
        return train.build_roles(job.cfg.roles, side.world), scorer, environments  # [train]


def _generate(job: Job, sides: Sides) -> None:
    parts = job.cfg, job.source, job.tokenizer, sides.generate, job.world, job.envs
    with Generator.build(*parts) as generator:  # [generate]
        start, tickets = job.world.broadcast("start: step", None, src=sides.first_trainer)  # [all]
        generator.run(start, tickets)  # [generate] to the last step


def _served(job: Job, side: TrainSide) -> Served:
    """The transport to the ranks that only generate."""
    announces = partial(announce, job.world.store)
    return Served(side.exchange.weights, side.world, announces, side.probe_answers, job.cfg.publish.delta)


def _start_sender(job: Job, sides: Sides, rollouts: HandedOver | Lent) -> Callable[[int], object]:
    """[all] Sends the step from which the run goes on, and the tickets that are used up, to the ranks that generate."""
    return lambda start: job.world.broadcast("start: step", [start, rollouts.state()], src=sides.first_trainer)  # [all]
