"""What attached jobs and training ranks say to each other, beside what passes between ranks of one job (`messages`).

An attached rank asks, a training rank answers; a payload, if there is one, is a second frame, whose digest the header
holds.
"""

from typing import Annotated, Literal

import msgspec

from spmd_rl import wire
from spmd_rl.weights.messages import REPLIES, REQUESTS, Digest

Kind = Literal["step", "eval", "probe"]
Place = Annotated[list[wire.Id], msgspec.Meta(max_length=2)]


class Hello(wire.WireMessage, tag=20):
    """Ask what the training job is; answered with `Welcome`."""


class Welcome(wire.WireMessage, tag=21):
    """What an attached job must have in common with the training job, and where its ranks are."""

    values: dict[str, str]
    """Settings, versions of packages, and a digest of the data, by name."""
    addresses: list[str]
    """Of the exchanges of all training ranks."""
    lease_seconds: float


class Join(wire.WireMessage, tag=22):
    """Ask for a place; answered with `Joined`."""

    name: wire.Name
    leads: bool
    """Whether the sender is the first rank of its replica."""


class Joined(wire.WireMessage, tag=23):
    """A place: by this number the sender is known from now on."""

    member: wire.Id


class Beat(wire.WireMessage, tag=24):
    """Say that the sender lives; answered with `News`. To all training ranks."""

    member: wire.Id
    progress: wire.Id
    ready: bool


class News(wire.WireMessage, tag=25):
    """How things stand."""

    known: bool
    """Whether the training job still counts on the sender."""
    step: int = 0
    """The step that is open; 0: none. Only of the first training rank, like all that follows."""
    oldest: int = 0
    """The oldest version that may generate for it."""
    newest: bytes | None = None
    """The `Announcement` of the newest version."""
    asked: bool = False
    """Whether held-out prompts wait for answers by the newest version."""
    over: bool = False
    """Whether the run has come to its end."""
    pause: float = 0.1
    """Seconds until the next beat."""


class Claim(wire.WireMessage, tag=26):
    """Ask for something to do; answered with `Claimed`."""

    member: wire.Id
    kind: Kind
    number: wire.Id
    """The step, or the version that is evaluated."""
    version: wire.Id
    """What the sender has loaded."""
    room: wire.Id


class Claimed(wire.WireMessage, tag=27):
    """What the sender shall do."""

    known: bool
    ended: bool
    places: list[Place]


class Deposit(wire.WireMessage, tag=28):
    """Leave a finished piece with the training rank that shall hold it; answered with `Kept`. Its bytes follow."""

    member: wire.Id
    kind: Kind
    number: wire.Id
    place: Place
    digest: Digest


class Kept(wire.WireMessage, tag=29):
    """Whether the piece has arrived, whole."""

    whole: bool


class Report(wire.WireMessage, tag=30):
    """Say that a piece is done and deposited; answered with `Reported`. What is said of it follows."""

    member: wire.Id
    kind: Kind
    number: wire.Id
    place: Place
    digest: Digest


class Reported(wire.WireMessage, tag=31):
    """Whether the piece counts."""

    known: bool
    accepted: bool


class Leave(wire.WireMessage, tag=32):
    """Say that the sender does nothing more; not answered."""

    member: wire.Id


class Missing(wire.WireMessage, tag=33):
    """The answer to a `FetchPiece` of a version that is not kept here any more, and to a `Hold` of who was silent."""

    version: wire.Id


FROM_CREW = wire.Codec(*REQUESTS, Hello, Join, Beat, Claim, Deposit, Report, Leave)
TO_CREW = wire.Codec(*REPLIES, Welcome, Joined, News, Claimed, Kept, Reported, Missing)
