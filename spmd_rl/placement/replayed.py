"""`rollout.replay=RUN`: all ranks train on a run's dump, without engine and sidecar."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spmd_rl.config.replay import FOLDER
from spmd_rl.job import Job, Place
from spmd_rl.rollout import Replayed


@contextmanager
def replayed(job: Job) -> Iterator[Place]:
    """[all] Train on a dump; nothing is generated or published."""
    place, folder = job.train(), Path(job.cfg.rollout.replay).expanduser() / FOLDER  # [all]
    yield replace(place, rollouts=Replayed(folder, job.source, job.world), publish=lambda version: {})
