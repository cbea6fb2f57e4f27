"""Several epochs over a step's samples on two ranks, against a plain loop over mini-batches in one process."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.config.sections.algorithm import AlgorithmConfig
from spmd_rl.distributed import World
from spmd_rl.learn import Learner
from spmd_rl.rollout.collected import Collected
from spmd_rl.train import Roles
from tests.dist.harness import run_ranks
from tests.fakes import table_of
from tests.models import tiny
from tests.training import backend
from tests.unit.test_prepare import GROUPS

LR, SEED = 1e-3, 5
OWN = {"lr": LR, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0}


def trained(world: World, path: str, epochs: int) -> list:
    """[all] The mini-batch of each optimizer step, a metric, and after them a sum over all weights; saved by rank 0."""
    cfg = RlvrConfig(seed=SEED)
    cfg.policy.dtype, cfg.train.updates_per_step = "float32", 3
    cfg.algorithm = AlgorithmConfig(sample_epochs=epochs, norm_std=False)
    policy = backend(world, path, dither=False, **OWN)
    learner = Learner(cfg, Roles(policy, None, None))
    mine = tuple(g for g in GROUPS if g.ticket % world.size == world.rank)
    table = table_of(GROUPS, lambda sample: sample.ticket % world.size, 0)
    metrics = learner.update(learner.prepare(Collected(1, mine, (), table, 0.0, 0, 0)))
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    if world.rank == 0:
        torch.save(weights, f"{path}/trained.pt")
    return [learner.plan.visits(epochs, SEED), metrics["actor/clipfrac"]]


def test_the_weights_are_those_of_a_plain_loop(tmp_path) -> None:
    """Three tickets, a mini-batch each, and rates at which ratios leave the clip range."""
    tiny("qwen2", tmp_path)
    order, share = run_ranks(2, trained, str(tmp_path), 3)[0]
    assert len(order) == 9
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    clipped = plain_loop(model, order)
    ours, wanted = torch.load(tmp_path / "trained.pt"), dict(model.named_parameters())
    errors = {name: float((ours[name] - wanted[name].detach()).abs().max()) for name in ours}
    assert max(errors.values()) < 2e-5, max(errors.items(), key=lambda item: item[1])
    assert share == pytest.approx(clipped, abs=1e-6)
    assert clipped > 0.1, "else nothing of the clip is seen"


def plain_loop(model, order: list[int]) -> float:
    """Train on the mini-batches of `GROUPS` in this order. Returns the mean share of clipped tokens."""

    def logprobs(tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([[1, 2, 3, *tokens]])
        found = torch.log_softmax(model(input_ids=ids).logits[0, 2:-1], -1)
        return found.gather(-1, ids[0, 3:, None])[:, 0]

    answers = [
        [(list(turn.token_ids), s.verdict.score) for s in g.samples if s.verdict.scored for turn in s.turns]
        for g in GROUPS
    ]
    old = [[logprobs(tokens).detach() for tokens, _ in one] for one in answers]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    shares = []
    for number in order:
        one, mean = answers[number], sum(score for _, score in answers[number]) / len(answers[number])
        total, clipped, count = torch.zeros(()), 0, sum(len(tokens) for tokens, _ in one)
        for (tokens, score), before in zip(one, old[number], strict=True):
            ratio, advantage = (logprobs(tokens) - before).exp(), score - mean
            gained, held = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
            total = total - torch.minimum(gained, held).sum() / count
            clipped += int((held < gained).sum())
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shares.append(clipped / count)
    return sum(shares) / len(shares)
