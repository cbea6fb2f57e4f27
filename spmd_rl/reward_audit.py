"""What a run's rewards give to answers that are known to be right or wrong: the dry run and `audit` show it.

For each row: its gold answer, an empty one, the prompt itself, the gold answer of another row, and what the reward's
own `cheats(prompt)` yields: answers that try to be paid for nothing.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

from spmd_rl import wire
from spmd_rl.config.schema import RewardConfig
from spmd_rl.sidecar.services import service_factories
from spmd_rl.sidecar.support import counted, unsupported
from spmd_rl.sidecar.worker import judge
from spmd_rl.targets import build_target
from spmd_rl.types import AnswerInfo, Prompt, Rewarder, Verdict

FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "<think></think><answer>{}</answer>")
"""How answers state a result"""
FORM_ALONE = 0.5
"""The most that another row's gold answer may get, for its form."""
GOLD, EMPTY, PROMPT, OTHER = "gold answer", "empty answer", "the prompt itself", "another row's gold answer"
UNSUPPORTED = "not supported"


@dataclass(slots=True)
class Kind:
    """The verdicts on one kind of answer to some rows of a domain."""

    scores: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Of verdicts without a score: the status and the detail."""
    wrong: int = 0
    """How many of the rows got what they should not."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Why the reward cannot judge them whatever the answer, by id of the row."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Why the reward failed, by id of the row: its own error, or a right answer without a score."""

    @property
    def mean(self) -> float | None:
        """The mean score; None if no answer got one."""
        return fmean(self.scores) if self.scores else None


def build_rewarder(domain: str, reward: RewardConfig) -> Rewarder | str:
    """Build a rewarder as its worker would, or say why it is not asked here."""
    if reward.devices or {"url", "model"} & reward.args.keys():
        return "is not asked here: it needs a model or a server"
    services = service_factories(f"reward.{domain}", reward.sandbox, packages=reward.packages)
    return build_target(f"reward.{domain}", reward.target, reward.args, services=services)


def score(rewarder: Rewarder, prompt: Prompt, answer: str) -> Verdict:
    """Score one answer as a worker would."""
    given = wire.ScoreInput(prompt, answer, AnswerInfo(max(1, len(answer) // 4), "stop"))
    return asyncio.run(judge(rewarder, given))


def gold_answer(rewarder: Rewarder, prompt: Prompt) -> str:
    """Return what the reward (`gold(prompt)`) or the row knows as its right answer; empty if neither knows one."""
    known = rewarder.gold(prompt) if hasattr(rewarder, "gold") else ""
    return known or prompt.ground_truth


def audit(rewarder: Rewarder, prompts: Sequence[Prompt], rows: int) -> dict[str, Kind]:
    """Score answers of each kind to the first `rows` prompts of a domain; the kinds are in the order of first use.

    A gold answer is stated in the form that scores best. Any other is wrong if it scores more than 0, and more than
    the gold answer of another row, which may be paid up to `FORM_ALONE` for its form.
    """
    kinds: dict[str, Kind] = defaultdict(Kind)
    for prompt in islice(prompts, rows):
        if reason := unsupported(rewarder, prompt):
            kinds[UNSUPPORTED].unsupported[prompt.id] = reason
            continue
        gold, form = gold_answer(rewarder, prompt), FORMS[0]
        if gold:
            verdicts = {form: score(rewarder, prompt, form.format(gold)) for form in FORMS}
            form = max(FORMS, key=lambda form: verdicts[form].scored and verdicts[form].score)
            _add(kinds[GOLD], prompt.id, verdicts[form], below=1.0)
        others = (gold_answer(rewarder, other) for other in prompts)
        other = next((answer for answer in others if answer not in ("", gold)), "")
        verdict = score(rewarder, prompt, form.format(other)) if other else Verdict("ok")
        floor = verdict.score if verdict.scored and 0 < verdict.score <= FORM_ALONE else 0.0
        _add(kinds[EMPTY], prompt.id, score(rewarder, prompt, ""), above=floor)
        _add(kinds[PROMPT], prompt.id, score(rewarder, prompt, _last_text(prompt)), above=floor)
        if other:
            _add(kinds[OTHER], prompt.id, verdict, above=FORM_ALONE)
        for name, answer in rewarder.cheats(prompt) if hasattr(rewarder, "cheats") else ():
            _add(kinds[f"cheat: {name}"], prompt.id, score(rewarder, prompt, answer), above=floor)
    return dict(kinds)


def _add(kind: Kind, row: str, verdict: Verdict, below: float = float("-inf"), above: float = float("inf")) -> None:
    """Count a verdict; it is wrong if its score is below the one or above the other."""
    if not verdict.scored:
        kind.failures.append(f"{verdict.status}: {verdict.detail}")
        if below > 0 or verdict.status == "error":
            kind.unjudged[row] = kind.failures[-1]
        return
    kind.scores.append(verdict.score)
    kind.wrong += not below <= verdict.score <= above


def _last_text(prompt: Prompt) -> str:
    content = prompt.messages[-1].content if prompt.messages else ""
    return content if isinstance(content, str) else ""


def paid_cheats(kinds: dict[str, Kind]) -> list[str]:
    """Return the names of the cheats, the empty answer among them, that got more than they should.

    A prompt may hold its answer, and another row's answer may be right here too: those are shown alone.
    """
    return [name for name, kind in kinds.items() if kind.wrong and name not in (GOLD, PROMPT, OTHER)]


def unjudged(kinds: dict[str, Kind]) -> list[str]:
    """Return a line for each row on which the reward failed: its id, the first kind of answer, and the reason."""
    found: dict[str, str] = {}
    for name, kind in kinds.items():
        for row, reason in kind.unjudged.items():
            found.setdefault(row, f"row {row}, {name}: {reason:.100}")
    return list(found.values())


def describe(kinds: dict[str, Kind]) -> Iterable[tuple[str, str]]:
    """Yield a line for each kind of answer: its name, and the mean score with what is wrong about it."""
    for name, kind in kinds.items():
        if kind.unsupported:
            yield name, f"{len(kind.unsupported)} rows, left out of a run: {counted(kind.unsupported.values())}"
            continue
        text = "    -" if kind.mean is None else f"{kind.mean:5.2f}"
        text += f"  {len(kind.scores)} scored"
        if kind.failures:
            text += f"{'  !' if kind.unjudged else ','} {len(kind.failures)} not: {kind.failures[0]:.100}"
        if kind.wrong:
            text += f"  ! {kind.wrong} " + ("below 1" if name == GOLD else "paid")
        yield name, text
