"""A replica: the ranks that hold one copy of the engine, and how its first rank drives them all.

Every rank of a replica must give its engine the same requests before the same step, or their shards would compute for
different batches. So the first rank alone decides, once a *tick*: what to add, what to abort, how many steps to
compute. It tells its peers, then all do the same; the first rank's completions count. At `engine.tp=1` a replica is one
rank and a tick is told to nobody.

    replica.add(requests); completions = replica.step(); ...; replica.end()     # first rank
    replica.follow()                                                           # its peers, until `end`

A rank that fails ends the whole job within a second (`distributed/guard.py`): nothing is handled here.
"""

import time
from array import array
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.errors import RunFailed
from spmd_rl.types import Completion, Request

STEPS_PER_TICK = 4
"""Engine steps told at once where there are peers to tell; an answer that ends waits for three more at most."""
REST_SECONDS = 1.0
"""An idle first rank tells its peers so often that it lives."""


class Tick(msgspec.Struct, array_like=True, frozen=True):
    """What the first rank of a replica tells its peers. In MessagePack."""

    add: list[tuple[str, bytes, int, float, int, tuple[int, ...], tuple[int, ...]]] = []
    """Requests, field by field; prompt ids as int32 bytes."""
    abort: list[str] = []
    steps: int = 0
    end: bool = False
    """The peers return from `follow`."""
    seen: bytes = b""
    """Digest of all that the first rank's engine has given back so far: the peers' must be equal."""


class Replica:
    """This rank's replica. Only its first rank (`leads`) uses anything but `follow`."""

    def __init__(self, engine: Engine, world: World, tp: int = 1) -> None:
        """[all] Replica r is ranks [r * tp, (r + 1) * tp)."""
        assert world.size % tp == 0, "checked with the settings"
        self.index, self.count = world.rank // tp, world.size // tp
        self.leads = world.rank % tp == 0
        self._engine, self._world = engine, world
        block = range(self.index * tp, (self.index + 1) * tp)
        peers = world.subset(f"replica {self.index}", block, written=False)  # [block] ticks are no progress
        self._peers = peers if tp > 1 else None
        self._steps = STEPS_PER_TICK if tp > 1 else 1
        self._adds: list[Request] = []
        self._aborts: list[str] = []
        self._seen = blake2b(digest_size=8)
        self._told = time.monotonic()

    @property
    def num_unfinished(self) -> int:
        """Requests added whose completion has not been handed out."""
        return len(self._adds) + self._engine.num_unfinished

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests, from the next step on."""
        self._adds += requests

    def abort(self, ids: Iterable[str]) -> None:
        """Stop requests that were added before the last step; they come back from the next one."""
        self._aborts += ids

    def step(self) -> list[Completion]:
        """A tick of engine steps on all ranks of the replica; what ended in them."""
        self._world.journal.idle(False)
        self._tell(self._steps)
        completions = [c for _ in range(self._steps) if self._engine.num_unfinished for c in self._step()]
        self._world.progress(self._steps)
        return completions

    def rest(self) -> None:
        """There is nothing to compute; let the peers know that their first rank lives, once a second."""
        self._world.journal.idle(True)
        if time.monotonic() - self._told > REST_SECONDS:
            self._tell(0)

    def end(self) -> None:
        """Let the peers go."""
        assert self.num_unfinished == 0
        self._world.journal.idle(False)
        self._tell(0, end=True)

    def follow(self) -> None:
        """Do what the first rank tells, until it tells the end. RunFailed if this rank's engine gives other answers."""
        assert not self.leads
        while True:
            tick = msgspec.convert(self._peers.broadcast("tick", None), Tick)
            if tick.seen != self._seen.digest():
                raise RunFailed(f"rank {self._world.rank}: its engine gave other answers than its replica's first rank")
            if tick.steps or tick.end:
                self._world.journal.idle(False)
            self._apply([_request(fields) for fields in tick.add], tick.abort)
            for _ in range(tick.steps):
                if self._engine.num_unfinished:
                    self._step()
            self._world.progress(tick.steps)  # an empty tick is none: the first rank may wait for a verdict for ever
            if tick.end:
                return
            self._world.journal.idle(not self._engine.num_unfinished)

    def _tell(self, steps: int, end: bool = False) -> None:
        """Tell the peers, and do here what they do there."""
        adds, self._adds = self._adds, []
        aborts, self._aborts = self._aborts, []
        if self._peers is not None:
            tick = Tick([_fields(request) for request in adds], aborts, steps, end, self._seen.digest())
            self._peers.broadcast("tick", tick)
        self._told = time.monotonic()
        self._apply(adds, aborts)

    def _apply(self, adds: list[Request], aborts: list[str]) -> None:
        for request in adds:
            self._engine.add(request)
        if aborts:
            self._engine.abort(aborts)

    def _step(self) -> list[Completion]:
        completions = self._engine.step()
        if self._peers is not None:
            for completion in completions:
                self._seen.update(completion.id.encode() + completion.token_ids.tobytes())
        return completions


def _fields(request: Request) -> tuple:
    r = request
    return (r.id, r.prompt_ids.tobytes(), r.max_new_tokens, r.temperature, r.seed, r.order, r.stop_ids)


def _request(fields: tuple) -> Request:
    id, prompt, *rest, order, stop_ids = fields
    return Request(id, array("i", prompt), *rest, tuple(order), tuple(stop_ids))
