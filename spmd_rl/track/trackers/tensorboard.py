"""TensorBoard event files: `tensorboard --logdir RUN_DIR/tensorboard`."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Writes scalars under their own names; a resume hides what an earlier process wrote from its first step on."""

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
