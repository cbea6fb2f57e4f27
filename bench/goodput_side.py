"""The door on a tiny model whose engine and updates take as long as those of a large one: they sleep beside their work.

    torchrun --nproc-per-node 4 -m bench.goodput_side key=value ...        # started by `goodput.py`

All else is as in a run: checkpoints of weights and optimizer, verdicts, publishes, either placement.
"""

import os
import time
from typing import Any

from spmd_rl import engine, train
from spmd_rl.config import RlvrConfig, main
from spmd_rl.rlvr import run

TOKENS = 20
"""Of an answer."""
LONGER = float(os.environ.get("GOODPUT_LONGER", "1"))
TOKEN_SECONDS = 0.5 * LONGER
TRAIN_SECONDS = 8.0 * LONGER
"""Of an update on all ranks; on fewer it takes longer in proportion."""


def slowly(owner: Any, verb: str, seconds: float) -> None:
    """Let a method of an object sleep before it does its work."""
    work = getattr(owner, verb)

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return work(*arguments, **options)

    setattr(owner, verb, slow)


def slow_engine(*settings: Any, build: Any = engine.build) -> Any:
    """[all] Return the engine of the settings."""
    built = build(*settings)  # [all]
    slowly(built, "step", TOKEN_SECONDS)
    return built


def slow_roles(roles: Any, world: Any, build: Any = train.build_roles) -> Any:
    """[all] Return the roles of the settings."""
    built = build(roles, world)  # [all]
    slowly(built.policy, "update", TRAIN_SECONDS * int(os.environ["WORLD_SIZE"]) / world.size)
    return built


if __name__ == "__main__":
    engine.build, train.build_roles = slow_engine, slow_roles
    main("rlvr", RlvrConfig, run)
