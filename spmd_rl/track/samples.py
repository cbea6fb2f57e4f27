"""`samples/step-000001.jsonl`: every sample of a step, one JSON object a line, in (ticket, answer) order.

`samples/eval-000010.jsonl` has the held-out answers of an evaluation in the same form. An agent's trajectory is one
line with all its turns and what the environment returned after each; where its turns do not continue each other, it is
several lines (segments), of which the last bears the verdict that counts. `python -m spmd_rl view` shows them.

Each rank writes its own samples into a hidden part file, and rank 0 merges the parts once every rank has written. Each
of these files appears whole or not at all: what a killed run left is merged by the next start (`recover`) or removed.
"""

import heapq
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.types import FinishReason, Message

FILES_AT_ONCE = 256
"""Parts that are merged in one pass: a process may open about a thousand files."""

_encode = msgspec.json.Encoder(enc_hook=str).encode


class StepRow(msgspec.Struct, omit_defaults=True):
    """What an environment made of one answer of an agent, see `AgentStep`."""

    observation: str
    reward: float
    state: str
    """Hash of the state in which the answer was given, as 16 hex digits."""
    action: str | None
    """What was handed to the environment; None where the answer held no action, or more than one."""
    board: str = ""
    """A drawing of the state after the action, for people alone."""
    metrics: Mapping[str, float] = {}


class TurnRow(msgspec.Struct, omit_defaults=True):
    """One turn of a `SampleRow`: what the engine was given and what it sampled, as token ids and as text.

    The tokens that it was given are never trained on, and all that it sampled are, where the sample is kept.
    """

    text: str
    prompt_ids: Sequence[int] | msgspec.Raw
    """Token ids before the sampled ones, or their JSON."""
    token_ids: list[int]
    """Sampled token ids."""
    logprobs: list[float]
    """The engine's logprob of each sampled token, in nats."""
    versions: list[int]
    """The policy version that sampled each token."""
    finish_reason: FinishReason
    step: StepRow | None = None
    """What the environment returned; None where there is none."""
    advantage: float | None = None
    """The advantage of this turn's tokens; None where that of the sample is theirs."""


class SampleRow(msgspec.Struct, omit_defaults=True):
    """One line of the sample log: a sample from its prompt to its advantage, and why it was trained on or not."""

    ticket: int
    answer: int
    id: str
    """The prompt's id."""
    domain: str
    messages: Sequence[Message] | msgspec.Raw
    """The prompt's messages, or their JSON."""
    ground_truth: str
    turns: list[TurnRow]
    verdict: Mapping[str, Any]
    advantage: float | None
    """The advantage of the whole answer, or the mean over its tokens if turns have their own; None without one."""
    kept: bool
    """Whether the sample was trained on."""
    reject_reason: str | None
    """Why it was not; None for a kept sample."""
    greedy: bool = False
    """Whether it was drawn at temperature 0; written only where it was."""
    unit: int | None = None
    """See `Sample.unit`; written only where it is not the answer's own number."""
    last: bool = True
    """Written only for a segment of a trajectory that goes on in another line."""


class _Key(msgspec.Struct, order=True):
    """The two fields of a line by which lines are sorted."""

    ticket: int
    answer: int


_decode_key = msgspec.json.Decoder(_Key).decode


class SampleLog:
    """The files of one kind in the `samples/` directory of a run, as one of `num_ranks` ranks writes them."""

    def __init__(self, root: Path, rank: int, num_ranks: int, kind: str = "step") -> None:
        """`kind`: `step` for the samples that a step trains on, `eval` for held-out answers."""
        self.root, self._kind = root, kind
        self._rank = rank
        self._num_ranks = num_ranks

    def path(self, step: int) -> Path:
        """Return the path of the file that holds all samples of a step."""
        return self.root / f"{self._kind}-{step:06d}.jsonl"

    def write(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Write this rank's samples of a step, given in any order, into its part file."""
        lines = sorted([(row.ticket, row.answer, _encode(row)) for row in rows])
        part = self._part(step, self._rank)
        draft = part.with_suffix(".tmp")
        with open(draft, "wb") as file:
            file.writelines(line + b"\n" for _, _, line in lines)
        os.replace(draft, part)

    def merge(self, step: int) -> None:
        """Merge the parts of all ranks into the step's file; on rank 0, after all ranks have written.

        A step of which no rank has logged samples gets no file.
        """
        parts = [part for rank in range(self._num_ranks) if (part := self._part(step, rank)).exists()]
        if parts:
            self._merge(step, parts)

    def complete(self, step: int) -> bool:
        """Return whether all ranks have written their samples of a step, and nobody has merged them."""
        return all(self._part(step, rank).exists() for rank in range(self._num_ranks))

    def recover(self) -> None:
        """Merge each complete set of parts that a killed run left, and remove all others; on rank 0, before writing."""
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
        """Remove the files of every step after `last`; on rank 0."""
        for step, path in merged_files(self.root, self._kind):
            if step > last:
                path.unlink()

    def _part(self, step: int, rank: int) -> Path:
        return self.root / f".{self._kind}-{step:06d}.rank-{rank}-of-{self._num_ranks}.part"

    def _merge(self, step: int, parts: Sequence[Path]) -> None:
        drafts, merged = [], list(parts)
        while len(merged) > 1 or not drafts:
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
    """Return the steps and files of all samples of a kind (see `SampleLog`), in step order."""
    found = ((re.fullmatch(rf"{kind}-(\d+)\.jsonl", path.name), path) for path in root.glob(f"{kind}-*.jsonl"))
    return sorted((int(match[1]), path) for match, path in found if match)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()
