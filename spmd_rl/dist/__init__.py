"""The world of ranks: meshes, named collectives, the progress journal, and one fate for all when one goes wrong."""

from spmd_rl.dist.journal import Journal
from spmd_rl.dist.solo import solo
from spmd_rl.dist.window import SharedWindow
from spmd_rl.dist.world import World

__all__ = ["Journal", "SharedWindow", "World", "solo"]
