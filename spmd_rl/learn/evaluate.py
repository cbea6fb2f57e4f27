"""Held-out evaluation: a few sampled answers and one greedy answer for each prompt, dealt over the ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn.sample_log import held_out
from spmd_rl.rollout import Sampling, mean_parts, sum_parts
from spmd_rl.track.samples import SampleRow
from spmd_rl.types import Group, Prompt

Log = Callable[[int, Iterable[SampleRow]], None]


class Answers(Protocol):
    """Who answers: the `Rollouts` of this rank, or what generating ranks hand over to it."""

    prompts: Any
    """`eval`: the held-out ones."""

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] This rank's share of the answers, one sample for each `sampling` and prompt."""
        ...


def questions(cfg: RlvrConfig, held_out: Sequence[Prompt], step: int) -> tuple[Sequence[Prompt], list[Sampling]]:
    """Return the held-out prompts that are asked after `step`, and how each of their answers is drawn.

    None are asked where `step` is not due. The noise is the same at every evaluation, so that two of them differ by the
    policy alone.
    """
    settings, new_tokens = cfg.eval, cfg.rollout.max_new_tokens
    if not settings.every or (step % settings.every and step != cfg.steps):
        return (), []
    temperature = cfg.rollout.temperature if settings.temperature is None else settings.temperature
    greedy = Sampling(cfg.seed, "eval", 0.0, new_tokens, stop=cfg.rollout.stop_strings)
    one = replace(greedy, temperature=temperature, **settings.truncation(cfg.rollout))
    return held_out[: settings.prompts], [*[one] * settings.answers, greedy]


def evaluate(cfg: RlvrConfig, rollouts: Answers, world: World, step: int, log: Log | None = None) -> dict[str, float]:
    """[all] `val/*` metrics, means over the answers that have a score; empty where `step` is not due.

    `log` gets this rank's answers: `Run.log_eval`.
    """
    prompts, samplings = questions(cfg, rollouts.prompts.eval, step)
    if not samplings:
        return {}
    with world.phase("eval"):
        groups = rollouts.answer(prompts, samplings)
        if log is not None:
            log(step, held_out(groups))
        sums: dict[str, float] = defaultdict(float)
        for domain in sorted({p.domain for p in prompts}):  # the same keys on every rank, one without groups too
            for name in (f"{domain}/score", f"{domain}/score_greedy"):
                sums[f"{name}/sum"], sums[f"{name}/count"] = 0.0, 0.0
        for group in groups:
            for sample in group.samples:
                if sample.verdict.scored and sample.last:
                    name = "score_greedy" if sample.greedy else "score"
                    sums[f"{group.prompt.domain}/{name}/sum"] += sample.verdict.score
                    sums[f"{group.prompt.domain}/{name}/count"] += 1
        parts = [[group.prompt.domain, sum_parts(group.samples)] for group in groups]
        everyone = [
            pair for theirs in world.gather("eval: parts", [p for p in parts if p[1]]) for pair in theirs
        ]  # [all]
        means = {tag: mean_parts(found for name, found in everyone if name == tag) for tag, _ in everyone}
        own = {f"val/{tag}/{name}": value for tag in sorted(means) for name, value in means[tag].items()}
        return _means(world.reduce("eval: scores", dict(sums), "sum")) | own  # [all]


def _means(sums: dict[str, float]) -> dict[str, float]:
    """`val/score/mean`, `val/score_greedy/mean` and one of each per domain."""
    metrics: dict[str, float] = {}
    for kind in ("score", "score_greedy"):
        totals = {key: value for key, value in sums.items() if key.endswith((f"/{kind}/sum", f"/{kind}/count"))}
        domains = {key.rsplit("/", 2)[0] for key in totals}
        for domain in sorted(domains):
            if count := totals[f"{domain}/{kind}/count"]:
                metrics[f"val/{domain}/{kind}/mean"] = totals[f"{domain}/{kind}/sum"] / count
        if count := sum(totals[f"{d}/{kind}/count"] for d in domains):
            metrics[f"val/{kind}/mean"] = sum(totals[f"{d}/{kind}/sum"] for d in domains) / count
    return metrics
