"""One more backend, in a file of its own and a line in a table: the same updates, and saved state that both read."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from spmd_rl.config.backends import BACKENDS, backend
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import World
from spmd_rl.errors import UserError
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.dist.test_train_state import save
from tests.models import tiny
from tests.training import SETTINGS, TEMPERATURE, global_batch, loss, relative, share_of

ZEROS = {"zero": "tests.zero"}
EPS = 1e-3
"""It hides gradients that are rounding alone, of which AdamW would make whole steps."""


def role_of(path: str, name: str) -> RoleConfig:
    own = PolicyConfig(**SETTINGS, eps=EPS, dither=False)
    return RoleConfig("policy", own, path, "float32", False, TrainConfig(name=name, tokens_per_microbatch=60), 5)


def trained(world: World, path: str, name: str, seeds) -> tuple:
    role = build_role(role_of(path, name), world)
    return role, updated(role, seeds)


def updated(role, seeds) -> list[dict[str, float]]:
    return [role.update(share_of(role, "uneven", global_batch(seed)), loss, TEMPERATURE) for seed in seeds]


def whole(role) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in role.weights()}


def compared(world: World, path: str, other: str, folder: str, name: str) -> dict[str, float]:
    """Three updates by both; then each goes on, for one, from what the other has saved."""
    BACKENDS.update(ZEROS)
    made = {key: trained(world, path, key, range(3)) for key in (name, "fsdp2")}
    (zero, ours), (fsdp2, theirs) = made.values()
    held, wanted = whole(zero), whole(fsdp2)
    found = {f"weights {key}": relative(held[key], wanted[key]) for key in wanted}
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        found |= {f"{i} {key}": abs(a[key] - b[key]) / (abs(b[key]) or 1.0) for key in b}
        assert a["num_microbatches"] > 1 and a["grad_norm"] > SETTINGS["max_grad_norm"]
    share = share_of(zero, "dealt", global_batch())
    pairs = zip(zero.logprobs(share, TEMPERATURE), fsdp2.logprobs(share, TEMPERATURE), strict=True)
    found |= {f"output {i}": float((a - b).abs().max()) for i, (a, b) in enumerate(pairs)}
    for writer, reader in ((name, "fsdp2"), ("fsdp2", name)):
        counters = save(world, made[writer][0], f"{folder}/{writer}")
        taken = build_role(role_of(other, reader), world)
        taken.load(Path(f"{folder}/{writer}"))
        taken.load_counters(counters)
        exact, read = whole(made[writer][0]), whole(taken)
        found |= {f"{writer} read {key}": float(not torch.equal(exact[key], read[key])) for key in exact}
        straight, resumed = updated(made[writer][0], [3]), updated(taken, [3])
        assert straight[0].keys() == resumed[0].keys()
        went, goes = whole(made[writer][0]), whole(taken)
        found |= {f"{writer} goes on {key}": relative(goes[key], went[key]) for key in went}
    return found


@pytest.mark.parametrize("name", ZEROS)
def test_one_more_backend_learns_the_same_and_reads_the_same_state(name: str, tmp_path) -> None:
    path, other = (str(tiny("llama", tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    for found in run_ranks(2, compared, path, other, str(tmp_path), name, timeout=200):
        worst = max(found, key=found.get)
        assert found[worst] < 2e-6 and len(found) > 80, (worst, found[worst])


def test_settings_that_a_backend_lacks_are_refused_before_torch(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(BACKENDS, "zero", "tests.zero")
    path = tiny("llama", tmp_path)
    good = role_of(str(path), "zero")
    backend("zero").check(good, path)
    for changed, said in (
        ({"tp": 2}, "train.tp: train=zero has it not; must be 1"),
        ({"compile": True}, "train.compile: train=zero has it not; must be False"),
    ):
        with pytest.raises(UserError, match=said):
            backend("zero").check(replace(good, train=replace(good.train, **changed)), path)
    for together in ({"pp": 2}, {"activation_checkpointing": "full"}):
        with pytest.raises(UserError, match="train.compile: not together with "):
            backend("fsdp2").check(replace(good, train=TrainConfig(compile=True, **together)), path)
    muon = PolicyConfig(**asdict(good.own) | {"optimizer": "muon"})
    with pytest.raises(UserError, match="policy.optimizer: muon is unknown to train=zero; known: adamw"):
        backend("zero").check(replace(good, own=muon), path)
    with pytest.raises(UserError, match="train.pp: cohere scales its hidden states; must be 1"):
        scaling = tiny("cohere", tmp_path / "cohere", tie=True, logit_scale=0.3)
        backend("fsdp2").check(replace(good, train=TrainConfig(pp=2)), scaling)
