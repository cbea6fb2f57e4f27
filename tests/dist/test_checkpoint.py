"""Checkpoints over real ranks: FSDP2 shards of 2 ranks load on 1, 2 and 4; what one rank sees, all act on."""

import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint import Checkpointer, manifest
from spmd_rl.config.schema import CheckpointConfig
from spmd_rl.distributed import World
from spmd_rl.model.load import local, owned_region
from spmd_rl.train.state import SavedState, Shard, read_state, staged, write_state
from tests.dist.harness import launch, run_ranks


class Toy:
    """A sharded two-layer model with AdamW; each rank trains on the same batch, so that the world size is no matter."""

    def __init__(self, world: World, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))  # odd sizes: uneven shards
        fully_shard(self.model, mesh=world.mesh(dp=world.size))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.updates, self.world = 0, world
        for p in self.model.parameters():
            self.optimizer.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p]["step"] = torch.zeros(())

    def train(self) -> None:
        self.model(torch.linspace(-1, 1, 12).reshape(2, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1

    def digest(self) -> str:
        """Of every weight and moment, whole."""
        digest = hashlib.blake2b()
        for parameter in self.model.parameters():
            state = self.optimizer.state.get(parameter, {})
            for tensor in (parameter.detach(), state.get("exp_avg"), state.get("exp_avg_sq")):
                if tensor is not None:
                    digest.update(tensor.full_tensor().numpy().tobytes())
        return digest.hexdigest()

    def awake(self):
        return nullcontext()

    def state(self) -> list[Shard]:
        steps = [p["step"] for p in self.optimizer.state.values()]
        found = [Shard(f"optimizer/step/{i}", (), (), step, self.world.rank == 0) for i, step in enumerate(steps)]
        for name, p in self.model.named_parameters():
            begin = [piece.start for piece in owned_region(p)]
            for prefix, tensor in {"model": p, **self.optimizer.state[p]}.items():
                if prefix != "step":
                    found.append(Shard(f"{prefix}/{name}", tuple(p.shape), begin, local(tensor.detach()), True))
        return found

    def save(self, folder: Path) -> list[Path]:
        return write_state(folder / f"{self.world.rank}.safetensors", self.state(), {})

    def stage(self, folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        kept = staged(self.state())
        return lambda on_progress: write_state(folder / f"{self.world.rank}.safetensors", kept, {}, on_progress)

    def load(self, folder: Path) -> None:
        read_state(self.state(), SavedState.open(folder, self.world))

    def counters(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_counters(self, counters: dict[str, int]) -> None:
        self.updates = counters["updates"]


def open_job(world: World, run_dir: str, **cfg) -> tuple[Toy, Checkpointer]:
    toy = Toy(world, seed=len(run_dir) + world.size)  # what a restore must overwrite
    return toy, Checkpointer(CheckpointConfig(**{"every": 1, **cfg}), Path(run_dir), world, {"policy": toy}, {})


def train(world: World, run_dir: str, last: int) -> list:
    """Restore, train to step `last`; the step restored, and the digest of everything there and after each step."""
    toy, saver = open_job(world, run_dir, keep=9)
    first = saver.restore()
    digests = [toy.digest()]
    for step in range(first + 1, last + 1):
        toy.train()
        digests.append(toy.digest())
        saver.maybe_save(step)
    return [first, toy.updates, digests]


def test_two_ranks_load_on_one_two_and_four(tmp_path: Path) -> None:
    _, _, straight = run_ranks(2, train, str(tmp_path / "straight"), 4)[0]
    for size in (1, 2, 4):
        copy = tmp_path / f"on{size}"
        shutil.copytree(tmp_path / "straight", copy)
        (copy / "checkpoints" / "latest").write_text("step-000002\n")
        results = run_ranks(size, train, str(copy), 4)
        assert results == [results[0]] * size
        first, updates, digests = results[0]
        assert (first, updates, digests[0]) == (2, 4, straight[2])
        if size == 2:
            assert digests == straight[2:]


def save_with_one_full_disk(world: World, run_dir: str) -> list:
    """Rank 1 alone cannot write; what each rank is told, and what is left."""
    toy, saver = open_job(world, run_dir)
    toy.train()
    saver.maybe_save(1)
    if world.rank == 1:
        # The journal and this test's result are small; the shards are not.
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        world.journal.note = lambda *args, **fields: None
    told = ""
    try:
        saver.maybe_save(2)
    except UserError as error:
        told = str(error)
    names = sorted(os.listdir(Path(run_dir) / "checkpoints"))
    os.write(1, f"told {told}\n".encode())
    return [len(told) > 0, names]


def test_one_ranks_full_disk_is_everybodys_error(tmp_path: Path) -> None:
    with launch(2, save_with_one_full_disk, str(tmp_path / "run"), directory=tmp_path / "job") as job:
        job.wait(60)
        told = [line for line in job.output().splitlines() if line.startswith("told ")]
    assert len(told) == 2 and told[0] == told[1]
    assert "step-000002 could not be written: File too large" in told[0]
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["latest", "step-000001"]


def killed_behind_the_training(world: World, run_dir: str) -> None:
    """Rank 1 dies on the thread that writes its part of step 3, while all ranks train."""
    toy, saver = open_job(world, run_dir, keep=9, overlap=True)
    stage, written = toy.stage, []

    def changed(folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        write = stage(folder)

        def and_die(on_progress: Callable[[], object]) -> list[Path]:
            written.append(write(on_progress))
            if world.rank == 1 and len(written) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return written[-1]

        return and_die

    toy.stage = changed
    for step in range(1, 10):
        toy.train()
        saver.maybe_save(step)


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    # `open_job` draws weights by the length of the name
    _, _, straight = run_ranks(2, train, str(tmp_path / "straight"), 4)[0]
    with launch(2, killed_behind_the_training, str(tmp_path / "stricken"), directory=tmp_path / "job") as job:
        assert all(job.wait(60))
    assert "step-000003" not in os.listdir(tmp_path / "stricken" / "checkpoints")
    for first, updates, digests in run_ranks(2, train, str(tmp_path / "stricken"), 4):
        assert (first, updates) == (2, 4) and digests[1:] == straight[3:]


def look_apart(world: World, run_dir: str) -> str:
    """Rank 1 sees another content than rank 0, as on a disk that is not shared."""
    toy, saver = open_job(world, run_dir, resume=f"{run_dir}/checkpoints/step-000001")
    if world.rank == 1:
        manifest.hash_file = lambda path, progress: manifest.Entry(0, "other")
    try:
        saver.restore()
    except UserError as error:
        return str(error)
    return "loaded"


def test_what_one_rank_finds_torn_nobody_loads(tmp_path: Path) -> None:
    run_ranks(2, train, str(tmp_path), 1)
    told = run_ranks(2, look_apart, str(tmp_path))
    assert told[0] == told[1] and "does not match its checksum in the manifest" in told[0]


def drift(world: World, run_dir: str) -> None:
    """A counter that is not the same on all ranks must never be saved."""
    toy, saver = open_job(world, run_dir)
    toy.updates = world.rank
    saver.maybe_save(1)


def test_ranks_that_differ_do_not_save(tmp_path: Path) -> None:
    with launch(2, drift, str(tmp_path / "run"), directory=tmp_path / "job") as job:
        assert all(job.wait(60))
        assert "save: state: ranks [1] differ" in job.output()
    assert not (tmp_path / "run" / "checkpoints").exists()
