"""`train.dp_replicate`: copies of the model, each sharded over some of the ranks, against one copy on all of them."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from spmd_rl.config.schema import PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import World
from spmd_rl.model.load import local
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.models import tiny
from tests.training import TEMPERATURE, backend, global_batch, loss, relative, share_of

SLOW = pytest.mark.slow


def exported(role) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in role.weights()}


def held_here(role) -> str:
    """A hash of this rank's own shards of weights and optimizer."""
    found = hashlib.blake2b()
    for part in role.model.state_dict().values():
        for name, tensor in sorted(part.items()):
            found.update(name.encode() + local(tensor).numpy().tobytes())
    return found.hexdigest()


def train(role, seeds) -> list[dict[str, float]]:
    return [role.update(share_of(role, "uneven", global_batch(seed)), loss, TEMPERATURE) for seed in seeds]


def against_one_copy(world: World, path: str, copies: int) -> dict[str, float | bool]:
    """Three updates of several micro-batches, in the layout with copies and in the plain one."""
    settings = {"budget": 40, "eps": 1e-3}  # an epsilon that hides gradients which are rounding alone
    plain, hybrid = backend(world, path, **settings), backend(world, path, axes={"dp_replicate": copies}, **settings)
    ours, theirs = train(hybrid, range(3)), train(plain, range(3))
    world.agree("metrics", ours)
    held, wanted = exported(hybrid), exported(plain)
    shards = world.gather("shards", held_here(hybrid))
    apart = world.size // copies
    return {
        "weights": max(relative(held[name], wanted[name]) for name in wanted),
        "norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(ours, theirs, strict=True)),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)),
        "copies are equal": all(shards[i] == shards[i % apart] for i in range(world.size)),
        "in micro-batches": ours[0]["num_microbatches"] > 2,
    }


@pytest.mark.parametrize(("size", "copies", "per_machine"), [(4, 2, 4), (2, 2, 1), (2, 1, 2)])
def test_updates_are_those_of_one_copy(size: int, copies: int, per_machine: int, tmp_path) -> None:
    path = str(tiny("qwen2", tmp_path))
    for found in run_ranks(size, against_one_copy, path, copies, per_machine=per_machine):
        assert found["copies are equal"] and found["in micro-batches"]
        assert max(found["weights"], found["norm"], found["loss"]) < 1e-6, found


def whole_state(role) -> str:
    """[all] A hash of all that a checkpoint holds."""
    found = hashlib.blake2b()
    for part in role.model.state_dict().values():
        for name, tensor in sorted(part.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + whole.numpy().tobytes())
    return found.hexdigest()


def saved(world: World, path: str, folder: str, copies: int) -> list[str]:
    """The state, and the names of the files that this rank has written."""
    role = backend(world, path, axes={"dp_replicate": copies})
    train(role, range(2))
    if world.rank == 0:
        Path(folder).mkdir()
    world.barrier("folder")
    return [whole_state(role), *sorted(path.name for path in role.save(Path(folder)))]


def loaded(world: World, other: str, folder: str, copies: int) -> list[str]:
    role = backend(world, other, axes={"dp_replicate": copies})
    before = whole_state(role)
    role.load(Path(folder))
    return [whole_state(role), before]


@pytest.mark.parametrize(
    ("saver", "loader"),
    [((4, 2), (2, 1)), pytest.param((2, 1), (4, 2), marks=SLOW), pytest.param((2, 2), (1, 1), marks=SLOW)],
)
def test_a_checkpoint_holds_each_shard_once_and_loads_in_another_layout(saver, loader, tmp_path) -> None:
    """Ranks and copies. The folder is hardly larger than three float32 tensors of each weight."""
    path, other = tiny("llama", tmp_path / "a"), tiny("llama", tmp_path / "b", seed=1)
    folder = tmp_path / "policy"
    states, *written = zip(*run_ranks(saver[0], saved, str(path), str(folder), saver[1]), strict=False)
    assert len(set(states)) == 1 and written
    parts = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert parts < 1.5 * 3 * (path / "model.safetensors").stat().st_size
    for state, before in run_ranks(loader[0], loaded, str(other), str(folder), loader[1]):
        assert state == states[0] != before


def started(world: World, path: str) -> dict[str, bool]:
    """A role in bfloat16, filled from the file: what is read, what starts, and what is counted."""
    roles = {}
    for copies in (1, 2):
        policy = PolicyConfig(model=path, dtype="bfloat16", lr=1e-4)
        cfg = RlvrConfig(policy=policy, train=TrainConfig(dp_replicate=copies))
        roles[copies] = build_role(cfg.role("policy"), world)
    lines = [json.loads(line) for line in world.journal.path.read_text().splitlines()]
    one, two = (line["bytes"] for line in lines if line["event"] == "loaded")
    states = [whole_state(role) for role in roles.values()]
    shares = [train(role, [0])[0]["changed_share"] for role in roles.values()]
    return {
        "half of the bytes": 0.45 < two / Path(path, "model.safetensors").stat().st_size < 0.55 and one < 0.6 * two,
        "the same masters": states[0] == states[1],
        "the same share changes": abs(shares[0] / shares[1] - 1) < 0.01 and 0.01 < shares[0] < 0.9,
    }


def test_each_copy_is_read_once_by_its_ranks_and_counted_once(tmp_path) -> None:
    path = tiny("llama", tmp_path, tie=True)
    file = path / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})
    for facts in run_ranks(4, started, str(path)):
        assert all(facts.values()), facts
