"""`InFlight`: a newer policy comes to a generating rank while it generates, and is loaded in the middle of its answers.

A thread fetches it into host memory meanwhile, so that generation stops only while the engine copies it. What has been
sampled stays; every token carries the version that sampled it (PipelineRL, arXiv 2509.19128; AReaL, arXiv 2505.24298).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import msgspec

from spmd_rl.process import in_background
from spmd_rl.weights.client import WeightClient
from spmd_rl.weights.messages import Announcement
from spmd_rl.weights.receiver import WeightReceiver

LOOK_SECONDS = 0.02
"""The pause between two looks for a newer version."""


class InFlight:
    """A `rollout.InFlightUpdate`. The first rank of a replica decides, and fetches for the others."""

    def __init__(self, receiver: WeightReceiver, connect: Callable[[], WeightClient] | None, keeps_cache: bool) -> None:
        """connect: makes a client for the thread; without it, nothing comes in the middle of a step.

        keeps_cache: answers go on with keys and values of the older policy.
        """
        self._receiver, self._keeps_cache, self._swaps = receiver, keeps_cache, connect is not None
        self._client = connect() if connect and receiver.replica.leads else None
        self._coming: tuple[Announcement, Future] | None = None
        self._looked_at = -LOOK_SECONDS
        self.seconds: list[float] = []
        """What each swap of this step took, while nothing was generated."""

    def begin(self) -> None:
        """Begin a step."""
        self.seconds.clear()

    @property
    def keeps_cache(self) -> bool:
        """See `rollout.InFlightUpdate`. An engine answers a probe only when it has nothing else to do."""
        return self._keeps_cache and self._coming is not None and not self._coming[0].probed

    def poll(self) -> bool:
        """See `rollout.InFlightUpdate`."""
        client = self._client
        if client and self._coming is None and time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            newest = self._receiver.newest()
            if newest and newest.version > self._receiver.version and client.hold(newest.version):
                self._coming = newest, in_background("fetch", lambda: list(self._receiver.fetch(newest, client)))
        return self._coming is not None and self._coming[1].done()

    def load(self) -> None:
        """See `rollout.InFlightUpdate`; waits for what is on its way. RunFailed if that is not what was announced."""
        announced = self._announcement()
        with self._receiver.engine.joined(announced):
            self.follow(announced)  # [all] of the replica

    def follow(self, message: bytes) -> None:
        """See `rollout.InFlightUpdate`. On the first rank: with what is on its way there."""
        newest, pieces = msgspec.msgpack.decode(message, type=Announcement), None
        if self._coming is not None:
            with self._receiver.waiting(newest.version):
                pieces = self._coming[1].result()
            self._coming = None
        began = time.perf_counter()
        self._receiver.load(newest, pieces, self._client)  # [all] of the replica
        self.seconds.append(time.perf_counter() - began)

    def settle(self) -> None:
        """[all] of the replica, between two steps: load what is on its way."""
        if not self._swaps:
            return
        replica = self._receiver.replica
        if announced := replica.broadcast("publish: on its way", self._announcement()):  # [all] of the replica
            self.follow(announced)  # [all] of the replica

    def _announcement(self) -> bytes:
        """What is on its way here; nothing on any but the first rank of a replica."""
        return msgspec.msgpack.encode(self._coming[0]) if self._coming is not None else b""

    def close(self) -> None:
        """Give up what is on its way; idempotent."""
        if self._client:
            self._client.give_up()
        if self._coming:
            wait([self._coming[1]])
        if self._client:
            self._client.close()
