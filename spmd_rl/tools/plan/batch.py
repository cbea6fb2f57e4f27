"""The batch of a plan: full micro-batches of the longest samples that the settings allow, on the CPU."""

import math

import torch

from spmd_rl.batch import Batch, bounds_of
from spmd_rl.config.batch_arithmetic import tokens_per_turn
from spmd_rl.config.schema import AlgorithmConfig, RolloutConfig


def num_microbatches(rollout: RolloutConfig, updates: int, num_shards: int, tokens_per_microbatch: int) -> int:
    """Return the number of micro-batches of each of a step's updates on each data shard, if all samples have maximum
    length.
    """
    longest = tokens_per_turn(rollout, rollout.max_prompt_tokens)
    samples = rollout.prompts_per_step * rollout.answers_per_prompt / updates / num_shards
    per_microbatch = max(1, tokens_per_microbatch // longest)
    return max(1, math.ceil(math.ceil(samples) / per_microbatch))


def full_batch(
    algorithm: AlgorithmConfig, longest: int, count: int, tokens_per_microbatch: int, vocabulary: int
) -> Batch:
    """Return a batch of `count` micro-batches, each filled to the last token with samples of one unit.

    Every token but the first of a sample counts as sampled, and no two samples begin alike: nothing is saved.
    """
    whole, rest = divmod(max(tokens_per_microbatch, longest), longest)
    lengths = [longest] * whole + ([rest] if rest > 1 else [])
    sizes = torch.tensor(lengths * count)
    total, first = int(sizes.sum()), bounds_of(sizes)[:-1]
    positions = torch.arange(total) - first.repeat_interleave(sizes)
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(total)
    tickets = torch.arange(count).repeat_interleave(len(lengths))
    return Batch(
        bounds_of(sizes),
        keys=torch.stack([tickets, torch.arange(len(lengths)).repeat(count)], 1),
        units=torch.zeros(len(sizes), dtype=torch.int64),
        token_ids=torch.randint(0, vocabulary, (total,), generator=generator),
        position_ids=positions,
        loss_mask=positions > 0,
        rollout_logprobs=zeros,
        lags=torch.zeros(total, dtype=torch.int32),
        advantages=zeros,
        weights=zeros,
        old_logprobs=zeros,
        ref_logprobs=zeros if algorithm.uses_reference else None,
        values=zeros if algorithm.uses_critic else None,
        returns=zeros if algorithm.uses_critic else None,
        marked=torch.zeros(total, dtype=torch.bool),
    )
