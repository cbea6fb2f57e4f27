"""`placement.reference` and `placement.teacher`: ranks that hold a frozen role, and do nothing but compute with it.

To the other ranks, which train and generate, the job is theirs alone: `job.world` has them, and the role looks as if it
lay beside the policy. All ranks meet when its logprobs are needed, and nowhere else.
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
    """[all] What a rank does that holds a frozen role; None on those that train, for whom `job.build_roles` has it."""
    world, ranks = job.world, Placement.of(job.cfg.placement, job.world.size)
    if not ranks.frozen:
        yield None
        return
    roles, own = FrozenRoles(world, ranks.frozen), {}
    for key, holders in ranks.frozen.items():
        if part := world.subset(key, holders):  # [frozen]
            with job.starting():
                own |= train.build_own([role for role in job.cfg.roles if role.kind == key], part)  # [frozen]
    if own:
        yield partial(roles.serve, own)
        return
    job.world, job.frozen = world.subset("train", ranks.train), roles  # [train]
    yield None
    roles.finish()  # [all] not with an exception pending
