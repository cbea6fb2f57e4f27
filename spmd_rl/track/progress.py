"""The progress of a run on rank 0's stderr: one line a step."""

import time
from collections.abc import Mapping

_COLUMNS = (
    ("score", "critic/score/mean", "{:.3f}"),
    ("val", "val/score/mean", "{:.3f}"),
    ("greedy", "val/score_greedy/mean", "{:.3f}"),
    ("grad_norm", "actor/grad_norm", "{:.3g}"),
    ("length", "rollout/response_length/mean", "{:.1f}"),
    ("tokens/s", "system/tokens_per_s", "{:.0f}"),
    ("seconds", "time/total", "{:.1f}"),
)


def describe(step: int, num_steps: int, values: Mapping[str, float | None]) -> str:
    """Describe a step in one line.

    Example: `14:02:11  step  3/12  score 0.412  val 0.350  greedy 0.812  grad_norm 0.81  seconds 12.3`.
    """
    shown = [f"{name} {form.format(values[key])}" for name, key, form in _COLUMNS if values.get(key) is not None]
    width = len(str(num_steps))
    return "  ".join([time.strftime("%H:%M:%S"), f"step {step:{width}d}/{num_steps}", *shown])
