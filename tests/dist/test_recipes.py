"""Every recipe from collected samples to the gradient, with a real backend: the same at 1 and 2 ranks, and at 4.

Two updates a step, micro-batches smaller than a rank's share, and old logprobs moved away from the current ones, so
that ratios are not 1.
"""

from array import array
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from spmd_rl.config.load import CONFIGS, load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn import Learner
from spmd_rl.rollout.collected import Collected
from spmd_rl.train import Roles, build_roles
from spmd_rl.types import Group, Message, Prompt, Sample, Turn, Verdict
from tests.dist.harness import run_ranks
from tests.fakes import table_of
from tests.models import tiny
from tests.unit.test_config_load import DOORS

pytestmark = pytest.mark.timeout(900)  # a world trains every recipe in the first test that asks for it
RECIPES = [path.stem for path in sorted((CONFIGS / "algorithm").glob("*.yaml"))]
SAMPLING = {"grpo_dynamic"}
"""Recipes that differ from another one in what they sample, not in what they make of it."""
HERE = [name for name in RECIPES if ("algorithm", name) not in DOORS and name not in SAMPLING]
OPTIONS = {
    "masks": ["algorithm.max_len_mask=true", "algorithm.difficulty_mask=true", "algorithm.error_max_len_clip=true",
              "algorithm.error_max_len_threshold=9", "algorithm.difficulty_high_threshold=0.6",
              "algorithm.difficulty_loss_weight=true", "algorithm.length_loss_weight=true"],
    "scores": ["algorithm.norm_mean_type=running", "algorithm.norm_std_type=batch", "algorithm.reward_clip=1.5",
               "algorithm.reward_scale=2", "algorithm.format_penalty=0.5", "algorithm.repetition_coef=0.5",
               "algorithm.repetition_ngram=1", "algorithm.advantage_clip=0.9"],
    "terms": ["algorithm.entropy_coef=0.01", "algorithm.sft_coef=0.1", "algorithm.kl_coef=0.1", "algorithm.target_kl=1",
              "algorithm.correction.level=sequence", "algorithm.correction.mask_low=0.01",
              "algorithm.loss=segment_clip"],
    "epochs": ["algorithm=ppo", "algorithm.sample_epochs=2"],
    "gdpo": ["algorithm.advantage=gdpo", "algorithm.reward_weights={right: 1, long: -0.5}"],
    "token_kl": ["algorithm.kl_reward_coef=0.1", "algorithm.kl_reward_estimator=k2", "algorithm.gamma=0.9"],
}  # fmt: skip
"""What no recipe turns on."""
TAME = [
    f"algorithm.{key}"
    for key in ("pass_k=2", "dual_clip=1.2", "clip_cov_ratio=0.1", "clip_cov_low=0", "kl_cov_ratio=0.1")
]
"""Defaults are for larger batches."""
SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]
"""Every loss and aggregation has its gradient on 4 ranks in `test_invariance`."""
CASES = {name: [f"algorithm={name}"] for name in HERE} | OPTIONS


def settings(path: str, *overrides: str) -> RlvrConfig:
    """A learner's settings; nothing is clipped by the norm, so that moments are gradients."""
    common = [f"policy.model={path}/model", f"reference.model={path}/other", "policy.dtype=float32"]
    common += ["policy.max_grad_norm=1e9", "train.tokens_per_microbatch=50", "train.updates_per_step=2"]
    return load(
        "rlvr",
        RlvrConfig,
        [*common, "rollout.answers_per_prompt=4", "rollout.max_new_tokens=24", *TAME, *overrides],
    )


def group(ticket: int, generator: torch.Generator) -> Group:
    """Four sampled answers of one or two turns and a greedy one; one without a score."""
    samples = []
    for answer in range(5):
        turns = []
        for _ in range(1 + (ticket + answer) % 2):
            blank, n = (int(torch.randint(2, high, (1,), generator=generator)) for high in (6, 12))
            ids = torch.randint(0, 256, (blank + n,), generator=generator).tolist()
            logprobs = (-5.5 + 0.3 * torch.randn(n, generator=generator)).tolist()
            parts = (array("i", ids[:blank]), array("i", ids[blank:]), array("f", logprobs), array("i", [0] * n))
            turns.append(Turn(*parts, "length" if n == 11 else "stop"))
        verdict = Verdict("ok", float(torch.randint(0, 2, (1,), generator=generator)))
        verdict = Verdict(
            "ok", verdict.score, {"right": verdict.score, "long": sum(len(t.token_ids) for t in turns) / 9}
        )
        verdict = Verdict("timeout") if (ticket, answer) == (2, 3) else verdict
        samples.append(Sample(ticket, answer, tuple(turns), verdict))
    return Group(Prompt(f"{ticket:032x}", (Message("user", "?"),), "toy", ""), ticket, tuple(samples))


