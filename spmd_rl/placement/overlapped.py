"""`placement.mode=overlapped`: as `colocated`, and a step is generated while the one before is judged and learned."""

from contextlib import AbstractContextManager

from spmd_rl.job import Job, Place
from spmd_rl.placement.colocated import colocated


def overlapped(job: Job) -> AbstractContextManager[Place]:
    """[all] Every rank trains and generates, in turns, one step ahead."""
    return colocated(job, last_ahead=job.cfg.steps)
