"""`placement.mode=split` and `lent`: some ranks train while others generate.

Beyond the start the two sides meet in no collective: a generating rank fetches weights, claims and hands in when it is
ready, and waits only where it would run ahead of training by more than `placement.max_staleness` versions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from spmd_rl import train
from spmd_rl.job import Job, Place
from spmd_rl.rollout import Services
from spmd_rl.split import GenerateSide, Generator, Lent, PieceRules, RemoteRollouts, TrainSide, meet
from spmd_rl.types import Environments, Scorer
from spmd_rl.weights import Local, Publisher, Served


@contextmanager
def split(job: Job) -> Iterator[Place]:
    """[all] Each rank has one task."""
    with meet(job.cfg, job.world) as sides:  # [all]
        if sides.generate:
            yield Place(generate=partial(generate, job, sides.generate))
            return
        side = sides.train
        roles, _, environments = _started(job, side)  # [train]
        rollouts = remote_rollouts(job, side)  # [train]
        transports, every = [served(job, side, rollouts)], job.cfg.publish.probe_every
        publish = Publisher(roles.policy, side.world, transports, every, job.cfg.engine.quantization)
        yield Place(
            world=side.world,
            roles=roles,
            rollouts=rollouts,
            publish=publish,
            environments=environments,
            on_start=rollouts.begin,
        )


@contextmanager
def lent(job: Job) -> Iterator[Place]:
    """[all] As `split`, but the ranks that train generate too, from the end of an update until its step is there."""
    with meet(job.cfg, job.world) as sides:  # [all]
        if sides.generate:
            yield Place(generate=partial(generate, job, sides.generate))
            return
        side = sides.train
        roles, scorer, environments = _started(job, side)  # [train]
        services = Services(scorer, job.tokenizer, job.episode, environments)
        remote = remote_rollouts(job, side)  # [train]
        with Lent.build(job.cfg, remote, services, side, job.world) as rollouts:  # [all]
            transports = [served(job, side, remote), Local(rollouts.engine, side.world)]
            every, quantization = job.cfg.publish.probe_every, job.cfg.engine.quantization
            publish = Publisher(roles.policy, side.world, transports, every, quantization)
            yield Place(
                world=side.world,
                roles=roles,
                rollouts=rollouts,
                publish=publish,
                environments=environments,
                on_start=remote.begin,
            )


def _started(job: Job, side: TrainSide) -> tuple[train.Roles, Scorer, Environments | None]:
    """[train] The roles, and the sidecar, whose host is also for the ranks of this machine that generate."""
    job.open_run(side.world)  # [train]
    with job.starting():
        scorer, environments = job.connect()
        return train.build_roles(job.cfg.roles, side.world), scorer, environments  # [train]


def generate(job: Job, side: GenerateSide) -> None:
    """[generate] Generate until the run is over."""
    with Generator.build(job.cfg, job.source, job.tokenizer, side, job.world, job.envs) as (generator, rollouts):
        generator.run(rollouts)  # [generate]


def remote_rollouts(job: Job, side: TrainSide) -> RemoteRollouts:
    """[train] What other ranks generate."""
    return RemoteRollouts(job.cfg, job.source, job.tokenizer, side, PieceRules.of(job.cfg))  # [train]


def served(job: Job, side: TrainSide, rollouts: RemoteRollouts) -> Served:
    """The transport to the ranks that only generate."""
    return Served(side.server.weights, side.world, rollouts.announce, rollouts.probe_answers, False)
