"""Experiment trackers, which get each line of `metrics.jsonl` on rank 0. By default there are none.

`track.wandb=offline` and `track.swanlab=offline` need no account: `wandb sync` and `swanlab sync` send `run.dir/wandb`
and `run.dir/swanlab` later. `tensorboard --logdir RUN_DIR/tensorboard` shows TensorBoard's event files.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.config.schema import TrackConfig
from spmd_rl.errors import UserError


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


class Wandb:
    """A Weights & Biases run, continued under the same id after a resume."""

    def __init__(self, mode: str, run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project="spmd_rl",
            name=run_dir.name,
            id=run_id,
            resume="allow",
            dir=run_dir,
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a finished step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()


class SwanLab:
    """A SwanLab experiment, continued under the same id after a resume."""

    def __init__(self, mode: str, run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        import swanlab

        options = {
            "project": "spmd_rl",
            "name": run_dir.name,
            "id": run_id,
            "resume": "allow",
            "log_dir": str(run_dir / "swanlab"),
            "mode": "online" if mode == "cloud" else mode,
            "config": dict(settings),
            "settings": swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        }
        # On the main thread it would take SIGINT, which belongs to the world's own thread.
        with ThreadPoolExecutor(1) as pool:
            self._run = pool.submit(swanlab.init, **options).result()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a finished step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()


class TensorBoard:
    """TensorBoard event files; a resume hides what an earlier process wrote from its first step on."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a finished step."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Send what is buffered."""
        self._writer.close()
