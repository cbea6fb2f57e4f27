"""Pictures in training against plain Hugging Face, sample by sample: logprobs, gradients, updates, resume.

Samples of a group share their pictures, several pictures are in a sample, and packed samples see different ones.
"""

from functools import cache

import pytest
import torch
from transformers import AutoModelForImageTextToText

from spmd_rl.distributed import World
from spmd_rl.model import pictures
from spmd_rl.model.stored import stored_parts
from spmd_rl.model.tokenizer import load_tokenizer
from tests.dist.harness import run_ranks
from tests.toy_vlm import VLM_KINDS, toy_vlm
from tests.training import TEMPERATURE, built, loss
from tests.vlm_training import batch_with_pictures, plain_backward, plain_forward

HUGE, SCALE, SMALL = 1e12, 1e5, 1e-4
AS_GRADIENT = {"max_grad_norm": HUGE, "eps": HUGE, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
"""With an epsilon far above any gradient AdamW's first step is lr / eps times the gradient."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    # A picture changes the logprobs by more than rounding, and also after the layers that deep features are added to.
    strong = {"tower": {"initializer_range": 0.2}, "num_hidden_layers": 3}
    return {kind: str(toy_vlm(kind, folder / kind, **strong)) for kind in VLM_KINDS}


@cache
def plain_model(path: str) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def share(role, batch):
    data = role.layout.data
    return batch.select(list(range(data.rank, batch.num_samples, data.size)))


def errors(world: World, path: str, budget: int, frozen: bool, checkpointing: str, fault: bool) -> dict[str, float]:
    """Largest error of a logprob, and relative errors of loss and gradients, of which frozen weights have none."""
    if fault:
        pictures.picture_ids = lambda data, count, of=pictures.picture_ids: of(b"", count)
    tokenizer = load_tokenizer(path)
    own = {**AS_GRADIENT, "lr": SCALE * HUGE, "freeze_vision_tower": frozen}
    role = built("fsdp2", world, path, budget=budget, checkpointing=checkpointing, **own)
    batch = batch_with_pictures(tokenizer)
    mine, model = share(role, batch), plain_model(path)
    logprobs = torch.stack(role.logprobs(mine, TEMPERATURE))
    with torch.no_grad():
        wanted = torch.stack(plain_forward(model, mine, tokenizer)) * mine.loss_mask
    found = {"logprobs": float((logprobs - wanted).abs().max())}
    before = {name: tensor.clone() for name, tensor in role.weights()}
    metrics = role.update(mine, loss, TEMPERATURE)
    total = plain_backward(model, batch, tokenizer)
    found["loss"] = abs(metrics["loss"] / total - 1)
    after = {name: (before[name] - tensor) / SCALE for name, tensor in role.weights()}
    parts, whole = stored_parts(model), torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for name, p in model.named_parameters():
        (part,) = parts[name]
        assert torch.equal(before[part.name], p)
        kept = frozen and not name.startswith(("model.language_model.", "model.text_model.", "lm_head."))
        # Some gradients are 0 but for rounding, as of the bias of keys.
        scale = max(p.grad.norm(), SMALL * whole)
        found[name] = float(after[part.name].norm() if kept else (after[part.name] - p.grad).norm() / scale)
    assert after.keys() == {part.name for of in parts.values() for part in of}
    return found


CASES = [(1, 10_000, False, "none"), (2, 10_000, False, "full"), (2, 1, True, "none"), (3, 150, False, "selective")]
"""Ranks, token budget, frozen tower, activation checkpointing"""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", VLM_KINDS)
def test_pictures_in_training_follow_plain_transformers(kind: str, case, models) -> None:
    size, *settings = case
    for found in run_ranks(size, errors, models[kind], *settings, False, timeout=280):
        assert not (wrong := {name: error for name, error in found.items() if not error < 1e-5}), wrong


def test_ids_that_do_not_know_the_picture_are_noticed(models) -> None:
    # Answers of one ticket, with different pictures under one text, would share one picture's prompt.
    (found,) = run_ranks(1, errors, models["qwen2_5_vl"], 10_000, True, "none", True)
    assert found["logprobs"] > 1e-3
