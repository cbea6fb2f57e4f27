"""Terms that can be added to a policy loss. Shapes are those of `clipped.py`."""

import torch

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.clipped import Loss


def positive_sft(tokens: Tokens, *, sft_coef: float) -> Loss:
    """Add a supervised loss on the policy's right answers: the mean over their tokens, for any aggregation.

        L = -sft_coef / sum_{o in T} |o| * sum_{o in T} sum_t log pi(t),   T the right answers of the mini-batch

    Source: VAPO (arXiv 2504.05118, positive example LM loss).
    Keys: `sft_coef`: weight, >= 0; VAPO takes 0.1; `pass_score`: least score of a right answer.
    Use: right answers are rare. Groups that are all right count too.
    """
    loss = -tokens.logprobs * (torch.zeros_like(tokens.logprobs) if tokens.right is None else tokens.right)
    return sft_coef * loss, {"actor/sft_loss": loss.detach()}


def entropy_bonus(tokens: Tokens, *, entropy_coef: float) -> Loss:
    """Add a bonus for the entropy of the policy.

        L_t = -entropy_coef H(pi at t)

    Source: A3C (arXiv 1602.01783, section 4); PPO (arXiv 1707.06347, eq. 9).
    Keys: `entropy_coef`: weight, >= 0; 1e-3 is already strong.
    Use: exploration ends too soon. `Tokens.entropy` must carry a gradient.
    """
    return -entropy_coef * tokens.entropy, {"actor/entropy_loss": tokens.entropy.detach()}
