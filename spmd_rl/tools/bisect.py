"""Finds where two runs part: the first step, phase, tensor and token that differ.

    python -m spmd_rl bisect runs/rlvr/a runs/rlvr/b

It compares what both run directories have: samples, verdicts, advantages and metrics; with `journal.hashes=true` in
both also logprobs to the bit, gradients and weights by tensor. Exit code 0: no difference; 1: one was found.
"""

import base64
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import UserError, plural, printable, reason, tell
from spmd_rl.config.run_identity import identity
from spmd_rl.track.run_reader import RunData, read_run
from spmd_rl.track.samples import merged_files
from spmd_rl.track.tokens import TokenTexts

OF_SAMPLES = ("generate", "score", "logprobs", "prepare")
PHASES = (*OF_SAMPLES, "update", "weights", "eval")
"""Phases in order of dependence; `weights` are those at a step's end"""
MEASURED = ("time/", "system/", "memory/", "placement/", "publish/", "rollout/")
AXES = ("dp_replicate", "tp", "cp", "pp", "ep", "name")
MISSING = "missing"

Values = dict[str, Any]
"""A phase's values by name; a sample's begin with `TICKET.ANSWER`, and a list has an entry per token."""


class _Place(msgspec.Struct):
    step: int
    phase: str
    of: str


@dataclass(frozen=True, slots=True)
class Difference:
    """First place in which two runs differ."""

    step: int
    phase: str
    name: str
    token: int | None
    """Index of the first differing token in its sample, if known"""
    values: tuple[str, str]


class RunTrace:
    """One run's values by step and phase, read on demand."""

    def __init__(self, directory: Path) -> None:
        """Read metrics, and places of hashes. UserError without a run."""
        self.run = read_run(directory)
        self.files = {kind: dict(merged_files(directory / "samples", kind)) for kind in ("step", "eval")}
        self._lines = {line["step"]: line for line in self.run.lines}
        # A step that was done again after a kill has several lines, of which the last counts.
        self._places: dict[tuple[int, str], dict[tuple[str, int], tuple[Path, int]]] = defaultdict(dict)
        self.ranks = 0
        for path in directory.glob("journal/hashes-*.jsonl"):
            self.ranks += 1
            rank = int(path.stem.partition("-")[2])
            for offset, line in _lines(path):
                self._places[line.step, line.phase][line.of, rank] = path, offset

    @property
    def steps(self) -> set[int]:
        """Steps of which something is known."""
        hashed = {step for step, _ in self._places}
        return hashed | self._lines.keys() | self.files["step"].keys() | self.files["eval"].keys()

    @property
    def layout(self) -> tuple[Any, ...]:
        """Properties that determine a rank's part of a tensor."""
        train = self.run.setting("train") or {}
        return self.ranks, *(train.get(axis) for axis in AXES)

    def values(self, step: int, phase: str, tensors: bool) -> Values:
        """Return a phase's values. tensors: also gradients, weights and sums of this layout."""
        found: Values = {}
        if path := self.files["eval" if phase == "eval" else "step"].get(step):
            found |= _logged(path).get(phase, {})
        of_samples = phase in OF_SAMPLES
        places = self._places.get((step, phase), {}) if tensors or of_samples else {}
        # By role and update, whose number follows the name.
        for of, rank in sorted(places, key=lambda place: (place[0].split()[0], len(place[0]), *place)):
            path, offset = places[of, rank]
            with open(path, "rb") as file:
                file.seek(offset)
                hashed = msgspec.json.decode(file.readline())["found"]
            found |= {name if of_samples else f"{of}: {name}, rank {rank}": value for name, value in hashed.items()}
        if phase == "update":
            line = self._lines.get(step, {})
            found |= {key: line[key] for key in line if not key.startswith(MEASURED) and not key.startswith("val/")}
        return found

    def token(self, difference: Difference) -> str:
        """Describe the token at which the runs part."""
        phase = "eval" if difference.phase == "eval" else "generate"
        ids = self.values(difference.step, phase, False).get(f"{difference.name.split()[0]} tokens")
        if difference.token is None or ids is None or difference.token >= len(ids):
            return ""
        texts = TokenTexts(self.run.setting("policy.model")).texts(ids[: difference.token + 1])
        return f" (id {ids[difference.token]}{f', {texts[-1]!r}' if texts else ''})"


def _lines(path: Path) -> Iterator[tuple[int, _Place]]:
    decode, offset = msgspec.json.Decoder(_Place).decode, 0
    with open(path, "rb") as file:
        for text in file:
            with suppress(msgspec.DecodeError):
                yield offset, decode(text)
            offset += len(text)


