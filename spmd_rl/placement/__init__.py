"""Placements (`placement.mode`): context managers that yield a rank's `Place`.

| `placement.` | who trains | who generates | when |
|---|---|---|---|
| `mode=colocated` | all ranks | all ranks | in turns |
| `mode=overlapped` | all ranks | all ranks | in turns; step n + 1 begins before update n |
| `mode=split` | some ranks | the others | at the same time |
| `mode=lent` | some ranks | all ranks | at the same time; training ranks also generate between updates |
| any, with `rollout.replay=RUN` | all ranks | none: another run did | before |

`reference=RANKS` and `teacher=RANKS` take ranks away from any mode.
"""

from dataclasses import replace
from pathlib import Path

from spmd_rl.config.replay import FOLDER, about_samples
from spmd_rl.job import Job, Place
from spmd_rl.placement.colocated import colocated
from spmd_rl.placement.frozen import frozen
from spmd_rl.placement.lent import lent
from spmd_rl.placement.overlapped import overlapped
from spmd_rl.placement.replayed import replayed
from spmd_rl.placement.split import split
from spmd_rl.rollout import Dumped

__all__ = ["place_ranks"]

PLACEMENTS = {place.__name__: place for place in (colocated, overlapped, split, lent)}


def place_ranks(job: Job) -> Place:
    """[all] Return this rank's work: train, generate or hold a frozen role."""
    cfg, settings = job.cfg, job.cfg.generation.rollout
    if job.is_over:
        return Place(generate=lambda: None)
    if serve := job.stack.enter_context(frozen(job)):  # [all]
        return Place(generate=serve)
    chosen = replayed if settings.replay else PLACEMENTS[cfg.placement.mode]
    place = job.stack.enter_context(chosen(job))  # [all]
    if not (settings.dump and place.rollouts):  # a rank that only generates has none
        return place
    about = about_samples(settings, cfg.algorithm, cfg.policy, job.envs)
    return replace(place, rollouts=Dumped(place.rollouts, Path(cfg.run.dir) / FOLDER, about, place.world))  # [train]
