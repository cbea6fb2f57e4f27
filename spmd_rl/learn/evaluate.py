"""Held-out evaluation: sampled answers and one greedy answer for each prompt, and metrics of their scores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from statistics import fmean
from typing import Any, Protocol

import msgspec

from spmd_rl.algo.estimators import half_width, maj_at_k, pass_at_k
from spmd_rl.base.errors import RunFailed, tell
from spmd_rl.config.schema import EvaluateConfig, EvaluationConfig, RlConfig, SamplingConfig
from spmd_rl.distributed import World
from spmd_rl.learn.sample_log import held_out
from spmd_rl.rollout import Sampling, mean_parts, sum_parts
from spmd_rl.track.metrics import Values
from spmd_rl.track.samples import SampleRow
from spmd_rl.types import Group, Prompt, Sample

Log = Callable[[int, Iterable[SampleRow]], None]


class Answers(Protocol):
    """Source of answers: this rank's `Rollouts`, or a proxy for generator ranks."""

    prompts: Any

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] Return this rank's share of the answers, one per `sampling` and prompt."""
        ...


class Answered(msgspec.Struct, array_like=True):
    """Result of one answer, exchanged between ranks."""

    number: int
    answer: int
    domain: str
    greedy: bool
    score: float | None
    """None without a score, for the reason in `detail`."""
    vote: str
    """Vote of the majority metrics, see `Verdict.answer`."""
    detail: str
    parts: dict[str, tuple[float, int]]
    """See `sum_parts`; (sum, count) of verdict parts."""

    @classmethod
    def of(cls, sample: Sample, domain: str) -> "Answered":
        """Return the result of an answer's last sample."""
        verdict, score = sample.verdict, sample.verdict.score if sample.verdict.scored else None
        about = sample.ticket, sample.unit_number, domain, sample.greedy, score, verdict.answer, verdict.detail
        return cls(*about, sum_parts([sample]))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Schedule and settings of a run's evaluations."""

    settings: EvaluationConfig
    rollout: SamplingConfig
    seed: int
    steps: int
    """Steps of the run; 0 without training."""
    error_budget: float

    @classmethod
    def of(cls, cfg: RlConfig | EvaluateConfig) -> "Evaluation":
        """Return the evaluation schedule of a run."""
        return cls(cfg.eval, cfg.rollout, cfg.seed, cfg.steps, cfg.reward.error_budget)

    def questions(self, held_out: Sequence[Prompt], step: int) -> tuple[Sequence[Prompt], list[Sampling]]:
        """Return the held-out prompts after `step`, and the sampling of each answer; empty if no evaluation is due."""
        # The noise is the same at every evaluation, so that two of them differ by the policy alone.
        settings, rollout = self.settings, self.rollout
        if not settings.every or (step % settings.every and step != self.steps):
            return (), []
        temperature = rollout.temperature if settings.temperature is None else settings.temperature
        greedy = Sampling(self.seed, "eval", 0.0, rollout.max_new_tokens, stop=rollout.stop_strings)
        one = replace(greedy, temperature=temperature, **settings.truncation(rollout))
        return held_out[: settings.prompts], [*[one] * settings.answers, greedy]

    def __call__(self, rollouts: Answers, world: World, step: int, log: Log | None = None) -> Values:
        """[all] Evaluate, if due, and return the metrics `val/*`."""
        return val_metrics(self.results(rollouts, world, step, log))  # [all]

    def results(self, rollouts: Answers, world: World, step: int, log: Log | None = None) -> dict[str, Values]:
        """[all] Return metrics by domain, and over all domains as ''; empty if `step` is not due.

        Equal on all ranks. Unscored answers are left out, counted in `error_share` and printed. log: gets this rank's
        answers, see `Run.log_eval`. RunFailed in an evaluation without training if `error_share` exceeds
        `reward.error_budget`.
        """
        prompts, samplings = self.questions(rollouts.prompts.eval, step)
        if not samplings:
            return {}
        with world.phase("eval"):
            groups = rollouts.answer(prompts, samplings)  # [all]
            if log is not None:
                log(step, held_out(groups))
            mine = [Answered.of(one, group.prompt.domain) for group in groups for one in group.samples if one.last]
            of_ranks = world.gather("eval: scores", mine, list[Answered])  # [all]
            answers = sorted(chain.from_iterable(of_ranks), key=lambda one: (one.number, one.answer))
            found = {"": measure(answers, self.settings)}
            for domain in sorted({prompt.domain for prompt in prompts}):
                own = [one for one in answers if one.domain == domain]
                found[domain] = measure(own, self.settings) | mean_parts(one.parts for one in own)
            if not self.steps and world.rank == 0 and self.settings.numbers("maj") and not any(a.vote for a in answers):
                tell("notice: no maj@k, as no verdict names an answer to vote on: a reward's dict may have `answer`")
            if prompts:
                found[""]["error_share"] = self._error_share(answers, step, world.rank)
            return found

    def _error_share(self, answers: Sequence[Answered], step: int, rank: int) -> float:
        failed = [one.detail for one in answers if one.score is None]
        if failed:
            line = f"{len(failed)} of {len(answers)} held-out answers of step {step} got no score"
            line += f"; the first: {next(filter(None, failed), 'no reason is known')}"
            # Equal on all ranks, so all raise together.
            if not self.steps and len(failed) > self.error_budget * len(answers):
                raise RunFailed(f"reward.error_budget={self.error_budget:g}: {line}")
            if rank == 0:
                tell(f"warning: {line}; val/* leave them out")
        return len(failed) / max(1, len(answers))


def val_metrics(found: Mapping[str, Values]) -> Values:
    """Rename the metrics of `Evaluation.results` to `val/<domain>/<name>` or `val/<name>`."""
    sections = {domain: f"val/{domain}/" if domain else "val/" for domain in found}
    return {f"{sections[domain]}{name}": value for domain in found for name, value in found[domain].items()}


def measure(answers: Sequence[Answered], settings: EvaluationConfig) -> Values:
    """Return metrics of answers sorted by prompt: means, `eval.metrics`, and the number of scored prompts.

    `pass@k` and `maj@k` are over prompts with k scored sampled answers, `maj@k` in domains with a vote
    (`Verdict.answer`).
    """
    found: Values = {}
    scored = [one for one in answers if one.score is not None]
    sampled, greedy = ([one for one in scored if one.greedy == kind] for kind in (False, True))
    prompts = [list(some) for _, some in groupby(sampled, key=lambda one: one.number)]
    for name, some in (("score", sampled), ("score_greedy", greedy)):
        by_prompt = [[one.score for one in own] for _, own in groupby(some, key=lambda one: one.number)]
        if some:
            found[f"{name}/mean"] = fmean(one.score for one in some)
        if "ci95" in (settings.metrics or ()) and (half := half_width([*map(fmean, by_prompt)])) is not None:
            found[f"{name}/ci95"] = half
    for k in settings.numbers("pass"):
        right = [[one.score >= settings.pass_score for one in own] for own in prompts if len(own) >= k]
        if right:
            found[f"pass@{k}"] = fmean(pass_at_k(len(own), sum(own), k) for own in right)
    voting = {one.domain for one in sampled if one.vote}
    for k in settings.numbers("maj"):
        votes = [[(one.vote, one.score) for one in own] for own in prompts if own[0].domain in voting and len(own) >= k]
        if votes:
            found[f"maj@{k}"] = fmean(maj_at_k(own, [k])[0] for own in votes)
    return found | {"num_prompts": float(len({one.number for one in scored}))}
