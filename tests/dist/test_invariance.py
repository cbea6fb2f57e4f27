"""Every policy loss, and every aggregation, from the plan to the gradient of a real model, at 1, 2 and 4 ranks.

So are the estimators that credit the turns of agents, some of whose trajectories are cut into segments.

The reference is plain Hugging Face in one process: one right-padded batch under an attention mask, no packing, no
shared prompt, no micro-batch. Against it stand the plan, the all-to-all and the FSDP2 backend, with samples in another
order, on other ranks and in other micro-batches. The ranks start once per world size and try all cases. In float64 the
limit tells mathematics from rounding; advantages, weights and old logprobs are float32 numbers there too, the same
everywhere. float32, whose rounding `test_train_parity` bounds in each layout, is among the slow tests. Left out: the
losses' formulas, which both sides share (tests/unit/algo).
"""

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.tensor import distribute_tensor

from spmd_rl.algo import AGGREGATIONS, POLICY_LOSSES
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig, PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout as RankLayout
from spmd_rl.distributed import World, solo
from spmd_rl.learn import token_advantages
from spmd_rl.learn.losses import bind_loss
from spmd_rl.model.build import build_model
from spmd_rl.rollout.collected import Collected
from spmd_rl.train.base import ForwardArgs
from spmd_rl.types import AgentStep, Group, Message, Prompt, Sample, Verdict, concat
from tests import plans
from tests.agents import SEGMENTS
from tests.dist.harness import run_ranks
from tests.fakes import table_of
from tests.models import tiny
from tests.training import fsdp2_policy
from tests.unit.algo.cases import KEYS
from tests.unit.test_sharing import exact, sample

pytestmark = pytest.mark.timeout(600)  # the first test's setup holds all the work
LIMITS = {"float32": 1e-5, "float64": 1e-12}
SIZES = (1, 2, 4)
TEMPERATURE = 0.8
LOSSES = {name: {"loss": name, **KEYS[name]} for name in POLICY_LOSSES}
LOSSES["clip_cov"] |= {"clip_cov_ratio": 0.1, "clip_cov_low": 0.0}
LOSSES["kl_cov"] |= {"kl_cov_ratio": 0.1}
LOSSES |= {"sft": KEYS["sft"], "entropy": KEYS["entropy"], "kl": {"kl_coef": 0.1}}
LOSSES |= {
    "gigpo": {"advantage": "gigpo", "whiten_advantages": True},
    "step returns": {"advantage": "step_reinforce", "loss": "gspo", **KEYS["gspo"], "kl_reward_coef": 0.1},
    "token returns": {"advantage": "reinforce_returns", "gamma": 0.9, "loss": "kimi", **KEYS["kimi"]},
}
FIRST_LOSS, FIRST_AGGREGATION = "ppo_clip", "token-mean"
CASES = {
    (name, agg): AlgorithmConfig(**LOSSES[name], loss_agg=agg, loss_agg_length=16)
    for name, agg in [*((name, FIRST_AGGREGATION) for name in LOSSES), *((FIRST_LOSS, agg) for agg in AGGREGATIONS)]
}
"""Each loss under one aggregation and each aggregation of one loss: a loss never sees how its tokens are weighted."""
LENGTHS = [[[5], [12], [1], [9]], [[3, 4], [2, 2], [8]], [[30], [2]], [[4, 1], [7], [3], [6]]]
"""sampled tokens of each turn of each answer of each ticket"""


@dataclass(frozen=True)
class Arrangement:
    """How the same samples lie."""

    budget: int
    """tokens of a micro-batch"""
    holder: Callable[[Sample, int], int]
    """the rank, of so many, that generated a sample"""
    seed: int | None = None
    """of the order in which tickets and answers come to the plan; None: their own"""


