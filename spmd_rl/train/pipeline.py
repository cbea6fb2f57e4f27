"""The order in which a pipeline stage runs forwards and backwards: one forward, one backward (1F1B). Pure.

PipeDream-Flush (Narayanan et al., arXiv 2006.09503). torch.distributed.pipelining has the same schedule, but receives
every micro-batch into buffers of one shape; ours differ in their tokens, and every rank knows by how much.

With several chunks the schedule is interleaved (Narayanan et al., arXiv 2104.04473): stage s of S holds every S-th part
of the layers, chunks s, s + S, ..., and what it waits for at the start and at the end is one chunk's work for each
stage, not a whole stage's. Micro-batches go through the chunks in groups of S or more; their number may be any.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple


class Step(NamedTuple):
    """One forward or backward of one micro-batch through one chunk of a stage."""

    microbatch: int
    is_forward: bool
    chunk: int = 0
    """which of the stage's own, in the order of the layers"""


def one_forward_one_backward(stage: int, num_stages: int, count: int, num_chunks: int = 1) -> Iterator[Step]:
    """The steps of a stage over `count` micro-batches: each forward and backward once per chunk, each chunk in order.

    At most `most_in_flight` have been run forward and not yet backward: what a stage keeps of them does not grow with
    their number. With one chunk the last stage, which may be the only one, goes back at once.
    """
    forwards = list(forward_only(num_stages, count, num_chunks))
    ahead = min(len(forwards), most_in_flight(stage, num_stages, count, num_chunks) - 1)
    yield from forwards[:ahead]
    for place, step in enumerate(forwards):
        yield from forwards[ahead + place : ahead + place + 1]
        yield Step(step.microbatch, False, num_chunks - 1 - step.chunk)


def most_in_flight(stage: int, num_stages: int, count: int, num_chunks: int = 1) -> int:
    """How many forwards, each of one micro-batch through one chunk, wait for their backward at most."""
    after = num_stages - stage - 1
    if num_chunks == 1:
        return after + 1
    # The last chunk's first forward comes after a whole group's through the others; its way back meets the way there
    return 2 * after + (num_chunks - 1) * max(_groups(num_stages, count)) + 1


def forward_only(num_stages: int, count: int, num_chunks: int = 1) -> Iterator[Step]:
    """The steps of every stage where nothing is trained."""
    for first, end in pairwise(accumulate(_groups(num_stages, count), initial=0)):
        for chunk in range(num_chunks):
            yield from (Step(i, True, chunk) for i in range(first, end))


def _groups(num_stages: int, count: int) -> list[int]:
    """How many micro-batches follow each other through a chunk: as many as stages, or a few more where they do not
    divide, so that none waits for the stage before; fewer only if there are no more.
    """
    rounds = max(1, count // num_stages)
    return [count // rounds + (group < count % rounds) for group in range(rounds)]
