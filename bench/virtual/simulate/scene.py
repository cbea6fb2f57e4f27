"""What a simulated run is about: the settings, how long answers get, and how long everything takes."""

from dataclasses import dataclass, field

from bench.virtual.simulate.engine import Speed
from bench.virtual.simulate.lengths import Lengths
from spmd_rl.config.schema import RolloutConfig
from spmd_rl.data.seeds import counter_seed
from spmd_rl.rollout.step_plan import GroupSlice


@dataclass(frozen=True, slots=True)
class Scene:
    """The same for all policies that are compared, but for `settings`."""

    settings: RolloutConfig
    lengths: Lengths
    replicas: int
    speed: Speed = field(default_factory=Speed)
    max_running: int = 64
    """requests that an engine runs at once"""
    verdict_seconds: float = 0.0
    """from an answer's last token to its verdict"""
    train_seconds: float = 0.0
    """of a step, in which nobody generates"""
    qualify: float = 1.0
    """share of the tickets that qualify for training, whatever their length"""
    seed: int = 0

    def answers(self, group_slice: GroupSlice) -> dict[int, int]:
        """Return answer -> tokens."""
        first, size = group_slice.number * self.settings.slice_size, self.settings.slice_size
        lengths = self.lengths.of(group_slice.ticket, self.settings.answers_per_prompt)
        return dict(enumerate(lengths[first : first + size], first))

    def qualifies(self, ticket: int) -> bool:
        """Whether the ticket's group trains."""
        return self.qualify >= 1 or counter_seed(self.seed, "qualifies", ticket) < self.qualify * 2**64
