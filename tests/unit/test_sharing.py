"""Common prefixes computed once: the same loss and gradients as every sample by itself, and fewer tokens."""

import random
from array import array
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo import POLICY_LOSSES
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.losses import bind_loss
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.train.microbatch import plan
from spmd_rl.train.sharing import PrefixTree, share_prefixes
from spmd_rl.types import Sample, Turn, Verdict
from tests.models import KINDS, tiny

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}


def sample(ticket: int, answer: int, prompt: list[int], lengths: list[int], rng: random.Random) -> Sample:
    """Turns of these lengths; only the first prompt is the group's."""
    turns = []
    for number, length in enumerate(lengths):
        ids = array("i", [rng.randrange(256) for _ in range(length)])
        asked = array("i", prompt if number == 0 else [rng.randrange(256) for _ in range(3)])
        turns.append(Turn(asked, ids, array("f", [-1.0] * length), array("i", [0] * length), "stop"))
    return Sample(ticket, answer, tuple(turns), Verdict("ok", 1.0))


def groups(seed: int = 0) -> Batch:
    """Uneven answers, a group of one, a truncated answer, several turns, and two prompts that are equal."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (20, 7, 90, 20)]
    prompts[3] = prompts[0]
    shapes = [[[5], [12], [1], [9]], [[30]], [[4], [100]], [[3, 4], [2, 2, 2]]]
    samples = [
        sample(ticket, answer, prompts[ticket], lengths, rng)
        for ticket, some in enumerate(shapes)
        for answer, lengths in enumerate(some)
    ]
    return weighted(pack(samples), seed)


def weighted(batch: Batch, seed: int = 0) -> Batch:
    """With drawn numbers for all that a loss reads, every sampled token its own."""
    draw = torch.Generator().manual_seed(seed)
    size = batch.num_tokens
    batch.advantages = torch.randn(size, generator=draw) * batch.loss_mask
    batch.weights = torch.rand(size, generator=draw) * batch.loss_mask / 10
    batch.old_logprobs = (-5.5 + 0.2 * torch.randn(size, generator=draw)) * batch.loss_mask
    batch.rollout_logprobs = (batch.old_logprobs + 0.1 * torch.randn(size, generator=draw)) * batch.loss_mask
    batch.marked = (torch.rand(size, generator=draw) < 0.2) & batch.loss_mask
    return batch


def random_turn(num_given: int, num_sampled: int, rng: random.Random) -> Turn:
    given, sampled = ([rng.randrange(256) for _ in range(n)] for n in (num_given, num_sampled))
    return turn(given, sampled)


def turn(given: list[int], sampled: list[int]) -> Turn:
    n = len(sampled)
    return Turn(array("i", given), array("i", sampled), array("f", [-1.0] * n), array("i", [0] * n), "stop")


def trajectories(parted_after: int, num_turns: int) -> Batch:
    """Two of one ticket that have their first turns in common."""
    rng = random.Random(1)
    common = [random_turn(9, 6, rng) for _ in range(parted_after)]
    more = [[random_turn(4 + i, 5, rng) for _ in range(num_turns - parted_after)] for i in range(2)]
    return weighted(pack([Sample(0, i, (*common, *more[i]), Verdict("ok", 1.0)) for i in range(2)]))


def steps(num_steps: int) -> Batch:
    """One trajectory cut into steps: each row is all that came before as its prompt, and one answer."""
    rng = random.Random(2)
    history, rows = [], []
    for step in range(num_steps):
        given, sampled = ([rng.randrange(256) for _ in range(n)] for n in (7, 4))
        rows.append(Sample(0, step, (turn(history + given, sampled),), Verdict("ok", 1.0)))
        history += given + sampled
    return weighted(pack(rows))


def separate(batch: Batch) -> PrefixTree:
    """Every sample by itself."""
    alone = torch.full((batch.num_samples,), -1)
    return PrefixTree(batch.token_ids, batch.position_ids, batch.starts, alone, torch.arange(batch.num_tokens))


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """Its norms and routers in the model's own dtype: transformers' go through float32, also in a float64 model."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        elif type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            has_groups = hasattr(module, "e_score_correction_bias")
            module.forward = partial(_route_by_groups if has_groups else _route, module)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    return model


