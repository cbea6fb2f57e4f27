"""`Checkpointer`: saves and restores all roles and everything `Stateful` together, or not at all.

Trainer ranks make the same calls; rank 0 writes the manifest. Errors of one rank (a full disk, a torn file) are
gathered before any rank acts on them, so that all ranks save, resume or stop together.

With `checkpoint.overlap` a save copies tensors to the host and returns. They are written while the next step runs,
after which the checkpoint is sealed. Until then the previous one is the newest.
"""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from spmd_rl.base.errors import UserError, tell
from spmd_rl.base.process import in_background
from spmd_rl.checkpoint import manifest
from spmd_rl.checkpoint.directory import CheckpointDir
from spmd_rl.checkpoint.manifest import EXPORT, Manifest, TornCheckpoint
from spmd_rl.config.resume import holds_run
from spmd_rl.config.schema import CheckpointConfig
from spmd_rl.distributed import World
from spmd_rl.train.base import Role

T = TypeVar("T")
POLL_SECONDS = 1.0


class Unsealed(Generic[T]):
    """A checkpoint in progress, invalid for readers until all ranks have sealed it with a manifest."""

    def __init__(self, step: int, temporary: Path, write: Callable[[Callable[[], object]], T]) -> None:
        """write: called with a function that it calls after each part."""
        self.step, self.temporary, self._moved = step, temporary, 0
        # The thread's work is no progress of the run during training, or it would hide a hang; it is while the run
        # waits for it.
        self._written = in_background("checkpoint", lambda: write(self._move))

    def _move(self) -> None:
        self._moved += 1

    def result(self, on_progress: Callable[[], object]) -> T:
        """Wait for `write`; return its result or raise its exception. on_progress: called after each part."""
        seen = self._moved
        # Polled, so that a write that makes progress is no stall, and one that hangs is.
        while not wait([self._written], POLL_SECONDS).done:
            if self._moved != seen:
                seen = self._moved
                on_progress()
        return self._written.result()


STATE = "state.json"
"""File of everything but tensors."""


Hashed = list[tuple[str, int, str]]
"""(relative path, bytes, hash) of the files that a rank wrote."""


