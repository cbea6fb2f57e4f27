"""How far generation may run ahead of training: pure rules over numbers of steps and versions.

Step n trains on answers of its own tickets, and makes version n of the policy; on-policy answers to it are of version
n - 1. With `placement.max_staleness` S, answers to step n are of version n - 1 - S at least. So a generating rank is
held up before it begins a step, and what it has finished is always trained on.
"""


def oldest_version(step: int, max_staleness: int, start: int = 0) -> int:
    """Return the oldest version of the policy that may generate answers for `step`, in a run that began at `start`.

    The version of `start` may always generate: there is no older one after a resume.
    """
    return max(start, step - 1 - max_staleness)


def oldest_version_at(position: int, step: int, per_step: int, max_staleness: int, start: int = 0) -> int:
    """Return the oldest version that may begin the ticket at this position of `step`, where answers are carried on.

    A step uses `per_step` tickets at least, and in order, so that step + position // per_step is the last that may use
    this one.
    """
    return oldest_version(step + position // per_step, max_staleness, start)


def is_evaluated(version: int, start: int) -> bool:
    """Return whether a run that began at `start` evaluates a version that is due: not again what it resumed from."""
    return version == 0 or version > start


def due(step: int, every: int) -> bool:
    """Return whether what happens every so many steps happens after `step`; 0: never."""
    return every > 0 and step % every == 0
