"""What the tests of the training wing share: a batch, a loss, ways to share samples out, plain Hugging Face torch."""

from itertools import pairwise

import torch
from torch import Tensor

from spmd_rl.batch import Batch, Ragged, bounds_of
from spmd_rl.config.schema import CriticConfig, PolicyConfig, TrainConfig
from spmd_rl.config.sections.models import ReferenceConfig, RoleConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.train import build_role
from spmd_rl.train.accumulate import Critic, Policy
from spmd_rl.train.fsdp2.backend import critic_of, policy_of
from tests.unit.test_sharing import exact

LENGTHS = [(3, 4), (12, 1), (5, 9), (1, 6), (30, 40), (7, 2), (4, 0), (9, 9), (2, 3)]
"""prompt and answer tokens of each sample; one answer is empty"""
TEMPERATURE = 0.8
SETTINGS = {"lr": 1e-2, "max_grad_norm": 0.1, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 2}


def global_batch(seed=0, truncated=False) -> Batch:
    """All samples, laid out against their keys' order, so that nothing may lean on the layout.

    `truncated`: each sampled token was drawn among 2 to 30 others, every fifth among all.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + answer for prompt, answer in LENGTHS]
    total = sum(lengths)
    mask = torch.cat([torch.arange(p + a) >= p for p, a in LENGTHS])
    noise = torch.randn(3, total, generator=generator)
    token_ids = torch.randint(0, 256, (total,), generator=generator)
    return Batch(
        token_ids=token_ids,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        starts=torch.tensor([0, *lengths]).cumsum(0),
        keys=torch.tensor([[len(lengths) - i, 0] for i in range(len(lengths))]),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(total),
        units=torch.zeros(len(lengths), dtype=torch.int64),
        lags=torch.zeros(total, dtype=torch.int32),
        advantages=noise[0] * mask,
        weights=(0.5 + noise[1].abs()) * mask / mask.sum(),
        old_logprobs=(-5.5 + 0.3 * noise[2]) * mask,
        candidate_ids=candidate_ids(token_ids, mask) if truncated else None,
    )


def candidate_ids(token_ids: Tensor, mask: Tensor) -> Ragged:
    """The token itself and others, in no order."""
    generator = torch.Generator().manual_seed(1)
    lists = [torch.empty(0, dtype=torch.int64)] * len(mask)
    for i in mask.nonzero().flatten().tolist():
        if i % 5:
            others = torch.randperm(256, generator=generator)[: 2 + i % 29]
            lists[i] = torch.cat([others[others != token_ids[i]], token_ids[i : i + 1]])
    return Ragged(torch.cat(lists).int(), bounds_of(torch.tensor([len(one) for one in lists])))


def loss(logprobs, entropy, batch):
    """Not linear in the logprobs, and different for each token."""
    old = batch.old_logprobs[batch.loss_mask]
    ratio = (logprobs - old).exp()
    per_token = -torch.minimum(ratio, ratio.clamp(0.5, 2.0)) * batch.advantages[batch.loss_mask]
    return per_token - 0.5 * entropy, {"actor/entropy": entropy.detach(), "actor/ratio": ratio.detach()}


def uneven(shard: int, size: int) -> list[int]:
    """Sample 4, the longest, on the last shard; nothing on shard 1; the rest on shard 0."""
    rest = [s for s in range(len(LENGTHS)) if s != 4]
    return (rest if shard == 0 else []) + ([4] if shard == size - 1 else [])


SHARES = {
    "dealt": lambda shard, size: list(range(shard, len(LENGTHS), size)),
    "last shard alone": lambda shard, size: list(range(len(LENGTHS))) if shard == size - 1 else [],
    "uneven": uneven,
}


def share_of(role, name: str, batch: Batch) -> Batch:
    """The part of `batch` that this rank's data shard holds."""
    data = role.layout.data
    return batch.select(SHARES[name](data.rank, data.size))


def fsdp2_policy(
    model, layout: Layout, train: TrainConfig, dtype: torch.dtype, own: PolicyConfig | None = None, total_updates=1
) -> Policy:
    """[all] A policy on FSDP2 from a module; without settings of its own it is frozen."""
    held = RoleConfig("policy", own or ReferenceConfig(), "", str(dtype)[6:], False, train, total_updates)
    return policy_of(model, layout, held)


def fsdp2_critic(
    model, layout: Layout, train: TrainConfig, dtype: torch.dtype, own: CriticConfig, total_updates=1
) -> Critic:
    """[all] A critic on FSDP2 from a module that has a value head."""
    return critic_of(model, layout, RoleConfig("critic", own, "", str(dtype)[6:], False, train, total_updates))


def backend(
    world: World,
    path,
    dtype="float32",
    budget=4096,
    checkpointing="none",
    master="float32",
    axes=None,
    **settings,
) -> Policy:
    """[all] A policy from a model directory; `axes` are the layout's sizes, `settings` the optimizer's."""
    train = TrainConfig(tokens_per_microbatch=budget, activation_checkpointing=checkpointing, **axes or {})
    layout = Layout(world, **train.axes)
    model = build_model(path, getattr(torch, master), "cpu")
    model = exact(model) if master == "float64" else model
    policy = PolicyConfig(**{**SETTINGS, **settings})
    return fsdp2_policy(model, layout, train, getattr(torch, dtype), policy, total_updates=5)


def plain_forward(model, batch: Batch):
    """Logprob and entropy [T] by transformers' own attention on a right-padded batch."""
    bounds = batch.starts.tolist()
    rows = [batch.token_ids[a:b] for a, b in pairwise(bounds)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / TEMPERATURE
    cut = torch.zeros_like(logits, dtype=torch.bool)
    if batch.candidate_ids is not None:
        for i, (begin, end) in enumerate(pairwise(bounds)):
            for place in range(begin + 1, end):
                kept = batch.candidate_ids.index_select(0, torch.tensor([place])).values.long()
                cut[i, place - begin - 1] = len(kept) > 0
                cut[i, place - begin - 1, kept] = False
    full = torch.log_softmax(logits.masked_fill(cut, -torch.inf), -1)
    entropy = -(full.exp() * full.masked_fill(cut, 0.0)).sum(-1)
    logprobs = full.gather(-1, ids[:, 1:, None])[..., 0]
    zero = logprobs.new_zeros(1)
    flat = [
        torch.cat([torch.cat([zero, x[i, : len(row) - 1]]) for i, row in enumerate(rows)]) for x in (logprobs, entropy)
    ]
    return flat[0], flat[1]


def plain_backward(model, batch: Batch):
    """Gradients of the whole batch's loss; the loss, and the mean of each of its quantities."""
    logprobs, entropy = plain_forward(model, batch)
    mask = batch.loss_mask
    per_token, quantities = loss(logprobs[mask], entropy[mask], batch)
    total = (per_token * batch.weights[mask]).sum()
    total.backward()
    return total.item(), {name: values.mean().item() for name, values in quantities.items()}


def relative(got, want) -> float:
    """L2 error."""
    return float((got - want).norm() / want.norm())


def built(
    name: str,
    world: World,
    path,
    dtype="float32",
    budget=4096,
    checkpointing="none",
    master="float32",
    axes=None,
    **own,
) -> Policy:
    """[all] The same by the name of any backend, from a model directory, as a pipeline builds it."""
    train = TrainConfig(name=name, tokens_per_microbatch=budget, activation_checkpointing=checkpointing, **axes or {})
    policy = PolicyConfig(**{**SETTINGS, **own})
    return build_role(RoleConfig("policy", policy, str(path), dtype, False, train, 5), world)
