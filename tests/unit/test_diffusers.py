"""Pipelines of diffusers: the real widths of SD3 and Wan 2.2 in fake tensors; two experts by noise level; exports."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers

from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint.flow_export import FlowExport
from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.load import CONFIGS, load
from spmd_rl.data import Prompts
from spmd_rl.learn.feedback import Feedback
from spmd_rl.model.diffusion import build_flow_model
from spmd_rl.rollout.pictures import PictureRollouts
from spmd_rl.sidecar.local import LocalScorer
from spmd_rl.tools.plan.pictures import trace
from spmd_rl.tools.plan.table import GENERATE
from spmd_rl.train import build_denoisers
from spmd_rl.train.denoising import denoiser_source
from tests.dist.harness import run_ranks
from tests.pictures import LOSSES, settings

SD3 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 2, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 192,
}  # fmt: skip


RECIPES = {"sd3": "reward_fl_sd3_8gpu", "wan": "reward_fl_wan22_64gpu"}
SHAPES = {"sd3": (16, 64, 64), "wan": (16, 9, 60, 104)}


def recipe(kind: str, folder: Path, *more: str) -> RewardFlConfig:
    """A recipe for a model of its widths with one layer in each part."""
    cfg = load("reward_fl", RewardFlConfig, [f"+experiment={RECIPES[kind]}", "pictures.steps=3", *more])
    shutil.copytree(CONFIGS / "shapes" / cfg.plan.shape, folder)
    for path in folder.glob("*/config.json"):
        one = dict.fromkeys(("num_layers", "num_hidden_layers"), 1) | {"dual_attention_layers": [0]}
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {key: value for key, value in one.items() if key in config}))
    cfg.policy.model = str(folder)
    return cfg


@pytest.mark.slow
def test_a_whole_step_at_the_widths_of_stable_diffusion(tmp_path: Path) -> None:
    found = trace(recipe("sd3", tmp_path / "model"), 3, 8)
    _, prepare, update = (found.phases[phase][0] for phase in (GENERATE, "prepare", "update"))
    assert found.microbatches == 18 and prepare.travelled and update.travelled["reduce-scatter"]
    gradients = update.peak.by_tag["policy gradients"]
    assert found.held["policy optimizer"] == pytest.approx(2 * gradients, rel=0.01)
    # Of 18 micro-batches: 4 latents, the reference's velocities at 2, and conditions of two prompts for each picture.
    pictures = 18 * 8 * (6 * math.prod(SHAPES["sd3"]) * 4 + 2 * ((77 + 256) * 4096 + 2048) * 2)
    assert update.peak.by_tag["pictures"] == pytest.approx(pictures, rel=0.01)


@pytest.mark.slow
def test_a_whole_step_at_the_widths_of_wan_trains_the_expert_of_its_noise_level(tmp_path: Path) -> None:
    whole, one = (
        trace(recipe("wan", tmp_path / str(frames), "feedback.from_step=1", f"feedback.reward.frames={frames}"), 0, 64)
        for frames in (33, 1)
    )
    update = one.phases["update"][0]
    # The level of ReFL's step is the second expert's, whose adapters alone have a gradient: half of the moments, twice.
    gradients = 7 * one.held["policy optimizer"] / 4
    assert update.travelled["reduce-scatter"] == pytest.approx(gradients, rel=0.05)
    assert update.peak.by_tag["decoder"] > 2e8 and whole.phases["update"][0].peak.total > 2 * update.peak.total


def test_other_pipelines_and_sizes_are_refused_by_name(tmp_path: Path) -> None:
    folder = Path(recipe("sd3", tmp_path / "model").policy.model)
    with pytest.raises(UserError, match="500 is no multiple of 16"):
        build_flow_model(folder, (500, None, None))
    with pytest.raises(UserError, match="pictures.frames"):
        build_flow_model(folder, (None, None, 5))
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(UserError, match="vae/config.json cannot be read"):
        build_flow_model(folder)
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(UserError, match="FluxPipeline; supported are StableDiffusion3Pipeline, WanPipeline"):
        build_flow_model(folder)


NO_TEXTS = dict.fromkeys(f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3"))
"""Components that the test's pipeline has not: its conditions are given."""


