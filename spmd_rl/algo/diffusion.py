"""Flow matching as a decision process: stochastic sampling steps, their densities, and the losses of diffusion models.

Latents are x_s = (1 - s) x_0 + s n with data x_0, noise n and noise level s from 1 to 0, and the model gives the
velocity v = dx/ds. Tensors are float32 [B, ...] for B pictures; losses and logprobs are [B], means over a latent's
elements, as in the authors' code: a ratio of whole latents would be 0 or infinite.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.algo.policy.clipped import surrogate
from spmd_rl.algo.policy.ratios import safe_exp


class Gauss(NamedTuple):
    """Distribution of a latent after a step, independent in each element."""

    mean: Tensor
    std: float


def flow_noise(level: float, first: float, noise: float) -> float:
    """Noise of Flow-GRPO: more at high noise levels.

        g(s) = noise sqrt(s / (1 - s)),   with the second level in the place of s = 1

    Source: Flow-GRPO (arXiv 2505.05470, section 4.2).
    Keys: `noise`: 0.7 in the paper.
    Use: the default of `feedback.loss=grpo`.
    """
    level = min(level, first)
    return noise * math.sqrt(level / (1 - level))


def constant_noise(level: float, first: float, noise: float) -> float:
    """Noise of DanceGRPO, equal at all levels.

        g(s) = noise

    Source: DanceGRPO (arXiv 2505.07818, section 3.1).
    Keys: `noise`: 0.3 in the paper.
    Use: with `feedback.same_noise=true`, DanceGRPO's form of the step.
    """
    return noise


NOISES: dict[str, Callable[[float, float, float], float]] = {"flow": flow_noise, "constant": constant_noise}
"""Diffusion coefficients by name: level, the second level of the run, `noise` -> g"""


def sde_step(latents: Tensor, velocity: Tensor, level: float, after: float, g: float) -> Gauss:
    """Distribution of the next latent under the SDE that has the same marginals as the flow's ODE.

        x' ~ N(x + (v + g^2 / (2 s) (x + (1 - s) v)) ds, g^2 |ds|),   ds = s' - s < 0

    Source: Flow-GRPO (arXiv 2505.05470, eq. 8 and 9); with `constant_noise` the step of DanceGRPO (arXiv 2505.07818,
    eq. 6), whose score -(x - (1 - s) x_0) / s^2 is -(x + (1 - s) v) / s. With g = 0 the Euler step of the ODE.
    Use: samples a step of `feedback.loss=grpo`, and gives its density.
    """
    ds = after - level
    mean = latents + (velocity + g**2 / (2 * level) * (latents + (1 - level) * velocity)) * ds
    return Gauss(mean, g * math.sqrt(-ds))


def log_density(found: Tensor, step: Gauss) -> Tensor:
    """Return the log density of latents after a step in nats per element, [B]."""
    per_element = -((found - step.mean) ** 2) / (2 * step.std**2) - math.log(step.std) - 0.5 * math.log(2 * math.pi)
    return per_element.flatten(1).mean(1)


def step_kl(step: Gauss, reference: Gauss) -> Tensor:
    """KL of a step from the reference's step, in nats per element, exact.

        KL = mean (mu - mu_ref)^2 / (2 std^2)

    Source: Flow-GRPO (arXiv 2505.05470, section 4.1).
    Keys: `kl_coef`: its weight in the loss.
    Use: keeps pictures near the initial model's; 0.04 in the paper.
    """
    return ((step.mean - reference.mean) ** 2).flatten(1).mean(1) / (2 * step.std**2)


def flow_grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of PPO on the steps of a trajectory, each with the advantage of its picture.

        L = -min(r A, clip(r, 1 - clip, 1 + clip) A),   r = exp(log p(x'|x) - log p_old(x'|x))

    Source: Flow-GRPO (arXiv 2505.05470, eq. 5), DanceGRPO (arXiv 2505.07818, eq. 8); steps outside of a window are of
    the ODE and not trained on: MixGRPO (arXiv 2507.21802, section 3.2).
    Keys: `clip`: with logprobs per element ratios are near 1, so that the authors take 1e-4; `window`,
    `window_every`: steps that are sampled and trained, and after how many training steps the window moves.
    Use: any reward, differentiable or not.
    """
    log_ratio = logprobs - old_logprobs
    ratio = safe_exp(log_ratio)
    objective, clipped = surrogate(ratio, advantages, clip, clip)
    metrics = {"actor/ratio": ratio, "actor/clipfrac": clipped.float(), "actor/approxkl": ratio - 1 - log_ratio}
    return -objective, {name: value.detach() for name, value in metrics.items()}


def nft(velocity: Tensor, old: Tensor, target: Tensor, goodness: Tensor, *, beta: float) -> Tensor:
    """Loss of DiffusionNFT: flow matching towards good pictures and, mirrored at the old policy, away from bad ones.

        L = r |v+ - v|^2 + (1 - r) |v- - v|^2,   v+ = (1 - beta) v_old + beta v_theta,  v- = (1 + beta) v_old - beta
        v_theta

    Source: DiffusionNFT (arXiv 2509.16117, eq. 5 to 7); squares are means over elements, without the authors' adaptive
    weight, and the old policy is the one that sampled the step.
    Keys: `beta`: strength of the mirror; `advantage_clip`: r = (1 + A / advantage_clip) / 2, clipped to [0, 1].
    Use: no SDE and no trajectories, with any sampler; any reward.

    velocity, old, target [B, ...]: of the policy, with gradient, of the policy that sampled, and n - x_0 of a picture
    and new noise. goodness [B].
    """
    good = ((1 - beta) * old + beta * velocity - target).square().flatten(1).mean(1)
    bad = ((1 + beta) * old - beta * velocity - target).square().flatten(1).mean(1)
    return goodness * good + (1 - goodness) * bad


def goodness(advantages: Tensor, bound: float) -> Tensor:
    """Return DiffusionNFT's r in [0, 1] of advantages: (1 + A / bound) / 2, clipped."""
    return ((1 + advantages / bound) / 2).clamp(0, 1)


def trained_steps(num_steps: int, window: int | None, moves: int) -> range:
    """Return the sampling steps with noise, which are trained: all but the last, or a window of them.

    moves: how often the window has moved by its own length; it returns to the start at the end. The last step ends at
    noise level 0 and is the ODE's.
    """
    if window is None or window >= num_steps - 1:
        return range(num_steps - 1)
    begin = (moves * window) % (num_steps - 1)
    return range(begin, min(begin + window, num_steps - 1))


def shifted(num_steps: int, shift: float) -> list[float]:
    """Return noise levels from 1 to 0, float [num_steps + 1], moved towards 1 by `shift` (1: equally spaced).

        s = shift t / (1 + (shift - 1) t)

    Source: Scaling Rectified Flow Transformers (arXiv 2403.03206, eq. 23).
    """
    times = [1 - i / num_steps for i in range(num_steps + 1)]
    return [shift * t / (1 + (shift - 1) * t) for t in times]


def noised(pictures: Tensor, noise: Tensor, level: float) -> Tensor:
    """Return x_s = (1 - s) x_0 + s n."""
    return torch.lerp(pictures, noise, level)
