"""Converts between a checkpoint's policy weights and a directory that Hugging Face loads, without a training run.

    python -m spmd_rl convert to-hf RUN_DIR/checkpoints/step-000010 OUT
    python -m spmd_rl convert to-peft RUN_DIR/checkpoints/step-000010 OUT
    python -m spmd_rl convert from-hf HF_DIR RUN_DIR/checkpoints/step-000010 OUT

`to-hf` equals the run's export byte for byte, with adapters merged; `to-peft` writes adapters alone. `from-hf` writes
the given checkpoint with the policy's weights of HF_DIR; the rest (AdamW's moments, critic, counters, prompts) stays.
Needs no device, and memory of a few times the largest parameter. Checkpoints are verified first.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import UserError, one_line, tell
from spmd_rl.checkpoint import manifest
from spmd_rl.checkpoint.export import MAX_SHARD_BYTES, copy_side_files, write_streamed
from spmd_rl.checkpoint.manifest import EXPORT, Manifest, TornCheckpoint
from spmd_rl.config.run_identity import saved_config
from spmd_rl.model.build import build_on_meta, model_directory, tower_names
from spmd_rl.model.load import WeightFiles, checked_weights, read_whole
from spmd_rl.model.lora import SCALING
from spmd_rl.model.stored import Part, stored_parts
from spmd_rl.train.adapted import AdaptedFiles, write_adapter
from spmd_rl.train.state import MODEL, SavedState, TensorSpec, head_of, key_of, write_safetensors

ROLE = "policy"
"""Folder of the role to convert in a checkpoint"""
DTYPES = ("float32", "bfloat16", "float16")


class Checkpoint(NamedTuple):
    """A verified checkpoint and its weights' model."""

    directory: Path
    manifest: Manifest
    saved: SavedState
    model: nn.Module
    """on the meta device, in float32 like the masters"""
    model_dir: Path


def open_checkpoint(directory: Path, run: dict[str, Any], model: str | None, trust: bool = False) -> Checkpoint:
    """Verify every byte, then names and shapes against the model. UserError if torn or foreign.

    trust: allow Python code of the model directory; a run's settings cannot, since others may write them.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    try:
        complete = Manifest.read(directory)
        for name, entry in complete.files.items():
            # The export is not read.
            if not name.startswith(f"{EXPORT}/"):
                manifest.check_file(directory / name, name, entry.hash)
    except TornCheckpoint as torn:
        raise UserError(f"{directory} is incomplete, or not a checkpoint: {torn}") from torn
    if not (directory / ROLE).is_dir():
        raise UserError(f"{directory} holds no {ROLE}")
    settings = run.get("policy", {})
    if not (model := model or settings.get("model")):
        raise UserError(f"{directory} is not in a run's directory: name the trained model with --model")
    folder = model_directory(model)
    built = build_on_meta(folder, torch.float32, trust)
    saved, parts = SavedState.open(directory / ROLE), stored_parts(built)
    held = dict(built.named_parameters()) | saved_buffers(built, saved, parts)
    if SCALING in saved.tensors:
        # Opening them checks that the adapters belong to this model.
        AdaptedFiles(folder, saved, parts, torch.float32)
        return Checkpoint(directory, complete, saved, built, folder)
    theirs = {name: whole.size for name, whole in saved.tensors.items() if name.startswith(MODEL)}
    # A frozen tower is not saved.
    frozen = {name for name in tower_names(built) if MODEL + parts[name][0].name not in theirs}
    held = {name: p for name, p in held.items() if name not in frozen}
    ours = {MODEL + part.name: tuple(part.of(p).shape) for name, p in held.items() for part in parts[name]}
    if odd := sorted(ours.items() ^ theirs.items()):
        name = odd[0][0]
        shapes = f"{theirs.get(name, 'nothing')} of {name}, the model in {folder} {ours.get(name, 'nothing')}"
        raise UserError(f"{directory} is of another model: it holds {shapes}")
    return Checkpoint(directory, complete, saved, built, folder)


def to_hf(checkpoint: Checkpoint, out: Path, dtype: torch.dtype, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the new directory `out`: policy weights in `dtype` by Hugging Face names, config, tokenizer."""
    parts, tensors = stored_parts(checkpoint.model), dict(checkpoint.model.named_parameters())
    tensors |= {name: buffer for name, buffer in checkpoint.model.named_buffers() if name in parts}
    shapes = {
        part.name: TensorSpec(dtype if isinstance(tensor, nn.Parameter) else tensor.dtype, tuple(part.of(tensor).shape))
        for name, tensor in tensors.items()
        for part in parts[name]
    }

    saved, model = checkpoint.saved, checkpoint.model
    adapted, wanted = SCALING in saved.tensors, cache(lambda: checked_weights(model, files))
    files = AdaptedFiles(checkpoint.model_dir, saved, parts, dtype) if adapted else WeightFiles(checkpoint.model_dir)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for part, tensor in ((part, tensor) for name, tensor in tensors.items() for part in parts[name]):
            if MODEL + part.name in saved.tensors:
                yield part.name, saved.read(MODEL + part.name).to(shapes[part.name].dtype)
            # A weight that is not trained, or only through an adapter, comes from the model's own files.
            else:
                found = part.of(read_whole(tensor, wanted(), files))
                yield part.name, found.to(shapes[part.name].dtype)

    with _new(out) as draft:
        write_streamed(shapes, weights(), draft, max_shard_bytes)
        copy_side_files(checkpoint.model_dir, draft, str(next(iter(shapes.values())).dtype).removeprefix("torch."))


