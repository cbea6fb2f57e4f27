"""`placement.mode=lent`: as `split`, but the ranks that train generate too, between an update and their next step.

What ROLL calls partial overlap. Such a rank takes part in the step that it will train on, and leaves at its end; what
it has under way then goes on on the ranks that stay.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.job import Job, Place
from spmd_rl.placement.sides import Sides, generating, training


@contextmanager
def lent(job: Job) -> Iterator[Place]:
    """[all] Every rank has an engine, and those that train are lent to generation."""
    sides = Sides.of(job)  # [all]
    with training(job, sides, lends=True) if sides.trainers else generating(job, sides) as place:  # [all]
        yield place
