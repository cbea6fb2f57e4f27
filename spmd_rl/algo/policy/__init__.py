"""Policy losses by name: pure functions from `Tokens` to a loss per token and metrics per token.

`POLICY_LOSSES[name](tokens, **keys) -> (loss [N], {metric: [N]})`; the keywords are keys of `algorithm`. `POLICY_TERMS`
can be added to any of them.
"""

from spmd_rl.algo.policy.clipped import dual_clip, gspo, gspo_token, ppo_clip, raft_pp, segment_clip
from spmd_rl.algo.policy.covariance import clip_cov, kl_cov
from spmd_rl.algo.policy.smooth import gmpo, kimi, sapo
from spmd_rl.algo.policy.terms import entropy_bonus, positive_sft
from spmd_rl.algo.policy.weighted import cispo, dppo_kl, dppo_tv, tis, topr, vanilla_pg

POLICY_LOSSES = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "segment_clip": segment_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "raft_pp": raft_pp,
    "vanilla_pg": vanilla_pg,
    "tis": tis,
    "cispo": cispo,
    "topr": topr,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
    "gmpo": gmpo,
    "kimi": kimi,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
POLICY_TERMS = {"sft": positive_sft, "entropy": entropy_bonus}
