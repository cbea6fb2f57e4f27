"""`placement.mode=overlapped`: as `colocated`, but step n + 1 is generated before update n, and its verdicts arrive
during that update."""

from contextlib import AbstractContextManager

from spmd_rl.job import Job, Place
from spmd_rl.placement.colocated import colocated


def overlapped(job: Job) -> AbstractContextManager[Place]:
    """[all] Every rank trains and generates, in turns; generation is one step ahead."""
    return colocated(job, last_ahead=job.cfg.steps)
