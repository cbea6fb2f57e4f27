"""Clipped losses, the family of PPO: a token has no gradient where its importance ratio leaves a band.

Every loss takes `Tokens` (N tokens of whole samples) and returns the loss per token, float [N], and metrics per token,
float [N] each (see `ratios.quantities`).
"""

from dataclasses import replace

import torch
from torch import Tensor

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.ratios import log_ratios, quantities, run_means, safe_exp, token_ratios

Loss = tuple[Tensor, dict[str, Tensor]]


def surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's min(r A, clip(r, 1 - low, 1 + high) A), float [N], and where the clip is smaller, bool [N]."""
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(plain, clipped), clipped < plain


def ppo_clip(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """Clipped surrogate of PPO; with `clip_high` above `clip_low`, DAPO's clip-higher.

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),    r_t = pi(t) / pi_old(t)

    Source: PPO (arXiv 1707.06347, eq. 7); clip-higher: DAPO (arXiv 2503.14476, eq. 8 and 10).
    Keys: `clip_low`, `clip_high`: the ratio's band.
    Use: the default. GRPO has `seq-mean-token-mean`, DAPO `token-mean`, Dr.GRPO `seq-mean-token-sum-norm`.
    """
    return _clipped(tokens, token_ratios(tokens), clip_low, clip_high)


def dual_clip(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> Loss:
    """Clipped surrogate with a floor for negative advantages, against huge ratios.

        L_t = -max(S_t, c A_t) where A_t < 0, else -S_t;    S_t = min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

    Source: Dual-clip PPO (arXiv 1912.09729).
    Keys: `clip_low`, `clip_high`: as in `ppo_clip`; `dual_clip`: c > 1, the largest ratio where A < 0.
    Use: several updates on one batch, or samples of an older policy.
    """
    ratio = token_ratios(tokens)
    objective, clipped = surrogate(ratio, tokens.advantages, clip_low, clip_high)
    floor = dual_clip * tokens.advantages
    bounded = (tokens.advantages < 0) & (objective < floor)
    return -torch.where(bounded, floor, objective), quantities(tokens, ratio, clipped | bounded)


def segment_clip(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """Clipped surrogate on one ratio per segment (turn), the geometric mean of its tokens' ratios.

        L_t = -min(s_k A_t, clip(s_k, 1 - clip_low, 1 + clip_high) A_t),    s_k = exp(mean over t in k of log r_t)

    Source: Let It Flow (arXiv 2512.24873, interaction chunks); the ratio is GSPO's (arXiv 2507.18071, eq. 7), by
    segment.
    Keys: `clip_low`, `clip_high`: the band of s_k; for long turns as narrow as GSPO's.
    Use: multi-turn agents. On single-turn samples it is `gspo`.
    """
    return _clipped(tokens, safe_exp(run_means(log_ratios(tokens), tokens.segments)), clip_low, clip_high)


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """Clipped surrogate on one ratio per sample, the geometric mean of its tokens' ratios.

        L_t = -min(s_i A_t, clip(s_i, 1 - clip_low, 1 + clip_high) A_t),    s_i = exp(mean over t in i of log r_t)

    Each token has the sample's value, so `seq-mean-token-mean` gives the paper's objective.

    Source: GSPO (arXiv 2507.18071, eq. 5 and 7).
    Keys: `clip_low`, `clip_high`: the band of s_i, far narrower than a token's; the paper takes 3e-4 and 4e-4.
    Use: rewards of whole samples; mixtures of experts, whose token ratios jump with the routing.
    """
    return _clipped(tokens, safe_exp(run_means(log_ratios(tokens), tokens.samples)), clip_low, clip_high)


def gspo_token(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """GSPO's ratio and clip with each token's gradient, so that advantages may differ by token.

        L_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),    s_t = sg[s_i] pi(t) / sg[pi(t)]

    With one advantage per sample, value and gradient are those of `gspo` under `seq-mean-token-mean`.

    Source: GSPO (arXiv 2507.18071, eq. 13 and 14).
    Keys: `clip_low`, `clip_high`: as in `gspo`.
    Use: sequence ratios with token advantages (a critic, step rewards).
    """
    sample_ratio = safe_exp(run_means(log_ratios(tokens).detach(), tokens.samples))
    return _clipped(tokens, sample_ratio * (tokens.logprobs - tokens.logprobs.detach()).exp(), clip_low, clip_high)


def raft_pp(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """RAFT++: rejection sampling with importance weights; only positive advantages count.

        L_t = -max(A_t, 0) min(r_t, clip(r_t, 1 - clip_low, 1 + clip_high))

    The paper has A = the raw score in {0, 1}; with group-relative advantages a solved group weighs nothing. The
    authors' code also has `loss_agg=token-mean kl_coef=0.001`.

    Source: RAFT++ (arXiv 2504.11343), under `seq-mean-token-mean`.
    Keys: `clip_low`, `clip_high`: as in `ppo_clip`; only the upper bound binds.
    Use: binary rewards, a simple baseline; entropy falls faster than under GRPO.
    """
    positive = replace(tokens, advantages=tokens.advantages.clamp(min=0))
    return _clipped(positive, token_ratios(tokens), clip_low, clip_high)


def _clipped(tokens: Tokens, ratio: Tensor, clip_low: float, clip_high: float) -> Loss:
    objective, clipped = surrogate(ratio, tokens.advantages, clip_low, clip_high)
    return -objective, quantities(tokens, ratio, clipped)
