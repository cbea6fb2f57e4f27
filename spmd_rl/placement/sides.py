"""Build a trainer rank and a generator rank of `placement.mode=split` and `lent`."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass

from spmd_rl import engine
from spmd_rl.config.placement import Placement
from spmd_rl.config.ranks import world_size
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.job import Job, Place
from spmd_rl.placement.generator import Generator
from spmd_rl.placement.trainers import LentReplica, ReceivedRollouts
from spmd_rl.rollout import Services
from spmd_rl.rollout.ahead import Replicas, StepsAhead
from spmd_rl.rollout.player import Player
from spmd_rl.rollout.prompt_lengths import check_room, fit_prompts
from spmd_rl.weights import Buckets, Publisher, WeightReceiver


@dataclass(frozen=True, slots=True)
class Sides:
    """Trainer ranks and generator ranks of a world."""

    world: World
    train: tuple[int, ...]
    """Ranks that train, as indices in the world."""
    trainers: World | None
    """World of these ranks; None on the others."""
    generators: World | None
    """World of the ranks with an engine (all with `lent`); None on the others."""

    @classmethod
    def of(cls, job: Job) -> "Sides":
        """[all] Form the two sides of `job.world`."""
        world = job.world
        # Settings count all ranks; `job.world` lacks those of frozen roles.
        placement = Placement.of(job.cfg.placement, world_size())
        train, generate = (
            [world.ranks.index(rank) for rank in ranks] for ranks in (placement.train, placement.generate)
        )
        # Only members meet: the other ranks get None at once.
        trainers = world.subset("train", train)  # [train]
        return cls(world, tuple(train), trainers, world.subset("generate", generate))  # [generate]


@contextmanager
def training(job: Job, sides: Sides, lends: bool = False) -> Iterator[Place]:
    """[all] together with `generating`: build a trainer rank. lends: it also has an engine."""
    cfg, trainers, world = job.cfg, sides.trainers, sides.world
    job.open_run(trainers)  # [train]
    with job.starting():
        services = _services(job)
        roles = job.build_roles(trainers)  # [train]
        own = _engine(job, sides) if lends else None  # [generate]
        prompts, steps, player = _parts(job, sides, own, services)  # [all]
        buckets = Buckets(world, sides.train)  # [all]
    lent = LentReplica(cfg, player, steps) if player else None
    rollouts = ReceivedRollouts(cfg, prompts, world, trainers, steps, lent)
    every, quantization = cfg.publish.probe_every, cfg.engine.quantization
    publisher = Publisher(roles.policy, trainers, own, every, quantization, buckets, world)
    with closing(lent) if lent else nullcontext():
        yield Place(
            world=trainers,
            roles=roles,
            rollouts=rollouts,
            publish=lambda version: rollouts.published(publisher, version, publisher.is_probed(version)),  # [train]
            environments=services.environments,
            on_start=rollouts.begin,
        )
        rollouts.finish()  # [train]
    _leave(world, own)  # [all]


@contextmanager
def generating(job: Job, sides: Sides) -> Iterator[Place]:
    """[all] together with `training`: build a rank that only generates."""
    cfg, world = job.cfg, sides.world
    with job.starting():
        services = _services(job)
        own = _engine(job, sides)  # [generate]
        prompts, steps, player = _parts(job, sides, own, services)  # [all]
        receiver = WeightReceiver(own, Buckets(world, sides.train), world)  # [all]
    generator = Generator(cfg, world, player, prompts, steps, receiver, sides.train)
    yield Place(generate=generator.run)
    _leave(world, own)  # [all]


def _services(job: Job) -> Services:
    scorer, environments = job.connect()
    return Services(scorer, job.tokenizer, job.episode, environments)


def _engine(job: Job, sides: Sides) -> Engine:
    """[generate] Build the engine of this rank."""
    cfg = job.cfg
    return engine.build(cfg.engine, cfg.policy, cfg.train.offload, sides.generators, cfg.rollout.constraint)


def _parts(
    job: Job, sides: Sides, own: Engine | None, services: Services
) -> tuple[Prompts | EnvTasks, StepsAhead, Player | None]:
    """[all] Return the prompts, the steps, and on ranks with an engine the player."""
    settings, world, prompts = job.cfg.generation, sides.world, job.source
    longest, prompt_id = settings.rollout.max_prompt_tokens, ""
    if settings.data is not None:
        sections = settings.rollout, settings.data, settings.reward
        prompts, longest, prompt_id = fit_prompts(prompts, job.tokenizer, *sections, world)  # [all]
    # True on the first rank of each replica.
    leads = world.gather("start: replicas", own is not None and own.leads)  # [all]
    ranks = [rank for rank, is_first in enumerate(leads) if is_first]
    # Replicas that are never lent go on with unfinished slices of those that are.
    keepers = {number: rank for number, rank in enumerate(ranks) if rank not in sides.train}
    replicas = Replicas(sum(leads[: world.rank]), len(ranks), keepers)

    def priority(ticket: int) -> float:
        return prompts.ticket(ticket, settings.seed)[1].priority

    most = job.cfg.placement.max_staleness
    steps = StepsAhead(world.store, settings.rollout, most, replicas, priority)
    if own is None:
        return prompts, steps, None
    check_room(settings.rollout, settings.kv_tokens, longest, prompt_id, own.capacity.max_tokens)
    leaves = sides.trainers is not None
    return prompts, steps, Player(settings, own, prompts, services, sides.generators, replicas.count, leaves)


def _leave(world: World, own: Engine | None) -> None:
    """[all] Close the engine."""
    # A rank that leaves early would end the sidecar that other ranks of its node still use.
    world.barrier("generate: last step")  # [all]
    # Not with an exception pending: closing its process groups would wait for dead ranks.
    if own:
        own.close()
