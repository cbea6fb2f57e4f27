"""`StepUnderWay`: a step between its first slice and its end, which a replica may leave once and come back to.

Where it is left (`Rollouts.begin`), its engine holds nothing: what is under way waits for verdicts and environments.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.rollout.claims import Claim
from spmd_rl.rollout.coordinator import Coordinator
from spmd_rl.rollout.engine_loop import EngineLoop
from spmd_rl.rollout.swap import Swap


@dataclass(slots=True)
class StepUnderWay:
    """What a replica knows of the step that it generates, and what the step has cost it so far."""

    number: int
    coordinator: Coordinator
    claim: Claim
    swap: Swap | None = None
    """A policy that may come meanwhile."""
    seconds: float = 0.0
    """At work on it, with the waits for verdicts."""
    idle_seconds: float = 0.0
    """Those in which the engine had nothing to compute."""
    num_asked: int = 0
    """Prompt tokens; see `PromptTokens`."""
    num_cached: int = 0
    left_at: float | None = None
    """By `time.perf_counter`, where it was begun ahead of its step."""
    overlap_seconds: float = 0.0
    """For which it was left."""
    idle_ahead: float = 0.0
    """The idle seconds before that."""

    def leave(self) -> None:
        """Turn to other work, while verdicts and replies of environments come in."""
        self.left_at, self.idle_ahead = time.perf_counter(), self.idle_seconds

    def come_back(self) -> None:
        """Go on with it, whether it was left or has just begun."""
        if self.left_at is not None:
            self.overlap_seconds = time.perf_counter() - self.left_at

    def pace(self, lags: np.ndarray, world: World) -> dict[str, float]:
        """[all] Return how well waiting was hidden, and `lags`, of all answers; nothing where it never was left."""
        if self.left_at is None:  # alike on all ranks
            return {}
        seconds = {
            "placement/overlap_seconds": self.overlap_seconds,
            "placement/overlap_wait_seconds": self.idle_seconds - self.idle_ahead,
        }
        return {**world.reduce("generate: overlap", seconds, "max"), "rollout/lag/max": float(lags.max(initial=0))}

    @contextmanager
    def driven(self, engine: Engine, engine_loop: EngineLoop) -> Iterator[None]:
        """[all] ranks of the replica: drive its engine; what is spent inside is this step's."""
        began, engine_loop.idle_seconds = time.perf_counter(), 0.0
        tokens = engine.prompt_tokens
        tokens.asked = tokens.cached = 0
        with engine.driven(self.swap.join if self.swap else None):
            yield
        self.seconds += time.perf_counter() - began
        self.idle_seconds += engine_loop.idle_seconds
        self.num_asked += tokens.asked
        self.num_cached += tokens.cached
