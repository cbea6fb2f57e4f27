"""`metrics.jsonl`: one line a step, reduced over ranks; and one line a step for the terminal."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Reduce = Literal["sum", "mean", "max"]
Values = dict[str, float]
WARMUP_SCORE = "warmup/score/mean"
"""Mean score of a warm-up step's demonstrations"""
COLUMNS = (
    ("score", "critic/score/mean", "{:.3f}"),
    ("demonstrated score", WARMUP_SCORE, "{:.3f}"),
    ("val", "val/score/mean", "{:.3f}"),
    ("greedy", "val/score_greedy/mean", "{:.3f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("loss", "dpo/loss", "{:.4f}"),
    ("loss", "reward_model/loss", "{:.4f}"),
    ("margin", "rewards/margins", "{:.3f}"),
    ("accuracy", "rewards/accuracies", "{:.3f}"),
    ("val loss", "val/loss", "{:.4f}"),
    ("distill loss", "distill/loss", "{:.4f}"),
    ("over", "val/num_prompts", "{:.0f} prompts"),
    ("grad_norm", "actor/grad_norm", "{:.3g}"),
    ("length", "rollout/response_length/mean", "{:.1f}"),
    ("generated tokens/s", "system/generated_tps", "{:.1f}"),
    ("tokens/s", "system/tps", "{:.0f}"),
    ("seconds", "time/total", "{:.1f}"),
)
"""Name, metric and format of a step's numbers on the terminal"""


class MetricsFile:
    """The metrics file, on rank 0, with lines such as `{"step":3,"critic/score/mean":0.4,"time/total":12.1}`; NaN is
    `null`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write one line, in one system call."""
        line = msgspec.json.encode({"step": step} | dict(values)) + b"\n"
        # Unbuffered append: a kill leaves at most whole lines.
        with open(self.path, "ab", buffering=0) as file:
            file.write(line)

    def truncate(self, last: int) -> bool:
        """Drop lines after step `last` and an incomplete last line; return True if the line of `last` exists."""
        if not self.path.exists():
            return False
        kept = [line for line in read_lines(self.path) if line["step"] <= last]
        draft = self.path.with_suffix(".tmp")
        with open(draft, "wb") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        return bool(kept) and kept[-1]["step"] == last


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file up to the first incomplete line."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(dict)
    with open(path, "rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                return


def combine(reduce: Reduce, records: Iterable[Mapping[str, float]]) -> Values:
    """Reduce each key over the ranks that have it."""
    columns: dict[str, list[float]] = {}
    # In rank order, so that sums are reproducible.
    for record in records:
        for key, value in record.items():
            columns.setdefault(key, []).append(value)
    if reduce == "max":
        return {key: max(column) for key, column in columns.items()}
    sums = {key: float(sum(column)) for key, column in columns.items()}
    return sums if reduce == "sum" else {key: total / len(columns[key]) for key, total in sums.items()}


def with_warmup_named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's values; a warm-up step's score is renamed to that of demonstrations."""
    names = {"critic/score/mean": WARMUP_SCORE} if "warmup/loss" in values else {}
    return {names.get(key, key): value for key, value in values.items()}


def describe(step: int, num_steps: int, values: Mapping[str, float | None]) -> str:
    """Describe a step in one line: `14:02:11  step  3/12  score 0.412  val 0.350  over 64 prompts  seconds 12.3`."""
    values = with_warmup_named(values)
    shown = [f"{name} {form.format(values[key])}" for name, key, form in COLUMNS if values.get(key) is not None]
    width = len(str(num_steps))
    return "  ".join([time.strftime("%H:%M:%S"), f"step {step:{width}d}/{num_steps}", *shown])
