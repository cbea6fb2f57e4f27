"""`HfExport`: weights as a Hugging Face directory (safetensors, config, tokenizer) for `from_pretrained`.

The ranks take the files in turns; all iterate over all weights, which are gathered tensor by tensor.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from torch import Tensor

from spmd_rl.base.hub import model_folder
from spmd_rl.base.process import in_background
from spmd_rl.distributed import World
from spmd_rl.train.base import CriticRole, PolicyRole
from spmd_rl.train.state import TensorSpec, write_safetensors

MAX_SHARD_BYTES = 5 * 10**9
# A rank's turn among those that write files, and their number.
Turn = tuple[int, int]
ALONE: Turn = (0, 1)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def turn_of(world: World) -> Turn:
    """Return this rank's turn among the writers."""
    # After one rank of each node comes a second one, so that all nodes write.
    order = sorted(range(world.size), key=lambda rank: (world.nodes[:rank].count(world.nodes[rank]), rank))
    return order.index(world.rank), world.size


class HfExport:
    """Writer of a policy's current weights. Example: `HfExport(policy, cfg.policy.model, world)`."""

    def __init__(self, policy: PolicyRole, model_dir: str | Path, world: World) -> None:
        """model_dir: source of config and tokenizer. world: the ranks that hold the policy."""
        self._policy, self._model_dir, self._world = policy, model_folder(model_dir), world

    def __call__(self, path: Path) -> list[Path]:
        """[all] Write the directory `path`; return the files that this rank wrote.

        OSError on a rank whose write failed, after all ranks have iterated over all weights.
        """
        with self._world.collective("export: weights", "copy"):
            return write_hf(self._policy.weights(), self._model_dir, path, turn_of(self._world), self._world.progress)


