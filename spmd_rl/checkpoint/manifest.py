"""The manifest of a checkpoint: its files, their sizes and hashes. Written last; other files are never read.

It guards against torn and damaged directories and against added or swapped files, not against a writer who can rewrite
the manifest too. Readers must not run code from a checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

NAME = "manifest.json"
EXPORT = "hf"
"""Folder of an export, which may be moved away."""
FORMAT = 1
# With 16 MiB a conversion's resident memory grew by 39 and 60 MiB instead of 23 and 34.
_CHUNK = 4 << 20


class TornCheckpoint(Exception):
    """An incomplete or damaged checkpoint directory; the message says how, in one line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: its bytes and the blake2b-256 of its content, in hex."""

    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a checkpoint, by relative path. Example: `Manifest(10, 2, {"state.json": Entry(...)})`."""

    step: int
    world_size: int
    """Ranks that wrote it; any number may load it."""
    files: dict[str, Entry]

    def write(self, directory: Path) -> None:
        """Write `manifest.json` and flush it to the disk. OSError from the file system."""
        body = self._body()
        with open(directory / NAME, "w", encoding="ascii") as file:
            json.dump(body | {"digest": _digest(body)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read the manifest, and check it against its own digest and the directory's names and sizes.

        `TornCheckpoint` if anything differs, except for a completely missing export. The caller checks the files'
        hashes.
        """
        manifest = cls._parse(directory)
        export = directory / EXPORT
        if export.is_symlink() or not export.exists():
            files = {name: entry for name, entry in manifest.files.items() if not name.startswith(f"{EXPORT}/")}
            manifest = cls(manifest.step, manifest.world_size, files)
        found = list_files(directory)
        if missing := sorted(manifest.files.keys() - found.keys()):
            raise TornCheckpoint(f"{missing[0]} is missing")
        if extra := sorted(found.keys() - manifest.files.keys()):
            raise TornCheckpoint(f"{extra[0]} is not in the manifest")
        for name, entry in manifest.files.items():
            if found[name] != entry.size:
                raise TornCheckpoint(f"{name} has {found[name]} bytes, the manifest says {entry.size}")
        return manifest

    @classmethod
    def _parse(cls, directory: Path) -> "Manifest":
        try:
            body = json.loads((directory / NAME).read_text(encoding="ascii"))
        except OSError as error:
            raise TornCheckpoint(f"{NAME}: {error.strerror}") from None
        except ValueError:
            raise TornCheckpoint(f"{NAME} is not JSON") from None
        if not isinstance(body, dict) or body.pop("digest", None) != _digest(body):
            raise TornCheckpoint(f"{NAME} is damaged")
        if body.get("format") != FORMAT:
            raise TornCheckpoint(f"{NAME} has format {body.get('format')}, this version reads {FORMAT}")
        try:
            return msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise TornCheckpoint(f"{NAME}: {error}") from None

    def _body(self) -> dict:
        files = {name: {"size": e.size, "hash": e.hash} for name, e in sorted(self.files.items())}
        return {"format": FORMAT, "step": self.step, "world_size": self.world_size, "files": files}


def list_files(directory: Path) -> dict[str, int]:
    """Return the bytes of every file under `directory`, except the manifest, by relative path.

    `TornCheckpoint` for anything that is neither a plain file nor a directory: a link could leave the checkpoint.
    """
    sizes: dict[str, int] = {}
    for parent, folders, names in os.walk(directory):
        for name in folders + names:
            path = Path(parent, name)
            relative = path.relative_to(directory).as_posix()
            # The export may have been moved elsewhere and replaced by a link.
            if relative == EXPORT and path.is_symlink():
                continue
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise TornCheckpoint(f"{relative} is not a plain file")
            if path.is_file() and relative != NAME:
                sizes[relative] = path.stat().st_size
    return sizes


def hash_file(path: Path, progress: Callable[[], object]) -> Entry:
    """Return size and hash of a file; `progress` is called every 4 MiB."""
    digest = hashlib.blake2b(digest_size=32)
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            progress()
    return Entry(size, digest.hexdigest())


def check_file(path: Path, name: str, expected: str, progress: Callable[[], object] = lambda: None) -> None:
    """Raise `TornCheckpoint`, with the file's `name`, unless its content has the expected hash."""
    if hash_file(path, progress).hash != expected:
        raise TornCheckpoint(f"{name} does not match its checksum in the manifest")


def flush(path: Path) -> None:
    """Flush a file's content, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(body: dict) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=32).hexdigest()
