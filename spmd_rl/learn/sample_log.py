"""Rows of the sample log: samples with prompt, advantage, and reason if dropped; held-out answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from spmd_rl.learn.imitation import Imitation, RowLog
from spmd_rl.learn.learner import Learner
from spmd_rl.learn.prepare import UpdatePlan
from spmd_rl.rollout import Collected, RowSource
from spmd_rl.track.run import Run
from spmd_rl.track.samples import SampleRow, StepRow, TurnRow
from spmd_rl.types import AgentStep, Conversation, Group, Message, Prompt, Sample, Verdict, concat

DECIMALS = 6

_encode = msgspec.json.Encoder().encode


@contextmanager
def logged(track: Run, collected: Collected, learner: Learner | Imitation) -> Iterator[None]:
    """[all] Log the step's samples on exit, also if `learner.prepare` inside raises, or if the step ends the run
    (`Collected.failure`, which is then raised).
    """
    with track.samples(collected.step, lambda: rows(collected, learner.plan), collected.failure):  # [all]
        yield


def rows(collected: Collected, plan: UpdatePlan | None) -> Iterator[SampleRow]:
    """Yield one row per finished sample of this rank; without a plan, without advantages."""
    kept = [(group, None) for group in collected.groups]
    groups = sorted([*kept, *collected.dropped], key=lambda pair: pair[0].ticket)
    unplanned = plan is None or plan.step != collected.step
    masked = {} if unplanned else dict(plan.masked)
    # The plan holds the samples of all ranks, and those of one ticket side by side.
    tickets, answers = np.empty((2, 0), np.int64) if unplanned else plan.keys.T
    own, advantages = [group.ticket for group, _ in groups], np.empty(0) if unplanned else _mean_advantages(plan)
    ends_of_spans = [] if unplanned else plan.num_spans.cumsum().tolist()
    begins, ends = (np.searchsorted(tickets, own, side).tolist() for side in ("left", "right"))
    for (group, reason), begin, end in zip(groups, begins, ends, strict=True):
        planned = dict(zip(answers[begin:end].tolist(), range(begin, end), strict=True))
        messages = _messages(group)
        for sample, turns in zip(group.samples, _turns(group), strict=True):
            place = planned.get(sample.answer)
            advantage = None if place is None else float(advantages[place])
            if place is not None and plan.num_spans[place] > 1:
                _credit(turns, plan.advantages[ends_of_spans[place] - plan.num_spans[place] : ends_of_spans[place]])
            reject_reason = reason or masked.get(sample.key)
            # A scored sample of a kept group has an advantage, unless `prepare` has never run.
            if reject_reason is None and advantage is None:
                reject_reason = "the run ended" if sample.verdict.scored else "no score"
            yield _row(group.prompt, messages, sample, turns, advantage, reject_reason)


def _mean_advantages(plan: UpdatePlan) -> np.ndarray:
    if len(plan.advantages) == len(plan.keys):
        return plan.advantages
    owners = np.arange(len(plan.keys)).repeat(plan.num_spans)
    return np.bincount(owners, plan.advantages * plan.span_lengths, len(plan.keys)) / plan.num_sampled


def _credit(turns: list[TurnRow], advantages: np.ndarray) -> None:
    for turn, advantage in zip((turn for turn in turns if turn.token_ids), advantages.tolist(), strict=True):
        turn.advantage = advantage


def held_out(groups: Iterable[Group]) -> Iterator[SampleRow]:
    """Yield one row per answer of an evaluation; the ticket is the prompt's index."""
    for group in groups:
        messages = _messages(group)
        for sample, turns in zip(group.samples, _turns(group), strict=True):
            yield _row(group.prompt, messages, sample, turns, None, "held out")


def of_rows(track: Run, source: RowSource) -> RowLog:
    """Return a log of a supervised run's held-out rows and their scores."""

    def log(step: int, scores: Mapping[tuple[int, int], float]) -> None:
        found = ((*key, source.shown(*key), score) for key, score in scores.items())
        track.log_eval(step, (_written(*one) for one in found if one[2]))

    return log


def _written(number: int, answer: int, shown: Conversation, score: float) -> SampleRow:
    *given, last = shown.messages
    turn = TurnRow(last.plain_text, [], [], [], [], "stop")
    verdict = verdict_row(Verdict("ok", score))
    return SampleRow(number, answer, str(number), "rows", given, "", [turn], verdict, None, False, "held out")


def _row(
    prompt: Prompt,
    messages: Sequence[Message] | msgspec.Raw,
    sample: Sample,
    turns: list[TurnRow],
    advantage: float | None,
    reject_reason: str | None,
) -> SampleRow:
    return SampleRow(
        ticket=sample.ticket,
        answer=sample.answer,
        id=prompt.id,
        domain=prompt.domain,
        messages=messages,
        ground_truth=prompt.ground_truth,
        turns=turns,
        verdict=verdict_row(sample.verdict),
        advantage=advantage,
        kept=reject_reason is None,
        reject_reason=reject_reason,
        greedy=sample.greedy,
        unit=sample.unit,
        last=sample.last,
    )


def _messages(group: Group) -> Sequence[Message] | msgspec.Raw:
    # Encoded once for all samples, unless the log must keep their pictures.
    messages = group.prompt.messages
    return msgspec.Raw(_encode(messages)) if all(isinstance(one.content, str) for one in messages) else messages


def _turns(group: Group) -> Iterator[list[TurnRow]]:
    rendered = group.samples[0].turns[0].prompt_ids
    common = msgspec.Raw(_encode(rendered.tolist()))
    exact = np.array(concat([turn.logprobs for sample in group.samples for turn in sample.turns], "f"), np.float64)
    logprobs, begin = exact.round(DECIMALS).tolist(), 0
    for sample in group.samples:
        rows = []
        for turn in sample.turns:
            end = begin + len(turn.token_ids)
            row = TurnRow(
                text=turn.text,
                prompt_ids=common if turn.prompt_ids is rendered else turn.prompt_ids.tolist(),
                token_ids=turn.token_ids.tolist(),
                logprobs=logprobs[begin:end],
                versions=turn.versions.tolist(),
                finish_reason=turn.finish_reason,
                step=_step(turn.step) if turn.step else None,
                pictures=turn.pictures,
            )
            rows.append(row)
            begin = end
        yield rows


def _step(step: AgentStep) -> StepRow:
    return StepRow(
        observation=step.observation,
        reward=step.reward,
        state=f"{step.state % (1 << 64):016x}",
        action=step.action,
        board=step.board,
        metrics=step.metrics,
    )


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as the log has it, without empty texts."""
    fields = {"status": verdict.status, "score": verdict.score, "parts": dict(verdict.parts)}
    more = {"detail": verdict.detail, "answer": verdict.answer}
    return fields | {name: text for name, text in more.items() if text}
