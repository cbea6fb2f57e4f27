"""`placement.mode=split`: some ranks train while others generate.

They meet as `meetings.py` says, and wait for each other only if generation would run ahead of training by more than
`placement.max_staleness` versions, or training has used what was generated.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.job import Job, Place
from spmd_rl.placement.sides import Sides, generating, training


@contextmanager
def split(job: Job) -> Iterator[Place]:
    """[all] Give each rank one task."""
    sides = Sides.of(job)  # [all]
    with training(job, sides) if sides.trainers else generating(job, sides) as place:  # [all]
        yield place
