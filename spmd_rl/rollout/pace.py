"""The rules of `placement.max_staleness`: pure functions of steps and versions.

Step n trains on answers to its tickets and makes version n of the policy; on-policy answers have version n - 1. With
`placement.max_staleness` S, answers to step n have version n - 1 - S at least. A replica starts no ticket before its
policy is new enough, so finished answers are always trained on.
"""


def oldest_version(step: int, max_staleness: int, start: int = 0) -> int:
    """Return the oldest version of the policy that may generate answers for `step`, in a run that began at `start`.

    Version `start` may always generate: no older one exists after a resume.
    """
    return max(start, step - 1 - max_staleness)


def last_use(step: int, position: int, num_rejected: int, per_step: int) -> int:
    """Return the last step that may use the ticket at this position of `step`, where answers are carried on. Each step
    uses tickets in order until `per_step` qualify."""
    # Rejected tickets must count. Otherwise a ticket that this step needs would wait for a policy that only a later
    # update makes: a deadlock, found by random histories.
    return step + max(0, position - num_rejected) // per_step


def is_evaluated(version: int, start: int) -> bool:
    """Return True if a due version is evaluated: not the one that a run resumed from at `start`."""
    return version == 0 or version > start
