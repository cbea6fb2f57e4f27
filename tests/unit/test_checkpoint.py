"""Checkpoints at world size 1: what is saved comes back, what is torn does not, a full disk changes nothing."""

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint import Checkpointer, finished
from spmd_rl.checkpoint.directory import CheckpointDir
from spmd_rl.checkpoint.export import ALONE, turn_of, write_hf
from spmd_rl.checkpoint.manifest import Manifest, TornCheckpoint
from spmd_rl.config.schema import CheckpointConfig
from spmd_rl.distributed import World, solo
from spmd_rl.distributed.membership import nodes_of
from spmd_rl.train.state import SavedState, Shard, TensorSpec, read_state, staged, write_safetensors, write_state

FILE = "policy/00000.safetensors"


def shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    """Each of them whole, and for this rank to write."""
    return [Shard(f"model/{name}", tuple(t.shape), (0,) * t.ndim, t, True) for name, t in tensors.items()]


class FakeRole:
    """A few tensors and a counter, saved as every backend saves its own."""

    def __init__(self, seed: int = 0, size: int = 1000) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {"w": torch.randn(size, generator=generator), "step": torch.tensor(0.0)}
        self.updates = 0

    def train(self) -> None:
        self.tensors["w"] += 1
        self.tensors["step"] += 1
        self.updates += 1

    def awake(self):
        return nullcontext()

    def save(self, folder: Path) -> list[Path]:
        return write_state(folder / "00000.safetensors", shards(self.tensors), {})

    def stage(self, folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        kept = staged(shards(self.tensors))
        return lambda on_progress: write_state(folder / "00000.safetensors", kept, {}, on_progress)

    def load(self, folder: Path) -> None:
        read_state(shards(self.tensors), SavedState.open(folder))

    def counters(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_counters(self, counters: dict[str, int]) -> None:
        self.updates = counters["updates"]


class Part:
    """Any Stateful."""

    def __init__(self) -> None:
        self.held: dict = {"cursor": 0}

    def state(self) -> dict:
        return dict(self.held)

    def load_state(self, state: dict) -> None:
        self.held = state


class Job:
    """One start of a program: a role, a part, a checkpointer."""

    def __init__(self, world: World, run_dir: Path, export: Callable | None = None, size: int = 1000, **cfg) -> None:
        self.role, self.part = FakeRole(size=size), Part()
        settings = CheckpointConfig(**{"every": 1, **cfg})
        self.saver = Checkpointer(settings, run_dir, world, {"policy": self.role}, {"part": self.part}, export)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.role.train()
            self.part.held = {"cursor": step, "mean": 0.1 * step, "names": ["a", None, True]}
            self.saver.maybe_save(step)


def saved(run_dir: Path, steps: int, **cfg) -> Job:
    with solo() as world:
        job = Job(world, run_dir, **cfg)
        assert job.saver.restore() == 0
        job.train(1, steps)
        return job


def resumed(run_dir: Path, **cfg) -> tuple[int, Job]:
    with solo() as world:
        job = Job(world, run_dir, **cfg)
        return job.saver.restore(), job


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_what_is_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    before = saved(tmp_path, 3)
    step, after = resumed(tmp_path)
    assert step == 3
    assert torch.equal(after.role.tensors["w"], before.role.tensors["w"])
    assert (after.role.updates, after.part.held) == (3, before.part.held)
    assert names(tmp_path) == ["latest", "step-000002", "step-000003"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000003\n"


def test_the_manifest_names_every_file_with_size_and_hash(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    directory = tmp_path / "checkpoints" / "step-000001"
    body = json.loads((directory / "manifest.json").read_text())
    assert (body["step"], body["world_size"], body["format"]) == (1, 1, 1)
    assert set(body["files"]) == {FILE, "state.json"}
    assert all(entry["size"] == (directory / name).stat().st_size for name, entry in body["files"].items())
    assert json.loads((directory / "state.json").read_text())["parts"]["part"]["cursor"] == 1


@pytest.mark.parametrize(("every", "last", "expected"), [(0, False, []), (0, True, [4]), (2, False, [2, 4])])
def test_when_it_saves(tmp_path: Path, every: int, last: bool, expected: list[int]) -> None:
    with solo() as world:
        job = Job(world, tmp_path, every=every, keep=9)
        for step in range(1, 5):
            job.saver.maybe_save(step, last=last and step == 4)
    assert CheckpointDir(tmp_path / "checkpoints").steps() == expected


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    content = path.read_bytes()
    outside = path.parents[4] / "outside"
    outside.write_bytes(content)
    path.unlink()
    path.symlink_to(outside)


class Bomb:
    """Shows itself when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


DAMAGE = {
    "shard cut short": lambda d: truncate(d / FILE),
    "flipped byte": lambda d: flip(d / FILE),
    "flipped byte in the state": lambda d: flip(d / "state.json"),
    "manifest cut short": lambda d: truncate(d / "manifest.json"),
    "flipped byte in the manifest": lambda d: flip(d / "manifest.json"),
    "no manifest": lambda d: (d / "manifest.json").unlink(),
    "missing file": lambda d: (d / "state.json").unlink(),
    "extra file": lambda d: (d / "extra.txt").write_text("x"),
    "link": lambda d: link(d / FILE),
    "other content": lambda d: (d / FILE).write_bytes(pickle.dumps(Bomb())),
    "all gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_never_loaded(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    saved(tmp_path, 2)
    DAMAGE[damage](tmp_path / "checkpoints" / "step-000002")
    loads: list[Path] = []
    monkeypatch.setattr(FakeRole, "load", lambda self, folder: loads.append(folder.parent))
    step, job = resumed(tmp_path)
    assert (step, job.part.held["cursor"], [path.name for path in loads]) == (1, 1, ["step-000001"])
    assert "warning: resuming from step-000001: step-000002 is torn (" in capfd.readouterr().err
    DAMAGE[damage](tmp_path / "checkpoints" / "step-000001")
    with pytest.raises(UserError, match="no checkpoint to load in .*: step-000002 is torn"):
        resumed(tmp_path)
    with pytest.raises(UserError, match="step-000001 is torn"):
        resumed(tmp_path, resume=str(tmp_path / "checkpoints" / "step-000001"))
    assert len(loads) == 1
    assert not (tmp_path / "exploded").exists()


def test_a_torn_checkpoint_is_written_again(tmp_path: Path) -> None:
    straight = saved(tmp_path, 3)
    flip(tmp_path / "checkpoints" / "step-000003" / FILE)
    with solo() as world:
        job = Job(world, tmp_path)
        assert job.saver.restore() == 2
        job.train(3, 3)
    step, job = resumed(tmp_path)
    assert step == 3 and torch.equal(job.role.tensors["w"], straight.role.tensors["w"])
    assert names(tmp_path) == ["latest", "step-000002", "step-000003"]


def test_never_refuses_a_used_directory(tmp_path: Path) -> None:
    assert resumed(tmp_path, resume="never")[0] == 0
    (tmp_path / "metrics.jsonl").touch()
    assert resumed(tmp_path, resume="never")[0] == 0
    saved(tmp_path, 1)
    with pytest.raises(UserError, match=r"checkpoint\.resume=never, but run\.dir="):
        resumed(tmp_path, resume="never")


def test_a_path_outside_the_run(tmp_path: Path) -> None:
    saved(tmp_path / "one", 2)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "one" / "checkpoints" / "step-000001", copy)
    step, job = resumed(tmp_path / "two", resume=str(copy))
    assert (step, job.part.held["cursor"]) == (1, 1)
    with pytest.raises(UserError, match="nowhere is torn"):
        resumed(tmp_path / "two", resume=str(tmp_path / "nowhere"))


def test_a_run_begun_from_anothers_checkpoint_goes_on_from_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "one", 2)
    saved(tmp_path / "two", 3)
    other = str(tmp_path / "one" / "checkpoints" / "step-000002")
    assert resumed(tmp_path / "two", resume=other)[0] == 3
    assert resumed(tmp_path / "three", resume=other)[0] == 2
    own = str(tmp_path / "two" / "checkpoints" / "step-000002")
    assert resumed(tmp_path / "two", resume=own)[0] == 2, "a path of its own takes the run back"


def test_a_checkpoint_of_another_model_is_one_clear_line(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(UserError, match="does not fit this model") as caught:
        resumed(tmp_path, size=999)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("saved_names", "own_names", "word"), [("ab", "a", "checkpoint has"), ("a", "ab", "model has")]
)
def test_a_model_with_other_tensors_is_refused(tmp_path: Path, saved_names: str, own_names: str, word: str) -> None:
    write_state(tmp_path / "0.safetensors", shards({name: torch.zeros(2) for name in saved_names}), {})
    with pytest.raises(ValueError, match=f"only (this|the) {word} model/b"):
        read_state(shards({name: torch.zeros(2) for name in own_names}), SavedState.open(tmp_path))


def test_a_checkpoint_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read as a saved state: .* of an earlier version"):
        SavedState.open(tmp_path)


def test_pieces_of_any_cut_come_together_in_any_other(tmp_path: Path) -> None:
    """Rows that several ranks wrote, one of them as two pieces, read as columns."""
    whole = torch.arange(35.0).view(7, 5)
    cuts = [[slice(0, 2)], [slice(2, 3), slice(3, 6)], [slice(6, 7)]]
    for number, rows in enumerate(cuts):
        mine = [Shard("model/w", (7, 5), (one.start, 0), whole[one], True) for one in rows]
        write_state(tmp_path / f"{number}.safetensors", mine, {})
    target = torch.zeros(7, 2)
    read_state([Shard("model/w", (7, 5), (0, 3), target, False)], SavedState.open(tmp_path))
    assert torch.equal(target, whole[:, 3:])
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(UserError, match="model/w is not complete"):
        SavedState.open(tmp_path)


def test_tensors_of_several_dtypes_come_back_as_they_were(tmp_path: Path) -> None:
    wanted = {str(d): torch.arange(5).to(d) for d in (torch.float32, torch.bfloat16, torch.float64, torch.int64)}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    written = write_state(tmp_path / "0.safetensors", shards(wanted), {})
    assert {path.name for path in written} == set(os.listdir(tmp_path))
    read_state(shards(found), SavedState.open(tmp_path))
    assert [tensor.dtype for tensor in found.values()] == [tensor.dtype for tensor in wanted.values()]
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_tensors_that_end_early_leave_no_hole_and_no_more_are_taken_than_are_named(tmp_path: Path) -> None:
    one = torch.ones(2)
    specs = {name: TensorSpec(one.dtype, (2,)) for name in "ab"}
    coming = iter([(name, one) for name in "abc"])
    write_safetensors(tmp_path / "whole", specs, coming, {})
    assert next(coming)[0] == "c"  # the next file's
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path / "short", specs, [("a", one)], {})


def test_a_role_must_say_which_files_it_wrote(tmp_path: Path) -> None:
    with solo() as world:
        job = Job(world, tmp_path)
        save = job.role.save
        job.role.save = lambda folder: save(folder)[1:]
        with pytest.raises(AssertionError, match="that no rank reported"):
            job.saver.maybe_save(1)


def test_a_crash_before_latest_moves_resumes_from_what_it_names(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    (tmp_path / "checkpoints" / "latest").write_text("step-000001\n")
    assert resumed(tmp_path)[0] == 1
    (tmp_path / "checkpoints" / "latest").unlink()
    assert resumed(tmp_path)[0] == 2


def test_what_a_killed_save_left_is_cleaned(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    left = tmp_path / "checkpoints" / ".step-000002.tmp-0123abcd"
    left.mkdir()
    (left / "00000.safetensors").write_text("half")
    (tmp_path / "checkpoints" / ".step-000002.tmp-0123abcd-latest").write_text("step")
    assert resumed(tmp_path)[0] == 1
    assert names(tmp_path) == ["latest", "step-000001"]


def test_keep_never_removes_the_latest(tmp_path: Path) -> None:
    with solo() as world:
        job = Job(world, tmp_path, keep=3)
        job.train(1, 5)
    assert CheckpointDir(tmp_path / "checkpoints").steps() == [3, 4, 5]
    (tmp_path / "checkpoints" / "latest").write_text("step-000003\n")
    CheckpointDir(tmp_path / "checkpoints").prune(1, 5)
    assert CheckpointDir(tmp_path / "checkpoints").steps() == [3, 5]


def test_finished(tmp_path: Path) -> None:
    cfg = CheckpointConfig()
    with solo() as world:
        assert finished(cfg, tmp_path, 2, world) is None
        saved(tmp_path, 2)
        assert finished(cfg, tmp_path, 2, world) == finished(cfg, tmp_path, 1, world) == 2
        assert finished(cfg, tmp_path, 3, world) is None
        assert finished(CheckpointConfig(resume="never"), tmp_path, 2, world) is None
        truncate(tmp_path / "checkpoints" / "step-000002" / "state.json")
        assert finished(cfg, tmp_path, 2, world) is None


def test_a_chosen_checkpoint_that_leaves_nothing_to_do_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "one", 2)
    chosen = CheckpointConfig(resume=str(tmp_path / "one" / "checkpoints" / "step-000002"))
    with solo() as world:
        for place in ("one", "two"):
            assert finished(chosen, tmp_path / place, 3, world) is None
            with pytest.raises(UserError, match="step-000002 is at step 2 already; to continue, set steps above 2"):
                finished(chosen, tmp_path / place, 2, world)
        saved(tmp_path / "two", 3)
        assert finished(chosen, tmp_path / "two", 3, world) == 3, "begun from it, it goes on from its own"


def unchanged_after_failure(run_dir: Path, fail: Callable[[Job], None], match: str) -> None:
    """`fail` must end in a UserError, and leave the checkpoint of step 1 and nothing else."""
    with solo() as world:
        job = Job(world, run_dir, size=200_000)
        job.train(1, 1)
        job.role.train()
        with pytest.raises(UserError, match=match) as caught:
            fail(job)
        assert "\n" not in str(caught.value) and "step-000002" in str(caught.value)
        assert names(run_dir) == ["latest", "step-000001"]
    assert resumed(run_dir, size=200_000)[0] == 1


def test_a_file_size_limit_leaves_the_previous_one(tmp_path: Path) -> None:
    def fail(job: Job) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            job.saver.maybe_save(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    unchanged_after_failure(tmp_path, fail, "could not be written: File too large")


def test_a_full_disk_leaves_the_previous_one(tmp_path: Path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        unchanged_after_failure(tmp_path, lambda job: job.saver.maybe_save(2), "No space left on device")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("where", ["manifest.Manifest.write", "directory.os.rename", "directory.os.replace"])
def test_an_error_at_the_end_leaves_the_previous_one_loadable(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with solo() as world:
        job = Job(world, tmp_path)
        job.train(1, 1)
        with monkeypatch.context() as patch:
            patch.setattr(f"spmd_rl.checkpoint.{where}", full)
            with pytest.raises(UserError, match="No space left"):
                job.train(2, 2)
        assert resumed(tmp_path)[0] == 1
        job.train(2, 2)
    assert resumed(tmp_path)[0] == 2


KILLS = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from spmd_rl.distributed import solo
from tests.unit.test_checkpoint import Job

def die_at(call):
    left = iter(range(call))
    def watch(event, args):
        if event in ("open", "os.rename", "os.mkdir", "os.remove") and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

overlap = sys.argv[2] == "overlap"
for call in map(int, sys.argv[3:]):
    if os.fork() == 0:
        run_dir = Path(sys.argv[1], str(call))
        with solo() as world:
            job = Job(world, run_dir, overlap=overlap)
            job.train(1, 1 + overlap)
            die_at(call)
            job.train(2 + overlap, 2 + overlap)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("how", ["plain", "overlap"])
def test_kill_9_during_a_save_leaves_one_to_load(how: str, tmp_path: Path) -> None:
    """In other processes: killed at each of the system calls that a save makes on its way.

    With `overlap` these are of a thread that still writes the second, of its seal, and of the third.
    """
    calls = range(1, 24)
    command = [sys.executable, "-c", KILLS, str(tmp_path), how, *map(str, calls)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    found = {}
    for call in calls:
        step, job = resumed(tmp_path / str(call))
        assert step == job.role.updates == job.part.held["cursor"]
        assert not [name for name in names(tmp_path / str(call)) if ".tmp-" in name]
        found[step] = found.get(step, 0) + 1
    assert found.keys() == {1, 2} and found[1] >= 8, found


def test_disagreeing_state_is_refused(tmp_path: Path) -> None:
    with solo() as world:
        job = Job(world, tmp_path)
        asked: list[str] = []
        world.agree = lambda name, value: asked.append(name)
        job.train(1, 1)
        assert asked == ["save: state"]


def test_a_manifest_must_not_name_files_outside(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    directory = tmp_path / "checkpoints" / "step-000001"
    genuine = Manifest.read(directory)
    (directory.parent / "loose").write_text("x")
    Manifest(1, 1, genuine.files | {"../loose": genuine.files["state.json"]}).write(directory)
    with pytest.raises(TornCheckpoint, match=r"\.\./loose is missing"):
        Manifest.read(directory)


def test_export_is_sharded_and_complete(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.models import tiny

    source = tiny("llama", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    weights = [(name, tensor + 1) for name, tensor in model.state_dict().items()]
    for limit, count, ranks in ((10**9, 1, 1), (100_000, 5, 1), (10**9, 1, 2), (100_000, 5, 3)):
        path, own = tmp_path / f"out{count}of{ranks}", []
        for turn in range(ranks):
            own.append(write_hf(iter(weights), source, path, (turn, ranks), lambda: None, max_shard_bytes=limit))
        assert sorted(sum(own, [])) == sorted(path.iterdir()), "every file is reported by one rank"
        shares = [sum(file.suffix == ".safetensors" for file in written) for written in own]
        assert shares == [len(range(turn, count, ranks)) for turn in range(ranks)]
        files = list(path.glob("*.safetensors"))
        assert (len(files) == 1) == (count == 1), files
        assert not (path / "pytorch_model.bin").exists()
        back = AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert all(torch.equal(back[name], tensor) for name, tensor in weights)
        assert (
            AutoTokenizer.from_pretrained(path)("ab")["input_ids"]
            == AutoTokenizer.from_pretrained(source)("ab")["input_ids"]
        )
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"


def test_files_of_an_export_go_to_all_nodes_before_a_second_rank_of_one_writes() -> None:
    def in_turn(nodes: list[int]) -> list[int]:
        size = len(nodes)
        return sorted(range(size), key=lambda rank: turn_of(SimpleNamespace(rank=rank, size=size, nodes=nodes)))

    assert in_turn([0] * 4 + [4] * 4 + [8] * 4) == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert in_turn([0, 0, 2, 3]) == [0, 2, 3, 1]
    assert in_turn([0, 0, 0, 0, 4, 4]) == [0, 4, 1, 5, 2, 3]


@pytest.mark.parametrize(
    ("said", "nodes"),
    [
        ([(0, 2), (0, 2), (2, 1), (3, 1)], (0, 0, 2, 3)),
        ([(0, 2), (1, 2), (1, 2), (2, 2)], (0, 1, 2, 3)),  # two nodes in turns
        ([(0, 4)] * 4, (0, 0, 0, 0)),
    ],
)
def test_ranks_that_do_not_count_node_by_node_share_no_memory(said, nodes) -> None:
    assert nodes_of(said) == nodes


def test_a_failing_export_still_goes_through_all_weights(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    passed: list[str] = []

    def weights():
        for name in "abc":
            yield name, torch.zeros(2)
            passed.append(name)

    with pytest.raises(OSError):
        write_hf(weights(), tmp_path, tmp_path / "file" / "hf", turn=ALONE, progress=lambda: None, max_shard_bytes=1)
    assert passed == ["a", "b", "c"]


def test_an_export_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    def export(path: Path) -> list[Path]:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"weights")
        return [path / "model.safetensors"]

    with solo() as world:
        job = Job(world, tmp_path, export, every=1)
        job.saver.maybe_save(1)
        job.saver.maybe_save(2, last=True)
    root = tmp_path / "checkpoints"
    assert not (root / "step-000001" / "hf").exists()
    assert "hf/model.safetensors" in Manifest.read(root / "step-000002").files
    (root / "step-000002" / "hf").rename(tmp_path / "taken")
    assert resumed(tmp_path)[0] == 2  # an export is no state
    (tmp_path / "taken").rename(root / "step-000002" / "hf")
    flip(root / "step-000002" / "hf" / "model.safetensors")
    assert resumed(tmp_path)[0] == 1
