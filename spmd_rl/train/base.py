"""`PolicyRole` and `CriticRole`: what the learner and the publisher need of a model that is trained.

A backend gives a `ShardedModel`; `accumulate.py` makes a role of it.

Lines marked [all] meet other ranks. Every backend passes `tests/dist/test_train_parity.py` against plain single-process
Hugging Face + torch in fp32.
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

    `learn/losses.py` makes it of a function of `algo/policy`, which takes `Tokens` and settings instead.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss per token, float32 [N], and named per-token quantities, each float32 [N], to be averaged.

        `logprobs` and `entropy` are float32 [N] at the N tokens of `batch.loss_mask`, in order, both with gradient;
        `batch` holds whole samples. The backend multiplies the loss with `batch.weights[batch.loss_mask]` and sums.
        Where the batch has `teacher_ids`, lists of k, it is called with the logprobs of these too, float32 [N, k] with
        gradient, before `batch`.
        Quantities are averaged over the tokens of the global batch, unweighted; of one whose name ends in `/max` or
        `/min`, it is the greatest or the least.
        """
        ...


class BoundValueLoss(Protocol):
    """The critic's loss bound to its settings; `learn/losses.py` makes it of `algo/values.value_loss`."""

    def __call__(self, values: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """As `BoundLoss`, of `values`: float32 [N] at the tokens of `batch.loss_mask`, in order, with gradient."""
        ...


class Role(Protocol):
    """A model and its optimizer, sharded over the ranks of a layout."""

    layout: Layout
    """Which ranks hold which part of the model, and of the batch."""
    hidden_size: int
    """Width of the residual stream: from it follows what a sequence of a given length costs."""
    size: ModelSize
    """Counts of the model's weights: from them follows the least time that a step can take."""
    lr_factor: float
    """By which the learning rate of the schedule is multiplied: 1, unless a phase of the run has a rate of its own."""

    def awake(self) -> AbstractContextManager[None]:
        """Weights (and, in `update`, optimizer state) are on the device inside, and may be off it outside."""
        ...

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """[all] Inside `awake`: a number for every sampled token, float32 [T], that changes if its neighbours in the
        packed batch do, unless the model keeps sequences apart (`packed_check.py`).

        A policy gives its logprob, in nats; a critic, whose values all start at 0, a sum over its hidden state.
        """
        ...

    def save(self, folder: Path) -> list[Path]:
        """[all] Inside `awake`: write all tensors that training changes into the existing, empty `folder`.

        These are the parameters that are not frozen and the optimizer's state; frozen ones come from the model's
        directory. Returns the files that this rank wrote, which no other rank's call returns. OSError if this rank
        could not write its part, or if another could not and the backend knows of it.
        """
        ...

    def stage(self, folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        """[all] Inside `awake`: copy to the host what `save` would write; what is returned writes it, and meets nobody.

        It may be called outside of `awake`, on another thread and while training goes on, with a function that it calls
        after each tensor; it returns and raises what `save` does.
        """
        ...

    def load(self, folder: Path) -> None:
        """[all] Inside `awake`: take over what `save` wrote, on whatever number of ranks, from a verified folder.

        ValueError, on every rank, if it is not of a model like this one. OSError if a file cannot be read.
        """
        ...

    def counters(self) -> dict[str, int]:
        """Plain numbers that must survive a resume beside the tensors: updates done, updates skipped in a row."""
        ...

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take over what `counters` gave."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


class PolicyRole(Role, Protocol):
    """The policy, or its reference, which has no optimizer."""

    sync_steps: int | None
    """Of a reference: it follows the policy after every so many steps; None: it stays as it is."""

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Logprob and entropy of every sampled token: float32 [T] each, 0 outside `loss_mask`; no gradient.

        Logits are divided by `temperature` first (1 for greedy). `batch` is this rank's data shard, which may be empty;
        the result is equal on all ranks that hold the shard.
        """
        ...

    def top_logprobs(self, batch: Batch, temperature: float, k: int, num_ids: int) -> tuple[Tensor, Ragged, Ragged]:
        """[all] Logprob of every sampled token, float32 [T], and the k most likely tokens in its place (int32 ids below
        `num_ids`) with their logprobs (float32), as lists of k, empty outside `loss_mask`; no gradient.
        """
        ...

    def update(self, batch: Batch, loss: BoundLoss, temperature: float) -> Metrics:
        """[all] One optimizer step over the global batch, of which `batch` is this rank's data shard (empty is legal).

        Returns, equal on all ranks: `loss`, `grad_norm` (before clipping), `lr`, `skipped` (1 where the gradient was
        not finite and nothing changed), `num_microbatches`, and the global mean, or extreme, of each of the loss's
        quantities; of a mixture of experts also `moe/*`, which are not means over tokens of the loss.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] Every weight once, whole, under its Hugging Face name, in the compute dtype, in a fixed order.

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
    """The critic: how much score is yet to come."""

    def values(self, batch: Batch) -> Tensor:
        """[all] What is expected before each sampled token: float32 [T], 0 outside `loss_mask`; no gradient."""
        ...

    def update(self, batch: Batch, loss: BoundValueLoss) -> Metrics:
        """[all] As `PolicyRole.update`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] As `PolicyRole.weights`; the value head has the name of the output embedding."""
        ...


class ForwardArgs(NamedTuple):
    """What a forward needs beside the micro-batch."""

    temperature: float = 1.0
    """a policy divides its logits by it"""
    is_fingerprint: bool = False
    """a critic gives `Role.packing_fingerprint` instead of its values"""
    top: tuple[int, int] | None = None
    """(k, num_ids): a policy gives its most likely tokens too, see `PolicyRole.top_logprobs`"""
    compares: bool = False
    """a policy gives its logprobs of the teacher's tokens (`Batch.teacher_ids`) too"""
    is_base: bool = False
    """adapters are off"""
    constraint: Constraint | None = None
    """a policy's distribution is that of the tokens which it allows"""


@dataclass(frozen=True)
class MicrobatchLoop:
    """One forward, or forward and backward, over the micro-batches; the same count on every rank."""

    name: str
    """as the journal has it"""
    count: int
    is_trained: bool
    """forward and backward, gradients added up; else forward alone, and without gradient"""
    args: ForwardArgs
    select: Callable[[int], Batch]
    """Micro-batch number i, on the CPU: whole samples, which may have no weight."""
    finish: Callable[[int, Batch, tuple[Tensor, ...]], Tensor]
    """To be called with a micro-batch's outputs, where the model ends: float32 [N] each, on the device, at the tokens
    of the loss mask, in order: a policy's logprob and entropy, a critic's value; and, as `ForwardArgs` ask, a policy's
    columns of `top`, or the [N, k] of `compares`. Gives the loss to be run backward,
    whose gradients are to be summed over data shards, not averaged."""


class ShardedModel(Protocol):
    """A model and its optimizer, as a backend has them: this rank's shard."""

    hidden_size: int
    size: ModelSize
    """See `Role`."""

    def run(self, loop: MicrobatchLoop) -> None:
        """[all] Run all micro-batches. Ranks that share a data shard get the same ones.

        `accumulate.walk` goes from one to the next, where the backend has no loop of its own.
        """
        ...

    def grad_square(self) -> float:
        """[all] This rank's term of the squared norm of the gradients: the sum over all ranks counts each once."""
        ...

    def step(self, lr: float, norm: float | None) -> None:
        """[all] Clip gradients of the global norm `norm`, update, drop them. With None: drop them, change nothing."""
        ...

    def metrics(self) -> Metrics:
        """[all] Further metrics of the last update, equal on all ranks."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """[all] See `PolicyRole`."""
        ...

    def state(self) -> Sequence[Shard]:
        """The live tensors that training changes, on the device: float32 masters and the optimizer's state."""
        ...

    def on_state_loaded(self) -> None:
        """Called after the tensors of `state` were overwritten; refresh what is derived from them."""
        ...

    def wake(self) -> None:
        """Bring the weights to the device, if they are off it."""
        ...

    def sleep(self) -> None:
        """Take weights and optimizer state off the device, if the settings say so."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...
