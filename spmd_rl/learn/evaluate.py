"""Held-out evaluation: a few sampled answers and one greedy answer for each prompt, dealt over the ranks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from spmd_rl.config.schema import EvalConfig, RolloutConfig
from spmd_rl.distributed import World
from spmd_rl.errors import RunFailed, tell
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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """When held-out prompts are asked, and how."""

    settings: EvalConfig
    rollout: RolloutConfig
    seed: int
    steps: int
    """0: there is nothing but an evaluation."""
    error_budget: float
    """See `reward.error_budget`."""

    def questions(self, held_out: Sequence[Prompt], step: int) -> tuple[Sequence[Prompt], list[Sampling]]:
        """Return the held-out prompts that are asked after `step`, and how each of their answers is drawn.

        None are asked where `step` is not due. The noise is the same at every evaluation, so that two of them differ by
        the policy alone.
        """
        settings, rollout = self.settings, self.rollout
        if not settings.every or (step % settings.every and step != self.steps):
            return (), []
        temperature = rollout.temperature if settings.temperature is None else settings.temperature
        greedy = Sampling(self.seed, "eval", 0.0, rollout.max_new_tokens, stop=rollout.stop_strings)
        one = replace(greedy, temperature=temperature, **settings.truncation(rollout))
        return held_out[: settings.prompts], [*[one] * settings.answers, greedy]

    def __call__(self, rollouts: Answers, world: World, step: int, log: Log | None = None) -> dict[str, float]:
        """[all] `val/*` metrics, means over the answers that have a score; empty where `step` is not due.

        `log` gets this rank's answers: `Run.log_eval`. One line says how many have no score. RunFailed where there is
        no more than an evaluation and these are more than `reward.error_budget`.
        """
        prompts, samplings = self.questions(rollouts.prompts.eval, step)
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
            unscored = [s.verdict.detail for g in groups for s in g.samples if s.last and not s.verdict.scored]
            scored = Counter(g.prompt.domain for g in groups if any(s.last and s.verdict.scored for s in g.samples))
            mine = [[p for p in parts if p[1]], len(unscored), next(filter(None, unscored), ""), dict(scored)]
            gathered = world.gather("eval: parts", mine)  # [all]
            everyone = [pair for theirs, *_ in gathered for pair in theirs]
            means = {tag: mean_parts(found for name, found in everyone if name == tag) for tag, _ in everyone}
            own = {f"val/{tag}/{name}": value for tag in sorted(means) for name, value in means[tag].items()}
            own |= self._shares(prompts, step, [found[1:] for found in gathered], world.rank)
            return _means(world.reduce("eval: scores", dict(sums), "sum")) | own  # [all]

    def _shares(
        self, prompts: Sequence[Prompt], step: int, found: Sequence[tuple[int, str, dict[str, int]]], rank: int
    ) -> dict[str, float]:
        """Over how many prompts the scores are, and the share of answers without one. RunFailed: see `__call__`.

        found: of each rank, the number of answers without a score, why the first has none, and by domain the number of
        prompts with a score.
        """
        num_answers, num_unscored = len(prompts) * (self.settings.answers + 1), sum(count for count, *_ in found)
        if not num_answers:
            return {}
        if num_unscored:
            line = f"{num_unscored} of {num_answers} held-out answers of step {step} got no score"
            line += f"; the first: {next((detail for _, detail, _ in found if detail), 'no reason is known')}"
            if not self.steps and num_unscored > self.error_budget * num_answers:  # alike on all ranks
                raise RunFailed(f"reward.error_budget={self.error_budget:g}: {line}")
            if rank == 0:
                tell(f"warning: {line}; val/* leave them out")
        counts = {domain: sum(scored.get(domain, 0) for *_, scored in found) for domain in {p.domain for p in prompts}}
        shares = {f"val/{domain}/num_prompts": float(counts[domain]) for domain in sorted(counts)}
        return shares | {"val/num_prompts": float(sum(counts.values())), "val/error_share": num_unscored / num_answers}


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
