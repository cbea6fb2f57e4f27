"""Rows that stay on disk: each is checked once at the start, and read again on demand.

Memory holds 16 bytes per row. Sources without seekable lines (a JSON array, gzip, parquet, a dataset of the hub) are
first written to a temporary file, in TMPDIR.
"""

import json
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from msgspec.structs import replace

from spmd_rl.base.errors import UserError
from spmd_rl.config.run_identity import identity_hash
from spmd_rl.config.sections.data import GENERATORS, SourcesConfig, sources
from spmd_rl.data import reasoning_gym
from spmd_rl.data.conversations import KINDS
from spmd_rl.data.fields import BrokenRow, opened
from spmd_rl.data.files import BYTE_ORDER_MARK
from spmd_rl.data.hub import source_records
from spmd_rl.data.pictures import Folder, take_pictures, with_own, with_pictures
from spmd_rl.data.prompts import is_held_out
from spmd_rl.data.seeds import counter_seed
from spmd_rl.types import Example

Parse = Callable[[Any, Folder], Example]
"""(record, folder of its pictures) -> example; BrokenRow describes an invalid record."""


class RowStore(Sequence[Example]):
    """Some rows of a source, by number."""

    def __init__(self, parse: Parse) -> None:
        self._parse = parse
        self._files: list[BinaryIO] = []
        self._folders: list[Folder] = []
        self._numbers, self._offsets = array("i"), array("q")
        self._digest = blake2b(digest_size=16)
        self._order = lru_cache(2)(self._shuffled)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Example:
        return self._parse(self._record(index)[1], self._folders[self._numbers[index]])

    def where(self, index: int) -> str:
        """Return a row's place, for error messages."""
        where, _ = self._record(index)
        if not where:
            file, end = self._files[self._numbers[index]], self._offsets[index]
            file.seek(0)
            lines = sum(block.count(b"\n") for block in _blocks(file, end))
            where = f"{file.name}:{1 + lines}"
        return where

    def _record(self, index: int) -> tuple[str, Any]:
        """Return a row's place, empty for a line of a file, and its JSON value."""
        file = self._files[self._numbers[index]]
        file.seek(self._offsets[index])
        record = json.loads(file.readline().removeprefix(BYTE_ORDER_MARK))
        return ("", record) if isinstance(file.name, str) else record

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over all rows, in order."""
        return self._digest.hexdigest()

    @cached_property
    def prompt_run(self) -> int:
        """Longest run of rows with the same prompt."""
        prompts = groupby(example.conversations[0].prompt for example in self)
        return max((sum(1 for _ in alike) for _, alike in prompts), default=0)

    def at(self, position: int, seed: int) -> tuple[int, int]:
        """Return the epoch and the row number at a position of the run."""
        epoch, index = divmod(position, len(self))
        return epoch, int(self._order(seed, epoch)[index])

    def _shuffled(self, seed: int, epoch: int) -> np.ndarray:
        draws = np.random.Philox(key=counter_seed(seed, "rows", epoch)).random_raw(len(self))
        # `stable` and raw 64-bit draws: numpy may change its shuffles between versions, but not the Philox stream.
        return draws.argsort(kind="stable")

    def open(self, path: Path | None, folder: Folder) -> int:
        """Open a file of rows, or a temporary one, and return its number. folder: of its pictures."""
        self._folders.append(folder)
        self._files.append(path.open("rb") if path else tempfile.TemporaryFile())  # noqa: SIM115
        return len(self._files) - 1

    def add(self, content: bytes, number: int, offset: int | None, record: tuple[str, Any]) -> None:
        """Add the row at an offset of a file; without an offset it is appended there. content: its bytes for the
        digest.
        """
        file = self._files[number]
        if offset is None:
            offset = file.seek(0, 2)
            file.write(json.dumps(record).encode() + b"\n")
        self._numbers.append(number)
        self._offsets.append(offset)
        self._digest.update(content)


def parse_example(kind: Callable[..., Example], cfg: SourcesConfig, record: Any, folder: Folder) -> Example:
    """Return a row's example with its pictures. kind: one of `KINDS`."""
    example, columns = kind(record, cfg), {name: column for name, column in cfg.keys.items() if name == "images"}
    pictures = take_pictures(opened(record, columns)[0], columns, folder)
    chats = (
        replace(chat, messages=with_pictures(with_own(chat.messages, folder), pictures))
        for chat in example.conversations
    )
    return replace(example, conversations=tuple(chats))


