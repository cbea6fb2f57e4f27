"""`LeftSlices`: how ranks that are lent hand on what they have begun when they go to train."""

from collections.abc import Mapping, Sequence

from spmd_rl.rollout.rounds import GroupSlice
from spmd_rl.rollout.tape import Begun
from spmd_rl.split.courier import Courier
from spmd_rl.split.exchange import Exchange
from spmd_rl.split.groups import pack, unpack_begun


class LeftSlices:
    """A `rollout.Handover`: it lies at the exchange of the rank that has left it, until somebody takes it."""

    def __init__(self, trainers: Sequence[int], courier: Courier, exchange: Exchange | None = None) -> None:
        """trainers: the ranks that train, in order. exchange: this rank's, if it is one of them."""
        self._trainers, self._courier, self._exchange = trainers, courier, exchange

    def leave(self, begun: Mapping[GroupSlice, Begun]) -> None:
        """See `rollout.Handover`."""
        assert self._exchange is not None, "only a rank that trains leaves"
        self._exchange.leave({tuple(group_slice): pack(answers) for group_slice, answers in begun.items()})

    def take(self, group_slice: GroupSlice, rank: int) -> Begun:
        """See `rollout.Handover`."""
        return unpack_begun(self._courier.take_slice(self._trainers.index(rank), *group_slice))
