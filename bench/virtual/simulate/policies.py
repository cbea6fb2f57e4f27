"""The policies that are compared, and what a run of one of them came to."""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from bench.virtual.simulate.cluster import Cluster, VirtualStep
from bench.virtual.simulate.scene import Scene

POLICIES: dict[str, dict[str, Any]] = {
    "static batch": {"claim": "static", "over_sample": 0},
    "store": {"over_sample": 0},
    "store, slices": {"over_sample": 0, "answers_per_claim": 1},
    "first finished": {"accept": "first_finished"},
    "first finished, partial": {"accept": "first_finished", "partial_rollout": True},
    "defer": {"tail": "defer"},
}
"""Name -> `rollout.*` settings. The first is what a system does that generates a batch and waits for all of it."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy, over all its steps."""

    policy: str
    replicas: int
    steps: tuple[VirtualStep, ...]
    generate_seconds: float
    """of a step, mean"""
    steps_per_hour: float
    """with `train_seconds` after each"""
    bubble: float
    mean_tokens: float
    """of the answers that train"""
    waiting: int
    """tickets that were started and that no step has used"""
    stale: float
    """share of the answers that train which an older policy began"""
    wasted: float
    """share of the computed tokens that no step has used (what is carried at the end counts)"""
    operations: float
    """of the store, per answer used, without looks"""
    looks: float
    """at the store, per answer used"""


def play(policy: str, scene: Scene, num_steps: int) -> PolicyResult:
    """At least `num_steps` steps; with `tail: defer` on to the end of a long step, to count whole cycles."""
    settings = replace(scene.settings, **POLICIES[policy])
    scene = replace(scene, settings=settings)
    cluster, steps = Cluster(scene), []
    for step in cluster.steps():
        steps.append(step)
        if len(steps) >= num_steps and (step.long or settings.tail != "defer"):
            break
    per_ticket = settings.answers_per_prompt
    lengths = [scene.lengths.of(ticket, per_ticket) for step in steps for ticket in step.trained]
    used = [scene.lengths.of(ticket, per_ticket) for step in steps for ticket in step.used]
    seconds, num_used = sum(step.seconds for step in steps), per_ticket * len(used)
    return PolicyResult(
        policy=policy,
        replicas=scene.replicas,
        steps=tuple(steps),
        generate_seconds=seconds / len(steps),
        steps_per_hour=3600 / (seconds / len(steps) + scene.train_seconds),
        bubble=sum(step.bubble * step.seconds for step in steps) / seconds,
        mean_tokens=fmean(map(fmean, lengths)),
        waiting=len(cluster.cursor.skipped),
        stale=sum(step.num_stale for step in steps) / (per_ticket * len(lengths)),
        wasted=max(0.0, 1 - sum(map(sum, used)) / sum(step.tokens for step in steps)),
        operations=sum(step.operations for step in steps) / num_used,
        looks=sum(step.looks for step in steps) / num_used,
    )
