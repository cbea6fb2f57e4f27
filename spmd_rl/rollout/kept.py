"""`KeptAnswers`: scored answers to held-out prompts as files, from which a killed evaluation resumes.

Each rank writes one file; any number of ranks can read them.
"""

import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from spmd_rl.distributed import World
from spmd_rl.types import Group, Prompt, Sample
from spmd_rl.types.encoded import pack, unpack

HEAD = struct.Struct("<II")
"""(bytes, CRC-32) of a record. A crash may leave half a record."""


class KeptAnswers:
    """Scored answers of one evaluation in a folder."""

    def __init__(self, folder: Path, world: World) -> None:
        """[all] Read the existing answers."""
        folder.mkdir(parents=True, exist_ok=True)
        self._samples: dict[int, list[Sample]] = defaultdict(list)
        mine: list[tuple[int, int]] = []
        for rank in count(world.rank, world.size):
            path = folder / f"rank-{rank}.bin"
            if not path.exists():
                break
            answers, num_bytes = read(path)
            for samples in answers:
                self._samples[samples[0].ticket] += samples
                mine.append((samples[0].ticket, samples[0].unit_number))
            if rank == world.rank:
                os.truncate(path, num_bytes)
        self._file = os.open(folder / f"rank-{world.rank}.bin", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        found = world.gather("eval: kept answers", mine, list[tuple[int, int]])  # [all]
        self.numbers = frozenset(number for theirs in found for number in theirs)
        """(prompt number, answer index) of all ranks' kept answers."""

    def samples(self) -> dict[int, list[Sample]]:
        """Return this rank's samples, by prompt number."""
        return {number: list(found) for number, found in self._samples.items()}

    def write(self, samples: Sequence[Sample]) -> None:
        """Write a scored answer; others are generated again after a resume."""
        if samples[-1].verdict.scored:
            record = pack(samples)
            os.write(self._file, HEAD.pack(len(record), zlib.crc32(record)) + record)

    def close(self) -> None:
        """Close this rank's file of answers."""
        os.close(self._file)


def read(path: Path) -> tuple[list[tuple[Sample, ...]], int]:
    """Return the answers up to the first broken record, and its offset."""
    data, end, answers = path.read_bytes(), 0, []
    while end + HEAD.size <= len(data):
        size, checksum = HEAD.unpack_from(data, end)
        record = data[end + HEAD.size : end + HEAD.size + size]
        if len(record) != size or zlib.crc32(record) != checksum:
            break
        answers.append(unpack(record, tuple[Sample, ...]))
        end += HEAD.size + size
    return answers, end


class KeptRollouts:
    """Rollouts whose answers are kept."""

    def __init__(self, rollouts: Any, kept: KeptAnswers) -> None:
        self._rollouts, self._kept, self.prompts = rollouts, kept, rollouts.prompts

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Any]) -> list[Group]:
        """[all] See `Rollouts.answer`."""
        return self._rollouts.answer(prompts, sampling, self._kept)
