"""The charts of the page: which metrics they draw, if a run has them, and the points of their lines."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from spmd_rl.track.metrics import WARMUP_SCORE
from spmd_rl.track.run_reader import Point, RunData

MAX_POINTS = 300
"""Largest number of points of a line; a longer one is drawn as means of this many equal slices."""


class Chart(NamedTuple):
    """A chart with a line for each metric that a run has."""

    title: str
    note: str
    lines: dict[str, str]
    """Metric -> its name in the legend"""
    colors: tuple[str, ...]
    """of the lines, in their order"""


SCORES = Chart(
    "Mean score",
    "by training step",
    {
        "critic/score/mean": "training",
        "val/score/mean": "held-out, sampled",
        "val/score_greedy/mean": "held-out, greedy",
        WARMUP_SCORE: "warm-up, by demonstrations",
    },
    ("var(--other)", "var(--c1)", "var(--c2)", "var(--c5)"),
)
CHARTS = (
    Chart(
        "Loss",
        "of the step's rows and of held-out ones",
        {
            "sft/loss": "training",
            "dpo/loss": "training",
            "reward_model/loss": "training",
            "val/loss": "held-out",
        },
        ("var(--other)", "var(--other)", "var(--other)", "var(--c1)"),
    ),
    Chart(
        "Accuracy",
        "share of pairs in which the chosen answer has more",
        {"rewards/accuracies": "training", "val/rewards/accuracies": "held-out"},
        ("var(--other)", "var(--c1)"),
    ),
    Chart(
        "Margin",
        "chosen above rejected, mean",
        {"rewards/margins": "training", "val/rewards/margins": "held-out"},
        ("var(--other)", "var(--c1)"),
    ),
    Chart("Differentiable reward", "feedback.reward, mean", {"feedback/reward": "training"}, ("var(--c1)",)),
    Chart("Distance to the teacher", "teacher.loss, per token", {"distill/loss": "distill/loss"}, ("var(--c7)",)),
    Chart("Gradient norm", "before clipping", {"actor/grad_norm": "actor/grad_norm"}, ("var(--c4)",)),
    Chart("Entropy", "nats per sampled token", {"actor/entropy": "actor/entropy"}, ("var(--c3)",)),
    Chart("Answer length", "tokens, mean", {"rollout/response_length/mean": "length"}, ("var(--c1)",)),
    Chart(
        "Engine against trainer",
        "mean |difference| of logprobs",
        {"train_infer/abs_diff/mean": "difference"},
        ("var(--c5)",),
    ),
    Chart("Idle share of generation", "rollout/bubble", {"rollout/bubble": "idle"}, ("var(--c8)",)),
    Chart(
        "Throughput",
        "tokens per second, all ranks",
        {"system/tps": "all tokens", "system/generated_tps": "generated"},
        ("var(--c6)", "var(--c1)"),
    ),
)
"""All charts but that of the scores, in the order of the page"""


def chart_data(run: RunData, chart: Chart) -> dict[str, Any] | None:
    """Return a chart with its lines for the page; None if the run has none of its metrics."""
    lines = [
        # A single line needs no legend.
        {"name": name if len(chart.lines) > 1 else "", "color": color, "points": thin(points)}
        for (key, name), color in zip(chart.lines.items(), chart.colors, strict=True)
        if (points := run.series(key))
    ]
    return {"title": chart.title, "note": chart.note, "lines": lines} if lines else None


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Reduce a series to at most `limit` points, the means of equal slices, with six digits each."""
    if len(points) > limit:
        bounds = [round(i * len(points) / limit) for i in range(limit + 1)]
        slices = [points[a:b] for a, b in pairwise(bounds)]
        points = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in slices]
    return [(round(x, 2), float(f"{y:.6g}")) for x, y in points]
