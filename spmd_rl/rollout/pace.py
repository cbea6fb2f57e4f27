"""The rules of `placement.max_staleness`: pure functions of steps and versions.

Step n trains on answers of its own tickets, and makes version n of the policy; on-policy answers to it are of version
n - 1. With `placement.max_staleness` S, answers to step n are of version n - 1 - S at least. So a replica begins no
ticket before its policy is new enough, and what it has finished is always trained on.
"""


def oldest_version(step: int, max_staleness: int, start: int = 0) -> int:
    """Return the oldest version of the policy that may generate answers for `step`, in a run that began at `start`.

    The version of `start` may always generate: there is no older one after a resume.
    """
    return max(start, step - 1 - max_staleness)


def last_use(step: int, position: int, num_rejected: int, per_step: int) -> int:
    """Return the last step that may use the ticket at this position of `step`, where answers are carried on.

    A step uses tickets in order until `per_step` of them qualify, and so many earlier ones are known not to qualify.
    """
    return step + max(0, position - num_rejected) // per_step


def is_evaluated(version: int, start: int) -> bool:
    """Return whether a run that began at `start` evaluates a version that is due: not again what it resumed from."""
    return version == 0 or version > start
