"""Preference losses by name: pure functions of the logprobs of whole answers, a loss for each comparison.

`PAIR_LOSSES[name](pairs, **keys) -> [P]`; `JUDGED_LOSSES[name](judged, **keys) -> [S]`; the keywords are keys of
`preference`.

r is the reward of an answer, log pi(y) - log pi_ref(y) summed over its tokens, of the mean token where
`length_normalised`; without a reference log pi_ref is 0. d is r(chosen) - r(rejected).
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, relu

from spmd_rl.algo.inputs import Judged, Pairs


def dpo(pairs: Pairs, *, beta: float, label_smoothing: float, length_normalised: bool) -> Tensor:
    """Direct preference optimisation: the chosen answer is the likelier one under a Bradley-Terry model.

        L = -(1 - label_smoothing) log sigmoid(beta d) - label_smoothing log sigmoid(-beta d)

    Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7; label smoothing: Mitchell 2023, conservative DPO.
    Keys: `beta`, `label_smoothing`, `length_normalised`
    Use: the default; beta 0.1 (more: nearer to the reference); label smoothing for noisy labels.
    """
    difference = beta * pairs.difference(length_normalised)
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


def ipo(pairs: Pairs, *, beta: float) -> Tensor:
    """Identity preference optimisation: a finite margin, normalised by length.

        L = (d - 1 / (2 beta))^2, with d of the mean token

    Source: Azar et al. 2023, arXiv 2310.12036, equation 17; normalised by length as TRL has it from the authors.
    Keys: `beta`
    Use: nearly deterministic preferences, where DPO keeps widening the margin.
    """
    return (pairs.difference(True) - 1 / (2 * beta)) ** 2


def simpo(pairs: Pairs, *, beta: float, label_smoothing: float, margin: float) -> Tensor:
    """Simple preference optimisation: the mean logprob is the reward, without a reference.

        L = -(1 - label_smoothing) log sigmoid(x) - label_smoothing log sigmoid(-x),  x = beta d - margin

    Source: Meng et al. 2024, arXiv 2405.14734, equation 6.
    Keys: `beta`, `label_smoothing`, `margin`
    Use: no memory for a reference; the paper's beta 2 to 2.5, margin 0.3 to 1.6.
    """
    difference = beta * pairs.difference(True) - margin
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


def hinge(pairs: Pairs, *, beta: float, length_normalised: bool) -> Tensor:
    """The hinge loss of SLiC: 0 for a pair with a wide margin.

        L = max(0, 1 - beta d)

    Source: Zhao et al. 2023, arXiv 2305.10425; with a reference as in TRL.
    Keys: `beta`, `length_normalised`
    Use: clean labels, bounded margins.
    """
    return relu(1 - beta * pairs.difference(length_normalised))


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor, *, center_coef: float) -> Tensor:
    """The loss of a reward model that scores two answers.

        L = -log sigmoid(r(chosen) - r(rejected) - margin) + center_coef (r(chosen) + r(rejected))^2

    Source: Ouyang et al. 2022, arXiv 2203.02155, equation 1; margins: Touvron et al. 2023, arXiv 2307.09288, equation
    2; centring: Eisenstein et al. 2023, arXiv 2312.09244.
    Keys: `center_coef`
    Use: `python -m spmd_rl.reward_model`; rows may have a `margin`. A small coefficient (0.01) keeps scores around 0.

    Three of float [P]; returns float [P].
    """
    return -logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2


def kto(judged: Judged, *, beta: float, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """Kahneman-Tversky optimisation: each answer against the average gain, without pairs.

        L = desirable_weight (1 - sigmoid(beta (r - z))), or undesirable_weight (1 - sigmoid(beta (z - r)))
        z = max(0, mean of r over prompts with answers to other prompts), without gradient

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8.
    Keys: `beta`, `desirable_weight`, `undesirable_weight`
    Use: votes in place of pairs. Weight the rarer kind: 1 to 1.33 times the other in all.

    Returns float [S].
    """
    gain = beta * (judged.rewards - judged.baseline)
    good = desirable_weight * (1 - gain.sigmoid())
    return torch.where(judged.desirable, good, undesirable_weight * (1 - (-gain).sigmoid()))


def binary(values: Tensor, labels: Tensor) -> Tensor:
    """The loss of a reward model that judges if an answer, or a step of one, is right.

        L = -log sigmoid(v) where it is right, -log sigmoid(-v) where it is wrong

    Source: outcome: Cobbe et al. 2021, arXiv 2110.14168; process: Lightman et al. 2023, arXiv 2305.20050.
    Keys: none
    Use: `python -m spmd_rl.reward_model head=outcome` and `head=process`.

    values: float [N], logits; labels: [N], 1 or 0; returns float [N].
    """
    return binary_cross_entropy_with_logits(values, labels.to(values.dtype), reduction="none")


PAIR_LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "hinge": hinge}
JUDGED_LOSSES = {"kto": kto}
