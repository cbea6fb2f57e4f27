"""`CriticEnsemble`: several critics in the place of one. They start alike, and each learns from answers of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from spmd_rl.algo.values import ensemble
from spmd_rl.batch import Batch
from spmd_rl.train.base import BoundValueLoss, CriticRole, Metrics


class CriticEnsemble:
    """A `CriticRole` of M critics, built alike. A value is the mean of theirs; each trains on its part of a batch."""

    def __init__(self, critics: Sequence[CriticRole]) -> None:
        self.critics, self.num_critics = list(critics), len(critics)
        first = self.critics[0]
        self.layout, self.hidden_size, self.size = first.layout, first.hidden_size, first.size

    @property
    def lr_factor(self) -> float:
        """See `Role`."""
        return self.critics[0].lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        """Set that of every critic."""
        for critic in self.critics:
            critic.lr_factor = factor

    def values(self, batch: Batch) -> Tensor:
        """See `CriticRole`."""
        return self.estimates(batch)["values"]  # [all]

    def estimates(self, batch: Batch) -> dict[str, Tensor]:
        """See `CriticRole`: with how far the critics differ."""
        mean, spread = ensemble(torch.stack([critic.values(batch) for critic in self.critics]))  # [all]
        return {"values": mean, "value_spread": spread}

    def update(self, batch: Batch, loss: BoundValueLoss) -> Metrics:
        """See `CriticRole`: one optimizer step of each critic with a sample; the means of what they return.

        The weights of a critic's tokens add up to those of the whole batch, as if it saw no less than all of it.
        """
        parts, data = self.parts(batch), self.layout.data
        of_samples = torch.zeros(batch.num_samples).double()
        owners = torch.arange(batch.num_samples).repeat_interleave(batch.starts.diff())
        of_samples.index_add_(0, owners, batch.weights.double() * batch.loss_mask)
        sums = {str(n): float(of_samples[parts == n].sum()) for n in range(self.num_critics)}
        sums = data.reduce("update: weights of each critic", sums, "sum")  # [all]
        found = []
        for (number, weight), critic in zip(sums.items(), self.critics, strict=True):
            if weight:  # the same number on every rank, so the same branch
                own = batch.select((parts == int(number)).nonzero().flatten())
                own.weights = own.weights * (sum(sums.values()) / weight)
                found.append(critic.update(own, loss))  # [all]
        return {name: fmean(metrics[name] for metrics in found) for name in found[0]} if found else {}

    def parts(self, batch: Batch) -> Tensor:
        """The number of the critic that learns from each sample, int64 [S]: a prompt's answers are dealt out to all.

        It follows from the sample's key alone, so it is the same wherever the sample lies.
        """
        return (batch.keys[:, 0] + batch.units) % self.num_critics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `CriticRole`: those of all critics, one after the other, each under its number."""
        for number, critic in enumerate(self.critics):
            yield from ((f"{number}.{name}", tensor) for name, tensor in critic.weights())  # [all]

    def packing_fingerprint(self, batch: Batch) -> Tensor:
        """See `Role`: they are built alike."""
        return self.critics[0].packing_fingerprint(batch)  # [all]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """See `Role`."""
        with ExitStack() as stack:
            for critic in self.critics:
                stack.enter_context(critic.awake())
            yield

    def save(self, folder: Path) -> list[Path]:
        """See `Role`: a folder for each critic."""
        return [path for critic, own in self._folders(folder) for path in critic.save(own)]  # [all]

    def stage(self, folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        """See `Role`."""
        writes = [critic.stage(folder / str(number)) for number, critic in enumerate(self.critics)]  # [all]

        def write(on_progress: Callable[[], object]) -> list[Path]:
            self._folders(folder)
            return [path for one in writes for path in one(on_progress)]

        return write

    def load(self, folder: Path) -> None:
        """See `Role`."""
        for number, critic in enumerate(self.critics):
            critic.load(folder / str(number))  # [all]

    def counters(self) -> dict[str, int]:
        """See `Role`."""
        every = enumerate(self.critics)
        return {f"{number}/{name}": count for number, one in every for name, count in one.counters().items()}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """See `Role`."""
        for number, critic in enumerate(self.critics):
            critic.load_counters({name: counters[f"{number}/{name}"] for name in critic.counters()})

    def close(self) -> None:
        """See `Role`."""
        for critic in self.critics:
            critic.close()

    def _folders(self, folder: Path) -> list[tuple[CriticRole, Path]]:
        """The critics with their folders, which every rank may make."""
        found = [(critic, folder / str(number)) for number, critic in enumerate(self.critics)]
        for _, own in found:
            own.mkdir(exist_ok=True)
        return found
