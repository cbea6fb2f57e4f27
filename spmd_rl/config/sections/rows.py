"""Rows with written answers, and their held-out loss: `data`, `eval` of supervised pipelines."""

from dataclasses import dataclass

from spmd_rl.config.sections.data import COMMON, NO_DATA, SourcesConfig
from spmd_rl.config.values import at_least, one_of


@dataclass
class RowsConfig(SourcesConfig):
    """Rows of a supervised run: `data` (docs/SUPERVISED.md)."""

    known_keys = ("messages", "prompt", "completion", "text", *COMMON)
    no_data = NO_DATA.format(
        what="sums", demo="demo_sft", rows="rows", line="data.train=rows.jsonl", page="SUPERVISED.md"
    )

    holdout: float = 0.05
    """Share of `train` to hold out, by content hash, without `eval`. 0: train on all, evaluate none."""
    rows_per_step: int = 32
    """Rows per step. Each epoch has all rows once, in a new order."""
    max_tokens: int = 1024
    """Token limit of a row, prompt and answers together."""
    overlong: str = "drop"
    """Treatment of rows beyond `max_tokens`: `drop` (counted in `data/overlong`), `cut` (the end) or `error`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, rows_per_step=1, max_tokens=2)
        one_of(self, overlong=("drop", "cut", "error"))


@dataclass
class ValidationConfig:
    """The loss on held-out rows: `eval`."""

    every: int = 10
    """Steps between evaluations, also before the first step and after the last. 0: none."""
    rows: int | None = None
    """Held-out rows to evaluate, always the same. Default: all."""

    def __post_init__(self) -> None:
        at_least(self, every=0, rows=1)

    def is_due(self, step: int, steps: int) -> bool:
        """Return True if an evaluation follows `step`."""
        return bool(self.every) and (step % self.every == 0 or step == steps)
