"""Who trains and who generates (`placement.mode`): a context manager a placement, which gives a rank its `Place`.

| `placement.` | who trains | who generates | when |
|---|---|---|---|
| `mode=colocated` | all ranks | all ranks | in turns |
| `mode=overlapped` | all ranks | all ranks | in turns, one step ahead of the verdicts |
| `mode=split` | some ranks | the others | at the same time |
| `mode=lent` | some ranks | all ranks | at the same time; training ranks also generate between updates |
| `mode=split generate=attached` | all ranks | none: jobs of their own do | at the same time |
| the same with `attach=ADDRESS` | none | all ranks | while they are attached; they come and go |
"""

from contextlib import nullcontext

from spmd_rl.job import Job, Place
from spmd_rl.placement.attached import attached_generator, attached_trainer
from spmd_rl.placement.colocated import colocated, overlapped
from spmd_rl.placement.split import lent, split

__all__ = ["place_ranks"]

PLACEMENTS = {
    place.__name__: place for place in (colocated, overlapped, split, lent, attached_trainer, attached_generator)
}
"""By the name that `PlacementConfig.part` gives."""


def place_ranks(job: Job) -> Place:
    """[all] What this rank does: it trains, with what generates for it, or it generates. Nothing if the run is over."""
    over = nullcontext(Place(generate=lambda: None))
    return job.stack.enter_context(over if job.is_over else PLACEMENTS[job.cfg.placement.part](job))  # [all]
