"""`changed_share`: the share of the weights that an update changes, in the dtype in which the engine gets them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.config.schema import PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import World
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.models import tiny
from tests.training import TEMPERATURE, global_batch, loss, share_of


def shares(world: World, path: str, tp: int) -> tuple[float, float]:
    """As the role reports it, and as its published weights show it."""
    policy = PolicyConfig(model=path, dtype="bfloat16", lr=1e-4)
    role = build_role(RlvrConfig(policy=policy, train=TrainConfig(tp=tp)).role("policy"), world)
    before = {name: tensor.clone() for name, tensor in role.weights()}
    metrics = role.update(share_of(role, "dealt", global_batch()), loss, TEMPERATURE)
    num_changed = sum(int((tensor != before[name]).sum()) for name, tensor in role.weights())
    return metrics["changed_share"], num_changed / sum(tensor.numel() for tensor in before.values())


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_the_share_is_that_of_the_published_weights(size: int, tp: int, tmp_path) -> None:
    path = str(tiny("llama", tmp_path, tie=True))
    file = f"{path}/model.safetensors"
    save_file({name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}, file, {"format": "pt"})
    for reported, seen in run_ranks(size, shares, path, tp):
        assert reported == pytest.approx(seen, rel=1e-6)
        assert 0.01 < seen < 0.9