class Stateful(Protocol):
    """State that must survive a restart, apart from the roles."""

    def state(self) -> dict[str, Any]:
        """[all] Return plain JSON values, equal on all ranks."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """[all] Restore the values of `state`."""
        ...


class Checkpointer:
    """The checkpoints of one run.

    Example: `Checkpointer(cfg.checkpoint, run_dir, world, {"policy": policy}, parts)`.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        run_dir: Path,
        world: World,
        roles: Mapping[str, Role],
        parts: Mapping[str, Stateful],
        export: Callable[[Path], list[Path]] | None = None,
    ) -> None:
        """roles: those whose tensors change; parts: all other state; both by name in the checkpoint. export: [all]
        writes a Hugging Face directory and returns this rank's files, see `HfExport`.
        """
        self._cfg, self._run_dir, self._world = cfg, run_dir, world
        self._dir = CheckpointDir(run_dir / "checkpoints")
        self._roles, self._parts, self._export = dict(roles), dict(parts), export
        # Both alike on all ranks, since they decide whether these meet.
        self._unsealed: Unsealed[Hashed] | None = None
        self._saved = 0

    def maybe_save(self, step: int, last: bool = False, stops: bool = False) -> None:
        """[all] Save if `step` is due, `last`, or the run `stops` after it. UserError on all ranks if any could not
        write.

        With `overlap`, the previous checkpoint is sealed first; one after which no step comes is written at once.
        """
        is_due = last or (self._cfg.every and step % self._cfg.every == 0)
        if stops:
            is_due = step != self._saved
        if not is_due and self._unsealed is None:
            return
        with self._world.phase("save"), ExitStack() as awake:
            if self._unsealed is not None:
                before, self._unsealed = self._unsealed, None
                self._seal(before.step, before.temporary, lambda: before.result(self._world.progress))  # [all]
            if is_due:
                for role in self._roles.values():
                    awake.enter_context(role.awake())
                overlap = self._cfg.overlap and not (last or stops)
                self._save(step, export=last or self._cfg.export_hf, overlap=overlap)  # [all]

    def record_hashes(self, step: int) -> None:
        """Write a hash of every trained tensor to the journal, as of the end of `step`."""
        for name, role in self._roles.items():
            self._world.journal.record(step, "weights", name, role.hashes)

    def restore(self) -> int:
        """[all] Load the checkpoint that `checkpoint.resume` selects; return its step, or 0.

        A torn checkpoint is never loaded: `auto` falls back to the one before it, with a warning. UserError if all are
        torn, if the one at the given path is, and for `never` in a used directory.
        """
        with self._world.phase("restore"), ExitStack() as awake:
            chosen = self._choose()
            if chosen is None:
                return 0
            for role in self._roles.values():
                awake.enter_context(role.awake())
            step = self._load(chosen)
            if self._world.rank == 0:
                tell(f"resumed from step {step}: {chosen}")
            return step

    # Saving

    def _save(self, step: int, export: bool, overlap: bool) -> None:
        """[all] Write everything into a temporary directory and move it; with `overlap`, in a thread."""
        self._saved = step
        state = self._state(step)  # [all]
        # A random name: ranks of an earlier, half-dead start must not write into this directory.
        nonce = self._world.broadcast("save: begin", secrets.token_hex(4))  # [all]
        temporary = self._dir.temporary(step, nonce)
        written = self._attempt("save: begin", temporary, lambda: self._begin(temporary, state))  # [all]
        staged = []
        for name, role in self._roles.items():
            folder = temporary / name
            if overlap:
                staged.append(role.stage(folder))  # [all]
            else:
                written += self._attempt(f"save: {name}", temporary, lambda r=role, f=folder: r.save(f))  # [all]
        # An export gathers all weights through all ranks, which a thread of one rank cannot do.
        if export and self._export is not None:
            written += self._attempt("save: export", temporary, lambda: self._export(temporary / EXPORT))  # [all]

        def write(on_progress: Callable[[], object]) -> Hashed:
            paths = [path for write_role in staged for path in write_role(on_progress)]
            return _hash(temporary, written + paths, on_progress)

        if overlap:
            self._unsealed = Unsealed(step, temporary, write)
        else:
            self._seal(step, temporary, lambda: write(self._world.progress))  # [all]

    def _seal(self, step: int, temporary: Path, write: Callable[[], Hashed]) -> None:
        """[all] Publish all ranks' files as a checkpoint, once written."""
        hashed = self._attempt("save: hashes", temporary, write)  # [all]
        entries = [entry for record in self._world.gather("save: files", hashed) for entry in record]  # [all]
        files = {name: manifest.Entry(size, digest) for name, size, digest in entries}
        complete = Manifest(step, self._world.size, files)
        self._attempt("save: publish", temporary, lambda: self._publish(temporary, complete))  # [all]

    def _attempt(self, name: str, temporary: Path, write: Callable[[], T]) -> T:
        """[all] Do this rank's part of a write. If it fails on any rank, all raise the same UserError."""
        result, reason = None, None
        try:
            result = write()
        except OSError as error:
            reason = error.strerror or str(error)
        reasons = [reason for reason in self._world.gather(name, reason) if reason]  # [all]
        if reasons:
            if self._world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            step = temporary.name.removeprefix(".").partition(".")[0]
            raise UserError(f"checkpoint {temporary.with_name(step)} could not be written: {reasons[0]}")
        return result

    def _state(self, step: int) -> bytes:
        """[all] Return everything but tensors as JSON; ranks must agree on it to the bit."""
        state = {
            "step": step,
            "roles": {name: role.counters() for name, role in self._roles.items()},
            "parts": {name: part.state() for name, part in self._parts.items()},
        }
        # Sorted keys: equal states must have equal bytes on all ranks.
        encoded = msgspec.json.encode(state, order="sorted")
        self._world.agree("save: state", hashlib.blake2b(encoded, digest_size=16).hexdigest())
        return msgspec.json.format(encoded, indent=1)

    def _begin(self, temporary: Path, state: bytes) -> list[Path]:
        if self._world.rank != 0:
            return []
        temporary.mkdir(parents=True)
        for name in self._roles:
            (temporary / name).mkdir()
        (temporary / STATE).write_bytes(state)
        return [temporary / STATE]

    def _publish(self, temporary: Path, complete: Manifest) -> None:
        if self._world.rank != 0:
            return
        # A file that no rank reported would have no hash, and make the checkpoint torn.
        assert manifest.list_files(temporary).keys() == complete.files.keys(), (
            "a file was written that no rank reported"
        )
        complete.write(temporary)
        # Names live in directories: without their own fsync, files could vanish after a power loss.
        for folder in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            manifest.flush(folder)
        self._dir.publish(temporary, complete.step)
        self._dir.prune(self._cfg.keep, complete.step)

    # Restoring

    def _choose(self) -> Path | None:
        """[all] Return the verified checkpoint to load, if any."""
        found = self._world.broadcast("restore: candidates", self._candidates() if self._world.rank == 0 else None)
        if found["error"]:
            raise UserError(found["error"])
        problems = []
        for path in map(Path, found["candidates"]):
            problem = problem_of(path, self._world)  # [all]
            if problem is None:
                if self._world.rank == 0 and problems:
                    tell(f"warning: resuming from {path.name}: {'; '.join(problems)}")
                return path
            problems.append(f"{path.name} is torn ({problem})")
        if problems:
            raise UserError(f"no checkpoint to load in {path.parent}: {'; '.join(problems)}")
        return None

    def _candidates(self) -> dict[str, Any]:
        """Return the checkpoints that `checkpoint.resume` allows, best first, or an error; for rank 0 alone."""
        resume, candidates, error = self._cfg.resume, [], None
        try:
            self._dir.clean()
            steps = self._dir.candidates()
            used = bool(steps) or holds_run(self._run_dir)
        except OSError as failed:
            return {"candidates": [], "error": f"{self._dir.root}: {failed.strerror}"}
        # A run that began from another run's checkpoint has its own by now.
        goes_on = steps and _is_of_another_run(resume, self._dir)
        if resume == "auto" or goes_on:
            candidates = [str(self._dir.path(step)) for step in steps]
        elif resume != "never":
            candidates = [str(Path(resume).expanduser().absolute())]
        elif used:
            error = f"checkpoint.resume=never, but run.dir={self._run_dir} already holds a run; choose another run.dir"
        return {"candidates": candidates, "error": error}

    def _load(self, path: Path) -> int:
        """[all] Load a verified checkpoint; return its step."""
        text = (path / STATE).read_text(encoding="utf-8") if self._world.rank == 0 else None
        state = msgspec.json.decode(self._world.broadcast("restore: state", text))
        for kind, own in (("roles", self._roles), ("parts", self._parts)):
            if state[kind].keys() != own.keys():
                theirs, ours = ", ".join(sorted(state[kind])), ", ".join(sorted(own))
                raise UserError(f"{path} holds the {kind} {theirs}; this run has {ours}")
        for name, role in self._roles.items():
            try:
                role.load(path / name)  # [all]
            except ValueError as error:
                raise UserError(str(error)) from error
            role.load_counters(state["roles"][name])
        for name, part in self._parts.items():
            part.load_state(state["parts"][name])  # [all]
        return state["step"]


