"""`as_world`: a replica's process group in place of the default one, while an engine forms its groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def as_world(replica: dist.ProcessGroup) -> Iterator[None]:
    """Make the group the default one inside."""
    # Engines form groups over the default group's ranks, for all possible replicas and with collectives of all ranks:
    # tens of thousands in a large job, of which a replica needs only its own.
    default = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(replica)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(default)
