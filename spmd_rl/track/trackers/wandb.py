"""Weights & Biases. `track.wandb=offline` writes `run.dir/wandb` and needs no account; `wandb sync` sends it later."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Wandb:
    """A wandb run, continued under the same id after a resume."""

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
