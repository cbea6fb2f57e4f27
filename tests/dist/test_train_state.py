"""The FSDP2 backend's state: exact resume, other world sizes, and gradients that are not finite."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from spmd_rl.base.errors import RunFailed
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.model.load import local
from spmd_rl.train.state import SavedState
from tests.dist.harness import run_ranks
from tests.models import tiny
from tests.training import SETTINGS, SHARES, TEMPERATURE, backend, fsdp2_policy, global_batch, loss, share_of


def updates(world: World, mine, seeds) -> list[dict[str, float]]:
    out = []
    for seed in seeds:
        share = share_of(mine, "dealt", global_batch(seed))
        mine.logprobs(share, TEMPERATURE)
        out.append(mine.update(share, loss, TEMPERATURE))
    return out


def weights(mine) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in mine.weights()])


def save(world: World, mine, folder) -> dict[str, int]:
    """Save into a folder that rank 0 makes; the counters, which the caller keeps."""
    if world.rank == 0:
        Path(folder).mkdir(parents=True)
    world.barrier("folder")
    written = [path.name for path in mine.save(Path(folder))]
    told = world.gather("written", written)
    assert sorted(name for names in told for name in names) == sorted(path.name for path in Path(folder).iterdir())
    return mine.counters()


def restore(mine, folder, counters) -> None:
    mine.load(Path(folder))
    mine.load_counters(counters)


def straight_and_resumed(world: World, path, other, folder, at: int) -> list[bool]:
    """4 updates in one go, against a save after `at` of them and a restore into a model of other weights."""
    straight = backend(world, path)
    before = updates(world, straight, range(at))
    counters = save(world, straight, folder)
    before += updates(world, straight, range(at, 4))
    resumed = backend(world, other)
    share = global_batch().select(SHARES["dealt"](world.rank, world.size))
    resumed.logprobs(share, TEMPERATURE)  # leaves nothing gathered that a restore would not see
    restore(resumed, folder, counters)
    after = updates(world, resumed, range(at, 4))
    return [torch.equal(weights(straight), weights(resumed)), before[at:] == after, before[0] != before[-1]]


def resumes(world: World, path, other, folder) -> list[list[bool]]:
    return [straight_and_resumed(world, path, other, f"{folder}/{at}", at) for at in (0, 2)]


def test_a_resume_is_bitwise(tmp_path):
    path, other = tiny("llama", tmp_path / "a", tie=True), tiny("llama", tmp_path / "b", seed=1, tie=True)
    for facts in run_ranks(2, resumes, str(path), str(other), str(tmp_path / "dcp")):
        assert facts == [[True] * 3] * 2


def saved(world: World, path, folder, tp: int) -> list[float]:
    mine = backend(world, path, axes={"tp": tp})
    updates(world, mine, range(2))
    save(world, mine, folder)
    updates(world, mine, range(2, 4))
    return weights(mine).tolist()


def continued(world: World, other, folder, tp: int) -> list[float]:
    mine = backend(world, other, axes={"tp": tp})
    restore(mine, folder, {"updates": 2, "skipped_in_a_row": 0})
    updates(world, mine, range(2, 4))
    return weights(mine).tolist()


MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in (((2, 1), (1, 1)), ((1, 1), (2, 2)))]


@pytest.mark.parametrize(("saver", "loader"), [((1, 1), (3, 1)), ((4, 2), (1, 1)), *MORE])
def test_a_checkpoint_loads_in_another_layout(saver, loader, tmp_path):
    """Ranks, and how many of them tensor parallelism takes."""
    (size, tp), (later, later_tp) = saver, loader
    kind = {"tie": True, "num_hidden_layers": 1, "intermediate_size": 90}
    path, other = tiny("qwen3", tmp_path / "a", **kind), tiny("qwen3", tmp_path / "b", seed=1, **kind)
    wanted = torch.tensor(run_ranks(size, saved, str(path), str(tmp_path / "dcp"), tp)[0])
    for got in run_ranks(later, continued, str(other), str(tmp_path / "dcp"), later_tp):
        assert (torch.tensor(got) - wanted).norm() / wanted.norm() < 1e-5


def digest(mine) -> str:
    """[all] Of every tensor that a checkpoint holds, whole."""
    found = hashlib.blake2b()
    for part in mine.model.state_dict().values():
        for name, tensor in sorted(part.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + whole.numpy().tobytes())
    return found.hexdigest()


def trained_and_saved(world: World, path, folder, tp: int) -> str:
    mine = backend(world, path, axes={"tp": tp})
    data = mine.layout.data
    for seed in range(2):
        mine.update(global_batch(seed).select(SHARES["dealt"](data.rank, data.size)), loss, TEMPERATURE)
    save(world, mine, folder)
    return digest(mine)


def loaded(world: World, other, folder, tp: int) -> list[str]:
    mine = backend(world, other, axes={"tp": tp})
    before = digest(mine)
    mine.load(Path(folder))
    return [digest(mine), before]


LARGEST = pytest.param(4, 2, 1, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("size", "tp", "later", "later_tp"), [(2, 2, 2, 1), (1, 1, 2, 2), LARGEST])
def test_a_checkpoint_loads_in_another_layout_to_the_bit(size, tp, later, later_tp, tmp_path):
    path, other = (tiny("qwen2", tmp_path / str(seed), seed=seed, vocab_size=263) for seed in (0, 1))
    folder = str(tmp_path / "policy")
    wanted = run_ranks(size, trained_and_saved, str(path), folder, tp, timeout=150)
    assert len(set(wanted)) == 1
    for found, before in run_ranks(later, loaded, str(other), folder, later_tp, timeout=150):
        assert found == wanted[0] != before


def partly_frozen(world: World, path, folder) -> list[bool]:
    """A policy of which only the last layer is trained, saved and loaded by another one."""
    both = []
    for _ in range(2):
        model = build_model(path, torch.float32, "cpu").requires_grad_(False)
        model.model.layers[-1].requires_grad_(True)
        both.append(fsdp2_policy(model, Layout(world), TrainConfig(), torch.float32, PolicyConfig(**SETTINGS), 5))
    writer, reader = both
    updates(world, writer, range(2))
    before = weights(reader)
    save(world, writer, folder)
    reader.load(Path(folder))
    saved_weights = {name for name in SavedState.open(Path(folder)).tensors if name.startswith("model/")}
    return [
        all(".layers.1." in name for name in saved_weights) and len(saved_weights) > 5,
        torch.equal(weights(reader), weights(writer)) and not torch.equal(weights(reader), before),
        digest(reader) == digest(writer),
    ]


def test_frozen_parameters_are_not_saved(tmp_path):
    assert run_ranks(1, partly_frozen, str(tiny("llama", tmp_path)), str(tmp_path / "policy")) == [[True] * 3]


def skips(world: World, path) -> list[bool]:
    """One rank's infinite weight skips the update on all; a good one resets the count; two in a row end it."""
    mine = backend(world, path, max_skipped_updates=2)
    good = global_batch().select(SHARES["dealt"](world.rank, world.size))
    bad = global_batch().select(SHARES["dealt"](world.rank, world.size))
    if world.rank == world.size - 1:
        bad.weights[bad.loss_mask] = math.inf
    updates(world, mine, [0])
    before, state = weights(mine), {k: v.clone() for k, v in mine.model.state_dict()["optimizer"].items()}
    facts = [mine.update(bad, loss, TEMPERATURE)["skipped"] == 1.0]
    facts.append(torch.equal(before, weights(mine)))
    facts.append(all(torch.equal(v, state[k]) for k, v in mine.model.state_dict()["optimizer"].items()))
    facts.append(mine.counters() == {"updates": 2, "skipped_in_a_row": 1})
    facts.append(mine.update(good, loss, TEMPERATURE)["skipped"] == 0.0)
    facts.append(not torch.equal(before, weights(mine)))
    mine.update(bad, loss, TEMPERATURE)
    try:
        mine.update(bad, loss, TEMPERATURE)
    except RunFailed as error:
        facts.append("2 updates in a row" in str(error))
    return [*facts, mine.counters()["skipped_in_a_row"] == 2]