def _hash(temporary: Path, written: list[Path], on_progress: Callable[[], object]) -> Hashed:
    records = []
    for path in written:
        manifest.flush(path)
        entry = manifest.hash_file(path, on_progress)
        records.append((path.relative_to(temporary).as_posix(), entry.size, entry.hash))
    return records


def _is_of_another_run(resume: str, own: CheckpointDir) -> bool:
    """Return True if `checkpoint.resume` is a path outside of this run. A path inside takes the run back to it."""
    given = Path(resume).expanduser().absolute()
    return resume not in ("auto", "never") and given.parent != own.root.absolute()


def problem_of(path: Path, world: World) -> str | None:
    """[all] Return why a checkpoint cannot be trusted, or None."""
    read = None
    if world.rank == 0:
        try:
            files = Manifest.read(path).files
            read = {"problem": None, "files": [(name, entry.hash) for name, entry in files.items()]}
        except TornCheckpoint as torn:
            read = {"problem": str(torn), "files": []}
    read = world.broadcast("restore: manifest", read)  # [all]
    mine = read["files"][world.rank :: world.size]
    wrong = [problem for name, expected in mine if (problem := _differs(path / name, name, expected, world))]
    found = world.gather("restore: hashes", wrong)  # [all]
    return read["problem"] or next((problem for problems in found for problem in problems), None)


def _differs(path: Path, name: str, expected: str, world: World) -> str | None:
    try:
        manifest.check_file(path, name, expected, world.progress)
    except TornCheckpoint as torn:
        return str(torn)
    except OSError as error:
        return f"{name}: {error.strerror} on rank {world.rank}; is the directory shared by all nodes?"
    return None


def finished(cfg: CheckpointConfig, run_dir: Path, steps: int, world: World) -> int | None:
    """[all] Return the run directory's step, if it is `steps` or later; else None.

    Only names and sizes are read, so a pipeline can call it before it loads anything. UserError if `checkpoint.resume`
    names a checkpoint that leaves nothing to do.
    """
    found = world.broadcast("restore: finished", _reached(cfg, run_dir) if world.rank == 0 else None)  # [all]
    if found is None or found["step"] < steps:
        return None
    if found["chosen"]:
        step = found["step"]
        raise UserError(
            f"checkpoint.resume: {cfg.resume} is at step {step} already; to continue, set steps above {step}"
        )
    return found["step"]


def _reached(cfg: CheckpointConfig, run_dir: Path) -> dict[str, Any] | None:
    directory = CheckpointDir(run_dir / "checkpoints")
    latest = directory.latest()
    path = directory.path(latest) if latest is not None else None
    chosen = cfg.resume != "auto" and not (path and _is_of_another_run(cfg.resume, directory))
    if chosen:
        path = Path(cfg.resume).expanduser().absolute() if cfg.resume != "never" else None
    try:
        return {"step": Manifest.read(path).step, "chosen": chosen} if path else None
    except TornCheckpoint:
        return None
