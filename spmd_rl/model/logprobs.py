"""Logprob and entropy of given tokens from hidden states, without materialising logits (as Wijmans et al., arXiv
2411.09009).

The projection runs in chunks of the vocabulary, with a running softmax, and again in the backward pass; two numbers per
token are kept in between. Sums are at least float32, of logits in the model's dtype, as an engine has them. Ranks that
shard the vocabulary (Megatron-LM, arXiv 1909.08053) combine four numbers per token.

With truncated sampling the softmax is over its `Support`: recorded candidates (top-k, top-p, min-p), or the tokens that
a constraint allows. Old, current and reference logprobs share it, so importance ratios compare the same tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from spmd_rl.base.devices import kind
from spmd_rl.config.architectures import LOGIT_FACTORS
from spmd_rl.model.load import owned_region

# Logits at a time: 8 MiB in float32 on the CPU, for its caches; 512 MiB on devices, for few and large products.
CHUNK, DEVICE_CHUNK = 2**21, 2**27

# With rows of odd width cuBLAS falls back to kernels that read a number at a time: on an H100 they took four times as
# long, a quarter of an update at 1.7B.
WIDTH = 128
"""Divisor of a chunk's row length"""


CUT = -1e20
"""Logit of a cut-off token; finite, so that no difference is NaN"""


class Support(Protocol):
    """Tokens that each row is drawn from."""

    def cut(self, x: Tensor, first: int, value: float) -> None:
        """Set cut-off tokens to `value` in place: x [N, C], of ids from `first` on."""
        ...


class Candidates(NamedTuple):
    """A `Support` of listed tokens."""

    rows: Tensor
    """int64 [M]: row of each candidate; a row without any has all tokens"""
    ids: Tensor

    def cut(self, x: Tensor, first: int, value: float) -> None:
        """Set unlisted tokens to `value`, see `Support`."""
        (num_rows, width), places = x.shape, self.ids - first
        # The additional last column takes the ids outside this part.
        gone = torch.zeros(num_rows, width + 1, dtype=torch.bool, device=x.device)
        gone[self.rows] = True
        gone[self.rows, torch.where((places >= 0) & (places < width), places, width)] = False
        x.masked_fill_(gone[:, :width], value)


class VocabularyShare(NamedTuple):
    """This rank's part of a vocabulary sharded in order."""

    first: int
    group: dist.ProcessGroup


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    support: Support | None = None,
    share: VocabularyShare | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob and each row's entropy, of softmax(hidden @ weight.T / temperature).

    hidden: [N, h]; weight: [V, h] of the same dtype; targets: int64 [N], or [N, m] for several a row; support: includes
    the targets. Returns float32 of the targets' shape and [N] (float64 for float64), with gradients to `hidden` and
    `weight`; an unused entropy costs no gradient.

    share: `weight` is this rank's part of the vocabulary; token ids are global. [all] Ranks have equal rows and
    results; each one's gradient to `hidden` is a term of the sum over ranks.
    """
    assert temperature > 0
    several = targets if targets.dim() > 1 else targets[:, None]
    found = _TokenLogprobs.apply(hidden, weight, several, temperature, support, share)  # [all]
    return found[0].view(targets.shape), found[1]


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    temperature: float = 1.0,
    num_ids: int | None = None,
    share: VocabularyShare | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each row's k most likely tokens and logprobs: int64 [N, k], float32 [N, k], most likely first.

    num_ids: only tokens below it, though all count in the softmax. A smaller vocabulary gives fewer than k. Otherwise
    as `token_logprobs`.
    """
    first, dtype = share.first if share else 0, torch.promote_types(hidden.dtype, torch.float32)
    best = hidden.new_empty((len(hidden), 0), dtype=dtype)
    ids = torch.empty_like(best, dtype=torch.int64)
    log_z = hidden.new_full((len(hidden),), -torch.inf, dtype=dtype)
    for begin, end in _chunks(hidden, weight):
        x = _logits(hidden, weight[begin:end], temperature).to(dtype)
        log_z = torch.logaddexp(log_z, x.logsumexp(-1))
        taken = x[:, : None if num_ids is None else max(0, num_ids - first - begin)]
        found, places = taken.topk(min(k, taken.shape[1]))
        best, ids = _best(torch.cat([best, found], 1), torch.cat([ids, places + first + begin], 1), k)
    if share is not None:
        parts = [torch.empty_like(log_z) for _ in range(share.group.size())]
        dist.all_gather(parts, log_z.contiguous(), group=share.group)  # [all]
        log_z = torch.stack(parts).logsumexp(0)
        best, ids = (_gathered(column, k, share.group) for column in (best, ids))  # [all]
        best, ids = _best(best, ids, k)
    return ids, best - log_z[:, None]


