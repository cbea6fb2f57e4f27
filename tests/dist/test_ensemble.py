"""Several critics on real ranks: each is one that saw its own answers alone; a checkpoint brings all of them back."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.algo.values import ensemble
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig, CriticConfig, TrainConfig
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.learn.token_advantages import mask_by_critics
from spmd_rl.train import build_role
from spmd_rl.train.accumulate import Critic
from spmd_rl.train.ensemble import CriticEnsemble
from tests.dist.harness import run_ranks
from tests.models import tiny
from tests.training import global_batch, share_of

OWN = {"lr": 1e-2, "eps": 1e-3, "schedule": "constant", "warmup_steps": 0, "dither": False}


def value_loss(values: Tensor, batch: Batch):
    error = values - batch.advantages[batch.loss_mask]
    return error.square() + 0.1 * error**3, {"critic/values/mean": values.detach()}


def role_of(world: World, path: str, backend: str = "fsdp2", critics: int = 2, **axes: int):
    """[all] The critics as a run builds them."""
    train = TrainConfig(name=backend, tokens_per_microbatch=50, **axes)
    own = CriticConfig(**OWN, ensemble=critics)
    return build_role(RoleConfig("critic", own, path, "float32", False, train, 5), world)


def batch_of(seed: int) -> Batch:
    """Nine answers to three prompts; the returns differ from batch to batch."""
    batch = global_batch(seed)
    batch.keys = torch.tensor([[7 + s // 3, s % 3] for s in range(9)])
    batch.units = batch.keys[:, 1].clone()
    return batch


def updated(role, seeds, share: str = "uneven") -> list[dict[str, float]]:
    """[all] Update on these batches."""
    with role.awake():
        return [role.update(share_of(role, share, batch_of(seed)), value_loss) for seed in seeds]


def alone(world: World, path: str, number: int, seeds) -> Tensor:
    """[all] The values of one critic that is given its answers of the batches, whole as if there were no others."""
    role = role_of(world, path, critics=1)
    for seed in seeds:
        batch = batch_of(seed)
        mine = batch.select(((batch.keys[:, 0] + batch.units) % 2 == number).nonzero().flatten())
        mine.weights = mine.weights * (batch.weights.sum() / mine.weights.sum())
        role.update(share_of_own(role, mine), value_loss)
    return role.values(batch_of(9))


def share_of_own(role, batch: Batch) -> Batch:
    data = role.layout.data
    return batch.select(list(range(data.rank, batch.num_samples, data.size)))


def trained(world: World, path: str, backend: str, axes: dict[str, int]) -> list:
    """[all] Values and their deviation after three updates, and the errors against single critics."""
    role = role_of(world, path, backend, **axes)
    start = role.estimates(batch_of(9))
    metrics = updated(role, range(3))
    found = role.estimates(batch_of(9))
    wanted = ensemble(torch.stack([alone(world, path, number, range(3)) for number in range(2)]))
    errors = [float((found[k] - w).abs().max()) for k, w in zip(("values", "value_spread"), wanted, strict=True)]
    unused = float(start["values"].abs().max() + start["value_spread"].abs().max())
    return [errors, unused, float(found["value_spread"].max()), metrics[-1]["loss"], metrics[-1]["lr"]]


@pytest.mark.parametrize(
    ("size", "backend", "axes"),
    [(1, "fsdp2", {}), (2, "fsdp2", {}), (2, "fsdp2", {"tp": 2}), (2, "megatron", {"tp": 2}), (2, "deepspeed", {})],
    ids=str,
)
def test_each_critic_is_one_that_saw_its_answers_alone(size: int, backend: str, axes: dict[str, int], tmp_path) -> None:
    for errors, start, spread, loss, lr in run_ranks(size, trained, str(tiny("llama", tmp_path)), backend, axes):
        assert start == 0 and spread > 1e-3, "else they are all the same one"
        assert max(errors) < 2e-5, errors
        assert loss > 0 and lr == OWN["lr"]


def resumed(world: World, path: str, folder: str) -> list[bool]:
    """[all] Four updates in one go, against a save after two, a restore into other critics, and the rest."""
    straight = role_of(world, path)
    updated(straight, range(2))
    target, beside = Path(folder) / "at once", Path(folder) / "staged"
    if world.rank == 0:
        target.mkdir(parents=True)
        beside.mkdir()
    world.barrier("made")  # [all]
    counters, later = straight.counters(), straight.stage(beside)
    written = straight.save(target)
    updated(straight, range(2, 4))
    written += later(lambda: None)
    every = {path for paths in world.gather("written", [str(path) for path in written]) for path in paths}  # [all]
    facts = [every == {str(path) for path in Path(folder).rglob("*") if path.is_file()}]
    for saved in (target, beside):
        again = role_of(world, path)
        again.load(saved)
        again.load_counters(counters)
        updated(again, range(2, 4))
        same = zip(straight.weights(), again.weights(), strict=True)
        facts += [all(a == b and torch.equal(x, y) for (a, x), (b, y) in same), again.counters() == straight.counters()]
    return facts


def test_a_resume_is_bitwise(tmp_path) -> None:
    tiny("qwen2", tmp_path / "model")
    for facts in run_ranks(2, resumed, str(tmp_path / "model"), str(tmp_path / "saved")):
        assert facts == [True] * 5


def masked(world: World) -> list[list[int]]:
    """[all] Which sampled tokens of this rank's samples lose their advantage, and which the bonus, by position."""
    batch = batch_of(0)
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)).abs()
    batch.value_spread, batch.advantages = noise, torch.ones(batch.num_tokens) * batch.loss_mask
    batch.rollout_logprobs = torch.arange(batch.num_tokens).float()  # where each token was
    data = Layout(world).data
    mine = batch.select(list(range(data.rank, 9, data.size)))
    settings = AlgorithmConfig(advantage="gae", advantage_mask_ratio=0.2, entropy_mask_ratio=0.3, entropy_coef=0.1)
    mask_by_critics(mine, settings, int(batch.loss_mask.sum()), data)  # [all]
    agreed = mine.loss_mask & (mine.advantages == 0)
    return [mine.rollout_logprobs[chosen].long().tolist() for chosen in (agreed, mine.disputed)]


@pytest.mark.parametrize("size", [1, 2])
def test_the_tokens_are_those_of_the_global_batch(size: int) -> None:
    batch = batch_of(0)
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)).abs()
    order = sorted(batch.loss_mask.nonzero().flatten().tolist(), key=lambda token: float(noise[token]))
    found = run_ranks(size, masked)
    wanted = [order[: int(0.2 * len(order))], order[-int(0.3 * len(order)) :]]
    assert [sorted(token for one in found for token in one[kind]) for kind in (0, 1)] == [sorted(w) for w in wanted]


def of_one(world: World, path: str) -> list[bool]:
    """[all] A critic, and an ensemble of one such critic."""
    one, wrapped = role_of(world, path, critics=1), CriticEnsemble([role_of(world, path, critics=1)])
    metrics = [updated(role, range(3)) for role in (one, wrapped)]
    same = zip(one.weights(), wrapped.weights(), strict=True)
    weights = all(f"0.{a}" == b and torch.equal(x, y) for (a, x), (b, y) in same)
    return [isinstance(one, Critic), weights, metrics[0] == metrics[1]]


def test_one_critic_is_the_critic_to_the_bit(tmp_path) -> None:
    assert run_ranks(2, of_one, str(tiny("llama", tmp_path))) == [[True] * 3] * 2
