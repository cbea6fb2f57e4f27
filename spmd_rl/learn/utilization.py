"""Model FLOPs utilization (MFU): the arithmetic of a step against its devices' peak.

A prompt that answers share counts once. Recomputed activations, evaluation and aborted answers do not count; a partial
rollout counts in the step that ends it.
"""

import numpy as np
import torch

from spmd_rl.learn.balance import begins
from spmd_rl.model.size import ModelSize

PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA B200": 2250e12,
    "AMD Instinct MI300X": 1307.4e12,
}
"""Dense bfloat16 operations per second by the driver's device name, from vendors' data sheets"""


def peak_flops(given: float | None, device: torch.device, dtype: str) -> float | None:
    """Return the rate of the settings, or of a known device in bfloat16; None if unknown."""
    if given or device.type == "cpu" or dtype != "bfloat16":
        return given
    return PEAKS.get(torch.get_device_module(device).get_device_name(device))


def forward_flops(size: ModelSize, answers: np.ndarray) -> float:
    """Return the operations of a forward pass over `ANSWER` rows with equal tickets adjacent.

    2 x weights x tokens (Kaplan et al., arXiv 2001.08361, section 2.1), plus 4 x heads x head size for each pair of a
    token and one that it attends to.
    """
    first = begins(answers["ticket"])
    prompt, own = (answers[name].astype(np.float64) for name in ("num_prompt_tokens", "num_answer_tokens"))
    read = (prompt * first + answers["num_tokens"] - prompt - own).sum()
    attended = (prompt * own + own**2 / 2 + first * prompt**2 / 2).sum()
    return float(2 * size.per_token * (read + own.sum()) + 2 * size.head * own.sum() + 4 * size.attention * attended)
