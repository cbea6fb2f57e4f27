"""Where some ranks train while others generate (`placement.mode=split`): what passes between the two sides.

Weights go one way and finished groups the other, and neither side meets the other in a collective once the run has
begun: each training rank keeps a part of the newest weights, and of what has been generated, in memory and serves them
over ZMQ; each generating rank fetches and delivers when it is ready. How far generation may run ahead is a rule of
numbers alone (`pace`).

    training rank:    Exchange (a thread that serves) <- weights.Served, HandedOver
    generating rank:  Courier (which asks it)         <- Generator

Where jobs of their own generate (`placement.generate=attached`), which may die and come back, the same parts know it:

    training rank:    CrewExchange, on the first with a Desk   <- weights.Served, HandedIn
    attached rank:    CrewCourier, Link                        <- Crew
"""

from spmd_rl.split.attached import HandedIn, serve_attached
from spmd_rl.split.crew import Crew, attach
from spmd_rl.split.generator import Generator
from spmd_rl.split.handed_over import HandedOver
from spmd_rl.split.lent import Lent
from spmd_rl.split.sides import meet

__all__ = [
    "Crew",
    "Generator",
    "HandedIn",
    "HandedOver",
    "Lent",
    "attach",
    "meet",
    "serve_attached",
]
