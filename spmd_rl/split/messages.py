"""What generating and training ranks say to each other beside weights (`weights.messages`), in the same form.

A generating rank asks, a training rank answers. A payload, if there is one, is a second frame. What a training rank
hands out that must come back unchanged, it signs (`seal`).
"""

from typing import Annotated, Literal

import msgspec

from spmd_rl.sidecar import wire
from spmd_rl.weights.messages import REPLIES, REQUESTS, Digest, FromMember, Secret

Kind = Literal["step", "eval", "probe"]
Place = Annotated[list[wire.Id], msgspec.Meta(max_length=2)]
"""Which piece of a work: (ticket, slice), (prompt,), or () of a probe."""
Signature = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Measured = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Counted = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Hello(wire.WireMessage, tag=20):
    """Ask what the training job is; answered with `Welcome` where jobs attach."""


class Welcome(wire.WireMessage, tag=21):
    """What an attached job must have in common with the training job, and where its ranks are."""

    values: dict[str, str]
    """Settings, versions of packages, and a digest of the data, by name."""
    addresses: list[str]
    """Of the servers of all training ranks."""
    lease_seconds: float


class Join(wire.WireMessage, tag=22):
    """Ask to be a member; answered with `Joined` where jobs attach and there is room."""

    name: wire.Name
    leads: bool
    """Whether the sender is the first rank of its replica."""


class Joined(wire.WireMessage, tag=23):
    """The sender is a member: by this number and this secret it is known from now on."""

    member: wire.Id
    secret: Secret


class Beat(FromMember, tag=24):
    """Say that the sender lives; answered with `News`. To all training ranks."""

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


class ClaimRequest(FromMember, tag=26):
    """Ask for something to do; answered with `ClaimReply`."""

    kind: Kind
    number: wire.Id
    """The step, or the version that is evaluated."""
    version: wire.Id
    """What the sender has loaded."""
    room: wire.Id


class Claimed(wire.WireMessage):
    """A piece that the sender shall do."""

    place: Place
    claim: wire.Id
    """The number of this claim, later ones are larger."""
    signature: Signature
    begun_by: wire.Id | None = None
    """The member that has begun it and left it; see `TakeBegun`."""


class ClaimReply(wire.WireMessage, tag=27):
    """What the sender shall do."""

    known: bool
    ended: bool
    pieces: list[Claimed]


class AboutPiece(FromMember):
    """What a message about a piece begins with: which it is, in the words of the claim."""

    kind: Kind
    number: wire.Id
    place: Place


class Deposit(AboutPiece, tag=28):
    """Leave a piece with the training rank that shall hold it; answered with `Deposited`. Its bytes follow."""

    claim: wire.Id
    signature: Signature
    """Of the claim; of a probe, which nobody claims, the secret."""
    digest: Digest
    begun: bool = False
    """Whether it is no finished piece but one that others shall go on with."""


class Deposited(wire.WireMessage, tag=29):
    """What became of it; what is reported of the piece follows."""

    state: Literal["kept", "late", "refused"]
    """`late`: it would count no more."""
    signature: Signature
    """Of the report."""
    why: str = ""


class Stats(wire.WireMessage):
    """How a member's engine fared since it began a step."""

    idle_seconds: Measured = 0.0
    seconds: Measured = 1e-9
    token_counts: tuple[Counted, Counted, Counted, Counted] = (0, 0, 0, 0)
    """See `RankReport`."""
    waited: Measured = 0.0
    """Seconds in which it waited for a newer policy before it began the step."""
    num_swaps: Counted = 0
    swap_seconds: Measured = 0.0
    """Of changes of the policy in the middle of the step."""


class Report(AboutPiece, tag=30):
    """Say that a piece is done and deposited; answered with `Reported`. What `Deposited` said of it follows."""

    signature: Signature
    stats: Stats


class Reported(wire.WireMessage, tag=31):
    """Whether the piece counts, or is given back."""

    known: bool
    accepted: bool
    step: wire.Id
    """The step that is open."""


class GiveBack(AboutPiece, tag=34):
    """Say that the sender does a piece no more; answered with `Reported`."""

    begun: bool
    """Whether what it has of it is deposited for others to go on with."""


class TakeBegun(FromMember, tag=35):
    """Ask for what was begun of a slice; answered with `Begun`, and its bytes follow."""

    place: Place


class Begun(wire.WireMessage, tag=36):
    """What was begun of a slice; its bytes follow, none if it is not here."""

    place: Place
    digest: Digest


class Leave(FromMember, tag=32):
    """Say that the sender does nothing more; not answered."""


FROM_MEMBERS = wire.Codec(*REQUESTS, Hello, Join, Beat, ClaimRequest, Deposit, Report, GiveBack, TakeBegun, Leave)
TO_MEMBERS = wire.Codec(*REPLIES, Welcome, Joined, News, ClaimReply, Deposited, Reported, Begun)