def _best(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, places = values.topk(min(k, values.shape[1]))
    return values, ids.gather(1, places)


def _gathered(columns: Tensor, k: int, group: dist.ProcessGroup) -> Tensor:
    """[all] Concatenate all ranks' columns, padded to k with values that are never chosen."""
    blank = -torch.inf if columns.is_floating_point() else 0
    mine = torch.nn.functional.pad(columns, (0, k - columns.shape[1]), value=blank).contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)  # [all]
    return torch.cat(parts, 1)


def head_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    support: Support | None,
    top: tuple[int, int] | None,
    share: VocabularyShare | None,
    id_factor: float = 1.0,
) -> Tensor:
    """Return a policy's outputs, float32 [N, 2 + m + 2 k]: logprob, entropy, logprobs of further targets, k exact ids
    and their logprobs.

    top: (k, num_ids) of `top_logprobs`; None: no ids. id_factor: multiplies ids. Otherwise as `token_logprobs`.
    """
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, support, share)  # [all]
    logprobs = logprobs if logprobs.dim() > 1 else logprobs[:, None]
    columns = [logprobs[:, :1], entropy[:, None], logprobs[:, 1:]]
    if top is not None:
        ids, best = top_logprobs(hidden, weight, top[0], temperature, top[1], share)  # [all]
        columns += [ids.to(best.dtype) * id_factor, best]
    return torch.cat(columns, 1)


def logit_factor(config: PreTrainedConfig) -> float:
    """Return the factor of logits after the output embedding. config: of the text model."""
    key, exponent = LOGIT_FACTORS.get(config.model_type, ("", 0))
    return getattr(config, key) ** exponent if key else 1.0


