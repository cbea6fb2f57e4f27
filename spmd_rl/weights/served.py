"""`Served`: the transport to engines of other processes, which fetch a version when they are ready.

The ranks that train share out the tensors, so that no rank holds more than its part of a copy. What is announced, once
all of them have theirs, is the version's number, how many tensors it has, and a digest over all of them.
"""

from collections.abc import Callable, Iterator

import torch
import xxhash
from torch import Tensor

from spmd_rl.distributed import World
from spmd_rl.train.base import Metrics
from spmd_rl.weights import messages, probe
from spmd_rl.weights.staged import Staged, StagedWeights, with_delta
from spmd_rl.weights.transport import Transport


class Served(Transport):
    """While a publish is probed, training waits for the engines' answers."""

    def __init__(
        self,
        staged: StagedWeights,
        world: World,
        announce: Callable[[messages.Announcement], object],
        answers: Callable[[int], dict[int, list[probe.Answer]]],
        deltas: bool,
    ) -> None:
        """announce: on the first rank of `world`, lets those that fetch know of a version. deltas: see `PublishConfig`.

        answers: [all] waits for what engines answer to the probe of a version, by their numbers; each one's comes to
        one rank.
        """
        self._staged, self._world, self._announce, self._answers = staged, world, announce, answers
        self._deltas, self._base = deltas, None
        """The version that was staged last, where deltas are made."""
        self._pieces: dict[int, Staged] = {}
        """This rank's share of the version that was sent last."""
        self._num_tensors, self._digest = 0, b""

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """See `Transport`: copies this rank's share."""
        before, self._pieces = self._pieces if self._deltas else {}, {}
        whole, self._num_tensors = xxhash.xxh3_128(), 0
        for index, (name, tensor) in enumerate(weights):  # [all]
            payload = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            digest = messages.digest(payload)
            whole.update(name.encode() + digest)
            self._num_tensors = index + 1
            if index % self._world.size == self._world.rank:
                dtype = str(tensor.dtype).removeprefix("torch.")
                piece = Staged(name, dtype, list(tensor.shape), memoryview(bytes(payload)), digest)
                self._pieces[index] = with_delta(piece, before.get(index))
            yield name, tensor
        self._digest = whole.digest()

    def announce(self, version: int, probed: bool, num_bytes: int) -> Metrics:
        """See `Transport`.

        Where there are deltas: `publish/delta_bytes`, which a generating rank with the version before fetches instead,
        and their share, `publish/delta_share`.
        """
        waiting = self._world.journal.waiting("publish: an older version is fetched")
        self._staged.stage(version, self._pieces, self._base, waiting)
        pieces = self._pieces.values()
        sizes = {"sent": sum(len(piece.delta.payload) if piece.delta else piece.payload.nbytes for piece in pieces)}
        sent = self._world.reduce("publish: staged", sizes)["sent"]  # [all] now all ranks have their share
        if self._world.rank == 0:
            self._announce(messages.Announcement(version, self._num_tensors, self._digest, probed))
        has_deltas = self._base is not None
        if self._deltas:
            self._base = messages.Base(version, self._digest)
        return {"publish/delta_bytes": sent, "publish/delta_share": sent / max(num_bytes, 1)} if has_deltas else {}

    def probe(self, version: int) -> tuple[dict[str, list[probe.Answer]], str]:
        """See `Transport`."""
        parts = sorted(self._answers(version).items())  # [all]
        return {f"generating rank {number}": answers for number, answers in parts}, ""
