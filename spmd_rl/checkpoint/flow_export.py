"""`FlowExport`: a diffusion model's weights as directories that diffusers loads; written like `HfExport`'s."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from torch import Tensor

from spmd_rl.checkpoint.export import turn_of, write_hf
from spmd_rl.distributed import World
from spmd_rl.model.diffusion import FlowModel
from spmd_rl.model.lora import PREFIX
from spmd_rl.train.denoising import Denoising

ADAPTERS = "pytorch_lora_weights"
"""Name of the file of adapters, without ending, that diffusers looks for."""


class FlowExport:
    """Writer of a diffusion model's transformers, each as a directory that diffusers' `from_pretrained` loads, and of
    their adapters, which `load_lora_weights` loads."""

    def __init__(self, policy: Denoising, flow: FlowModel, world: World, has_adapters: bool) -> None:
        """flow: the model that is trained, of whose directory the other files come."""
        self._policy, self._flow, self._world, self._has_adapters = policy, flow, world, has_adapters

    def __call__(self, path: Path) -> list[Path]:
        """[all] Write the directory `path` as `HfExport` does, or below it one for each transformer, with its adapters
        merged, and in `lora` one with these alone."""
        flow, world, files = self._flow, self._world, list[Path]()
        turn = turn_of(world)
        with world.collective("export: weights", "copy"):
            if flow.stem == "model":
                return write_hf(self._policy.weights(), flow.folder, path, turn, world.progress)
            error: OSError | None = None
            for weights, source, target, stem in self._directories(path):
                try:
                    files += write_hf(weights, source, target, turn, world.progress, stem=stem)
                # A full disk does not stop the iteration: other ranks take part in it.
                except OSError as failed:
                    error = failed
        if error is not None:
            raise error
        return files

    def _directories(self, path: Path) -> Iterator[tuple[Iterable[tuple[str, Tensor]], Path | None, Path, str]]:
        flow = self._flow
        for name, own in self._by_expert(self._policy.weights()):
            yield own, flow.folder / name, path / name, flow.stem
        for name, own in self._by_expert(self._policy.weights("alone") if self._has_adapters else ()):
            # The prefix is of the pipeline's attribute into which it is loaded, for both experts.
            yield ((f"transformer.{key}", tensor) for key, tensor in own), None, path / "lora" / name, ADAPTERS

    @staticmethod
    def _by_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
        bare = ((name.removeprefix(PREFIX).partition("."), tensor) for name, tensor in weights)
        for expert, some in groupby(bare, lambda pair: pair[0][0]):
            yield expert, ((name, tensor) for (_, _, name), tensor in some)
