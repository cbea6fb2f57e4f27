"""`PolicyRole` and `CriticRole`: interfaces of trained models for learner and publisher.

`accumulate.py` makes a role of a backend's `ShardedModel`. `tests/dist/test_train_parity.py` compares each backend with
plain single-process Hugging Face + torch in float32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from spmd_rl.batch import Batch, Ragged
from spmd_rl.distributed import Layout
from spmd_rl.model.constraint import Constraint
from spmd_rl.model.size import ModelSize
from spmd_rl.train.state import Shard

Metrics = dict[str, float]


class BoundLoss(Protocol):
    """A token loss bound to its settings, without state.

    `learn/losses.py` makes it from a function of `algo/policy`.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, float32 [N], and named metrics, float32 [N] each, of the N tokens of `batch.loss_mask`.

        `logprobs` and `entropy` are float32 [N] with gradient; `batch` holds whole samples. If it has `teacher_ids`,
        their logprobs, float32 [N, k] with gradient, come before it as another argument. The backend sums loss *
        `batch.weights[batch.loss_mask]`. Metrics are averaged over the global batch's tokens, unweighted, or reduced by
        max or min if the name ends in `/max` or `/min`.
        """
        ...


class BoundValueLoss(Protocol):
    """The critic's loss bound to its settings, from `algo/values.value_loss`."""

    def __call__(self, values: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return loss and metrics as `BoundLoss` does. values: float32 [N], with gradient."""
        ...


class Role(Protocol):
    """A model and its optimizer, sharded over the ranks of a layout."""

    layout: Layout
    hidden_size: int
    """Width of the residual stream, for the cost of a sequence"""
    size: ModelSize
    """Counts of the model's weights, for the least time of a step"""
    sees: bool
    """True if it takes a batch's pictures"""
    lr_factor: float
    """Factor on the schedule's learning rate, usually 1"""

    def awake(self) -> AbstractContextManager[None]:
        """Hold weights on the device inside, in `update`, `save` and `load` optimizer state too."""
        ...

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """[all] Inside `awake`: return a number per sampled token, float32 [T], that changes with the token's
        neighbours in the packed batch if the model mixes sequences.

        A policy returns the logprob in nats; a critic, whose values start at 0, a sum over its hidden state.
        """
        ...

    def save(self, folder: Path) -> list[Path]:
        """[all] Inside `awake`: write all tensors that training changes, parameters and optimizer state, into an empty
        folder.

        Returns this rank's files. OSError if this rank, or another as far as known, could not write.
        """
        ...

    def stage(self, folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        """[all] Inside `awake`: copy to the host what `save` writes; return a function that writes it without
        communication.

        It may run outside `awake`, on another thread, calls its argument after each tensor, and returns and raises what
        `save` does.
        """
        ...

    def load(self, folder: Path) -> None:
        """[all] Inside `awake`: restore what `save` wrote on any number of ranks, from a verified folder.

        ValueError, on every rank, if it is another model's. OSError if a file is unreadable.
        """
        ...

    def counters(self) -> dict[str, int]:
        """Return what must survive a resume: updates done, updates skipped in a row."""
        ...

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Restore what `counters` returned earlier."""
        ...

    def hashes(self) -> dict[str, str]:
        """Return a hash of each tensor that this rank saves, by key in the file."""
        ...

    def close(self) -> None:
        """Free everything the role holds; idempotent."""
        ...


class PolicyRole(Role, Protocol):
    """The policy, or its reference without an optimizer."""

    sync_steps: int | None
    """Steps after which a reference moves towards the policy; None: fixed"""

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Return logprob and entropy of sampled tokens: float32 [T] each, 0 outside `loss_mask`; no gradient.

        Logits are divided by `temperature` (1 for greedy). `batch` is this rank's data shard, perhaps empty; ranks that
        share it get equal results.
        """
        ...

    def top_logprobs(self, batch: Batch, temperature: float, k: int, num_ids: int) -> tuple[Tensor, Ragged, Ragged]:
        """[all] Return logprobs of sampled tokens, float32 [T], and the k most likely tokens in their places (int32 ids
        below `num_ids`) with logprobs (float32), as lists of k, empty outside `loss_mask`; no gradient."""
        ...

    def update(self, batch: Batch, loss: BoundLoss, temperature: float) -> Metrics:
        """[all] Run one optimizer step over the global batch; `batch` is this rank's data shard, perhaps empty.

        Returns, equal on all ranks: `loss`, `grad_norm` (before clipping), `lr`, `skipped` (1 if the gradient was not
        finite and nothing changed), `num_microbatches`, the global mean or extreme of the loss's metrics, and a
        mixture's `moe/*`, which are over all tokens.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield every weight once, whole, by Hugging Face name, in the compute dtype, in a fixed order.

        A tensor is valid until the next one is requested. Buffers come last, in their own dtype. Tied weights come
        once, under the name that `save_pretrained` keeps.
        """
        ...

    def follow(self, policy: "PolicyRole") -> None:
        """[all] Inside `awake` of both: move this reference's weights towards the policy's, in place.

        UserError, on all ranks, if it is another model.
        """
        ...


class CriticRole(Role, Protocol):
    """The critic, a model of the expected return."""

    def values(self, batch: Batch) -> Tensor:
        """[all] Return the value before each sampled token: float32 [T], 0 outside `loss_mask`; no gradient."""
        ...

    def update(self, batch: Batch, loss: BoundValueLoss) -> Metrics:
        """[all] Run one optimizer step, see `PolicyRole.update`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield weights as `PolicyRole.weights`; the value head is named as the output embedding."""
        ...


class ForwardArgs(NamedTuple):
    """Arguments of a forward besides the micro-batch."""

    temperature: float = 1.0
    is_fingerprint: bool = False
    """True: a critic returns `Role.packing_fingerprint` instead of values"""
    top: tuple[int, int] | None = None
    """(k, num_ids) of `PolicyRole.top_logprobs`, if wanted"""
    compares: bool = False
    """True: a policy also returns logprobs of `Batch.teacher_ids`"""
    is_base: bool = False
    constraint: Constraint | None = None
    """grammar of a policy's answers"""


@dataclass(frozen=True)
class MicrobatchLoop:
    """One pass, forward or forward and backward, over equally many micro-batches on every rank."""

    name: str
    count: int
    """micro-batches of the data shard with the most"""
    is_trained: bool
    """backward too, accumulating gradients; else without gradient"""
    args: ForwardArgs
    select: Callable[[int], Batch]
    """Function that returns micro-batch i, on the CPU: whole samples, or beyond the shard's last a filler of
    weight 0."""
    finish: Callable[[int, Batch, tuple[Tensor, ...]], Tensor]
    """Function `finish(i, micro-batch on the CPU, outputs)` of the last stage, which returns the loss to differentiate.
    Outputs, at the loss mask's tokens in order, on the device: a policy's logprob and entropy, or a critic's value,
    float32 [N]; by `ForwardArgs` also the columns of `top`, or [N, k] of `compares`. Gradients are summed over data
    shards, not averaged."""


class PlannedModel(Protocol):
    """A model whose memory `--plan` shows."""

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        """Return this rank's live memory without gradients: `weights` and `optimizer`."""
        ...


class ShardedModel(PlannedModel, Protocol):
    """A backend's model and optimizer, this rank's shard."""

    hidden_size: int
    size: ModelSize

    def run(self, loop: MicrobatchLoop) -> None:
        """[all] Run all micro-batches, which ranks of one data shard share.

        `accumulate.walk` is a loop for backends without one.
        """
        ...

    def gradients(self) -> Mapping[str, Tensor]:
        """[all] Return this rank's unclipped gradients by parameter; each element is on one rank."""
        ...

    def step(self, lr: float, norm: float | None) -> None:
        """[all] Clip gradients of global norm `norm`, update, and drop them; None: only drop them."""
        ...

    def metrics(self) -> Metrics:
        """[all] Return the last update's further metrics, equal on all ranks."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield every weight whole, see `PolicyRole`."""
        ...

    def state(self) -> Sequence[Shard]:
        """Return the live tensors that training changes, on the device: float32 masters and optimizer state."""
        ...

    def on_state_loaded(self) -> None:
        """Refresh what derives from `state` after it was overwritten."""
        ...

    def wake(self) -> None:
        """Bring offloaded weights to the device."""
        ...

    def sleep(self) -> None:
        """Offload weights and optimizer state, if set."""
        ...

    def close(self) -> None:
        """Free everything the model holds; idempotent."""
        ...
