"""`AdapterSource`: a policy whose adapters travel alone, once its frozen weights have been published."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.train.accumulate import Policy


class AdapterSource:
    """The interface of a `PolicyRole` that a `Publisher` uses: first frozen weights and adapters, in later publishes
    adapters alone.

    Only for engines that live as long as the run: a later one would lack the frozen weights.
    """

    def __init__(self, policy: Policy) -> None:
        """policy: has adapters."""
        self._policy, self._is_first = policy, True
        self.layout, self.sees = policy.layout, policy.sees

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield the frozen weights and the adapters at first, then the adapters; see `Adapters.published`."""
        # `apart`: adapters and frozen weights, not merged; `alone`: adapters only.
        yield from self._policy.weights("apart" if self._is_first else "alone")  # [all]
        self._is_first = False

    def awake(self) -> AbstractContextManager[None]:
        """See `Role`."""
        return self._policy.awake()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] See `PolicyRole`."""
        return self._policy.logprobs(batch, temperature)
