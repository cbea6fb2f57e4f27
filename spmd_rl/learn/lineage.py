"""The sample log's rows: each sample from its prompt to its advantage, and why it was kept or not."""

from collections.abc import Iterator
from typing import Any

from spmd_rl.learn.prepare import Plan
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Collected
from spmd_rl.types import Group, Sample, Turn


def rows(collected: Collected, plan: Plan, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """One row per finished sample of this rank, in (ticket, answer) order."""
    advantages, left_out = dict(zip(plan.keys, plan.advantages, strict=True)), dict(plan.left_out)
    reasons: dict[int, str] = {group.ticket: reason for group, reason in collected.dropped}
    groups = sorted([*collected.groups, *(group for group, _ in collected.dropped)], key=lambda g: g.ticket)
    for group in groups:
        for sample in group.samples:
            why_not = reasons.get(group.ticket) or left_out.get(sample.key)
            if why_not is None and sample.key not in advantages:
                why_not = "no score"
            yield _row(group, sample, advantages.get(sample.key), why_not, tokenizer)


def _row(group: Group, sample: Sample, advantage: float | None, why_not: str | None, tokenizer: Tokenizer) -> dict:
    verdict = sample.verdict
    return {
        "ticket": sample.ticket,
        "answer": sample.answer,
        "id": group.prompt.id,
        "domain": group.prompt.domain,
        "messages": [{"role": m.role, "content": m.content} for m in group.prompt.messages],
        "ground_truth": group.prompt.ground_truth,
        "turns": [_turn(turn, tokenizer) for turn in sample.turns],
        "verdict": {"status": verdict.status, "score": verdict.score, "parts": dict(verdict.parts)}
        | ({"detail": verdict.detail} if verdict.detail else {}),
        "advantage": advantage,
        "kept": why_not is None,
        "why_not": why_not,
    }


def _turn(turn: Turn, tokenizer: Tokenizer) -> dict:
    return {
        "text": tokenizer.decode(turn.token_ids),
        "prompt_ids": turn.prompt_ids.tolist(),
        "token_ids": turn.token_ids.tolist(),
        "logprobs": [round(x, 6) for x in turn.logprobs],
        "versions": turn.versions.tolist(),
        "finish_reason": turn.finish_reason,
    }
