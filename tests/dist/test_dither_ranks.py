"""The offsets of dithered master weights are the same in every layout."""

from hashlib import sha256

import torch
from safetensors.torch import load_file, save_file

from spmd_rl.config.schema import PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import World
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.models import tiny


def masters(world: World, path: str, tp: int, dither: bool) -> str:
    """A hash over all master weights, put together."""
    policy = PolicyConfig(model=path, dtype="bfloat16", dither=dither)
    role = build_role(RlvrConfig(policy=policy, train=TrainConfig(tp=tp)).role("policy"), world)
    found = sha256()
    for name, tensor in sorted(role.model.state_dict()["model"].items()):
        found.update(name.encode() + tensor.full_tensor().numpy().tobytes())
    return found.hexdigest()


def test_every_layout_starts_from_the_same_masters(tmp_path) -> None:
    path = str(tiny("llama", tmp_path, tie=True))
    file = f"{path}/model.safetensors"
    save_file({name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}, file, {"format": "pt"})
    (alone,) = run_ranks(1, masters, path, 1, True)
    assert run_ranks(2, masters, path, 1, True) == [alone] * 2
    assert run_ranks(2, masters, path, 2, True) == [alone] * 2
    assert run_ranks(1, masters, path, 1, False) != [alone]