ARRANGEMENTS = (
    Arrangement(10_000, lambda s, size: s.ticket % size),
    Arrangement(1, lambda s, size: size - 1, seed=1),  # one sample a micro-batch; all come from one rank
    Arrangement(60, lambda s, size: (s.ticket + s.answer) % size, seed=2),  # a ticket's samples come from several
)
"""A case meets each of them at one world size, and a loss each of them at every world size: see `arrangement_of`."""


def arrangement_of(case: int, size: int) -> Arrangement:
    """For the case of this number."""
    return ARRANGEMENTS[(case + SIZES.index(size)) % len(ARRANGEMENTS)]


def groups() -> list[Group]:
    """Shared prompts, several turns, uneven lengths, scores between 0 and 1, and one answer without a score."""
    rng = random.Random(0)
    made = []
    for ticket, shapes in enumerate(LENGTHS):
        prompt = [rng.randrange(256) for _ in range(5 + 4 * ticket)]
        samples = []
        for answer, lengths in enumerate(shapes):
            verdict = Verdict("timeout") if (ticket, answer) == (3, 2) else Verdict("ok", rng.randrange(5) / 4)
            plain = sample(ticket, answer, prompt, lengths, rng)
            steps = [AgentStep("", rng.randrange(3) / 2, rng.randrange(2)) for _ in plain.turns]
            logprobs = [array("f", [rng.gauss(-5.5, 0.3) for _ in t.logprobs]) for t in plain.turns]
            turns = [
                replace(t, logprobs=logs, step=step) for t, logs, step in zip(plain.turns, logprobs, steps, strict=True)
            ]
            whole = replace(plain, turns=tuple(turns), verdict=verdict)
            samples += [whole] if len(turns) == 1 or ticket == 3 else segments(whole)
        made.append(Group(Prompt(f"{ticket:032x}", (Message("user", "?"),), "toy", ""), ticket, tuple(samples)))
    return made


def segments(whole: Sample) -> list[Sample]:
    """The same trajectory with its second turn as a segment of its own, after all that came before."""
    first, second = whole.turns
    before = concat([first.prompt_ids, first.token_ids, second.prompt_ids], "i")
    return [
        replace(whole, turns=(first,), verdict=Verdict("ok"), unit=whole.answer, last=False),
        replace(whole, answer=whole.answer + SEGMENTS, turns=(replace(second, prompt_ids=before),), unit=whole.answer),
    ]


def harvest(world: World, arrangement: Arrangement) -> Collected:
    """All samples, as the rollout would hand them to this rank."""
    everything = groups()
    if arrangement.seed is not None:
        rng = random.Random(arrangement.seed)
        rng.shuffle(everything)
        everything = [replace(g, samples=tuple(rng.sample(g.samples, len(g.samples)))) for g in everything]
    mine = []
    for g in everything:
        here = tuple(s for s in g.samples if arrangement.holder(s, world.size) == world.rank)
        mine += [replace(g, samples=here)] if here else []
    table = table_of(everything, lambda s: arrangement.holder(s, world.size))
    return Collected(1, tuple(mine), (), table, 0.0, 0, 0)


def prepared(world: World, arrangement: Arrangement, settings: AlgorithmConfig) -> Batch:
    """[all] This rank's share of the step, as the learner makes it; old and reference logprobs are made up."""
    collected = harvest(world, arrangement)
    sizes = {"num_updates": 1, "num_shards": world.size, "hidden_size": 32, "max_tokens": 32}
    plan, _ = plans.plan(collected, settings, Moments(), **sizes)
    data = RankLayout(world).data
    (batch,) = plans.redistribute(collected, plan, 1, data, world)
    place = batch.token_ids.double() + 7 * batch.position_ids
    batch.old_logprobs, batch.ref_logprobs = (
        ((batch.rollout_logprobs + 0.4 * noise) * batch.loss_mask).float() for noise in (place.sin(), place.cos())
    )
    if settings.kl_reward_coef and settings.advantage == "step_reinforce":
        plan = plans.take_kl(collected, [batch], plan, settings, data, 32)
    token_advantages.finish([batch], plan, settings, settings.kl_reward_coef, data, seed=0)
    return batch


