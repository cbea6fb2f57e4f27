"""Pipelines of diffusers: the real widths of SD3 and Wan 2.2 in fake tensors; two experts by noise level; exports."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("diffusers")

import diffusers

from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint.flow_export import FlowExport
from spmd_rl.data import Prompts
from spmd_rl.learn.feedback import Feedback
from spmd_rl.model.diffusion import build_flow_model
from spmd_rl.rollout.pictures import PictureRollouts
from spmd_rl.sidecar.local import LocalScorer
from spmd_rl.train import build_denoisers
from spmd_rl.train.denoising import denoiser_source
from tests.dist.harness import run_ranks
from tests.pictures import LOSSES, settings

SD3 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 2, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 192,
}  # fmt: skip
WAN = {
    "patch_size": [1, 2, 2], "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 1, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
}  # fmt: skip
KINDS = {
    "sd3": (
        "StableDiffusion3Pipeline",
        ["transformer"],
        SD3,
        {"shift": 3.0},
        {"prompt": (77, 4096), "pooled": (2048,)},
    ),
    "wan": ("WanPipeline", ["transformer", "transformer_2"], WAN, {"flow_shift": 5.0}, {"prompt": (512, 4096)}),
}
SIZES = {"sd3": (512, 512, None), "wan": (480, 832, 5)}
SHAPES = {"sd3": (16, 64, 64), "wan": (16, 2, 60, 104)}


def pipeline(folder: Path, kind: str, config: dict | None = None) -> Path:
    """A directory with the configuration files of a pipeline, without weights."""
    name, experts, known, scheduler, _ = KINDS[kind]
    index = {"_class_name": name, "vae": ["diffusers", "x"], "boundary_ratio": 0.875 if kind == "wan" else None}
    blocks = {"block_out_channels": [8, 8, 8, 8]}
    files = {"model_index": index, "vae/config": blocks, "scheduler/scheduler_config": scheduler}
    for path, value in {**files, **{f"{expert}/config": config or known for expert in experts}}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{path}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_the_real_widths_in_fake_tensors(kind: str, tmp_path: Path) -> None:
    flow = build_flow_model(pipeline(tmp_path, kind), SIZES[kind])
    assert flow.latent_shape == SHAPES[kind] and flow.shift > 1
    net, wanted = flow.build(torch.bfloat16), KINDS[kind][4]
    with FakeTensorMode(allow_non_fake_inputs=True):
        net = net.to_empty(device="cpu")
        given = {name: torch.randn(2, *shape, dtype=torch.bfloat16) for name, shape in wanted.items()}
        velocity = net(torch.randn(2, *flow.latent_shape), 0.9, given)
        assert velocity.shape == (2, *flow.latent_shape) and velocity.dtype == torch.float32
        velocity.square().mean().backward()
    trained = [p for name, p in net.named_parameters() if not name.startswith("transformer_2")]
    assert sum(p.grad is not None for p in trained) > 0.9 * len(trained)
    assert all(p.grad is None for name, p in net.named_parameters() if name.startswith("transformer_2"))


def test_other_pipelines_and_sizes_are_refused_by_name(tmp_path: Path) -> None:
    folder = pipeline(tmp_path, "sd3")
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
    flow.encode = lambda prompts, device, dtype: {name: tensor[: len(prompts)] for name, tensor in texts.items()}
    roles = build_denoisers(cfg.denoisers, world, denoiser_source(flow))
    rollouts = PictureRollouts(cfg, Prompts.load(cfg.data), flow, roles.policy, world, LocalScorer(cfg.reward))
    learner = Feedback(cfg, rollouts, roles, world)
    for step in (1, 2):
        learner.update(learner.prepare(rollouts.collect(step)))
    FlowExport(roles.policy, flow, world, cfg.policy.lora.rank > 0)(Path(out) / "hf")
    one = rollouts.held_out(0).drawn[0]
    torch.save({**texts, "noise": one.latents[0], "latents": one.latents[-1], "images": one.images}, f"{out}/drawn.pt")


@pytest.mark.parametrize("loss", ["nft", "lora"])
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
