"""`Adapters`: peft's LoRA layers inside of a model that a backend shards.

    adapters = Adapters(model, settings, layout.key)  # before the model is cut and sharded; no-op with lora.rank=0
    with adapters.hidden():  # the model under its original names
        load(model)
    adapters.initialize()
    for name, tensor in adapters.published(whole_parameters, "merged"): ...

A backend that reads by region uses `reading` instead of `hidden` and `initialize`. Adapters are float32 shards, with
initial values by name, equal in every layout and backend.
"""
# peft wraps a linear layer and freezes its weight as `X.base_layer.weight`.

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.build import parameters_on_meta
from spmd_rl.model.load import Fill, Region, WeightFiles, local, owned_region
from spmd_rl.model.lora import IN_NF4, MAGNITUDE, PREFIX, SCALING, A, Adapter, B
from spmd_rl.model.stored import Part
from spmd_rl.train.dither import merged
from spmd_rl.train.nf4 import pack_layer, unpack
from spmd_rl.train.recompute import decoder_layers
from spmd_rl.train.state import Shard

BASE, NAME = ".base_layer", "default"
OWN_A, OWN_B, OWN_MAGNITUDE = (f".lora_{kind}.{NAME}.weight" for kind in ("A", "B", "magnitude_vector"))
ENDINGS = {OWN_A: A, OWN_B: B, OWN_MAGNITUDE: MAGNITUDE}
"""Endings of parameter names, and of peft's files"""


class SavedScaling:
    """LoRA scaling in a checkpoint; another run's scaling is refused."""

    def __init__(self, settings: LoraConfig) -> None:
        self.settings = settings
        # float64, so that the comparison after a load is exact.
        self._saved_scaling = torch.tensor(settings.scaling if settings.rank else 0.0, dtype=torch.float64)

    def state(self, is_mine: bool) -> list[Shard]:
        """Return the scaling, and a mark of a base in NF4, as saved."""
        found = [Shard(SCALING, (), (), self._saved_scaling, is_mine)] if self.settings.rank else []
        if found and self.settings.base:
            found.append(Shard(IN_NF4, (), (), torch.ones((), dtype=torch.float64), is_mine))
        return found

    def check_scaling(self) -> None:
        """Raise ValueError if a loaded checkpoint has another scaling; restore the right one."""
        saved, own = float(self._saved_scaling), self.settings.scaling if self.settings.rank else 0.0
        self._saved_scaling.fill_(own)
        if saved != own:
            raise ValueError(f"its adapters are scaled by {saved:g}, this run's by {own:g} (lora.alpha, lora.rslora)")

    def scaled(self, b: Tensor) -> Tensor:
        """Return `B` times the scaling, computed in float32."""
        wide = torch.promote_types(b.dtype, torch.float32)
        return (b.to(wide) * self.settings.scaling).to(b.dtype)


class StoredAdapters(SavedScaling):
    """Adapters of a backend without peft layers, under checkpoint names."""

    def __init__(self, settings: LoraConfig, layers: Iterable[str]) -> None:
        super().__init__(settings)
        self.layers = frozenset(layers)

    def shapes(self, files: WeightFiles) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all `A` and `B` by name."""
        return {PREFIX + layer + kind: self._shape(files, layer, kind) for layer in self.layers for kind in (A, B)}

    def _shape(self, files: WeightFiles, layer: str, kind: str) -> tuple[int, ...]:
        rows, columns = files.shape(f"{layer}.weight")
        return (self.settings.rank, columns) if kind == A else (rows, self.settings.rank)

    def read(self, files: WeightFiles, name: str, region: Region) -> Tensor:
        """Return a region of a stored tensor or an initial adapter."""
        if not name.startswith(PREFIX):
            return files.read(name, region)
        kind, ending = (A, OWN_A) if name.endswith(A) else (B, OWN_B)
        layer = name.removeprefix(PREFIX).removesuffix(kind)
        return first_value(layer + ending, torch.Size(self._shape(files, layer, kind)))[region]

    def published(self, wholes: Iterable[tuple[str, Tensor]], adapters: str) -> Iterator[tuple[str, Tensor]]:
        """Yield as `Adapters.published`; adapters must precede their layer's weight."""
        known: dict[str, Tensor] = {}
        for name, tensor in wholes:
            layer = PREFIX + name.removesuffix(".weight")
            if adapters == "merged" and name.startswith(PREFIX):
                # A published tensor is valid only until the next one.
                known[name] = tensor.clone()
            elif layer + A in known:
                adapter = Adapter(known.pop(layer + A), known.pop(layer + B), self.settings.scaling)
                yield name, merged(adapter, tensor, name, len(tensor))
            else:
                yield name, self.scaled(tensor) if name.startswith(PREFIX) and name.endswith(B) else tensor


