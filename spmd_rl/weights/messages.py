"""What ranks that fetch weights and ranks that keep them send each other; who fetches asks, and who keeps answers.

A message has one or two frames: the header (`wire.encode`), and maybe a payload, bytes whose digest the header holds.
"""

from typing import Annotated, NamedTuple

import msgspec
import xxhash

from spmd_rl.sidecar import wire

Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


Secret = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class MemberId(NamedTuple):
    """What a rank that fetches is known by."""

    member: int
    secret: bytes
    """Nobody who has not been given it can guess it."""


class FromMember(wire.WireMessage):
    """What each message of such a rank begins with; who is not a member gets no answer."""

    member: wire.Id
    secret: Secret


class Base(msgspec.Struct, array_like=True, frozen=True):
    """A version of the weights that a generating rank has."""

    version: wire.Id
    digest: Digest
    """The digest of all its tensors, as it was announced."""


class Hold(FromMember, tag=1):
    """Say that the sender will fetch a version, which must stay until it has; answered with `HoldReply`."""

    version: wire.Id
    base: Base | None
    """What the sender has already, of which it can take deltas."""


class HoldReply(wire.WireMessage, tag=2):
    """Whether the version is kept here."""

    version: wire.Id
    kept: bool
    deltas: bool
    """Whether deltas of the sender's base, to the bit, are kept with it."""


class FetchTensor(FromMember, tag=3):
    """Ask for one tensor of a version of the weights; answered with a `TensorMessage` and its bytes, or with `Missing`.

    Only between `Hold` and `Release`."""

    version: wire.Id
    index: wire.Id
    """The tensor's place among all weights, in the order of the trainer's stream."""
    delta: bool
    """Whether a delta will do, where it is smaller; only after `HoldReply.deltas`."""


class TensorMessage(wire.WireMessage, tag=4):
    """One tensor of the weights; its bytes follow."""

    version: wire.Id
    index: wire.Id
    name: str
    """The checkpoint's name of it."""
    dtype: str
    shape: list[int]
    digest: Digest
    """xxh3-128 of the payload."""
    whole: Digest
    """xxh3-128 of the tensor's bytes: another where the payload is a delta."""
    base: Digest | None
    """Where the payload is a delta (`weights.delta`): xxh3-128 of the tensor's bytes in the sender's base."""


class Release(FromMember, tag=7):
    """Say that a version which the sender holds need not be kept for it any longer; not answered."""

    version: wire.Id


class Missing(wire.WireMessage, tag=8):
    """The version is not held for the sender: it is not here, or was not fetched in time."""

    version: wire.Id


REQUESTS = (Hold, FetchTensor, Release)
REPLIES = (HoldReply, TensorMessage, Missing)


class Announcement(msgspec.Struct, array_like=True):
    """What is published of a version that can be fetched."""

    version: int
    num_tensors: int
    digest: bytes
    """The digest of the digests of all tensors, in order."""
    probed: bool
    """Whether the trainer waits for answers of engines that have loaded it."""


def digest(payload: bytes | memoryview) -> bytes:
    """Return the 16 bytes that a header says of its payload."""
    return xxhash.xxh3_128_digest(payload)
