"""The progress of a run on rank 0's stderr: one line a step, and a progress bar if stderr is a terminal."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_COLUMNS = (
    ("score", "critic/score/mean", "{:.3f}"),
    ("val", "val/score/mean", "{:.3f}"),
    ("greedy", "val/score_greedy/mean", "{:.3f}"),
    ("grad_norm", "actor/grad_norm", "{:.3g}"),
    ("length", "rollout/response_length/mean", "{:.1f}"),
    ("tokens/s", "system/tokens_per_s", "{:.0f}"),
    ("seconds", "time/total", "{:.1f}"),
)


class ProgressLine:
    """Prints plain lines where stderr is a file or a debugger may stop the program, else uses rich's live display."""

    def __init__(self, num_steps: int, live: bool) -> None:
        self._num_steps = num_steps
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = self._start_bar() if live and self._console.is_terminal else None

    def show(self, step: int, values: Mapping[str, float | None]) -> None:
        """Show a finished step."""
        line = describe(step, self._num_steps, values)
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(line)
            self._bar.update(self._bar.task_ids[0], completed=step)

    def close(self) -> None:
        """Restore the terminal. It may be called more than once."""
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self) -> Progress:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console, transient=True)
        bar.add_task("training", total=self._num_steps)
        bar.start()
        return bar


def describe(step: int, num_steps: int, values: Mapping[str, float | None]) -> str:
    """Describe a step in one line.

    Example: `14:02:11  step  3/12  score 0.412  val 0.350  greedy 0.812  grad_norm 0.81  seconds 12.3`.
    """
    shown = [f"{name} {form.format(values[key])}" for name, key, form in _COLUMNS if values.get(key) is not None]
    width = len(str(num_steps))
    return "  ".join([time.strftime("%H:%M:%S"), f"step {step:{width}d}/{num_steps}", *shown])