def _blocks(file: BinaryIO, end: int) -> Iterator[bytes]:
    while (left := end - file.tell()) > 0:
        yield file.read(min(left, 1 << 20))


@dataclass(frozen=True)
class Digest:
    """Summary by which ranks compare rows."""

    id: str
    digest: str


@dataclass(frozen=True, slots=True)
class Examples:
    """The rows of a supervised run, for training and held out; the latter may be empty."""

    train: RowStore
    eval: RowStore

    @classmethod
    def load(cls, cfg: SourcesConfig, kind: str) -> "Examples":
        """Read and check all rows of a kind of `KINDS`. UserError, naming setting, file and line, for a broken one."""
        parse: Parse = partial(parse_example, KINDS[kind], cfg)
        rows = cls(RowStore(parse), RowStore(parse))
        rows._read(cfg.train, "data.train", cfg, parse, 0.0 if cfg.eval else cfg.holdout)
        rows._read(cfg.eval, "data.eval", cfg, parse, 1.0)
        if not rows.train:
            raise UserError(f"data.train: no row is left in {cfg.train}: data.holdout={cfg.holdout} takes all")
        if kind == "judged" and rows.train.prompt_run == len(rows.train):
            raise UserError(
                "data.train: all rows have the same prompt; preference.loss=kto needs answers to other prompts"
            )
        return rows

    @property
    def digests(self) -> dict[str, list[Digest]]:
        """Digests that all ranks must share."""
        stores = {"data.train": self.train, "data.eval": self.eval}
        return {name: [Digest(f"{len(store)} rows", store.digest)] for name, store in stores.items()}

    def identity(self, cfg: Any) -> str:
        """Return a key of results computed from these rows before training."""
        asked = f"{cfg.steps} {bool(cfg.eval.every)} {cfg.eval.rows}"
        return f"{identity_hash(cfg)} {self.train.digest} {self.eval.digest} {asked}"

    def _read(self, source: str | None, key: str, cfg: SourcesConfig, parse: Parse, holdout: float) -> None:
        for name in sources(source):
            # For each store, the numbers of its file and of a temporary one.
            path, files = Path(name).expanduser(), [{}, {}]
            folder = Folder.of(name, cfg.pictures)
            for where, record, offset in _records(name, key, cfg):
                try:
                    parse(record, folder)
                except BrokenRow as error:
                    raise UserError(f"{key}: {where}: {error}") from None
                # The hash is over the row as written, so that no setting moves a row to the other side.
                content = json.dumps(record, sort_keys=True).encode()
                held = is_held_out(blake2b(content, digest_size=16).hexdigest(), holdout)
                store, kept = (self.eval if held else self.train), None if offset is None else path
                if kept not in files[held]:
                    # Each store opens the file separately, since reading moves a file's position.
                    files[held][kept] = store.open(kept, folder)
                store.add(content, files[held][kept], offset, (where, record))


def _records(name: str, key: str, cfg: SourcesConfig) -> Iterator[tuple[str, Any, int | None]]:
    """Yield each record of a source with its place, and the offset of its line in the file, if it has one."""
    if name.startswith(GENERATORS):
        rows = list(reasoning_gym.generate(name.removeprefix(GENERATORS), cfg.size, cfg.seed, cfg.args, key))
        answers = [row.ground_truth for row in rows]
        for number, row in enumerate(rows):
            right = {"prompt": row.problem, "completion": row.ground_truth, "chosen": row.ground_truth}
            later = (answers[(number + step) % len(rows)] for step in range(1, len(rows)))
            wrong = next((answer for answer in later if answer != row.ground_truth), row.ground_truth)
            # The rejected answer is the right answer to another question.
            yield row.where, right | {"rejected": wrong}, None
    else:
        yield from source_records(name, key)
