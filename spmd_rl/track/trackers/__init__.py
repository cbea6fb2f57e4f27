"""Trackers: each gets the lines of `metrics.jsonl` on rank 0. By default there are none."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.config.schema import TrackConfig
from spmd_rl.errors import UserError
from spmd_rl.track.trackers.swanlab import SwanLab
from spmd_rl.track.trackers.tensorboard import TensorBoard
from spmd_rl.track.trackers.wandb import Wandb


class Tracker(Protocol):
    """A service or file format that receives metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a finished step."""
        ...

    def close(self) -> None:
        """Send what is buffered."""
        ...


def check(cfg: TrackConfig) -> None:
    """Raise a `UserError` where the package of a chosen tracker is not installed."""
    chosen = {"wandb": cfg.wandb != "off", "tensorboard": cfg.tensorboard, "swanlab": cfg.swanlab != "off"}
    for name, wanted in chosen.items():
        if wanted and find_spec(name) is None:
            raise UserError(f"track.{name} needs a package that is not installed: pip install 'spmd-rl[{name}]'")


def open_trackers(
    cfg: TrackConfig, run_dir: Path, run_id: str, first_step: int, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Open the chosen trackers. `run_id` stays the same after a resume, which begins with `first_step`."""
    trackers: list[Tracker] = []
    if cfg.wandb != "off":
        trackers.append(Wandb(cfg.wandb, run_dir, run_id, settings))
    if cfg.tensorboard:
        trackers.append(TensorBoard(run_dir, first_step))
    if cfg.swanlab != "off":
        trackers.append(SwanLab(cfg.swanlab, run_dir, run_id, settings))
    return trackers
