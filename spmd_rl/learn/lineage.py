"""The sample log's rows: each sample from its prompt to its advantage, and why it was kept or not."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from spmd_rl.learn.prepare import Plan
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Collected
from spmd_rl.types import Group, Turn, Verdict, concat

DECIMALS = 6
"""Of a logprob."""


def rows(collected: Collected, plan: Plan, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """One row per finished sample of this rank, in (ticket, answer) order."""
    advantages = dict(zip(map(tuple, plan.keys.tolist()), plan.advantages.tolist(), strict=True))
    left_out = dict(plan.left_out)
    reasons: dict[int, str] = {group.ticket: reason for group, reason in collected.dropped}
    groups = sorted([*collected.groups, *(group for group, _ in collected.dropped)], key=lambda g: g.ticket)
    for group in groups:
        prompt, logprobs = _prompt(group), _logprobs(group)
        for sample in group.samples:
            advantage = advantages.get(sample.key)
            why_not = reasons.get(group.ticket) or left_out.get(sample.key)
            if why_not is None and advantage is None:
                why_not = "no score"
            yield {
                "ticket": sample.ticket,
                "answer": sample.answer,
                **prompt,
                "turns": [_turn(turn, logprobs, tokenizer) for turn in sample.turns],
                "verdict": _verdict(sample.verdict),
                "advantage": advantage,
                "kept": why_not is None,
                "why_not": why_not,
            }


def _prompt(group: Group) -> dict[str, Any]:
    """What the rows of a group have in common."""
    prompt = group.prompt
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "messages": [{"role": m.role, "content": m.content} for m in prompt.messages],
        "ground_truth": prompt.ground_truth,
    }


def _logprobs(group: Group) -> Iterator[float]:
    """Of all sampled tokens of a group in order, rounded: at once, as `round` takes longer than all else in a row."""
    exact = np.array(concat([turn.logprobs for sample in group.samples for turn in sample.turns], "f"), np.float64)
    return iter(exact.round(DECIMALS).tolist())


def _turn(turn: Turn, logprobs: Iterator[float], tokenizer: Tokenizer) -> dict[str, Any]:
    """logprobs: its own are the next ones."""
    return {
        "text": tokenizer.decode(turn.token_ids),
        "prompt_ids": turn.prompt_ids.tolist(),
        "token_ids": turn.token_ids.tolist(),
        "logprobs": list(islice(logprobs, len(turn.token_ids))),
        "versions": turn.versions.tolist(),
        "finish_reason": turn.finish_reason,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    told = {"status": verdict.status, "score": verdict.score, "parts": dict(verdict.parts)}
    return told | {"detail": verdict.detail} if verdict.detail else told
