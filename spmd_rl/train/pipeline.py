"""Order of a pipeline stage's forwards and backwards: one forward, one backward (1F1B). Pure.

PipeDream-Flush (Narayanan et al., arXiv 2006.09503), with micro-batches of any shapes. Several chunks are interleaved
(Narayanan et al., arXiv 2104.04473): stage s of S holds chunks s, s + S, ..., and micro-batches go through in groups of
S or more.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple


class Step(NamedTuple):
    """One forward or backward of a micro-batch through a chunk."""

    microbatch: int
    is_forward: bool
    chunk: int = 0
    """index among the stage's chunks"""


def one_forward_one_backward(stage: int, num_stages: int, count: int, num_chunks: int = 1) -> Iterator[Step]:
    """Yield a stage's steps over `count` micro-batches: each forward and backward once per chunk, in order.

    At most `most_in_flight` forwards await their backward.
    """
    forwards = list(forward_only(num_stages, count, num_chunks))
    ahead = min(len(forwards), most_in_flight(stage, num_stages, count, num_chunks) - 1)
    yield from forwards[:ahead]
    for place, step in enumerate(forwards):
        yield from forwards[ahead + place : ahead + place + 1]
        yield Step(step.microbatch, False, num_chunks - 1 - step.chunk)


def most_in_flight(stage: int, num_stages: int, count: int, num_chunks: int = 1) -> int:
    """Return the most forwards of a micro-batch through a chunk that await their backward."""
    after = num_stages - stage - 1
    if num_chunks == 1:
        return after + 1
    # The last chunk's first forward follows a group's forwards through all other chunks. Its backward returns to this
    # stage after twice the number of stages behind it.
    return 2 * after + (num_chunks - 1) * max(_groups(num_stages, count)) + 1


def forward_only(num_stages: int, count: int, num_chunks: int = 1) -> Iterator[Step]:
    """Yield every stage's steps without training."""
    for first, end in pairwise(accumulate(_groups(num_stages, count), initial=0)):
        for chunk in range(num_chunks):
            yield from (Step(i, True, chunk) for i in range(first, end))


def _groups(num_stages: int, count: int) -> list[int]:
    """Return sizes of groups of micro-batches that pass a chunk in a row: the number of stages or, so that no stage
    waits, slightly more."""
    rounds = max(1, count // num_stages)
    return [count // rounds + (group < count % rounds) for group in range(rounds)]
