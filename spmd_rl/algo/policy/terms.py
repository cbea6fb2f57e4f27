"""Terms that are added to a policy loss, each with a coefficient. Shapes are those of `clipped.py`."""

import torch

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.clipped import Loss
from spmd_rl.algo.policy.ratios import run_means


def positive_sft(tokens: Tokens, *, sft_coef: float) -> Loss:
    """Add a supervised loss on the policy's own samples of positive advantage.

        L_t = -sft_coef log pi(t) where the mean advantage of the sample is positive, else 0

    Source: VAPO (arXiv 2504.05118, positive example LM loss).
    Keys: `sft_coef`: weight of the term, >= 0; VAPO takes 0.1.
    Use: right answers are rare and must not be forgotten.
    """
    positive = run_means(tokens.advantages, tokens.samples) > 0
    loss = torch.where(positive, -tokens.logprobs, torch.zeros_like(tokens.logprobs))
    return sft_coef * loss, {"actor/sft_loss": loss.detach()}


def entropy_bonus(tokens: Tokens, *, entropy_coef: float) -> Loss:
    """Add a bonus for the entropy of the policy.

        L_t = -entropy_coef H(pi at t)

    Source: Asynchronous Methods for Deep Reinforcement Learning (arXiv 1602.01783, section 4); PPO (arXiv 1707.06347,
    eq. 9).
    Keys: `entropy_coef`: weight of the bonus, >= 0; at vocabulary size, 1e-3 is already strong.
    Use: exploration ends too soon. `Tokens.entropy` must carry a gradient.
    """
    return -entropy_coef * tokens.entropy, {"actor/entropy_loss": tokens.entropy.detach()}
