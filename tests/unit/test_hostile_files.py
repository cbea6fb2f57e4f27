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
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from spmd_rl.checkpoint import manifest
from spmd_rl.checkpoint.manifest import Manifest, TornCheckpoint
from spmd_rl.config.load import load
from spmd_rl.config.model_files import check_weights, num_weights
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.errors import UserError
from spmd_rl.train.fsdp2.metadata import read_metadata
from spmd_rl.train.fsdp2.state import SavedState, write_state
from tests.unit.test_checkpoint import resumed, saved

TENSORS = {
    "model.a": torch.empty(4, 3, device="meta"),
    "optimizer.s": torch.empty((), device="meta", dtype=torch.int64),
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    write_state(folder, TENSORS, lambda name: torch.ones(TENSORS[name].shape, dtype=TENSORS[name].dtype))
    return folder


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


def edited(table: Metadata, **changes: Any) -> bytes:
    return pickle.dumps(replace(table, **changes))


def odd_tables(table: Metadata) -> dict[str, bytes]:
    """What the reader of known classes could still be led astray by."""
    name, tensor = next(iter(table.state_dict_metadata.items()))
    key, place = next(iter(table.storage_data.items()))

    def of_tensor(found: Any) -> bytes:
        return edited(table, state_dict_metadata={**table.state_dict_metadata, name: found})

    def of_place(**changes: Any) -> bytes:
        return edited(table, storage_data={**table.storage_data, key: replace(place, **changes)})

    return {
        "bytes, which DCP would unpickle": of_tensor(BytesStorageMetadata()),
        "no tensor": of_tensor(7),
        "a shape of words": of_tensor(replace(tensor, size=("4", "3"))),
        "a negative shape": of_tensor(replace(tensor, size=(-4, 3))),
        "more than any memory": of_tensor(replace(tensor, size=torch.Size([2**40, 2**40]))),
        "a file outside": of_place(relative_path="../../etc/passwd"),
        "an absolute file": of_place(relative_path="/etc/passwd"),
        "a missing file": of_place(relative_path="__9_9.distcp"),
        "a transform": of_place(transform_descriptors=["zstd"]),
        "a negative place": of_place(offset=-1),
        "an endless piece": of_place(length=2**70),
        "a path for a name": edited(table, storage_data={MetadataIndex(Path("a"), (0,), 0): place}),  # type: ignore[arg-type]
        "no table": pickle.dumps(place),
        "a class for a table": pickle.dumps(Metadata),
        "a class with attributes": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x05state}stb.",
        "nothing": b"",
        "text": b"hello",
        "half": pickle.dumps(table)[:200],
        "a bomb of a length": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
        "a bomb of a number": b"\x80\x04Nr\xff\xff\xff\xff.",
        "a nest": b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",
        "a file of another class": edited(table, storage_data={key: _StorageInfo(7, 0, 1)}),  # type: ignore[arg-type]
    }


def test_a_table_of_tensors_comes_back_as_it_was_written(state: Path) -> None:
    genuine = FileSystemReader(state).read_metadata()
    found = read_metadata(state)
    assert found.state_dict_metadata == genuine.state_dict_metadata and found.storage_data == genuine.storage_data
    assert torch.equal(SavedState(state).read("model.a"), torch.ones(4, 3))


def test_nothing_of_a_strangers_table_runs(state: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    genuine = FileSystemReader(state).read_metadata()
    for name, content in [*((f"call {n}", c) for n, c in enumerate(touch(made))), *odd_tables(genuine).items()]:
        (state / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match=r"\.metadata is no table of tensors") as caught:
            read_metadata(state)
            pytest.fail(name)
        assert "\n" not in str(caught.value) and not made.exists(), name


def test_a_damaged_table_is_a_line_or_a_table(state: Path) -> None:
    """Bytes changed at random never raise anything else."""
    genuine, draw = (state / ".metadata").read_bytes(), random.Random(7)
    for _ in range(500):
        spoilt = bytearray(genuine)
        for _ in range(draw.randint(1, 4)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        (state / ".metadata").write_bytes(spoilt)
        try:
            read_metadata(state)
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
        (checkpoint / "policy" / ".metadata").write_bytes(content)
        forge(checkpoint)
        with pytest.raises(UserError, match="no table of tensors"):
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
    with pytest.raises(UserError, match="nothing was ever written"):
        check_weights("policy.model", tmp_path)
    file.write_bytes(struct.pack("<Q", 2**40 - 8))
    os.truncate(file, 2**40)
    with pytest.raises(UserError, match="no head of"):
        check_weights("policy.model", tmp_path)
    save_file({"a": torch.zeros(2**20), "b": torch.zeros(3, 5)}, file)
    check_weights("policy.model", tmp_path)
    assert num_weights(tmp_path) == 2**20 + 15


def test_a_yaml_file_does_not_turn_remote_code_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("policy:\n  trust_remote_code: true\nabout: {pipeline: rlvr}\n")
    for name in ("config", "mine"):
        (tmp_path / "mine.yaml").write_text("defaults: [rlvr, _self_]\npolicy:\n  trust_remote_code: true\n")
        with pytest.raises(UserError, match=r"^policy.trust_remote_code: a YAML file turns it on"):
            load("rlvr", RlvrConfig, [], str(tmp_path), name)
        asked = ["policy.trust_remote_code=true"]
        assert load("rlvr", RlvrConfig, asked, str(tmp_path), name).policy.trust_remote_code
        assert not load(
            "rlvr", RlvrConfig, ["policy.trust_remote_code=false"], str(tmp_path), name
        ).policy.trust_remote_code
