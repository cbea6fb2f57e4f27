"""Diffusion models: the trained transformer as one module to shard, and the frozen parts around it.

`open_model` reads a directory. diffusers is imported here alone, and only for its pipelines.
"""

import json
from pathlib import Path

from spmd_rl.base.errors import UserError
from spmd_rl.model.diffusion.base import Denoiser, FlowModel, Given
from spmd_rl.model.diffusion.tiny import TinyFlowModel

__all__ = ["Denoiser", "FlowModel", "Given", "build_flow_model"]


def build_flow_model(folder: Path, sizes: tuple[int | None, ...] = (None, None, None)) -> FlowModel:
    """Return the model of a directory. sizes: height, width and frames, each None for the model's own.

    UserError, naming the setting, unless it is the embedded tiny model or a supported pipeline of diffusers.
    """
    if (folder / "model_index.json").is_file():
        try:
            from spmd_rl.model.diffusion.pipelines import open_pipeline
        except ModuleNotFoundError as error:
            raise UserError(
                f"policy.model: {folder} is a pipeline of diffusers, and {error.name} is not installed here; "
                "pip install 'spmd-rl[diffusion]'"
            ) from error
        return open_pipeline(folder, sizes)
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if config.get("model_type") != TinyFlowModel.kind:
        raise UserError(f"policy.model: {folder} is no diffusion model: it has no model_index.json of diffusers")
    if any(size is not None for size in sizes):
        raise UserError(f"pictures.height: the model {folder} has one size; leave height, width and frames out")
    return TinyFlowModel(folder, config)
