"""What an environment says is context and nothing else: the update of a real model has no gradient for it."""

import torch

from spmd_rl.algo.moments import Moments
from spmd_rl.config.schema import AlgorithmConfig, PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.learn import token_advantages
from spmd_rl.learn.losses import bind_loss
from spmd_rl.model.build import build_model
from spmd_rl.train.sharing import share_prefixes
from tests import plans
from tests.agents import Step, collected, group, trajectory
from tests.dist.harness import run_ranks
from tests.models import tiny
from tests.training import fsdp2_policy

SETTINGS = AlgorithmConfig(advantage="gigpo", norm_std=False)


def update(world: World, path: str, rewards: tuple[float, float]) -> dict:
    """Of two trajectories with these rewards in their second turn: its metrics, and what the output layer predicted."""
    steps = [[Step(1.0, 1, 5), Step(reward, 2, 6, observation=4)] for reward in rewards]
    c = collected([group(0, [trajectory(0, answer, some) for answer, some in enumerate(steps)])])
    sizes = {"num_updates": 1, "num_shards": 1, "hidden_size": 64, "max_tokens": 64}
    plan, _ = plans.plan(c, SETTINGS, Moments(), **sizes)
    data = Layout(world).data
    (batch,) = plans.redistribute(c, plan, 1, data, world)
    token_advantages.finish([batch], plan, SETTINGS, 0.0, data, seed=0)
    assert int((~batch.loss_mask).sum()) == 2 * (3 + 4), "a prompt and an observation each"
    model = build_model(path, torch.float32, "cpu")
    kept = []
    model.register_forward_pre_hook(lambda _, args, named: kept.append(named["logits_to_keep"]), with_kwargs=True)
    backend = fsdp2_policy(model, Layout(world), TrainConfig(), torch.float32, PolicyConfig(), total_updates=5)
    metrics = backend.update(batch, bind_loss(SETTINGS), temperature=1.0)
    before_sampled = share_prefixes(batch).gather_index[batch.sampled.index - 1]
    return {
        "grad_norm": metrics["grad_norm"],
        "loss": metrics["loss"],
        "predicted": kept[0].tolist(),
        "wanted": before_sampled.tolist(),
    }


def updates(world: World, path: str) -> list[dict]:
    return [update(world, path, rewards) for rewards in ((2.0, 2.0), (2.0, 3.0))]


def test_observations_have_no_gradient_at_all(tmp_path) -> None:
    """Where no sampled token has an advantage the gradient is exactly 0, whatever stands between the turns; and the
    output layer predicts sampled tokens alone."""
    ((equal, unequal),) = run_ranks(1, updates, str(tiny("qwen2", tmp_path)))
    assert equal["grad_norm"] == 0.0 and equal["loss"] == 0.0
    assert unequal["grad_norm"] > 0.0
    for found in (equal, unequal):
        assert found["predicted"][: len(found["wanted"])] == found["wanted"]
        assert set(found["predicted"]) <= {0, *found["wanted"]}, "what fills the rows up is the first token's"
