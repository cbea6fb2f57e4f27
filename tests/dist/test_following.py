"""A reference that follows the policy, in a layout of its own: which weights it has then, and after a restart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.base.errors import UserError
from spmd_rl.config.backends import backend, check_following
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.models import FollowingReferenceConfig, RoleConfig
from spmd_rl.distributed import World
from spmd_rl.train import Roles, build_role
from tests.dist.harness import run_ranks
from tests.models import tiny


def reference_of(world: World, path: str, share: float, dtype: str = "float32", **axes: int):
    """[all] A reference that follows in every step."""
    own = FollowingReferenceConfig(sync_steps=1, mixup=share)
    return build_role(RoleConfig("reference", own, path, dtype, False, TrainConfig(**axes), 1), world)


def copied(role) -> dict[str, torch.Tensor]:
    """[all] All weights as they are."""
    return {name: tensor.clone() for name, tensor in role.weights()}


def wrong(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def follows(world: World, path: str, axes: dict[str, int]) -> dict[str, object]:
    """[all] What differs, by case."""
    role = RoleConfig("policy", PolicyConfig(), f"{path}/a", "float32", False, TrainConfig(), 1)
    policy, found = build_role(role, world), {}
    policy.model.state()  # so that following meets a policy whose shards were listed
    theirs = copied(policy)
    half = reference_of(world, f"{path}/b", 0.25, **axes)
    before = copied(half)
    with policy.awake(), half.awake():
        half.follow(policy)  # [all]
    mixed = {name: torch.lerp(before[name], theirs[name], 0.25) for name in theirs}
    found["mixed"] = wrong(copied(half), mixed)
    found["is saved"] = list(Roles(policy, half).trained)
    again, folder = reference_of(world, f"{path}/b", 0.25, tp=1), Path(path) / f"saved-{world.size}-{len(axes)}"
    if world.rank == 0:
        folder.mkdir()
    world.barrier("made")  # [all]
    half.save(folder)  # [all]
    world.barrier("saved")  # [all]
    again.load(folder)  # [all]
    found["restored"] = wrong(copied(again), mixed)
    whole = reference_of(world, f"{path}/b", 1.0, "bfloat16", **axes)
    with policy.awake(), whole.awake():
        whole.follow(policy)  # [all]
    found["taken over"] = wrong(copied(whole), {name: tensor.bfloat16() for name, tensor in theirs.items()})
    other = reference_of(world, f"{path}/c", 1.0)
    try:
        other.follow(policy)  # [all]
    except UserError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"dp_replicate": 2}], ids=["fsdp", "tp", "copies"])
def test_the_reference_moves_towards_the_policy(axes: dict[str, int], tmp_path) -> None:
    for seed, name in enumerate("ab"):
        tiny("qwen2", tmp_path / name, seed=seed)
    deeper(tmp_path / "b", tmp_path / "c")
    for found in run_ranks(2, follows, str(tmp_path), axes):
        assert (found["mixed"], found["restored"], found["taken over"]) == ([], [], [])
        assert found["is saved"] == ["policy", "reference"]
        assert found["refused"].startswith("reference.model: the policy has no model.layers.2.")


def deeper(shallow: Path, deep: Path) -> None:
    """The model with a third layer."""
    config = AutoConfig.from_pretrained(shallow)
    config.num_hidden_layers, config.layer_types = 3, config.layer_types[:1] * 3
    AutoModelForCausalLM.from_config(config).save_pretrained(deep)


def test_what_cannot_be_followed_is_refused(tmp_path) -> None:
    tiny("qwen2", tmp_path / "a")
    tiny("llama", tmp_path / "c")
    own, policy = FollowingReferenceConfig(sync_steps=1), PolicyConfig()
    roles = [RoleConfig("policy", policy, f"{tmp_path}/a", "float32", False, TrainConfig(), 1)]
    roles += [RoleConfig("reference", own, f"{tmp_path}/{name}", "float32", False, TrainConfig(), 1) for name in "ac"]
    check_following(roles[:2])
    with pytest.raises(UserError, match="reference.model: its model_type is not the policy's"):
        check_following([roles[0], roles[2]])
    policy.router_bias_update_speed = 0.001
    with pytest.raises(UserError, match="policy.router_bias_update_speed must be 0"):
        check_following(roles[:2])
    for name in ("deepspeed", "megatron"):
        with pytest.raises(UserError, match=f"reference.sync_steps: train={name} cannot update a reference"):
            backend(name).check(replace(roles[1], train=TrainConfig(name=name)), tmp_path / "a")
