"""The policy losses written from their papers as float64 loops over one sample, to compare `algo/policy` with.

`REFERENCES[name](sample, new, stopped, **keys) -> loss of each token`. `new` is the logprobs that the gradient sees and
`stopped` those inside a stop-gradient: equal for the value; for a numerical derivative only `new` is moved.
"""

import math
from collections.abc import Callable

from tests.unit.algo.cases import Sample

Floats = list[float]


def exp(x: float) -> float:
    """With the documented clamp of log ratios."""
    return math.exp(min(max(x, -20.0), 20.0))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: Floats) -> float:
    return math.fsum(values) / len(values)


def surrogate(r: float, a: float, low: float, high: float) -> float:
    return min(r * a, clip(r, 1 - low, 1 + high) * a)


def ppo_clip(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    return [-surrogate(exp(n - o), a, clip_low, clip_high) for n, o, a in zip(new, s.old, s.advantages, strict=True)]


def dual_clip(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float, dual_clip: float) -> Floats:
    out = []
    for n, o, a in zip(new, s.old, s.advantages, strict=True):
        value = surrogate(exp(n - o), a, clip_low, clip_high)
        out.append(-max(value, dual_clip * a) if a < 0 else -value)
    return out


def segment_clip(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    out = []
    for turn, a in zip(s.turns, s.advantages, strict=True):
        mine = [n - o for n, o, other in zip(new, s.old, s.turns, strict=True) if other == turn]
        out.append(-surrogate(exp(mean(mine)), a, clip_low, clip_high))
    return out


def gspo(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    ratio = exp(sum(new) / len(new) - sum(s.old) / len(new))
    return [-surrogate(ratio, a, clip_low, clip_high) for a in s.advantages]


def gspo_token(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    ratio = exp(mean(stopped) - mean(s.old))
    return [
        -surrogate(ratio * math.exp(n) / math.exp(f), a, clip_low, clip_high)
        for n, f, a in zip(new, stopped, s.advantages, strict=True)
    ]


def raft_pp(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    out = []
    for n, o, a in zip(new, s.old, s.advantages, strict=True):
        r = exp(n - o)
        out.append(-a * min(r, clip(r, 1 - clip_low, 1 + clip_high)) if a > 0 else 0.0)
    return out


def vanilla_pg(s: Sample, new: Floats, stopped: Floats) -> Floats:
    return [-a * n for n, a in zip(new, s.advantages, strict=True)]


def tis(s: Sample, new: Floats, stopped: Floats) -> Floats:
    return [-clip(exp(f - o), 0, 1) * a * n for n, f, o, a in zip(new, stopped, s.old, s.advantages, strict=True)]


def cispo(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    return [
        -clip(exp(f - o), 1 - clip_low, 1 + clip_high) * a * n
        for n, f, o, a in zip(new, stopped, s.old, s.advantages, strict=True)
    ]


def topr(s: Sample, new: Floats, stopped: Floats) -> Floats:
    trajectory = 1.0
    log_trajectory = math.fsum(f - o for f, o in zip(stopped, s.old, strict=True))
    trajectory = clip(math.exp(min(log_trajectory, 700.0)), 0, 1)
    return [-(trajectory if a < 0 else 1.0) * a * n for n, a in zip(new, s.advantages, strict=True)]


def dppo(s: Sample, new: Floats, stopped: Floats, far: Callable[[float, float, float], bool], cap: float) -> Floats:
    """`far(p, q, advantage)`: whether a token of this probability now, q before, is left out."""
    out = []
    for n, f, o, a in zip(new, stopped, s.old, s.advantages, strict=True):
        p, q = math.exp(f), math.exp(o)
        out.append(0.0 if far(p, q, a) else -min(exp(f - o), cap) * a * n)
    return out


def dppo_tv(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float, dppo_cap: float) -> Floats:
    def far(p: float, q: float, a: float) -> bool:
        return p - q > clip_high if a > 0 else a < 0 and q - p > clip_low

    return dppo(s, new, stopped, far, dppo_cap)


def dppo_kl(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float, dppo_cap: float) -> Floats:
    def log_of_rest(p: float) -> float:
        return math.log(1 - p) if p < 1 else -36.0

    def far(p: float, q: float, a: float) -> bool:
        divergence = q * math.log(q / p) + (1 - q) * (log_of_rest(q) - log_of_rest(min(p, 1 - 2e-16)))
        return p > q and divergence > clip_high if a > 0 else a < 0 and p < q and divergence > clip_low

    return dppo(s, new, stopped, far, dppo_cap)


def sapo(s: Sample, new: Floats, stopped: Floats, sapo_tau_pos: float, sapo_tau_neg: float) -> Floats:
    out = []
    for n, o, a in zip(new, s.old, s.advantages, strict=True):
        tau = sapo_tau_pos if a > 0 else sapo_tau_neg
        x = tau * (exp(n - o) - 1)
        out.append(-(4 / tau) / (1 + math.exp(-min(x, 700.0))) * a)
    return out


def gmpo(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    """The product form: (prod_t min(r^s, clip(r)^s)^s)^(1/T) A, with s the sign of A."""
    a = mean(s.advantages)
    sign = (a > 0) - (a < 0)
    log_product = 0.0
    for n, o in zip(new, s.old, strict=True):
        r = math.exp(n - o)
        banded = clip(r, math.exp(-clip_low), math.exp(clip_high))
        log_product += math.log(min(r**sign, banded**sign) ** sign)
    return [-exp(log_product / len(new)) * a] * len(new)


def kimi(s: Sample, new: Floats, stopped: Floats, kimi_tau: float) -> Floats:
    pull = kimi_tau / 2 * (sum(new) - sum(s.old)) ** 2
    return [-a * n + pull / len(new) for n, a in zip(new, s.advantages, strict=True)]


def clip_cov(s: Sample, new: Floats, stopped: Floats, clip_low: float, clip_high: float) -> Floats:
    plain = ppo_clip(s, new, stopped, clip_low, clip_high)
    return [0.0 if m else value for m, value in zip(s.marked, plain, strict=True)]


def kl_cov(s: Sample, new: Floats, stopped: Floats, kl_cov_coef: float) -> Floats:
    return [
        -exp(n - o) * a + (kl_cov_coef * abs(n - o) if m else 0.0)
        for n, o, a, m in zip(new, s.old, s.advantages, s.marked, strict=True)
    ]


def sft(s: Sample, new: Floats, stopped: Floats, sft_coef: float) -> Floats:
    return [-sft_coef * n * right for n, right in zip(new, s.right, strict=True)]


def entropy(s: Sample, new: Floats, stopped: Floats, entropy_coef: float) -> Floats:
    return [-entropy_coef * h for h in s.entropy]


REFERENCES: dict[str, Callable[..., Floats]] = {
    function.__name__: function
    for function in (
        ppo_clip, dual_clip, segment_clip, gspo, gspo_token, raft_pp, vanilla_pg, tis, cispo, topr, dppo_tv, dppo_kl,
        sapo, gmpo, kimi, clip_cov, kl_cov, sft, entropy,
    )
}  # fmt: skip
