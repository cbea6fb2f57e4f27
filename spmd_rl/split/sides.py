"""The two sides of a run: who trains, who generates, and how they reach each other."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.config.placement import Placement
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.curve_keys import ClientKeys, HostKeys
from spmd_rl.distributed import World
from spmd_rl.split.courier import Courier
from spmd_rl.split.exchange import Exchange


@dataclass(frozen=True, slots=True)
class TrainSide:
    """What a training rank has."""

    world: World
    """Of the ranks that train."""
    exchange: Exchange
    senders: list[list[int]]
    """The generating ranks (indices) that deliver to each training rank."""

    @property
    def mine(self) -> list[int]:
        """Those that deliver to this rank."""
        return self.senders[self.world.rank]


@dataclass(frozen=True, slots=True)
class GenerateSide:
    """What a generating rank has."""

    world: World
    """Of the ranks that generate."""
    courier: Courier


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
    num_train, num_generate = len(placement.train), len(placement.generate)
    exchange, address = None, ""
    if world.rank in placement.train:
        folder = Path(world.node.address.removeprefix("ipc://")).parent
        private = f"ipc://{folder.with_name(folder.name + '-x')}/{secrets.token_hex(4)}"
        exchange = Exchange(private if settings.bind == "ipc" else settings.bind, keys and HostKeys.load(keys))
        address = exchange.address
    addresses = world.gather("start: exchanges", address, str)  # [all]
    train_world = world.subset("train", placement.train)  # [train]
    generate_world = world.subset("generate", placement.generate)  # [generate]
    if exchange is not None:
        senders = [list(range(rank, num_generate, num_train)) for rank in range(num_train)]
        try:
            yield Sides(TrainSide(train_world, exchange, senders), None, placement.train[0])
        finally:
            exchange.close()
        return
    index = placement.generate.index(world.rank)
    of_trainers = [addresses[rank] for rank in placement.train]
    courier = Courier(of_trainers, index, world.progress, keys and ClientKeys.load(keys))
    try:
        yield Sides(None, GenerateSide(generate_world, courier), placement.train[0])
    finally:
        courier.close()
