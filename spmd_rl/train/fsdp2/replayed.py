"""Router replay (`train/replay.py`) in modules of transformers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.model.moe import weights_of_chosen
from spmd_rl.train.fsdp2.shard import decoder_layers
from spmd_rl.train.replay import Replay


def watch(replay: Replay, model: nn.Module) -> None:
    """Hook this rank's layers and routers, before FSDP shards them."""
    for layer in decoder_layers(model) if replay.places else ():
        layer.register_forward_pre_hook(partial(_before, replay), with_kwargs=True)
    for name, module in model.named_modules():
        if name in replay.places:
            module.register_forward_hook(partial(_replace, replay, replay.places[name]))


def _before(replay: Replay, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    replay.take(kwargs.get("chosen"))


def _replace(
    replay: Replay, place: int, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    logits, weights, own = output
    if (found := replay.choose(place, own)) is None:
        return None
    chosen, known = found
    return logits, torch.where(known, weights_of_chosen(router, logits, chosen), weights), chosen
