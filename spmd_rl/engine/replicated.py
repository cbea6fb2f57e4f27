"""`ReplicatedEngine`: the engines of a replica's ranks as one, driven by its first rank.

All ranks of a replica must add the same requests before the same step, or their shards would compute different batches.
So inside `driven()` the first rank broadcasts a *tick* with requests and ids to abort; then all make `STEPS_PER_TICK`
steps, and the first rank's completions count.

    with engine.driven():                # all ranks of the replica; the others follow in here until the first leaves
        if engine.leads:
            engine.add(request)
            completions = engine.step()

A failing rank ends the job within a second (`distributed/supervisor.py`), so nothing is handled here.
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
"""Engine steps per tick; a finished answer waits for at most three more"""


class Tick(msgspec.Struct, array_like=True, frozen=True):
    """Broadcast from a replica's first rank to the others."""

    add: list[tuple[bytes, dict[str, Any]]] = []
    """requests: prompt ids as int32 bytes, and other fields"""
    abort: list[str] = []
    end: bool = False
    """True: the other ranks leave `driven`"""
    message: bytes | None = None
    """message with which the other ranks `join`, if any"""
    digest: bytes = b""
    """hash of the first rank's completions so far, which others must equal"""


def replica_group(world: World, name: str, num_ranks: int) -> dist.ProcessGroup:
    """[all] Form a replica's process group, of `num_ranks` neighbouring ranks."""
    first = world.rank // num_ranks * num_ranks
    backend, kind = "gloo", world.device.type
    if kind != "cpu":
        # Engines' packages may reduce tensors of the host too.
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    return world.process_group(name, backend, range(first, first + num_ranks))  # [replica]


class ReplicatedEngine:
    """An `Engine` over those of `num_ranks` neighbouring ranks."""

    def __init__(self, engine: Engine, world: World, num_ranks: int) -> None:
        """[all] Replica r is ranks [r * num_ranks, (r + 1) * num_ranks) of the generator ranks, `world`."""
        assert world.size % num_ranks == 0, "checked with the settings"
        self.capacity, self.token_counts, self.processor = engine.capacity, engine.token_counts, engine.processor
        self.leads = world.rank % num_ranks == 0
        self.engine = engine
        self._world = world
        index = world.rank // num_ranks
        block = range(index * num_ranks, (index + 1) * num_ranks)
        # Not noted in the journal as progress: idle ticks would hide that a rank elsewhere has stopped.
        self._group = world.subset(f"replica {index}", block, written=False)  # [block]
        self._driving = False
        self._added: list[Request] = []
        self._aborted: list[str] = []
        self._digest = blake2b(digest_size=8)

    @contextmanager
    def driven(self, join: Callable[[bytes], None] | None = None) -> Iterator[None]:
        """[all] Follow the first rank inside, see `Engine`. RunFailed on a rank with other answers."""
        if self.leads:
            self._driving = True
            # No collective on an exception: the other ranks may not be waiting here.
            yield
            assert self.num_unfinished == 0, "driven() ends with requests under way"
            self._tick(end=True)  # [all]
            self._driving = False
        else:
            while self._follow(join):  # [all]
                pass
            yield

    @contextmanager
    def joined(self, message: bytes) -> Iterator[None]:
        """[all] Let the other ranks, in `driven`, join with `message`; see `Engine`."""
        assert self._driving, "its first rank calls this inside of driven()"
        self._group.broadcast("tick", Tick(message=message, digest=self._digest.digest()))  # [all]
        self._driving = False
        yield
        self._driving = True

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose completion was not returned."""
        return len(self._added) + self.engine.num_unfinished

    def add(self, request: Request) -> None:
        """Queue a request; see `Engine`."""
        if self._driving:
            self._added.append(request)
        else:
            self.engine.add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Stop requests, see `Engine`; in `driven` only those from before the last step."""
        if self._driving:
            self._aborted += ids
        else:
            self.engine.abort(ids)

    def step(self) -> list[Completion]:
        """Run a tick inside `driven`, else a step."""
        if not self._driving:
            return self.engine.step()
        return self._tick() if self.num_unfinished else []  # [all]

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load all weights, see `Engine.load`."""
        self.engine.load(weights, version)

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the engine's weights, see `Engine`."""
        return self.engine.loaded_weights()

    def awake(self) -> AbstractContextManager[None]:
        """Keep weights on the device, see `Engine`."""
        return self.engine.awake()

    def sleep(self) -> None:
        """Free the device's memory, see `Engine`."""
        self.engine.sleep()

    def close(self) -> None:
        """Free this rank's engine, see `Engine`."""
        self.engine.close()

    def _tick(self, end: bool = False) -> list[Completion]:
        """[all] Run the next tick; return its completions."""
        added, self._added = self._added, []
        aborted, self._aborted = self._aborted, []
        tick = Tick([_fields(request) for request in added], aborted, end, digest=self._digest.digest())
        self._group.broadcast("tick", tick)  # [all]
        return self._steps(added, aborted)

    def _follow(self, join: Callable[[bytes], None] | None) -> bool:
        """[all] Run the first rank's next tick; return True unless it was the last."""
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
