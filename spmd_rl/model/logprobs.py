"""Logprob and entropy of given tokens under given logits, in float32 whatever the logits' dtype, lean in memory.

A [N, V] tensor in float32 exists only for a slice of rows at a time; kept for the backward pass are the logits as the
model made them and one number a row. Left out: the projection to the vocabulary (chunking that too belongs here).
"""

import torch
from torch import Tensor

SLICE = 2**21
"""Logits in float32 at a time: 8 MiB."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each row, of softmax(logits / temperature).

    logits: [N, V], any floating dtype; targets: int64 [N]. Returns float32 [N] each (float64 for float64 logits);
    gradients flow through the logprobs, the entropy is detached.
    """
    assert temperature > 0
    return _TokenLogprobs.apply(logits, targets, temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_z, entropy, chosen = (logits.new_empty(len(targets), dtype=dtype) for _ in range(3))
        for rows in _slices(logits):
            x = logits[rows].to(dtype) / temperature
            top = x.amax(-1, keepdim=True)
            x -= top
            p = x.exp()
            z = p.sum(-1)
            log_z[rows] = z.log() + top.squeeze(-1)
            chosen[rows] = x.gather(-1, targets[rows, None]).squeeze(-1) - z.log()
            entropy[rows] = z.log() - p.mul_(x).sum(-1) / z
        ctx.save_for_backward(logits, targets, log_z)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_z = ctx.saved_tensors
        out = torch.empty_like(logits)
        scaled = grad / ctx.temperature
        for rows in _slices(logits):
            # d logprob / d logit = (one at the target - softmax) / temperature
            x = (logits[rows].to(log_z.dtype) / ctx.temperature).sub_(log_z[rows, None]).exp_()
            x.mul_(-scaled[rows, None])
            x.scatter_add_(-1, targets[rows, None], scaled[rows, None])
            out[rows] = x
        return out, None, None


def _slices(logits: Tensor) -> list[slice]:
    step = max(1, SLICE // max(1, logits.shape[-1]))
    return [slice(i, min(i + step, len(logits))) for i in range(0, len(logits), step)]
