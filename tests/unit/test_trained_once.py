"""Step-wise credit trains each token of a trajectory once: as one sample, or as segments that share their history.

From the samples to the gradient of a real model, against rows that are trained one by one, as where each step of an
agent is a sample of its own (ROLL's step mode, verl-agent).
"""

from random import Random

import pytest
import torch

from spmd_rl.algo.moments import Moments
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.learn import token_advantages
from spmd_rl.learn.losses import bind_loss
from spmd_rl.train.microbatch import plan
from spmd_rl.train.sharing import share_prefixes
from spmd_rl.types import Group
from tests import plans
from tests.agents import Step, collected, group, trajectory
from tests.models import tiny
from tests.unit.test_sharing import assert_equal, gradients, separate

TURNS = 10
GIGPO = AlgorithmConfig(advantage="gigpo", loss_agg="seq-mean-token-mean")


def games(cut: bool) -> list[Group]:
    """Two groups of three trajectories of ten turns; `cut`: each turn is a segment, with all before as its prompt."""
    draw, made = Random(0), []
    for ticket in range(2):
        prompt, some = [draw.randrange(256) for _ in range(12)], []
        for answer in range(3):
            steps = [Step(draw.randrange(3) / 2, draw.randrange(4), 4 + n % 3, 5) for n in range(TURNS)]
            some.append(trajectory(ticket, answer, steps, range(1, TURNS) if cut else (), prompt=prompt))
        made.append(group(ticket, some))
    return made


def batch_of(groups: list[Group], settings: AlgorithmConfig = GIGPO) -> Batch:
    """As the learner makes it, with old logprobs that differ from the model's."""
    c = collected(groups)
    sizes = {"num_updates": 1, "num_shards": 1, "hidden_size": 64, "max_tokens": 1024}
    made, _ = plans.plan(c, settings, Moments(), **sizes)
    with solo() as world:
        data = Layout(world).data
        (batch,) = plans.redistribute(c, made, 1, data, world)
        token_advantages.finish([batch], made, settings, 0.0, data, seed=0)
    batch.old_logprobs = batch.rollout_logprobs
    return batch


def num_computed(batch: Batch, layout, budget: int) -> int:
    """The tokens that a forward pass over all micro-batches computes."""
    return sum(len(layout(batch.select(samples)).token_ids) for samples in plan(batch, budget))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_ten_turns_cost_a_third_of_rows_trained_one_by_one_and_have_their_gradients(kind: str, tmp_path) -> None:
    path, loss = tiny(kind, tmp_path), bind_loss(GIGPO)
    whole, cut = batch_of(games(cut=False)), batch_of(games(cut=True))
    assert (whole.num_samples, cut.num_samples) == (6, 6 * TURNS)
    assert torch.equal(whole.loss_mask.sum(), cut.loss_mask.sum())
    rows = num_computed(cut, separate, 1)
    once = [num_computed(whole, share_prefixes, 10**6), num_computed(cut, share_prefixes, 10**6)]
    assert once[0] == once[1] and 3 * once[0] <= rows, "and the answers of a group share their prompt"
    assert rows / once[0] == pytest.approx(6.26, abs=0.01)
    wanted = gradients(path, torch.float32, cut, separate, loss, budget=1)
    assert_equal(gradients(path, torch.float32, cut, share_prefixes, loss), wanted, 1e-5)
    assert_equal(gradients(path, torch.float32, whole, share_prefixes, loss), wanted, 1e-5)


def test_a_trajectory_that_is_cut_now_and_then_is_trained_once_too(tmp_path) -> None:
    """Segments of several turns, in micro-batches that hold a trajectory or two."""
    draw, made = Random(1), []
    for ticket in range(2):
        steps = [[Step(draw.randrange(3), draw.randrange(4), 3, 4) for _ in range(6)] for _ in range(2)]
        made.append((ticket, steps))
    whole, cut = (
        batch_of([group(t, [trajectory(t, a, s, cuts) for a, s in enumerate(some)]) for t, some in made])
        for cuts in ((), (2, 3))
    )
    path, loss = tiny("qwen3", tmp_path), bind_loss(GIGPO)
    assert num_computed(whole, share_prefixes, 60) == num_computed(cut, share_prefixes, 60)
    assert len(plan(cut, 60)) == len(plan(whole, 60)) == 4
    wanted = gradients(path, torch.float64, whole, separate, loss)
    assert_equal(gradients(path, torch.float64, cut, share_prefixes, loss, 60), wanted, 1e-6)
