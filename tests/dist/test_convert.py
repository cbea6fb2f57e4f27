"""`spmd_rl.tools.convert`: checkpoints of every layout to Hugging Face and back, and what is refused."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.checkpoint import Checkpointer, HfExport, manifest
from spmd_rl.checkpoint.export import ALONE, write_hf
from spmd_rl.config.schema import CheckpointConfig
from spmd_rl.distributed import World
from spmd_rl.tools.convert import main
from tests.dist.harness import run_ranks
from tests.dist.test_train_load import status
from tests.dist.test_train_state import digest, updates
from tests.models import EXPERTS, tiny
from tests.training import backend

MEBIBYTE = 2**20
WRITTEN = [
    ("llama", {}, "float32"),
    ("llama", {"pp": 2}, "bfloat16"),
    ("llama", {"tp": 2}, "float32"),
    ("llama", {"cp": 2}, "float32"),
    ("qwen3_moe", {"ep": 2}, "float32"),
    ("qwen3_moe", {"pp": 2}, "bfloat16"),
    ("deepseek_v3", {"ep": 2}, "bfloat16"),
]
"""Model (the Llama ties its embeddings), layout of two ranks, compute dtype."""


def trained(world: World, path: str, run_dir: str, axes: dict[str, int], dtype: str = "float32"):
    """A policy after an update, and its checkpoint of step 1 with an export."""
    mine = backend(world, path, dtype=dtype, axes=axes)
    updates(world, mine, [0])
    export = HfExport(mine, path, world)
    Checkpointer(CheckpointConfig(), Path(run_dir), world, {"policy": mine}, {}, export).maybe_save(1, last=True)
    return mine, Path(run_dir) / "checkpoints" / "step-000001"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def there_and_back(world: World, folder: str, paths: dict[str, str]) -> dict[str, bool]:
    """By what was written: whether its conversion is the export, and comes back as the state that was saved."""
    facts = {}
    for kind, axes, dtype in WRITTEN:
        name = f"{kind} {axes} {dtype}"
        mine, saved = trained(world, paths[kind], f"{folder}/{name}", axes, dtype)
        exact, out, again = (Path(f"{folder}/{name}.{end}") for end in ("exact", "hf", "again"))
        if world.rank == 0:
            told = ["--model", paths[kind], "--dtype"]
            codes = [main(["to-hf", str(saved), str(out), *told, dtype])]
            codes += [main(["to-hf", str(saved), str(exact), *told, "float32"])]
            codes += [main(["from-hf", str(exact), str(saved), str(again), *told[:2]])]
            facts[f"{name}: equals the export"] = codes == [0] * 3 and contents(out) == contents(saved / "hf")
        world.barrier("converted")
        wanted = digest(mine)
        other = backend(world, paths[kind], dtype=dtype, axes=axes)
        cfg = CheckpointConfig(resume=str(again))
        parts = world, {"policy": other}, {}
        facts[f"{name}: comes back"] = Checkpointer(cfg, Path(f"{folder}/new"), *parts).restore() == 1
        facts[f"{name}: to the bit"] = digest(other) == wanted
    return facts


def test_a_conversion_is_the_export_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    sizes = {"llama": {"tie": True, "vocab_size": 263}, **EXPERTS}
    paths = {kind: str(tiny(kind, tmp_path / kind, **sizes[kind])) for kind, _, _ in WRITTEN}
    for facts in run_ranks(2, there_and_back, str(tmp_path), paths, timeout=250):
        assert all(facts.values()), facts


def saved_once(world: World, path: str, run_dir: str) -> None:
    trained(world, path, run_dir, {})


def saved_at_start(world: World, path: str, run_dir: str) -> None:
    roles = {"policy": backend(world, path)}
    Checkpointer(CheckpointConfig(), Path(run_dir), world, roles, {}).maybe_save(1, last=True)


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and the checkpoint of a run of it, whose directory knows what was trained."""
    folder = tmp_path_factory.mktemp("once")
    path = tiny("qwen3_moe", folder / "model", **EXPERTS["qwen3_moe"])
    run_ranks(1, saved_once, str(path), str(folder / "run"))
    (folder / "run" / "config.yaml").write_text(json.dumps({"policy": {"model": str(path), "dtype": "float32"}}))
    return path, folder / "run" / "checkpoints" / "step-000001"


def test_files_are_cut_at_the_limit_as_the_export_cuts_them(once, tmp_path: Path) -> None:
    path, saved = once
    limit = 50_000
    assert main(["to-hf", str(saved), str(tmp_path / "out"), "--max-shard-bytes", str(limit)]) == 0
    weights = load_file(saved / "hf" / "model.safetensors")
    order = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert order.keys() == weights.keys() and len(set(order.values())) > 5
    write_hf(((name, weights[name]) for name in order), path, tmp_path / "export", ALONE, lambda: None, limit)
    assert contents(tmp_path / "out") == contents(tmp_path / "export")


