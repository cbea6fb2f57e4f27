"""`Checkpointer`: saves and restores everything `Stateful` as one thing, or not at all.

Every rank runs every line. What only one rank can know (a full disk, a torn file) is gathered before anybody acts on
it, so that all ranks save, resume or stop together.
"""

import hashlib
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch.distributed

from spmd_rl.checkpoint import manifest, shards
from spmd_rl.checkpoint.manifest import Manifest, Torn
from spmd_rl.checkpoint.shelf import Shelf
from spmd_rl.config.schema import CheckpointConfig
from spmd_rl.distributed import World
from spmd_rl.distributed.membership import FOREVER
from spmd_rl.errors import UserError
from spmd_rl.train.base import Role

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


class Stateful(Protocol):
    """Whatever must survive a restart beside the backends' tensors."""

    def state(self) -> dict[str, Any]:
        """[all] Plain JSON values, equal on all ranks."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """[all] The inverse."""
        ...


class Checkpointer:
    """The checkpoints of one run.

    Example: `Checkpointer(cfg.checkpoint, run_dir, world, {"policy": policy}, {"rollouts": rollouts, "track": track})`.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        run_dir: Path,
        world: World,
        backends: Mapping[str, Role],
        parts: Mapping[str, Stateful],
        export: Callable[[Path], None] | None = None,
    ) -> None:
        """[all] `export` writes a Hugging Face directory (see `HfExport`); it is called on all ranks."""
        self._cfg = cfg
        self._run_dir = run_dir
        self._shelf = Shelf(run_dir / "checkpoints")
        self._world = world
        self._backends = dict(backends)
        self._parts = dict(parts)
        self._export = export
        # DCP's own collectives must not mix with training's, and are not NCCL's business.
        formed = torch.distributed.is_initialized()
        self._group = torch.distributed.new_group(backend="gloo", timeout=FOREVER) if formed else None

    def maybe_save(self, step: int, last: bool = False) -> None:
        """[all] Save if `step` is due, or `last`. UserError on all ranks if any could not write."""
        if not (last or (self._cfg.every and step % self._cfg.every == 0)):
            return
        with self._world.phase("save"), ExitStack() as awake:
            for backend in self._backends.values():
                awake.enter_context(backend.awake())
            self._save(step, export=last or self._cfg.export_hf)

    def restore(self) -> int:
        """[all] Load what `checkpoint.resume` asks for; returns its step, 0 if there is none.

        A torn checkpoint is never loaded: `auto` falls back to the one before it, with a warning. UserError where all
        are torn, where the given path is, and for `never` in a used directory.
        """
        with self._world.phase("restore"), ExitStack() as awake:
            found = self._choose()
            if found is None:
                return 0
            for backend in self._backends.values():
                awake.enter_context(backend.awake())
            return self._load(found)

    # Saving

    def _save(self, step: int, export: bool) -> None:
        state = self._state(step)
        nonce = self._world.broadcast("save: begin", secrets.token_hex(4))  # [all]
        temporary = self._shelf.temporary(step, nonce)

        def attempt(name: str, share: Callable[[], Any]) -> list[Any]:
            return self._attempt(name, share, step, temporary)

        attempt("save: directory", self._on_rank_0(lambda: temporary.mkdir(parents=True)))
        attempt("save: shards", lambda: self._write_shards(temporary))
        if export and self._export is not None:
            attempt("save: export", lambda: self._export(temporary / "hf"))
        attempt("save: state", self._on_rank_0(lambda: (temporary / "state.json").write_bytes(state)))
        entries = attempt("save: hashes", lambda: self._vouch(temporary))
        files = {name: manifest.Entry(*entry) for record in entries for name, entry in record.items()}
        complete = Manifest(step, self._world.size, files)
        attempt("save: publish", self._on_rank_0(lambda: self._publish(complete, temporary)))

    def _attempt(self, name: str, share: Callable[[], Any], step: int, temporary: Path) -> list[Any]:
        """[all] Do this rank's share of a write; what all ranks returned. If it failed on any, all raise the same."""
        result, reason = None, None
        try:
            result = share()
        except OSError as error:
            reason = error.strerror or str(error)
        outcomes = self._world.gather(name, {"result": result, "reason": reason})
        reasons = [outcome["reason"] for outcome in outcomes if outcome["reason"]]
        if reasons:
            if self._world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(f"checkpoint {self._shelf.path(step)} could not be written: {reasons[0]}")
        return [outcome["result"] for outcome in outcomes]

    def _on_rank_0(self, write: Callable[[], object]) -> Callable[[], None]:
        def share() -> None:
            if self._world.rank == 0:
                write()

        return share

    def _state(self, step: int) -> bytes:
        """[all] Everything but tensors, as JSON; the ranks must agree on it to the bit."""
        state = {
            "step": step,
            "backends": {name: backend.counters() for name, backend in self._backends.items()},
            "parts": {name: part.state() for name, part in self._parts.items()},
        }
        encoded = msgspec.json.encode(state, order="sorted")
        self._world.agree("save: state", hashlib.blake2b(encoded, digest_size=16).hexdigest())
        return msgspec.json.format(encoded, indent=1)

    def _write_shards(self, temporary: Path) -> None:
        state = {name: backend.state_dict() for name, backend in self._backends.items()}
        with self._world.collective("save: shards", "copy"):  # [all]
            shards.save(state, temporary, self._group, self._world.progress)

    def _vouch(self, temporary: Path) -> dict[str, tuple[int, str]]:
        """Flush and hash the files this rank wrote: its shards; rank 0 everything else too."""
        record = {}
        for name in manifest.list_files(temporary):
            match = _SHARD.fullmatch(name)
            if (int(match[1]) if match else 0) == self._world.rank:
                manifest.sync(temporary / name)
                entry = manifest.hash_file(temporary / name, self._world.progress)
                record[name] = (entry.size, entry.hash)
        return record

    def _publish(self, complete: Manifest, temporary: Path) -> None:
        complete.write(temporary)
        for folder in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            manifest.sync(folder)
        self._shelf.publish(temporary, complete.step)
        self._shelf.prune(self._cfg.keep, complete.step)

    # Restoring

    def _choose(self) -> Path | None:
        """[all] The checkpoint to load, verified; None for a fresh start."""
        word = self._world.broadcast("restore: candidates", self._look() if self._world.rank == 0 else None)
        if word["error"]:
            raise UserError(word["error"])
        problems = []
        for path in map(Path, word["candidates"]):
            problem = self._problem(path)
            if problem is None:
                if self._world.rank == 0 and problems:
                    print(f"warning: resuming from {path.name}: {'; '.join(problems)}", file=sys.stderr, flush=True)
                return path
            problems.append(f"{path.name} is torn ({problem})")
        if problems:
            raise UserError(f"no checkpoint to load in {path.parent}: {'; '.join(problems)}")
        return None

    def _look(self) -> dict[str, Any]:
        """Rank 0 alone: which checkpoints `checkpoint.resume` means, best first."""
        resume = self._cfg.resume
        try:
            self._shelf.clean()
            steps = self._shelf.candidates()
            if resume == "auto" or (
                steps and _from_elsewhere(resume, self._shelf)
            ):  # begun there, it goes on from here
                return {"candidates": [str(self._shelf.path(step)) for step in steps], "error": None}
            metrics = self._run_dir / "metrics.jsonl"
            used = bool(steps) or (metrics.exists() and metrics.stat().st_size > 0)
        except OSError as error:
            return {"candidates": [], "error": f"{self._shelf.root}: {error.strerror}"}
        if resume != "never":
            return {"candidates": [str(Path(resume).expanduser().absolute())], "error": None}
        error = f"checkpoint.resume=never, but run.dir={self._run_dir} already holds a run" if used else None
        return {"candidates": [], "error": error}

    def _problem(self, path: Path) -> str | None:
        """[all] Why a checkpoint cannot be trusted; None if every byte is as its manifest says."""
        word = None
        if self._world.rank == 0:
            try:
                files = Manifest.read(path).files
                word = {"problem": None, "files": [(name, entry.hash) for name, entry in files.items()]}
            except Torn as torn:
                word = {"problem": str(torn)}
        word = self._world.broadcast("restore: manifest", word)
        if word["problem"]:
            return word["problem"]
        mine = word["files"][self._world.rank :: self._world.size]
        wrong = [problem for name, expected in mine if (problem := self._differs(path / name, name, expected))]
        return next((problem for found in self._world.gather("restore: hashes", wrong) for problem in found), None)

    def _differs(self, path: Path, name: str, expected: str) -> str | None:
        try:
            found = manifest.hash_file(path, self._world.progress).hash
        except OSError as error:
            return f"{name}: {error.strerror} on rank {self._world.rank}; is the directory shared by all nodes?"
        return None if found == expected else f"{name} does not have the content that its manifest vouches for"

    def _load(self, path: Path) -> int:
        """[all] Load a checkpoint that has been verified."""
        text = (path / "state.json").read_text(encoding="utf-8") if self._world.rank == 0 else None
        state = msgspec.json.decode(self._world.broadcast("restore: state", text))
        for kind, own in (("backends", self._backends), ("parts", self._parts)):
            if state[kind].keys() != own.keys():
                theirs, ours = ", ".join(sorted(state[kind])), ", ".join(sorted(own))
                raise UserError(f"{path} holds the {kind} {theirs}; this run has {ours}")
        tensors = {name: backend.state_dict() for name, backend in self._backends.items()}
        with self._world.collective("restore: shards", "copy"):
            try:
                shards.load(tensors, path, self._group, self._world.progress)
            except ValueError as error:
                raise UserError(str(error)) from error
        for name, backend in self._backends.items():
            backend.load_state_dict(tensors[name])
            backend.load_counters(state["backends"][name])
        for name, part in self._parts.items():
            part.load_state(state["parts"][name])
        return state["step"]


def _from_elsewhere(resume: str, shelf: Shelf) -> bool:
    """Whether `checkpoint.resume` is a path of another run's. A path of this run's own takes the run back to it."""
    given = Path(resume).expanduser().absolute()
    return resume not in ("auto", "never") and given.parent != shelf.root.absolute()


def finished(cfg: CheckpointConfig, run_dir: Path, steps: int, world: World) -> bool:
    """[all] Whether the run directory already holds a whole checkpoint of step `steps` or later.

    Looks at names and sizes only, so that a door can ask before it loads anything.
    """
    done = False
    shelf = Shelf(run_dir / "checkpoints")
    if world.rank == 0 and (cfg.resume == "auto" or _from_elsewhere(cfg.resume, shelf)):
        latest = shelf.latest()
        if latest is not None and latest >= steps:
            try:
                done = Manifest.read(shelf.path(latest)).step == latest
            except Torn:
                done = False
    return world.broadcast("restore: finished", done)
