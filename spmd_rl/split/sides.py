"""The two sides of a run: who trains, who generates, and how they reach each other.

meet    [all] ranks of one job, some of which train while others generate; they know each other through their world
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from spmd_rl.config.placement import Placement
from spmd_rl.config.schema import RlConfig
from spmd_rl.curve_keys import ClientKeys, HostKeys
from spmd_rl.distributed import World
from spmd_rl.split.client import TrainerClient
from spmd_rl.split.link import MemberLink
from spmd_rl.split.pieces import max_piece_bytes
from spmd_rl.split.seal import Seal
from spmd_rl.split.server import TrainerServer, bind_of
from spmd_rl.split.work_queue import WorkQueue

LEAVE_SECONDS = 3600.0
"""How long the end of a run waits for ranks that generate to leave."""


@dataclass(frozen=True, slots=True)
class GenerateSide:
    """What a rank has that generates for training ranks."""

    world: World
    """Of the ranks that do nothing else."""
    client: TrainerClient
    connect: Callable[[], TrainerClient]
    """Another one, for a thread of its own; whoever calls this closes it."""
    together: World
    """Of all ranks that generate, those that are lent included."""


@dataclass(frozen=True, slots=True)
class TrainSide:
    """What a training rank has."""

    world: World
    """Of the ranks that train."""
    server: TrainerServer
    lent: GenerateSide | None = None
    """Of a rank that is lent."""


@dataclass(frozen=True, slots=True)
class Sides:
    """One of the two is None."""

    train: TrainSide | None
    generate: GenerateSide | None


def _server(cfg: RlConfig, seal: Seal, world: World) -> TrainerServer:
    keys = cfg.sidecar.keys
    answers = max(cfg.rollout.slice_size + cfg.rollout.redundancy, cfg.eval.answers) + 1
    limit = max_piece_bytes(cfg.rollout, cfg.has_turns, answers)
    return TrainerServer(bind_of(world), seal, limit, HostKeys.load(keys) if keys else None)


def _client_keys(cfg: RlConfig) -> ClientKeys | None:
    return ClientKeys.load(cfg.sidecar.keys) if cfg.sidecar.keys else None


@contextmanager
def meet(cfg: RlConfig, world: World) -> Iterator[Sides]:
    """[all] Form the two sides and let each generating rank know the servers of all training ranks."""
    settings = cfg.placement
    placement = Placement.of(settings, world.size)
    apart = [rank for rank in placement.generate if rank not in placement.train]  # who does nothing but generate
    num_train, num_apart = len(placement.train), len(apart)
    numbers = {rank: number for number, rank in enumerate(apart)}
    if settings.is_lent:  # each of these holds what it makes
        numbers |= {rank: num_train * (num_apart // num_train + 1) + i for i, rank in enumerate(placement.train)}
    server, address, trains = None, "", world.rank in placement.train
    with ExitStack() as stack:
        key = world.broadcast("start: key", Seal.new_key(), src=placement.train[0])  # [all]
        seal = Seal(bytes(key))
        if trains:
            server = stack.enter_context(closing(_server(cfg, seal, world)))
            address = server.address
        addresses = world.gather("start: servers", address, str)  # [all]
        train_world = world.subset("train", placement.train)  # [train]
        generate_world = world.subset("generate", apart)  # [generate]
        if server is not None:
            queue = None
            if train_world.rank == 0:
                queue = WorkQueue(cfg.rollout, settings.max_staleness, server.clock)
                for rank, number in sorted(numbers.items()):
                    place = (apart if rank in apart else placement.train).index(rank)
                    queue.enroll(number, f"rank {rank}", place % cfg.engine.ranks == 0, rank in apart)
            server.open(queue)
        side = None
        if world.rank in numbers:
            of_trainers = [addresses[rank] for rank in placement.train]
            keys, membership = _client_keys(cfg), seal.membership(numbers[world.rank])
            link = stack.enter_context(closing(MemberLink(of_trainers, membership, world.journal, keys)))
            world.on_exit(link.close)
            connect = partial(TrainerClient, link, of_trainers, world.progress, keys, placement.train)
            own = (connect(), connect, world if settings.is_lent else generate_world)
            side = GenerateSide(train_world if trains else generate_world, *own)
            stack.enter_context(closing(side.client))
        if server is None:
            yield Sides(None, side)
            return
        yield Sides(TrainSide(train_world, server, lent=side), None)
        if side is not None:
            side.client.link.close()
        server.end()
        with world.journal.waiting("end: ranks that generate have left"):
            server.wait_until_left(LEAVE_SECONDS)
        train_world.barrier("end: ranks that generate have left")  # [train]
