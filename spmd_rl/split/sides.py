"""The two sides of a run: who trains, who generates, and how they reach each other.

meet    [all] ranks of one job, some of which train while others generate; they know each other through their world
serve   [all] ranks of a job that trains, while other jobs attach to it and generate
attach  [all] ranks of such a job: they find the training job, make sure that it is theirs, and join it
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import randbelow

import msgspec

from spmd_rl.config.placement import Placement
from spmd_rl.config.schema import RlConfig
from spmd_rl.curve_keys import ClientKeys, HostKeys
from spmd_rl.distributed import World
from spmd_rl.distributed.agreement import check_values, common_values
from spmd_rl.errors import tell
from spmd_rl.split.client import TrainerClient
from spmd_rl.split.link import ADDRESS_FILE, MemberLink, find, join, write_address
from spmd_rl.split.messages import Welcome
from spmd_rl.split.pieces import max_piece_bytes
from spmd_rl.split.seal import Seal
from spmd_rl.split.server import TrainerServer, bind_of
from spmd_rl.split.work_queue import Limits, WorkQueue

OVER_SECONDS = 5.0
"""How long the end of a run waits for attached ranks to hear of it."""


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
    is_attached: bool = False
    """Whether those that generate are jobs of their own."""
    lent: GenerateSide | None = None
    """Of a rank that is lent."""


@dataclass(frozen=True, slots=True)
class Sides:
    """One of the two is None."""

    train: TrainSide | None
    generate: GenerateSide | None


def _server(cfg: RlConfig, seal: Seal, world: World, **lease: float) -> TrainerServer:
    keys = cfg.sidecar.keys
    answers = max(cfg.rollout.slice_size + cfg.rollout.redundancy, cfg.eval.answers) + 1
    limit = max_piece_bytes(cfg.rollout, cfg.has_turns, answers)
    return TrainerServer(bind_of(cfg.placement, world), seal, limit, HostKeys.load(keys) if keys else None, **lease)


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
            server.wait_until_left(cfg.placement.absent_seconds)
        train_world.barrier("end: ranks that generate have left")  # [train]


@contextmanager
def serve(cfg: RlConfig, data: dict[str, str], world: World) -> Iterator[TrainSide]:
    """[all] Serve jobs that attach, until the end of the block.

    data: digests of what the settings do not show, by name, which these must have in common with this job.
    """
    settings, first = cfg.placement, world.rank == 0
    seal = Seal(bytes(world.broadcast("start: key", Seal.new_key())))  # [all]
    server = _server(cfg, seal, world, lease_seconds=settings.lease_seconds)
    place = Path(cfg.run.dir) / ADDRESS_FILE
    try:
        addresses = world.gather("start: servers", server.address, str)  # [all]
        queue = None
        if first:
            numbers = {"first": randbelow(1 << 40) * world.size}
            limits = Limits(settings.lease_seconds, settings.absent_seconds)
            rules = cfg.rollout, settings.max_staleness, server.clock, limits
            queue = WorkQueue(*rules, _teller(world), **numbers)
        server.open(queue, Welcome(common_values(cfg, data), addresses, settings.lease_seconds))
        world.barrier("start: servers are open")  # [all]
        if first:
            write_address(place.parent, addresses[0])
        yield TrainSide(world, server, is_attached=True)
        server.end()
        server.wait_until_left(OVER_SECONDS)
        world.barrier("end: attached jobs have left")  # [all]
    finally:
        if first:
            place.unlink(missing_ok=True)
        server.close()


def _teller(world: World) -> Callable[[str], None]:
    """Prints and writes down who comes and goes."""

    def write(line: str) -> None:
        world.journal.note("attached", text=line)
        tell(line, file=sys.stdout)

    return write


def training_dir(cfg: RlConfig) -> Path:
    """Return the run directory of the training job: as `placement.attach` says, or that of the same line."""
    auto = cfg.placement.attach == "auto"
    return Path(cfg.run.dir).parents[1] if auto else Path(cfg.placement.attach).expanduser()


@contextmanager
def attach(cfg: RlConfig, data: dict[str, str], world: World) -> Iterator[GenerateSide]:
    """[all] Find the training job, make sure that it is this one's, and join it.

    data: digests of what the settings do not show, by name. UserError for another model, other settings or data.
    """
    keys, seconds = _client_keys(cfg), cfg.placement.absent_seconds
    with world.phase("start"), world.journal.extend_timeout(seconds):
        found = None
        if world.rank == 0:
            with world.journal.waiting("start: training job"):
                found = msgspec.to_builtins(find(cfg.placement.attach, training_dir(cfg), keys, seconds))
        welcome = msgspec.convert(world.broadcast("start: training job", found), Welcome)  # [all]
        check_values(cfg, data, welcome.values)
    name = f"rank {world.rank} of {socket.gethostname()}:{os.getpid()}"
    membership = join(welcome, name, world.rank % cfg.engine.ranks == 0, keys)
    link = MemberLink(welcome.addresses, membership, world.journal, keys, welcome.lease_seconds)
    world.on_exit(link.close)
    world.journal.note("attached", member=membership.member, to=welcome.addresses[0])
    connect = partial(TrainerClient, link, welcome.addresses, world.progress, keys)
    with closing(link), closing(connect()) as client:
        yield GenerateSide(world, client, connect, world)
