"""Rows with written answers, and the loss on held-out ones: `data`, `eval` of supervised pipelines."""

from dataclasses import dataclass

from spmd_rl.config.sections.data import COMMON, NO_DATA, SourcesConfig
from spmd_rl.config.values import at_least, one_of


@dataclass
class RowsConfig(SourcesConfig):
    """The rows of a supervised run: `data`. docs/SUPERVISED.md has their forms."""

    known_keys = ("messages", "prompt", "completion", "text", *COMMON)
    no_data = NO_DATA.format(
        what="sums", demo="demo_sft", rows="rows", line="data.train=rows.jsonl", page="SUPERVISED.md"
    )

    holdout: float = 0.05
    """Share of `train` that is held out, by content hash, when `eval` is not given. 0: all rows are trained on, and
    nothing is evaluated.
    """
    rows_per_step: int = 32
    """Number of rows that a step trains on. Each epoch has all rows once, in a new order."""
    max_tokens: int = 1024
    """Token limit of a row, prompt and answers together."""
    overlong: str = "drop"
    """Treatment of rows longer than `max_tokens`: `drop` (`data/overlong` counts them), `cut` (their end is left out)
    or `error`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, rows_per_step=1, max_tokens=2)
        one_of(self, overlong=("drop", "cut", "error"))


@dataclass
class ValidationConfig:
    """The loss on held-out rows: `eval`."""

    every: int = 10
    """Number of steps between evaluations, with one before the first step and one after the last too. 0: no
    evaluations.
    """
    rows: int | None = None
    """Number of held-out rows that are evaluated, the same ones each time. Default: all."""

    def __post_init__(self) -> None:
        at_least(self, every=0, rows=1)

    def is_due(self, step: int, steps: int) -> bool:
        """Return True if there is an evaluation after `step` of `steps`."""
        return bool(self.every) and (step % self.every == 0 or step == steps)
