"""What a step's rollout leaves behind: this rank's groups, and what is known of everyone's (`outcomes.py`)."""

from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import numpy as np

from spmd_rl.rollout.outcomes import Outcomes
from spmd_rl.types import Group


@dataclass(frozen=True, slots=True)
class Collected:
    """One step's harvest."""

    step: int
    groups: tuple[Group, ...]
    """This rank's samples of the groups that train, in ticket order; may be empty. A ticket of several parts has some
    of its samples here and others elsewhere."""
    dropped: tuple[tuple[Group, str], ...]
    """This rank's finished groups that do not train, each with the reason."""
    outcomes: Outcomes
    """Every rank's resolved tickets of the step; equal on all ranks."""
    bubble: float
    """Mean idle share of generation over the replicas."""
    num_aborted: int
    """Requests given up because the step had ended, over all ranks."""
    num_carried: int
    """Answers begun that go on in the next step, over all ranks."""

    def metrics(self) -> dict[str, float]:
        """Means over all scored answers of the resolved tickets, filtered ones included; equal on all ranks.

        Greedy baselines are left out.
        """
        answers = self.outcomes.answers
        domains = self.outcomes.by_domain()
        scores = {domain: values for domain, rows in domains.items() if (values := _scores(rows))}
        num_accepted = self.outcomes.num_accepted
        sampled = ~answers["greedy"]
        metrics = {
            "rollout/accepted": num_accepted,
            "rollout/filtered": len(self.outcomes) - num_accepted,
            "rollout/aborted": self.num_aborted,
            "rollout/carried": self.num_carried,
            "rollout/bubble": self.bubble,
            "rollout/error_share": self.outcomes.error_share,
            "tokens": int(answers["num_tokens"][sampled].sum()),
        }
        if num_sampled := int(np.count_nonzero(sampled)):
            metrics["rollout/response_length/mean"] = int(answers["num_answer_tokens"][sampled].sum()) / num_sampled
            metrics["rollout/truncated"] = int(np.count_nonzero(answers["truncated"] & sampled)) / num_sampled
            metrics["rollout/stale"] = int(np.count_nonzero((answers["lag"] > 0) & sampled)) / num_sampled
        if scores:
            metrics["critic/score/mean"] = fmean(list(chain.from_iterable(scores.values())))
            metrics |= {f"score/{domain}/mean": fmean(values) for domain, values in scores.items()}
        return metrics


def _scores(answers: np.ndarray) -> list[float]:
    """Of those that are scored and no baselines."""
    return answers["score"][answers["scored"] & ~answers["greedy"]].tolist()
