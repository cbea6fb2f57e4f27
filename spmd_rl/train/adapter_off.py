"""`AdapterOff`: a frozen reference that is the policy with its adapters off, without a second model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.train.accumulate import Policy
from spmd_rl.train.base import ForwardArgs


class AdapterOff:
    """A `train.base.PolicyRole` that is never trained, saved or loaded."""

    sync_steps: int | None = None
    """None, because a reference that follows the policy needs separate weights."""

    def __init__(self, policy: Policy) -> None:
        """policy: has adapters, which each call turns on again."""
        self._policy = policy
        self.layout, self.hidden_size, self.size = policy.layout, policy.hidden_size, policy.size

    def awake(self) -> AbstractContextManager[None]:
        """Keep the policy awake, which holds the weights."""
        return self._policy.awake()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Return logprob and entropy of sampled tokens, see `PolicyRole`."""
        args = ForwardArgs(temperature, is_base=True, constraint=self._policy.constraint)
        logprobs, entropy = self._policy.evaluate("logprobs", batch, args, 2)  # [all]
        return logprobs, entropy

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """[all] Return a number per token that exposes packing leaks, see `Role`."""
        return self._policy.evaluate("logprobs", batch, ForwardArgs(is_base=True), 2)[0]  # [all]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Raise, because only the policy is published."""
        raise AssertionError("the reference's weights are the policy's, without its adapters")

    def close(self) -> None:
        """Do nothing: the policy stays in use."""
