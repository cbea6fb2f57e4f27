"""`placement.reference` and `placement.teacher`: ranks that only compute with a frozen role.

The other ranks train and generate in `job.world`, without these ranks. Trainer ranks use the role through a proxy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from spmd_rl import train
from spmd_rl.config.placement import Placement
from spmd_rl.job import Job
from spmd_rl.learn.frozen import FrozenRoles


@contextmanager
def frozen(job: Job) -> Iterator[Callable[[], None] | None]:
    """[all] Yield the work of a rank that holds a frozen role; None on others, whose `job.build_roles` adds a proxy."""
    world, ranks = job.world, Placement.of(job.cfg.placement, job.world.size)
    if not ranks.frozen:
        yield None
        return
    holders = sorted({rank for held in ranks.frozen.values() for rank in held})
    own, meets = {}, world.subset("frozen", sorted([*ranks.train, *holders]))  # [train] and [frozen]
    roles = FrozenRoles(meets, ranks.frozen) if meets else None
    for key, held in ranks.frozen.items():
        if part := world.subset(key, held):  # [frozen]
            with job.starting():
                own |= train.build_own([role for role in job.cfg.roles if role.kind == key], part)  # [frozen]
    if own:
        yield partial(roles.serve, own)
        return
    working = sorted({*ranks.train, *ranks.generate})
    job.world, job.frozen = world.subset("work", working), roles  # [working]
    yield None
    if world.rank in ranks.train:
        roles.finish()  # [train] and [frozen], not with an exception pending
