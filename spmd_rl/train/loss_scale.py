"""`LossScale`: a factor of the loss keeps float16's gradients in its range (Micikevicius et al., arXiv 1710.03740).

A gradient that overflows skips its update, like any that is not finite, and halves the factor; many good ones double
it. In other dtypes it is 1 for ever.
"""

import torch
from torch import Tensor

FIRST, GROWS_AFTER = 2.0**15, 200
"""The factor at the start, and good updates after which it doubles."""


class LossScale:
    """Of one model; alike on all ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_used = dtype == torch.float16
        self.state: Tensor = torch.tensor([FIRST if self.is_used else 1.0, 0.0])
        """float32 [2], live: the factor, and good updates since it has changed"""

    @property
    def factor(self) -> float:
        """A power of two, so that it rounds nothing."""
        return float(self.state[0])

    def update(self, skipped: bool) -> None:
        """Called after each update. skipped: its gradient was not finite."""
        if not self.is_used:
            return
        self.state[1] = 0 if skipped else self.state[1] + 1
        if skipped or self.state[1] == GROWS_AFTER:
            self.state.copy_(torch.tensor([max(1.0, self.factor * (0.5 if skipped else 2.0)), 0.0]))
