"""`placement.mode=overlapped`: as `colocated`, but step n + 1 begins before update n, until it waits for
verdicts or environments, which arrive during that update."""

from contextlib import AbstractContextManager

from spmd_rl.job import Job, Place
from spmd_rl.placement.colocated import colocated


def overlapped(job: Job) -> AbstractContextManager[Place]:
    """[all] Do as `colocated`, with generation one step ahead."""
    return colocated(job, last_ahead=job.cfg.steps)