class RewardExport:
    """Writer of a trained critic as a sequence classification model with one output, for `rewards.reward_model`."""

    def __init__(
        self,
        critic: CriticRole,
        model_dir: str | Path,
        world: World,
        pad_token_id: int | None,
        separator: str | None = None,
    ) -> None:
        """pad_token_id: a token that ends no conversation; None: the model scores one at a time. separator: of steps;
        None: it scores answers.
        """
        self._critic, self._model_dir, self._world = critic, model_folder(model_dir), world
        self._config = {"pad_token_id": pad_token_id} | ({"step_separator": separator} if separator else {})

    def __call__(self, path: Path) -> list[Path]:
        """[all] Write the directory `path` as `HfExport` does."""
        weights = ((name.replace("lm_head.", "score."), tensor) for name, tensor in self._critic.weights())
        with self._world.collective("export: weights", "copy"):
            files = write_hf(weights, self._model_dir, path, turn_of(self._world), self._world.progress)
        if self._world.rank == 0:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
            own = {"architectures": names, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
            config |= own | self._config
            (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return files


def write_hf(
    weights: Iterable[tuple[str, Tensor]],
    model_dir: Path | None,
    path: Path,
    turn: Turn,
    progress: Callable[[], object],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    stem: str = "model",
) -> list[Path]:
    """[all] Iterate over `weights`; store this rank's files in `path`, and return them.

    model_dir: of the side files, which the first rank copies; None for none. stem: name of the weight files, without
    number and ending. OSError, after the iteration.
    """
    writer = _Shards(path, max_shard_bytes, stem, turn)
    error: OSError | None = None
    # A full disk does not stop the iteration: other ranks take part in it.
    for name, tensor in weights:  # [all]
        progress()
        if error is not None:
            continue
        try:
            writer.add(name, tensor)
        except OSError as failed:
            error = failed
    if error is not None:
        raise error
    return writer.finish() + ([] if turn[0] or model_dir is None else copy_side_files(model_dir, path, writer.dtype))


def copy_side_files(model_dir: Path, path: Path, dtype: str) -> list[Path]:
    """Copy a model directory's files except weights; set the dtype in `config.json`."""
    files = []
    for source in sorted(model_dir.iterdir()):
        if source.is_file() and not source.name.startswith(".") and not source.name.endswith(_WEIGHTS):
            files.append(Path(shutil.copyfile(source, path / source.name)))
    config_file = path / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    # `torch_dtype` is the old name of `dtype` in transformers; both together could contradict each other.
    config.pop("torch_dtype", None)
    # diffusers reads the dtype from the weights, and fails at a key that its class does not have.
    if "_class_name" not in config:
        config["dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return files


def begins_file(held_bytes: int, tensor_bytes: int, max_bytes: int) -> bool:
    """Return True if a tensor needs a new file."""
    return held_bytes > 0 and held_bytes + tensor_bytes > max_bytes


def file_name(number: int, count: int, stem: str = "model") -> str:
    """Return the name for `from_pretrained` of file `number` of `count`, from 1 on."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def write_index(path: Path, names: Sequence[Sequence[str]], total_bytes: int, stem: str = "model") -> list[Path]:
    """Write the index of several files, and return its path."""
    if len(names) == 1:
        return []
    weight_map = {name: file_name(i, len(names), stem) for i, inside in enumerate(names, start=1) for name in inside}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    file = path / f"{stem}.safetensors.index.json"
    file.write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [file]


class _Shards:
    # Collects tensors up to the size of a file, which a thread writes. At most two files' tensors are in memory.

    def __init__(self, path: Path, max_bytes: int, stem: str, turn: Turn) -> None:
        self._path, self._stem = path, stem
        self._max_bytes, self._turn = max_bytes, turn
        self._written: Future[None] | None = None
        # None for a tensor of another rank's file.
        self._pending: dict[str, Tensor | None] = {}
        self._pending_bytes = 0
        self._names: list[list[str]] = []
        self._total_bytes = 0
        self.dtype = "float32"

    def add(self, name: str, tensor: Tensor) -> None:
        if begins_file(self._pending_bytes, tensor.nbytes, self._max_bytes):
            self._flush()
        if not self._names and not self._pending:
            self.dtype = str(tensor.dtype).removeprefix("torch.")
        is_mine = self._is_mine(len(self._names))
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous() if is_mine else None
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> list[Path]:
        """Write the rest, rename this rank's files, and return them."""
        self._flush()
        self._wait()
        files, count = [], len(self._names)
        for index in filter(self._is_mine, range(count)):
            # The number of files is part of each name, and known only at the end.
            target = self._path / file_name(index + 1, count, self._stem)
            files.append(self._part(index).rename(target))
        index = write_index(self._path, self._names, self._total_bytes, self._stem) if self._is_mine(0) else []
        return files + index

    def _is_mine(self, index: int) -> bool:
        return index % self._turn[1] == self._turn[0]

    def _part(self, index: int) -> Path:
        return self._path / f"{self._stem}-{index:05d}.part"

    def _flush(self) -> None:
        index, pending = len(self._names), self._pending
        self._names.append(list(pending))
        self._pending, self._pending_bytes = {}, 0
        if self._is_mine(index):
            self._path.mkdir(parents=True, exist_ok=True)
            self._wait()
            specs = {name: TensorSpec.of(tensor) for name, tensor in pending.items()}
            write = partial(write_safetensors, self._part(index), specs, pending.items(), {"format": "pt"})
            # The other ranks gather on meanwhile, which they cannot do without this one.
            self._written = in_background("export", write)

    def _wait(self) -> None:
        if self._written:
            self._written.result()


def write_streamed(
    specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], path: Path, max_bytes: int
) -> None:
    """Write `tensors`, in the order of `specs`, into files of at most `max_bytes` each, and their index.

    `path` exists. A larger tensor gets a separate file. OSError from the file system.
    """
    # Files are planned from the specs first, since each name contains their number.
    files: list[dict[str, TensorSpec]] = [{}]
    held = 0
    for name, spec in specs.items():
        if begins_file(held, spec.num_bytes, max_bytes):
            files.append({})
            held = 0
        files[-1][name] = spec
        held += spec.num_bytes
    mine = iter(tensors)
    for number, inside in enumerate(files, start=1):
        write_safetensors(path / file_name(number, len(files)), inside, mine, {"format": "pt"})
    write_index(path, [list(inside) for inside in files], sum(spec.num_bytes for spec in specs.values()))
