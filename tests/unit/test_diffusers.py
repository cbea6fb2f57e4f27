"""Pipelines of diffusers: the real widths of SD3 and Wan 2.2 in fake tensors; two experts by noise level."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("diffusers")

from spmd_rl.base.errors import UserError
from spmd_rl.model.diffusion import build_flow_model

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
