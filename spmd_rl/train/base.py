"""`PolicyRole` and `CriticRole`: interfaces of trained models for the learner and the publisher.

A backend gives a `ShardedModel`; `accumulate.py` makes a role of it.

Methods marked [all] are collectives. Every backend passes `tests/dist/test_train_parity.py` against plain
single-process Hugging Face + torch in fp32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """A token loss bound to its settings: pure tensor mathematics.

    `learn/losses.py` makes it from a function of `algo/policy`, which takes `Tokens` and settings.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss per token, float32 [N], and named per-token metrics, each float32 [N].

        `logprobs` and `entropy` are float32 [N] at the N tokens of `batch.loss_mask`, in order, both with gradient;
        `batch` holds whole samples. The backend multiplies the loss with `batch.weights[batch.loss_mask]` and sums. If
        the batch has `teacher_ids`, the call has one more argument before `batch`: their logprobs, float32 [N, k], with
        gradient. Metrics are averaged over the tokens of the global batch, unweighted, or reduced by max or min if the
        name ends in `/max` or `/min`.
        """
        ...


class BoundValueLoss(Protocol):
    """The critic's loss bound to its settings; `learn/losses.py` makes it of `algo/values.value_loss`."""

    def __call__(self, values: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return loss and metrics as `BoundLoss` does. values: float32 [N] at the tokens of `batch.loss_mask`, in
        order, with gradient."""
        ...


class Role(Protocol):
    """A model and its optimizer, sharded over the ranks of a layout."""

    layout: Layout
    """Layout of the model and the batch over ranks."""
    hidden_size: int
    """Width of the residual stream, from which the cost of a sequence follows."""
    size: ModelSize
    """Counts of the model's weights, from which the least time of a step follows."""
    sees: bool
    """True if it takes the pictures of a batch."""
    lr_factor: float
    """Factor on the schedule's learning rate: 1, except in a phase of the run with another rate."""

    def awake(self) -> AbstractContextManager[None]:
        """Hold weights (and, in `update`, optimizer state) on the device inside; outside they may be offloaded."""
        ...

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """[all] Inside `awake`: return a number for every sampled token, float32 [T], that changes with the token's
        neighbours in the packed batch if the model mixes sequences (`packed_check.py`).

        A policy returns its logprob, in nats; a critic, whose values all start at 0, a sum over its hidden state.
        """
        ...

    def save(self, folder: Path) -> list[Path]:
        """[all] Inside `awake`: write all tensors that training changes into the existing, empty `folder`.

        These are the unfrozen parameters and the optimizer's state; frozen ones come from the model's directory.
        Returns the files that this rank wrote. OSError if this rank could not write its part, or if the backend knows
        that another could not.
        """
        ...

    def stage(self, folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        """[all] Inside `awake`: copy to the host what `save` would write; return a function that writes it without
        communication.

        The function may run outside of `awake`, on another thread during training. Its argument is called after each
        tensor; it returns and raises what `save` does.
        """
        ...

    def load(self, folder: Path) -> None:
        """[all] Inside `awake`: restore what `save` wrote on any number of ranks, from a verified folder.

        ValueError, on every rank, if it is not of a model like this one. OSError if a file cannot be read.
        """
        ...

    def counters(self) -> dict[str, int]:
        """Return the plain numbers that must survive a resume: updates done, updates skipped in a row."""
        ...

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Restore the numbers that `counters` returned."""
        ...

    def hashes(self) -> dict[str, str]:
        """Return a hash of each tensor that `save` would write on this rank, by its key in the file."""
        ...

    def close(self) -> None:
        """Free everything the role holds; idempotent."""
        ...


class PolicyRole(Role, Protocol):
    """The policy, or its reference, which has no optimizer."""

    sync_steps: int | None
    """Steps after which a reference moves towards the policy; None: it stays fixed."""

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Return logprob and entropy of every sampled token: float32 [T] each, 0 outside `loss_mask`; no
        gradient.

        Logits are divided by `temperature` first (1 for greedy). `batch` is this rank's data shard, which may be empty;
        the result is equal on all ranks that hold the shard.
        """
        ...

    def top_logprobs(self, batch: Batch, temperature: float, k: int, num_ids: int) -> tuple[Tensor, Ragged, Ragged]:
        """[all] Return the logprob of every sampled token, float32 [T], and the k most likely tokens in its place
        (int32 ids below `num_ids`) with their logprobs (float32), as lists of k, empty outside `loss_mask`; no
        gradient."""
        ...

    def update(self, batch: Batch, loss: BoundLoss, temperature: float) -> Metrics:
        """[all] Run one optimizer step over the global batch; `batch` is this rank's data shard, which may be empty.

        Returns, equal on all ranks: `loss`, `grad_norm` (before clipping), `lr`, `skipped` (1 where the gradient was
        not finite and nothing changed), `num_microbatches`, and the global mean, or extreme, of each of the loss's
        quantities; of a mixture of experts also `moe/*`, which are not means over tokens of the loss.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield every weight once, whole, under its Hugging Face name, in the compute dtype, in a fixed order.

        Saved buffers, which are not trained, come last and in their own dtype.

        A tensor is valid until the next one is asked for. Tied weights appear once, under the name that
        `save_pretrained` keeps.
        """
        ...

    def follow(self, policy: "PolicyRole") -> None:
        """[all] Inside `awake` of both: move this reference's weights towards the policy's, in place.

        UserError, on all ranks, if these are of another model.
        """
        ...


class CriticRole(Role, Protocol):
    """The critic: a model of the expected return."""

    def values(self, batch: Batch) -> Tensor:
        """[all] Return the value before each sampled token: float32 [T], 0 outside `loss_mask`; no gradient."""
        ...

    def update(self, batch: Batch, loss: BoundValueLoss) -> Metrics:
        """[all] Run one optimizer step, see `PolicyRole.update`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield weights as `PolicyRole.weights` does; the value head has the name of the output embedding."""
        ...


class ForwardArgs(NamedTuple):
    """Arguments of a forward in addition to the micro-batch."""

    temperature: float = 1.0
    """divisor of a policy's logits"""
    is_fingerprint: bool = False
    """True: a critic returns `Role.packing_fingerprint` instead of its values"""
    top: tuple[int, int] | None = None
    """(k, num_ids): a policy also returns its most likely tokens, see `PolicyRole.top_logprobs`"""
    compares: bool = False
    """True: a policy also returns its logprobs of the teacher's tokens (`Batch.teacher_ids`)"""
    is_base: bool = False
    """True: adapters are off in this forward"""
    constraint: Constraint | None = None
    """grammar of the tokens that a policy's distribution allows"""


@dataclass(frozen=True)
class MicrobatchLoop:
    """One forward, or forward and backward, over the micro-batches; equally many on every rank."""

    name: str
    """name of the loop in the journal"""
    count: int
    """number of micro-batches: the largest of any data shard"""
    is_trained: bool
    """forward and backward with accumulated gradients; else forward alone, without gradient"""
    args: ForwardArgs
    select: Callable[[int], Batch]
    """Return micro-batch number i, on the CPU: whole samples, or a filler without weight beyond a shard's last one."""
    finish: Callable[[int, Batch, tuple[Tensor, ...]], Tensor]
    """Function `finish(i, micro-batch on the CPU, outputs)`, called on the last stage. Its result is the loss, ignored
    without training. Outputs: float32 [N] each, on the device, at the tokens of the loss mask in order: a policy's
    logprob and entropy, a critic's value; by `ForwardArgs` also a policy's columns of `top`, or the [N, k] of
    `compares`. Returns the loss for the backward pass, whose gradients are summed over data shards, not averaged."""


class ShardedModel(Protocol):
    """A backend's model and optimizer: this rank's shard."""

    hidden_size: int
    size: ModelSize
    """Counts of the weights, see `Role.size`."""

    def run(self, loop: MicrobatchLoop) -> None:
        """[all] Run all micro-batches, which are equal on ranks that share a data shard.

        A backend without a loop of this kind calls `accumulate.walk`.
        """
        ...

    def gradients(self) -> Mapping[str, Tensor]:
        """[all] Return this rank's gradients by parameter, before they are clipped: over all ranks each element is
        there once."""
        ...

    def step(self, lr: float, norm: float | None) -> None:
        """[all] Clip gradients of the global norm `norm`, update, and drop them. With None: only drop them."""
        ...

    def metrics(self) -> Metrics:
        """[all] Return further metrics of the last update, equal on all ranks."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield every weight whole, see `PolicyRole`."""
        ...

    def state(self) -> Sequence[Shard]:
        """Return the live tensors that training changes, on the device: float32 masters and the optimizer's state."""
        ...

    def on_state_loaded(self) -> None:
        """Refresh what is derived from the tensors of `state`, after they were overwritten."""
        ...

    def wake(self) -> None:
        """Bring the weights to the device, if they are offloaded."""
        ...

    def sleep(self) -> None:
        """Offload weights and optimizer state, if the settings say so."""
        ...

    def close(self) -> None:
        """Free everything the model holds; idempotent."""
        ...
