"""`AdapterOff`: the policy with its adapters off, as the frozen reference: no second model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.train.accumulate import Policy
from spmd_rl.train.base import ForwardArgs


class AdapterOff:
    """A `train.base.PolicyRole` that is never trained, saved or loaded."""

    sync_steps: int | None = None
    """It stays as it is: one that follows the policy has weights of its own."""

    def __init__(self, policy: Policy) -> None:
        """policy: has adapters; they are on again after each call."""
        self._policy = policy
        self.layout, self.hidden_size, self.size = policy.layout, policy.hidden_size, policy.size

    def awake(self) -> AbstractContextManager[None]:
        """See `Role`; it is the policy that is."""
        return self._policy.awake()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] See `PolicyRole`."""
        args = ForwardArgs(temperature, is_base=True, constraint=self._policy.constraint)
        logprobs, entropy = self._policy.evaluate("logprobs", batch, args, 2)  # [all]
        return logprobs, entropy

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """[all] See `Role`."""
        return self._policy.evaluate("logprobs", batch, ForwardArgs(is_base=True), 2)[0]  # [all]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is published is the policy."""
        raise AssertionError("the reference's weights are the policy's, without its adapters")

    def close(self) -> None:
        """Nothing: the policy goes on."""
