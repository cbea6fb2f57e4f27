"""`solo()`: a world of one for unit tests, without groups, watchdog or signals."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.membership import Membership, Rendezvous
from spmd_rl.distributed.world import World


@contextmanager
def solo(directory: Path | None = None) -> Iterator[World]:
    """Yield a World of rank 0 of 1 on the CPU, without a `mesh`.

    The journal goes to `directory`/journal, by default temporary.
    """
    me = Membership(0, 1, 0, 1, node="0", launched=False, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as temporary:
        journal = Journal((directory or Path(temporary)) / "journal", 0)
        yield World(me, Rendezvous(dist.HashStore(), "solo", None), journal)
        journal.close()
