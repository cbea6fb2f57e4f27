"""`AdapterSource`: a policy that publishes adapters alone, after its frozen weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.train.accumulate import Policy


class AdapterSource:
    """`PolicyRole` for a `Publisher`: frozen weights and adapters first, later adapters alone.

    Only for engines that live as long as the run: a later one would lack the frozen weights.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._is_first = policy, True
        self.layout, self.sees = policy.layout, policy.sees

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield frozen weights and adapters, later adapters alone; see `Adapters.published`."""
        # `apart`: adapters and frozen weights, not merged; `alone`: adapters only.
        yield from self._policy.weights("apart" if self._is_first else "alone")  # [all]
        self._is_first = False

    def awake(self) -> AbstractContextManager[None]:
        """Keep the policy awake, see `Role`."""
        return self._policy.awake()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Return logprobs and entropies, see `PolicyRole`."""
        return self._policy.logprobs(batch, temperature)
