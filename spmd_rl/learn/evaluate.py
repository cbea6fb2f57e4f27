"""Held-out evaluation: sampled answers and one greedy answer for each prompt, and what their scores come to.

In training after every so many steps, and alone (`python -m spmd_rl.evaluate`), by the same code.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

import msgspec

from spmd_rl.algo.estimators import half_width, maj_at_k, pass_at_k
from spmd_rl.config.schema import EvaluateConfig, EvaluationConfig, RlConfig, SamplingConfig
from spmd_rl.distributed import World
from spmd_rl.errors import RunFailed, tell
from spmd_rl.learn.sample_log import held_out
from spmd_rl.rollout import Sampling, mean_parts, sum_parts
from spmd_rl.track.metrics import Values
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


class Answered(msgspec.Struct, array_like=True):
    """What the answers to one prompt came to, as ranks report it to each other."""

    number: int
    """Of the prompt."""
    domain: str
    greedy: list[float]
    """Scores, of the answers that have one."""
    sampled: list[tuple[str, float]]
    """(`Verdict.answer`, score), of the answers that have one."""
    num_unscored: int
    detail: str
    """Why the first of these has none."""
    parts: dict[str, tuple[float, int]]
    """See `sum_parts`."""

    @classmethod
    def of(cls, group: Group) -> "Answered":
        """Take what counts from a prompt's answers."""
        verdicts = [(sample.greedy, sample.verdict) for sample in group.samples if sample.last]
        failed = [verdict.detail for _, verdict in verdicts if not verdict.scored]
        return cls(
            group.ticket,
            group.prompt.domain,
            [verdict.score for greedy, verdict in verdicts if verdict.scored and greedy],
            [(verdict.answer, verdict.score) for greedy, verdict in verdicts if verdict.scored and not greedy],
            len(failed),
            next(filter(None, failed), ""),
            sum_parts(group.samples),
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """When held-out prompts are asked, and how."""

    settings: EvaluationConfig
    rollout: SamplingConfig
    seed: int
    steps: int
    """0: there is nothing but an evaluation."""
    error_budget: float
    """See `reward.error_budget`."""

    @classmethod
    def of(cls, cfg: RlConfig | EvaluateConfig) -> "Evaluation":
        """The evaluations of a run."""
        return cls(cfg.eval, cfg.rollout, cfg.seed, cfg.steps, cfg.reward.error_budget)

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

    def __call__(self, rollouts: Answers, world: World, step: int, log: Log | None = None) -> Values:
        """[all] `val/*` metrics of what `results` returns."""
        return val_metrics(self.results(rollouts, world, step, log))  # [all]

    def results(self, rollouts: Answers, world: World, step: int, log: Log | None = None) -> dict[str, Values]:
        """[all] What the answers come to, by domain, and of all domains as ''; empty where `step` is not due.

        Equal on all ranks, and on any number of them. Answers without a score are left out: `error_share` is their
        share, and a line says how many there are. `log` gets this rank's answers: `Run.log_eval`. RunFailed where there
        is no more than an evaluation and these are more than `reward.error_budget`.
        """
        prompts, samplings = self.questions(rollouts.prompts.eval, step)
        if not samplings:
            return {}
        with world.phase("eval"):
            groups = rollouts.answer(prompts, samplings)  # [all]
            if log is not None:
                log(step, held_out(groups))
            of_ranks = world.gather("eval: scores", [Answered.of(group) for group in groups], list[Answered])  # [all]
            rows = sorted((row for rows in of_ranks for row in rows), key=lambda row: row.number)
            found = {"": measure(rows, self.settings)}
            for domain in sorted({prompt.domain for prompt in prompts}):
                own = [row for row in rows if row.domain == domain]
                found[domain] = measure(own, self.settings) | mean_parts(row.parts for row in own)
            if prompts:
                found[""]["error_share"] = self._error_share(rows, len(prompts) * len(samplings), step, world.rank)
            return found

    def _error_share(self, rows: Sequence[Answered], num_answers: int, step: int, rank: int) -> float:
        """The share of answers without a score. RunFailed: see `results`."""
        num_unscored = sum(row.num_unscored for row in rows)
        if num_unscored:
            line = f"{num_unscored} of {num_answers} held-out answers of step {step} got no score"
            line += f"; the first: {next((row.detail for row in rows if row.detail), 'no reason is known')}"
            if not self.steps and num_unscored > self.error_budget * num_answers:  # alike on all ranks
                raise RunFailed(f"reward.error_budget={self.error_budget:g}: {line}")
            if rank == 0:
                tell(f"warning: {line}; val/* leave them out")
        return num_unscored / num_answers


def val_metrics(found: Mapping[str, Values]) -> Values:
    """Return what `Evaluation.results` returned as metrics: `val/<domain>/<name>` and, of all domains, `val/<name>`."""
    sections = {domain: f"val/{domain}/" if domain else "val/" for domain in found}
    return {f"{sections[domain]}{name}": value for domain in found for name, value in found[domain].items()}


def measure(rows: Sequence[Answered], settings: EvaluationConfig) -> Values:
    """Return the numbers of some prompts: their means, what `eval.metrics` names, and how many have a score.

    `pass@k` and `maj@k` are over the prompts with k scored sampled answers; `maj@k` over the domains in which some
    answer has a vote (`Verdict.answer`).
    """
    found: Values = {}
    scores = {"score": [[score for _, score in row.sampled] for row in rows], "score_greedy": [r.greedy for r in rows]}
    for name, by_prompt in scores.items():
        by_prompt = [some for some in by_prompt if some]
        if by_prompt:
            found[f"{name}/mean"] = fmean(score for some in by_prompt for score in some)
        if "ci95" in (settings.metrics or ()) and (half := half_width([*map(fmean, by_prompt)])) is not None:
            found[f"{name}/ci95"] = half
    for k in settings.numbers("pass"):
        right = [[score >= settings.pass_score for score in some] for some in scores["score"] if len(some) >= k]
        if right:
            found[f"pass@{k}"] = fmean(pass_at_k(len(some), sum(some), k) for some in right)
    voting = {row.domain for row in rows if any(vote for vote, _ in row.sampled)}
    for k in settings.numbers("maj"):
        votes = [row.sampled for row in rows if row.domain in voting and len(row.sampled) >= k]
        if votes:
            found[f"maj@{k}"] = fmean(maj_at_k(some, [k])[0] for some in votes)
    return found | {"num_prompts": float(sum(bool(row.greedy or row.sampled) for row in rows))}
