"""Held-out evaluation: a few sampled answers and one greedy answer for each prompt, dealt over the ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn.sample_log import held_out
from spmd_rl.rollout import Rollouts, Sampling
from spmd_rl.track.samples import SampleRow

Log = Callable[[int, Iterable[SampleRow]], None]


def evaluate(cfg: RlvrConfig, rollouts: Rollouts, world: World, step: int, log: Log | None = None) -> dict[str, float]:
    """[all] `val/*` metrics, means over the answers that have a score; empty where `step` is not due.

    The noise is the same at every evaluation, so that two of them differ by the policy alone. `log` gets this rank's
    answers: `Run.log_eval`.
    """
    settings, new_tokens = cfg.eval, cfg.rollout.max_new_tokens
    if not settings.every or (step % settings.every and step != cfg.steps):
        return {}
    prompts = rollouts.prompts.eval[: settings.prompts]
    temperature = cfg.rollout.temperature if settings.temperature is None else settings.temperature
    greedy = Sampling(cfg.seed, "eval", 0.0, new_tokens, stop=cfg.rollout.stop_strings)
    one = replace(greedy, temperature=temperature, **settings.truncation(cfg.rollout))
    sampled = [one] * settings.answers
    with world.phase("eval"):
        groups = rollouts.answer(prompts, [*sampled, greedy])
        if log is not None:
            log(step, held_out(groups))
        sums: dict[str, float] = defaultdict(float)
        for domain in sorted({p.domain for p in prompts}):  # the same keys on every rank, one without groups too
            for name in (f"{domain}/score", f"{domain}/score_greedy"):
                sums[f"{name}/sum"], sums[f"{name}/count"] = 0.0, 0.0
        for group in groups:
            for sample in group.samples:
                if sample.last and sample.verdict.scored:
                    name = "score_greedy" if sample.unit_number == settings.answers else "score"
                    sums[f"{group.prompt.domain}/{name}/sum"] += sample.verdict.score
                    sums[f"{group.prompt.domain}/{name}/count"] += 1
        return _means(world.reduce("eval: scores", dict(sums), "sum"))


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
