"""The FSDP2 backend against plain single-process Hugging Face + torch on a padded batch, in float32.

The gradient must be the same for every number of ranks, every split of the samples over them (empty ranks too) and
every micro-batch budget.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch

from spmd_rl.batch import Batch
from spmd_rl.config.schema import CriticConfig, PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.train.fsdp2 import FSDP2Backend, FSDP2Critic, with_value_head
from tests.dist.harness import run_ranks
from tests.models import tiny

LENGTHS = [(3, 4), (12, 1), (5, 9), (1, 6), (30, 40), (7, 2), (4, 0), (9, 9), (2, 3)]
"""prompt and answer tokens of each sample; one answer is empty"""
TEMPERATURE = 0.8
SETTINGS = {"lr": 1e-2, "max_grad_norm": 0.1, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 2}
QUANTITIES = {"actor/entropy", "actor/ratio"}


def global_batch(seed=0) -> Batch:
    """All samples, laid out against their keys' order, so that nothing may lean on the layout."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + answer for prompt, answer in LENGTHS]
    total = sum(lengths)
    mask = torch.cat([torch.arange(p + a) >= p for p, a in LENGTHS])
    noise = torch.randn(3, total, generator=generator)
    return Batch(
        token_ids=torch.randint(0, 256, (total,), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        starts=torch.tensor([0, *lengths]).cumsum(0),
        keys=torch.tensor([[len(lengths) - i, 0] for i in range(len(lengths))]),
        units=torch.zeros(len(lengths), dtype=torch.int64),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(total),
        lags=torch.zeros(total, dtype=torch.int32),
        advantages=noise[0] * mask,
        weights=(0.5 + noise[1].abs()) * mask / mask.sum(),
        old_logprobs=(-5.5 + 0.3 * noise[2]) * mask,
    )


def loss(logprobs, entropy, batch):
    """Not linear in the logprobs, and different for each token."""
    old = batch.old_logprobs[batch.loss_mask]
    ratio = (logprobs - old).exp()
    per_token = -torch.minimum(ratio, ratio.clamp(0.5, 2.0)) * batch.advantages[batch.loss_mask]
    return per_token - 0.5 * entropy, {"actor/entropy": entropy.detach(), "actor/ratio": ratio.detach()}


def uneven(rank: int, size: int) -> list[int]:
    """Sample 4, the longest, on the last rank; nothing on rank 1; the rest on rank 0."""
    rest = [s for s in range(len(LENGTHS)) if s != 4]
    return (rest if rank == 0 else []) + ([4] if rank == size - 1 else [])


SHARES = {
    "dealt": lambda rank, size: list(range(rank, len(LENGTHS), size)),
    "last rank alone": lambda rank, size: list(range(len(LENGTHS))) if rank == size - 1 else [],
    "uneven": uneven,
}


def backend(world: World, path, dtype="float32", budget=4096, checkpointing=False, **settings) -> FSDP2Backend:
    train = TrainConfig(tokens_per_microbatch=budget, activation_checkpointing=checkpointing)
    model = build_model(path, torch.float32, "cpu")
    policy = PolicyConfig(**{**SETTINGS, **settings})
    return FSDP2Backend(model, Layout(world), train, getattr(torch, dtype), policy, total_updates=5)


def forward(mine: FSDP2Backend):
    """What `update` runs on each micro-batch."""
    return partial(mine._forward, temperature=TEMPERATURE)


def plain_forward(model, batch: Batch):
    """Logprob and entropy [T] by transformers' own attention on a right-padded batch."""
    bounds = batch.starts.tolist()
    rows = [batch.token_ids[a:b] for a, b in pairwise(bounds)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=attention).logits / TEMPERATURE
    full = torch.log_softmax(logits[:, :-1], -1)
    logprobs = full.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(full.exp() * full).sum(-1)
    zero = torch.zeros(1)
    flat = [
        torch.cat([torch.cat([zero, x[i, : len(row) - 1]]) for i, row in enumerate(rows)]) for x in (logprobs, entropy)
    ]
    return flat[0], flat[1]


def plain_backward(model, batch: Batch):
    logprobs, entropy = plain_forward(model, batch)
    mask = batch.loss_mask
    per_token, quantities = loss(logprobs[mask], entropy[mask], batch)
    total = (per_token * batch.weights[mask]).sum()
    total.backward()
    return total.item(), {name: values.mean().item() for name, values in quantities.items()}


def relative(got, want) -> float:
    return float((got - want).norm() / want.norm())


def gradients(world: World, path) -> dict[str, float]:
    """Worst relative L2 error over the tensors, per case."""
    batch = global_batch()
    model = build_model(path, torch.float32, "cpu", attention="eager")
    plain_backward(model, batch)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    errors = {}
    for checkpointing, budget in ((False, 1), (False, 50), (False, 10_000), (True, 50)):
        mine = backend(world, path, budget=budget, checkpointing=checkpointing)
        for name, share in SHARES.items():
            mine._accumulate(batch.select(share(world.rank, world.size)), forward(mine), loss)
            got = {name: p.grad.full_tensor() for name, p in mine._model.named_parameters()}
            assert got.keys() == wanted.keys()
            errors[f"{name}, {budget}, {checkpointing}"] = max(relative(got[k], wanted[k]) for k in wanted)
            mine._optimizer.zero_grad()
    return errors


@pytest.mark.parametrize(("size", "kind", "tie"), [(1, "qwen2", False), (2, "llama", True), (4, "qwen3", False)])
def test_the_gradient_is_the_same_in_every_layout(size, kind, tie, tmp_path):
    for share in SHARES.values():
        assert sorted(s for rank in range(size) for s in share(rank, size)) == list(range(len(LENGTHS)))
    path = tiny(kind, tmp_path, tie=tie, head_dim=16, intermediate_size=90, vocab_size=263)  # nothing divides by 4
    for errors in run_ranks(size, gradients, str(path), timeout=200):  # 60 s do not do on a busy machine
        assert max(errors.values()) < 1e-5, errors


def value_loss(values, batch):
    """Against targets of the batch, not linear."""
    error = values - batch.advantages[batch.loss_mask]
    return error.square() + 0.1 * error**3, {"critic/values/mean": values.detach()}


def critics(world: World, path) -> dict[str, float]:
    """The critic's values and gradients against plain Hugging Face with a linear layer on the last hidden states."""
    batch, mask = global_batch(), global_batch().loss_mask
    plain = build_model(path, torch.float32, "cpu", attention="eager")
    heads = [with_value_head(build_model(path, torch.float32, "cpu")), with_value_head(plain)]
    for model in heads:
        head = model.get_output_embeddings()
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
        torch.nn.init.constant_(head.bias, 0.3)
    mine = FSDP2Critic(heads[0], Layout(world), TrainConfig(tokens_per_microbatch=50), torch.float32, CriticConfig(), 5)
    bounds = batch.starts.tolist()
    wanted = torch.zeros(batch.num_tokens)
    for begin, end in pairwise(bounds):
        hidden = plain.model(input_ids=batch.token_ids[None, begin:end]).last_hidden_state[0]
        wanted[begin + 1 : end] = (hidden @ head.weight[0] + head.bias[0])[:-1]
    per_token, _ = value_loss(wanted[mask], batch)
    (per_token * batch.weights[mask]).sum().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    chosen = SHARES["uneven"](world.rank, world.size)
    share = batch.select(chosen)
    here = torch.cat([(wanted.detach() * mask)[bounds[s] : bounds[s + 1]] for s in chosen])
    errors = {"values": float((mine.values(share) - here).abs().max())}
    mine._accumulate(share, mine._forward, value_loss)
    for name, p in mine._model.named_parameters():
        errors[name] = relative(p.grad.full_tensor(), gradients[name])
    assert errors.keys() == {"values", *gradients} and "lm_head.weight" in gradients
    return errors


@pytest.mark.parametrize(("size", "tie"), [(1, False), (2, True)])
def test_the_critic_follows_plain_torch(size, tie, tmp_path):
    path = tiny("llama", tmp_path, tie=tie)
    for errors in run_ranks(size, critics, str(path)):
        assert max(errors.values()) < 1e-5, errors


def three_updates(world: World, path) -> list[float]:
    """Updates, metrics, logprobs and exported weights against torch's own AdamW and clipping."""
    batch = global_batch()
    mine = backend(world, path, budget=60)
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=SETTINGS["weight_decay"])
    share = batch.select(SHARES["dealt"](world.rank, world.size))
    for rate in (0.5e-2, 1e-2, 1e-2, 1e-2 * 2 / 3):
        total, means = plain_backward(model, batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
        assert norm > SETTINGS["max_grad_norm"]
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        metrics = mine.update(share, loss, TEMPERATURE)
        world.agree("metrics", metrics)
        assert metrics["lr"] == pytest.approx(rate)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["loss"] == pytest.approx(total, abs=1e-5)
        assert metrics["skipped"] == 0
        assert {name: metrics[name] for name in QUANTITIES} == pytest.approx(means, rel=1e-4)
    with torch.no_grad():
        wanted = [x * share.loss_mask for x in plain_forward(model, share)]
    got = mine.logprobs(share, TEMPERATURE)
    held = {name: tensor.clone() for name, tensor in mine.weights()}
    wholes = dict(model.named_parameters())
    assert held.keys() == wholes.keys()
    drift = [relative(held[name], whole) for name, whole in wholes.items()]
    return [max(drift), *(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))]


