"""The token loss put together: surrogate, correction, KL, entropy and supervised terms, each by hand."""

import pytest
import torch

from spmd_rl.algo import POLICY_LOSSES
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.config.sections.algorithm import CorrectionConfig
from spmd_rl.learn.losses import bind_loss
from spmd_rl.types import Sample
from tests.unit.test_prepare import sample


def batch_of(*lengths: int) -> Batch:
    """Samples of so many tokens, with advantages 1, -1, 1, ... and old logprobs of -0.5."""
    batch = pack([sample(0, answer, n, 1.0) for answer, n in enumerate(lengths)])
    signs = torch.tensor([(-1.0) ** answer for answer in range(len(lengths))])
    batch.advantages = signs.repeat_interleave(batch.starts.diff()) * batch.loss_mask
    batch.old_logprobs = -0.5 * batch.loss_mask
    return batch


def losses(batch: Batch, logprobs: list[float], entropy: float = 0.0, **settings):
    """Loss per token, its gradient by the logprobs, and the quantities."""
    leaf = torch.tensor(logprobs, requires_grad=True)
    loss, quantities = bind_loss(AlgorithmConfig(**settings))(leaf, torch.full_like(leaf, entropy), batch)
    loss.sum().backward()
    return loss.tolist(), leaf.grad.tolist(), {name: q.tolist() for name, q in quantities.items()}


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        ("token", [2.0, 0.0, 0.5**0.5, 2.0]),  # exp of 1, -2, -0.35, 1 against bounds 0.2 and 2
        ("sequence", [0.0, 0.0, 0.0, 2.0]),  # exp(-1.35) = 0.26 below the mask
        ("geometric", [0.638] * 3 + [2.0]),
        ("segment", [0.638] * 3 + [2.0]),
    ],
)
def test_correction_multiplies_the_surrogate(level: str, wanted: list[float]) -> None:
    batch = batch_of(3, 1)
    rollout = torch.tensor([-1.5, 1.5, -0.5 + 0.3466, -1.5])
    batch.rollout_logprobs = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, rollout)
    band = CorrectionConfig(level=level, upper=2.0, mask_low=0.3)
    plain, _, off = losses(batch, [-0.5] * 4, loss="vanilla_pg")
    loss, gradient, quantities = losses(batch, [-0.5] * 4, loss="vanilla_pg", correction=band)
    assert [a / b for a, b in zip(loss, plain, strict=True)] == pytest.approx(wanted, abs=1e-3)
    assert gradient == pytest.approx([-w * s for w, s in zip(wanted, [1, 1, 1, -1], strict=True)], abs=1e-3)
    assert quantities["train_infer/masked"] == [float(w == 0) for w in wanted]
    assert "train_infer/ratio/mean" in quantities and "train_infer/masked" not in off
    assert quantities["train_infer/abs_diff/mean"] == pytest.approx([1.0, 2.0, 0.3466, 1.0])


def test_correction_leaves_the_other_terms_alone() -> None:
    batch = batch_of(2)
    batch.rollout_logprobs = 9.0 * batch.loss_mask
    batch.ref_logprobs = -1.0 * batch.loss_mask
    masked = CorrectionConfig(level="token", mask_low=0.5)
    loss, gradient, _ = losses(batch, [-0.5, -0.7], correction=masked, kl_coef=0.1, kl_estimator="k1")
    assert loss == pytest.approx([0.1 * 0.5, 0.1 * 0.3])
    assert gradient == pytest.approx([0.1, 0.1])


def test_entropy_and_supervised_terms() -> None:
    batch = batch_of(1, 1)
    plain, _, quantities = losses(batch, [-0.5, -0.5])
    batch.right = torch.zeros(batch.num_tokens).index_copy(0, batch.sampled.index, torch.tensor([1.0, 0.0]))
    loss, _, more = losses(batch, [-0.5, -0.5], entropy=2.0, entropy_coef=0.25, sft_coef=0.1)
    assert [a - b for a, b in zip(loss, plain, strict=True)] == pytest.approx([-0.5 + 0.05, -0.5])
    assert more["actor/entropy"] == [2.0, 2.0] and "actor/sft_loss" not in quantities


def test_the_coefficient_in_force_wins() -> None:
    batch = batch_of(1)
    batch.ref_logprobs = -1.0 * batch.loss_mask
    settings = AlgorithmConfig(kl_coef=0.5, kl_estimator="k1", loss="vanilla_pg")
    leaf = torch.tensor([-0.5])
    loss, quantities = bind_loss(settings, kl_coef=2.0)(leaf, torch.zeros(1), batch)
    assert loss.tolist() == pytest.approx([0.5 + 2.0 * 0.5])
    assert quantities["critic/kl"].tolist() == pytest.approx([0.5])


def test_runs_count_turns_and_samples_without_gaps() -> None:
    two_turns = Sample(0, 0, sample(0, 0, 2, 1.0).turns + sample(0, 0, 1, 1.0).turns, sample(0, 0, 1, 1.0).verdict)
    empty = Sample(0, 1, (sample(0, 1, 0, 1.0).turns), two_turns.verdict)
    batch = pack([two_turns, empty, sample(0, 2, 2, 1.0)])
    assert batch.sampled.samples.tolist() == [0, 0, 0, 1, 1]
    assert batch.sampled.spans.tolist() == [0, 0, 1, 2, 2]
    assert torch.equal(batch.sampled.index, batch.loss_mask.nonzero()[:, 0])
    assert pack([]).sampled.samples.tolist() == pack([]).sampled.spans.tolist() == []


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_every_loss_is_finite_on_an_empty_micro_batch(name: str) -> None:
    batch = batch_of(1)
    batch.marked = torch.zeros_like(batch.loss_mask)
    loss, gradient, _ = losses(batch, [-0.5], loss=name)
    assert all(abs(x) < 10 for x in loss + gradient)