@lru_cache(4)
def _logged(path: Path) -> dict[str, Values]:
    found: dict[str, Values] = {phase: {} for phase in PHASES}
    for row in map(msgspec.json.decode, path.read_bytes().splitlines()):
        # Of answers that no step uses, as many are logged as a step's end happened to leave.
        if row["reject_reason"] == "surplus":
            continue
        name, generated = f"{row['ticket']}.{row['answer']}", {"tokens": [], "logprobs": [], "versions": []}
        for turn in row["turns"]:
            generated["tokens"] += turn["prompt_ids"] + turn["token_ids"]
            for key in ("logprobs", "versions"):
                generated[key] += [None] * len(turn["prompt_ids"]) + turn[key]
        for key, value in generated.items():
            found["eval" if row["reject_reason"] == "held out" else "generate"][f"{name} {key}"] = value
        verdict = {key: row["verdict"].get(key) for key in ("status", "score", "parts")}
        found["eval" if row["reject_reason"] == "held out" else "score"][f"{name} verdict"] = verdict
        advantages = [row["advantage"], *(turn.get("advantage") for turn in row["turns"])]
        found["prepare"][f"{name} advantage"] = {"advantages": advantages, "left out": row["reject_reason"]}
    return found


def first_difference(one: RunTrace, other: RunTrace, steps: Collection[int]) -> Difference | None:
    """Return the first difference in some steps, of what both runs have; None if all is equal."""
    tensors = one.layout == other.layout
    for step in sorted(steps):
        for phase in PHASES:
            left, right = (trace.values(step, phase, tensors) for trace in (one, other))
            # What only one of the runs has written is no difference: it may lack hashes or an evaluation.
            for name in _common(left, right):
                a, b = left.get(name, MISSING), right.get(name, MISSING)
                if a != b:
                    token = _token(a, b)
                    return Difference(step, phase, name, token, (_shown(a, token), _shown(b, token)))
    return None


def _common(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    kinds = {_kind(name)[1] for name in left} & {_kind(name)[1] for name in right}
    names = [name for name in dict.fromkeys((*left, *right)) if _kind(name)[1] in kinds]
    return sorted(names, key=lambda name: _kind(name)[0])


def _kind(name: str) -> tuple[tuple[int, int], str]:
    if match := re.fullmatch(r"(\d+)\.(\d+) (\w+)", name):
        return (int(match[1]), int(match[2])), match[3]
    return (-1, -1), "tensor" if ": " in name else "metric"


def _token(a: Any, b: Any) -> int | None:
    if isinstance(a, str) and isinstance(b, str):
        # Bytes of the tokens, after the hash.
        a, b = (base64.b64decode(value.partition(":")[2]) for value in (a, b))
    if not isinstance(a, list | bytes) or not isinstance(b, list | bytes):
        return None
    return next((i for i, pair in enumerate(zip_longest(a, b)) if pair[0] != pair[1]), None)


def _shown(value: Any, token: int | None) -> str:
    if isinstance(value, list) and token is not None:
        return str(value[token]) if token < len(value) else MISSING
    text = value.partition(":")[0] if isinstance(value, str) else str(value)
    return printable(text, lines=False)


def describe(difference: Difference, one: RunTrace) -> str:
    """Describe a difference in two lines: place, and both values."""
    where = f"step {difference.step}, {difference.phase}: {printable(difference.name, lines=False)}"
    token = "" if difference.token is None else f", token {difference.token}{one.token(difference)}"
    return f"{where}{token}\n  {difference.values[0]} | {difference.values[1]}"


def differing(runs: Sequence[RunData]) -> list[str]:
    """Return a line per setting, package and revision that differs."""
    left, right = (
        identity(run.settings) | {"revision": run.about.get("git_revision")} | (run.about.get("versions") or {})
        for run in runs
    )
    keys = [key for key in dict.fromkeys((*left, *right)) if left.get(key) != right.get(key)]
    return [printable(f"{key}: {left.get(key)} | {right.get(key)}", lines=False) for key in keys]


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(program("bisect"), description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN_DIR")
    parser.add_argument("--steps", type=at_least(0), nargs="+", metavar="N", help="compare these steps alone")
    asked = parser.parse_args(arguments)
    try:
        one, other = traces = [RunTrace(directory) for directory in asked.runs]
        steps = one.steps & other.steps & (set(asked.steps) if asked.steps else one.steps)
        if not steps:
            raise UserError(f"{asked.runs[0]} and {asked.runs[1]} have no step in common")
        found = first_difference(one, other, steps)
    except (OSError, ValueError) as error:
        tell(f"error: {reason(error)}")
        return 2
    for line in differing([trace.run for trace in traces]):
        print(line)
    if not all(trace.ranks for trace in traces):
        print("journal.hashes was not set in both runs: no gradients and weights, logprobs to 6 decimals")
    elif one.layout != other.layout:
        print("ranks or layouts differ: gradients and weights are not compared")
    if found is None:
        print(f"no difference in {plural(len(steps), 'step')}, {min(steps)} to {max(steps)}")
        return 0
    print(f"first difference: {describe(found, one)}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