def _norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """With the weight of the moment: a sharded module's is another in each forward."""
    return torch.nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _route(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(x.flatten(0, -2), module.weight)
    weights, chosen = torch.softmax(logits, -1).topk(module.top_k)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


def _route_by_groups(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's: first the groups of experts whose best two are best, then the best experts of these."""
    logits = torch.nn.functional.linear(x.flatten(0, -2), module.weight)
    scores = logits.sigmoid()
    groups = (scores + module.e_score_correction_bias).unflatten(1, (module.num_group, -1))
    best = groups.topk(2)[0].sum(-1).topk(module.topk_group)[1]
    allowed = torch.zeros_like(groups).scatter(1, best[..., None].expand(-1, -1, groups.shape[2]), 1.0)
    chosen = groups.masked_fill(allowed == 0, -torch.inf).flatten(1).topk(module.top_k)[1]
    weights = scores.gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) * module.routed_scaling_factor, chosen


def gradients(path, dtype, batch: Batch, layout, loss, budget: int = 10**6) -> tuple[float, dict]:
    model = exact(build_model(path, dtype, "cpu"))
    total = 0.0
    for segments in plan(batch, budget):
        micro = batch.select(segments)
        tree = layout(micro)
        packing = Packing.of(tree.starts, tree.parents)
        hidden = model(input_ids=tree.token_ids[None], position_ids=tree.position_ids[None], packing=packing)
        targets = micro.loss_mask.nonzero().squeeze(-1)
        logits = torch.log_softmax(hidden.logits[0][tree.gather_index[targets - 1]], -1)
        logprobs = logits.gather(-1, micro.token_ids[targets, None])[:, 0]
        per_token, _ = loss(logprobs, -(logits.exp() * logits).sum(-1), micro)
        value = (per_token * micro.weights[micro.loss_mask]).sum()
        value.backward()
        total += value.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def assert_equal(ours, theirs, limit: float) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=limit)
    for name, grad in theirs[1].items():
        assert grad.norm() > 0, name
        assert (ours[1][name] - grad).norm() / grad.norm() < limit, name


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_shared_prompts_give_the_same_gradients_for_every_loss(name, dtype, tmp_path) -> None:
    path, batch, loss = tiny("llama", tmp_path), groups(), bind_loss(AlgorithmConfig(loss=name))
    alone = gradients(path, dtype, batch, separate, loss)
    assert_equal(gradients(path, dtype, batch, share_prefixes, loss), alone, LIMITS[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [60, 150])
def test_groups_split_over_micro_batches(kind, budget, tmp_path) -> None:
    path, batch, loss = tiny(kind, tmp_path), groups(1), bind_loss(AlgorithmConfig())
    assert any(len({int(batch.keys[s, 0]) for s in one}) < len(one) for one in plan(batch, budget)), "nothing shared"
    alone = gradients(path, torch.float64, batch, separate, loss)
    assert_equal(gradients(path, torch.float64, batch, share_prefixes, loss, budget), alone, 1e-12)


def test_a_prompt_is_computed_once() -> None:
    batch = groups()
    tree = share_prefixes(batch)
    assert batch.num_tokens - len(tree.token_ids) == 3 * 20 + 90 + 20
    assert torch.equal(tree.token_ids[tree.gather_index], batch.token_ids)
    assert torch.equal(tree.position_ids[tree.gather_index], batch.position_ids)
    shared = [int(p) for p in tree.parents if p >= 0]
    assert sorted(shared.count(parent) for parent in set(shared)) == [2, 2, 4], "tickets do not share with each other"


def test_other_prompts_under_one_ticket_share_no_more_than_their_beginning() -> None:
    rng = random.Random(0)
    batch = pack([sample(0, 0, [1, 2, 3], [4], rng), sample(0, 1, [1, 2, 4], [4], rng), sample(0, 2, [2], [1], rng)])
    tree = share_prefixes(batch)
    assert tree.parents.tolist() == [-1, 0, 0, -1] and tree.starts.tolist() == [0, 2, 7, 12, 14]


def test_nothing_to_share() -> None:
    rng = random.Random(0)
    one = pack([sample(0, 0, [1, 2, 3], [4], rng)])
    assert torch.equal(share_prefixes(one).token_ids, one.token_ids)


def test_equal_answers_are_computed_each_by_itself() -> None:
    """A group's layout does not depend on what was sampled."""
    rows = [Sample(0, i, (turn([1, 2], [5, 6, 7][:n]),), Verdict("ok", 1.0)) for i, n in enumerate((3, 3, 2))]
    tree = share_prefixes(pack(rows))
    assert tree.parents.tolist() == [-1, 0, 0, 0] and tree.starts.diff().tolist() == [2, 3, 3, 2]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("made", [trajectories(3, 5), trajectories(3, 3), steps(4)], ids=["parted", "equal", "steps"])
def test_a_tree_has_the_gradients_of_separate_rows_and_of_one_row_at_a_time(made, dtype, tmp_path) -> None:
    path, loss = tiny("qwen2", tmp_path), bind_loss(AlgorithmConfig())
    alone = gradients(path, dtype, made, separate, loss, budget=1)
    assert_equal(gradients(path, dtype, made, separate, loss), alone, LIMITS[dtype])
    assert_equal(gradients(path, dtype, made, share_prefixes, loss), alone, LIMITS[dtype])


def test_the_history_of_trajectories_is_computed_once() -> None:
    batch = trajectories(3, 5)
    tree = share_prefixes(batch)
    assert batch.num_tokens - len(tree.token_ids) == 3 * (9 + 6)
    assert tree.parents.tolist() == [-1, 0, 0]
    assert torch.equal(tree.token_ids[tree.gather_index], batch.token_ids)


@pytest.mark.parametrize("num_steps", [2, 20])
def test_the_steps_of_a_trajectory_cost_the_tokens_of_one(num_steps: int) -> None:
    batch = steps(num_steps)
    tree = share_prefixes(batch)
    assert batch.num_tokens == 11 * num_steps * (num_steps + 1) // 2
    assert len(tree.token_ids) == 11 * num_steps and tree.parents.tolist() == [-1]
    assert torch.equal(tree.token_ids[tree.gather_index], batch.token_ids)
    assert plan(batch, 11 * num_steps) == [list(range(num_steps))], "in the budget, too, each token counts once"
    assert len(plan(batch, 11 * num_steps - 1)) == 2


@st.composite
def forests(draw) -> Batch:
    """Rows that go on from the end, or from a turn, of earlier rows of their ticket; few tokens, many coincidences."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    rows: list[Sample] = []
    for number in range(draw(st.integers(1, 7))):
        ticket, turns = draw(st.integers(0, 1)), []
        earlier = [row for row in rows if row.ticket == ticket]
        if earlier and draw(st.booleans()):
            turns = list(draw(st.sampled_from(earlier)).turns)
            turns = turns[: draw(st.integers(0, len(turns)))]
        if turns and draw(st.booleans()):  # what came before is now a prompt
            turns = [turn([t for old in turns for t in (*old.prompt_ids, *old.token_ids)] + draw(ids), draw(ids))]
        turns += [turn(draw(ids), draw(ids)) for _ in range(draw(st.integers(0 if turns else 1, 2)))]
        rows.append(Sample(ticket, number, tuple(turns), Verdict("ok", 1.0)))
    return weighted(pack(draw(st.permutations(rows))))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and transformers' own, in float64."""
    path = tiny("qwen2", tmp_path_factory.mktemp("tree"))
    ours, plain = (build_model(path, torch.float64, "cpu", **how) for how in ({}, {"attention": "sdpa"}))
    return exact(ours), exact(plain)


@settings(deadline=None, max_examples=60)
@given(batch=forests())
def test_any_tree_has_the_logits_and_gradients_of_plain_rows(models, batch: Batch) -> None:
    ours, plain = models
    for model in models:
        model.zero_grad()
    tree = share_prefixes(batch)
    packing = Packing.of(tree.starts, tree.parents)
    out = ours(input_ids=tree.token_ids[None], position_ids=tree.position_ids[None], packing=packing).logits[0]
    rows = batch.token_ids.split(batch.starts.diff().tolist())
    wanted = torch.cat([plain(input_ids=row[None]).logits[0] for row in rows])
    torch.testing.assert_close(out[tree.gather_index], wanted, rtol=0, atol=1e-12)
    direction = batch.old_logprobs.double()[:, None] * torch.arange(wanted.shape[1]).sin()
    (out[tree.gather_index] * direction).sum().backward()
    (wanted * direction).sum().backward()
    got, want = (torch.cat([p.grad.flatten() for p in model.parameters()]) for model in models)
    assert (got - want).norm() <= 1e-12 * want.norm()


@settings(deadline=None)
@given(batch=forests(), budget=st.integers(5, 40))
def test_the_budget_counts_the_tokens_that_are_computed(batch: Batch, budget: int) -> None:
    bins = plan(batch, budget)
    assert sorted(s for one in bins for s in one) == list(range(batch.num_samples))
    for one in bins:
        assert len(one) == 1 or len(share_prefixes(batch.select(one)).token_ids) <= budget
