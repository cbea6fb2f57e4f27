"""Ranks that wait for each other in shared memory, and a peer that ends."""

import pytest
import torch

from spmd_rl.distributed import shared_memory
from spmd_rl.distributed.shared_memory import Semaphores

PIDS = (11, 12)


def pair() -> list[Semaphores]:
    memory = torch.zeros(4096, dtype=torch.uint8)
    found = [Semaphores(memory, rank, PIDS) for rank in range(2)]
    found[0].create()
    return found


def test_a_peer_that_came_late_and_has_ended_since_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = pair()

    def running(pid: int) -> bool:
        other.meet()  # it finds what the first one has posted, and does not wait
        return False

    monkeypatch.setattr(shared_memory, "running", running)
    first.meet()


def test_a_peer_that_ended_without_coming_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "running", lambda pid: False)
    with pytest.raises(ConnectionError, match="rank 1 of this group, pid 12, is gone"):
        pair()[0].meet()
