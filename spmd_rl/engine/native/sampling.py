"""Sampling as a pure function: token t of a request depends only on its logits, temperature and (seed, t).

Inverse CDF, so no generator has a state. `sample` draws among all tokens, `sample_truncated` among those left by min-p,
top-k and top-p, in vLLM's order. These candidates are recorded, since the trainer's logits differ.
"""

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.base.devices import to_device
from spmd_rl.engine.sequence import SequenceState
from spmd_rl.model.constraint import Allowed, Constraint, accept

# Partial sums: the CDF is built over chunks, then within one.
CHUNK = 256


def uniform(seed: int, index: int) -> float:
    """Return 53 random bits of (seed, index) in [0, 1): blake2b of both as 64-bit words."""
    word = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return (int.from_bytes(word, "little") >> 11) * 2.0**-53


def cut_off(logits: Tensor, rows: Sequence[SequenceState], constraint: Constraint) -> None:
    """Mask, in place, tokens that the grammar forbids next. logits: [R, V], after each row's last token."""
    words = constraint.blank(len(rows))
    for number, row in enumerate(rows):
        if row.matcher is None:
            row.matcher = constraint.begin(row.request.begun)
        accept(row.matcher, row.token_ids[row.num_matched :])
        row.num_matched = len(row.token_ids)
        row.matcher.fill_next_token_bitmask(words, number)
    device = logits.device
    Allowed(to_device(words, device), torch.arange(len(rows), device=device)).cut(logits, 0, -math.inf)


def draw(logits: Tensor, rows: Sequence[SequenceState]) -> tuple[list[int], list[float], list[list[int]]]:
    """Return each row's next token, logprob, and candidates (none: all), from logits [R, V].

    They depend on the row's own logits, request and number of tokens.
    """
    requests, device = [row.request for row in rows], logits.device
    temperatures = torch.tensor([request.temperature for request in requests], device=device)
    draws = [uniform(row.request.seed, row.request.num_begun + len(row.token_ids)) for row in rows]
    # float64, because a uniform of 53 bits would round up to 1 in float32.
    uniforms = torch.tensor(draws, dtype=torch.float64, device=device)
    cut = [i for i, request in enumerate(requests) if request.truncated]
    tokens, logprobs, candidates = [0] * len(rows), [0.0] * len(rows), [[] for _ in rows]
    if len(cut) < len(rows):
        tokens, logprobs = (found.tolist() for found in sample(logits, temperatures, uniforms))
    if cut:
        top_k = torch.tensor([requests[i].top_k for i in cut], device=device)
        shares = [(requests[i].top_p, requests[i].min_p) for i in cut]
        top_p, min_p = torch.tensor(shares, dtype=torch.float64, device=device).unbind(-1)
        drawn = sample_truncated(logits[cut], temperatures[cut], uniforms[cut], top_k, top_p, min_p)
        for i, *found in zip(cut, drawn[0].tolist(), drawn[1].tolist(), drawn[2], strict=True):
            tokens[i], logprobs[i], candidates[i] = found
    return tokens, logprobs, candidates


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return one token per row, int64 [R], and logprobs, float32 [R], from `logits` [R, V] of any float dtype.

    Rows with `temperatures` (float32 [R]) of 0 take the most likely token, with logprobs of temperature 1; others the
    first token whose cumulated probability exceeds `uniforms` (float64 [R]), with log_softmax of logits / temperature.
    A row with a NaN reports a NaN.
    """
    num_rows, num_tokens = logits.shape
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)[:, None]
    # The one [R, V] buffer: scaled logits, then (in place) unnormalised probabilities; the tail fills the last chunk.
    buffer = torch.empty(num_rows, -(-num_tokens // CHUNK) * CHUNK, dtype=torch.float32, device=logits.device)
    buffer[:, num_tokens:] = -math.inf
    torch.div(logits, scale, out=buffer[:, :num_tokens])
    top = buffer.amax(dim=-1, keepdim=True)
    best = buffer[greedy].argmax(dim=-1)
    masses = buffer.sub_(top).exp_().unflatten(1, (-1, CHUNK))
    # The sum over chunks is float64: over the whole vocabulary float32 would lose small masses.
    chunk_masses = masses.sum(dim=-1).double()
    chunk, rest = _draw(chunk_masses, uniforms)
    within, _ = _draw(masses[torch.arange(num_rows, device=logits.device), chunk].double(), rest)
    # Out of range only for a row with a NaN.
    tokens = (chunk * CHUNK + within).clamp_(max=num_tokens - 1)
    tokens[greedy] = best
    chosen = logits.gather(-1, tokens[:, None]).float().div(scale).sub(top)[:, 0]
    return tokens, chosen - chunk_masses.sum(dim=-1).log().float()


def sample_truncated(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return one token per row, its logprob among the candidates, and these: int64 [R], float32 [R], R ascending id
    lists.

    As `sample`, with temperatures above 0; `top_k` int64 [R] (at least 1, any of equally likely tokens), `top_p` and
    `min_p` float64 [R]. Candidates are drawn from in order of ids.
    """
    scaled = logits.float() / temperatures[:, None]
    values, ids = scaled.topk(min(int(top_k.max()), logits.shape[-1]), dim=-1)
    # Values are descending, so subtracting the first makes its mass 1, without overflow.
    masses = values.sub(values[:, :1]).double().exp()
    rank = torch.arange(masses.shape[-1], device=logits.device)
    masses[(rank >= top_k[:, None]) | (masses < min_p[:, None])] = 0.0
    sums = masses.cumsum(dim=-1)
    masses[(sums - masses >= top_p[:, None] * sums[:, -1:]) & (top_p < 1)[:, None]] = 0.0
    ids, order = ids.sort(dim=-1)
    masses = masses.gather(-1, order)
    index, _ = _draw(masses, uniforms)
    mass = masses.gather(-1, index[:, None])[:, 0]
    kept = masses > 0
    lists = torch.split(ids[kept], kept.sum(dim=-1).tolist())
    tokens = ids.gather(-1, index[:, None])[:, 0]
    return tokens, (mass / masses.sum(dim=-1)).log().float(), [ids.tolist() for ids in lists]


def _draw(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index drawn by inverse CDF over unnormalised float64 [R, N], int64 [R], and the uniform's rest,
    [R]."""
    # u * total < total holds in float64 for every u <= 1 - 2**-53, and `right` finds the first sum *above* the target:
    # an index without mass is never drawn.
    sums = masses.cumsum(dim=-1)
    target = uniforms[:, None] * sums[:, -1:]
    index = torch.searchsorted(sums, target, right=True).clamp_(max=masses.shape[-1] - 1)
    mass = masses.gather(-1, index)
    left = (target - (sums.gather(-1, index) - mass)) / mass
    return index[:, 0], left[:, 0].clamp(0.0, 1.0 - 2.0**-53)
