"""Muon over shards against torch's own on whole matrices, with AdamW for the rest; its state."""

from pathlib import Path

import pytest
import torch

from spmd_rl.distributed import World
from spmd_rl.model.build import build_model
from tests.dist.harness import run_ranks
from tests.dist.test_train_parity import MODELS, as_stored
from tests.dist.test_train_state import digest, restore, save
from tests.models import tiny
from tests.training import SETTINGS, TEMPERATURE, backend, global_batch, loss, plain_backward, relative, share_of
from tests.unit.test_sharing import exact

MUON = {"optimizer": "muon", "eps": 1e-3}
RATES = (0.5e-2, 1e-2, 1e-2)
OUTSIDE = ("embed_tokens", "lm_head")


def plain_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The matrices of the layers as a checkpoint stores them, experts one by one: views, with views of gradients."""
    weights = as_stored(model, {name: p.data for name, p in model.named_parameters()})
    grads = as_stored(model, {name: p.grad for name, p in model.named_parameters()})
    found = []
    for name, weight in weights.items():
        if weight.ndim == 2 and not any(word in name for word in OUTSIDE):
            found.append(torch.nn.Parameter(weight))
            found[-1].grad = grads[name]
    return found


def drift(world: World, path: str, axes: dict[str, int], dtype: str) -> list[tuple[float, float]]:
    """Of each weight after three updates, from torch's Muon and AdamW; and how far it has come, as a measure."""
    mine = backend(world, path, dtype=dtype, master=dtype, budget=60, axes=axes, **MUON)
    batch = global_batch()
    model = build_model(path, getattr(torch, dtype), "cpu", attention="sdpa")
    model = exact(model) if dtype == "float64" else model
    at_first = {name: p.detach().clone() for name, p in as_stored(model, dict(model.named_parameters())).items()}
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or any(word in name for word in OUTSIDE)]
    decay = SETTINGS["weight_decay"]
    optimizers = [torch.optim.AdamW(others, lr=1.0, weight_decay=decay, eps=MUON["eps"])]
    for rate in RATES:
        plain_backward(model, batch)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for p in model.parameters():  # torch's own clipping adds 1e-6 to the norm, which is more than rounding
            p.grad *= SETTINGS["max_grad_norm"] / norm
        own = plain_matrices(model)
        muon = torch.optim.Muon(own, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        if optimizers[1:]:
            muon.load_state_dict(optimizers[1].state_dict())
        optimizers[1:] = [muon]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        model.zero_grad()
        mine.update(share_of(mine, "dealt", batch), loss, TEMPERATURE)
    wanted = as_stored(model, dict(model.named_parameters()))
    return [
        (relative(tensor, wanted[name]), relative(wanted[name], at_first[name]))
        for name, tensor in mine.weights()
        if name in wanted
    ]


TP2 = {"tp": 2}
LAYOUTS = [(1, {}, "qwen3"), (2, {}, "qwen3"), (2, TP2, "qwen3"), (2, {"pp": 2}, "llama"), (2, {"ep": 2}, "qwen3_moe")]
LARGE = [(4, TP2, "qwen3"), (4, {"ep": 2}, "qwen3_moe"), (3, {}, "deepseek_v3")]
MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in LARGE]


@pytest.mark.parametrize(("size", "axes", "name"), [*LAYOUTS, *MORE], ids=str)
def test_muon_is_torchs_in_every_layout(size, axes, name, tmp_path) -> None:
    kind, sizes = MODELS[name]
    path = tiny(kind, tmp_path, **sizes)
    for found in run_ranks(size, drift, str(path), axes, "float64", timeout=200):
        assert max(error for error, _ in found) < 1e-10, found
        assert min(moved for _, moved in found) > 1e-3


def test_in_float32_it_is_torchs_to_the_rounding_of_bfloat16(tmp_path) -> None:
    """Gradients are orthogonalised in bfloat16, to which they round one way or the other."""
    path = tiny("qwen3", tmp_path)
    for found in run_ranks(2, drift, str(path), {}, "float32"):
        assert all(error < 0.03 * moved for error, moved in found), found


def straight(world: World, path: str, folder: str, axes: dict[str, int]) -> list[str]:
    """Two updates, a checkpoint, and two more: what the state is at both times."""
    mine = backend(world, path, axes=axes, **MUON)
    found = []
    for seeds in ((0, 1), (2, 3)):
        for seed in seeds:
            mine.update(share_of(mine, "dealt", global_batch(seed)), loss, TEMPERATURE)
        found.append(digest(mine))
        if seeds == (0, 1):
            save(world, mine, folder)
    return found


def continued(world: World, other: str, folder: str, axes: dict[str, int]) -> list[str]:
    mine = backend(world, other, axes=axes, **MUON)
    restore(mine, folder, {"updates": 2, "skipped_in_a_row": 0})
    found = [digest(mine)]
    for seed in (2, 3):
        mine.update(share_of(mine, "dealt", global_batch(seed)), loss, TEMPERATURE)
    return [*found, digest(mine)]


def test_a_resume_is_exact_and_another_layout_reads_the_same_state(tmp_path) -> None:
    path, other = (str(tiny("qwen3", tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    folder = str(tmp_path / "policy")
    wanted = run_ranks(2, straight, path, folder, {})
    assert run_ranks(2, continued, other, folder, {}) == wanted
    assert [then for then, _ in run_ranks(2, continued, other, folder, TP2)] == [then for then, _ in wanted]


def state_names(world: World, path: str, folder: str) -> list[str]:
    """A checkpoint of two pipeline stages, of which each has but a part, loaded by the same."""
    mine = backend(world, path, axes={"pp": 2}, **MUON)
    mine.update(share_of(mine, "dealt", global_batch()), loss, TEMPERATURE)
    save(world, mine, folder)
    mine.load(Path(folder))
    return sorted(mine.model.state_dict()["optimizer"])


def test_matrices_of_layers_have_one_moment_and_all_else_has_two(tmp_path) -> None:
    first, last = run_ranks(2, state_names, str(tiny("llama", tmp_path / "m")), str(tmp_path / "policy"))
    assert "model.layers.0.mlp.up_proj.weight.momentum_buffer" in first
    assert "model.embed_tokens.weight.exp_avg" in first and "lm_head.weight.exp_avg_sq" in last
    assert "model.layers.1.input_layernorm.weight.exp_avg" in last
    both = [name for name in first + last if name != "step"]
    assert all(("_proj" in name) == name.endswith(".momentum_buffer") for name in both), both
