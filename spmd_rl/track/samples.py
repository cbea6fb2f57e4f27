"""`samples/step-000001.jsonl`: every sample of a step, in (ticket, answer) order, merged from the ranks' own parts.

Each rank writes `.step-000001.rank-0-of-2.part`; rank 0 merges them stretch by stretch, so that no process holds the
whole batch, and none parses a line: a part of several begins with a line that says which stretches follow. The only
part of a run of one rank is the file itself under another name. A part appears complete or not at all, and so does the
merged file: whatever a killed run left is either finished (`recover`) or removed.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.types import FinishReason, Message

_PART = re.compile(r"\.step-(\d+)\.rank-(\d+)-of-(\d+)\.part")
_MERGED = re.compile(r"step-(\d+)\.jsonl")

_encoder = msgspec.json.Encoder(enc_hook=str)
_decode_index = msgspec.json.Decoder(list[tuple[int, int, int]]).decode


class TurnRow(msgspec.Struct, gc=False):
    """One turn of a `SampleRow`."""

    text: str
    prompt_ids: list[int] | msgspec.Raw
    """or their JSON, where several samples have them in common"""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


class SampleRow(msgspec.Struct, gc=False):
    """One line: a sample from its prompt to its advantage, and why it was kept or not."""

    ticket: int
    answer: int
    id: str
    domain: str
    messages: Sequence[Message] | msgspec.Raw
    ground_truth: str
    turns: list[TurnRow]
    verdict: Mapping[str, Any]
    advantage: float | None
    kept: bool
    why_not: str | None


class SampleLog:
    """The `samples/` directory of a run."""

    def __init__(self, root: Path, rank: int, num_ranks: int) -> None:
        self.root = root
        self._rank = rank
        self._num_ranks = num_ranks

    def path(self, step: int) -> Path:
        """The merged file of a step."""
        return self.root / f"step-{step:06d}.jsonl"

    def write(self, step: int, rows: Iterable[SampleRow]) -> None:
        """This rank's part, of rows in any order."""
        stretches = sorted(_stretches(rows))
        part = self._part(step, self._rank)
        temporary = part.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            if self._num_ranks > 1:
                index = [(ticket, answer, len(lines)) for ticket, answer, lines in stretches]
                file.write(_encoder.encode_lines([index]))
            file.writelines(map(itemgetter(2), stretches))
        os.replace(temporary, part)

    def merge(self, step: int) -> None:
        """Rank 0, after all ranks have written: one file of all parts. Nothing to do where no rank logged samples."""
        parts = [part for rank in range(self._num_ranks) if (part := self._part(step, rank)).exists()]
        if parts:
            self._merge(step, parts, self._num_ranks)

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
                self._merge(step, parts, num_ranks)
            else:
                _remove(parts)

    def cut(self, last: int) -> None:
        """Rank 0: remove the files of every step after `last`."""
        for path in self.root.glob("step-*.jsonl"):
            match = _MERGED.fullmatch(path.name)
            if match and int(match[1]) > last:
                path.unlink()

    def _part(self, step: int, rank: int) -> Path:
        return self.root / f".step-{step:06d}.rank-{rank}-of-{self._num_ranks}.part"

    def _merge(self, step: int, parts: Sequence[Path], num_ranks: int) -> None:
        if num_ranks == 1:
            os.replace(parts[0], self.path(step))
            return
        temporary = self.root / f".step-{step:06d}.merge.tmp"
        with ExitStack() as opened, open(temporary, "wb") as out:
            files = [opened.enter_context(open(part, "rb")) for part in parts]
            stretches = sorted([(*s, file) for file, part in enumerate(files) for s in _decode_index(part.readline())])
            out.writelines(files[file].read(num_bytes) for _, _, num_bytes, file in stretches)
        os.replace(temporary, self.path(step))
        _remove(parts)


def _stretches(rows: Iterable[SampleRow]) -> Iterator[tuple[int, int, bytes]]:
    """Ticket, first answer and lines of rows that no other rank's can come between: answers of a ticket, one by one."""
    stretch: list[SampleRow] = []
    for row in rows:
        if stretch and (stretch[-1].ticket, stretch[-1].answer + 1) != (row.ticket, row.answer):
            yield _lines(stretch)
            stretch = []
        stretch.append(row)
    if stretch:
        yield _lines(stretch)


def _lines(stretch: list[SampleRow]) -> tuple[int, int, bytes]:
    return stretch[0].ticket, stretch[0].answer, _encoder.encode_lines(stretch)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()
