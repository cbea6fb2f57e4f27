"""Losses of the form -(detached weight) A log pi: the policy gradient and its importance-weighted variants.

A token's weight is bounded instead of its gradient clipped. Only the gradient of such a loss has a meaning. Shapes are
those of `clipped.py`.
"""

import torch
from torch import Tensor

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.clipped import Loss
from spmd_rl.algo.policy.ratios import log_ratios, quantities, run_sums, token_ratios


def vanilla_pg(tokens: Tokens) -> Loss:
    """The policy gradient itself: no ratio, no bound.

        L_t = -A_t log pi(t)

    Source: REINFORCE (Williams 1992); Sutton et al. 2000, theorem 1.
    Use: exactly one update per batch of fresh samples.
    """
    return -tokens.advantages * tokens.logprobs, quantities(tokens, token_ratios(tokens))


def tis(tokens: Tokens) -> Loss:
    """Truncated importance sampling: the policy gradient, weighted by the ratio up to 1.

        L_t = -sg[min(r_t, 1)] A_t log pi(t)

    Source: IMPALA (arXiv 1802.01561, eq. 1, truncation at 1); for language models: TOPR (arXiv 2503.14286).
    Use: samples of an older policy; no token gains weight by becoming likelier.
    """
    ratio = token_ratios(tokens).detach()
    weight = ratio.clamp(max=1)
    return -weight * tokens.advantages * tokens.logprobs, quantities(tokens, weight, ratio > 1)


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """CISPO: the ratio is clipped as a weight, so no token drops out of the gradient.

        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log pi(t)

    The paper's optional token mask (its eq. 7) makes the gradient PPO's: that is `ppo_clip`.

    Source: MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5), under `token-mean`.
    Keys: `clip_low`, `clip_high`: the band of the weight; the paper has no lower bound (`clip_low` 1); ScaleRL (arXiv
    2510.13786) caps at 5 (`clip_high` 4).
    Use: rare, decisive tokens move far in one update, and PPO would cut them first.
    """
    ratio = token_ratios(tokens).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * tokens.advantages * tokens.logprobs, quantities(tokens, ratio, weight != ratio)


def topr(tokens: Tokens) -> Loss:
    """TOPR: positive tokens learn as in supervised training, negative ones fade as their sample becomes unlikely.

        L_t = -A_t log pi(t)                        where A_t >= 0
        L_t = -sg[min(R_i, 1)] A_t log pi(t)        where A_t < 0;    R_i = product over t in i of r_t

    Source: TOPR (arXiv 2503.14286, eq. 8), under `seq-mean-token-sum`.
    Use: off-policy or offline samples, without a KL term. The baseline in A balances right and wrong answers.
    """
    sample = run_sums(log_ratios(tokens).detach(), tokens.samples)
    weight = torch.where(tokens.advantages < 0, sample.clamp(max=0).exp(), torch.ones_like(sample))
    clipped = (tokens.advantages < 0) & (sample > 0)
    return -weight * tokens.advantages * tokens.logprobs, quantities(tokens, weight, clipped)


def dppo_tv(tokens: Tokens, *, clip_low: float, clip_high: float, dppo_cap: float) -> Loss:
    """DPPO: a token is left out if its probability has moved too far in the direction of its update.

        L_t = -M_t sg[min(r_t, dppo_cap)] A_t log pi(t);    M_t = 0 where A_t > 0 and pi(t) - pi_old(t) > clip_high,
        or A_t < 0 and pi_old(t) - pi(t) > clip_low, else 1

    |pi(t) - pi_old(t)| is the total variation of "this token or another". Rare tokens, whose ratios are noisy, stay in;
    frequent ones can be left out.

    Source: DPPO-Binary-TV (arXiv 2602.04879); its trust region is the sampling policy's: `old_logprobs=engine`.
    Keys: `clip_low`, `clip_high`: bounds of the difference, such as 0.15; `dppo_cap`: largest ratio.
    Use: an older policy or an engine of lower precision, with large vocabularies.
    """
    probability, old = tokens.logprobs.detach().exp(), tokens.old_logprobs.exp()
    moved = probability - old
    return _dppo(tokens, moved > clip_high, moved < -clip_low, dppo_cap)


def dppo_kl(tokens: Tokens, *, clip_low: float, clip_high: float, dppo_cap: float) -> Loss:
    """DPPO with the KL divergence of "this token or another".

        L_t = -M_t sg[min(r_t, dppo_cap)] A_t log pi(t);    M_t = 0 where A_t > 0, pi(t) > pi_old(t), D_t > clip_high,
        or A_t < 0, pi(t) < pi_old(t), D_t > clip_low, else 1;
        D_t = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    Source: DPPO-Binary-KL (arXiv 2602.04879); trust region as in `dppo_tv`.
    Keys: `clip_low`, `clip_high`: bounds of the divergence in nats, such as 0.05; `dppo_cap`: largest ratio.
    Use: as `dppo_tv`; stricter on nearly certain tokens.
    """
    new, old = tokens.logprobs.detach().double(), tokens.old_logprobs.double()
    others_new, others_old = _log_of_others(new), _log_of_others(old)
    divergence = old.exp() * (old - new) + others_old.exp() * (others_old - others_new)
    return _dppo(tokens, (new > old) & (divergence > clip_high), (new < old) & (divergence > clip_low), dppo_cap)


def _log_of_others(logprobs: Tensor) -> Tensor:
    # Clamped: the result is finite where p is 1.
    return torch.log1p(-logprobs.exp().clamp(max=1 - torch.finfo(logprobs.dtype).eps))


def _dppo(tokens: Tokens, above: Tensor, below: Tensor, cap: float) -> Loss:
    """above, below: bool [N]: the token's probability has left its region."""
    left_out = (above & (tokens.advantages > 0)) | (below & (tokens.advantages < 0))
    ratio = token_ratios(tokens).detach()
    weight = ratio.clamp(max=cap).masked_fill(left_out, 0)
    return -weight * tokens.advantages * tokens.logprobs, quantities(tokens, weight, weight != ratio)
