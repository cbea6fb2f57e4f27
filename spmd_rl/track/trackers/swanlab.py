"""SwanLab. `track.swanlab=offline` writes `run.dir/swanlab` and needs no account."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SwanLab:
    """One SwanLab experiment, continued under the same id after a resume where its server knows it."""

    def __init__(self, mode: str, run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        import swanlab

        resume = {"id": run_id, "resume": "allow"} if mode == "cloud" else {}
        self._run = swanlab.init(
            project="spmd_rl",
            experiment_name=run_dir.name,
            logdir=str(run_dir / "swanlab"),
            mode=mode,
            config=dict(settings),
            **resume,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One finished step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Hand over what is buffered."""
        self._run.finish()
