"""The parameters of a model as Megatron has them, each with its rule; and parts of tensors under Hugging Face names."""

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
"""In names of parameters: of either kind of MLP, and of one without experts"""


class Parameter(NamedTuple):
    """A parameter of the whole model, of which the ranks of its stage have parts."""

    name: str
    """Megatron's, with the number of its layer in the whole model"""
    rule: Rule
    stage: int
    is_copy: bool = False
    """It is the input embedding again, which the last of several stages has too where output and input are tied."""
    owner: int | None = None
    """Of an expert's, which has it whole: the place along `ep` of the ranks that have it."""


class StoredPart(NamedTuple):
    """A part of a stored tensor that is here."""

    name: str
    shape: tuple[int, ...]
    """of the whole"""
    stored: Region
    tensor: Tensor
    """live"""


class Experts(NamedTuple):
    """Of the mixtures of a model."""

    count: int
    """of a layer"""
    size: int
    """how many ranks share them out"""
    first: int = 0
    """the layers before it have none"""

    def are_in(self, layer: int) -> bool:
        """Whether a layer is a mixture."""
        return self.count > 0 and layer >= self.first

    def fit(self, name: str, layer: int) -> bool:
        """Whether a layer has a parameter, or a module, of this name; each kind of MLP has its own."""
        return MLP not in name or (DENSE in name) != self.are_in(layer)


def parameters_of(
    names: Mapping[str, Rule], dealt: Sequence[range], num_stages: int, is_tied: bool, experts: Experts
) -> list[Parameter]:
    """All parameters of the model, in order; experts that are at one place on their ranks are neighbours.

    dealt: the layers of each chunk, of which stages have every n-th.
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
    """The parameters of the chunks that are here, with their layers, by the names of `Parameter`.

    owner: this rank's place among those that share experts out.
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
                    False  # its gradients are summed over the ranks that have it, tensor-parallel or not
                )
            found[name] = parameter
    return found


def check_files(parameters: Sequence[Parameter], files: WeightFiles, module: nn.Module, is_tied: bool) -> None:
    """Raise a UserError unless each stored tensor has a place in the model, and each place a stored tensor.

    module: of transformers, which may say that nobody reads some.
    """
    wanted = {name for parameter in parameters for name in parameter.rule.names if not name.startswith(PREFIX)}
    if missing := sorted(wanted - set(files.names)):
        raise UserError(f"policy.model: {files.folder} lacks {len(missing)} weights, among them {missing[0]}")
    tied = {"lm_head.weight"} if is_tied else set()
    if unknown := sorted(name for name in set(files.names) - wanted - tied if not is_ignored(module, name)):
        raise UserError(
            f"policy.model: {files.file_of(unknown[0])} holds {unknown[0]}, for which Megatron has no place"
        )


def parts_of(tensor: Tensor, own: Region, pieces: Sequence[Piece]) -> Iterator[StoredPart]:
    """What the region `own` of a parameter, which is `tensor`, is under the names of stored tensors."""
    for piece in pieces:
        common = overlap(own, piece.region)
        if common is not None:
            offsets = zip(within(common, piece.region), piece.stored, strict=True)
            stored = tuple(slice(a.start + b.start, a.stop + b.start) for a, b in offsets)
            yield StoredPart(piece.name, piece.shape, stored, tensor[within(common, own)])


@torch.no_grad()
def fill(parts: Sequence[StoredPart], read: Callable[[str, Region], Tensor], on_progress: Callable[[], object]) -> None:
    """Read what the parts hold, converted to the dtype that they have."""
    for part in parts:
        part.tensor.copy_(read(part.name, part.stored))
        on_progress()
