"""`samples/step-000001.jsonl`: every sample of a step, one JSON object a line, in (ticket, answer) order.

`samples/eval-000010.jsonl` has held-out answers. An agent's trajectory is one line, or several (segments) if its turns
do not continue each other; the last has the verdict that counts. Each rank writes a hidden part file, and rank 0 merges
the parts. A file appears completely or not at all: the next start merges (`recover`) or removes those of a killed run.
"""

import heapq
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from spmd_rl.types import FinishReason, ImagePart, Message

KINDS = ("step", "eval")
"""Samples that a step trains on, and held-out answers."""
PICTURES = "pictures"
"""Folder of pictures, each named by a hash of its bytes."""
FILES_AT_ONCE = 256
"""Parts that are merged in one pass: a process may open about a thousand files."""

_encode = msgspec.json.Encoder(enc_hook=str).encode


class StepRow(msgspec.Struct, omit_defaults=True):
    """An environment's reply, see `AgentStep`."""

    observation: str
    reward: float
    state: str
    """16 hex digits."""
    action: str | None
    board: str = ""
    metrics: Mapping[str, float] = {}


class TurnRow(msgspec.Struct, omit_defaults=True):
    """One turn of a `SampleRow`. Its input is never trained on; its sampled tokens are, if the sample is kept."""

    text: str
    prompt_ids: Sequence[int] | msgspec.Raw
    """Input ids, or their JSON."""
    token_ids: list[int]
    logprobs: list[float]
    """Values of the engine, in nats."""
    versions: list[int]
    finish_reason: FinishReason
    step: StepRow | None = None
    advantage: float | None = None
    """None if the sample's applies."""
    # Any: msgspec decodes no union of bytes and str.
    pictures: Sequence[Any] = ()
    """Encoded pictures of the input, which the log writes as files and names by path."""


class SampleRow(msgspec.Struct, omit_defaults=True):
    """One line of the sample log."""

    ticket: int
    answer: int
    id: str
    domain: str
    messages: Sequence[Message] | msgspec.Raw
    """Messages of the prompt, or their JSON."""
    ground_truth: str
    turns: list[TurnRow]
    verdict: Mapping[str, Any]
    advantage: float | None
    """Value of the whole answer, or the mean over its tokens if turns have their own."""
    kept: bool
    reject_reason: str | None
    """None for a kept sample."""
    greedy: bool = False
    unit: int | None = None
    """See `Sample.unit`; written only if it differs from the answer's number."""
    last: bool = True
    """False, and written, only for a segment before a trajectory's last."""


class _Key(msgspec.Struct, order=True):
    ticket: int
    answer: int


_decode_key = msgspec.json.Decoder(_Key).decode


class SampleLog:
    """The files of one kind in a run's `samples/`, as one of `num_ranks` ranks writes them."""

    def __init__(self, root: Path, rank: int, num_ranks: int, kind: str = "step") -> None:
        """kind: see `KINDS`, the kinds of sample files."""
        self.root, self._kind = root, kind
        self._rank = rank
        self._num_ranks = num_ranks

    def path(self, step: int) -> Path:
        """Return the path of a step's samples."""
        return self.root / f"{self._kind}-{step:06d}.jsonl"

    def write(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Write this rank's samples of a step, in any order, into its part file."""
        lines = sorted([(row.ticket, row.answer, _encode(self._with_files(row))) for row in rows])
        part = self._part(step, self._rank)
        draft = part.with_suffix(".tmp")
        with open(draft, "wb") as file:
            file.writelines(line + b"\n" for _, _, line in lines)
        os.replace(draft, part)

    def _with_files(self, row: SampleRow) -> SampleRow:
        for turn in row.turns:
            turn.pictures = tuple(self._file(one) if isinstance(one, bytes) else one for one in turn.pictures)
        if not isinstance(row.messages, msgspec.Raw):
            row.messages = [self._logged(message) for message in row.messages]
        return row

    def _logged(self, message: Message) -> Message:
        if isinstance(message.content, str):
            return message
        parts = (
            ImagePart(part.media_type, path=self._file(part.data)) if isinstance(part, ImagePart) else part
            for part in message.content
        )
        return replace(message, content=tuple(parts))

    def _file(self, picture: bytes) -> str:
        ending = ImagePart.of(picture).media_type.removeprefix("image/").replace("jpeg", "jpg")
        path = self.root / PICTURES / f"{blake2b(picture, digest_size=16).hexdigest()}.{ending}"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            # Another rank may write the same picture now.
            draft = path.with_suffix(f".{self._rank}.tmp")
            draft.write_bytes(picture)
            os.replace(draft, path)
        return f"{PICTURES}/{path.name}"

    def merge(self, step: int) -> None:
        """Merge all ranks' parts into the step's file; on rank 0, after all have written. No file without samples."""
        parts = [part for rank in range(self._num_ranks) if (part := self._part(step, rank)).exists()]
        if parts:
            self._merge(step, parts)

    def complete(self, step: int) -> bool:
        """Return True if all ranks have written a step's samples, and none is merged."""
        return all(self._part(step, rank).exists() for rank in range(self._num_ranks))

    def recover(self) -> None:
        """Merge complete sets of parts of a killed run, and remove others; on rank 0, before writing."""
        left: dict[tuple[int, int], list[Path]] = {}
        for path in self.root.glob(f".{self._kind}-*"):
            match = re.fullmatch(rf"\.{self._kind}-(\d+)\.rank-(\d+)-of-(\d+)\.part", path.name)
            if match:
                left.setdefault((int(match[1]), int(match[3])), []).append(path)
            else:
                path.unlink()
        for (step, num_ranks), parts in left.items():
            if len(parts) == num_ranks and not self.path(step).exists():
                self._merge(step, parts)
            else:
                _remove(parts)

    def truncate(self, last: int) -> None:
        """Remove the files after step `last`; on rank 0."""
        for step, path in merged_files(self.root, self._kind):
            if step > last:
                path.unlink()

    def _part(self, step: int, rank: int) -> Path:
        return self.root / f".{self._kind}-{step:06d}.rank-{rank}-of-{self._num_ranks}.part"

    def _merge(self, step: int, parts: Sequence[Path]) -> None:
        drafts, merged = [], list(parts)
        while len(merged) > 1 or not drafts:
            # In passes: one file a rank would exceed the limit of open files in large jobs.
            some, merged = merged[:FILES_AT_ONCE], merged[FILES_AT_ONCE:]
            draft = self.root / f".{self._kind}-{step:06d}.merge-{len(drafts)}.tmp"
            with ExitStack() as stack, open(draft, "wb") as out:
                files = [stack.enter_context(open(part, "rb")) for part in some]
                out.writelines(heapq.merge(*files, key=_decode_key))
            drafts.append(draft)
            merged.append(draft)
        os.replace(drafts.pop(), self.path(step))
        _remove([*parts, *drafts])


def merged_files(root: Path, kind: str) -> list[tuple[int, Path]]:
    """Return (step, file) of all samples of a kind."""
    found = ((re.fullmatch(rf"{kind}-(\d+)\.jsonl", path.name), path) for path in root.glob(f"{kind}-*.jsonl"))
    return sorted((int(match[1]), path) for match, path in found if match)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()