def padded_forward(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob and entropy [N] of the sampled tokens, by transformers' own attention over a rectangle."""
    rows = [batch.token_ids[begin:end] for begin, end in pairwise(batch.starts.tolist())]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logs = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1] / TEMPERATURE, -1)
    chosen = logs.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    sampled = torch.nn.utils.rnn.pad_sequence(batch.loss_mask.split(batch.starts.diff().tolist()), batch_first=True)
    return chosen[sampled[:, 1:]], entropy[sampled[:, 1:]]


def references(_: World, path: str, dtype: str) -> None:
    """Save the gradient of every case by the plain forward, in one process."""
    model = exact(build_model(f"{path}/model", getattr(torch, dtype), "cpu", attention="sdpa"))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients, outputs = {}, None
    with solo() as world:
        for case, settings in CASES.items():
            batch = prepared(world, ARRANGEMENTS[0], settings)
            outputs = outputs or padded_forward(model, batch)  # the same for all
            per_token, _ = bind_loss(settings)(*outputs, batch)
            loss = (per_token * batch.weights[batch.loss_mask]).sum()
            gradients[case] = dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))
    torch.save(gradients, Path(path) / f"{dtype}.pt")


def errors(world: World, path: str, dtype: str) -> list[tuple[str, str, str, float]]:
    """[all] Loss, aggregation, tensor and its relative L2 error, infinite where the gradient should be 0."""
    rows, squares = [], {}
    train = TrainConfig()
    model = exact(build_model(f"{path}/model", getattr(torch, dtype), "cpu"))
    backend = fsdp2_policy(model, RankLayout(world), train, getattr(torch, dtype), PolicyConfig())
    wanted = torch.load(Path(path) / f"{dtype}.pt")
    for number, (case, settings) in enumerate(CASES.items()):
        arrangement = arrangement_of(number, world.size)
        train.tokens_per_microbatch = arrangement.budget
        backend.accumulate(prepared(world, arrangement, settings), ForwardArgs(TEMPERATURE), bind_loss(settings))
        for name, p in backend.model.module.named_parameters():
            whole = distribute_tensor(wanted[case][name], p.device_mesh, p.placements, src_data_rank=None)
            got, want = p.grad.to_local().double(), whole.to_local().double()
            squares[f"{len(rows)} error"] = float((got - want).square().sum())
            squares[f"{len(rows)} norm"] = float(want.square().sum())
            rows.append((*case, name))
        backend.model.step(0.0, None)
    sums = world.reduce("squares", squares)
    ratios = ((sums[f"{i} error"], sums[f"{i} norm"]) for i in range(len(rows)))
    return [(*row, (e / n) ** 0.5 if n else float("inf")) for row, (e, n) in zip(rows, ratios, strict=True)]


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "float64"])
def found(request, tmp_path_factory) -> tuple[str, list[tuple]]:
    """The dtype; world size and the rest of every error."""
    path = tmp_path_factory.mktemp("invariance")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 263, "head_dim": 8}  # not all divide by 4
    tiny("qwen2", path / "model", **sizes)
    task = str(path), request.param
    run_ranks(1, references, *task)
    return request.param, [(size, *row) for size in SIZES for row in run_ranks(size, errors, *task, timeout=280)[0]]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_a_padded_batch(found, loss: str) -> None:
    dtype, rows = found
    mine = [row for row in rows if row[1] == loss]
    aggregations = set(AGGREGATIONS) if loss == FIRST_LOSS else {FIRST_AGGREGATION}
    assert {row[0] for row in mine} == set(SIZES) and {row[2] for row in mine} == aggregations
    worst = max(mine, key=lambda row: row[-1])
    assert worst[-1] <= LIMITS[dtype], worst
