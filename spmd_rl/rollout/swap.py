"""`Swap`: a newer policy that a replica may take in the middle of its answers, and what it must wait for."""

from typing import Protocol


class Swap(Protocol):
    """Asked between two steps of the engine, by the first rank of a replica."""

    keeps_cache: bool
    """Whether answers under way go on with the keys and values that the older policy computed. If not, the engine is
    emptied before `load`, and what they have is computed again."""

    def due(self) -> bool:
        """Return whether a newer policy is here and may be loaded; cheap, for it is asked very often."""
        ...

    def load(self) -> None:
        """Give it to the engine."""
        ...

    def join(self, message: bytes) -> None:
        """Do, on any other rank of the replica, what the first one does in `load`; see `Engine.joined`."""
        ...

    def may_start(self, position: int) -> bool:
        """Return whether the engine's policy is young enough for the ticket at this position of the step's order."""
        ...