def tiny_sd3(folder: Path) -> Path:
    """A whole pipeline with random weights, without text encoders."""
    torch.manual_seed(0)
    small = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "caption_projection_dim": 32}
    texts = {"joint_attention_dim": 16, "pooled_projection_dim": 24, "sample_size": 8, "pos_embed_max_size": 8}
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=16, norm_num_groups=4, shift_factor=0.1,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    transformer = diffusers.SD3Transformer2DModel(**{**SD3, **small, **texts})
    diffusers.StableDiffusion3Pipeline(transformer, scheduler, vae, **NO_TEXTS).save_pretrained(folder)
    return folder


def export_after_an_update(world, model: str, out: str, more: list[str]) -> None:
    """Train one step, export, and draw; write the noise, the conditions, the latents and the pictures."""
    cfg = settings(model, *more)
    flow = build_flow_model(Path(model))
    texts = {"prompt": torch.randn(3, 7, 16), "pooled": torch.randn(3, 24)}
    flow.encoding = lambda device, dtype: nullcontext()
    flow.encode = lambda prompts, device, dtype: {name: tensor[: len(prompts)] for name, tensor in texts.items()}
    roles = build_denoisers(cfg.denoisers, world, denoiser_source(flow))
    rollouts = PictureRollouts(cfg, Prompts.load(cfg.data), flow, roles.policy, world, LocalScorer(cfg.reward))
    learner = Feedback(cfg, rollouts, roles, world)
    for step in (1, 2):
        learner.update(learner.prepare(rollouts.collect(step)))
    FlowExport(roles.policy, flow, world, cfg.policy.lora.rank > 0)(Path(out) / "hf")
    one = rollouts.held_out(0).drawn[0]
    torch.save({**texts, "noise": one.latents[0], "latents": one.latents[-1], "images": one.images}, f"{out}/drawn.pt")


@pytest.mark.parametrize("loss", [pytest.param("nft", marks=pytest.mark.slow), "lora"])
def test_a_pipeline_of_diffusers_loads_the_export_and_draws_the_same(loss: str, tmp_path: Path) -> None:
    model, out = tiny_sd3(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    more = [*LOSSES[loss], "pictures.guidance=1", "policy.lr=1e-2"]
    run_ranks(1, export_after_an_update, str(model), str(out), more)
    drawn = torch.load(out / "drawn.pt")
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(out / "hf" / "transformer")
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(model, transformer=transformer, **NO_TEXTS)
    old = diffusers.StableDiffusion3Pipeline.from_pretrained(model, **NO_TEXTS)
    count = len(drawn["noise"])
    asked = {
        "prompt_embeds": drawn["prompt"][:count], "pooled_prompt_embeds": drawn["pooled"][:count],
        "sigmas": [1, 0.75, 0.5, 0.25], "num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16,
    }  # fmt: skip
    latents = pipe(**asked, latents=drawn["noise"], output_type="latent").images
    torch.testing.assert_close(latents, drawn["latents"], atol=1e-5, rtol=1e-5)
    images = pipe(**asked, latents=drawn["noise"], output_type="pt").images
    torch.testing.assert_close(images, drawn["images"], atol=1e-4, rtol=0)
    before = old(**asked, latents=drawn["noise"], output_type="latent").images
    assert (before - drawn["latents"]).abs().max() > 1e-3, "the export holds what was learned"
    if loss == "lora":
        old.load_lora_weights(out / "hf" / "lora" / "transformer")
        adapted = old(**asked, latents=drawn["noise"], output_type="latent").images
        torch.testing.assert_close(adapted, drawn["latents"], atol=1e-5, rtol=1e-5)