def harvest(world: World, step: int, greedy: bool) -> Collected:
    """Six groups, dealt over the ranks; the greedy answers only where someone asks for them."""
    generator = torch.Generator().manual_seed(step)
    groups = [group(6 * step + i, generator) for i in range(6)]
    if not greedy:
        groups = [Group(g.prompt, g.ticket, g.samples[:4]) for g in groups]
    table = table_of(groups, lambda s: s.ticket % world.size, step)
    mine = tuple(g for g in groups if g.ticket % world.size == world.rank)
    return Collected(step, mine, (), table, 0.0, 0, 0)


def train(world: World, path: str, cases: dict[str, dict]) -> dict[str, dict[str, float]]:
    """One step of each case, by its settings.

    Rank 0 saves the optimizer's first moments, which are sums of both updates' gradients. The roles are
    built once, and every case finds them as they were built, but for the number of updates so far.
    """
    metrics = {}
    most = settings(path, "algorithm=ppo", "algorithm.kl_coef=0.1")  # all that a case may read
    built = build_roles(most.roles, world)
    start = [(t, t.clone()) for role in built.trained.values() for t in tensors(role)]
    for name, case in cases.items():
        cfg = msgspec.convert(case, RlvrConfig)
        reads = cfg.algorithm.uses_reference, cfg.algorithm.uses_critic
        both = built.reference, built.critic
        roles = Roles(built.policy, *(role if read else None for role, read in zip(both, reads, strict=True)))
        for tensor, as_built in start:
            tensor.copy_(as_built)
        learner = Learner(cfg, roles)
        batches = learner.prepare(harvest(world, 1, cfg.algorithm.uses_greedy))
        for batch in batches:
            from_engine = cfg.algorithm.old_logprobs == "engine"
            old = batch.rollout_logprobs if from_engine else batch.old_logprobs
            old += 0.4 * torch.sin(batch.token_ids.float() + batch.position_ids) * batch.loss_mask
        metrics[name] = learner.update(batches)
        wholes = {}
        for role in filter(None, (roles.policy, roles.critic)):
            moments = role.model.state_dict()["optimizer"].items()
            wholes |= {f"{len(wholes)} {key}": m.full_tensor() for key, m in moments if key.endswith("exp_avg")}
        if world.rank == 0:
            torch.save(wholes, Path(path) / f"{name}-{world.size}.pt")
    return metrics


def tensors(role) -> list[torch.Tensor]:
    """The weights and moments that an update changes."""
    parts = role.model.state_dict()
    return [*parts["model"].values(), *(m for name, m in parts["optimizer"].items() if name != "step")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of the moments, and a function: the metrics of each rank of a world of so many."""
    path = tmp_path_factory.mktemp("recipes")
    tiny("qwen2", path / "model")
    tiny("qwen2", path / "other", seed=1)
    cases = {name: msgspec.to_builtins(settings(str(path), *overrides)) for name, overrides in CASES.items()}
    return path, cache(lambda size: run_ranks(size, train, str(path), cases, timeout=280))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_same_at_every_world_size(trained, name: str, size: int) -> None:
    path, metrics = trained
    assert metrics(1) and metrics(size)
    wanted, got = (torch.load(path / f"{name}-{ranks}.pt") for ranks in (1, size))
    assert wanted.keys() == got.keys() and all(float(m.norm()) > 0 for m in wanted.values())
    errors = {key: float((got[key] - m).norm() / m.norm()) for key, m in wanted.items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_report_the_same(trained, name: str, size: int) -> None:
    _, metrics = trained
    reference = metrics(1)[0][name]
    ranks = [of_all[name] for of_all in metrics(size)]
    assert all(of_one == ranks[0] for of_one in ranks)
    for key in set(reference) - {"actor/balance", "actor/backward_steps", "critic/backward_steps"}:
        assert ranks[0][key] == pytest.approx(reference[key], rel=1e-4, abs=1e-6), key


def test_each_recipe_is_another_one(trained) -> None:
    path, metrics = trained
    assert metrics(1)
    prints = {name: float(torch.cat([m.flatten() for m in torch.load(path / f"{name}-1.pt").values()]).norm())
              for name in CASES}  # fmt: skip
    for a in CASES:
        same = [b for b in CASES if a < b and abs(prints[a] / prints[b] - 1) < 1e-6]
        assert not same, (a, same)
