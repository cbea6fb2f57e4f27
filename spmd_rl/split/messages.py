"""What generating and training ranks send each other beside weights (`weights.messages`), in the same form."""

from spmd_rl import wire
from spmd_rl.weights.messages import REPLIES, REQUESTS, Digest


class Delivery(wire.WireMessage, tag=5):
    """Hand over what was generated; answered with `Received`. Its bytes follow."""

    kind: wire.Name
    """`step`, `eval` or `probe`."""
    number: wire.Id
    """The step, or the version."""
    sender: wire.Id
    """Index of the generating rank."""
    digest: Digest


class Received(wire.WireMessage, tag=6):
    """A delivery has arrived, whole, and the training rank holds it."""

    kind: wire.Name
    number: wire.Id


class TakeSlice(wire.WireMessage, tag=8):
    """Ask for what this rank has begun of a slice and left to others; answered with a `LeftSlice` and its bytes."""

    ticket: wire.Id
    number: wire.Id


class LeftSlice(wire.WireMessage, tag=9):
    """What was begun of a slice; its bytes follow."""

    ticket: wire.Id
    number: wire.Id
    digest: Digest


TO_TRAINER = wire.Codec(*REQUESTS, Delivery, TakeSlice)
TO_GENERATOR = wire.Codec(*REPLIES, Received, LeftSlice)
