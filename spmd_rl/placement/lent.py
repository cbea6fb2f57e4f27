"""`placement.mode=lent`: as `split`, but trainer ranks also generate while they wait for a step.

ROLL calls this partial overlap. Such a rank generates for the step that it will train on, until the step's end; its
unfinished slices then continue on generator ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.job import Job, Place
from spmd_rl.placement.sides import Sides, generating, training


@contextmanager
def lent(job: Job) -> Iterator[Place]:
    """[all] Give every rank an engine; trainer ranks are lent to generation."""
    sides = Sides.of(job)  # [all]
    with training(job, sides, lends=True) if sides.trainers else generating(job, sides) as place:  # [all]
        yield place
