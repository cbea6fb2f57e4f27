"""Files of a checkpoint, a run or a model that a stranger may have written: one line each, nothing of theirs runs."""

import json
import os
import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint import manifest
from spmd_rl.checkpoint.manifest import Manifest, TornCheckpoint
from spmd_rl.config.load import load
from spmd_rl.config.model_files import check_weights, num_weights
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.train.state import FORMAT, SavedState, Shard, write_state
from tests.unit.test_checkpoint import resumed, saved


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The one file of a saved state."""
    (tmp_path / "state").mkdir()
    tensors = {"model/a": torch.ones(4, 3), "optimizer/step": torch.tensor(7)}
    mine = [Shard(name, tuple(t.shape), (0,) * t.ndim, t, True) for name, t in tensors.items()]
    return write_state(tmp_path / "state" / "0.safetensors", mine, {"backend": "test"})[0]


class Call:
    """Pickles as a call, as a stranger's object would."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def touch(path: Path) -> list[bytes]:
    """Pickles each of which makes the file `path` where it is simply loaded."""
    shell = f"touch {path}"
    built = b"cposix\nsystem\n(V" + shell.encode() + b"\ntR."
    hidden = b"\x80\x04\x8c\x05torch\x8c\x0dstorage.os.sy\x93(V" + shell.encode() + b"\ntR."
    return [
        pickle.dumps(Call(os.system, shell)),
        pickle.dumps(Call(eval, f"open({str(path)!r}, 'w')")),
        pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
        pickle.dumps(Call(torch.load, str(path))),
        pickle.dumps(Call(exec, f"open({str(path)!r}, 'w')"), 0),
        built,
        hidden,
    ]


def odd_files() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """Files of safetensors whose names or metadata are nothing that is ever saved."""
    a = {"model/a@0,0": torch.ones(4, 3)}

    def of(shapes: str) -> dict[str, str]:
        return {"format": FORMAT, "shapes": shapes}

    return {
        "no metadata": (a, {}),
        "another format": (a, {"format": "pt"}),
        "no shapes": (a, {"format": FORMAT}),
        "no JSON": (a, of("{")),
        "a nest": (a, of("[" * 200_000)),
        "a list": (a, of("[1]")),
        "a shape of words": (a, of('{"model/a": ["4", "3"]}')),
        "a negative shape": (a, of('{"model/a": [-4, -3]}')),
        "more than any memory": (a, of('{"model/a": [1099511627776, 1099511627776]}')),
        "an unknown name": (a, of('{"model/b": [4, 3]}')),
        "a piece outside": ({"model/a@1,0": torch.ones(4, 3)}, of('{"model/a": [4, 3]}')),
        "a piece before": ({"model/a@-1,0": torch.ones(4, 3)}, of('{"model/a": [4, 3]}')),
        "a place of words": ({"model/a@a,b": torch.ones(4, 3)}, of('{"model/a": [4, 3]}')),
        "no place": ({"model/a": torch.ones(4, 3)}, of('{"model/a": [4, 3]}')),
        "too few dimensions": ({"model/a@0": torch.ones(4, 3)}, of('{"model/a": [4, 3]}')),
        "half of it": ({"model/a@0,0": torch.ones(2, 3)}, of('{"model/a": [4, 3]}')),
        "another dtype": ({"model/a@0,0": torch.ones(4, 3, dtype=torch.uint8)}, of('{"model/a": [4, 3]}')),
    }


def test_a_saved_state_comes_back_as_it_was_written(state: Path) -> None:
    found = SavedState.open(state.parent)
    assert torch.equal(found.read("model/a"), torch.ones(4, 3)) and found.read("optimizer/step").item() == 7


