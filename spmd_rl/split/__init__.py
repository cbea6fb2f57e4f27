"""Where some ranks train while others generate: what passes between the two sides, which meet in no collective.

Weights go one way and finished pieces the other: each training rank keeps a part of the newest weights, and of what has
been generated, in memory and serves them over ZMQ; each generating rank fetches, claims and hands in when it is ready.
It may be a rank of the same job, or of one that attaches and may die and come back. How far generation may run ahead is
a rule of numbers alone (`pace`).

    training rank:    TrainerServer (a thread), on the first with the WorkQueue   <- weights.Served, RemoteRollouts
    generating rank:  TrainerClient (which asks it), MemberLink (which beats)           <- Generator, Lent
"""

from spmd_rl.split.generator import Generator
from spmd_rl.split.lent import Lent
from spmd_rl.split.pieces import PieceRules
from spmd_rl.split.remote import RemoteRollouts
from spmd_rl.split.sides import GenerateSide, TrainSide, meet

__all__ = [
    "GenerateSide",
    "Generator",
    "Lent",
    "PieceRules",
    "RemoteRollouts",
    "TrainSide",
    "meet",
]
