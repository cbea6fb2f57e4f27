"""Scores of rewards for answers known to be right or wrong, for dry run and `audit`.

For each row: its gold answer, bare and in the prompt's form, an empty one, the prompt itself, another row's gold
answer, and the reward's `cheats(prompt)`: answers that try to be paid for nothing.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from statistics import fmean

import msgspec

from spmd_rl.base.errors import UserError, plural, printable
from spmd_rl.base.process import Overtime, contained, deadline
from spmd_rl.base.targets import build_target, guarded, start_target
from spmd_rl.config.schema import RewardConfig
from spmd_rl.data import Prompts
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.services import service_factories
from spmd_rl.sidecar.support import counted, unsupported
from spmd_rl.sidecar.worker import judge
from spmd_rl.tools.answer_form import SLOT, asked_forms, fill, shown
from spmd_rl.types import AnswerInfo, Prompt, Rewarder, Verdict

BARE = SLOT
FORMS = (BARE, "\\boxed{\0}", "#### \0", "<answer>\0</answer>", "<think></think><answer>\0</answer>")
"""Forms in which answers state results"""
WRONG = "I do not know."
LEAST = 0.1
"""Share of the best form's pay beyond which another form counts as paid, not for its length alone"""
SECONDS = 60.0
MAX_SECONDS = 1e6
"""Seconds that an audit may take; scores have their limits"""
FORM_ALONE = 0.5
"""Largest score of another row's gold answer, for its form"""
GOLD, ASKED = "gold answer", "gold answer as the prompt asks"
GOLDEN = (GOLD, ASKED)
UNSUPPORTED = "not supported"
EMPTY, PROMPT, OTHER = "empty answer", "the prompt itself", "another row's gold answer"
NEVER = "no form of the ground truth is rewarded or scores more than a wrong answer: is this the reward for these rows?"


@dataclass(slots=True)
class Kind:
    """Verdicts on a kind of answer to a domain's rows."""

    scores: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Status and detail of verdicts without a score"""
    wrong: int = 0
    """Number of rows with wrong scores"""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Reasons why the reward cannot judge a row at all, by row id"""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Reasons why the reward failed, by row id: an error, or a right answer without a score"""

    forms: set[str] = field(default_factory=set)
    trials: dict[str, "Trial"] = field(default_factory=dict)
    """Trials of gold answers, by row id"""

    def add(
        self, row: str, verdict: Verdict, below: float = float("-inf"), above: float = float("inf"), form: str = BARE
    ) -> None:
        """Count a verdict; it is wrong if scored below `below` or above `above`."""
        self.forms.add(form)
        if not verdict.scored:
            self.failures.append(f"{verdict.status}: {verdict.detail}")
            if below > 0 or verdict.status == "error":
                self.unjudged[row] = self.failures[-1]
            return
        self.scores.append(verdict.score)
        self.wrong += not below <= verdict.score <= above

    @property
    def mean(self) -> float | None:
        """Mean score; None without any score."""
        return fmean(self.scores) if self.scores else None


@dataclass(slots=True)
class Trial:
    """Scores of a row's gold answer and a wrong one, in each form."""

    gold: str
    other: str
    """Wrong answer: another row's gold answer, if any"""
    asked: list[str]
    """Forms that the prompt asks for, if any"""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    wrong: dict[str, Verdict] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """True if all forms were tried, without a `timeout`."""
        return all(verdict.status != "timeout" for verdict in self.verdicts.values())

    def best(self, forms: Iterable[str] = ()) -> str:
        """Return the form with the best verdict among those tried of `forms`, or all."""
        tried = [form for form in forms if form in self.verdicts] or self.verdicts
        return max(tried, key=lambda form: (self._margin(form), self._score(form)))

    @property
    def problem(self) -> str:
        """Fault of the reward, in a line; empty if it pays the asked form."""
        best = self.best()
        asked = self.best(self.asked) if self.asked else best
        if not self.verdicts[best].scored or self._margin(asked) > LEAST * self._margin(best) > 0:
            return ""
        if self._margin(best) <= 0:
            return NEVER if all(self._score(form) <= 0 for form in self.verdicts) else ""
        known, wanted = fill(best, self.gold), fill(asked, self.gold)
        return (
            f"it rewards {known!r:.100}, but not {wanted!r:.100}, which the prompt asks for: let the reward read the "
            "answer out of that form, or let data.format ask for the form that it rewards"
        )

    def _margin(self, form: str) -> float:
        return self._score(form) - (self.wrong[form].score if self.wrong[form].scored else 0.0)

    def _score(self, form: str) -> float:
        return self.verdicts[form].score if self.verdicts[form].scored else float("-inf")