def test_nothing_of_a_strangers_state_runs(state: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for content in touch(made):
        state.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as a saved state: ") as caught:
            SavedState.open(state.parent)
        assert "\n" not in str(caught.value) and not made.exists()


def test_a_state_of_odd_names_and_shapes_is_one_line(state: Path) -> None:
    for name, (tensors, about) in odd_files().items():
        save_file(tensors, state, about)
        with pytest.raises(UserError, match="cannot be read as a saved state: ") as caught:
            SavedState.open(state.parent)
            pytest.fail(name)
        assert "\n" not in str(caught.value), name


def test_a_damaged_state_is_a_line_or_a_state(state: Path) -> None:
    """Bytes changed at random never raise anything else."""
    genuine, draw = state.read_bytes(), random.Random(7)
    for _ in range(500):
        spoilt = bytearray(genuine)
        for _ in range(draw.randint(1, 4)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        state.write_bytes(spoilt)
        try:
            found = SavedState.open(state.parent)
            assert all(found.read(name).shape == whole.size for name, whole in found.tensors.items())
        except UserError as error:
            assert "\n" not in str(error)


def forge(checkpoint: Path, **fields: Any) -> None:
    """Rewrite a checkpoint's manifest so that it vouches for what lies there now."""
    files = {name: manifest.hash_file(checkpoint / name, int) for name in manifest.list_files(checkpoint)}
    replace(Manifest(1, 1, files), **fields).write(checkpoint)


def test_a_resume_runs_nothing_of_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "run", 1)
    checkpoint, made = tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "made"
    for content in touch(made):
        (checkpoint / "policy" / "00000.safetensors").write_bytes(content)
        forge(checkpoint)
        with pytest.raises(UserError, match="cannot be read as a saved state"):
            resumed(tmp_path / "run")
        assert not made.exists()


@pytest.mark.parametrize("fields", [{"step": "1"}, {"world_size": None}, {"files": {}}])
def test_a_manifest_of_other_types_is_torn(tmp_path: Path, fields: dict[str, Any]) -> None:
    saved(tmp_path, 1)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    forge(checkpoint, **fields)
    with pytest.raises(TornCheckpoint):
        Manifest.read(checkpoint)


def head(table: Any, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


DAMAGED = {
    "empty": b"",
    "seven bytes": b"\x02\0\0\0\0\0\0",
    "no head": bytes(8),
    "a head beyond the file": struct.pack("<Q", 100) + b"{}",
    "a head of 2**60 bytes": struct.pack("<Q", 2**60) + b"{}",
    "no JSON": head(b"[[" * 40),
    "a nest": head(b"[" * 200_000),
    "a list": head([1]),
    "a number for a tensor": head({"a": 1}),
    "no offsets": head({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "a shape of words": head({"a": entry(0, 4, ["1"])}, bytes(4)),
    "a negative shape": head({"a": entry(0, 4, [-1])}, bytes(4)),
    "offsets the wrong way": head({"a": entry(4, 0)}, bytes(4)),
    "cut off": head({"a": entry(0, 4)}, bytes(3)),
    "longer than it says": head({"a": entry(0, 4)}, bytes(5)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_safetensors_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"^policy.model: .*model.safetensors is damaged: ") as caught:
        check_weights("policy.model", tmp_path)
    assert "\n" not in str(caught.value)


def test_holes_are_no_weights(tmp_path: Path) -> None:
    """What an interrupted download has reserved, and a head whose length no memory holds."""
    file, whole = tmp_path / "model.safetensors", 2**24
    text = head({"a": entry(0, whole, [whole // 4])})
    file.write_bytes(text)
    os.truncate(file, len(text) + whole)
    with pytest.raises(UserError, match="only zeros after its first"):
        check_weights("policy.model", tmp_path)
    file.write_bytes(struct.pack("<Q", 2**40 - 8))
    os.truncate(file, 2**40)
    with pytest.raises(UserError, match="header too large"):
        check_weights("policy.model", tmp_path)
    save_file({"a": torch.zeros(2**20), "b": torch.zeros(3, 5)}, file)
    check_weights("policy.model", tmp_path)
    assert num_weights(tmp_path) == 2**20 + 15


def test_a_yaml_file_does_not_turn_remote_code_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("policy:\n  trust_remote_code: true\nabout: {pipeline: rlvr}\n")
    for name in ("config", "mine"):
        (tmp_path / "mine.yaml").write_text("defaults: [rlvr, _self_]\npolicy:\n  trust_remote_code: true\n")
        with pytest.raises(UserError, match=r"^policy.trust_remote_code: set by a YAML file"):
            load("rlvr", RlvrConfig, [], str(tmp_path), name)
        asked = ["policy.trust_remote_code=true"]
        assert load("rlvr", RlvrConfig, asked, str(tmp_path), name).policy.trust_remote_code
        assert not load(
            "rlvr", RlvrConfig, ["policy.trust_remote_code=false"], str(tmp_path), name
        ).policy.trust_remote_code
