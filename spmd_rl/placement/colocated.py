"""`placement.mode=colocated`: every rank trains and generates, in turns."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from spmd_rl import engine, weights
from spmd_rl.job import Job, Place
from spmd_rl.rollout import Rollouts, Services
from spmd_rl.weights.adapter_source import AdapterSource


@contextmanager
def colocated(job: Job, last_ahead: int = 0) -> Iterator[Place]:
    """[all] Let the roles and the engine of each rank take turns on its device.

    last_ahead: steps 2 to `last_ahead` begin before the previous update, with answers one version old; 0: none.
    """
    cfg, world = job.cfg, job.world
    job.open_run(world)  # [all]
    with job.starting():
        scorer, environments = job.connect(cfg.debug)
        roles = job.build_roles(world)  # [all]
        sleeps, constraint = cfg.train.offload, cfg.rollout.constraint
        generator = engine.build(cfg.engine, cfg.policy, sleeps, world, constraint)  # [all]
    source = AdapterSource(roles.policy) if cfg.engine.adapters else roles.policy
    publish = weights.build(source, generator, world, cfg.publish.probe_every, cfg.engine.quantization)
    services = Services(scorer, job.tokenizer, job.episode, environments)
    settings = replace(cfg.generation, last_ahead=last_ahead)
    with closing(Rollouts(settings, generator, job.source, services, world)) as rollouts:  # [all]
        yield Place(
            world=world,
            roles=roles,
            rollouts=rollouts,
            publish=publish,
            environments=environments,
            on_start=lambda start: rollouts.check(),
        )
    # Not after an exception: closing the engine's process groups would wait for dead ranks.
    generator.close()