def torn(saved: Path, path: Path) -> list[str]:
    file = next(saved.glob("policy/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    return []


def not_one(saved: Path, path: Path) -> list[str]:
    (saved / "manifest.json").unlink()
    return []


def missing(saved: Path, path: Path) -> list[str]:
    shutil.rmtree(saved)
    return []


def no_config(saved: Path, path: Path) -> list[str]:
    (saved.parents[1] / "config.yaml").unlink()
    return []


def foreign(saved: Path, path: Path) -> list[str]:
    sizes = EXPERTS["qwen3_moe"] | {"num_hidden_layers": 1}
    return ["--model", str(tiny("qwen3_moe", path / "flat", **sizes))]


def wider(saved: Path, path: Path) -> list[str]:
    return ["--model", str(tiny("qwen3_moe", path / "wide", **EXPERTS["qwen3_moe"], hidden_size=72))]


def hostile(saved: Path, path: Path) -> list[str]:
    """It would run code where it is unpickled, and its manifest vouches for it."""
    next(saved.glob("policy/*.safetensors")).write_bytes(b"cposix\n_exit\n(I99\ntR.")
    files = {name: manifest.hash_file(saved / name, int) for name in manifest.list_files(saved)}
    manifest.Manifest(1, 1, files).write(saved)
    return []


def in_the_way(saved: Path, path: Path) -> list[str]:
    (path / "out").mkdir()
    return []


REFUSED = {
    torn: "step-000001 is incomplete, or not a checkpoint: policy/00000.safetensors does not match its checksum",
    not_one: "step-000001 is incomplete, or not a checkpoint: manifest.json: No such file or directory",
    missing: "step-000001: no such directory",
    no_config: "name the trained model with --model",
    foreign: "step-000001 is of another model: it holds (64,) of model/model.layers.1.",
    wider: "the model in ",
    hostile: "policy cannot be read as a saved state: SafetensorError: ",
    in_the_way: "out exists already",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_what_cannot_be_converted_is_one_line(once, spoil, tmp_path: Path, capsys) -> None:
    shutil.copytree(once[1].parents[1], tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "step-000001"
    options = spoil(saved, tmp_path)
    capsys.readouterr()
    before = sorted(path.name for path in tmp_path.iterdir())
    for way in (["to-hf"], ["from-hf", str(once[0])]):
        assert main([*way, str(saved), str(tmp_path / "out"), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and REFUSED[spoil] in line, line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_weights_of_another_model_do_not_come_into_a_checkpoint(once, tmp_path: Path, capsys) -> None:
    other = tiny("qwen3_moe", tmp_path / "other", **EXPERTS["qwen3_moe"], vocab_size=264)
    capsys.readouterr()
    assert main(["from-hf", str(other), str(once[1]), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has the shape [264, 64], not [260, 64]" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["to-hf", "from-hf"])
def test_a_disk_without_room_is_one_line_and_leaves_nothing(once, way: str, tmp_path: Path, capsys) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        code = main([way, *[str(once[0])] * (way == "from-hf"), str(once[1]), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line == f"error: {tmp_path / 'out'} could not be written: File too large"
    assert list(tmp_path.iterdir()) == []


def peaks(world: World, folder: str) -> list[int]:
    """Bytes by which each conversion raises this process's peak of resident memory."""
    found = []
    for name in ("small", "large"):  # the small one allocates what is allocated once, whatever the model
        model, saved = f"{folder}/{name}/model", f"{folder}/{name}/run/checkpoints/step-000001"
        for way in (["to-hf"], ["from-hf", model]):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = status("VmRSS")
            assert main([*way, saved, f"{folder}/{name}-{way[0]}", "--model", model]) == 0
            found.append(status("VmHWM") - before)
    return found[2:]


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_no_conversion_holds_the_model(tmp_path: Path) -> None:
    """A conversion wants 16 MiB of a file's map, 8 MiB to hash in, and at most three times the largest tensor."""
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 4000}
    large |= {"num_attention_heads": 8, "head_dim": 64}
    for name, sizes in (("small", {}), ("large", large)):
        path = tiny("llama", tmp_path / name / "model", **sizes)
        run_ranks(1, saved_at_start, str(path), str(tmp_path / name / "run"), timeout=250)
    largest, model = 4 * 4000 * 512, (path / "model.safetensors").stat().st_size
    assert model > 20 * largest
    (found,) = run_ranks(1, peaks, str(tmp_path), timeout=250)
    assert max(found) < 3 * largest + 28 * MEBIBYTE < model / 3, [peak // MEBIBYTE for peak in found]


def test_dtypes_are_as_asked(once, tmp_path: Path) -> None:
    assert main(["to-hf", str(once[1]), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    got, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(once[1] / "hf" / "model.safetensors")
    assert all(torch.equal(got[name], tensor.bfloat16()) for name, tensor in wanted.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
