"""One prompt, computed once: the same loss and gradients as every sample by itself, and fewer tokens."""

import random
from array import array
from functools import partial

import pytest
import torch

from spmd_rl.algo import POLICY_LOSSES
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.policy_loss import bind_loss
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.train.microbatch import plan
from spmd_rl.train.sharing import Folded, fold
from spmd_rl.types import Sample, Turn, Verdict
from tests.models import KINDS, tiny

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}


def sample(ticket: int, answer: int, prompt: list[int], lengths: list[int], rng: random.Random) -> Sample:
    """Turns of these lengths; only the first prompt is the group's."""
    turns = []
    for number, length in enumerate(lengths):
        ids = array("i", [rng.randrange(256) for _ in range(length)])
        asked = array("i", prompt if number == 0 else [rng.randrange(256) for _ in range(3)])
        turns.append(Turn(asked, ids, array("f", [-1.0] * length), array("i", [0] * length), "stop"))
    return Sample(ticket, answer, tuple(turns), Verdict("ok", 1.0))


def groups(seed: int = 0) -> Batch:
    """Uneven answers, a group of one, a truncated answer, several turns, and two prompts that are equal."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (20, 7, 90, 20)]
    prompts[3] = prompts[0]
    shapes = [[[5], [12], [1], [9]], [[30]], [[4], [100]], [[3, 4], [2, 2, 2]]]
    samples = [
        sample(ticket, answer, prompts[ticket], lengths, rng)
        for ticket, some in enumerate(shapes)
        for answer, lengths in enumerate(some)
    ]
    batch = pack(samples)
    draw = torch.Generator().manual_seed(seed)
    size = batch.num_tokens
    batch.advantages = torch.randn(size, generator=draw) * batch.loss_mask
    batch.weights = torch.rand(size, generator=draw) * batch.loss_mask / 10
    batch.old_logprobs = (-5.5 + 0.2 * torch.randn(size, generator=draw)) * batch.loss_mask
    batch.rollout_logprobs = (batch.old_logprobs + 0.1 * torch.randn(size, generator=draw)) * batch.loss_mask
    batch.marked = (torch.rand(size, generator=draw) < 0.2) & batch.loss_mask
    return batch


def unfolded(batch: Batch) -> Folded:
    """Every sample by itself."""
    alone = torch.full((batch.num_segments,), -1)
    return Folded(batch.token_ids, batch.position_ids, batch.starts, alone, torch.arange(batch.num_tokens))


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """Its norms in the model's own dtype: transformers' go through float32, also in a float64 model."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    return model


def _norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """With the weight of the moment: a sharded module's is another in each forward."""
    return torch.nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def gradients(path, dtype, batch: Batch, folding, loss, budget: int = 10**6) -> tuple[float, dict]:
    model = exact(build_model(path, dtype, "cpu"))
    total = 0.0
    for segments in plan(batch, budget):
        micro = batch.select(segments)
        folded = folding(micro)
        packing = Packing.of(folded.starts, folded.parents)
        hidden = model(input_ids=folded.token_ids[None], position_ids=folded.position_ids[None], packing=packing)
        targets = micro.loss_mask.nonzero().squeeze(-1)
        logits = torch.log_softmax(hidden.logits[0][folded.places[targets - 1]], -1)
        logprobs = logits.gather(-1, micro.token_ids[targets, None])[:, 0]
        per_token, _ = loss(logprobs, -(logits.exp() * logits).sum(-1), micro)
        value = (per_token * micro.weights[micro.loss_mask]).sum()
        value.backward()
        total += value.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def assert_equal(ours, theirs, limit: float) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=limit)
    for name, grad in theirs[1].items():
        assert grad.norm() > 0, name
        assert (ours[1][name] - grad).norm() / grad.norm() < limit, name


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_shared_prompts_give_the_same_gradients_for_every_loss(name, dtype, tmp_path) -> None:
    path, batch, loss = tiny("llama", tmp_path), groups(), bind_loss(AlgorithmConfig(loss=name))
    alone = gradients(path, dtype, batch, unfolded, loss)
    assert_equal(gradients(path, dtype, batch, fold, loss), alone, LIMITS[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [60, 150])
def test_groups_split_over_micro_batches(kind, budget, tmp_path) -> None:
    path, batch, loss = tiny(kind, tmp_path), groups(1), bind_loss(AlgorithmConfig())
    assert any(len({int(batch.keys[s, 0]) for s in one}) < len(one) for one in plan(batch, budget)), "nothing shared"
    alone = gradients(path, torch.float64, batch, unfolded, loss)
    assert_equal(gradients(path, torch.float64, batch, fold, loss, budget), alone, 1e-12)


def test_a_prompt_is_computed_once() -> None:
    batch = groups()
    folded = fold(batch)
    assert batch.num_tokens - len(folded.token_ids) == 3 * 20 + 90 + 20
    assert torch.equal(folded.token_ids[folded.places], batch.token_ids)
    assert torch.equal(folded.position_ids[folded.places], batch.position_ids)
    shared = [int(p) for p in folded.parents if p >= 0]
    assert sorted(shared.count(parent) for parent in set(shared)) == [2, 2, 4], "tickets do not share with each other"


def test_other_prompts_under_one_ticket_do_not_share() -> None:
    rng = random.Random(0)
    batch = pack([sample(0, 0, [1, 2, 3], [4], rng), sample(0, 1, [1, 2, 4], [4], rng)])
    assert fold(batch).parents.tolist() == [-1, -1]


def test_nothing_to_fold() -> None:
    rng = random.Random(0)
    one = pack([sample(0, 0, [1, 2, 3], [4], rng)])
    assert torch.equal(fold(one).token_ids, one.token_ids)