class TokenHead(nn.Module):
    """Output embedding that returns logprob and entropy of `targets`.

    It replaces the projection, and leaves the model's forward, shards and parameter names. The weight may be a DTensor,
    sharded by rows over a one-dimensional mesh.
    """

    def __init__(self, head: nn.Linear, factor: float = 1.0) -> None:
        """factor: by which the model multiplies the head's output, as if it were logits.

        ValueError for a head with a bias.
        """
        super().__init__()
        self._factor = factor
        if head.bias is not None:
            raise ValueError("an output embedding with a bias is not supported")
        self.weight = head.weight
        self.targets: Tensor | None = None
        """int64 [N], or [N, 1 + m] with m further tokens; set before each forward"""
        self.temperature = 1.0
        self.support: Support | None = None
        self.top: tuple[int, int] | None = None
        """(k, num_ids) of `top_logprobs`, if wanted"""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `head_outputs`, float32 [1, N, 2 or more], from [1, N, h]. [all] of the mesh that shards the
        weight, if any."""
        weight, share = self.weight, None
        if isinstance(weight, DTensor):
            share = VocabularyShare(owned_region(weight)[0].start, weight.device_mesh.get_group())
            weight = weight.to_local()
        temperature = self.temperature / self._factor
        about = (self.targets, temperature, self.support, self.top, share, self._factor)
        # `stack`, because FSDP warns of a view.
        found = torch.stack([head_outputs(hidden[0], weight, *about)])  # [all]
        return found if self._factor == 1 else found / self._factor


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        support: Support | None,
        share: VocabularyShare | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        first = share.first if share else 0
        # Count ids from this rank's first row; targets of other ranks are then out of range.
        targets = targets - first
        top = hidden.new_full((len(hidden),), -torch.inf, dtype=dtype)
        total, spread = (hidden.new_zeros(len(hidden), dtype=dtype) for _ in range(2))
        chosen = hidden.new_zeros(targets.shape, dtype=dtype)
        # total = sum of exp(x - top), spread = sum of exp(x - top) (x - top), over the logits x seen so far
        for begin, end in _chunks(hidden, weight):
            x = _logits(hidden, weight[begin:end], temperature)
            if support is not None:
                x = x.to(dtype)
                support.cut(x, first + begin, CUT)
            inside, places = _inside(targets, begin, end)
            chosen = torch.where(inside, x.gather(1, places), chosen)
            higher = torch.maximum(top, x.amax(-1))
            total, spread = _moved(top, higher, total, spread)
            top = higher
            x = x - top[:, None]
            p = x.exp()
            total += p.sum(-1)
            spread += p.mul_(x).sum(-1)
        if share is not None:
            top, total, spread, chosen = _combined(top, total, spread, chosen, share.group)  # [all]
        log_z, entropy = total.log() + top, total.log() - spread / total
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature, ctx.support, ctx.first = temperature, support, first
        # None instead of zeros for an output that no loss uses, which skips its work.
        ctx.set_materialize_grads(False)
        return chosen - log_z[:, None], entropy

    @staticmethod
    def backward(ctx, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and entropy_grad is None:
            return None, None, None, None, None, None
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        support = ctx.support
        scaled = (hidden.new_zeros(targets.shape, dtype=log_z.dtype) if grad is None else grad) / ctx.temperature
        of_rows = scaled.sum(1, keepdim=True)
        # Accumulated over chunks in float32; each row of the weight is in one chunk, so its gradient needs no sum.
        hidden_grad, weight_grad = torch.zeros_like(hidden, dtype=log_z.dtype), torch.empty_like(weight)
        for begin, end in _chunks(hidden, weight):
            log_p = _logits(hidden, weight[begin:end], ctx.temperature) - log_z[:, None]
            if support is not None:
                support.cut(log_p, ctx.first + begin, CUT)
            if entropy_grad is None:
                x = log_p.exp_().mul_(-of_rows)
            else:
                # d entropy / d logit = -softmax * (log softmax + entropy) / temperature
                by_entropy = entropy_grad[:, None] / ctx.temperature
                x = log_p.exp().mul_(-of_rows - by_entropy * (log_p + entropy[:, None]))
            # d logprob / d logit = (one at the target - softmax) / temperature
            inside, places = _inside(targets, begin, end)
            x.scatter_add_(1, places, torch.where(inside, scaled, 0.0))
            x = x.to(hidden.dtype)
            hidden_grad += x @ weight[begin:end]
            torch.mm(x.T, hidden, out=weight_grad[begin:end])
        return hidden_grad.to(hidden.dtype), weight_grad, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return logits over a temperature, in at least float32 unless it is 1.

    Subtracting a float32 column widens them in the same pass.
    """
    x = hidden @ weight.T
    return x if temperature == 1 else x.to(torch.promote_types(x.dtype, torch.float32)).div_(temperature)


def _moved(top: Tensor, higher: Tensor, total: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    # The maximum is -inf before the first chunk, and -inf - -inf would be NaN.
    fall = torch.where(top == -torch.inf, 0.0, top - higher)
    return total * fall.exp(), fall.exp() * (spread + fall * total)


def _combined(
    top: Tensor, total: Tensor, spread: Tensor, chosen: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[all] Return statistics over the whole vocabulary: four numbers per row are exchanged, and one per further
    target."""
    # All ranks rescale their sums to the same maximum before the sum over ranks.
    highest = top.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    # A target is chosen on one rank, 0 elsewhere.
    sums = torch.cat([torch.stack(_moved(top, highest, total, spread)), chosen.T])
    dist.all_reduce(sums, group=group)
    return highest, sums[0], sums[1], sums[2:].T


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
    most = (CHUNK if kind(hidden.device) == "cpu" else DEVICE_CHUNK) // max(1, len(hidden))
    step = max(most // WIDTH, 1) * WIDTH
    return ((begin, min(begin + step, len(weight))) for begin in range(0, len(weight), step))


def _inside(targets: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Return a mask of rows whose target is in this part of the vocabulary, and its index there, else any."""
    # A list of rows instead of a mask would need a synchronisation with the device for its length.
    return (targets >= begin) & (targets < end), (targets - begin).clamp(0, end - begin - 1)
