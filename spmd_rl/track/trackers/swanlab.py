"""SwanLab. `track.swanlab=offline` writes `run.dir/swanlab` and needs no account; `swanlab sync` sends it later."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


class SwanLab:
    """A SwanLab experiment, continued under the same id after a resume."""

    def __init__(self, mode: str, run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        import swanlab

        def start() -> Any:
            return swanlab.init(
                project="spmd_rl",
                name=run_dir.name,
                id=run_id,
                resume="allow",
                log_dir=str(run_dir / "swanlab"),
                mode="online" if mode == "cloud" else mode,
                config=dict(settings),
                settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
            )

        # On the main thread it would take SIGINT, which belongs to the world's own thread.
        with ThreadPoolExecutor(1) as pool:
            self._run = pool.submit(start).result()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a finished step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()