@pytest.mark.parametrize(("size", "kind", "tie"), [(1, "llama", True), (2, "qwen3", False)])
def test_updates_follow_plain_torch(size, kind, tie, tmp_path):
    path = tiny(kind, tmp_path, tie=tie)
    for drift, logprobs, entropy in run_ranks(size, three_updates, str(path)):
        assert drift < 1e-4
        assert max(logprobs, entropy) < 1e-3


def bfloat16(world: World, path) -> dict[str, bool]:
    """In bfloat16: published weights are bitwise those of the forward pass; gradients repeat bitwise and stay close."""
    batch = global_batch()
    share = batch.select(SHARES["uneven"](world.rank, world.size))
    mine = backend(world, path, dtype="bfloat16", budget=50)
    seen = {}
    for name, module in mine._model.named_modules():
        for key in ("weight", "bias"):
            if isinstance(getattr(module, key, None), torch.nn.Parameter):
                full = f"{name}.{key}"
                module.register_forward_pre_hook(
                    lambda m, _, full=full, key=key: seen.update({full: getattr(m, key).detach().clone()})
                )
    mine.logprobs(share, TEMPERATURE)
    masters = {name: p.full_tensor() for name, p in mine._optimizer._parameters.items()}
    held = {name: (t.clone(), t.is_contiguous(), t.dtype) for name, t in mine.weights()}
    runs = []
    for _ in range(2):
        mine._accumulate(share, forward(mine), loss)
        runs.append({name: p.grad.full_tensor() for name, p in mine._model.named_parameters()})
        mine._optimizer.zero_grad()
    model = build_model(path, torch.float32, "cpu", attention="eager")
    plain_backward(model, batch)
    return {
        "as in forward": all(torch.equal(held[name][0], seen[name]) for name in held),
        "as the cast master": all(torch.equal(held[name][0], masters[name].bfloat16()) for name in held),
        "plain": all(whole and dtype == torch.bfloat16 for _, whole, dtype in held.values()),
        "gradients in float32": all(g.dtype == torch.float32 for g in runs[0].values()),
        "gradients repeat": all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0]),
        "gradients close": all(relative(runs[0][n], p.grad) < 0.1 for n, p in model.named_parameters()),
    }


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_over_float32_masters(size, tmp_path):
    path = tiny("qwen3", tmp_path, tie=True)
    for facts in run_ranks(size, bfloat16, str(path)):
        assert all(facts.values()), facts
