"""`ReplicatedEngine`: the engines of a replica's ranks as one, driven by the replica's first rank.

Every rank of a replica must give its engine the same requests before the same step, or their shards would compute for
different batches. So inside `driven()` the first rank alone decides, once a *tick*: what to add, what to abort, how
many steps to compute. It broadcasts the tick, then all do the same; the first rank's completions count.

    with engine.driven():                # all ranks of the replica; the others follow in here until the first leaves
        if engine.leads:
            engine.add(request)
            completions = engine.step()

A rank that fails ends the whole job within a second (`distributed/supervisor.py`): nothing is handled here.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor

from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.types import Completion, Request

STEPS_PER_TICK = 4
"""Engine steps that a tick asks for; an answer that ends waits for three more at most."""


class Tick(msgspec.Struct, array_like=True, frozen=True):
    """What the first rank of a replica broadcasts to the others."""

    add: list[tuple[bytes, dict[str, Any]]] = []
    """Requests: prompt ids as int32 bytes, and all other fields."""
    abort: list[str] = []
    end: bool = False
    """The other ranks leave `driven`."""
    message: bytes | None = None
    """The other ranks `join` with it, and all make the same calls until they are through."""
    digest: bytes = b""
    """The hash of all that the first rank's engine has given back so far: the others' must be equal."""


def replica_group(world: World, name: str, num_ranks: int) -> dist.ProcessGroup:
    """[all] of the replica: its `num_ranks` neighbouring ranks as a process group, for an engine's own collectives."""
    first = world.rank // num_ranks * num_ranks
    backend = "gloo" if world.device.type == "cpu" else None
    return world.process_group(name, backend, range(first, first + num_ranks))  # [all] of the replica


class ReplicatedEngine:
    """An `Engine` over the engines of `num_ranks` neighbouring ranks."""

    def __init__(self, engine: Engine, world: World, num_ranks: int) -> None:
        """[all] Replica r is ranks [r * num_ranks, (r + 1) * num_ranks) of `world`, the ranks that generate."""
        assert world.size % num_ranks == 0, "checked with the settings"
        self.capacity, self.token_counts = engine.capacity, engine.token_counts
        self.leads = world.rank % num_ranks == 0
        self.engine = engine
        """This rank's own."""
        self._world = world
        index = world.rank // num_ranks
        block = range(index * num_ranks, (index + 1) * num_ranks)
        self._group = world.subset(f"replica {index}", block, written=False)  # [block] ticks are no progress
        self._driving = False
        self._added: list[Request] = []
        self._aborted: list[str] = []
        self._digest = blake2b(digest_size=8)

    @contextmanager
    def driven(self, join: Callable[[bytes], None] | None = None) -> Iterator[None]:
        """[all] ranks of the replica; see `Engine`. RunFailed on a rank whose engine gives other answers."""
        if self.leads:
            self._driving = True
            yield  # an exception leaves from here, and meets nobody
            assert self.num_unfinished == 0, "driven() ends with requests under way"
            self._tick(end=True)  # [all]
            self._driving = False
        else:
            while self._follow(join):  # [all]
                pass
            yield

    @contextmanager
    def joined(self, message: bytes) -> Iterator[None]:
        """[all] ranks of the replica, the others in `driven`; see `Engine`."""
        assert self._driving, "its first rank calls this inside of driven()"
        self._group.broadcast("tick", Tick(message=message, digest=self._digest.digest()))  # [all]
        self._driving = False
        yield
        self._driving = True

    @property
    def num_unfinished(self) -> int:
        """The number of requests whose completion has not been handed out."""
        return len(self._added) + self.engine.num_unfinished

    def add(self, request: Request) -> None:
        """Queue a request; see `Engine`."""
        if self._driving:
            self._added.append(request)
        else:
            self.engine.add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Stop requests; see `Engine`. Inside `driven`, those that were added before the last step."""
        if self._driving:
            self._aborted += ids
        else:
            self.engine.abort(ids)

    def step(self) -> list[Completion]:
        """Compute a tick of steps on all ranks of the replica, or one step outside `driven`; see `Engine`."""
        if not self._driving:
            return self.engine.step()
        return self._tick() if self.num_unfinished else []  # [all]

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine`."""
        self.engine.load(weights, version)

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """See `Engine`."""
        return self.engine.loaded_weights()

    def awake(self) -> AbstractContextManager[None]:
        """See `Engine`."""
        return self.engine.awake()

    def close(self) -> None:
        """See `Engine`."""
        self.engine.close()

    def _tick(self, end: bool = False) -> list[Completion]:
        """[all] Let the other ranks do what is done here."""
        added, self._added = self._added, []
        aborted, self._aborted = self._aborted, []
        tick = Tick([_fields(request) for request in added], aborted, end, digest=self._digest.digest())
        self._group.broadcast("tick", tick)  # [all]
        return self._steps(added, aborted)

    def _follow(self, join: Callable[[bytes], None] | None) -> bool:
        """[all] Do what the first rank does in its next tick; whether another one comes."""
        tick = msgspec.convert(self._group.broadcast("tick", None), Tick)  # [all]
        if tick.digest != self._digest.digest():
            raise RunFailed(f"rank {self._world.rank}: its engine gave other answers than its replica's first rank")
        self._world.journal.idle(False)
        if tick.message is not None:
            assert join is not None, "this rank was given nothing to do"
            join(tick.message)  # [all]
            return True
        self._steps([_request(fields) for fields in tick.add], tick.abort)
        if not tick.end:
            self._world.progress()
            self._world.journal.idle(not self.engine.num_unfinished)
        return not tick.end

    def _steps(self, added: list[Request], aborted: list[str]) -> list[Completion]:
        for request in added:
            self.engine.add(request)
        if aborted:
            self.engine.abort(aborted)
        completions = [c for _ in range(STEPS_PER_TICK) if self.engine.num_unfinished for c in self.engine.step()]
        for completion in completions:
            self._digest.update(completion.id.encode() + completion.token_ids.tobytes())
        return completions


def _fields(request: Request) -> tuple:
    fields = msgspec.structs.asdict(request)
    return fields.pop("prompt_ids").tobytes(), fields


def _request(fields: tuple) -> Request:
    prompt, others = fields
    lists = {name: tuple(value) for name, value in others.items() if isinstance(value, list)}
    return Request(prompt_ids=array("i", prompt), **others | lists)