class Adapters(SavedScaling):
    """Adapters of one model, whole or sharded."""

    def __init__(self, model: nn.Module, settings: LoraConfig, key: str, head: nn.Module | None = None) -> None:
        """Put adapters into `model` in place and freeze the rest but `head`. UserError if it cannot have them. key: see
        `targets`."""
        super().__init__(settings)
        self._model = model
        self.layers: dict[str, nn.Module] = {}
        if not settings.rank:
            return
        from peft import LoraConfig as Peft
        from peft import inject_adapter_in_model

        names = targets(model, settings.targets, key)
        made = Peft(
            r=settings.rank,
            # peft divides by the rank, so this gives our scaling, plain or rank-stabilised.
            lora_alpha=settings.rank * settings.scaling,
            target_modules=[f"model.{name}" for name in names],
            lora_dropout=settings.dropout,
            use_dora=settings.dora,
        )
        with parameters_on_meta() if next(model.parameters()).is_meta else nullcontext():
            # The wrapper hides the model type: for a mixture's type peft would take experts for layers of these names.
            inject_adapter_in_model(made, nn.ModuleDict({"model": model}))
        self.layers = {name: model.get_submodule(name) for name in names}
        # `base`: the form of the frozen weights, None or nf4.
        for layer in self.layers.values() if settings.base else ():
            pack_layer(layer.base_layer)
        for p in () if head is None else head.parameters():
            p.requires_grad_(True)
        for p in model.parameters():
            if p.requires_grad and p.dtype.itemsize < torch.float32.itemsize:
                p.data = p.data.float()

    def stored(self, parts: Mapping[str, list[Part]]) -> dict[str, list[Part]]:
        """Return parts by present parameter names, from those by names without adapters."""
        found = {self._own_name(name): known for name, known in parts.items()}
        for name, p in self._model.named_parameters():
            if ending := next((one for one in ENDINGS if name.endswith(one)), None):
                stored = PREFIX + name.removesuffix(ending) + ENDINGS[ending]
                found[name] = [Part(stored, tuple(slice(0, size) for size in p.shape), False)]
        return found

    def _own_name(self, name: str) -> str:
        layer, _, kind = name.rpartition(".")
        return f"{layer}{BASE}.{kind}" if layer in self.layers else name

    @contextmanager
    def hidden(self, hides: bool = True) -> Iterator[None]:
        """Hide adapters inside this context, in names and computation; the model may be sharded."""
        # peft's own switch also sets `requires_grad`, which FSDP stores for shards and for gathered parameters
        # separately: adapters would silently stay frozen.
        modules = self._model.named_modules() if hides else ()
        here = {name: layer for name, layer in modules if self.layers.get(name) is layer}
        for name, layer in here.items():
            self._model.set_submodule(name, layer.base_layer)
        yield
        for name, layer in here.items():
            self._model.set_submodule(name, layer)

    def reading(self, read: Fill) -> Fill:
        """Return a reader of unsharded parameters by region: from `read`, by names without adapters, or initial
        values."""

        def fill(name: str, region: Region, target: Tensor) -> None:
            layer, _, kind = name.rpartition(f"{BASE}.")
            if name.endswith((OWN_A, OWN_B)):
                target.copy_(first_value(name, shapes[name])[region])
            else:
                read(f"{layer}.{kind}" if layer in self.layers else name, region, target)

        shapes = {name: p.shape for name, p in self._model.named_parameters()}
        return fill

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialise the adapters once weights are loaded."""
        for name, p in self._model.named_parameters():
            if name.endswith((OWN_A, OWN_B)):
                local(p).copy_(first_value(name, p.shape)[owned_region(p)])
            elif name.endswith(OWN_MAGNITUDE):
                layer = self._model.get_submodule(name.removesuffix(OWN_MAGNITUDE))
                # Row norms of the frozen weight; ranks shard both tensors by rows in the same way.
                local(p).copy_(local(layer.base_layer.weight).to(p.dtype).norm(dim=1))

    def published(self, wholes: Iterable[tuple[str, Tensor]], adapters: str) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters under this model's names.

        adapters: `merged` into the weights; `apart`, under peft's names with the frozen ones; or `alone`, where
        `wholes` has no frozen ones. Unless merged, `B` is multiplied by the scaling.
        """
        return (self._merged if adapters == "merged" else self._scaled)(self._unpacked(wholes))

    def _unpacked(self, wholes: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in wholes:
            layer = name.removesuffix(f"{BASE}.weight")
            if self.settings.base and layer != name:
                columns = self.layers[layer].base_layer.in_features
                # A gather returns the bytes as numbers of the compute dtype.
                tensor = unpack(tensor.to(torch.uint8), columns, tensor.dtype)
            yield name, tensor

    def _merged(self, wholes: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        known: dict[str, Tensor] = {}
        for name, tensor in wholes:
            layer = name.partition(".lora_")[0].removesuffix(f"{BASE}.weight")
            if layer not in self.layers:
                yield name, tensor
                continue
            # A published tensor is valid only until the next one.
            known[name.removeprefix(layer)] = tensor.clone()
            # The tensors of one layer come together: weight, `A`, `B`, and with DoRA the magnitude.
            if len(known) == 3 + self.settings.dora:
                a, b, *magnitude = (known[ending] for ending in ENDINGS if ending in known)
                adapter = Adapter(a, b, self.settings.scaling, *magnitude)
                weight = known[f"{BASE}.weight"]
                yield f"{layer}{BASE}.weight", merged(adapter, weight, f"{layer}.weight", len(weight))
                known = {}
        assert not known, f"an adapter is not whole: {sorted(known)}"

    def _scaled(self, wholes: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in wholes:
            yield name, self.scaled(tensor) if name.endswith(OWN_B) else tensor

    def set_dropout(self, is_on: bool) -> None:
        """Turn dropout of the adapters' inputs on or off."""
        for layer in self.layers.values() if self.settings.dropout else ():
            # Stays set until the next call, because recomputation runs a layer a second time.
            layer.lora_dropout[NAME].train(is_on)

    @contextmanager
    def drawn(self, num_steps: int, microbatch: int, layout: Layout) -> Iterator[None]:
        """Seed dropout inside from the number of updates and this rank's part of the batch."""
        if not self.layers or not self.settings.dropout:
            yield
            return
        seed = (num_steps, microbatch, layout.data.rank, layout.rank("cp"))
        with torch.random.fork_rng():
            torch.manual_seed(zlib.crc32(repr(seed).encode()))
            yield


def first_value(name: str, shape: torch.Size) -> Tensor:
    """Return an adapter's unsharded initial value: `A` uniform as in peft, `B` zero."""
    if name.endswith(OWN_B):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5


def targets(model: nn.Module, wanted: list[str] | None, key: str) -> list[str]:
    """Return the names of linear layers that get an adapter. UserError, naming the setting, without any. key: the
    layout's, `train` or `<section>.train`."""
    key = f"{'policy' if key == 'train' else key.partition('.')[0]}.lora.targets"
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    found = [(name, module) for name, module in model.named_modules() if module in inside]
    # A vision tower may be frozen already.
    linear = [name for name, one in found if isinstance(one, nn.Linear) and one.weight.requires_grad]
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    if odd := [one for one in wanted or () if one not in kinds]:
        raise UserError(f"{key}: the decoder layers have no linear layer {odd[0]}; they have {', '.join(kinds)}")
    found = [name for name in linear if name.rpartition(".")[2] in (wanted or kinds)]
    if not found:
        raise UserError(f"{key}: the decoder layers of {type(model).__name__} have no linear layers")
    return found


def wrapped(module: Any, adapter: str) -> list[nn.Module]:
    """Return a layer alone, or its frozen layer and adapter (`lora_A`, `lora_B`)."""
    return [module.base_layer, getattr(module, adapter)[NAME]] if hasattr(module, "base_layer") else [module]
