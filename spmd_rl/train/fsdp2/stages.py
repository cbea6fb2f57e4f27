"""Cut a Hugging Face causal LM into pipeline stages, in place.

Other stages' modules become pass-through modules, so the model's forward and parameter names stay. Later stages get
`inputs_embeds`. A forward computes one chunk of several, see `Chunks`.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.config.architectures import SCALES_HIDDEN_STATES
from spmd_rl.config.ranks import deal_layers
from spmd_rl.distributed import Layout
from spmd_rl.train.fsdp2.shard import decoder_layers


class Held(NamedTuple):
    """Location of a parameter among stages."""

    stages: tuple[int, ...]
    """Stages with the parameter, two for tied embeddings"""
    shape: torch.Size
    is_trained: bool


class PassThrough(nn.Module):
    """Placeholder for another stage's module; keeps a weight that this stage uses under another name."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden_states


class _End(PassThrough):
    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        # FSDP warns about a view as a module's output.
        return hidden_states.clone()


class Chunks:
    """Chunks of a stage's model, of which a forward computes the `current` one.

    Outside a forward all are in place, for walks over modules and parameters.
    """

    def __init__(self, model: nn.Module, chunk_of: Mapping[nn.Module, int]) -> None:
        """chunk_of: modules of exactly one chunk; not sharded yet."""
        self.current = 0
        output = model.get_output_embeddings()
        stand_ins = [_End() if module is output else PassThrough() for module in chunk_of]
        names = {module: name for name, module in model.named_modules()}
        self._places = [(names[m], m, chunk, s) for (m, chunk), s in zip(chunk_of.items(), stand_ins, strict=True)]
        if len(set(chunk_of.values())) > 1:
            # FSDP puts its own hook before this one, and takes what it sees in its first forward for the whole model
            model.register_forward_pre_hook(lambda model, _: self._put(model, is_forward=True))
            model.register_forward_hook(lambda model, _, __: self._put(model, is_forward=False), always_call=True)

    def _put(self, model: nn.Module, is_forward: bool) -> None:
        for name, module, chunk, stand_in in self._places:
            if chunk != self.current:
                model.set_submodule(name, stand_in if is_forward else module)


def cut(model: nn.Module, layout: Layout, vpp: int = 1) -> tuple[dict[str, Held], Chunks]:
    """Reduce `model`, not sharded yet, to this rank's stage of `vpp` chunks.

    Returns the location of each whole-model parameter, in order, equal on all ranks; and this stage's chunks.
    UserError, naming the setting, if there are more chunks than layers, if anything is computed between input embedding
    and layers, or if a checkpoint holds more than parameters.
    """
    stage, num_stages = layout.rank("pp"), layout.size("pp")
    layers = decoder_layers(model)
    dealt = deal_layers(layout.key, len(layers), num_stages, vpp)
    if num_stages == 1:
        return {name: Held((0,), p.shape, p.requires_grad) for name, p in model.named_parameters()}, Chunks(model, {})
    # Each stage would scale its input again.
    if model.config.get_text_config().model_type in SCALES_HIDDEN_STATES:
        raise UserError(f"{layout.key}.pp: {type(model).__name__} scales its hidden states; must be 1")
    place_of = {layers[i]: place for place, mine in enumerate(dealt) for i in mine}
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    around = _around(model, layers)
    place_of |= {module: 0 if module is embedding else len(dealt) - 1 for module in (*around, output)}
    stage_of = {module: place % num_stages for module, place in place_of.items()}
    holders: dict[nn.Parameter, set[int]] = defaultdict(set)
    for module, number in stage_of.items():
        for p in module.parameters():
            holders[p].add(number)
    odd = [name for name, p in model.named_parameters() if p not in holders]
    # Saved buffers would be exported too.
    odd += [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if odd or embedding not in around:
        raise UserError(f"{layout.key}.pp: {type(model).__name__} has {odd or 'weights'} outside its layers; must be 1")
    held = {name: Held(tuple(sorted(holders[p])), p.shape, p.requires_grad) for name, p in model.named_parameters()}
    gone = []
    for name, module in list(model.named_modules()):
        if stage_of.get(module, stage) != stage:
            tied = next((p for p in module.parameters() if stage in holders[p]), None)
            model.set_submodule(name, (_End if module is output else PassThrough)(tied))
            gone += [] if tied is not None else [re.escape(name)]
    # Weights of other stages in a checkpoint must not count as unexpected.
    if gone:
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = [*known, rf"^({'|'.join(gone)})\."]
    return held, Chunks(model, {m: place // num_stages for m, place in place_of.items() if stage_of[m] == stage})


def _around(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = next(((name, module) for name, module in lists if list(module) == layers), None)
    if found is None:
        return []
    path, name = found[0].rpartition(".")[::2]
    children = dict(model.get_submodule(path).named_children())
    before = list(children)[: list(children).index(name)]
    embedding = model.get_input_embeddings()
    return [
        child
        for key, child in children.items()
        if next(child.parameters(), None) is not None
        and child is not found[1]
        and (key not in before or child is embedding)
    ]
