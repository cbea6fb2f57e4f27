"""`Courier`: a generating rank's connections to all training ranks, to fetch weights and deliver what it has made."""

from spmd_rl.errors import RunFailed
from spmd_rl.split import messages
from spmd_rl.weights.client import WeightClient
from spmd_rl.weights.messages import digest


class Courier(WeightClient):
    """A `WeightClient` that also delivers."""

    codec = messages.TO_GENERATOR

    @property
    def holder(self) -> int:
        """Index of the training rank to which this rank delivers."""
        return self.sender % self.num_trainers

    def deliver(self, kind: str, number: int, payload: bytes) -> None:
        """Hand over to the training rank `holder`; returns once it is there."""
        self.send(self.holder, messages.Delivery(kind, number, self.sender, digest(payload)), payload)
        self.receive(self.holder, messages.Received)

    def take_slice(self, trainer: int, ticket: int, number: int) -> memoryview:
        """Return what a training rank, by its index, has begun of a slice. RunFailed if it arrives damaged."""
        self.send(trainer, messages.TakeSlice(ticket, number))
        header, payload = self.receive(trainer, messages.LeftSlice)
        if (header.ticket, header.number) != (ticket, number) or digest(payload) != header.digest:
            raise RunFailed(f"what training rank {trainer} had begun of ticket {ticket} arrived damaged")
        return payload
