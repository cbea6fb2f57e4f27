"""`DecodeSteps`: forwards of one token a row, replayed as CUDA graphs.

Launching a small model's kernels one by one takes ten times their work. A graph launches all at once, for fixed shapes:
rows are padded to a power of two, tables to a width.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from spmd_rl.engine.native.attention import Bucket, Paged, causal_mask
from spmd_rl.engine.native.kv import BLOCK, KVPool
from spmd_rl.engine.native.scheduler import RunningSequence

MIN_ROWS, MIN_WIDTH = 8, 128
ONE_BUCKET, MOST_KEYS = 2**16, 2**18
"""Most padded keys of a bucket of mixed lengths, and of a graph"""
# A capture takes as long as a graph saves in five steps (0.1 s on an H200).
# The first loads a shape's kernels, which a capture cannot.
FIRST_STEPS = 4
"""Steps of a shape without a graph"""
MAX_GRAPHS = 64

Shape = tuple[tuple[int, int], ...]
"""Padded rows and width of each bucket"""


class DecodeSteps:
    """Decode steps of a dense module, with a graph for each frequent shape."""

    def __init__(self, module: nn.Module, pool: KVPool, places: dict[int, int]) -> None:
        self._module, self._pool, self._places = module, pool, places
        weight = next(module.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._steps: Counter[Shape] = Counter()
        self._out = torch.empty(0)
        self.num_replayed = 0

    def takes(self, rows: Sequence[RunningSequence]) -> bool:
        """Return True if padding costs less than launches."""
        return bool(rows) and sum(num_rows * width for num_rows, width in _shape(_buckets(rows))) <= MOST_KEYS

    def logits(self, rows: Sequence[RunningSequence]) -> Tensor:
        """Return the logits after each row's only pending token, [R, V]; keys and values go to the pool."""
        buckets = _buckets(rows)
        shape = _shape(buckets)
        found = self._compute(torch.tensor(self._numbers(buckets.values(), shape)), shape)
        begin, places = 0, {}
        for bucket, (num_rows, _) in zip(buckets.values(), shape, strict=True):
            places |= {id(row): begin + i for i, row in enumerate(bucket)}
            begin += num_rows
        return found[torch.tensor([places[id(row)] for row in rows], device=self._device)]

    def forget(self) -> None:
        """Drop all graphs, which hold addresses."""
        self._graphs.clear()
        self._steps.clear()
        self._out = torch.empty(0)

    def _compute(self, numbers: Tensor, shape: Shape) -> Tensor:
        if shape not in self._graphs:
            self._steps[shape] += 1
            is_full = len(self._graphs) == MAX_GRAPHS
            if self._device.type != "cuda" or self._steps[shape] <= FIRST_STEPS or is_full:
                return self._forward(numbers.to(self._device), shape)
            self._graphs[shape] = self._captured(numbers, shape)
        graph, given, logits = self._graphs[shape]
        given.copy_(numbers)
        graph.replay()
        self.num_replayed += 1
        return logits

    def _captured(self, numbers: Tensor, shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        graph, given, num_rows = torch.cuda.CUDAGraph(), numbers.to(self._device), sum(num for num, _ in shape)
        if len(self._out) < num_rows:
            self._out = self._forward(given, shape)
        logits = self._out[:num_rows]
        memory = next((other.pool() for other, _, _ in self._graphs.values()), None)
        # Threads of NCCL and of exports use the device meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            logits.copy_(self._forward(given, shape))
        return graph, given, logits

    def _numbers(self, buckets: Iterable[Sequence[RunningSequence]], shape: Shape) -> list[int]:
        # Ids, positions, tables. Padding is token 0 in the pool's spare block.
        ids, positions, tables = [], [], []
        for bucket, (num_rows, width) in zip(buckets, shape, strict=True):
            blank, num_blocks = num_rows - len(bucket), width // BLOCK
            ids += [row.fed[0] for row in bucket] + [0] * blank
            positions += [row.num_stored for row in bucket] + [0] * blank
            for row in bucket:
                table = row.table[:num_blocks]
                tables += table + table[:1] * (num_blocks - len(table))
            tables += [self._pool.num_blocks] * (blank * num_blocks)
        return ids + positions + tables

    def _forward(self, numbers: Tensor, shape: Shape) -> Tensor:
        num_tokens, first = sum(num_rows for num_rows, _ in shape), 0
        ids, positions, rest = numbers.tensor_split((num_tokens, 2 * num_tokens))
        slots, buckets = [], []
        for num_rows, width in shape:
            tables, rest = rest.tensor_split((num_rows * width // BLOCK,))
            tables, own = tables.unflatten(0, (num_rows, -1)), positions[first : first + num_rows, None]
            slots.append((tables.gather(1, own // BLOCK) * BLOCK + own % BLOCK)[:, 0])
            mask = causal_mask(own, width, self._dtype)[:, None, None]
            buckets.append(Bucket(slice(first, first + num_rows), tables, mask))
            first += num_rows
        kv = Paged(self._pool, torch.cat(slots), tuple(buckets), self._places)
        return self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False, kv=kv).logits[0]


def can_be_captured(module: nn.Module) -> bool:
    """Return True if a dense module's forward surely reads nothing back."""
    # These rotary tables depend on the largest position.
    kinds = [str(getattr(part, "rope_type", "")) for part in module.modules()]
    own = type(module).__module__.startswith("transformers.models.")
    return own and not any("dynamic" in kind or "longrope" in kind for kind in kinds)


def _buckets(rows: Sequence[RunningSequence]) -> dict[int, list[RunningSequence]]:
    """Return the rows of each width."""
    widest, buckets = max(map(_width, rows)), defaultdict[int, list[RunningSequence]](list)
    # Few keys are sooner read with padding than in a graph more for each mix of lengths.
    is_one = _padded(len(rows), MIN_ROWS) * widest <= ONE_BUCKET
    for row in sorted(rows, key=_width):
        buckets[widest if is_one else _width(row)].append(row)
    return buckets


def _shape(buckets: Mapping[int, list[RunningSequence]]) -> Shape:
    return tuple((_padded(len(bucket), MIN_ROWS), width) for width, bucket in buckets.items())


def _padded(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _width(row: RunningSequence) -> int:
    return _padded(row.num_tokens, MIN_WIDTH)
