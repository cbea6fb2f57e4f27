"""Learning rate schedules: pure functions of the number of updates, so that a resume needs no state."""

import math

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(update: int, *, peak: float, schedule: str, warmup: int, total: int) -> float:
    """Return the learning rate of update number `update` (from 0) out of `total`.

    It rises linearly from 0 to `peak`, reached in update `warmup` - 1; `linear` and `cosine` then fall to 0, reached
    after the last update.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - progress)
        case "cosine":
            return peak * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"schedule={schedule!r} is none of {', '.join(SCHEDULES)}")
