"""`LossScale`: a factor on the loss that keeps float16 gradients in range (Micikevicius et al., arXiv 1710.03740).

An overflowing gradient skips its update, like any non-finite one, and halves the factor; many good ones double it. In
other dtypes it is always 1.
"""

import torch
from torch import Tensor

FIRST, GROWS_AFTER = 2.0**15, 200
"""Initial factor, and good updates after which it doubles."""


class LossScale:
    """Loss scale of one model, equal on all ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_used = dtype == torch.float16
        self.state: Tensor = torch.tensor([FIRST if self.is_used else 1.0, 0.0])
        """float32 [2], live: the factor, and good updates since its last change"""

    @property
    def factor(self) -> float:
        """Present factor, a power of two, so that it rounds nothing."""
        return float(self.state[0])

    def update(self, skipped: bool) -> None:
        """Adapt the factor after an update. skipped: its gradient was not finite."""
        if not self.is_used:
            return
        self.state[1] = 0 if skipped else self.state[1] + 1
        if skipped or self.state[1] == GROWS_AFTER:
            self.state.copy_(torch.tensor([max(1.0, self.factor * (0.5 if skipped else 2.0)), 0.0]))
