"""`samples/step-000001.jsonl`: every sample of a step, in (ticket, answer) order, merged from the ranks' own parts.

Each rank writes `.step-000001.rank-0-of-2.jsonl`; rank 0 merges them line by line, so that no process holds the whole
batch. A part appears complete or not at all, and so does the merged file: whatever a killed run left is either
finished (`recover`) or removed.
"""

import heapq
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

_PART = re.compile(r"\.step-(\d+)\.rank-(\d+)-of-(\d+)\.jsonl")
_MERGED = re.compile(r"step-(\d+)\.jsonl")


class _Key(msgspec.Struct):
    ticket: int
    answer: int


_encoder = msgspec.json.Encoder(enc_hook=lambda value: value.tolist() if isinstance(value, array) else str(value))
_key = msgspec.json.Decoder(_Key)


class SampleLog:
    """The `samples/` directory of a run."""

    def __init__(self, root: Path, rank: int, num_ranks: int) -> None:
        self.root = root
        self._rank = rank
        self._num_ranks = num_ranks

    def path(self, step: int) -> Path:
        """The merged file of a step."""
        return self.root / f"step-{step:06d}.jsonl"

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """This rank's part: any rows with `ticket` and `answer`, in any order; `array` values become lists.

        The report also reads `messages`, `turns`, `verdict`, `advantage`, `kept` and `why_not`.
        """
        keyed = sorted(((row["ticket"], row["answer"], _encoder.encode(row)) for row in rows), key=lambda row: row[:2])
        part = self._part(step, self._rank)
        temporary = part.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.writelines(line + b"\n" for _, _, line in keyed)
        os.replace(temporary, part)

    def merge(self, step: int) -> None:
        """Rank 0, after all ranks have written: one file of all parts. Nothing to do where no rank logged samples."""
        parts = [part for rank in range(self._num_ranks) if (part := self._part(step, rank)).exists()]
        if parts:
            self._merge(step, parts)

    def recover(self) -> None:
        """Rank 0, before any rank writes: merge the complete parts of a killed run, remove the others."""
        left: dict[tuple[int, int], list[Path]] = {}
        for path in self.root.glob(".step-*"):
            match = _PART.fullmatch(path.name)
            if match:
                left.setdefault((int(match[1]), int(match[3])), []).append(path)
            else:
                path.unlink()
        for (step, num_ranks), parts in left.items():
            if len(parts) == num_ranks and not self.path(step).exists():
                self._merge(step, parts)
            else:
                _remove(parts)

    def cut(self, last: int) -> None:
        """Rank 0: remove the files of every step after `last`."""
        for path in self.root.glob("step-*.jsonl"):
            match = _MERGED.fullmatch(path.name)
            if match and int(match[1]) > last:
                path.unlink()

    def _part(self, step: int, rank: int) -> Path:
        return self.root / f".step-{step:06d}.rank-{rank}-of-{self._num_ranks}.jsonl"

    def _merge(self, step: int, parts: Iterable[Path]) -> None:
        temporary = self.root / f".step-{step:06d}.merge.tmp"
        with ExitStack() as files, open(temporary, "wb") as out:
            streams = [_keyed(files.enter_context(open(part, "rb"))) for part in parts]
            out.writelines(line for _, line in heapq.merge(*streams))
        os.replace(temporary, self.path(step))
        _remove(parts)


def _keyed(lines: Iterable[bytes]) -> Iterator[tuple[tuple[int, int], bytes]]:
    for line in lines:
        key = _key.decode(line)
        yield (key.ticket, key.answer), line


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()
