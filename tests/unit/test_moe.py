"""The products of experts' groups, and what a router's probabilities are."""

import torch
import torch.nn.functional as F

from spmd_rl.model.build import build_model
from spmd_rl.model.moe import grouped_linear, num_experts, probabilities, router_class, stacked_experts
from tests.models import EXPERTS, tiny


def test_groups_of_rows_meet_their_own_matrix_and_empty_ones_get_a_gradient_of_zero() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for counts in ([3, 0, 2], [0, 0, 5], [0, 0, 0]):
            rows = torch.randn(sum(counts), 8, dtype=dtype, requires_grad=True)
            weights = torch.randn(3, 6, 8, dtype=dtype, requires_grad=True)
            owner = torch.arange(3).repeat_interleave(torch.tensor(counts))
            wanted = torch.einsum("ni,noi->no", rows.double(), weights.double()[owner])
            got = grouped_linear(rows, weights, counts)
            assert got.shape == (sum(counts), 6) and got.dtype == dtype
            torch.testing.assert_close(got, wanted.to(dtype), rtol=2e-2, atol=2e-2)
            found = torch.autograd.grad(got.square().sum(), [rows, weights])
            expected = torch.autograd.grad(wanted.square().sum(), [rows, weights])
            torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
            assert all(bool(grad.any()) == bool(count) for grad, count in zip(found[1], counts, strict=True))


def test_where_a_model_has_experts(tmp_path) -> None:
    for kind in (*EXPERTS, "llama"):
        model = build_model(tiny(kind, tmp_path / kind, **EXPERTS.get(kind, {})), torch.float32, "cpu")
        count = 0 if kind == "llama" else 4
        assert num_experts(model.config) == count
        layers = {"llama": 0, "deepseek_v3": 1}.get(kind, 2)
        assert len(stacked_experts(model)) == layers
        router = router_class(model)
        assert (router is not None) == bool(count)
        assert sum(isinstance(module, router) for module in model.modules() if router) == layers


def test_probabilities_are_a_softmax_or_normalised_scores() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    router = torch.nn.Module()
    torch.testing.assert_close(probabilities(router, logits.bfloat16()), F.softmax(logits.bfloat16().float(), -1))
    router.e_score_correction_bias = torch.zeros(4)
    scores = logits.sigmoid()
    torch.testing.assert_close(probabilities(router, logits), scores / scores.sum(-1, keepdim=True))
