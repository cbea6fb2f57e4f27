"""Waits between the doctor's ranks: over torchrun's store, always with a time limit.

No process group is needed, so a rank that never arrives, or dies on the way, is found and named.
"""

import json
import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from spmd_rl.tools.doctor.checks import Failed

PAUSE = 0.05
"""Seconds between two reads of the store."""
FIREWALL = "start all ranks with the same MASTER_ADDR and MASTER_PORT, and let this port through between the nodes"
MISSING = (
    "look at what that rank or node printed; the same torchrun line, --nnodes included, must be started on all nodes, "
    "and MASTER_ADDR:MASTER_PORT must be reachable from each"
)


class Ranks:
    """All ranks of this start, or this one alone without torchrun."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        """Keep `store`, a torch.distributed store; None for one rank alone."""
        self.rank, self.size, self._store = rank, size, store
        self._pidfds: dict[int, int] = {}
        self.hosts = {rank: socket.gethostname()}
        """Machine of each rank that has arrived."""

    @classmethod
    def join(cls, seconds: float) -> "Ranks":
        """Connect to torchrun's store. Raises `Failed` if it cannot be reached."""
        env = os.environ
        if "LOCAL_RANK" not in env or env["WORLD_SIZE"] == "1":
            return cls()
        import torch.distributed as dist

        hosts_store = env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        address, limit = (env["MASTER_ADDR"], int(env["MASTER_PORT"])), timedelta(seconds=seconds)
        try:
            store = dist.TCPStore(*address, None, hosts_store, timeout=limit, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            told = f"rank {env['RANK']} cannot reach the store of rank 0 at {address[0]}:{address[1]} in {seconds:g} s"
            raise Failed(f"{told}: {str(error).splitlines()[0]}", FIREWALL) from None
        # The children must be clients of the store that exists, never hosts of a new one.
        env["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
        start = f"doctor/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), dist.PrefixStore(start, store))

    def arrive(self, seconds: float) -> str:
        """Wait for all ranks. Raises `Failed`, which names those that are missing after `seconds`."""
        me = [socket.gethostname(), os.getpid()]
        records = self.gather("arrive", me, seconds)
        for rank, record in enumerate(records):
            if record is not None:
                self.hosts[rank] = record[0]
                if record[0] == me[0] and rank != self.rank:
                    with suppress(OSError):  # it has ended, or runs in another container
                        self._pidfds[rank] = os.pidfd_open(record[1])
        if missing := [rank for rank, record in enumerate(records) if record is None]:
            raise Failed(f"{names(missing)} of {self.size} did not arrive within {seconds:g} s", MISSING)
        nodes = len(set(self.hosts.values()))
        return f"{self.size} rank{'s' * (self.size > 1)} on {nodes} node{'s' * (nodes > 1)}"

    @property
    def reports(self) -> bool:
        """True if this rank prints the table: the first one that has arrived."""
        return self.rank == min(self.hosts)

    def gather(self, name: str, record: Any, seconds: float) -> list[Any]:
        """Return each rank's record, plain JSON values, by rank; None for those without one after `seconds`."""
        if self.size == 1:
            return [record]
        self._store.set(f"{name}/{self.rank}", json.dumps(record))
        keys, deadline = [f"{name}/{rank}" for rank in range(self.size)], time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < deadline and not self.gone():
            time.sleep(PAUSE)
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def announce(self, name: str) -> None:
        """Announce to the other ranks that `name` has happened here."""
        if self.size > 1:
            self._store.set(name, "1")

    def announced(self, name: str) -> bool:
        """Return True if `name` has happened on any rank."""
        return self.size > 1 and self._store.check([name])

    def gone(self) -> list[int]:
        """Return the ranks of this machine that have arrived and ended since."""
        ended = select.select(list(self._pidfds.values()), [], [], 0)[0]
        return [rank for rank, fd in self._pidfds.items() if fd in ended]


def names(ranks: Sequence[int]) -> str:
    """Name some ranks. Example: `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
