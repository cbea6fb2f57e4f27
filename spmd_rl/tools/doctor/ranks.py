"""Waits between the doctor's ranks: over torchrun's store, always with a time limit.

No process group is needed, so a rank that never arrives is found and named.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
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
        # torch's DistError is a RuntimeError.
        except (RuntimeError, ValueError) as error:
            told = f"rank {env['RANK']} cannot reach the store of rank 0 at {address[0]}:{address[1]} in {seconds:g} s"
            raise Failed(f"{told}: {str(error).splitlines()[0]}", FIREWALL) from None
        # The children must be clients of the store that exists, never hosts of a new one.
        env["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
        # A restarted job finds the store of its last start, with the old keys.
        start = f"doctor/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), dist.PrefixStore(start, store))

    def arrive(self, seconds: float) -> str:
        """Wait for all ranks. Raises `Failed`, which names those that are missing after `seconds`."""
        found = self.gather("arrive", socket.gethostname(), seconds)
        self.hosts = {rank: host for rank, host in enumerate(found) if host is not None}
        if missing := [rank for rank in range(self.size) if rank not in self.hosts]:
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
        # Polled with `check`: a store's `wait` would block for ever on a key that a dead rank never sets.
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(PAUSE)
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def names(ranks: Sequence[int]) -> str:
    """Name some ranks. Example: `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