def to_peft(checkpoint: Checkpoint, out: Path, dtype: torch.dtype) -> None:
    """Write the new directory `out`: the policy's adapters in `dtype`, for peft. UserError without any."""
    if SCALING not in checkpoint.saved.tensors:
        raise UserError(f"{checkpoint.directory} holds whole weights, no adapters; use to-hf")
    with _new(out) as draft:
        write_adapter(checkpoint.saved, checkpoint.model_dir, draft, dtype)


def from_hf(weights_dir: Path, checkpoint: Checkpoint, out: Path) -> None:
    """Write the new directory `out`: the checkpoint with weights from `weights_dir`, of the same model."""
    if SCALING in checkpoint.saved.tensors:
        raise UserError(f"{checkpoint.directory} holds only adapters, which whole weights cannot replace")
    files, model, saved = WeightFiles(weights_dir), checkpoint.model, checkpoint.saved
    wanted, parts = checked_weights(model, files), stored_parts(model)
    tensors = dict(model.named_parameters()) | saved_buffers(model, saved, parts)
    # AdamW's moments and the like, which the new weights do not replace.
    others = [name for name in saved.tensors if not name.startswith(MODEL)]
    order = [MODEL + part.name for name in tensors for part in parts[name]] + others
    keys = {name: key_of(name, [0] * len(saved.tensors[name].size)) for name in order}

    def state() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            whole = read_whole(tensor, wanted, files)
            yield from ((keys[MODEL + part.name], part.of(whole)) for part in parts[name])
        yield from ((keys[name], saved.read(name)) for name in others)

    with _new(out) as draft:
        (draft / ROLE).mkdir()
        shapes = {keys[name]: saved.tensors[name] for name in order}
        about = head_of({name: saved.tensors[name].size for name in order}, {"backend": "convert"})
        write_safetensors(draft / ROLE / "00000.safetensors", shapes, state(), about)
        for name in checkpoint.manifest.files:
            if name.split("/")[0] not in (ROLE, EXPORT):
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkpoint.directory / name, draft / name)
        # The manifest comes last: it vouches only for files that are on the disk.
        for name in (written := manifest.list_files(draft)):
            manifest.flush(draft / name)
        entries = {name: manifest.hash_file(draft / name, lambda: None) for name in written}
        # One rank wrote it; any number of ranks may load it.
        Manifest(checkpoint.manifest.step, 1, entries).write(draft)


def saved_buffers(model: nn.Module, saved: SavedState, parts: Mapping[str, Sequence[Part]]) -> dict[str, Tensor]:
    """Return the buffers that training changes: biases of routers."""
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in parts)
    return {name: buffer for name, buffer in buffers if all(MODEL + part.name in saved.tensors for part in parts[name])}


@contextmanager
def _new(out: Path) -> Iterator[Path]:
    if out.exists():
        raise UserError(f"{out} exists already")
    # In the same directory, since a rename across file systems is no rename.
    draft = out.absolute().with_name(f".{out.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code: 2, after one line, if nothing can be converted."""
    parser = Parser(program("convert"), description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True)
    to, alone, back = (ways.add_parser(way) for way in ("to-hf", "to-peft", "from-hf"))
    back.add_argument("weights", type=Path, metavar="HF_DIR")
    for way in (to, alone, back):
        way.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
        way.add_argument("out", type=Path, metavar="OUT")
        way.add_argument("--model", help="directory of config and tokenizer; by default the run's policy.model")
        way.add_argument("--trust-remote-code", action="store_true", help="run the Python code that the model brings")
    to.add_argument("--dtype", choices=DTYPES, help="by default the run's policy.dtype, or float32")
    alone.add_argument("--dtype", choices=DTYPES, default="float32", help="by default that of the masters, float32")
    to.add_argument(
        "--max-shard-bytes", type=at_least(1), default=MAX_SHARD_BYTES, metavar="N", help="of a safetensors file"
    )
    asked = parser.parse_args(arguments)
    try:
        # A checkpoint is in RUN_DIR/checkpoints, next to the run's config.yaml.
        run = saved_config(asked.checkpoint.absolute().parent.parent) or {}
        found = open_checkpoint(asked.checkpoint, run, asked.model, asked.trust_remote_code)
        if asked.way == "from-hf":
            from_hf(asked.weights, found, asked.out)
        elif asked.way == "to-peft":
            to_peft(found, asked.out, getattr(torch, asked.dtype))
        else:
            dtype = asked.dtype or run.get("policy", {}).get("dtype", "float32")
            to_hf(found, asked.out, getattr(torch, dtype), asked.max_shard_bytes)
    except UserError as error:
        tell(f"error: {one_line(str(error))}")
        return 2
    except OSError as error:
        tell(f"error: {asked.out} could not be written: {error.strerror or one_line(error)}")
        return 2
    print(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
