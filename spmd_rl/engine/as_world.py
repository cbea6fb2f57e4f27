"""`as_world`: a replica's process group in the place of the default one, while an engine forms its own groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def as_world(replica: dist.ProcessGroup) -> Iterator[None]:
    """Let the group pass for the default one.

    Engines form their groups over the default group's ranks, for all replicas that it could hold and with all ranks in
    step: tens of thousands of meetings in a large job, of which a replica needs its own alone.
    """
    default = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(replica)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(default)
