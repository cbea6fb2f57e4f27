"""`FlowExport`: a diffusion model's weights as directories that diffusers loads; written like `HfExport`'s."""

from itertools import groupby
from pathlib import Path

from spmd_rl.checkpoint.export import turn_of, write_hf
from spmd_rl.distributed import World
from spmd_rl.model.diffusion import FlowModel
from spmd_rl.train.denoising import Denoising


class FlowExport:
    """Writer of a diffusion model's transformers, each as a directory that diffusers' `from_pretrained` loads."""

    def __init__(self, policy: Denoising, flow: FlowModel, world: World) -> None:
        """flow: the model that is trained, of whose directory the other files come."""
        self._policy, self._flow, self._world = policy, flow, world

    def __call__(self, path: Path) -> list[Path]:
        """[all] Write the directory `path` as `HfExport` does, or one below it for each of several folders of
        weights."""
        flow, world, files = self._flow, self._world, list[Path]()
        weights, turn = self._policy.weights(), turn_of(world)
        with world.collective("export: weights", "copy"):
            if flow.stem == "model":
                return write_hf(weights, flow.folder, path, turn, world.progress)
            for name, some in groupby(weights, lambda pair: pair[0].partition(".")[0]):
                own = ((key.partition(".")[2], tensor) for key, tensor in some)
                files += write_hf(own, flow.folder / name, path / name, turn, world.progress, stem=flow.stem)
        return files
