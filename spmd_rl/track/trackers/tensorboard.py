"""TensorBoard event files: `tensorboard --logdir RUN_DIR/tensorboard`."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Scalars under their own names; a resume hides what an earlier start wrote from its first step on."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One finished step."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Hand over what is buffered."""
        self._writer.close()
