"""What torchrun says of this process: its rank, its rank on its node, and the number of ranks."""

import os

from spmd_rl.errors import UserError


def rank() -> int:
    """Return the rank of this process that torchrun set; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process among those of its node; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of ranks; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_layout(section: str, num_ranks: int, tp: int, dp_replicate: int) -> None:
    """Raise a `UserError` unless `tp` divides the ranks, and `dp_replicate` what `tp` leaves of them.

    section: the settings section that the error names, `train` or `reference.train`.
    """
    if num_ranks % tp:
        raise UserError(f"{section}.tp: {tp} does not divide {num_ranks} ranks")
    if num_ranks // tp % dp_replicate:
        left = f"{num_ranks} ranks" if tp == 1 else f"{num_ranks // tp}, which is {num_ranks} ranks / tp {tp}"
        raise UserError(f"{section}.dp_replicate: {dp_replicate} does not divide {left}")
