"""Build a causal LM from a Hugging Face directory: safetensors only, from disk only.

Whole (`build_model`), or without weights (`build_on_meta`), to be sharded and then filled by `load.py`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.config.architectures import sees_pictures
from spmd_rl.model import attention as packed
from spmd_rl.model.hybrid import keep_apart
from spmd_rl.model.stored import Part, stored_parts


def build_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    may_lack: Collection[str] = (),
    attention: str = packed.NAME,
) -> nn.Module:
    """Return the model in `path` in eval mode, in `dtype` on `device`; tied weights stay tied.

    attention: a name that transformers knows, or `spmd_packed`, whose forward needs `packing=`. may_lack: weights that
    need not be stored. UserError if `path` is no such directory, has only pickles, or does not load whole.
    """
    folder = model_directory(path)
    with _users_mistakes(folder):
        model, report = auto_class(folder).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=with_tower_attention(folder, attention),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    if missing := sorted({*report["missing_keys"]} - {*may_lack}):
        raise UserError(f"policy.model: {folder} lacks {len(missing)} weights, among them {missing[0]}")
    model.config.use_cache = False
    return build_parts(model.to(device), folder)


def build_on_meta(path: str | Path, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """Return the model of `path` in eval mode without weights, with packed attention; tied weights are tied.

    Parameters are of `dtype` on the meta device; computed buffers (rotary tables) are ready on the CPU. UserError if
    `path` is no such directory or has only pickles.
    """
    return shape_on_meta(model_directory(path), dtype, trust_remote_code)


def shape_on_meta(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """Return the same from a directory with `config.json` alone. UserError if unreadable."""
    with _users_mistakes(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        with parameters_on_meta():
            model = auto_class(folder).from_config(
                config,
                dtype=dtype,
                attn_implementation=with_tower_attention(folder, packed.NAME),
                trust_remote_code=trust_remote_code,
            )
    keep_float32(model)
    # Training never decodes, and a cache would hold the keys and values of all layers.
    model.config.use_cache = False
    return build_parts(model, folder)


def auto_class(folder: Path) -> Any:
    """Return transformers' class for the model of a directory."""
    return AutoModelForImageTextToText if sees_pictures(folder) else AutoModelForCausalLM


def with_tower_attention(folder: Path, attention: str) -> str | dict[str, str]:
    """Return `attn_implementation`: `attention` for the language model, a plain one for a vision tower."""
    if not sees_pictures(folder):
        return attention
    return {"": attention, "text_config": attention, "vision_config": "sdpa"}


def build_parts(model: nn.Module, folder: Path) -> nn.Module:
    """Set `model.tower`, a `pictures.Tower`, if the model takes pictures, and let layers with a state keep packed rows
    apart; return the model in eval mode."""
    keep_apart(model)
    if sees_pictures(folder):
        # Runs of text alone have neither the import nor Pillow.
        from spmd_rl.model.pictures import Tower

        model.tower = Tower(model, folder)
        # transformers finds some of them by the name of the class, which FSDP changes.
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    return model.eval()


def tower_names(model: nn.Module) -> set[str]:
    """Return names of a vision tower's parameters, which may be frozen."""
    own = {id(p) for p in model.tower.parameters} if hasattr(model, "tower") else set()
    return {name for name, p in model.named_parameters() if id(p) in own}


def keep_float32(model: nn.Module) -> None:
    """Restore the dtype of buffers that transformers loads in float32."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, buffer in model.named_buffers():
        if any(part in name for part in names):
            # A router's correction bias in bfloat16 could change the chosen experts.
            buffer.data = buffer.data.float()


@contextmanager
def _users_mistakes(folder: Path) -> Iterator[None]:
    """Turn transformers' errors about a directory into one-line UserErrors, and hide progress bars."""
    packed.register()
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(f"policy.model: {folder} does not load: {_first_line(error)}") from error
    finally:
        if bar:
            logging.enable_progress_bar()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters on the meta device as modules register them, before random values are drawn."""
    # `torch.device("meta")` would also move the buffers, which are never computed again.
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            parameter = nn.Parameter(made, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters (or shards) on `device`, and move buffers there."""
    # `to_empty` drops the values of buffers.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def weights_of(module: nn.Module, parts: Mapping[str, list[Part]] | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and saved buffers by stored name; tied ones once, under the first.

    A parameter stored as several tensors gives views. parts: `stored_parts`, if known.
    """
    seen: set[int] = set()
    weights, parts = {}, stored_parts(module) if parts is None else parts
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            whole = len(parts[name]) == 1
            weights |= {part.name: tensor if whole else part.of(tensor.detach()) for part in parts[name]}
    return weights


def model_directory(path: str | Path) -> Path:
    """Return the directory of a path or hub name; UserError unless a model with safetensors."""
    folder = model_folder(path)
    if not folder.is_dir():
        raise UserError(f"policy.model: no such directory: {folder}")
    if not (folder / "config.json").is_file():
        raise UserError(f"policy.model: {folder} has no config.json: not a Hugging Face model directory")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        hint = "only pickled weights, which are never loaded; convert them" if pickled else "no weights"
        raise UserError(f"policy.model: {folder} has no *.safetensors ({hint})")
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
