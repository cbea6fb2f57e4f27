"""Alarms of a run, from its metrics: engine against trainer, entropy, scores that collapse, steps that teach nothing.

They are rules of thumb. Except for `algorithm.bounds`, a run does nothing about them.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, stdev

from spmd_rl.config.sections.algorithm import BoundsConfig
from spmd_rl.track.run_reader import RunData

WINDOW = 5
"""Steps of each mean."""
LOW, HIGH = 0.2, 3.0
"""Alarms if the mean entropy leaves this band of shares of its first mean."""
SIGNIFICANT = 3.0
"""Standard errors by which a score must have fallen."""
SLOW = 3.0
"""Median times after which a step is slow."""


def alarms(run: RunData) -> dict[str, str]:
    """Return the alarms of a run's last step, by name."""
    if not run.lines:
        return {}
    last, entropy = run.lines[-1], _values(run, "actor/entropy")
    given = run.setting("algorithm.bounds") or {}
    found = {"mismatch": "; ".join(BoundsConfig(**given).outside(last).values())}
    if len(entropy) >= 2 * WINDOW:
        first, now = fmean(entropy[:WINDOW]), fmean(entropy[-WINDOW:])
        if not LOW * first <= now <= HIGH * first:
            way = "fell" if now < first else "rose"
            found["entropy"] = f"entropy {way} from {first:.3g} to {now:.3g} nats a token"
    found["collapse"] = _collapse(_values(run, "critic/score/mean"))
    equal = _values(run, "rollout/zero_variance")[-WINDOW:]
    if len(equal) == WINDOW and min(equal) == 1:
        found["no signal"] = f"equal scores in every group of the last {WINDOW} steps, which teach nothing"
    if last.get("actor/skipped"):
        found["skipped"] = f"step {last['step']}: the gradient was not finite, and the update was skipped"
    return {name: text for name, text in found.items() if text}


def _collapse(scores: Sequence[float]) -> str:
    if len(scores) < 2 * WINDOW:
        return ""
    means = [fmean(scores[i : i + WINDOW]) for i in range(len(scores) - WINDOW + 1)]
    # Differences of neighbours have the variance of two scores.
    error = stdev(b - a for a, b in pairwise(scores)) / sqrt(2 * WINDOW)
    best, now = max(means), means[-1]
    if best - now <= max(SIGNIFICANT * error * sqrt(2), (best - means[0]) / 2):
        return ""
    return f"the mean score fell from {best:.3g} to {now:.3g}, over {WINDOW} steps each"


def slow_step(run: RunData, seconds: float) -> str:
    """Describe a running step that takes much longer than earlier ones."""
    times = _values(run, "time/total")
    usual = median(times[-20:]) if len(times) >= WINDOW else 0.0
    return f"the step has run for {seconds:.0f} s, usual are {usual:.0f} s" if 0 < SLOW * usual < seconds else ""


def _values(run: RunData, key: str) -> list[float]:
    return [value for _, value in run.series(key)]
