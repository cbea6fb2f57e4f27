"""`Policy` and `Critic`: roles over any backend's `base.ShardedModel`.

All ranks run equally many micro-batches, some of them fillers of weight 0. Token weights are global, so gradients are
sums over data shards. Norm, averages and skipped updates are equal on all ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.batch import Batch, Ragged, bounds_of
from spmd_rl.config.architectures import sees_pictures
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.constraint import Constraint, constraint_of
from spmd_rl.train.base import BoundLoss, BoundValueLoss, ForwardArgs, Metrics, MicrobatchLoop, PolicyRole, ShardedModel
from spmd_rl.train.hashes import PHASES, of_batch, of_tensors
from spmd_rl.train.microbatch import dummy, plan, token_index
from spmd_rl.train.pipeline import Step, forward_only, one_forward_one_backward
from spmd_rl.train.state import MODEL, SavedState, Shard, key_of, read_state, staged, write_state

AnyLoss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""A `BoundLoss` or `BoundValueLoss`, called with a forward's outputs and the micro-batch."""


class BaseRole:
    """Code shared by policy, reference and critic; a frozen role has no optimizer and no `update`."""

    def __init__(self, model: ShardedModel, layout: Layout, role: RoleConfig) -> None:
        self.model, self.layout, self.lr_factor = model, layout, 1.0
        self.hidden_size, self.size, self.sees = model.hidden_size, model.size, sees_pictures(Path(role.model))
        self._role, self._settings, self._world = role, role.optimizer, layout.world
        self._updates = self._skipped_in_a_row = 0

    @torch.no_grad()
    def evaluate(self, name: str, batch: Batch, args: ForwardArgs, num_columns: int) -> list[Tensor]:
        """[all] Return the model's outputs over the batch: float32 [T] each, 0 outside the loss mask."""
        bins = plan(batch, self._role.train.tokens_per_microbatch)
        found = []

        def finish(i: int, micro: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
            if i < len(bins):
                found.append((token_index(batch, bins[i])[micro.sampled.index], outputs))
            return outputs[0]

        count = self._agree_on_count(name, len(bins))  # [all]
        select = _selected(batch, bins)
        self.model.run(
            MicrobatchLoop(name=name, count=count, is_trained=False, args=args, select=select, finish=finish)
        )
        columns = torch.zeros(num_columns, batch.num_tokens, device=batch.token_ids.device)
        # Copying results to the host waits for the device, which may wait for another rank.
        with self._world.collective(f"{name}: results"):
            for places, outputs in found:
                for column, output in zip(columns, outputs, strict=True):
                    column[places] = output.to(column.device)
            columns = self._of_last_stage(columns)  # [all]
        return list(columns)

    def optimize(self, batch: Batch, args: ForwardArgs, loss: AnyLoss) -> Metrics:
        """[all] Run one optimizer step. RunFailed after `max_skipped_updates` non-finite gradients in a row."""
        for phase in PHASES:
            self._hash(phase, partial(of_batch, batch, phase))
        sums, count = self.accumulate(batch, args, loss)  # [all]
        return self.conclude(self._of_block(sums), count)  # [all]

    def conclude(self, sums: dict[str, float], count: int) -> Metrics:
        """[all] Update by the gradients of `count` micro-batches, or skip; see `optimize`.

        sums: this rank's sums of `loss`, `num_tokens` and quantities to divide by it; changed in place.
        """
        settings = self._settings
        assert settings is not None, "a frozen role has no update"
        sums["grad_square"] = self._grad_square(sums)  # [all]
        # Sorted, so that all ranks reduce in the same order.
        greatest = {name: sums.pop(name) for name in sorted(sums) if is_extreme(name)}
        sums = self._world.reduce("update: gradient norm and averages", sums, op="sum")  # [all]
        # The loss has the same metrics on all ranks, so this branch is equal everywhere.
        if greatest:
            greatest = self._world.reduce("update: extremes", greatest, op="max")  # [all]
        norm = math.sqrt(sums.pop("grad_square"))
        lr = self.lr_factor * learning_rate(
            self._updates,
            peak=settings.lr,
            schedule=settings.schedule,
            warmup=settings.warmup_steps,
            total=self._role.total_updates,
        )
        # The norm is the same number on every rank, so all ranks take the same branch.
        skipped = not math.isfinite(norm)
        self.model.step(lr, None if skipped else norm)  # [all]
        self._count(skipped, settings.max_skipped_updates)
        total, num_tokens = sums.pop("loss"), max(1.0, sums.pop("num_tokens"))
        means = {name: value / num_tokens for name, value in sums.items()} | extremes(greatest)
        means |= {"loss": total, "grad_norm": norm, "lr": lr} | self.model.metrics()  # [all]
        return means | {"skipped": float(skipped), "num_microbatches": float(count)}

    def _grad_square(self, sums: Mapping[str, float]) -> float:
        gradients = self.model.gradients()  # [all]
        self._hash("update", lambda: {name: repr(value) for name, value in sums.items()} | of_tensors(gradients))
        counted = list(gradients.values())
        # Squares are summed in float64. Within one tensor the norm is float32, off by 1.8e-5 relative on 53M elements.
        return float(torch.stack(torch._foreach_norm(counted)).double().square().sum()) if counted else 0.0

    def accumulate(self, batch: Batch, args: ForwardArgs, loss: AnyLoss) -> tuple[dict[str, float], int]:
        """[all] Accumulate gradients; return this data shard's sums (see `joined`) and the number of micro-batches."""
        bins = plan(batch, self._role.train.tokens_per_microbatch)
        count = max(1, self._agree_on_count("update", len(bins)))
        sums: dict[str, Tensor | float] = {}

        def finish(i: int, micro: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
            micro = micro.to(self._world.device)
            per_token, quantities = loss(*outputs, micro)
            total = (per_token * micro.weights[micro.sampled.index]).sum()
            # Dummies beyond this rank's own bins run for the collectives alone and must not count in averages.
            columns = {"loss": total, "num_tokens": torch.ones_like(per_token), **quantities}
            for name, values in columns.items():
                sums[name] = joined(name, sums.get(name), values.detach() if i < len(bins) else None)
            return total

        select = _selected(batch, bins)
        self.model.run(
            MicrobatchLoop(name="update", count=count, is_trained=True, args=args, select=select, finish=finish)
        )
        # Copying results to the host waits for the device, which may wait for another rank.
        with self._world.collective("update: results"):
            return {name: float(value) for name, value in sums.items()}, count

    def _of_block(self, sums: dict[str, float]) -> dict[str, float]:
        """[all] Return a data shard's sums on one rank of its last stage, zeros on the block's others."""
        # So a sum over all ranks counts each shard once. Only the last stage knows the names of the loss's metrics.
        if self.layout.size("pp") > 1:
            src = self._world.size - 1
            names = self._world.broadcast("update: names of averages", sorted(sums), src)  # [all]
            sums = {name: sums.get(name, nothing(name)) for name in names}
        has_end = self.layout.rank("pp") == self.layout.size("pp") - 1
        counts = has_end and not self.layout.rank("cp") and not self.layout.rank("tp")
        return sums if counts else {name: nothing(name) for name in sums}

    def _of_last_stage(self, columns: Tensor) -> Tensor:
        if self.layout.size("pp") == 1:
            return columns
        # The group's collectives need tensors on its device, but columns may be on the CPU.
        sent = columns.to(self._world.device).contiguous()
        dist.broadcast(sent, group=self.layout.group("pp"), group_src=self.layout.size("pp") - 1)  # [all] of the line
        return sent.to(columns.device)

    def _agree_on_count(self, what: str, count: int) -> int:
        counts = {"count": float(count)}
        agreed = self.layout.data.reduce(f"{what}: number of micro-batches", counts, op="max")  # [all]
        return int(agreed["count"])

    def _count(self, skipped: bool, most: int) -> None:
        self._updates += 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= most:
            raise RunFailed(f"the gradient was not finite in {self._skipped_in_a_row} updates in a row")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep weights on the device inside; optimizer state only in its step, `save` and `load`."""
        self.model.wake()
        yield
        # Not in a `finally`: an error ends the job, and copying from a broken device would hang or hide it.
        self.model.sleep()

    def weights(self, adapters: str = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, see `PolicyRole`. adapters: see `Adapters.published`."""
        return self.model.weights() if adapters == "merged" else self.model.weights(adapters)

    def save(self, folder: Path) -> list[Path]:
        """Write the state, see `Role`."""
        return self._write(folder, self.model.state(), self._world.progress)

    def stage(self, folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        """Copy the state to the host, see `Role`."""
        return partial(self._write, folder, staged(self.model.state()))

    def _write(self, folder: Path, state: Iterable[Shard], on_progress: Callable[[], object]) -> list[Path]:
        about = {"backend": self._role.train.name, "layout": str(self._role.train.used_axes)}
        return write_state(folder / f"{self._world.rank:05d}.safetensors", state, about, on_progress)

    def load(self, folder: Path) -> None:
        """Restore the state, see `Role`."""
        read_state(self.model.state(), SavedState.open(folder, self._world), self._world.progress)  # [all]
        self.model.on_state_loaded()

    def counters(self) -> dict[str, int]:
        """Return `updates`, skipped ones included, and `skipped_in_a_row`."""
        return {"updates": self._updates, "skipped_in_a_row": self._skipped_in_a_row}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Restore what `counters` returned earlier."""
        self._updates, self._skipped_in_a_row = counters["updates"], counters["skipped_in_a_row"]

    def hashes(self) -> dict[str, str]:
        """Return hashes of this rank's state, see `Role`."""
        with self.awake():
            mine = [one for one in self.model.state() if one.is_mine and one.tensor is not None]
            return of_tensors({key_of(one.name, one.begin): one.tensor for one in mine})

    def _hash(self, phase: str, find: Callable[[], Mapping[str, str]]) -> None:
        journal = self._world.journal
        journal.record(journal.step, phase, f"{self._role.name} {self._updates}", find)

    def close(self) -> None:
        """Free the model, see `Role.close`."""
        self.model.close()


class Policy(BaseRole):
    """The policy or its reference: see `PolicyRole`."""

    @cached_property
    def constraint(self) -> Constraint | None:
        """Grammar of the policy's answers, if any."""
        return constraint_of(self._role.constraint, self._role.model, self._role.trust_remote_code)

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy, see `PolicyRole`."""
        args = ForwardArgs(temperature, constraint=self.constraint)
        logprobs, entropy = self.evaluate("logprobs", batch, args, 2)  # [all]
        return logprobs, entropy

    def top_logprobs(self, batch: Batch, temperature: float, k: int, num_ids: int) -> tuple[Tensor, Ragged, Ragged]:
        """Return the most likely tokens, see `PolicyRole`."""
        columns = self.evaluate("logprobs", batch, ForwardArgs(temperature, top=(k, num_ids)), 2 + 2 * k)  # [all]
        tops = torch.stack(columns[2:], 1)[batch.sampled.index]
        lists = (tops[:, :k].round().int(), tops[:, k:])
        return columns[0], *(Ragged(values.flatten(), bounds_of(batch.loss_mask.long() * k)) for values in lists)

    @property
    def sync_steps(self) -> int | None:
        """Steps between syncs, see `PolicyRole`."""
        return self._role.sync_steps

    def follow(self, policy: PolicyRole) -> None:
        """Move towards the policy, see `PolicyRole`."""
        move(self.model.state(), policy.weights(), self._role.own.mixup, self._role.model_key)  # [all]
        self.model.on_state_loaded()

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """Return a packing fingerprint, see `Role`."""
        return self.evaluate("logprobs", batch, ForwardArgs(), 2)[0]  # [all]

    def update(self, batch: Batch, loss: BoundLoss, temperature: float) -> Metrics:
        """Run one optimizer step, see `PolicyRole`."""
        args = ForwardArgs(temperature, compares=batch.teacher_ids is not None, constraint=self.constraint)
        return self.optimize(batch, args, loss)


class Critic(BaseRole):
    """The critic, which predicts scores: see `CriticRole`."""

    def values(self, batch: Batch) -> Tensor:
        """Return values of sampled tokens, see `CriticRole`."""
        return self.evaluate("values", batch, ForwardArgs(), 1)[0]

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """Return a packing fingerprint, see `Role`."""
        return self.evaluate("values", batch, ForwardArgs(is_fingerprint=True), 1)[0]

    def update(self, batch: Batch, loss: BoundValueLoss) -> Metrics:
        """Run one optimizer step, see `CriticRole`."""
        return self.optimize(batch, ForwardArgs(), loss)


def _selected(batch: Batch, bins: list[list[int]]) -> Callable[[int], Batch]:
    return lambda i: batch.select(bins[i]) if i < len(bins) else dummy(batch)


class Pace:
    """Limit of the CPU's lead over the device to one micro-batch, for truthful progress reports."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, None

    def keep(self) -> None:
        """Wait for the device's work up to the previous call."""
        if self._device.type == "cpu" or not torch.accelerator.is_available():
            return
        event = torch.Event(self._device)
        event.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = event


def walk(
    loop: MicrobatchLoop,
    layout: Layout,
    steps: Iterable[Step],
    forward: Callable[[Step], object],
    backward: Callable[[Step], object],
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """[all] Run and journal a pass's steps on this rank. steps: `alone(loop)` without a pipeline. beside: context of
    each step."""
    pace, steps = Pace(layout.world.device), list(steps)
    several = any(step.chunk for step in steps)
    for step in steps:
        way = f"{'forward' if step.is_forward else 'backward'} of " if loop.is_trained else ""
        part = f"chunk {step.chunk + 1} of " if several else ""
        name = f"{loop.name}: {way}{part}micro-batch {step.microbatch + 1}/{loop.count}"
        with layout.collective(name), beside():  # [stage]
            (forward if step.is_forward else backward)(step)
            # In training a micro-batch ends with its backward pass.
            if not (loop.is_trained and step.is_forward):
                pace.keep()
        layout.world.progress()


def alone(loop: MicrobatchLoop) -> Iterator[Step]:
    """Yield steps without a pipeline: each forward, then its backward."""
    return one_forward_one_backward(0, 1, loop.count) if loop.is_trained else forward_only(1, loop.count)


SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(update: int, *, peak: float, schedule: str, warmup: int, total: int) -> float:
    """Return the learning rate of update `update` (from 0) of `total`.

    It rises from `peak / warmup` to `peak` at update `warmup` - 1; `linear` and `cosine` then fall to 0 after the last.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - progress)
        case "cosine":
            return peak * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"schedule={schedule!r} is none of {', '.join(SCHEDULES)}")


@torch.no_grad()
def move(state: Sequence[Shard], weights: Iterable[tuple[str, Tensor]], share: float, key: str) -> None:
    """[all] Set `state` to share * `weights` + (1 - share) * itself, in place.

    weights: whole, by stored name; buffers that `state` lacks are skipped. A share of 1 copies bit for bit in equal
    dtypes. UserError, on every rank, naming the setting `key`, if names or shapes differ.
    """
    shards = defaultdict[str, list[Shard]](list)
    for one in state:
        shards[one.name.removeprefix(MODEL)].append(one)
    for name, whole in weights:  # [all]
        for one in shards.pop(name, ()):
            if tuple(one.shape) != tuple(whole.shape):
                raise UserError(f"{key}: {name} is {tuple(one.shape)} there, and {tuple(whole.shape)} in the policy")
            if one.tensor is None:
                continue
            region = tuple(slice(at, at + n) for at, n in zip(one.begin, one.tensor.shape, strict=True))
            part = whole[region].to(one.tensor)
            one.tensor.copy_(part) if share == 1 else one.tensor.lerp_(part, share)
    if shards:
        raise UserError(
            f"{key}: the policy has no {min(shards)}; a reference that follows it must have its architecture"
        )


# Per-token metrics are accumulated as sums, or as extremes under names that end in `/max` or `/min`. A minimum is the
# maximum of negated values, so that one max-reduction joins all extremes.
def is_extreme(name: str) -> bool:
    """Return True for metrics reduced by max or min."""
    return name.endswith(("/max", "/min"))


def nothing(name: str) -> float:
    """Return the sum or extreme over no tokens."""
    return -math.inf if is_extreme(name) else 0.0


def joined(name: str, before: Tensor | float | None, values: Tensor | None) -> Tensor | float:
    """Return the sum or extreme `before` joined with `values`, [N] or a single sum."""
    before = nothing(name) if before is None else before
    if values is None or not values.numel():
        return before
    # float64: rounding in long float32 sums would show in the means.
    values = values.double()
    if not is_extreme(name):
        return before + values.sum()
    most = (-values if name.endswith("/min") else values).max()
    return torch.maximum(most, torch.as_tensor(before, dtype=most.dtype, device=most.device))


def extremes(found: Mapping[str, float]) -> dict[str, float]:
    """Return extremes with their names' sign, without those over no tokens."""
    return {name: -v if name.endswith("/min") else v for name, v in found.items() if v > -math.inf}


class AdapterOff:
    """The policy with its adapters off, as its reference. Never trained, saved or loaded."""

    sync_steps: int | None = None
    """None: following the policy needs separate weights"""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.layout, self.hidden_size, self.size = policy.layout, policy.hidden_size, policy.size
        self.sees = policy.sees

    def awake(self) -> AbstractContextManager[None]:
        """Keep the policy awake, which holds the weights."""
        return self.policy.awake()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Return logprob and entropy, see `PolicyRole`."""
        args = ForwardArgs(temperature, is_base=True, constraint=self.policy.constraint)
        logprobs, entropy = self.policy.evaluate("logprobs", batch, args, 2)  # [all]
        return logprobs, entropy

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """[all] Return a packing fingerprint, see `Role`."""
        return self.policy.evaluate("logprobs", batch, ForwardArgs(is_base=True), 2)[0]  # [all]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Raise, because only the policy is published."""
        raise AssertionError("the reference's weights are the policy's, without its adapters")

    def close(self) -> None:
        """Do nothing: the policy stays in use."""
