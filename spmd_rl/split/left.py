"""`LeftSlices`: how ranks that are lent hand on what they have begun when they go to train."""

from collections.abc import Mapping, Sequence

from spmd_rl.rollout.replay_log import PartialRollouts
from spmd_rl.rollout.rounds import GroupSlice
from spmd_rl.split.courier import Courier
from spmd_rl.split.exchange import Exchange
from spmd_rl.split.groups import pack, unpack_partial


class LeftSlices:
    """A `rollout.replay_log.Migration`: slices lie at the exchange of the rank that offers them."""

    def __init__(self, trainers: Sequence[int], courier: Courier, exchange: Exchange | None = None) -> None:
        """trainers: the ranks that train, in order. exchange: this rank's, if it is one of them."""
        self._trainers, self._courier, self._exchange = trainers, courier, exchange
        self.leaves = exchange is not None
        """See `Migration`."""

    def offer(self, partial: Mapping[GroupSlice, PartialRollouts]) -> None:
        """See `Migration`."""
        assert self._exchange is not None, "only a rank that trains leaves"
        self._exchange.leave({tuple(group_slice): pack(answers) for group_slice, answers in partial.items()})

    def claim(self, group_slice: GroupSlice, rank: int) -> PartialRollouts:
        """See `Migration`."""
        return unpack_partial(self._courier.take_slice(self._trainers.index(rank), *group_slice))
