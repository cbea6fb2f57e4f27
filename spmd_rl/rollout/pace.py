"""The rules of `placement.max_staleness`: pure functions of steps and versions.

Step n makes version n of the policy; on-policy answers have version n - 1. With `placement.max_staleness` S, answers to
step n have version n - 1 - S at least. A replica starts no ticket before its policy is new enough, so finished answers
are always trained on.
"""


def oldest_version(step: int, max_staleness: int, start: int = 0) -> int:
    """Return the oldest policy version that may generate for `step`. Version `start`, from which the run resumed,
    always may.
    """
    return max(start, step - 1 - max_staleness)


def last_use(step: int, position: int, num_rejected: int, per_step: int) -> int:
    """Return the last step that may use the ticket at this position of `step`, with `per_step` used in each."""
    # Rejected tickets must count. Otherwise a ticket that this step needs would wait for a policy that only a later
    # update makes: a deadlock, found by random histories.
    return step + max(0, position - num_rejected) // per_step


def is_evaluated(version: int, start: int) -> bool:
    """Return True unless the run resumed from this version."""
    return version == 0 or version > start
