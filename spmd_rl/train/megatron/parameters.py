"""Megatron's parameters with their rules, and parts of stored tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.model.load import Region, WeightFiles, is_ignored, overlap, within
from spmd_rl.model.lora import PREFIX
from spmd_rl.train.megatron.mapping import Piece, Rule

LAYERS, EXPERTS = "decoder.layers.", ".local_experts."
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
MLP, DENSE = ".mlp.", ".mlp.linear_"
"""Name parts of any MLP, and of a dense one"""


class Parameter(NamedTuple):
    """A parameter of the whole model, sharded over its stage's ranks."""

    name: str
    """name in Megatron, with the layer's whole-model number"""
    rule: Rule
    stage: int
    is_copy: bool = False
    """True for the last stage's copy of a tied embedding"""
    owner: int | None = None
    """Position along `ep` of the ranks with this expert; None for other parameters"""


class StoredPart(NamedTuple):
    """This rank's part of a stored tensor."""

    name: str
    shape: tuple[int, ...]
    stored: Region
    tensor: Tensor


class Experts(NamedTuple):
    """Mixture layers of a model."""

    count: int
    """number of experts per mixture layer"""
    size: int
    """ranks that share the experts"""
    first: int = 0
    """number of the first mixture layer"""

    def are_in(self, layer: int) -> bool:
        """Return True if a layer is a mixture."""
        return self.count > 0 and layer >= self.first

    def fit(self, name: str, layer: int) -> bool:
        """Return True if a layer has a parameter or module of this name; dense MLPs and mixtures differ."""
        return MLP not in name or (DENSE in name) != self.are_in(layer)


def parameters_of(
    names: Mapping[str, Rule], dealt: Sequence[range], num_stages: int, is_tied: bool, experts: Experts
) -> list[Parameter]:
    """Return all parameters in order; experts at equal positions of their ranks are neighbours.

    dealt: each chunk's layers; a stage has every n-th chunk.
    """
    found = [Parameter(EMBEDDING, names[EMBEDDING], 0)]
    own = {name: rule for name, rule in names.items() if name.startswith(LAYERS)}
    each = experts.count // experts.size
    for number, layers in enumerate(dealt):
        for layer, (name, rule) in product(layers, own.items()):
            stage = number % num_stages
            if not experts.fit(name, layer):
                continue
            if EXPERTS not in name:
                found.append(Parameter(name.format(layer), rule.named(layer), stage))
                continue
            for place, owner in product(range(each), range(experts.size)):
                of = layer, owner * each + place
                found.append(Parameter(name.format(*of), rule.named(*of), stage, owner=owner))
    last = num_stages - 1
    found += [Parameter(name, rule, last) for name, rule in names.items() if name.startswith("decoder.final")]
    if not is_tied:
        found += [Parameter(name, rule, last) for name, rule in names.items() if name.startswith("output_layer.")]
    elif num_stages > 1:
        found.append(Parameter(OUTPUT, names[EMBEDDING], last, is_copy=True))
    return found


def local_parameters(chunks: Mapping[GPTModel, range], experts: Experts, owner: int) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank's chunks by the names of `Parameter`.

    owner: position along `ep`.
    """
    found = {}
    first = owner * (experts.count // experts.size)
    for chunk, layers in chunks.items():
        for name, parameter in chunk.named_parameters():
            if name.startswith(LAYERS):
                number, rest = name.removeprefix(LAYERS).split(".", 1)
                name = f"{LAYERS}{layers[int(number)]}.{rest}"
            if EXPERTS in name:
                before, after = name.split(EXPERTS)
                place, rest = after.split(".", 1)
                name = f"{before}{EXPERTS}{first + int(place)}.{rest}"
                parameter.allreduce = (
                    # Its gradients are summed over all ranks that have it, tensor-parallel or not.
                    False
                )
            found[name] = parameter
    return found


def check_files(parameters: Sequence[Parameter], files: WeightFiles, module: nn.Module, is_tied: bool) -> None:
    """Raise UserError unless stored tensors and the model's fit one to one.

    module: of transformers, which lists ignored tensors.
    """
    wanted = {name for parameter in parameters for name in parameter.rule.names if not name.startswith(PREFIX)}
    if missing := sorted(wanted - set(files.names)):
        raise UserError(f"policy.model: {files.folder} lacks {len(missing)} weights, among them {missing[0]}")
    tied = {"lm_head.weight"} if is_tied else set()
    if unknown := sorted(name for name in set(files.names) - wanted - tied if not is_ignored(module, name)):
        raise UserError(f"policy.model: {files.file_of(unknown[0])} holds {unknown[0]}, which Megatron's model lacks")


def parts_of(tensor: Tensor, own: Region, pieces: Sequence[Piece]) -> Iterator[StoredPart]:
    """Yield the parts of stored tensors in the region `own` of a parameter."""
    for piece in pieces:
        common = overlap(own, piece.region)
        if common is not None:
            offsets = zip(within(common, piece.region), piece.stored, strict=True)
            stored = tuple(slice(a.start + b.start, a.stop + b.start) for a, b in offsets)
            yield StoredPart(piece.name, piece.shape, stored, tensor[within(common, own)])


@torch.no_grad()
def fill(parts: Sequence[StoredPart], read: Callable[[str, Region], Tensor], on_progress: Callable[[], object]) -> None:
    """Read the parts' contents, converted to their dtypes."""
    for part in parts:
        part.tensor.copy_(read(part.name, part.stored))
        on_progress()