def asked_about(prompts: Prompts) -> Sequence[Prompt]:
    """Return prompts to audit: for training, and held-out ones of other domains."""
    trained = {prompt.domain for prompt in prompts.train}
    return [*prompts.train, *(prompt for prompt in prompts.eval if prompt.domain not in trained)]


def build_rewarder(domain: str, reward: RewardConfig) -> Rewarder | str:
    """Build and start a rewarder as its worker would, or return why it cannot run here."""
    if reward.devices or {"url", "model"} & reward.args.keys():
        return "is not audited: it needs a model or a server"
    section = f"reward.{domain}"
    services = service_factories(section, reward.sandbox, packages=reward.packages)
    rewarder = build_target(section, reward.target, reward.args, services=services)
    start_target(section, reward.target, rewarder)
    return rewarder


def score(rewarder: Rewarder, prompt: Prompt, answer: str, seconds: float = SECONDS) -> Verdict:
    """Score one answer within a worker's time limit."""
    given = wire.ScoreInput(prompt, answer, AnswerInfo(max(1, len(answer) // 4), "stop"))
    try:
        # An `async def` has its own time limit, which must strike first.
        with deadline(seconds + 1):
            return asyncio.run(judge(rewarder, given, seconds))
    except Overtime:
        return Verdict("timeout", detail=f"no score after {seconds:g} s")


def gold_answer(rewarder: Rewarder, prompt: Prompt) -> str:
    """Return the right answer by the reward (`gold(prompt)`) or the row, if any."""
    known = guarded(rewarder.gold, "gold() of the reward fails", {})(prompt) if hasattr(rewarder, "gold") else ""
    return known or prompt.ground_truth


def attempt(judged: Callable[[Prompt, str], Verdict], prompt: Prompt, gold: str, other: str, template: str) -> Trial:
    """Score a gold and a wrong answer in all forms, until a `timeout`."""
    trial, judged = Trial(gold, other or WRONG, asked_forms(prompt, template)), cache(partial(judged, prompt))
    for form in dict.fromkeys((BARE, *trial.asked, *FORMS)):
        trial.verdicts[form] = trial.wrong[form] = judged(fill(form, gold))
        if not trial.is_whole:
            break
        trial.wrong[form] = judged(fill(form, trial.other))
    return trial


def audit_apart(
    domain: str, reward: RewardConfig, rewarder: Rewarder, prompts: Sequence[Prompt], rows: int, template: str
) -> dict[str, Kind]:
    """Run `audit` in a forked process. UserError, naming the row, if the reward ends that process."""

    def work(say: Callable[[str], None]) -> None:
        def named() -> Iterator[Prompt]:
            for prompt in prompts:
                say(printable(f"row {prompt.id}", lines=False))
                yield prompt

        try:
            kinds = audit(rewarder, prompts, rows, template, reward.timeout, named())
            say(msgspec.msgpack.encode(kinds).hex())
        except UserError as error:
            say(json.dumps([str(error), error.report]))

    # In a fork: a reward may exit, hang or kill its process, which the row before it explains.
    said, end = contained(work, MAX_SECONDS)
    place = f"reward.{domain}.target: {reward.target}"
    if end:
        raise UserError(f"{place}: {end} on {' '.join(said[-1:]) or 'its first row'}")
    if said[-1].startswith("["):
        raise UserError(*json.loads(said[-1]))
    # Hexadecimal, since the pipe carries lines of text.
    return msgspec.msgpack.decode(bytes.fromhex(said[-1]), type=dict[str, Kind])


def audit(
    rewarder: Rewarder,
    prompts: Sequence[Prompt],
    rows: int,
    template: str = "{question}",
    seconds: float = SECONDS,
    asked: Iterable[Prompt] = (),
) -> dict[str, Kind]:
    """Score answers of each kind to a domain's first `rows` prompts; kinds are in order of first use.

    A gold answer counts in its best form, and in the best that the prompt asks for (template: `data.format`). Another
    answer is wrong if it scores more than 0, and more than another row's gold answer, which may get up to `FORM_ALONE`
    for its form. seconds: `reward.<domain>.timeout`. asked: the prompts to iterate over.
    """
    kinds: dict[str, Kind] = defaultdict(Kind)
    judged = partial(score, rewarder, seconds=seconds)
    for prompt in islice(asked or prompts, rows):
        if reason := unsupported(rewarder, prompt):
            kinds[UNSUPPORTED].unsupported[prompt.id] = reason
            continue
        gold, form = gold_answer(rewarder, prompt), BARE
        others = (gold_answer(rewarder, other) for other in prompts)
        other = next((answer for answer in others if answer not in ("", gold)), "")
        if gold:
            trial = kinds[GOLD].trials[prompt.id] = attempt(judged, prompt, gold, other, template)
            form = trial.best()
            kinds[GOLD].add(prompt.id, trial.verdicts[form], below=1.0, form=form)
            if trial.asked:
                asked = trial.best(trial.asked)
                kinds[ASKED].add(prompt.id, trial.verdicts[asked], below=1.0, form=asked)
            for verdict in (*trial.verdicts.values(), *trial.wrong.values()):
                if verdict.status == "error":
                    kinds[GOLD].unjudged.setdefault(prompt.id, f"error: {verdict.detail}")
            if not trial.is_whole:
                # The next row would time out as well.
                break
        verdict = judged(prompt, fill(form, other)) if other else Verdict("ok")
        floor = verdict.score if verdict.scored and 0 < verdict.score <= FORM_ALONE else 0.0
        kinds[EMPTY].add(prompt.id, judged(prompt, ""), above=floor)
        kinds[PROMPT].add(prompt.id, judged(prompt, _last_text(prompt)), above=floor)
        if other:
            kinds[OTHER].add(prompt.id, verdict, above=FORM_ALONE)
        cheats = guarded(lambda row: list(rewarder.cheats(row)), "cheats() of the reward fails", {})
        for name, answer in cheats(prompt) if hasattr(rewarder, "cheats") else ():
            kinds[f"cheat: {name}"].add(prompt.id, judged(prompt, answer), above=floor)
    return dict(kinds)


def _last_text(prompt: Prompt) -> str:
    return prompt.messages[-1].plain_text if prompt.messages else ""


def paid_cheats(kinds: dict[str, Kind]) -> list[str]:
    """Return the cheats, the empty answer included, that score too high.

    Not the prompt, which may hold its answer, or another row's answer, which may be right.
    """
    return [name for name, kind in kinds.items() if kind.wrong and name not in (*GOLDEN, PROMPT, OTHER)]


def cheats_asked(kinds: dict[str, Kind]) -> tuple[int, int]:
    """Return the numbers of worthless answers with and without score."""
    own = [kind for name, kind in kinds.items() if name not in (*GOLDEN, PROMPT, OTHER, UNSUPPORTED)]
    return sum(len(kind.scores) for kind in own), sum(len(kind.failures) for kind in own)


def unjudged(kinds: dict[str, Kind]) -> list[str]:
    """Return a line for each row on which the reward failed: id, first kind of answer, reason."""
    found: dict[str, str] = {}
    for name, kind in kinds.items():
        for row, reason in kind.unjudged.items():
            found.setdefault(row, f"row {row}, {name}: {reason:.100}")
    return list(found.values())


def unpaid(kinds: dict[str, Kind]) -> list[str]:
    """Return a line for each row whose right answer is not paid in the prompt's form, or one line if none is paid."""
    told = {row: trial.problem for row, trial in kinds[GOLD].trials.items()} if GOLD in kinds else {}
    if set(told.values()) == {NEVER}:
        return [NEVER]
    return [f"row {row}: {problem}" for row, problem in told.items() if problem not in ("", NEVER)]


def describe(kinds: dict[str, Kind]) -> Iterable[tuple[str, str]]:
    """Yield each kind of answer with its mean score and faults."""
    for name, kind in kinds.items():
        if kind.unsupported:
            yield (
                name,
                f"{plural(len(kind.unsupported), 'row')}, left out of a run: {counted(kind.unsupported.values())}",
            )
            continue
        text = "    -" if kind.mean is None else f"{kind.mean:5.2f}"
        text += f"  {len(kind.scores)} scored"
        if kind.failures:
            text += f"{'  !' if kind.unjudged else ','} {len(kind.failures)} not: {kind.failures[0]:.100}"
        if kind.wrong:
            text += f"  ! {kind.wrong} " + ("below 1" if name in GOLDEN else "paid")
        if stated := [shown(form) for form in kind.forms - {BARE}]:
            text += f"  as {', '.join(map(repr, sorted(stated)))}"
        yield name, text
