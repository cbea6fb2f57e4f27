"""`placement.generate=attached`: all ranks of this job train, and jobs of their own generate.

    torchrun --standalone -m spmd_rl.rlvr +experiment=demo placement.mode=split placement.generate=attached
    torchrun --standalone -m spmd_rl.rlvr +experiment=demo placement.mode=split placement.generate=attached \
        placement.attach=auto                                  # as many such jobs as there are

An attached job may die at any moment, and another may come: training waits for what it lacks, and no longer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from spmd_rl import train
from spmd_rl.job import Job, Place
from spmd_rl.placement.split import generate, remote_rollouts, served
from spmd_rl.split import attach, serve
from spmd_rl.weights import Publisher


@contextmanager
def attached_trainer(job: Job) -> Iterator[Place]:
    """[all] The job that trains. It starts once `placement.min_generate` ranks are there."""
    cfg, world = job.cfg, job.world
    job.open_run(world)  # [all]
    with serve(cfg, {"data": job.source.fingerprint()}, world) as side:  # [all]
        with job.starting():
            environments = job.connect()[1] if job.envs else None  # demonstrations are played here
            roles = train.build_roles(cfg.roles, world)  # [all]
        rollouts = remote_rollouts(job, side)  # [all]
        transports, quantization = [served(job, side, rollouts)], cfg.engine.quantization
        publish = Publisher(roles.policy, world, transports, cfg.publish.probe_every, quantization)
        yield Place(
            world=world,
            roles=roles,
            rollouts=rollouts,
            publish=publish,
            environments=environments,
            on_start=rollouts.begin,
        )


@contextmanager
def attached_generator(job: Job) -> Iterator[Place]:
    """[all] A job that attaches (`placement.attach`): it may be killed and started at any time.

    Engine and number of ranks are its own; its directory is `run.dir/attached/HOST-PORT`.
    """
    with attach(job.cfg, {"data": job.source.fingerprint()}, job.world) as side:  # [all]
        yield Place(generate=partial(generate, job, side))
