"""Pipelines on ranks: exact resume, checkpoints across layouts, tied embeddings, bytes read, frozen stages."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.model.load import local
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.dist.test_train_load import bytes_read, settings
from tests.dist.test_train_parity import LIMITS, gradients
from tests.dist.test_train_state import restore, save, updates, weights
from tests.models import EXPERTS, tiny
from tests.training import SETTINGS, TEMPERATURE, backend, fsdp2_policy, global_batch, loss, share_of

PP2 = {"pp": 2}
TIED = "model.embed_tokens.weight"


def held(mine) -> dict[str, str]:
    """A digest of this rank's part of each tensor that a checkpoint holds."""
    state = {
        f"{part}.{name}": local(t) for part, tensors in mine.model.state_dict().items() for name, t in tensors.items()
    }
    return {name: hashlib.blake2b(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}


def deep(world: World, path: str, size: int) -> dict[str, float]:
    """Errors of stages of which those in the middle hold a layer and nothing else."""
    return gradients(world, backend, path, {"pp": size}, "float64", ("uneven", 30, True))


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_gradient_of_more_than_two_stages(size: int, tmp_path) -> None:
    path = tiny("llama", tmp_path, tie=True, num_hidden_layers=5)
    for errors in run_ranks(size, deep, str(path), size, timeout=200):
        assert max(errors.values()) < LIMITS["float64"], errors


def resumed(world: World, path: str, other: str, folder: str) -> dict[str, bool]:
    """Four updates in one go against a save after two of them, and a restore into a model of other weights."""
    straight, again = backend(world, path, budget=60, axes=PP2), backend(world, other, budget=60, axes=PP2)
    updates(world, straight, range(2))
    counters = save(world, straight, folder)
    wanted = updates(world, straight, range(2, 4))
    updates(world, again, range(1))
    restore(again, folder, counters)
    got = updates(world, again, range(2, 4))
    names = [name for name in held(straight) if TIED in name]
    copies = world.gather("tied", [held(straight)[name] for name in names])
    return {
        "metrics": got == wanted and wanted[0] != wanted[1],
        "weights": torch.equal(weights(straight), weights(again)),
        "all of the state": held(straight) == held(again),
        "copies of tied weights": len(names) == 3 and copies[0] == copies[-1],
        "journal": f'"stage {world.rank}: update: backward of micro-batch 1/' in world.journal.path.read_text(),
    }


def test_a_resume_is_bitwise_and_tied_weights_stay_the_same(tmp_path) -> None:
    path, other = tiny("llama", tmp_path / "a", tie=True), tiny("llama", tmp_path / "b", seed=1, tie=True)
    for facts in run_ranks(2, resumed, str(path), str(other), str(tmp_path / "dcp"), timeout=200):
        assert all(facts.values()), facts


def trained(world: World, path: str, folder: str, axes: dict[str, int]) -> dict[str, str]:
    mine = backend(world, path, axes=axes)
    updates(world, mine, range(2))
    save(world, mine, folder)
    return held(mine)


def passed_on(world: World, path: str, folder: str, onto: str, axes: dict[str, int]) -> list:
    """Digests of what is loaded, which is saved again; weights after two more updates."""
    mine = backend(world, path, axes=axes)
    restore(mine, folder, {"updates": 2, "skipped_in_a_row": 0})
    save(world, mine, onto)
    found = held(mine)
    updates(world, mine, range(2, 4))
    return [found, weights(mine).tolist()]


@pytest.mark.parametrize(("size", "alone"), [(2, 1), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_to_another_layout_and_back_to_the_bit(size: int, alone: int, tmp_path) -> None:
    kind = {"tie": True, "num_hidden_layers": 3}
    path, other = str(tiny("llama", tmp_path / "a", **kind)), str(tiny("llama", tmp_path / "b", seed=1, **kind))
    one, two, three = (str(tmp_path / f"dcp-{i}") for i in range(3))
    wanted = run_ranks(size, trained, path, one, PP2, timeout=150)
    between = run_ranks(alone, passed_on, other, one, two, {}, timeout=150)
    back = run_ranks(size, passed_on, other, two, three, PP2, timeout=150)
    assert [found for found, _ in back] == wanted
    wholes = [torch.tensor(whole) for _, whole in (*between, *back)]
    assert max(float((whole - wholes[0]).norm() / wholes[0].norm()) for whole in wholes) < 1e-5


def refusals(world: World, path: str, other: str, folder: str) -> list[str]:
    """What a model says to the checkpoint of a deeper one, and the deeper one to that of the model."""
    mine, deeper = backend(world, path, axes=PP2), backend(world, other, axes=PP2)
    told = []
    for index, (writer, reader) in enumerate([(deeper, mine), (mine, deeper)]):
        save(world, writer, f"{folder}/{index}")
        try:
            reader.load(Path(f"{folder}/{index}"))
        except ValueError as error:
            told.append(str(error))
    try:
        backend(world, other, axes={"pp": world.size})
    except UserError as error:
        told.append(str(error))
    return told


def test_foreign_checkpoints_and_too_many_stages_are_refused(tmp_path) -> None:
    path, other = tiny("llama", tmp_path / "a"), tiny("llama", tmp_path / "b", num_hidden_layers=3)
    for told in run_ranks(4, refusals, str(path), str(other), str(tmp_path), timeout=200):
        (too_deep, too_flat, too_many) = told
        assert "does not fit this model: only the checkpoint has model/model.layers.2." in too_deep
        assert "does not fit this model: only this model has model/model.layers.2." in too_flat
        assert too_many == "train.pp: 4 stages cannot share 3 layers; at most 3"


def from_the_file(world: World, path: str) -> dict:
    """A policy filled from the file against one that takes over a whole model; what this rank has read of the file."""
    stored, batch = load_file(Path(path) / "model.safetensors"), global_batch()
    cfg = settings(path, **PP2)
    cfg.policy, cfg.steps = PolicyConfig(model=path, dtype="float32", **SETTINGS), 5
    ours, whole = build_role(cfg.role("policy"), world), backend(world, path, axes=PP2)
    published = {name: tensor.clone() for name, tensor in ours.weights()}
    share = share_of(ours, "uneven", batch)
    told = [role.update(share, loss, TEMPERATURE) for role in (ours, whole)]
    critic = build_role(cfg.role("critic"), world)
    return {
        "bytes": all(torch.equal(published[name], tensor) for name, tensor in stored.items()),
        "names": published.keys() == stored.keys(),
        "updates": told[0] == told[1] and torch.equal(weights(ours), weights(whole)),
        "values are zero": not critic.values(share).any(),
        "read": bytes_read(world)[0],
    }


FILES = [(2, "llama", {"tie": True}), (2, "qwen3_moe", EXPERTS["qwen3_moe"])]
MORE = [pytest.param(size, "qwen2", {}, marks=pytest.mark.slow) for size in (2, 4)]


@pytest.mark.parametrize(("size", "kind", "sizes"), [*FILES, *MORE])
def test_each_rank_reads_what_its_stage_holds_and_no_more(size: int, kind: str, sizes: dict, tmp_path) -> None:
    path = tiny(kind, tmp_path, num_hidden_layers=4, **sizes)
    stored = load_file(path / "model.safetensors")
    total = sum(tensor.nbytes for tensor in stored.values())
    found = run_ranks(size, from_the_file, str(path), timeout=200)
    read = [facts.pop("read") for facts in found]
    assert all(all(facts.values()) for facts in found), found
    assert sum(read) == total + (stored[TIED].nbytes if sizes.get("tie") else 0)
    assert max(read) < 1.2 * sum(read) / size


def partly_frozen(world: World, path: str, folder: str) -> dict[str, bool]:
    """A policy of which only the last layer is trained, so that the first stage trains nothing."""
    both = []
    for _ in range(2):
        model = build_model(path, torch.float32, "cpu").requires_grad_(False)
        model.model.layers[-1].requires_grad_(True)
        policy, train = PolicyConfig(**SETTINGS), TrainConfig(**PP2)
        both.append(fsdp2_policy(model, Layout(world, **PP2), train, torch.float32, policy, 5))
    writer, reader = both
    start = {name: tensor.clone() for name, tensor in writer.weights()}
    metrics = updates(world, writer, range(2))
    save(world, writer, folder)
    reader.load(Path(folder))
    after = {name: tensor.clone() for name, tensor in writer.weights()}
    return {
        "finite": all(0 < update["grad_norm"] < 100 for update in metrics),
        "moved": all(torch.equal(start[name], after[name]) == (".layers.1." not in name) for name in start),
        "loaded": held(reader) == held(writer) and torch.equal(weights(reader), weights(writer)),
    }


def test_a_stage_of_which_nothing_is_trained(tmp_path) -> None:
    for facts in run_ranks(2, partly_frozen, str(tiny("llama", tmp_path)), str(tmp_path / "policy"), timeout=150):
        assert all(facts.values()), facts
