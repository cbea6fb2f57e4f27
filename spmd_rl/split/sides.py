"""The two sides of a run: who trains, who generates, and how they reach each other."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import torch.distributed as dist

from spmd_rl.config.placement import Placement
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.curve_keys import ClientKeys, HostKeys
from spmd_rl.distributed import World
from spmd_rl.split.courier import Courier
from spmd_rl.split.exchange import Exchange, bind_of
from spmd_rl.split.left import LeftSlices
from spmd_rl.weights.messages import Announcement

NEWEST = "split: newest version"
"""Key, in the store of all ranks, of the announcement of the newest version."""


@dataclass(frozen=True, slots=True)
class TrainSide:
    """What a training rank has."""

    world: World
    """Of the ranks that train."""
    exchange: Exchange
    senders: list[int]
    """The generating ranks (indices) that deliver to this rank."""
    handover: LeftSlices | None = None
    """Where these ranks are lent."""

    def probe_answers(self, version: int) -> dict[int, bytes]:
        """Wait for what engines of `senders` answer to the probe of a version; return it by sender."""
        with self.world.journal.waiting("publish: answers of engines"):
            return self.exchange.take("probe", version, self.senders)


def announce(store: dist.Store, announcement: Announcement) -> None:
    """Let the ranks that generate know of a version. store: of all ranks."""
    store.set(NEWEST, msgspec.msgpack.encode(announcement))


def announced(store: dist.Store) -> Announcement | None:
    """Return the newest version that has been announced. store: of all ranks."""
    if not store.check([NEWEST]):
        return None
    return msgspec.msgpack.decode(store.get(NEWEST), type=Announcement)


@dataclass(frozen=True, slots=True)
class GenerateSide:
    """What a generating rank has."""

    world: World
    """Of the ranks that generate."""
    courier: Courier
    connect: Callable[[], Courier]
    """Another one, for a thread of its own; whoever calls this closes it."""
    together: World
    """Of all ranks that generate, those that are lent included."""
    handover: LeftSlices | None = None
    """Where ranks are lent."""


@dataclass(frozen=True, slots=True)
class Sides:
    """One of the two is None."""

    train: TrainSide | None
    generate: GenerateSide | None
    first_trainer: int
    """The rank, of all, that speaks for those that train."""


@contextmanager
def meet(settings: PlacementConfig, keys: str | None, world: World) -> Iterator[Sides]:
    """[all] Form the two sides and let each generating rank know the exchanges of all training ranks.

    keys: the directory of CURVE keys, `sidecar.keys`.
    """
    placement = Placement.of(settings, world.size)
    apart = [rank for rank in placement.generate if rank not in placement.train]  # who does nothing but generate
    num_train, num_generate = len(placement.train), len(apart)
    exchange, address = None, ""
    with ExitStack() as stack:
        if world.rank in placement.train:
            exchange = stack.enter_context(closing(Exchange(bind_of(settings, world), keys and HostKeys.load(keys))))
            address = exchange.address
        addresses = world.gather("start: exchanges", address, str)  # [all]
        train_world = world.subset("train", placement.train)  # [train]
        generate_world = world.subset("generate", apart)  # [generate]
        of_trainers = [addresses[rank] for rank in placement.train]
        clients = keys and ClientKeys.load(keys)
        if exchange is not None:
            senders = list(range(placement.train.index(world.rank), num_generate, num_train))
            handover = None
            if settings.is_lent:
                index = num_generate + placement.train.index(world.rank)
                courier = stack.enter_context(closing(Courier(of_trainers, index, world.progress, clients)))
                handover = LeftSlices(placement.train, courier, exchange)
            yield Sides(TrainSide(train_world, exchange, senders, handover), None, placement.train[0])
        else:
            connect = partial(Courier, of_trainers, apart.index(world.rank), world.progress, clients)
            courier = stack.enter_context(closing(connect()))
            together = world if settings.is_lent else generate_world
            handover = LeftSlices(placement.train, courier) if settings.is_lent else None
            yield Sides(None, GenerateSide(generate_world, courier, connect, together, handover), placement.train[0])
