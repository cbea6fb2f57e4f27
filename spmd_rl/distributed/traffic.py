"""What coordination costs in numbers: each rank counts its meetings, the bytes it brings to them, and what it asks of
the store. No cost worth measuring."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(slots=True)
class Traffic:
    """Of one rank, since `take` was last called."""

    meetings: int = 0
    """collectives over metadata and samples; none of a library"""
    meeting_bytes: int = 0
    """that this rank brought to them"""
    store_operations: int = 0
    """for tickets"""

    def take(self) -> dict[str, float]:
        """The counts so far, which start again from 0."""
        counts = {name: float(getattr(self, name)) for name in self.__slots__}
        self.meetings = self.meeting_bytes = self.store_operations = 0
        return counts

    def count(self, num_bytes: int) -> None:
        """One meeting."""
        self.meetings += 1
        self.meeting_bytes += num_bytes


class CountedStore:
    """A store whose operations are counted; see `rollout.coordinator.Store` for what they are."""

    def __init__(self, store: dist.Store, traffic: Traffic) -> None:
        self._store, self._traffic = store, traffic

    def add(self, key: str, amount: int) -> int:
        """The counter's new value."""
        self._traffic.store_operations += 1
        return self._store.add(key, amount)

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        self._traffic.store_operations += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Read; waits until it is there."""
        self._traffic.store_operations += 1
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        self._traffic.store_operations += 1
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """Forget."""
        self._traffic.store_operations += 1
        return self._store.delete_key(key)

    def clone(self) -> dist.Store:
        """A connection of its own to the same keys, not counted."""
        return self._store.clone()
