"""Several rewarders as one: the weighted sum of their scores.

A part is any rewarder or function, given by `target`, `args` and `weight` (default 1). Its score becomes
`parts["<part>"]`, and its own parts `parts["<part>.<term>"]`. A failed part (`timeout`, `error`, `rejected`) makes the
whole that failure, never a lower score. Parts run in their order, and none after a failure, so put a costly one last.
Parts that judge many answers at once (TRL's functions) get all waiting ones, unless another part is `async def`.

    reward.math.target=rewards.composite:CompositeReward
    reward.math.args.parts.correct={target: rewards.math_verify:MathReward}
    reward.math.args.parts.form={target: rewards.format:FormatReward, args: {form: boxed}, weight: 0.1}
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spmd_rl.types import MISSING_PACKAGE, UNPROVEN, AnswerInfo, Message, Prompt, Verdict

MAX_BATCH = 64
"""Largest number of answers at once, unless a part sets it."""


class CompositeReward:
    """A rewarder that sums weight times score of its parts; `wrong_format` if a part has it, else `ok`."""

    def __init__(
        self, parts: Mapping[str, Mapping[str, Any]], build: Callable[[str, str, Mapping[str, Any]], Any]
    ) -> None:
        """Take `{target: module:Class, args: {...}, weight: 1.0}` by name; a target may be a function too.

        `build` comes from the sidecar: it builds a section's target with these args.
        """
        if not parts:
            raise ValueError("parts: there must be at least one")
        self._parts = {name: _build(name, part, build) for name, part in parts.items()}
        self._weights = {name: float(part.get("weight", 1.0)) for name, part in parts.items()}
        parts = self._parts.values()
        if not any(inspect.iscoroutinefunction(getattr(part, "score", None)) for part in parts):
            # A plain `def` keeps a separate deadline for each answer.
            self.score = self._score_now
            if many := [part for part in parts if not hasattr(part, "score")]:
                self.score_batch = self._score_batch
                self.max_batch = min(getattr(part, "max_batch", MAX_BATCH) for part in many)

    def start(self) -> None:
        """Call `start` of the parts that have one."""
        for part in self._parts.values():
            if hasattr(part, "start"):
                part.start()

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score the answer with each part."""
        verdicts = {}
        for name, part in self._parts.items():
            if hasattr(part, "score"):
                verdict = part.score(prompt, answer, info)
                verdicts[name] = Verdict.of(await verdict if inspect.isawaitable(verdict) else verdict)
            else:
                (verdicts[name],) = _all(name, part, [(prompt, answer, info)])
            if not verdicts[name].scored:
                break
        return self._sum(verdicts)

    def _score_now(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score one answer, without `async` parts."""
        return self._score_batch([prompt], [answer], [info])[0]

    def _score_batch(
        self, prompts: Sequence[Prompt], answers: Sequence[str], infos: Sequence[AnswerInfo]
    ) -> list[Verdict]:
        """Score answers, without `async` parts; a part gets those on which no earlier part has failed."""
        given = list(zip(prompts, answers, infos, strict=True))
        verdicts: list[dict[str, Verdict]] = [{} for _ in given]
        for name, part in self._parts.items():
            left = [i for i, found in enumerate(verdicts) if all(verdict.scored for verdict in found.values())]
            if left:
                for i, verdict in zip(left, _all(name, part, [given[i] for i in left]), strict=True):
                    verdicts[i][name] = verdict
        return [self._sum(found) for found in verdicts]

    def _sum(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        terms: dict[str, float] = {}
        for name, verdict in verdicts.items():
            if not verdict.scored:
                return Verdict(verdict.status, detail=f"{name}: {verdict.detail}")
            terms |= {name: verdict.score} | {f"{name}.{term}": value for term, value in verdict.parts.items()}
        package = next((v.detail for v in verdicts.values() if MISSING_PACKAGE in v.parts), "")
        terms |= {MISSING_PACKAGE: 1.0} if package else {}
        terms |= {UNPROVEN: 1.0} if any(UNPROVEN in v.parts for v in verdicts.values()) else {}
        status = "wrong_format" if any(v.status == "wrong_format" for v in verdicts.values()) else "ok"
        return Verdict(status, sum(self._weights[name] * v.score for name, v in verdicts.items()), terms, package)

    def gold(self, prompt: Prompt) -> str:
        """Return the first gold answer that a part knows."""
        known = (part.gold(prompt) for part in self._parts.values() if hasattr(part, "gold"))
        return next((answer for answer in known if answer), "")

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield the known cheats of the parts."""
        for name, part in self._parts.items():
            for kind, answer in part.cheats(prompt) if hasattr(part, "cheats") else ():
                yield f"{name}: {kind}", answer

    def unsupported(self, prompt: Prompt) -> str:
        """Return the first reason for which a part cannot judge a row."""
        found = (part.unsupported(prompt) for part in self._parts.values() if hasattr(part, "unsupported"))
        return next((reason for reason in found if reason), "")

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the first suspicion of a part."""
        found = (part.suspect(prompt, answer) for part in self._parts.values() if hasattr(part, "suspect"))
        return next((reason for reason in found if reason), "")

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield answers for the parts at the top of this file, with their scores."""
        for answer, score in (("\\boxed{4}", 1.1), ("4", 1.0), ("\\boxed{5}", 0.1), ("5", 0.0)):
            yield Prompt("0" * 32, (Message("user", "2 + 2?"),), "composite", "4"), answer, score


def _build(name: str, part: Mapping[str, Any], build: Callable[[str, str, Mapping[str, Any]], Any]) -> Any:
    """Build the rewarder of a part. ValueError for an unknown key, and where no target is named."""
    if unknown := set(part) - {"target", "args", "weight"}:
        raise ValueError(f"parts.{name}.{min(unknown)}: known are target, args and weight")
    module, _, attribute = str(part.get("target", "")).partition(":")
    if not module or not attribute:
        raise ValueError(f"parts.{name}.target: must be module:Class, not {part.get('target')!r}")
    return build(f"parts.{name}", part["target"], part.get("args") or {})


def _all(name: str, part: Any, given: Sequence[tuple[Prompt, str, AnswerInfo]]) -> list[Verdict]:
    """Return the verdicts of a part on some answers. ValueError if it returns more or fewer."""
    if hasattr(part, "score"):
        return [Verdict.of(part.score(*one)) for one in given]
    found = list(part.score_batch(*map(list, zip(*given, strict=True))))
    if len(found) != len(given):
        raise ValueError(f"{name}: {len(found)} scores for {len(given)} answers")
    return [Verdict.of(one) for one in found]