def test_a_gradient_that_is_not_finite_is_skipped_by_all(tmp_path):
    for facts in run_ranks(2, skips, str(tiny("qwen2", tmp_path))):
        assert len(facts) == 8 and all(facts), facts


def refusals(world: World, path, other, folder) -> list[str]:
    """What a model says to the checkpoint of a deeper one, and the deeper one to that of the model."""
    mine, deeper = backend(world, path), backend(world, other)
    told = []
    for index, (writer, reader) in enumerate([(deeper, mine), (mine, deeper)]):
        save(world, writer, f"{folder}/{index}")
        try:
            reader.load(Path(f"{folder}/{index}"))
        except ValueError as error:
            told.append(str(error))
    return told


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path, other = tiny("llama", tmp_path / "a"), tiny("llama", tmp_path / "b", num_hidden_layers=3)
    for told in run_ranks(2, refusals, str(path), str(other), str(tmp_path)):
        (too_deep, too_flat) = told
        assert "does not fit this model: only the checkpoint has model/model.layers.2." in too_deep
        assert "does not fit this model: only this model has model/model.layers.2." in too_flat


def asleep_between_uses(world: World, path) -> list[bool]:
    """A backend whose tensors leave their device whenever it sleeps, beside one whose tensors stay."""
    stays, leaves = backend(world, path), backend(world, path)
    leaves.model.offloads = True  # the CPU plays the device
    facts = []
    tensors = (tensor for part in leaves.model.state_dict().values() for tensor in part.values())
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    for seed in range(3):
        share = global_batch(seed).select(SHARES["dealt"](world.rank, world.size))
        told = []
        for mine in (stays, leaves):
            with mine.awake():
                logprobs, _ = mine.logprobs(share, TEMPERATURE)
            with mine.awake():
                told.append((logprobs.tolist(), mine.update(share, loss, TEMPERATURE)))
        facts.append(told[0] == told[1])
        facts.append(not any(tensor.to_local().untyped_storage().nbytes() for tensor in sharded))
    with leaves.awake():
        facts.append(torch.equal(weights(stays), weights(leaves)))
        ours, theirs = (mine.model.state_dict()["optimizer"] for mine in (stays, leaves))
        facts += [torch.equal(local(ours[name]), local(theirs[name])) for name in ours]
    return facts


@pytest.mark.parametrize("size", [1, 2])
def test_a_trainer_that_is_offloaded_between_uses_learns_the_same(tmp_path, size: int):
    for facts in run_ranks(size, asleep_between_uses, str(tiny("llama", tmp_path, tie=True))):
        assert all(facts) and len(facts) > 20
